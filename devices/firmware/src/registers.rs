//! Initial register values of the boot CPU, independent of any hypervisor's format.

use crate::layout;

/// A segment register with its hidden part (Intel SDM volume 3, 3.4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Selector: bits 15:3 index the GDT, bits 1:0 are the requested privilege level.
    pub selector: u16,
    /// Base address.
    pub base: u64,
    /// Limit in bytes.
    pub limit: u32,
    /// Type field, 4 bits.
    pub kind: u8,
    /// S: code or data (not system).
    pub code_or_data: bool,
    /// DPL: privilege level, 0 to 3.
    pub privilege: u8,
    /// P: present.
    pub present: bool,
    /// L: 64-bit code.
    pub long: bool,
    /// D/B: 32-bit.
    pub default_32: bool,
    /// G: limit counts pages in the descriptor.
    pub granularity: bool,
}

/// GDTR or IDTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableRegister {
    /// Base address.
    pub base: u64,
    /// Limit: bytes minus one.
    pub limit: u16,
}

/// Start values of the boot CPU. Registers not named are zero; interrupts are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BootRegisters {
    /// Instruction pointer.
    pub rip: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// PVH: physical address of `hvm_start_info`.
    pub rbx: u64,
    /// Linux: physical address of `boot_params`.
    pub rsi: u64,
    /// Flags: only the reserved bit, so interrupts are off.
    pub rflags: u64,
    /// CR0: protected mode, and paging for 64-bit code.
    pub cr0: u64,
    /// CR3: physical address of the page tables; 0 without paging.
    pub cr3: u64,
    /// CR4: PAE for 64-bit code.
    pub cr4: u64,
    /// EFER MSR.
    pub efer: u64,
    /// CS: flat, for 32- or 64-bit code.
    pub code: Segment,
    /// DS, ES, FS, GS and SS.
    pub data: Segment,
    /// TR: a busy task state segment, which VM entry requires.
    pub task: Segment,
    /// GDTR: the boot GDT.
    pub gdt: TableRegister,
    /// IDTR: empty, so any exception or interrupt is a triple fault.
    pub idt: TableRegister,
}

/// Bit 1 of RFLAGS always reads 1.
pub const RFLAGS_RESERVED: u64 = 1 << 1;
/// Selectors of the boot GDT; the first two are what Linux calls `__BOOT_CS` and `__BOOT_DS`.
pub const CODE_SELECTOR: u16 = 0x10;
/// DS, ES, FS, GS and SS.
pub const DATA_SELECTOR: u16 = 0x18;
/// Task state.
pub const TASK_SELECTOR: u16 = 0x20;
/// Bytes of the boot GDT: two unused entries, code, data, task state (two entries in long mode).
pub(crate) const GDT_BYTES: usize = 6 * 8;

/// Execute, read, accessed.
const KIND_CODE: u8 = 0b1011;
/// Read, write, accessed.
const KIND_DATA: u8 = 0b0011;
/// Busy 32- or 64-bit task state.
const KIND_BUSY_TASK: u8 = 0b1011;

impl Segment {
    /// Returns the segment descriptor (Intel SDM volume 3, 3.4.5). It lacks the base's upper half, which only long-mode
    /// system descriptors have: bases here are below 4 GiB.
    pub const fn descriptor(&self) -> u64 {
        let limit = (if self.granularity { self.limit >> 12 } else { self.limit }) as u64;
        let access = (self.kind as u64 & 0xf)
            | (self.code_or_data as u64) << 4
            | (self.privilege as u64 & 3) << 5
            | (self.present as u64) << 7;
        let flags = (self.long as u64) << 1 | (self.default_32 as u64) << 2 | (self.granularity as u64) << 3;
        (limit & 0xffff)
            | (self.base & 0xff_ffff) << 16
            | access << 40
            | (limit >> 16 & 0xf) << 48
            | flags << 52
            | (self.base >> 24 & 0xff) << 56
    }
}

/// Flat segment of 4 GiB.
fn flat(selector: u16, kind: u8) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        kind,
        code_or_data: true,
        privilege: 0,
        present: true,
        long: false,
        default_32: true,
        granularity: true,
    }
}

/// CS for 64-bit code.
pub(crate) fn code64() -> Segment {
    Segment { long: true, default_32: false, ..flat(CODE_SELECTOR, KIND_CODE) }
}

/// CS for 32-bit code.
pub(crate) fn code32() -> Segment {
    flat(CODE_SELECTOR, KIND_CODE)
}

/// Data segments.
pub(crate) fn data() -> Segment {
    flat(DATA_SELECTOR, KIND_DATA)
}

/// TR: VM entry requires a valid one. Kernels load their own before they use it.
pub(crate) fn task() -> Segment {
    Segment {
        selector: TASK_SELECTOR,
        limit: 0x67,
        kind: KIND_BUSY_TASK,
        present: true,
        ..Segment::default()
    }
}

/// GDTR: the boot GDT at [`layout::GDT`].
pub(crate) fn gdt() -> TableRegister {
    TableRegister { base: layout::GDT, limit: GDT_LIMIT }
}

const GDT_LIMIT: u16 = 6 * 8 - 1;
const _: () = {
    assert!(GDT_LIMIT as usize == GDT_BYTES - 1);
    assert!(GDT_BYTES as u64 == layout::GDT_ENTRIES * 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_numbers() {
        assert_eq!(code64().descriptor(), 0x00af_9b00_0000_ffff);
        assert_eq!(code32().descriptor(), 0x00cf_9b00_0000_ffff);
        assert_eq!(data().descriptor(), 0x00cf_9300_0000_ffff);
        assert_eq!(task().descriptor(), 0x0000_8b00_0000_0067);
    }
}
