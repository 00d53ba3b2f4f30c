//! ACPI tables for a hardware-reduced PC (ACPI specification 6.5).
//!
//! ```text
//! RSDP -> XSDT -> FADT -> DSDT    devices: PCI root, console, power button, event device
//!              -> MADT            CPUs, I/O APIC
//!              -> MCFG            ECAM window of bus 0
//!              -> SRAT, SLIT      NUMA nodes, when there are any
//! ```

mod dsdt;
mod numa;
mod tables;
#[cfg(test)]
mod tests;

use acpi_tables::Aml;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use machine::memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError};
use machine::x86::{MAX_APIC_ID, MAX_VCPUS};

use crate::layout;
use crate::map::MachineMap;

/// OEM id of all tables.
pub const OEM_ID: [u8; 6] = *b"CAUSWY";
/// OEM table id of all tables.
pub const OEM_TABLE_ID: [u8; 8] = *b"CAUSEWAY";
const OEM_REVISION: u32 = 1;
/// Tables begin at multiples of this.
const ALIGNMENT: u64 = 16;

/// The tables can't be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// The tables don't fit.
    #[error("The ACPI tables need {needed} bytes and there is room for {room}; give the VM fewer NUMA nodes")]
    TooBig {
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        room: u64,
    },
    /// The machine can't be described.
    #[error("The machine can't be described by ACPI tables: {what}")]
    Machine {
        /// What is wrong, with the values.
        what: String,
    },
    /// Guest memory refused a write.
    #[error("Guest memory at {address:#x} can't hold the ACPI tables")]
    Memory {
        /// Guest-physical address.
        address: u64,
        /// Error of the guest memory.
        #[source]
        source: GuestMemoryError,
    },
}

/// Writes all tables at [`layout::ACPI_TABLES`]; returns the address of the RSDP.
pub fn write(memory: &GuestMemory, map: &MachineMap) -> Result<u64, AcpiError> {
    let address = layout::ACPI_TABLES;
    let bytes = build(map, address)?;
    memory
        .write_slice(&bytes, GuestAddress(address))
        .map_err(|source| AcpiError::Memory { address, source })?;
    Ok(address)
}

/// Builds all tables for the address `base`, with the RSDP first.
fn build(map: &MachineMap, base: u64) -> Result<Vec<u8>, AcpiError> {
    check(map)?;
    let mut bytes = vec![0u8; Rsdp::len()];
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);

    let dsdt = append(&mut bytes, base, &dsdt::build(map));
    let fadt = append(&mut bytes, base, &to_bytes(&tables::fadt(map, dsdt)));
    xsdt.add_entry(fadt);
    for table in [tables::madt(map), tables::mcfg()] {
        xsdt.add_entry(append(&mut bytes, base, &table));
    }
    if !map.node_distances.is_empty() {
        for table in [numa::srat(map), numa::slit(map)] {
            xsdt.add_entry(append(&mut bytes, base, &table));
        }
    }
    let xsdt = append(&mut bytes, base, &to_bytes(&xsdt));
    let rsdp = to_bytes(&Rsdp::new(OEM_ID, xsdt));
    bytes[..rsdp.len()].copy_from_slice(&rsdp);

    let (needed, room) = (bytes.len() as u64, layout::ACPI_TABLES_END - layout::ACPI_TABLES);
    if needed > room { Err(AcpiError::TooBig { needed, room }) } else { Ok(bytes) }
}

/// Appends a table at an aligned offset; returns its guest-physical address.
fn append(bytes: &mut Vec<u8>, base: u64, table: &[u8]) -> u64 {
    while !(bytes.len() as u64).is_multiple_of(ALIGNMENT) {
        bytes.push(0);
    }
    let address = base + bytes.len() as u64;
    bytes.extend_from_slice(table);
    address
}

fn to_bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Builds a table with a body of bytes.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    const HEADER_BYTES: u32 = 36;
    let mut table = Sdt::new(signature, HEADER_BYTES, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(body);
    table.as_slice().to_vec()
}

fn check(map: &MachineMap) -> Result<(), AcpiError> {
    let error = |what| Err(AcpiError::Machine { what });
    if map.cpus.is_empty() || map.cpus.len() > MAX_VCPUS as usize {
        return error(format!("{} CPUs; 1 to {MAX_VCPUS} are possible", map.cpus.len()));
    }
    let mut seen = [false; 256];
    for cpu in &map.cpus {
        if u32::from(cpu.apic_id) > MAX_APIC_ID || seen[usize::from(cpu.apic_id)] {
            return error(format!("APIC id {} is out of range or given twice", cpu.apic_id));
        }
        seen[usize::from(cpu.apic_id)] = true;
    }
    let windows = [Some(map.pci.memory32), map.pci.memory64];
    for window in windows.into_iter().flatten() {
        if window.len == 0 || window.start.checked_add(window.len).is_none() {
            return error(format!("a PCI window of {:#x} bytes at {:#x}", window.len, window.start));
        }
    }
    if u32::try_from(map.pci.memory32.start + (map.pci.memory32.len - 1)).is_err() {
        return error(format!("the 32-bit PCI window ends at {:#x}", map.pci.memory32.end()));
    }
    for route in &map.pci_routes {
        if route.slot > 31 || route.pin > 3 {
            return error(format!("an interrupt route for slot {}, pin {}", route.slot, route.pin));
        }
    }
    numa::check(map)
}
