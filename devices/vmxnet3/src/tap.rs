//! A port for a host's tap interface.
//!
//! The tap has `IFF_VNET_HDR`: a header in front of each frame describes its offload, so that checksums and segmentation are done once, by
//! the last receiver that needs them.
#![allow(unsafe_code)] // The ioctls of /dev/net/tun have no safe wrapper.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::frame::{LARGE_FRAME_MAX, Offload};
use crate::segment::FramePort;
use crate::segmentation::Plan;

/// System calls of the segment's thread on an open tap.
pub const SYSCALLS: &[i64] = &[libc::SYS_read, libc::SYS_writev];

/// Bytes of `struct virtio_net_hdr`.
const HEADER: usize = 10;
const NEEDS_CHECKSUM: u8 = 1;
const CHECKSUM_VALID: u8 = 2;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;
const CWR: u8 = 0x80;
/// Flags of each tap.
const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// Why a tap can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is invalid.
    #[error("{ifname:?} can't be a network interface's name; use 1 to 15 letters, digits, '-', '_' or '.'")]
    Name {
        /// Name of the interface.
        ifname: String,
    },
    /// The tun driver isn't loaded, or this user may not open it.
    #[error("/dev/net/tun can't be opened; load the kernel module tun, and let this user read and write it")]
    Driver(#[source] io::Error),
    /// The kernel refused the interface.
    #[error("Tap {ifname} can't be opened; {advice}")]
    Refused {
        /// Name of the interface.
        ifname: String,
        /// Advice for the user.
        advice: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The passed descriptor isn't a tap of the required kind.
    #[error("A descriptor that was handed over is no tap with IFF_NO_PI and IFF_VNET_HDR")]
    NoTap(#[source] io::Error),
}

/// One queue of a tap interface.
#[derive(Debug)]
pub struct Tap {
    ifname: String,
    fd: OwnedFd,
}

type Name = [libc::c_char; libc::IFNAMSIZ];

fn name_bytes(ifname: &str) -> Result<Name, TapError> {
    let bytes = ifname.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let wrong = bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || ifname == "." || ifname == "..";
    if wrong || !bytes.iter().all(plain) {
        return Err(TapError::Name { ifname: ifname.to_owned() });
    }
    let mut name: Name = [0; libc::IFNAMSIZ];
    for (to, from) in name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    Ok(name)
}

fn request(name: Name, flags: i32) -> libc::ifreq {
    // The flags have 16 bits, of which the highest is the sign.
    let ifru_flags = u16::try_from(flags).unwrap_or(0).cast_signed();
    libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags } }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn ioctl_request(fd: BorrowedFd<'_>, number: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the ioctls that this module passes read or write one struct ifreq.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(request)) })
}

fn ioctl_int(fd: BorrowedFd<'_>, number: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the ioctls that this module passes here read one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_ref(&value)) })
}

fn interface_flags(name: Name) -> io::Result<i32> {
    let mut answer = request(name, 0);
    ioctl_request(control_socket()?.as_fd(), libc::SIOCGIFFLAGS, &mut answer)?;
    // SAFETY: SIOCGIFFLAGS has filled in the flags.
    Ok(i32::from(unsafe { answer.ifr_ifru.ifru_flags }.cast_unsigned()))
}

fn control_socket() -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

impl Tap {
    /// Opens an existing tap, or creates one that exists as long as it is open, and brings that up.
    ///
    /// # Errors
    /// When the name is invalid, the driver is missing, or the kernel refuses.
    pub fn open(ifname: &str) -> Result<Self, TapError> {
        let name = name_bytes(ifname)?;
        let existed = interface_flags(name).is_ok();
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty())
            .map_err(|error| TapError::Driver(error.into()))?;
        let refused = |source: io::Error| TapError::Refused {
            ifname: ifname.to_owned(),
            advice: match source.raw_os_error() {
                Some(libc::EPERM) if !existed => "create it beforehand, for the daemon's user: ip tuntap add",
                Some(libc::EPERM) => "it belongs to another user",
                Some(libc::EBUSY) => "another process has it open",
                Some(libc::EINVAL) => {
                    "an interface of that name is no tap, or one for several queues; recreate it"
                }
                _ => "the kernel refused it",
            },
            source,
        };
        ioctl_request(fd.as_fd(), libc::TUNSETIFF, &mut request(name, FLAGS)).map_err(refused)?;
        let tap = Self { ifname: ifname.to_owned(), fd };
        tap.set_up().map_err(refused)?;
        if !existed {
            let flags = interface_flags(name).map_err(refused)? | libc::IFF_UP;
            let socket = control_socket().map_err(refused)?;
            ioctl_request(socket.as_fd(), libc::SIOCSIFFLAGS, &mut request(name, flags)).map_err(refused)?;
            tracing::info!("Tap {ifname} was created and lasts as long as this process has it open");
        } else if interface_flags(name).is_ok_and(|flags| flags & libc::IFF_UP == 0) {
            tracing::warn!("Tap {ifname} is down; no frame passes until: ip link set {ifname} up");
        }
        Ok(tap)
    }

    /// Adopts one queue of an open tap.
    ///
    /// # Errors
    /// When it isn't a tap with `IFF_NO_PI` and `IFF_VNET_HDR`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let mut answer = request([0; libc::IFNAMSIZ], 0);
        ioctl_request(fd.as_fd(), libc::TUNGETIFF, &mut answer).map_err(TapError::NoTap)?;
        // SAFETY: TUNGETIFF has filled in the flags.
        let flags = i32::from(unsafe { answer.ifr_ifru.ifru_flags }.cast_unsigned());
        if flags & FLAGS != FLAGS {
            return Err(TapError::NoTap(io::ErrorKind::InvalidInput.into()));
        }
        let bytes = answer.ifr_name.map(i8::cast_unsigned);
        let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let tap = Self { ifname: String::from_utf8_lossy(name).into_owned(), fd };
        rustix::fs::fcntl_getfl(&tap.fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(&tap.fd, flags | OFlags::NONBLOCK))
            .map_err(|error| TapError::NoTap(error.into()))?;
        tap.set_up().map_err(TapError::NoTap)?;
        Ok(tap)
    }

    /// Sets the header's format, and the offloads that the host may leave to the segment.
    fn set_up(&self) -> io::Result<()> {
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
        ioctl_int(self.fd.as_fd(), libc::TUNSETVNETHDRSZ, i32::try_from(HEADER).unwrap_or(0))?;
        ioctl_int(self.fd.as_fd(), libc::TUNSETVNETLE, 1)?;
        let result =
            // SAFETY: TUNSETOFFLOAD takes its argument by value and accesses no memory.
            unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) };
        check(result)
    }

    /// Name of the interface.
    #[must_use]
    pub fn ifname(&self) -> &str {
        &self.ifname
    }
}

impl FramePort for Tap {
    fn receive(&mut self, frame: &mut Vec<u8>) -> io::Result<Option<Offload>> {
        frame.reserve(HEADER + LARGE_FRAME_MAX);
        match rustix::io::read(&self.fd, spare_capacity(frame)) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let Some((header, _)) = frame.split_first_chunk::<HEADER>() else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let offload = parse_header(header);
        frame.drain(..HEADER);
        offload.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<()> {
        let header = make_header(frame, offload).ok_or(io::ErrorKind::InvalidInput)?;
        rustix::io::writev(&self.fd, &[IoSlice::new(&header), IoSlice::new(frame)])?;
        Ok(())
    }

    fn finishes(&self) -> bool {
        true
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// The offload of a frame from the host. `None` for segmentation other than of TCP, which was not offered.
fn parse_header(header: &[u8; HEADER]) -> Option<Offload> {
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    match header[1] & !GSO_ECN {
        GSO_TCPV4 | GSO_TCPV6 => Some(Offload::Tso { mss: word(4) }),
        GSO_NONE if header[0] & NEEDS_CHECKSUM != 0 => {
            Some(Offload::Checksum { start: word(6), at: word(6).checked_add(word(8))? })
        }
        GSO_NONE if header[0] & CHECKSUM_VALID != 0 => Some(Offload::Verified),
        GSO_NONE => Some(Offload::None),
        _ => None,
    }
}

/// The header for a frame. `None` when a packet for segmentation isn't TCP.
fn make_header(frame: &[u8], offload: Offload) -> Option<[u8; HEADER]> {
    let (mut flags, mut gso, mut words) = (0, GSO_NONE, [0_u16; 4]);
    match offload {
        Offload::None => {}
        Offload::Verified => flags = CHECKSUM_VALID,
        Offload::Checksum { start, at } => {
            flags = NEEDS_CHECKSUM;
            words = [0, 0, start, at.checked_sub(start)?];
        }
        Offload::Tso { mss } => {
            let plan = Plan::new(&frame[..frame.len().min(256)], frame.len(), mss)?;
            let l4 = plan.transport.l4;
            flags = NEEDS_CHECKSUM;
            // A packet of a single segment needs no segmentation.
            if plan.count > 1 {
                let congestion = if frame.get(l4 + 13)? & CWR != 0 { GSO_ECN } else { 0 };
                gso = if plan.transport.v6 { GSO_TCPV6 } else { GSO_TCPV4 } | congestion;
                words[..2].copy_from_slice(&[u16::try_from(plan.headers).ok()?, mss]);
            }
            words[2..].copy_from_slice(&[u16::try_from(l4).ok()?, 16]);
        }
    }
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&[flags, gso]);
    for (chunk, word) in header[2..].chunks_exact_mut(2).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    Some(header)
}

#[cfg(test)]
mod tests;
