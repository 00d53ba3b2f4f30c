//! System calls that each kind of thread may make.
//!
//! The lists are beside the code that makes the calls: every module with threads of its own publishes a `SYSCALLS`. This module joins them,
//! and adds the calls of Rust's and the C library's run time.
//!
//! A thread inherits its creator's filter, and filters only accumulate. So a thread of its own kind (`vm::threads::DeviceThreadMaker`)
//! creates device workers for all requesters. vCPU threads thus need neither the workers' calls nor those to create threads. `main` may
//! make all of them.

use std::collections::BTreeSet;

use super::ThreadKind;
use super::device_syscalls::{
    CONSOLE, SPAWNERS, VCPUS, end, irqchip, nic_access, served_access, served_watcher, workers,
};
use crate::description::VmDescription;

/// System calls of every thread.
const BASE: &[i64] = &[
    // Open files and eventfds.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    // Rust's debug builds check descriptors when they close them. Operations are checked; see `seccomp.rs`.
    libc::SYS_fcntl,
    // Locks, condition variables, joining.
    libc::SYS_futex,
    // The allocator; a thread's arena and stack. Never executable; see `seccomp.rs`.
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
    // Thread names; further filters, which only narrow. Arguments are checked; see `seccomp.rs`.
    libc::SYS_prctl,
    libc::SYS_seccomp,
    // Kicking a vCPU, abort(3).
    libc::SYS_tgkill,
    libc::SYS_gettid,
    libc::SYS_getpid,
    // Number of CPUs, for the allocator's arenas; spin locks.
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getcpu,
    // Time, if the vDSO can't provide it.
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

/// Creating threads. `clone` only creates threads, and `clone3` fails; see `seccomp.rs`.
const SPAWN: &[i64] = &[libc::SYS_clone, libc::SYS_clone3];

/// vCPU threads: KVM_RUN and the ioctls around it, and the signal mask for kicks.
const VCPU: &[i64] = &[libc::SYS_ioctl, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigpending];

/// The main thread: waits for the end, pins vCPUs, rereads files for a reset, cleans up.
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

/// The signal thread, which is woken through a socket pair (`signal-hook`). The signal's handler may run on it, too.
const SIGNALS: &[i64] = &[libc::SYS_recvfrom, libc::SYS_sendto];

/// Calls that no thread of the process may make, even without a filter of its own: other programs, other processes' memory, the kernel's
/// modules and mounts, names in other namespaces.
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

/// The system calls that a kind of thread of this VM may make.
pub(super) fn allowed(kind: ThreadKind, vm: &VmDescription) -> BTreeSet<i64> {
    parts(kind, vm).iter().flat_map(|list| list.iter().copied()).collect()
}

fn parts(kind: ThreadKind, vm: &VmDescription) -> Vec<&'static [i64]> {
    let vcpu = || vec![BASE, VCPU, VCPUS, served_access(vm), nic_access(vm), irqchip(vm)];
    let devices = || [vec![BASE, SPAWN, SPAWNERS, irqchip(vm)], workers(vm)].concat();
    match kind {
        ThreadKind::DeviceWorker => devices(),
        ThreadKind::Vcpu => vcpu(),
        // A pause, a reset or an inspection does to vCPUs and devices what vCPU threads do.
        ThreadKind::Api => [vcpu(), vec![crate::api::SYSCALLS, machine::stats::SYSCALLS]].concat(),
        ThreadKind::Console => vec![BASE, CONSOLE],
        // It places BARs as vCPU threads do.
        ThreadKind::VfioUser => [vcpu(), vec![served_watcher(vm)]].concat(),
        // It suspends and resumes vCPUs and devices as the API does. Its streams have threads of their own.
        ThreadKind::Migration => [
            parts(ThreadKind::VfioUser, vm),
            parts(ThreadKind::Api, vm),
            devices(),
            vec![crate::migration::SYSCALLS],
        ]
        .concat(),
        ThreadKind::Signals => vec![BASE, SIGNALS],
        ThreadKind::Interrupts => vec![BASE, irqchip(vm), crate::vm::LISTENER_SYSCALLS],
        ThreadKind::Node => vec![BASE, SPAWN, SPAWNERS, VCPU, VCPUS, MAIN, super::node::SYSCALLS],
        ThreadKind::Main => {
            let migration = parts(ThreadKind::Migration, vm);
            [migration, end(vm), vec![CONSOLE, SIGNALS, MAIN]].concat()
        }
    }
}
