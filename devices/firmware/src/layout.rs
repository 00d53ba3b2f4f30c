//! Every fixed guest-physical address and I/O port of the machine, in one place.
//!
//! ```text
//! 0x0000_0000  RAM: boot structures below 0x9_FC00, ACPI tables at 0xE_0000, kernel from 1 MiB
//! 0xC000_0000  32-bit PCI window
//! 0xE000_0000  ECAM, bus 0
//! 0xE010_0000  free up to the interrupt controllers
//! 0xFEC0_0000  I/O APIC     0xFEE0_0000  local APICs     0xFFFB_C000  KVM's own pages
//! 0x1_0000_0000  RAM above 4 GiB, then the 64-bit PCI window
//! ```

use machine::x86::MAX_APIC_ID;

use crate::ranges::{AddressRange, RamRange};

/// One page.
pub const PAGE_SIZE: u64 = 0x1000;
/// One MiB.
pub const MIB: u64 = 1 << 20;
/// One GiB.
pub const GIB: u64 = 1 << 30;

/// RAM below 4 GiB ends here at the latest.
pub const LOW_RAM_END: u64 = 3 * GIB;
/// RAM that doesn't fit below the hole continues here.
pub const HIGH_RAM_START: u64 = 4 * GIB;
/// Smallest RAM a machine can have.
pub const MINIMUM_RAM: u64 = 16 * MIB;

/// Global descriptor table: two unused entries, code, data, task state.
pub const GDT: u64 = 0x500;
/// Entries of the table at [`GDT`].
pub const GDT_ENTRIES: u64 = 6;
/// PVH `hvm_start_info`.
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH module list.
pub const PVH_MODULES: u64 = 0x6100;
/// PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x6200;
/// Linux `boot_params` ("zero page"), one page.
pub const ZERO_PAGE: u64 = 0x7000;
/// Stack of the boot CPU, growing down.
pub const BOOT_STACK_TOP: u64 = 0x8ff0;
/// Page map level 4, one page.
pub const PML4: u64 = 0x9000;
/// Page directory pointer table, one page.
pub const PDPT: u64 = 0xa000;
/// Page directories: four pages, 2 MiB entries, identity map of the first 4 GiB.
pub const PAGE_DIRECTORIES: u64 = 0xb000;
/// Kernel command line with its NUL.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Bytes reserved at [`COMMAND_LINE`], NUL included.
pub const COMMAND_LINE_CAPACITY: u64 = 0x1_0000;
/// End of conventional memory. The memory map reserves the rest up to 1 MiB.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// ACPI tables. The RSDP is first, where a scan for it begins.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// End of the space for ACPI tables.
pub const ACPI_TABLES_END: u64 = 0xf_f000;
/// Start of a PC's BIOS (F000:FFF0), 16 bytes.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Kernels and initrds are at or above this address.
pub const KERNEL_MINIMUM: u64 = MIB;

/// 32-bit PCI memory window.
pub const PCI_MEMORY32: AddressRange = AddressRange { start: LOW_RAM_END, len: 512 * MIB };
/// ECAM window: bus 0 only, 4 KiB per function.
pub const ECAM: AddressRange = AddressRange { start: 0xe000_0000, len: MIB };
/// PCI I/O window: first port.
pub const PCI_IO_FIRST: u16 = 0x1000;
/// PCI I/O window: last port.
pub const PCI_IO_LAST: u16 = 0xffff;
/// Alignment and minimum size of the 64-bit PCI window.
pub const PCI_MEMORY64_ALIGNMENT: u64 = 64 * GIB;

/// I/O APIC.
pub const IO_APIC: u64 = 0xfec0_0000;
/// I/O APIC id.
pub const IO_APIC_ID: u8 = 0xfe;
const _: () = assert!(IO_APIC_ID as u32 > MAX_APIC_ID);
/// Local APICs.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Page for `KVM_SET_IDENTITY_MAP_ADDR`.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for `KVM_SET_TSS_ADDR`.
pub const KVM_TSS: u64 = 0xfffb_d000;

/// First console: I/O port base, 8 ports.
pub const COM1: u16 = 0x3f8;
/// First console: I/O APIC pin.
pub const COM1_GSI: u32 = 4;
/// Reset, sleep and event registers: I/O port base.
pub const POWER_REGISTERS: u16 = 0x600;
/// Generic event device (power button): I/O APIC pin, edge-triggered. Not below 16: those pins are connected to the
/// PICs, too. There a pulse would stay latched, since no kernel uses the PICs on this machine.
pub const EVENT_GSI: u32 = 20;
/// I/O APIC pins for PCI INTx, level-triggered.
pub const PCI_GSIS: [u32; 4] = [16, 17, 18, 19];

const _: () = {
    assert!(GDT + GDT_ENTRIES * 8 <= PVH_START_INFO);
    assert!(PVH_START_INFO < PVH_MODULES && PVH_MODULES < PVH_MEMORY_MAP && PVH_MEMORY_MAP < ZERO_PAGE);
    assert!(ZERO_PAGE + PAGE_SIZE <= BOOT_STACK_TOP);
    assert!(BOOT_STACK_TOP < PML4 && PML4 + PAGE_SIZE == PDPT && PDPT + PAGE_SIZE == PAGE_DIRECTORIES);
    assert!(PAGE_DIRECTORIES + 4 * PAGE_SIZE <= COMMAND_LINE);
    assert!(COMMAND_LINE + COMMAND_LINE_CAPACITY <= CONVENTIONAL_END);
    assert!(
        CONVENTIONAL_END < ACPI_TABLES && ACPI_TABLES < ACPI_TABLES_END && ACPI_TABLES_END <= KERNEL_MINIMUM
    );
    assert!(PCI_MEMORY32.start + PCI_MEMORY32.len <= ECAM.start);
    assert!(ECAM.start.is_multiple_of(256 * MIB));
    assert!(ECAM.start + ECAM.len <= IO_APIC);
    assert!(IO_APIC + PAGE_SIZE <= LOCAL_APIC && LOCAL_APIC + PAGE_SIZE <= KVM_IDENTITY_MAP);
    assert!(KVM_IDENTITY_MAP + PAGE_SIZE == KVM_TSS && KVM_TSS + 3 * PAGE_SIZE <= HIGH_RAM_START);
};

/// Places NUMA nodes of the given sizes (bytes, whole pages) consecutively below and above the hole.
pub fn place_ram(node_sizes: &[u64]) -> Vec<RamRange> {
    let mut ranges = Vec::with_capacity(node_sizes.len() + 1);
    let mut next = 0u64;
    for (node, &size) in (0u32..).zip(node_sizes) {
        let mut left = size;
        if next < LOW_RAM_END && left > 0 {
            let len = left.min(LOW_RAM_END - next);
            ranges.push(RamRange { range: AddressRange { start: next, len }, node });
            next += len;
            left -= len;
        }
        if next == LOW_RAM_END {
            next = HIGH_RAM_START;
        }
        if left > 0 {
            ranges.push(RamRange { range: AddressRange { start: next, len: left }, node });
            next = next.saturating_add(left);
        }
    }
    ranges
}

/// Returns the 64-bit PCI window of a machine with this RAM whose CPUs have `physical_bits` address bits. It starts at
/// the next aligned address above RAM, and has at most half of the address space. Returns `None` if there is no room.
pub fn pci_memory64(ram: &[RamRange], physical_bits: u8) -> Option<AddressRange> {
    let limit = 1u64.checked_shl(u32::from(physical_bits.min(52)))?;
    let ram_end = ram.iter().map(|r| r.range.end()).max().unwrap_or(0).max(HIGH_RAM_START);
    let start = ram_end.checked_next_multiple_of(PCI_MEMORY64_ALIGNMENT)?;
    let len = limit.checked_sub(start)?.min(limit / 2);
    let len = len - len % PCI_MEMORY64_ALIGNMENT;
    (len > 0).then_some(AddressRange { start, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_split_at_the_hole_and_keeps_its_node() {
        let placed = place_ram(&[2 * GIB, 2 * GIB, GIB]);
        let flat: Vec<_> = placed.iter().map(|r| (r.range.start, r.range.len, r.node)).collect();
        assert_eq!(flat, [(0, 2 * GIB, 0), (2 * GIB, GIB, 1), (4 * GIB, GIB, 1), (5 * GIB, GIB, 2)]);
        assert_eq!(place_ram(&[3 * GIB]).len(), 1);
        assert_eq!(place_ram(&[3 * GIB, GIB])[1].range.start, 4 * GIB);
    }

    #[test]
    fn the_64_bit_window_lies_above_ram_and_within_the_address_bits() {
        let window = pci_memory64(&place_ram(&[GIB]), 40).unwrap();
        assert_eq!((window.start, window.len), (64 * GIB, 512 * GIB));
        let window = pci_memory64(&place_ram(&[100 * GIB]), 40).unwrap();
        assert_eq!(window.start, 128 * GIB);
        assert!(window.end() <= 1 << 40);
        assert_eq!(pci_memory64(&place_ram(&[100 * GIB]), 36), None);
        // 36 bits are 64 GiB: nothing is left above an aligned start.
        assert_eq!(pci_memory64(&place_ram(&[GIB]), 36), None);
    }
}
