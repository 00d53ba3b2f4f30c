//! Guest writes that signal an eventfd (KVM's ioeventfds).

use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The address space of an ioeventfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoSpace {
    /// I/O ports.
    Port,
    /// Guest-physical memory.
    Memory,
}

impl IoSpace {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Port => "port",
            Self::Memory => "memory",
        }
    }
}

/// A guest write that only signals an eventfd, without leaving the kernel.
#[derive(Debug, Clone)]
pub struct IoEvent {
    /// Address space.
    pub space: IoSpace,
    /// Port or guest-physical address.
    pub address: u64,
    /// Width in bytes of the writes that signal: 1, 2, 4 or 8, or 0 for any (the address alone decides).
    pub width: u8,
    /// If set, only a write of this value signals. Needs a width.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

impl IoEvent {
    /// Checks the fields; the error says in words which combination KVM doesn't allow.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if !matches!(self.width, 0 | 1 | 2 | 4 | 8) {
            return Err("widths are 0 (any), 1, 2, 4 and 8 bytes");
        }
        match (self.width, self.datamatch) {
            (0, Some(_)) => return Err("a value to match needs a width"),
            (width @ 1..8, Some(value)) if value >> (width * 8) != 0 => {
                return Err("the value to match is wider than the writes");
            }
            _ => {}
        }
        if self.space == IoSpace::Port && self.width == 8 {
            return Err("port writes have at most 4 bytes");
        }
        let last = self.address.checked_add(u64::from(self.width.max(1)) - 1);
        match (self.space, last) {
            (_, None) => Err("it ends beyond the address space"),
            (IoSpace::Port, Some(last)) if last > 0xffff => Err("it ends beyond the address space"),
            _ => Ok(()),
        }
    }
}
