//! Registers that paging and segmentation depend on.

/// CR0.PE: protected mode.
pub const CR0_PE: u64 = 1;
/// CR0.WP: supervisor writes obey read-only pages.
pub const CR0_WP: u64 = 1 << 16;
/// CR0.PG: paging.
pub const CR0_PG: u64 = 1 << 31;
/// CR4.PSE: pages of 4 MiB in 32-bit paging.
pub const CR4_PSE: u64 = 1 << 4;
/// CR4.PAE: entries of 64 bits.
pub const CR4_PAE: u64 = 1 << 5;
/// CR4.LA57: 5-level paging.
pub const CR4_LA57: u64 = 1 << 12;
/// CR4.SMEP: the supervisor executes no user pages.
pub const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP: the supervisor accesses no user pages unless RFLAGS.AC is set.
pub const CR4_SMAP: u64 = 1 << 21;
/// CR4.PKE: protection keys of user pages.
pub const CR4_PKE: u64 = 1 << 22;
/// CR4.PKS: protection keys of supervisor pages.
pub const CR4_PKS: u64 = 1 << 24;
/// EFER.LMA: the processor is in IA-32e mode.
pub const EFER_LMA: u64 = 1 << 10;
/// EFER.NXE: bit 63 of entries forbids execution.
pub const EFER_NXE: u64 = 1 << 11;
/// RFLAGS.AC: SMAP is suspended.
pub const RFLAGS_AC: u64 = 1 << 18;
/// RFLAGS.VM: virtual-8086 mode.
pub const RFLAGS_VM: u64 = 1 << 17;

/// Registers of one vCPU before the instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagingState {
    /// CR0: paging, protected mode, write protection.
    pub cr0: u64,
    /// CR3: physical address of the top table, and flags. PAE paging outside of IA-32e mode uses `pdptes` instead.
    pub cr3: u64,
    /// CR4: format of the tables, SMEP, SMAP, protection keys.
    pub cr4: u64,
    /// IA32_EFER: IA-32e mode, no-execute.
    pub efer: u64,
    /// RFLAGS: AC and virtual-8086 mode.
    pub rflags: u64,
    /// Current privilege level, 0 to 3: the DPL of SS.
    pub cpl: u8,
    /// The four page-directory-pointer entries that the processor loaded with CR3, for PAE paging outside of IA-32e mode. `None` if the
    /// hypervisor doesn't report them; then such a walk is [`crate::WalkError::Unsupported`].
    pub pdptes: Option<[u64; 4]>,
    /// Physical address width by the guest's CPUID (leaf 0x8000_0008), in bits, at most 52. Entries with higher bits raise a fault.
    pub physical_bits: u32,
    /// Whether the guest's CPUID reports pages of 1 GiB (leaf 0x8000_0001, EDX bit 26). Otherwise their size bit is reserved.
    pub has_1g_pages: bool,
    /// Whether the guest's processor is AMD's or Hygon's, which reserve bit 8 of the upper levels' entries.
    pub is_amd: bool,
}

/// Default size of operands and addresses of a code segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeSize {
    /// Real mode, virtual-8086 mode and 16-bit segments.
    Bits16,
    /// 32-bit segments, also in compatibility mode.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

impl CodeSize {
    /// Number of bits, for an instruction decoder.
    pub fn bits(self) -> u32 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }
}

impl PagingState {
    /// Whether protected mode is off.
    pub fn is_real_mode(&self) -> bool {
        self.cr0 & CR0_PE == 0
    }

    /// Whether the code runs in virtual-8086 mode.
    pub fn is_virtual_8086(&self) -> bool {
        !self.is_real_mode() && self.efer & EFER_LMA == 0 && self.rflags & RFLAGS_VM != 0
    }

    /// Bits of a linear address in 64-bit mode: 48, or 57 with 5-level paging.
    pub fn linear_bits(&self) -> u32 {
        if self.cr4 & CR4_LA57 != 0 { 57 } else { 48 }
    }
}
