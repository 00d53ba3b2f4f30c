//! Initial register values of the boot CPU, in no hypervisor's format.

/// A segment register with its hidden part (Intel SDM volume 3, 3.4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Base address.
    pub base: u64,
    /// Limit in bytes.
    pub limit: u32,
    /// Type field, 4 bits.
    pub kind: u8,
    /// S: code or data (not system).
    pub code_or_data: bool,
    /// DPL.
    pub privilege: u8,
    /// P.
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

/// What the boot CPU starts with. Registers not named are zero; interrupts are off.
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
    /// Flags.
    pub rflags: u64,
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER MSR.
    pub efer: u64,
    /// CS.
    pub code: Segment,
    /// DS, ES, FS, GS and SS.
    pub data: Segment,
    /// TR.
    pub task: Segment,
    /// GDTR.
    pub gdt: TableRegister,
    /// IDTR.
    pub idt: TableRegister,
}
