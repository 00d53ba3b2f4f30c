//! Live migration: requests to a VM's monitor, and its reports.
//!
//! A sandboxed monitor can't open connections. So the requester opens them and passes them to the monitor: one packet
//! with the request and the connected streams, on a Unix socket beside the API's. The monitor sends reports on the same
//! connection. The last report has the outcome.

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

/// Limit of streams per migration.
pub const MAX_STREAMS: usize = 16;
/// Limit of a packet in bytes.
const MAX_PACKET_BYTES: usize = 256 << 10;

/// Returns the path of the socket on which a VM's monitor accepts migration requests, beside its API socket.
pub fn socket_of(api_socket: &Path) -> PathBuf {
    let mut name = api_socket.as_os_str().to_owned();
    name.push(".migrate");
    PathBuf::from(name)
}

/// Requests that a VM's monitor migrates the VM over the streams that accompany this packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationRequest {
    /// Destination, for messages.
    pub destination: String,
    /// Limit of the blackout in milliseconds. Pre-copy rounds repeat until the rest is expected to fit.
    pub downtime_ms: u64,
    /// Aborts after this many seconds if the guest still runs here. 0: never.
    pub timeout_seconds: u64,
    /// Limit of vCPU throttling in per cent of the time, for memory that changes faster than it is copied. 0: no
    /// throttling.
    pub max_throttle_percent: u8,
    /// Post-copy: the guest may resume at the destination before all its memory is there. It does so after this many
    /// rounds, or earlier if they don't converge. 0: before any round. `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy_after: Option<u32>,
    /// Disks whose content migrates, by name (`disk0`). An empty list means all writable disks that aren't shared.
    /// `None` means no disk: both hosts have the same files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Vec<String>>,
    /// Names of all VMs that move together, including this one: either all of them move, or none. Empty: this VM moves
    /// alone.
    #[serde(default)]
    pub together: Vec<String>,
    /// The cluster key that encrypts the streams. `None`: unencrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<StreamKey>,
}

/// A secret that the requester passes to the monitor over a Unix socket. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamKey(pub [u8; 32]);

impl std::fmt::Debug for StreamKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("StreamKey")
    }
}

/// Phase of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationPhase {
    /// The destination checks whether it can accept the VM.
    Asking,
    /// Pre-copy: memory is copied while the guest runs.
    Copying,
    /// The guest is stopped, and the rest is copied.
    Stopped,
    /// The destination has everything and was asked to commit.
    Committing,
    /// The VM runs at the destination, and the rest of its memory is copied (post-copy).
    PostCopy,
    /// The VM runs at the destination.
    Done,
    /// The migration was aborted. The VM runs here.
    Failed,
    /// The source asked the destination to commit, and doesn't know the outcome. The VM is stopped here.
    InDoubt,
    /// The connection broke during post-copy, while this host still had memory of the VM. The VM can't run here.
    Lost,
}

impl MigrationPhase {
    /// Returns whether the phase is final.
    #[must_use]
    pub fn is_last(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::InDoubt | Self::Lost)
    }
}

/// Progress of a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationProgress {
    /// The destination.
    pub destination: String,
    /// The phase.
    pub phase: MigrationPhase,
    /// Number of rounds that have started.
    pub round: u32,
    /// Bytes sent: page contents and all other data.
    pub bytes_sent: u64,
    /// Pages that were written since they were copied, at the end of the last round.
    pub pages_left: u64,
    /// Bytes of migrating disks that must still be copied, or copied again.
    #[serde(default)]
    pub disk_bytes_left: u64,
    /// Post-copy: pages that were sent because the guest faulted on them. `pages_left` then counts the pages that
    /// weren't sent yet.
    #[serde(default)]
    pub pages_asked_for: u64,
    /// Throughput of the last round in bytes per second.
    pub bytes_per_second: u64,
    /// Expected blackout in milliseconds if the guest was stopped at the end of the last round.
    pub predicted_pause_ms: u64,
    /// Throttling of vCPUs in per cent of the time.
    pub throttle_percent: u8,
    /// The peer that has to switch over first. Copying continues meanwhile, with little left to copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Time since the request in milliseconds.
    pub elapsed_ms: u64,
    /// The reason of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The timeline of a completed migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<MigrationTimeline>,
}

/// One pre-copy round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationRound {
    /// Start in milliseconds since the request.
    pub began_ms: u64,
    /// Duration in milliseconds.
    pub took_ms: u64,
    /// Pages that were examined.
    pub pages: u64,
    /// Zero pages among them, whose content isn't sent.
    pub zero_pages: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Pages that were written during the round.
    pub dirtied: u64,
    /// Bytes of disks that were copied, including zeros and holes.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes of disks that must be copied again, since the guest wrote there during the round.
    #[serde(default)]
    pub disk_bytes_dirtied: u64,
    /// Throttling of vCPUs in per cent of the time.
    pub throttle_percent: u8,
    /// Whether the guest was stopped.
    pub stopped: bool,
}

/// Events between the guest's start at the destination and the arrival of its last page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PostCopyTimeline {
    /// Not-present pages when the guest was stopped.
    pub missing_pages: u64,
    /// Pages that were sent on request.
    pub asked_pages: u64,
    /// Pages that were sent without a request.
    pub pushed_pages: u64,
    /// Pages that were never sent, because the VM had ended before.
    pub left_pages: u64,
    /// Bytes sent since the guest was stopped.
    pub bytes: u64,
    /// Time from the destination's report that the VM runs to the last page, in milliseconds.
    pub took_ms: f64,
    /// Page faults that waited at the destination.
    pub faults: u64,
    /// Median wait of a fault in microseconds.
    pub fault_median_us: u32,
    /// Longest wait of a fault in microseconds.
    pub fault_worst_us: u32,
}

/// Peer pause on one host: the suspension of queue pairs that are connected to the VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PeerPause {
    /// The host's name in the cluster.
    pub host: String,
    /// Time from suspension to resumption in milliseconds, as that host measured it.
    pub pause_ms: f64,
}

/// A disk whose content migrated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MirroredDisk {
    /// The disk's name in the VM.
    pub name: String,
    /// The disk's size in bytes.
    pub bytes: u64,
    /// Bytes that were copied in all rounds, including zeros and holes.
    pub copied: u64,
}

/// Timeline of a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationTimeline {
    /// The destination.
    pub destination: String,
    /// Number of streams.
    pub streams: usize,
    /// The rounds. The guest was stopped in the last one.
    pub rounds: Vec<MigrationRound>,
    /// Total bytes sent.
    pub bytes: u64,
    /// Bytes of state other than memory.
    pub state_bytes: u64,
    /// Time from the request to the guest's stop, in milliseconds.
    pub until_stop_ms: f64,
    /// Time to stop vCPUs and devices, in milliseconds.
    pub stop_ms: f64,
    /// Time to send the rest of memory and the state, in milliseconds.
    pub rest_ms: f64,
    /// Time until the destination has restored the VM and voted, in milliseconds.
    pub restore_ms: f64,
    /// Time from the commit to the destination's report that the VM runs, in milliseconds.
    pub commit_ms: f64,
    /// The blackout in milliseconds, measured at the source: the sum of the four above.
    pub pause_ms: f64,
    /// Duration of the whole migration in milliseconds.
    pub total_ms: f64,
    /// Peer pauses, per host with peers of the VM's RDMA NICs. Hosts that don't report within a second are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerPause>,
    /// Disks whose content migrated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<MirroredDisk>,
    /// The post-copy part, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyTimeline>,
}

/// A monitor's message to the requester of a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum MigrationReport {
    /// Progress. The last report has a final phase.
    Progress(Box<MigrationProgress>),
    /// The migration wasn't started.
    Refused {
        /// The reason, one sentence.
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
    /// No monitor listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self(fd))
    }

    /// Wraps a connected socket of type SOCK_SEQPACKET.
    pub fn over(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Creates two connected ends, for tests.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(a), Self(b)))
    }

    /// Sends one packet. Without `wait`, a full receive buffer is an error of kind `WouldBlock`.
    ///
    /// # Errors
    /// The peer has closed the connection or has no room, or the packet is too long.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_PACKET_BYTES || fds.len() > MAX_STREAMS {
            let text =
                format!("a packet of {} bytes with {} descriptors is too large", bytes.len(), fds.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_STREAMS))];
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

    /// Waits for one packet. Returns `None` if the peer has closed the connection.
    ///
    /// # Errors
    /// The packet isn't a message, or the socket fails.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_STREAMS))];
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

    /// A request arrives with its streams, a closed connection yields `None`, and anything else is an error.
    #[test]
    fn a_request_arrives_with_its_streams() {
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
        let too_many = vec![a.as_fd(); MAX_STREAMS + 1];
        assert!(a.send(&1, &too_many, true).is_err());
        drop((a, fds));
        assert!(b.receive::<MigrationRequest>().unwrap().is_none());
    }

    #[test]
    fn the_socket_is_beside_the_apis() {
        assert_eq!(socket_of(Path::new("/run/causeway/a.sock")), Path::new("/run/causeway/a.sock.migrate"));
    }
}
