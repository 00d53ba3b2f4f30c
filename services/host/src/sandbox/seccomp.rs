//! System calls that the daemon's threads may make.

use std::collections::BTreeMap;

use confinement::{Arguments, BackendError};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::SandboxError;

/// Rust's and the C library's run time, in every thread.
const RUN_TIME: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    // With a flag against blocking, for descriptors that clients share.
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigaction,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getcpu,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    // Fails as if the kernel didn't have it; see `NO_CLONE3`.
    libc::SYS_clone3,
];

/// Events: the engine's and the functions' threads, tokio's reactor.
const EVENTS: &[i64] = &[
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    // Asynchronous I/O signals clients' eventfds; see `function::eventfd_signals`.
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
];

/// Sockets: the service and metrics, vfio-user with descriptors, UDP between hosts. New ones are Unix sockets only, and TCP if the daemon
/// has a cluster service; see `rules`.
const SOCKETS: &[i64] = &[
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
];

/// Files: `nics.json`, the sockets' files, guests' memory as it arrives, taps' owners. Landlock limits which.
const FILES: &[i64] = &[
    libc::SYS_openat,
    // rustix, for taps.
    libc::SYS_open,
    libc::SYS_fstat,
    libc::SYS_lstat,
    libc::SYS_stat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_pread64,
    // Kind of a descriptor that a client has passed.
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_flock,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// Calls with checked arguments; see `rules`.
const CHECKED: &[i64] = &[
    libc::SYS_ioctl,
    libc::SYS_prctl,
    libc::SYS_fcntl,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_clone,
    libc::SYS_socket,
    // tokio's reactor is woken for signals through one.
    libc::SYS_socketpair,
    libc::SYS_tgkill,
    libc::SYS_memfd_create,
    libc::SYS_seccomp,
];

/// Permitted ioctls, by mask and value. The first only if the daemon uses an RDMA device: `RDMA_VERBS_IOCTL` of rdma/rdma_user_ioctl.h, all
/// of its commands. Then TUN's numbers from 192 on of type 'T', FIONREAD and FIONBIO, and an interface's flags (SIOCGIFFLAGS, SIOCSIFFLAGS:
/// whether a tap exists and is up).
const IOCTLS: &[(u64, u64)] = &[
    (u64::MAX, 0xc018_1b01),
    (0xffc0, 0x54c0),
    (u64::MAX, 0x541b),
    (u64::MAX, 0x5421),
    (u64::MAX, 0x8913),
    (u64::MAX, 0x8914),
];
/// The daemon of a card: VFIO's numbers from 96 to 127 of type ';' (linux/vfio.h), FIONREAD and FIONBIO.
const CARD_IOCTLS: &[(u64, u64)] = &[(!0x1f, 0x3b60), (u64::MAX, 0x541b), (u64::MAX, 0x5421)];
/// The daemon of a card writes registers at offsets of a file.
const CARD: &[i64] = &[libc::SYS_pwrite64];
/// Names of threads and of the allocator's mappings.
const PRCTLS: &[libc::c_int] = &[libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];
/// Flags of a descriptor and of its file, copies, seals of guests' memory.
const FCNTLS: &[libc::c_int] = &[
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Optional facilities of a daemon.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Uses {
    /// An RDMA device of the host.
    pub rdma: bool,
    /// A cluster service, to which it connects by TCP, as to other hosts' daemons.
    pub service: bool,
    /// A card, by VFIO; then no tap.
    pub card: bool,
}

/// Rules for a call's arguments.
fn rules(uses: Uses, syscall: i64) -> Result<Vec<SeccompRule>, BackendError> {
    let mut rules = arguments(uses).rules(syscall)?;
    if uses.service && syscall == libc::SYS_socket {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let is = |argument, mask, value: libc::c_int| {
                let operator = SeccompCmpOp::MaskedEq(mask);
                let value = u64::from(value.cast_unsigned());
                SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
            };
            // Its kind without the flags.
            rules.push(SeccompRule::new(vec![
                is(0, u64::from(u32::MAX), family)?,
                is(1, SOCKET_KIND, libc::SOCK_STREAM)?,
            ])?);
        }
    }
    Ok(rules)
}

/// `SOCK_TYPE_MASK` of Linux: a socket's kind, without `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
const SOCKET_KIND: u64 = 0xF;

fn arguments(uses: Uses) -> Arguments {
    let ioctls = if uses.card {
        CARD_IOCTLS
    } else if uses.rdma {
        IOCTLS
    } else {
        IOCTLS.split_first().map_or(IOCTLS, |(_, rest)| rest)
    };
    Arguments { ioctls, prctls: PRCTLS, fcntls: FCNTLS }
}

fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?.try_into()
}

fn programs(uses: Uses) -> Result<[BpfProgram; 2], BackendError> {
    let mut allowed = BTreeMap::new();
    let card = if uses.card { CARD } else { &[] };
    for list in [RUN_TIME, EVENTS, SOCKETS, FILES, CHECKED, card] {
        for syscall in list {
            allowed.insert(*syscall, rules(uses, *syscall)?);
        }
    }
    let allowed = compile(allowed, SeccompAction::Trap, SeccompAction::Allow)?;
    // The wider one first: it permits the system calls that put the other in force.
    Ok([confinement::no_clone3()?, allowed])
}

/// Confines the calling thread and threads that it creates.
pub(super) fn enforce(uses: Uses) -> Result<(), SandboxError> {
    let programs = programs(uses).map_err(|error| SandboxError::Seccomp(error.into()))?;
    for program in programs {
        seccompiler::apply_filter(&program).map_err(|error| SandboxError::Seccomp(error.into()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each runs on its own thread: a filter lasts as long as its thread.
    fn confined<R: Send + 'static>(uses: Uses, what: impl FnOnce() -> R + Send + 'static) -> R {
        std::thread::spawn(move || {
            let mut allowed = BTreeMap::new();
            for list in [RUN_TIME, EVENTS, SOCKETS, FILES, CHECKED] {
                for syscall in list {
                    allowed.insert(*syscall, rules(uses, *syscall).unwrap_or_default());
                }
            }
            // Like the real one, but a refusal is an error that the test can check.
            let refused = SeccompAction::Errno(libc::EOVERFLOW.cast_unsigned());
            let program = compile(allowed, refused, SeccompAction::Allow).unwrap_or_else(|e| panic!("{e}"));
            seccompiler::apply_filter(&program).unwrap_or_else(|e| panic!("{e}"));
            what()
        })
        .join()
        .unwrap_or_else(|_| panic!("the confined thread panicked"))
    }

    #[test]
    fn programs_networks_and_processes_are_out_of_reach_and_work_is_not() {
        let refused = confined(Uses::default(), || {
            let code = |error: std::io::Error| error.raw_os_error();
            [
                std::net::UdpSocket::bind("127.0.0.1:0").map(drop).map_err(code),
                std::net::TcpStream::connect("127.0.0.1:1").map(drop).map_err(code),
                std::process::Command::new("/bin/true").spawn().map(drop).map_err(code),
                std::fs::create_dir("/tmp/never").map_err(code),
                std::os::unix::fs::symlink("/etc/shadow", "/tmp/never").map_err(code),
            ]
        });
        for result in refused {
            assert_eq!(result, Err(Some(libc::EOVERFLOW)));
        }
        let fine = confined(Uses::default(), || {
            let pair = std::os::unix::net::UnixDatagram::unbound().map(drop);
            let thread = std::thread::spawn(|| 7).join().ok();
            (pair.is_ok(), thread)
        });
        assert_eq!(fine, (true, Some(7)));
    }

    #[test]
    fn a_daemon_with_a_cluster_service_may_connect_by_tcp_and_no_more() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap_or_else(|e| panic!("{e}"));
        let address = listener.local_addr().unwrap_or_else(|e| panic!("{e}"));
        let (tcp, udp) = confined(Uses { service: true, ..Uses::default() }, move || {
            let tcp = std::net::TcpStream::connect(address).is_ok();
            let udp = std::net::UdpSocket::bind("127.0.0.1:0").map(drop);
            (tcp, udp.map_err(|error| error.raw_os_error()))
        });
        assert_eq!((tcp, udp), (true, Err(Some(libc::EOVERFLOW))));
    }
}
