//! Moving a VM: what is asked of its monitor, and what it reports.
//!
//! A sandboxed monitor opens no connections. Whoever asks it to move opens them and hands them over: a packet with the
//! request and the connected streams, on a Unix socket beside the API's. Reports come back on the same connection, the last
//! one says how it ended.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most streams of one migration.
pub const MOST_STREAMS: usize = 16;
/// Largest packet in bytes.
const LARGEST_PACKET: usize = 256 << 10;

/// Where a VM's monitor takes migration requests, beside its API socket.
pub fn socket_of(api_socket: &Path) -> PathBuf {
    let mut name = api_socket.as_os_str().to_owned();
    name.push(".migrate");
    PathBuf::from(name)
}

/// Asks a VM's monitor to move it over the streams that come with this packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationRequest {
    /// Where the streams lead to, for messages.
    pub destination: String,
    /// How long the guest may stand still, milliseconds. Memory is copied again until the rest is expected to fit.
    pub downtime_ms: u64,
    /// Gives up after so many seconds without having stopped the guest; 0: never.
    pub timeout_seconds: u64,
    /// How much of the time vCPUs may be held back where memory changes faster than it is copied, per cent; 0: not at all.
    pub max_throttle_percent: u8,
    /// The guest may run at the destination before all its memory is there (post-copy): after so many copies of memory, or earlier when
    /// they don't get less; 0: before any. `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy_after: Option<u32>,
    /// Disks whose content is copied along, by name (`disk0`); none named: all that the guest may write and that aren't shared. `None`: none, they are
    /// the same files at both ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Vec<String>>,
    /// Names of all VMs that move together, this one as well: all of them, or none. Empty: it moves by itself.
    #[serde(default)]
    pub together: Vec<String>,
    /// The cluster key that streams are encrypted with; `None`: they aren't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<StreamKey>,
}

/// A secret on its way from who asks to the monitor, over a Unix socket. Never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamKey(pub [u8; 32]);

impl std::fmt::Debug for StreamKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("StreamKey")
    }
}

/// What a migration is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationPhase {
    /// The destination looks whether it can take the VM.
    Asking,
    /// Memory is copied while the guest runs.
    Copying,
    /// The guest stands still; the rest is copied.
    Stopped,
    /// The destination has everything and was told to run the VM.
    Committing,
    /// The VM runs at the destination, and the rest of its memory is copied (post-copy).
    PostCopy,
    /// The VM runs at the destination.
    Done,
    /// It was given up; the VM runs here.
    Failed,
    /// The destination was told to run the VM, and hasn't said that it does: the VM stands still here.
    InDoubt,
    /// The VM ran at the destination when the connection was lost, with memory still here: it can't go on here.
    Lost,
}

impl MigrationPhase {
    /// Whether no other follows.
    #[must_use]
    pub fn is_last(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::InDoubt | Self::Lost)
    }
}

/// How far a migration is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationProgress {
    /// Where to.
    pub destination: String,
    /// What it is at.
    pub phase: MigrationPhase,
    /// Copies of memory that were begun.
    pub round: u32,
    /// Bytes sent, page contents and all else.
    pub bytes_sent: u64,
    /// Pages that changed since they were copied, at the end of the last round.
    pub pages_left: u64,
    /// Bytes of disks that are copied along and are still to be copied, or were written again since.
    #[serde(default)]
    pub disk_bytes_left: u64,
    /// In post-copy: pages that were sent because the guest waited for them. `pages_left` are those that weren't sent yet.
    #[serde(default)]
    pub pages_asked_for: u64,
    /// Bytes per second of the last round.
    pub bytes_per_second: u64,
    /// How long the guest would stand still if it was stopped at the end of the last round, milliseconds.
    pub predicted_pause_ms: u64,
    /// How much vCPUs are held back, per cent of the time.
    pub throttle_percent: u8,
    /// Since the request, milliseconds.
    pub elapsed_ms: u64,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What came of it, once it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<MigrationTimeline>,
}

/// One copy of memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationRound {
    /// Since the request, milliseconds.
    pub began_ms: u64,
    /// How long it took, milliseconds.
    pub took_ms: u64,
    /// Pages that were looked at.
    pub pages: u64,
    /// Those of them that were zero and needed no copy.
    pub zero_pages: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Pages that changed meanwhile.
    pub dirtied: u64,
    /// Bytes of disks that were copied, zeroes and holes as well.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes of disks that were to be copied again at the end: the guest wrote there meanwhile.
    #[serde(default)]
    pub disk_bytes_dirtied: u64,
    /// How much vCPUs were held back, per cent of the time.
    pub throttle_percent: u8,
    /// Whether the guest stood still.
    pub stopped: bool,
}

/// What happened between the guest's start at the destination and the arrival of its last page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PostCopyTimeline {
    /// Pages that were still to come when the guest was stopped.
    pub missing_pages: u64,
    /// Those of them that were sent because they were asked for.
    pub asked_pages: u64,
    /// Those that were sent without.
    pub pushed_pages: u64,
    /// Pages that never came, because the VM had ended before.
    pub left_pages: u64,
    /// Bytes sent, as seen from the guest's stop.
    pub bytes: u64,
    /// From the destination's word that the VM runs to the last page, milliseconds.
    pub took_ms: f64,
    /// Pages that something waited for at the destination.
    pub faults: u64,
    /// Half of these waits were no longer than this, microseconds.
    pub fault_median_us: u32,
    /// The longest wait, microseconds.
    pub fault_worst_us: u32,
}

/// How long queue pairs that face the VM were held on a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PeerPause {
    /// The host's name in the cluster.
    pub host: String,
    /// From when they were held until they went on, as that host saw it, milliseconds.
    pub pause_ms: f64,
}

/// A disk whose content was copied along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirroredDisk {
    /// Its name in the VM.
    pub name: String,
    /// How large it is.
    pub bytes: u64,
    /// Bytes of it that were copied in all rounds, zeroes and holes as well.
    pub copied: u64,
}

/// What happened in a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationTimeline {
    /// Where to.
    pub destination: String,
    /// Streams that were used.
    pub streams: usize,
    /// Copies of memory, the last one while the guest stood still.
    pub rounds: Vec<MigrationRound>,
    /// Bytes sent in all.
    pub bytes: u64,
    /// Bytes of state besides memory.
    pub state_bytes: u64,
    /// From the request to the guest's stop, milliseconds.
    pub until_stop_ms: f64,
    /// Stopping vCPUs and devices, milliseconds.
    pub stop_ms: f64,
    /// Sending the rest of memory and the state, milliseconds.
    pub rest_ms: f64,
    /// The destination's restoring and its answer, milliseconds.
    pub restore_ms: f64,
    /// Commit, and the destination's word that the VM runs, milliseconds.
    pub commit_ms: f64,
    /// How long the guest stood still as seen from here: the sum of the four before.
    pub pause_ms: f64,
    /// All of it.
    pub total_ms: f64,
    /// How long each host of a peer held the queue pairs that face the VM, where it has RDMA NICs; hosts that didn't say so in a second are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerPause>,
    /// Disks whose content was copied along.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<MirroredDisk>,
    /// What came after the pause, where memory did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyTimeline>,
}

/// What a monitor says to who asked for a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum MigrationReport {
    /// How far it is; the last report has a final phase.
    Progress(Box<MigrationProgress>),
    /// It wasn't begun, and why.
    Refused {
        /// One sentence.
        problem: String,
    },
}

/// A connection for packets with descriptors.
#[derive(Debug)]
pub struct Packets(OwnedFd);

impl Packets {
    /// Connects to a monitor.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self(fd))
    }

    /// Over a connected socket of type SOCK_SEQPACKET.
    pub fn over(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Two ends that are connected, for tests.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Sends one packet. With `wait` off, a packet that the other side has no room for is an error of kind `WouldBlock`.
    ///
    /// # Errors
    /// When the other side has gone or has no room, or the packet is too long.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > LARGEST_PACKET || fds.len() > MOST_STREAMS {
            let text =
                format!("a packet of {} bytes with {} descriptors is too large", bytes.len(), fds.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_STREAMS))];
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::DONTWAIT, !wait);
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for one packet; `None` when the other side has gone.
    ///
    /// # Errors
    /// When it isn't a message, or the socket fails.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; LARGEST_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_STREAMS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.0, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            let text = "a packet is too long, or has too many descriptors";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let Some(bytes) = bytes.get(..received.bytes).filter(|bytes| !bytes.is_empty()) else {
            return Ok(None);
        };
        Ok(Some((serde_json::from_slice(bytes)?, fds)))
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request arrives with its streams; an end is an end; something else is refused.
    #[test]
    fn a_request_comes_with_its_streams() {
        let (a, b) = Packets::pair().unwrap();
        let request = MigrationRequest {
            destination: "h:1".to_owned(),
            downtime_ms: 300,
            timeout_seconds: 0,
            max_throttle_percent: 90,
            post_copy_after: None,
            mirror: Some(vec!["disk1".to_owned()]),
            together: vec!["a".to_owned(), "b".to_owned()],
            key: Some(StreamKey([7; 32])),
        };
        assert!(!format!("{request:?}").contains('7'), "secrets aren't printed");
        a.send(&request, &[a.as_fd(), b.as_fd()], true).unwrap();
        let (got, fds) = b.receive::<MigrationRequest>().unwrap().unwrap();
        assert_eq!((got, fds.len()), (request, 2));
        rustix::io::write(&a.0, b"{}").unwrap();
        assert!(b.receive::<MigrationRequest>().is_err());
        let too_many = vec![a.as_fd(); MOST_STREAMS + 1];
        assert!(a.send(&1, &too_many, true).is_err());
        drop((a, fds));
        assert!(b.receive::<MigrationRequest>().unwrap().is_none());
    }

    #[test]
    fn the_socket_is_beside_the_apis() {
        assert_eq!(socket_of(Path::new("/run/causeway/a.sock")), Path::new("/run/causeway/a.sock.migrate"));
    }
}
