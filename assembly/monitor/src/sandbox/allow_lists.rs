//! Which system calls each kind of thread may make.
//!
//! The lists stand beside the code that makes the calls: every module with threads of its own publishes a
//! `SYSCALLS`. Here they are put together, with what Rust's and the C library's run time needs in every thread.
//!
//! A thread inherits the filter of the thread that made it, and filters only ever add up. Device workers are therefore
//! made by a thread of their own kind (`vm::threads::DeviceThreadMaker`), whoever asks for them: vCPU threads need
//! neither what workers do nor to make threads. `main` is all of them.

use std::collections::BTreeSet;

use super::ThreadKind;
use super::device_syscalls::{
    CONSOLE, SPAWNERS, VCPUS, end, nic_access, served_access, served_watcher, workers,
};
use crate::description::VmDescription;

/// Every thread.
const BASE: &[i64] = &[
    // Files and eventfds that are open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    // Rust's debug builds check descriptors as they close them. Operations are checked, see `seccomp.rs`.
    libc::SYS_fcntl,
    // Locks, conditions, joining.
    libc::SYS_futex,
    // The allocator; arena and stack set-up of a thread. Never executable, see `seccomp.rs`.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Start and end of a thread; stack-overflow detection of Rust's run time.
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigaction,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    // Names of threads; further filters, which only narrow. Arguments are checked, see `seccomp.rs`.
    libc::SYS_prctl,
    libc::SYS_seccomp,
    // Kicking a vCPU, abort(3).
    libc::SYS_tgkill,
    libc::SYS_gettid,
    libc::SYS_getpid,
    // Number of CPUs for the allocator's arenas; spinning locks.
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getcpu,
    // Time, where the vDSO can't tell it.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    // Seeds of hash maps.
    libc::SYS_getrandom,
    // Waiting.
    libc::SYS_poll,
    libc::SYS_ppoll,
];

/// Making threads. `clone` only makes threads, `clone3` isn't to be had; see `seccomp.rs`.
const SPAWN: &[i64] = &[libc::SYS_clone, libc::SYS_clone3];

/// vCPU threads by themselves: KVM_RUN and the ioctls around it, kept signal mask for kicks.
const VCPU: &[i64] = &[libc::SYS_ioctl, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigpending];

/// The main thread: waits for the end, pins vCPUs, reads back files for a reset, cleans up.
const MAIN: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_fallocate,
    libc::SYS_sched_setaffinity,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// The thread that signals wake through a socket pair (`signal-hook`); the signal's handler may run on it, too.
const SIGNALS: &[i64] = &[libc::SYS_recvfrom, libc::SYS_sendto];

/// What no thread of the process may do, those without a filter of their own included: other programs, other
/// processes' memory, the kernel's modules and mounts, names in other namespaces.
pub(super) const NEVER: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_syslog,
    libc::SYS_personality,
];

/// The system calls of a kind of thread of a VM.
pub(super) fn allowed(kind: ThreadKind, vm: &VmDescription) -> BTreeSet<i64> {
    parts(kind, vm).iter().flat_map(|list| list.iter().copied()).collect()
}

fn parts(kind: ThreadKind, vm: &VmDescription) -> Vec<&'static [i64]> {
    let vcpu = || vec![BASE, VCPU, VCPUS, served_access(vm), nic_access(vm)];
    let devices = || [vec![BASE, SPAWN, SPAWNERS], workers(vm)].concat();
    match kind {
        ThreadKind::DeviceWorker => devices(),
        ThreadKind::Vcpu => vcpu(),
        // A pause, a reset or a look at counters does to vCPUs and devices what vCPU threads do.
        ThreadKind::Api => [vcpu(), vec![crate::api::SYSCALLS, machine::stats::SYSCALLS]].concat(),
        ThreadKind::Console => vec![BASE, CONSOLE],
        // It places BARs as vCPU threads do.
        ThreadKind::VfioUser => [vcpu(), vec![served_watcher(vm)]].concat(),
        // It stops vCPUs and devices as the API does, and lets them go on; its streams have threads of their own.
        ThreadKind::Migration => [
            parts(ThreadKind::VfioUser, vm),
            parts(ThreadKind::Api, vm),
            devices(),
            vec![crate::migration::SYSCALLS],
        ]
        .concat(),
        ThreadKind::Signals => vec![BASE, SIGNALS],
        ThreadKind::Node => vec![BASE, SPAWN, SPAWNERS, VCPU, VCPUS, MAIN, super::node::SYSCALLS],
        ThreadKind::Main => {
            let migration = parts(ThreadKind::Migration, vm);
            [migration, end(vm), vec![CONSOLE, SIGNALS, MAIN]].concat()
        }
    }
}
