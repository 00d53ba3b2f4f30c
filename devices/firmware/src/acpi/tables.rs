//! FADT, MADT and MCFG.

use acpi_tables::fadt::{FADT, FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::{Aml, AmlSink, aml_as_bytes};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, to_bytes};
use crate::layout;
use crate::map::MachineMap;

/// IAPC_BOOT_ARCH (5.2.9.3): no VGA, no ASPM, no CMOS clock. The clear bits mean: no ISA devices beyond the DSDT's, and
/// no keyboard controller.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 4 | 1 << 5;
const HYPERVISOR_VENDOR: u64 = u64::from_le_bytes(*b"CAUSEWAY");

fn port(address: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(address))
}

/// Hardware-reduced: no fixed hardware beyond these registers. The set power-button flag means a control-method button,
/// which the DSDT has.
pub(super) fn fadt(map: &MachineMap, dsdt: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = port(map.power.reset);
    fadt.reset_value = map.power.reset_value;
    fadt.sleep_control_reg = port(map.power.sleep_control);
    fadt.sleep_status_reg = port(map.power.sleep_status);
    fadt.hypervisor_vendor_identity = HYPERVISOR_VENDOR.into();
    fadt.finalize()
}

/// Local APIC NMI structure (5.2.12.7), which the crate lacks.
#[derive(Clone, IntoBytes, Immutable)]
#[repr(C, packed)]
struct LocalApicNmi {
    kind: u8,
    length: u8,
    processor_uid: u8,
    flags: U16,
    lint: u8,
}
aml_as_bytes!(LocalApicNmi);

/// Processor local x2APIC structure (5.2.12.12), which the crate lacks.
#[derive(Clone, IntoBytes, Immutable)]
#[repr(C, packed)]
struct LocalX2Apic {
    kind: u8,
    length: u8,
    reserved: U16,
    apic_id: U32,
    flags: U32,
    processor_uid: U32,
}
aml_as_bytes!(LocalX2Apic);

/// Local x2APIC NMI structure (5.2.12.13), which the crate lacks.
#[derive(Clone, IntoBytes, Immutable)]
#[repr(C, packed)]
struct LocalX2ApicNmi {
    kind: u8,
    length: u8,
    flags: U16,
    processor_uid: U32,
    lint: u8,
    reserved: [u8; 3],
}
aml_as_bytes!(LocalX2ApicNmi);

pub(super) fn madt(map: &MachineMap) -> Vec<u8> {
    let local_apic = LocalInterruptController::Address(address32(layout::LOCAL_APIC));
    let mut madt = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, local_apic);
    for (uid, cpu) in (0u8..).zip(&map.cpus) {
        if map.x2apic {
            madt.add_structure(LocalX2Apic {
                kind: 9,
                length: 16,
                reserved: U16::new(0),
                apic_id: U32::new(cpu.apic_id.into()),
                // Enabled.
                flags: U32::new(1),
                processor_uid: U32::new(uid.into()),
            });
        } else {
            madt.add_structure(ProcessorLocalApic::new(uid, cpu.apic_id, EnabledStatus::Enabled));
        }
    }
    madt.add_structure(IoApic::new(layout::IO_APIC_ID, address32(layout::IO_APIC), 0));
    if map.x2apic {
        madt.add_structure(LocalX2ApicNmi {
            kind: 10,
            length: 12,
            flags: U16::new(0),
            // All processors.
            processor_uid: U32::new(u32::MAX),
            lint: 1,
            reserved: [0; 3],
        });
    } else {
        madt.add_structure(LocalApicNmi {
            kind: 4,
            length: 6,
            // All processors.
            processor_uid: 0xff,
            flags: U16::new(0),
            lint: 1,
        });
    }
    to_bytes(&madt)
}

pub(super) fn mcfg() -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(layout::ECAM.start, 0, 0, 0);
    to_bytes(&mcfg)
}

/// Converts a fixed address of the layout. All of them are below 4 GiB.
pub(super) const fn address32(address: u64) -> u32 {
    assert!(address <= u32::MAX as u64);
    let bytes = address.to_le_bytes();
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
