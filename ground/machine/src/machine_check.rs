//! Machine checks that a device asks for while a vCPU's access is carried out.
//!
//! A device's [`BusDevice::read`](crate::bus::BusDevice::read) or `write` runs on the thread of the vCPU that made the access. It says [`raise`] there; the access is
//! finished, and the vCPU takes the exception before its next instruction, as an uncorrected error of a bank (Intel SDM 3, chapter 17). A guest that hasn't enabled machine checks shuts down, as a
//! processor does. KVM reports nothing where the guest has disabled the bank.

use std::cell::Cell;

use kvm_bindings::kvm_x86_mce;

/// The bank: none that operating systems know defects of, or use for memory.
pub const BANK: u8 = 7;
/// MSR that enables the bank's errors (IA32_MC7_CTL).
pub const BANK_CONTROL: u32 = 0x400 + 4 * BANK as u32;
/// Valid, uncorrected, enabled, the context is corrupt; "internal I/O error".
const STATUS: u64 = 1 << 63 | 1 << 61 | 1 << 60 | 1 << 57 | 0x0E0B;
/// MCG_STATUS: a machine check is in progress. The interrupted program can't go on.
const IN_PROGRESS: u64 = 1 << 2;

thread_local! {
    static WANTED: Cell<bool> = const { Cell::new(false) };
}

/// The access that this thread carries out ends in a machine check. Where the thread is no vCPU's, whoever has it carry out late writes asks
/// [`take`], and has a vCPU take it ([`VcpuManager::machine_check`](crate::vcpu::VcpuManager::machine_check)).
pub fn raise() {
    WANTED.set(true);
}

/// Whether this thread's access is to end in one.
#[must_use]
pub fn is_wanted() -> bool {
    WANTED.get()
}

/// The same, and then not any more: whoever asks sees to it.
#[must_use]
pub fn take() -> bool {
    WANTED.take()
}

/// What KVM is to inject.
pub(crate) fn record() -> kvm_x86_mce {
    kvm_x86_mce { status: STATUS, mcg_status: IN_PROGRESS, bank: BANK, ..Default::default() }
}
