//! Rules for the arguments of allowed system calls.

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

/// A rule that can't be compiled into a filter.
pub type BackendError = seccompiler::BackendError;

/// Builds the rule that argument number `argument` (its low 32 bits), masked by `mask`, equals `value`.
pub fn compare(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, BackendError> {
    let operator = if mask == u64::MAX { SeccompCmpOp::Eq } else { SeccompCmpOp::MaskedEq(mask) };
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?])
}

fn is(argument: u8, value: libc::c_int) -> Result<SeccompRule, BackendError> {
    compare(argument, u64::MAX, u64::from(value.cast_unsigned()))
}

/// The rules that differ between processes. The rest of [`Arguments::rules`] applies to all of them.
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    /// Permitted ioctl requests: mask and value. Bits 8 to 15 are the type, bits 0 to 7 the number (Linux,
    /// ioctl-number.rst).
    pub ioctls: &'static [(u64, u64)],
    /// Permitted prctl operations.
    pub prctls: &'static [libc::c_int],
    /// Permitted fcntl operations.
    pub fcntls: &'static [libc::c_int],
}

impl Arguments {
    /// Returns the rules for the arguments of a call. No rules means that any arguments are permitted.
    pub fn rules(&self, syscall: i64) -> Result<Vec<SeccompRule>, BackendError> {
        match syscall {
            libc::SYS_ioctl => {
                self.ioctls.iter().map(|(mask, request)| compare(1, *mask, *request)).collect()
            }
            libc::SYS_prctl => self.prctls.iter().map(|operation| is(0, *operation)).collect(),
            libc::SYS_fcntl => self.fcntls.iter().map(|operation| is(1, *operation)).collect(),
            // Only to add filters.
            libc::SYS_seccomp => Ok(vec![compare(0, u64::MAX, SECCOMP_SET_MODE_FILTER)?]),
            // Memory never becomes executable.
            libc::SYS_mmap | libc::SYS_mprotect => Ok(vec![compare(2, PROT_EXEC, 0)?]),
            // Threads, but no processes.
            libc::SYS_clone => Ok(vec![compare(0, CLONE_THREAD, CLONE_THREAD)?]),
            // No new network sockets.
            libc::SYS_socket | libc::SYS_socketpair => Ok(vec![is(0, libc::AF_UNIX)?]),
            // Signals to this process' threads only, for abort(3).
            libc::SYS_tgkill => Ok(vec![compare(0, u64::MAX, u64::from(std::process::id()))?]),
            _ => Ok(Vec::new()),
        }
    }
}

/// Builds a filter that makes `clone3` fail with ENOSYS. `clone3` passes its flags in memory, where no filter can check
/// them. The C library then falls back to `clone`.
pub fn no_clone3() -> Result<BpfProgram, BackendError> {
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    SeccompFilter::new(clone3, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}
