//! Messages between a monitor and the host daemon about neighbours: one packet per message (SOCK_SEQPACKET), JSON, with
//! descriptors. gRPC can't carry descriptors, which these messages need.
//!
//! ```text
//!  monitor                                            daemon
//!    │◀── Hello: geometry, heartbeat ───────────────────│  after the connection
//!    │─── Join + RAM (read-only), signals ─────────────▶│  the VM, and the VMs that it permits
//!    │◀── Joined: slot ─────────────────── or Refused ──│
//!    │◀── Connect + RAM, segment, signal ───────────────│  a peer joins
//!    │◀── Common: slot, slots ──────────────────────────│  members that both may access; repeated after a change
//!    │─── Alive: the driver's count ───────────────────▶│  each heartbeat
//!    │◀── Gone: slot, epoch, reason ────────────────────│  the connection ends; memory stays mapped here until
//!    │─── Release: slot, epoch ────────────────────────▶│  the guest has released it
//! ```
//!
//! Version 3. Version 1 had no `Common`. Members of version 2 consider every frame's checksum correct, and don't know
//! the kind that says so. A daemon of another version sends it in `Hello`, and both sides close the connection.
//!
//! Descriptors of `Join`: the files that [`Piece::file`] indexes, then one eventfd per slot, which the peer in that
//! slot signals. Descriptors of `Connect`: the files, the segment, and the eventfd that signals the peer.

mod socket;

use serde::{Deserialize, Serialize};

pub use socket::{Caller, LARGEST_MESSAGE, Listener, MOST_FDS, Received, Socket, SocketError};

/// Version of the messages.
pub const VERSION: u32 = 3;
/// Name of the socket in the daemon's directory.
pub const SOCKET_NAME: &str = "neighbours";

/// A region of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Index of the message's file that contains it.
    pub file: u32,
    /// Offset in the file.
    pub offset: u64,
}

/// A VM that a member permits as peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permitted {
    /// The VM's name.
    pub vm: String,
    /// The user that runs its monitor. `None`: the member's own user.
    pub uid: Option<u32>,
}

/// A message from a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromMonitor {
    /// Requests membership.
    Join {
        /// The VM's name.
        vm: String,
        /// The neighbourhood's name.
        group: String,
        /// The permitted peers.
        permits: Vec<Permitted>,
        /// All of the VM's RAM.
        ram: Vec<Piece>,
        /// The slot in the previous connection to a daemon.
        slot: Option<u32>,
        /// The highest epoch that the monitor has seen.
        epoch: u32,
    },
    /// Heartbeat of the monitor. A changing count is the heartbeat of the guest's driver, too. 0: there is no driver.
    Alive {
        /// The driver's count.
        count: u64,
    },
    /// The guest has released a peer's memory, or the monitor ends the connection.
    Release {
        /// The peer's slot.
        slot: u32,
        /// The connection's epoch.
        epoch: u32,
    },
}

/// A message from the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FromDaemon {
    /// The first message.
    Hello {
        /// The daemon's [`VERSION`]; a monitor of another version closes the connection.
        version: u32,
        /// Base address of the first window.
        base: u64,
        /// Distance between windows in bytes.
        stride: u64,
        /// Number of windows.
        slots: u32,
        /// Entries per ring.
        entries: u32,
        /// Interval of heartbeats in milliseconds.
        heartbeat_ms: u32,
    },
    /// The monitor is a member.
    Joined {
        /// The member's slot.
        slot: u32,
    },
    /// Membership is refused, and the connection ends.
    Refused {
        /// The reason, one sentence.
        reason: String,
    },
    /// A peer becomes accessible.
    Connect {
        /// The peer's slot.
        slot: u32,
        /// The connection's epoch.
        epoch: u32,
        /// The peer's VM.
        vm: String,
        /// The peer's RAM.
        ram: Vec<Piece>,
        /// Size of the segment in bytes.
        segment: u64,
    },
    /// Other members that both this VM and a peer may access. Each of the two may pass addresses in these members'
    /// memory to the other.
    Common {
        /// The peer's slot.
        slot: u32,
        /// Bit set of slots.
        slots: u64,
    },
    /// A connection has ended.
    Gone {
        /// The peer's slot.
        slot: u32,
        /// The connection's epoch.
        epoch: u32,
        /// The reason, as the guest's register encodes it.
        reason: u32,
    },
}
