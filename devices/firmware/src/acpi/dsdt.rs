//! DSDT: the devices that can't be enumerated. The AML is generated at boot from the machine map.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, EISAName, Else, Equal, Field,
    FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, If, Interrupt, Local, Memory32Fixed,
    Method, Name, NotEqual, Notify, ONE, OpRegion, OpRegionSpace, Or, Package, PackageBuilder, Path,
    ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};

use super::tables::address32;
use super::{table, to_bytes};
use crate::layout;
use crate::map::{AddressRange, MachineMap};

/// SLP_TYP of S5, which the guest writes to the sleep control register.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Bit of the power button in the event register.
const EVENT_POWER_BUTTON: u8 = 1;
/// Notification value: the button was pressed (5.6.6, table 5.155).
const BUTTON_PRESSED: u8 = 0x80;

/// `_OSC` of a PCI host bridge (PCI firmware specification 3.3, 4.5.1).
const PCI_OSC_UUID: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";
/// Features that the OS may control: native hot plug, PME, AER, PCIe capabilities; not SHPC hot plug.
const OSC_GRANTED: u8 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4;
const OSC_UNKNOWN_UUID: u8 = 1 << 2;
const OSC_UNKNOWN_REVISION: u8 = 1 << 3;
const OSC_MASKED: u8 = 1 << 4;

/// Low I/O ports belong to the PCI root, too. Fixed devices among them have their own entries.
const LOW_IO_LAST: u16 = 0x0cf7;
const CONFIGURATION_PORTS: u16 = 0x0cf8;

pub(super) fn build(map: &MachineMap) -> Vec<u8> {
    let mut aml = Vec::new();
    let s5 = Name::new(path("_S5_"), &Package::new(vec![&SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO]));
    s5.to_aml_bytes(&mut aml);

    let mut devices = Vec::new();
    devices.extend(pci_root(map));
    devices.extend(reserved(map));
    if map.console {
        devices.extend(console());
    }
    devices.extend(power_button());
    devices.extend(event_device(map));
    aml.extend(Scope::raw(path("\\_SB_"), devices));
    table(*b"DSDT", 2, &aml)
}

fn path(name: &str) -> Path {
    Path::new(name)
}

fn pci_root(map: &MachineMap) -> Vec<u8> {
    let bus = AddressSpace::new_bus_number(0u16, 0u16);
    let configuration = IO::new(CONFIGURATION_PORTS, CONFIGURATION_PORTS, 1, 8);
    let low_io = AddressSpace::new_io(0u16, LOW_IO_LAST, None);
    let io = AddressSpace::new_io(layout::PCI_IO_FIRST, layout::PCI_IO_LAST, None);
    let memory32 = window32(map.pci.memory32);
    let memory64 = map.pci.memory64.map(window64);
    let mut resources: Vec<&dyn Aml> = vec![&bus, &configuration, &low_io, &io, &memory32];
    resources.extend(memory64.as_ref().map(|window| window as &dyn Aml));
    let routes = routing(map);
    let osc_uuid = Uuid::new(PCI_OSC_UUID);

    to_bytes(&Device::new(
        path("PCI0"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0A08")),
            &Name::new(path("_CID"), &EISAName::new("PNP0A03")),
            &Name::new(path("_SEG"), &ZERO),
            &Name::new(path("_BBN"), &ZERO),
            &Name::new(path("_UID"), &ZERO),
            // DMA is coherent.
            &Name::new(path("_CCA"), &ONE),
            &Name::new(path("_CRS"), &ResourceTemplate::new(resources)),
            &Name::new(path("_PRT"), &routes),
            &osc(&osc_uuid).aml(),
        ],
    ))
}

fn window32(range: AddressRange) -> AddressSpace<u32> {
    // The map was checked: the window ends below 4 GiB.
    let (first, last) = (address32(range.start), address32(range.start + (range.len - 1)));
    AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None)
}

fn window64(range: AddressRange) -> AddressSpace<u64> {
    let last = range.start + (range.len - 1);
    AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, range.start, last, None)
}

/// `_PRT` (6.2.13): address 0xSSSSFFFF (any function), pin, no link device, I/O APIC pin.
fn routing(map: &MachineMap) -> PackageBuilder {
    let mut routes = PackageBuilder::new();
    for route in &map.pci_routes {
        let address = u32::from(route.slot) << 16 | 0xffff;
        routes.add_element(&Package::new(vec![&address, &route.pin, &ZERO, &route.gsi]));
    }
    routes
}

/// AML that is already generated.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

struct Osc<'a> {
    uuid: &'a Uuid,
}

fn osc(uuid: &Uuid) -> Osc<'_> {
    Osc { uuid }
}

impl Osc<'_> {
    /// Grants requested features within [`OSC_GRANTED`].
    fn aml(&self) -> Raw {
        let (status, control) = (path("CDW1"), path("CDW3"));
        Raw(to_bytes(&Method::new(
            path("_OSC"),
            4,
            true,
            vec![
                &CreateDWordField::new(&status, &Arg(3), &ZERO),
                &If::new(
                    &Equal::new(&Arg(0), self.uuid),
                    vec![
                        &CreateDWordField::new(&control, &Arg(3), &8u8),
                        &And::new(&Local(0), &control, &OSC_GRANTED),
                        &If::new(
                            &NotEqual::new(&Arg(1), &ONE),
                            vec![&Or::new(&status, &status, &OSC_UNKNOWN_REVISION)],
                        ),
                        &If::new(
                            &NotEqual::new(&control, &Local(0)),
                            vec![&Or::new(&status, &status, &OSC_MASKED)],
                        ),
                        &Store::new(&control, &Local(0)),
                    ],
                ),
                &Else::new(vec![&Or::new(&status, &status, &OSC_UNKNOWN_UUID)]),
                &Return::new(&Arg(3)),
            ],
        )))
    }
}

/// Address ranges in use that no device below owns: the ECAM window, which Linux requires to be reserved, and the power
/// registers.
fn reserved(map: &MachineMap) -> Vec<u8> {
    let (base, len) = (address32(layout::ECAM.start), address32(layout::ECAM.len));
    let first = map.power.reset;
    to_bytes(&Device::new(
        path("RSVD"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0C02")),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![
                    &Memory32Fixed::new(true, base, len),
                    &IO::new(first, first, 1, POWER_PORTS),
                ]),
            ),
        ],
    ))
}

/// Ports reserved from the reset register on.
const POWER_PORTS: u8 = 16;

fn console() -> Vec<u8> {
    to_bytes(&Device::new(
        path("COM1"),
        vec![
            &Name::new(path("_HID"), &EISAName::new("PNP0501")),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(path("_DDN"), &"COM1"),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![
                    &Interrupt::new(true, true, false, false, layout::COM1_GSI),
                    &IO::new(layout::COM1, layout::COM1, 1, 8),
                ]),
            ),
        ],
    ))
}

fn power_button() -> Vec<u8> {
    to_bytes(&Device::new(
        path("PWRB"),
        vec![&Name::new(path("_HID"), &EISAName::new("PNP0C0C")), &Name::new(path("_UID"), &ZERO)],
    ))
}

/// Generic event device (5.6.9): its interrupt reports that the event register isn't zero.
fn event_device(map: &MachineMap) -> Vec<u8> {
    let port = map.power.events;
    let events = path("EVNT");
    to_bytes(&Device::new(
        path("GED_"),
        vec![
            &Name::new(path("_HID"), &"ACPI0013"),
            &Name::new(path("_UID"), &ZERO),
            &Name::new(
                path("_CRS"),
                &ResourceTemplate::new(vec![&Interrupt::new(true, true, false, false, layout::EVENT_GSI)]),
            ),
            &OpRegion::new(path("EREG"), OpRegionSpace::SystemIO, &port, &ONE),
            &Field::new(
                path("EREG"),
                FieldAccessType::Byte,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"EVNT", 8)],
            ),
            &Method::new(
                path("_EVT"),
                1,
                true,
                vec![
                    // Read once: a read clears the register.
                    &Store::new(&Local(0), &events),
                    &And::new(&Local(1), &Local(0), &EVENT_POWER_BUTTON),
                    &If::new(
                        &Equal::new(&Local(1), &EVENT_POWER_BUTTON),
                        vec![&Notify::new(&path("\\_SB_.PWRB"), &BUTTON_PRESSED)],
                    ),
                ],
            ),
        ],
    ))
}
