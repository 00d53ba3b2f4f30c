//! Machine checks that a device raises while a vCPU's access is emulated.
//!
//! A device's [`BusDevice::read`](crate::bus::BusDevice::read) or `write` runs on the thread of the vCPU that made the access, and may
//! call [`raise`] there. The thread completes the access, and the vCPU gets the exception before its next instruction, as an uncorrected
//! error of a bank (Intel SDM 3, chapter 17). A guest that hasn't enabled machine checks shuts down, as a processor does. KVM reports
//! nothing where the guest has disabled the bank.

use std::cell::Cell;

use kvm_bindings::kvm_x86_mce;

/// The bank that reports the error: one for which operating systems have no model-specific handling and that isn't used for memory
/// errors.
pub const BANK: u8 = 7;
/// MSR that enables the bank's errors (IA32_MC7_CTL).
pub const BANK_CONTROL: u32 = 0x400 + 4 * BANK as u32;
/// Valid, uncorrected, enabled, the context is corrupt; "internal I/O error".
const STATUS: u64 = 1 << 63 | 1 << 61 | 1 << 60 | 1 << 57 | 0x0E0B;
/// MCG_STATUS: a machine check is in progress. The interrupted program can't be resumed.
const IN_PROGRESS: u64 = 1 << 2;

thread_local! {
    static WANTED: Cell<bool> = const { Cell::new(false) };
}

/// Makes the access that this thread emulates end in a machine check. Where the thread isn't a vCPU's, the caller that drains deferred
/// writes calls [`take`], and injects the exception into a vCPU
/// ([`VcpuManager::machine_check`](crate::vcpu::VcpuManager::machine_check)).
pub fn raise() {
    WANTED.set(true);
}

/// Whether this thread's access is to end in a machine check.
#[must_use]
pub fn is_wanted() -> bool {
    WANTED.get()
}

/// Returns the same as [`is_wanted`] and clears the request: the caller injects the exception.
#[must_use]
pub fn take() -> bool {
    WANTED.take()
}

/// The record for KVM_X86_SET_MCE.
pub(crate) fn record() -> kvm_x86_mce {
    kvm_x86_mce { status: STATUS, mcg_status: IN_PROGRESS, bank: BANK, ..Default::default() }
}
