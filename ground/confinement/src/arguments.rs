//! What the arguments of an allowed system call must be.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// `PROT_EXEC` of linux/mman.h.
pub const PROT_EXEC: u64 = 4;
/// `CLONE_THREAD` of linux/sched.h.
const CLONE_THREAD: u64 = 0x1_0000;
const SECCOMP_SET_MODE_FILTER: u64 = libc::SECCOMP_SET_MODE_FILTER as u64;

/// A rule that no filter can be made of.
pub type BackendError = seccompiler::BackendError;

/// Argument number `argument` (32 bits of it), under `mask`, is `value`.
pub fn compare(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, BackendError> {
    let operator = if mask == u64::MAX { SeccompCmpOp::Eq } else { SeccompCmpOp::MaskedEq(mask) };
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?])
}

fn is(argument: u8, value: libc::c_int) -> Result<SeccompRule, BackendError> {
    compare(argument, u64::MAX, u64::from(value.cast_unsigned()))
}

/// What differs between the processes; the rest of [`Arguments::rules`] holds for all of them.
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    /// ioctl requests by mask and value. Types are bits 8 to 15, numbers bits 0 to 7 (Linux, ioctl-number.rst).
    pub ioctls: &'static [(u64, u64)],
    /// prctl operations.
    pub prctls: &'static [libc::c_int],
    /// fcntl operations.
    pub fcntls: &'static [libc::c_int],
}

impl Arguments {
    /// What the arguments of a call must be; no rules: anything.
    pub fn rules(&self, syscall: i64) -> Result<Vec<SeccompRule>, BackendError> {
        match syscall {
            libc::SYS_ioctl => {
                self.ioctls.iter().map(|(mask, request)| compare(1, *mask, *request)).collect()
            }
            libc::SYS_prctl => self.prctls.iter().map(|operation| is(0, *operation)).collect(),
            libc::SYS_fcntl => self.fcntls.iter().map(|operation| is(1, *operation)).collect(),
            // More filters only.
            libc::SYS_seccomp => Ok(vec![compare(0, u64::MAX, SECCOMP_SET_MODE_FILTER)?]),
            // Memory never becomes executable.
            libc::SYS_mmap | libc::SYS_mprotect => Ok(vec![compare(2, PROT_EXEC, 0)?]),
            // Threads, never processes.
            libc::SYS_clone => Ok(vec![compare(0, CLONE_THREAD, CLONE_THREAD)?]),
            // No network beyond what is open.
            libc::SYS_socket | libc::SYS_socketpair => Ok(vec![is(0, libc::AF_UNIX)?]),
            // Signals to our own threads only: abort(3).
            libc::SYS_tgkill => Ok(vec![compare(0, u64::MAX, u64::from(std::process::id()))?]),
            _ => Ok(Vec::new()),
        }
    }
}

/// Says that `clone3` doesn't exist: it passes its flags in memory, where no filter can see them; the C library makes
/// threads with `clone` then.
pub fn no_clone3() -> Result<BpfProgram, BackendError> {
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    SeccompFilter::new(clone3, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}
