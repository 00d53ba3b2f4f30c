//! Linux tap interfaces: opening, offloads, queues.
//!
//! A tap with `IFF_VNET_HDR` has the virtio header before each frame in both directions. So checksums and segmentation are done once, by
//! the last receiver that needs them.
#![allow(unsafe_code)] // The ioctls of /dev/net/tun have no safe wrapper.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::fs::{Mode, OFlags};
use virtio_bindings::virtio_net as b;

use super::announcement;
use super::backend::{NetBackend, NetChannel, PacketChannel};
use super::error::NetError;
use super::header::{HEADER_LEN, has};
use super::mac::MacAddress;

/// System calls of the threads of a device with a tap, after it was opened.
pub const SYSCALLS: &[i64] =
    &[libc::SYS_readv, libc::SYS_writev, libc::SYS_ioctl, libc::SYS_read, libc::SYS_write, libc::SYS_close];

/// Limit of queues of a tap (`MAX_TAP_QUEUES`).
pub const QUEUES_MAX: u16 = 256;

/// Flags of each tap.
const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// A network interface name, NUL-terminated.
type Name = [libc::c_char; libc::IFNAMSIZ];

fn name_bytes(ifname: &str) -> Result<Name, NetError> {
    let bytes = ifname.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%');
    if bytes.is_empty()
        || bytes.len() >= libc::IFNAMSIZ
        || !bytes.iter().all(plain)
        || ifname == "."
        || ifname == ".."
    {
        return Err(NetError::InterfaceName { ifname: ifname.to_owned() });
    }
    let mut name: Name = [0; libc::IFNAMSIZ];
    for (to, from) in name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    Ok(name)
}

fn request(name: Name, flags: i32) -> libc::ifreq {
    // The flags are those of <linux/if_tun.h>: 16 bits, of which the highest is the sign.
    let ifru_flags = u16::try_from(flags).unwrap_or(0).cast_signed();
    libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags } }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An ioctl with a `struct ifreq`.
fn ioctl_request(fd: BorrowedFd<'_>, number: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the ioctls that this module passes read or write one struct ifreq.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(request)) })
}

/// An ioctl with a pointer to an integer.
fn ioctl_int(fd: BorrowedFd<'_>, number: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the ioctls that this module passes here read one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_ref(&value)) })
}

/// An ioctl whose argument is the integer itself.
fn ioctl_value(fd: BorrowedFd<'_>, number: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value and accesses no memory.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), number, value) })
}

/// A tap with all its queues.
pub struct Tap {
    ifname: String,
    queues: Vec<OwnedFd>,
    /// Whether each queue is attached; `TUNSETQUEUE` refuses to attach one twice.
    attached: Mutex<Vec<bool>>,
    offloads: u64,
}

impl Tap {
    /// Opens an existing tap, or creates one that exists as long as it is open, with `pairs` queues.
    pub fn open(ifname: &str, pairs: u16) -> Result<Self, NetError> {
        let name = name_bytes(ifname)?;
        let existed = interface_flags(name).is_ok();
        let (one, several) = (FLAGS, FLAGS | libc::IFF_MULTI_QUEUE);
        let first = open_tun()?;
        let attach =
            |fd: &OwnedFd, flags| ioctl_request(fd.as_fd(), libc::TUNSETIFF, &mut request(name, flags));
        let invalid = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
        let mut flags = if pairs > 1 { several } else { one };
        let mut result = attach(&first, flags);
        // An existing tap determines whether it may have several queues, and the flag must match.
        if existed && result.as_ref().is_err_and(invalid) {
            let other = if pairs > 1 { attach(&open_tun()?, one) } else { attach(&first, several) };
            match other {
                Err(error) if invalid(&error) => return Err(NetError::NotATap { ifname: ifname.to_owned() }),
                other if pairs == 1 => (flags, result) = (several, other),
                // The tap has one queue.
                _ => {}
            }
        }
        result.map_err(|source| refused(ifname, existed, pairs > 1, source))?;
        let mut queues = vec![first];
        for _ in 1..pairs {
            let fd = open_tun()?;
            attach(&fd, flags).map_err(|source| refused(ifname, existed, true, source))?;
            queues.push(fd);
        }
        if !existed {
            bring_up(name).map_err(|source| NetError::Host {
                name: ifname.to_owned(),
                what: format!("bring tap {ifname} up"),
                source,
            })?;
            tracing::info!("Tap {ifname} was created and lasts as long as this VM");
        } else if interface_flags(name).is_ok_and(|flags| flags & libc::IFF_UP == 0) {
            tracing::warn!("Tap {ifname} is down; no frame passes until: ip link set {ifname} up");
        }
        Self::with_queues(ifname.to_owned(), queues)
    }

    /// Adopts open taps, one file descriptor per queue pair.
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, NetError> {
        let mut ifname = String::new();
        for fd in &fds {
            let no_tap = || NetError::NotATapFd { fd: fd.as_raw_fd() };
            let mut answer = request([0; libc::IFNAMSIZ], 0);
            ioctl_request(fd.as_fd(), libc::TUNGETIFF, &mut answer).map_err(|_| no_tap())?;
            // SAFETY: TUNGETIFF has filled in the flags.
            let flags = i32::from(unsafe { answer.ifr_ifru.ifru_flags }.cast_unsigned());
            if flags & FLAGS != FLAGS {
                return Err(no_tap());
            }
            let bytes = answer.ifr_name.map(i8::cast_unsigned);
            let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            ifname = String::from_utf8_lossy(name).into_owned();
            let nonblocking = rustix::fs::fcntl_getfl(fd)
                .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK))
                .and_then(|()| rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC));
            nonblocking.map_err(|error| NetError::Host {
                name: ifname.clone(),
                what: format!("set flags of file descriptor {}", fd.as_raw_fd()),
                source: error.into(),
            })?;
        }
        Self::with_queues(ifname, fds)
    }

    fn with_queues(ifname: String, queues: Vec<OwnedFd>) -> Result<Self, NetError> {
        let host = |what: &str, source| NetError::Host {
            name: ifname.clone(),
            what: format!("{what} of tap {ifname}"),
            source,
        };
        for fd in &queues {
            let size = i32::try_from(HEADER_LEN).unwrap_or(0);
            ioctl_int(fd.as_fd(), libc::TUNSETVNETHDRSZ, size)
                .and_then(|()| ioctl_int(fd.as_fd(), libc::TUNSETVNETLE, 1))
                .map_err(|source| host("set the header format", source))?;
        }
        let first = queues.first().ok_or(NetError::NotATapFd { fd: -1 })?;
        let offloads = probe_offloads(first.as_fd()).map_err(|source| host("set offloads", source))?;
        let attached = Mutex::new(vec![true; queues.len()]);
        Ok(Self { ifname, queues, attached, offloads })
    }

    /// Interface name.
    pub fn ifname(&self) -> &str {
        &self.ifname
    }

    /// MTU of the interface, if it is in this network namespace.
    pub fn mtu(&self) -> io::Result<u16> {
        let name = name_bytes(&self.ifname).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut answer = request(name, 0);
        ioctl_request(control_socket()?.as_fd(), libc::SIOCGIFMTU, &mut answer)?;
        // SAFETY: SIOCGIFMTU has filled in the MTU.
        let mtu = unsafe { answer.ifr_ifru.ifru_mtu };
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// The first queue: messages of a header of [`HEADER_LEN`] bytes and a frame, non-blocking.
    pub fn queue(&self) -> io::Result<OwnedFd> {
        self.queues.first().ok_or(io::ErrorKind::NotFound)?.try_clone()
    }

    /// One channel per queue pair.
    pub fn channels(&self) -> io::Result<Vec<Box<dyn NetChannel>>> {
        let channel = |fd: &OwnedFd| -> io::Result<Box<dyn NetChannel>> {
            Ok(Box::new(PacketChannel::new(fd.try_clone()?)))
        };
        self.queues.iter().map(channel).collect()
    }
}

impl NetBackend for Tap {
    fn description(&self) -> String {
        format!("tap {}", self.ifname)
    }

    fn offload_features(&self) -> u64 {
        self.offloads
    }

    fn set_guest_offloads(&self, features: u64) -> io::Result<()> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        ioctl_value(first.as_fd(), libc::TUNSETOFFLOAD, tun_offloads(features))
    }

    fn set_active_pairs(&self, pairs: u16) -> io::Result<()> {
        if self.queues.len() == 1 {
            return Ok(());
        }
        let mut attached = self.attached.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (index, (fd, state)) in self.queues.iter().zip(attached.iter_mut()).enumerate() {
            let wanted = index < usize::from(pairs);
            if *state != wanted {
                let flag = if wanted { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
                ioctl_request(fd.as_fd(), libc::TUNSETQUEUE, &mut request([0; libc::IFNAMSIZ], flag))?;
                *state = wanted;
            }
        }
        Ok(())
    }

    fn set_carrier(&self, up: bool) -> io::Result<()> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        ioctl_int(first.as_fd(), libc::TUNSETCARRIER, i32::from(up))
    }

    fn announce(&self, mac: MacAddress) -> io::Result<()> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        rustix::io::write(first, &announcement::message(mac))?;
        Ok(())
    }

    fn end_reason(&self) -> Option<String> {
        Some(format!("tap {} was deleted", self.ifname))
    }
}

/// The guest's offloads as flags of the tap. The kernel refuses segmentation without checksums.
fn tun_offloads(features: u64) -> libc::c_ulong {
    if !has(features, b::VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    let pairs = [
        (b::VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (b::VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (b::VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
        (b::VIRTIO_NET_F_GUEST_USO4, libc::TUN_F_USO4),
        (b::VIRTIO_NET_F_GUEST_USO6, libc::TUN_F_USO6),
    ];
    let chosen = pairs.into_iter().filter(|(bit, _)| has(features, *bit));
    let mut flags = chosen.fold(libc::TUN_F_CSUM, |flags, (_, flag)| flags | flag);
    let tso = libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    if has(features, b::VIRTIO_NET_F_GUEST_ECN) && flags & tso != 0 {
        flags |= libc::TUN_F_TSO_ECN;
    }
    // The kernel accepts USO for both address families or not at all.
    let uso = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    if flags & uso != uso {
        flags &= !uso;
    }
    libc::c_ulong::from(flags)
}

/// Probes the offloads of this kernel; all are off afterwards.
fn probe_offloads(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let bits = |list: &[u32]| list.iter().fold(0, |bits, bit| bits | 1u64 << bit);
    let basic = bits(&[
        b::VIRTIO_NET_F_CSUM,
        b::VIRTIO_NET_F_GUEST_CSUM,
        b::VIRTIO_NET_F_HOST_TSO4,
        b::VIRTIO_NET_F_HOST_TSO6,
        b::VIRTIO_NET_F_HOST_ECN,
        b::VIRTIO_NET_F_GUEST_TSO4,
        b::VIRTIO_NET_F_GUEST_TSO6,
        b::VIRTIO_NET_F_GUEST_ECN,
    ]);
    let ufo = bits(&[b::VIRTIO_NET_F_HOST_UFO, b::VIRTIO_NET_F_GUEST_UFO]);
    let uso = bits(&[b::VIRTIO_NET_F_HOST_USO, b::VIRTIO_NET_F_GUEST_USO4, b::VIRTIO_NET_F_GUEST_USO6]);
    let mut found = basic;
    for extra in [ufo, uso] {
        if ioctl_value(fd, libc::TUNSETOFFLOAD, tun_offloads(basic | extra)).is_ok() {
            found |= extra;
        }
    }
    ioctl_value(fd, libc::TUNSETOFFLOAD, tun_offloads(basic))?;
    ioctl_value(fd, libc::TUNSETOFFLOAD, 0)?;
    Ok(found)
}

fn open_tun() -> Result<OwnedFd, NetError> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|error| NetError::TunDevice {
        advice: match error {
            rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
                "load the kernel module with: modprobe tun"
            }
            _ => "it must be readable and writable for the user who runs the VM",
        },
        source: error.into(),
    })
}

fn refused(ifname: &str, existed: bool, multi_queue: bool, source: io::Error) -> NetError {
    let user = std::env::var("USER").unwrap_or_else(|_| rustix::process::geteuid().as_raw().to_string());
    let ifname = ifname.to_owned();
    let multi_queue = if multi_queue { " multi_queue" } else { "" };
    let advice = match source.raw_os_error() {
        Some(libc::EPERM) if !existed => return NetError::TapMissing { ifname, user, multi_queue, source },
        Some(libc::EPERM) => format!(
            "it belongs to another user; recreate it with: ip tuntap add {ifname} mode tap user {user}{multi_queue}"
        ),
        Some(libc::EBUSY) => "another process has it open".to_owned(),
        Some(libc::EINVAL) => format!(
            "it was created for one queue; recreate it with: ip tuntap add {ifname} mode tap user {user}{multi_queue}"
        ),
        _ => "the kernel refused it".to_owned(),
    };
    NetError::TapUnusable { ifname, advice, source }
}

fn control_socket() -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn interface_flags(name: Name) -> io::Result<i32> {
    let mut answer = request(name, 0);
    ioctl_request(control_socket()?.as_fd(), libc::SIOCGIFFLAGS, &mut answer)?;
    // SAFETY: SIOCGIFFLAGS has filled in the flags.
    Ok(i32::from(unsafe { answer.ifr_ifru.ifru_flags }.cast_unsigned()))
}

fn bring_up(name: Name) -> io::Result<()> {
    let flags = interface_flags(name)? | libc::IFF_UP;
    ioctl_request(control_socket()?.as_fd(), libc::SIOCSIFFLAGS, &mut request(name, flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_are_checked_before_the_kernel_sees_them() {
        for bad in ["", "a/b", "0123456789abcdef", "tap 0", "..", "tap%d", "t\u{e4}p"] {
            assert!(matches!(Tap::open(bad, 1), Err(NetError::InterfaceName { .. })), "{bad:?}");
        }
        assert!(name_bytes("tap0").is_ok());
    }

    #[test]
    fn segmentation_is_never_asked_for_without_checksums() {
        let everything = !(1u64 << b::VIRTIO_NET_F_GUEST_CSUM);
        assert_eq!(tun_offloads(everything), 0);
        assert_eq!(tun_offloads(u64::MAX), 0x7f);
    }

    #[test]
    fn an_interface_that_is_no_tap_is_refused_with_a_sentence() {
        let error = Tap::open("lo", 1).err();
        if let Some(error @ NetError::TunDevice { .. }) = &error {
            facilities::missing(facilities::Facility::Tun, error);
            return;
        }
        assert_eq!(
            error.map(|error| error.to_string()).as_deref(),
            Some("lo is a network interface, but no tap; choose another name or remove it")
        );
    }

    #[test]
    fn a_descriptor_that_is_no_tap_is_refused() {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(Tap::from_fds(vec![null]), Err(NetError::NotATapFd { .. })));
    }
}
