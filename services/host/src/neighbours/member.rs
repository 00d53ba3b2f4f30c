//! Validation of a member's descriptors. A member is hostile, and its peers map these files, so they are checked before.
//!
//! A peer must not write what it maps. There are two ways. The file is sealed (F_SEAL_FUTURE_WRITE), after the owner has mapped it. Or
//! devices in other processes write the file (an HCA, also after a restart of its daemon): then only its owner may open it, and peers are
//! other users than the owner and not root. So they can't reopen their read-only descriptor for writing. In this case a member that permits
//! any other peer is refused, so that no such pair is ever connected.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use neighbour::registry::Permit;
use neighbour::window::{Geometry, WindowError};
use neighbour_protocol::{Piece, Socket};
use rustix::fs::{FileType, OFlags, SealFlags};

use crate::function::descriptors::is_eventfd;
use crate::identity::{BadName, check_name};

/// Limit of files of a member's RAM: one per NUMA node.
const MOST_FILES: usize = 8;
/// Limit of pieces of RAM.
const MOST_PIECES: usize = 16;
/// Limit of VMs that a member permits.
const MOST_PERMITS: usize = 64;

/// Why a member is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error(transparent)]
    Name(#[from] BadName),
    #[error("A member brings 1 to {MOST_FILES} files of RAM and {slots} signals; {given} descriptors came")]
    Descriptors { slots: u32, given: usize },
    #[error("A member permits at most {MOST_PERMITS} VMs and has at most {MOST_PIECES} pieces of RAM")]
    TooMany,
    #[error("File {file} of the member's RAM {what}")]
    File { file: usize, what: &'static str },
    #[error(
        "RAM of VM {vm} is not sealed against writing, as devices of other processes write it, and it permits VM {peer} of \
         {whose}; such memory is shown to VMs of other users only: run {peer} as another user"
    )]
    Reader { vm: String, peer: String, whose: &'static str },
    #[error(
        "The member's signal for the peer in slot {slot} is not an eventfd; a member brings one eventfd per slot"
    )]
    Signal { slot: usize },
    #[error("The member's signals can't be looked at; is /proc there?")]
    Unseen(#[source] std::io::Error),
    #[error("The piece of RAM at {address:#x} with {size:#x} bytes doesn't lie in its file")]
    Piece { address: u64, size: u64 },
    #[error("{0}")]
    Window(WindowError),
}

/// A member's validated descriptors.
#[derive(Debug)]
pub(super) struct Member {
    pub socket: Socket,
    pub vm: String,
    pub uid: u32,
    pub ram: Vec<Piece>,
    pub protection: Protection,
    pub files: Vec<OwnedFd>,
    /// Eventfds that signal this member, by the peer's slot.
    pub signals: Vec<OwnedFd>,
}

/// Protection of a member's RAM against writes by its readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protection {
    /// Seals, against all processes.
    Sealed,
    /// The file's mode, against other users.
    OtherUsers,
}

impl Protection {
    /// Name for error messages.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sealed => "sealed",
            Self::OtherUsers => "other users only",
        }
    }
}

/// Separates and validates the descriptors of a `Join` of user `uid`, which permits `permits`: RAM, signals, and the RAM's protection.
pub(super) fn check(
    (vm, uid): (&str, u32),
    group: &str,
    permits: &[Permit],
    ram: &[Piece],
    mut fds: Vec<OwnedFd>,
    geometry: &Geometry,
) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>, Protection), Unfit> {
    check_name("VM", vm)?;
    check_name("group", group)?;
    for permit in permits {
        check_name("permitted VM", &permit.vm)?;
    }
    if permits.len() > MOST_PERMITS || ram.len() > MOST_PIECES {
        return Err(Unfit::TooMany);
    }
    let slots = usize::try_from(geometry.slots()).unwrap_or(usize::MAX);
    let wrong = Unfit::Descriptors { slots: geometry.slots(), given: fds.len() };
    let files = fds.len().checked_sub(slots).filter(|files| (1..=MOST_FILES).contains(files));
    let Some(files) = files else { return Err(wrong) };
    let signals = fds.split_off(files);
    // Peers connect them to their VMs, where KVM would refuse any other kind, and write them in no other way.
    for (slot, signal) in signals.iter().enumerate() {
        if !is_eventfd(signal.as_fd()).map_err(Unfit::Unseen)? {
            return Err(Unfit::Signal { slot });
        }
    }
    let mut sizes = Vec::new();
    let mut protection = Protection::Sealed;
    for (file, fd) in fds.iter().enumerate() {
        let (size, of_file) = check_file(fd.as_fd(), uid).map_err(|what| Unfit::File { file, what })?;
        sizes.push(size);
        if of_file == Protection::OtherUsers {
            protection = of_file;
        }
    }
    if protection == Protection::OtherUsers {
        // Only members that permit each other are connected, so no other process ever gets this memory.
        for permit in permits {
            let whose = match permit.uid {
                0 => "root, who may open everything",
                reader if reader == uid => "the same user",
                _ => continue,
            };
            return Err(Unfit::Reader { vm: vm.to_owned(), peer: permit.vm.clone(), whose });
        }
    }
    for piece in ram {
        let size = usize::try_from(piece.file).ok().and_then(|file| sizes.get(file).copied());
        let end = piece.offset.checked_add(piece.size);
        let inside =
            piece.offset.is_multiple_of(4096) && end.zip(size).is_some_and(|(end, size)| end <= size);
        if !inside {
            return Err(Unfit::Piece { address: piece.address, size: piece.size });
        }
    }
    let extents: Vec<(u64, u64)> = ram.iter().map(|piece| (piece.address, piece.size)).collect();
    geometry.window(0, &extents).map_err(Unfit::Window)?;
    Ok((fds, signals, protection))
}

/// The size of a file of user `uid`, which its owner can't shrink, so that no peer's access faults, and which no reader can write.
fn check_file(fd: BorrowedFd<'_>, uid: u32) -> Result<(u64, Protection), &'static str> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| "can't be looked at")?;
    if flags & OFlags::RWMODE != OFlags::RDONLY || flags.contains(OFlags::PATH) {
        return Err("is not open for reading only");
    }
    // Only memory files have seals.
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| "is not a memory file")?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
        return Err("is not sealed against resizing");
    }
    let stat = rustix::fs::fstat(fd).map_err(|_| "can't be looked at")?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("is not a memory file");
    }
    let size = u64::try_from(stat.st_size).map_err(|_| "has no size")?;
    if seals.intersects(SealFlags::FUTURE_WRITE | SealFlags::WRITE) {
        return Ok((size, Protection::Sealed));
    }
    // An owner that changes the mode later exposes only its own memory, which it could publish anyway.
    if stat.st_uid != uid || stat.st_mode & 0o077 != 0 {
        return Err("is neither sealed against writing by others, nor its owner's alone (mode 0600)");
    }
    Ok((size, Protection::OtherUsers))
}
