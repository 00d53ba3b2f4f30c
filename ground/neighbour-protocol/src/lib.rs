//! What a monitor and the host daemon tell each other about neighbours: one packet per message (SOCK_SEQPACKET), JSON,
//! descriptors beside it. gRPC can't carry descriptors, and everything here is about them.
//!
//! ```text
//!  monitor                                            daemon
//!    │◀── Hello: geometry, heartbeat ───────────────────│  on connecting
//!    │─── Join + RAM (read-only), signals ─────────────▶│  who it is, whom it permits
//!    │◀── Joined: slot ─────────────────── or Refused ──│
//!    │◀── Connect + RAM, segment, signal ───────────────│  a peer appears
//!    │◀── Common: slot, slots ──────────────────────────│  whom the two have in common; again when that changes
//!    │─── Alive: the driver's count ───────────────────▶│  each heartbeat
//!    │◀── Gone: slot, epoch, reason ────────────────────│  it is over; memory stays mapped here until
//!    │─── Release: slot, epoch ────────────────────────▶│  the guest has let go of it
//! ```
//!
//! Version 3: 1 had no `Common`; members of 2 took every frame for one whose checksum is right, and don't know the kind that says so. A daemon that has another version says so in its `Hello`, and neither goes on.
//!
//! Descriptors of `Join`: the files that [`Piece::file`] counts, then one eventfd per slot: what a peer in that slot signals.
//! Descriptors of `Connect`: the files, the segment, and the eventfd that signals the peer.

mod socket;

use serde::{Deserialize, Serialize};

pub use socket::{Caller, LARGEST_MESSAGE, Listener, MOST_FDS, Received, Socket, SocketError};

/// Version of the messages.
pub const VERSION: u32 = 3;
/// The socket's name in the daemon's folder.
pub const SOCKET_NAME: &str = "neighbours";

/// A piece of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Which of the message's files it lies in.
    pub file: u32,
    /// Where in it.
    pub offset: u64,
}

/// A VM that a member permits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permitted {
    /// Its name.
    pub vm: String,
    /// The user whose monitor runs it; left out: the member's own.
    pub uid: Option<u32>,
}

/// From a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromMonitor {
    /// It wants to be a member.
    Join {
        /// Its VM.
        vm: String,
        /// The neighbourhood.
        group: String,
        /// Whom it permits.
        permits: Vec<Permitted>,
        /// All of its RAM.
        ram: Vec<Piece>,
        /// The slot that it had when it was last connected to a daemon.
        slot: Option<u32>,
        /// The highest epoch that it knows.
        epoch: u32,
    },
    /// It lives; and so does its guest's driver, if the number changes from time to time. 0: there is no driver.
    Alive {
        /// The driver's count.
        count: u64,
    },
    /// It has let go of a peer's memory, or gives the connection up.
    Release {
        /// The peer.
        slot: u32,
        /// Which connection.
        epoch: u32,
    },
}

/// From the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromDaemon {
    /// First of all.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Start of the first window.
        base: u64,
        /// Bytes between windows.
        stride: u64,
        /// Windows.
        slots: u32,
        /// Entries per ring.
        entries: u32,
        /// Time between reports and counts, milliseconds.
        heartbeat_ms: u32,
    },
    /// It is a member.
    Joined {
        /// Its slot.
        slot: u32,
    },
    /// It isn't, and the connection ends.
    Refused {
        /// Why: a sentence.
        reason: String,
    },
    /// A peer may be seen from now on.
    Connect {
        /// Its slot.
        slot: u32,
        /// The name of this connection.
        epoch: u32,
        /// Its VM.
        vm: String,
        /// Its RAM.
        ram: Vec<Piece>,
        /// Bytes of the segment.
        segment: u64,
    },
    /// Others whom this VM and a peer may both see: each of the two may name their memory to the other.
    Common {
        /// The peer.
        slot: u32,
        /// A bit per slot.
        slots: u64,
    },
    /// A connection is over.
    Gone {
        /// The peer.
        slot: u32,
        /// Which connection.
        epoch: u32,
        /// Why, as the guest's register has it.
        reason: u32,
    },
}
