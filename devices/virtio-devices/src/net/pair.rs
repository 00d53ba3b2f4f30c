//! An in-process backend for tests: its other end is a socket in the same process.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::announcement;
use super::backend::{NetBackend, NetChannel, PacketChannel};
use super::mac::MacAddress;

/// A backend that passes every offload to its other end. That is one sequenced-packet socket per queue pair: a message is the 12-byte
/// header and the frame.
pub struct PairBackend {
    ends: Vec<OwnedFd>,
    offloads: u64,
    active: AtomicU16,
}

impl PairBackend {
    /// A backend of `pairs` queue pairs with the offload features `offloads`, and its other ends.
    pub fn new(pairs: u16, offloads: u64) -> io::Result<(Self, Vec<OwnedFd>)> {
        let (mut ends, mut others) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (end, other) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            ends.push(end);
            others.push(other);
        }
        Ok((Self { ends, offloads, active: AtomicU16::new(pairs) }, others))
    }

    /// One channel per queue pair.
    pub fn channels(&self) -> io::Result<Vec<Box<dyn NetChannel>>> {
        let channel = |fd: &OwnedFd| -> io::Result<Box<dyn NetChannel>> {
            Ok(Box::new(PacketChannel::new(fd.try_clone()?)))
        };
        self.ends.iter().map(channel).collect()
    }
}

impl NetBackend for PairBackend {
    fn announce(&self, mac: MacAddress) -> io::Result<()> {
        let first = self.ends.first().ok_or(io::ErrorKind::NotFound)?;
        rustix::io::write(first, &announcement::message(mac))?;
        Ok(())
    }

    fn description(&self) -> String {
        format!("in-process pair, {} active", self.active.load(Ordering::Relaxed))
    }

    fn offload_features(&self) -> u64 {
        self.offloads
    }

    fn set_guest_offloads(&self, _features: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_active_pairs(&self, pairs: u16) -> io::Result<()> {
        self.active.store(pairs, Ordering::Relaxed);
        Ok(())
    }

    fn set_carrier(&self, _up: bool) -> io::Result<()> {
        Ok(())
    }

    fn end_reason(&self) -> Option<String> {
        Some("the other end was closed".to_owned())
    }
}
