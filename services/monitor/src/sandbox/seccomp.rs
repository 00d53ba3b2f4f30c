//! Seccomp programs: compiled once, installed by each thread.
#![allow(unsafe_code)] // seccomp(2) with a listener has no safe wrapper.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};

use confinement::{Arguments, BackendError, PROT_EXEC, compare};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::{SandboxError, ThreadKind, allow_lists};
use crate::description::{SandboxMode, VmDescription};

/// Placeholder for user notification, which the compiler doesn't support: `SECCOMP_RET_TRACE` with this value.
const STAND_IN: SeccompAction = SeccompAction::Trace(0x5a5a);

/// ioctl requests by mask and value. Types are bits 8 to 15, numbers bits 0 to 7 (Linux, ioctl-number.rst).
const IOCTLS: &[(u64, u64)] = &[
    // KVM: running vCPUs; memory slots, interrupt routes and eventfds when BARs move; state for a pause.
    (0xff00, 0xae00),
    // TUN: type 'T', numbers from 192 on. Those below are the terminal's, among them TIOCSTI, which could type commands into the user's
    // shell.
    (0xffc0, 0x54c0),
    // VFIO: interrupts, reset and mappings of an open card; type ';' is its own.
    (0xff00, 0x3b00),
    // Terminal of the console, by exact request: TCGETS, TCSETS, TCSETSW, TCSETSF, their second versions, TIOCGWINSZ.
    (u64::MAX, 0x5401),
    (u64::MAX, 0x5402),
    (u64::MAX, 0x5403),
    (u64::MAX, 0x5404),
    (u64::MAX, 0x802c_542a),
    (u64::MAX, 0x402c_542b),
    (u64::MAX, 0x402c_542c),
    (u64::MAX, 0x402c_542d),
    (u64::MAX, 0x5413),
    // userfaultfd: post-copy pages of an incoming VM. The descriptor was opened before, and affects only mappings of RAM.
    (0xff00, 0xaa00),
    // FIONREAD, FIONBIO.
    (u64::MAX, 0x541b),
    (u64::MAX, 0x5421),
    // Block devices as images: BLKDISCARD, BLKZEROOUT.
    (u64::MAX, 0x1277),
    (u64::MAX, 0x127f),
];

/// `RDMA_VERBS_IOCTL` of rdma/rdma_user_ioctl.h, with all of its commands. Only for a node whose links use an RDMA device.
const RDMA: (u64, u64) = (u64::MAX, 0xc018_1b01);

/// prctl operations: thread names, no new privileges (set with each filter), names of allocator mappings.
const PRCTLS: &[libc::c_int] =
    &[libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_NO_NEW_PRIVS, libc::PR_SET_VMA];

/// fcntl operations: flags of descriptors and files, copies of descriptors, and locks of images, which a migrated VM releases and acquires.
const FCNTLS: &[libc::c_int] = &[
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_OFD_SETLK,
    libc::F_OFD_GETLK,
    // Sealing memory that others map, which only narrows rights.
    libc::F_ADD_SEALS,
];

/// TCSETS, TCSETS2: allowed to any thread on standard input, so that a refused call doesn't leave the user's terminal in raw mode
/// (`trap.rs`).
const RESTORE_TERMINAL: &[u64] = &[0x5402, 0x402c_542b];

const SECCOMP_SET_MODE_FILTER: u64 = libc::SECCOMP_SET_MODE_FILTER as u64;

const ARGUMENTS: Arguments = Arguments { ioctls: IOCTLS, prctls: PRCTLS, fcntls: FCNTLS };

/// A compiled seccomp filter.
#[derive(Debug)]
pub(super) struct Program(BpfProgram);

/// `struct sock_fprog` of linux/filter.h.
#[repr(C)]
struct Header {
    len: libc::c_ushort,
    filter: *const seccompiler::sock_filter,
}

impl Program {
    /// Confines the calling thread.
    pub(super) fn install(&self) -> io::Result<()> {
        self.set_filter(0).map(drop)
    }

    /// Confines the calling thread. Refused calls notify the returned listener, and wait for its answer.
    pub(super) fn install_with_listener(&self) -> io::Result<OwnedFd> {
        let fd = self.set_filter(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: with this flag the call returns a new descriptor that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn set_filter(&self, flags: libc::c_ulong) -> io::Result<i64> {
        let len = libc::c_ushort::try_from(self.0.len()).map_err(io::Error::other)?;
        let header = Header { len, filter: self.0.as_ptr() };
        rustix::thread::set_no_new_privs(true)?;
        let result =
            // SAFETY: the kernel copies the header and the `len` instructions that it points to, and keeps neither
            // pointer.
            unsafe { libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &raw const header) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

fn restore_terminal() -> Result<Vec<SeccompRule>, BackendError> {
    let is =
        |argument, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
    let stdin = u64::from(libc::STDIN_FILENO.cast_unsigned());
    RESTORE_TERMINAL.iter().map(|request| SeccompRule::new(vec![is(0, stdin)?, is(1, *request)?])).collect()
}

/// Sockets of nodes' links, besides Unix sockets. Landlock checks the ports; it can't check UDP.
fn tcp() -> Result<Vec<SeccompRule>, BackendError> {
    let is = |argument, mask, value: libc::c_int| {
        let value = u64::from(value.cast_unsigned());
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), value)
    };
    let families = [libc::AF_INET, libc::AF_INET6].into_iter();
    families
        .map(|family| SeccompRule::new(vec![is(0, u64::MAX, family)?, is(1, 0xF, libc::SOCK_STREAM)?]))
        .collect()
}

/// The filter of a kind of thread, with or without an RDMA device: listed calls pass. All others trap, or notify in log mode.
pub(super) fn thread_program(
    kind: ThreadKind,
    vm: &VmDescription,
    rdma: bool,
) -> Result<Program, SandboxError> {
    let refusal = match vm.sandbox {
        SandboxMode::Log => STAND_IN,
        SandboxMode::On | SandboxMode::Off => SeccompAction::Trap,
    };
    let compile = || {
        let allowed = allow_lists::allowed(kind, vm);
        let mut rules = allowed
            .into_iter()
            .map(|call| Ok((call, ARGUMENTS.rules(call)?)))
            .collect::<Result<BTreeMap<_, _>, BackendError>>()?;
        rules.entry(libc::SYS_ioctl).or_insert(restore_terminal()?);
        if kind == ThreadKind::Node {
            rules.entry(libc::SYS_socket).or_default().extend(tcp()?);
        }
        if rdma {
            rules.entry(libc::SYS_ioctl).or_default().push(compare(1, RDMA.0, RDMA.1)?);
        }
        let filter = SeccompFilter::new(rules, refusal.clone(), SeccompAction::Allow, TargetArch::x86_64)?;
        BpfProgram::try_from(filter)
    };
    let mut program = compile().map_err(|source| SandboxError::Compile { kind, source: source.into() })?;
    for instruction in &mut program {
        // BPF_RET with the placeholder's value.
        if instruction.code == 0x06 && instruction.k == u32::from(STAND_IN) {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
        }
    }
    Ok(Program(program))
}

/// The same filter for log mode if a listener exists already: refused calls go to the kernel's log.
pub(super) fn kernel_logged(program: &Program) -> Program {
    let mut instructions = program.0.clone();
    for instruction in &mut instructions {
        if instruction.code == 0x06 && instruction.k == libc::SECCOMP_RET_USER_NOTIF {
            instruction.k = libc::SECCOMP_RET_LOG;
        }
    }
    Program(instructions)
}

/// Rules for the whole process, beneath the threads' own. They also cover threads without a filter.
pub(super) fn process_programs() -> Result<[Program; 2], SandboxError> {
    let compile = || {
        let mut never: BTreeMap<_, _> = allow_lists::NEVER.iter().map(|call| (*call, Vec::new())).collect();
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            never.insert(call, vec![compare(2, PROT_EXEC, PROT_EXEC)?]);
        }
        let never = SeccompFilter::new(never, SeccompAction::Allow, SeccompAction::Trap, TargetArch::x86_64)?;
        Ok([Program(confinement::no_clone3()?), Program(never.try_into()?)])
    };
    compile().map_err(|source: BackendError| SandboxError::Compile {
        kind: ThreadKind::Main,
        source: source.into(),
    })
}
