//! The saved state of an HCA: an object at a time, types of their own, apart from those at run time.
//!
//! ```text
//! source:       Engine::track ─ touched ─▶ save ─▶ bytes … stop … what was touched since ─▶ bytes
//! destination:  Engine::add_device, dormant ─▶ restore, object by object ─▶ start
//! ```
//! Names (handles, queue pair numbers, keys) stay what they are. Stamps do as well: references between objects are handle and stamp, so
//! a reference to what is gone leads nowhere here as it did there. What a guest's rings are is the provider's ([`crate::provider`]).
//!
//! Version rule: [`VERSION`] stands before each object; a field more or less is another version, and what an older one lacks is
//! filled in by a type of its own here. Other versions are refused with one sentence. Bytes may come from anywhere: decoding checks
//! every length against what is there, and restoring every value that the engine counts on.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::attributes::{Access, QpAttributes, QpKind, QpState};
use crate::counters::{DeviceCounters, QpCounters};
use crate::memory::{Extent, Kind as RegionKind};
use crate::names::{Gid, Qpn};
use crate::work::{Arm, ReceiveRequest, SendRequest, Status};

/// Version of these types.
pub const VERSION: u8 = 1;
/// Most bytes of one object.
pub const MAX_OBJECT: usize = 1 << 20;

/// What kind of object, in the order in which they are made: those behind refer to those before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The device itself; handle 0.
    Device = 0,
    /// A context.
    Context = 1,
    /// A protection domain.
    ProtectionDomain = 2,
    /// A memory region.
    MemoryRegion = 3,
    /// A completion queue.
    CompletionQueue = 4,
    /// A shared receive queue.
    SharedReceiveQueue = 5,
    /// A queue pair.
    QueuePair = 6,
}

impl Kind {
    /// All of them, in order.
    pub const ALL: [Self; 7] = [
        Self::Device,
        Self::Context,
        Self::ProtectionDomain,
        Self::MemoryRegion,
        Self::CompletionQueue,
        Self::SharedReceiveQueue,
        Self::QueuePair,
    ];
}

/// An object of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// What.
    pub kind: Kind,
    /// Its handle.
    pub handle: u32,
}

/// A device. Saved last, when it is stopped: what it lists is what it was about to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Addresses: index, address, MAC.
    pub gids: Vec<(u32, Gid, [u8; 6])>,
    /// Counters.
    pub counters: DeviceCounters,
    /// Whether arms of completion queues are exact.
    pub exact: bool,
    /// Queue pairs that were active, or waited.
    pub active: Vec<u32>,
    /// Completion queues whose consumers were to be looked at.
    pub watched: Vec<u32>,
    /// Completion queues with an event that found no room.
    pub notifying: Vec<u32>,
}

/// A context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// Stamp.
    pub stamp: u64,
    /// Arms of its completion queues are exact.
    pub exact: bool,
}

/// A protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pd {
    /// Its context.
    pub context: u32,
}

/// A memory region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    pub(crate) key: u32,
    pub(crate) pd: u32,
    pub(crate) access: Access,
    pub(crate) valid: bool,
    pub(crate) kind: RegionKind,
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) extent: Extent,
}

/// A reference: handle and stamp.
pub type Reference = (u32, u64);

/// A completion queue, with its ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cq<R> {
    /// Stamp.
    pub stamp: u64,
    /// Owner.
    pub context: u32,
    /// Takes nothing any more.
    pub failed: bool,
    /// Arms are exact.
    pub exact: bool,
    /// What its consumer waits for.
    pub arm: Option<Arm>,
    /// Completions pushed.
    pub pushed: u64,
    /// Of these, up to the last solicited one.
    pub solicited: u64,
    /// Consumed when the last event went out; `None` before the first.
    pub notified_at: Option<u64>,
    /// The ring.
    pub ring: R,
}

/// A shared receive queue, with its ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Srq<R> {
    /// Stamp.
    pub stamp: u64,
    /// Protection domain.
    pub pd: u32,
    /// Context.
    pub context: u32,
    /// Requests.
    pub max_wr: u32,
    /// Elements.
    pub max_sge: u32,
    /// Limit.
    pub limit: u32,
    /// The ring.
    pub ring: R,
}

/// A request that a transport has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outstanding {
    /// The request.
    pub request: SendRequest,
    /// How it ended, while earlier ones have not.
    pub outcome: Option<Result<u32, Status>>,
}

/// What a queue pair has whose peer is elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elsewhere {
    /// Token of the first outstanding request.
    pub first_token: u64,
    /// Requests that the transport has, in order.
    pub outstanding: Vec<Outstanding>,
    /// The peer waits for a receive.
    pub awaits_receive: bool,
}

/// The request that a send queue is at. How many of its bytes went to a peer of the same host isn't saved: where the path changes it
/// begins anew, with the receive that it had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Current {
    /// The request.
    pub request: SendRequest,
    /// Waits for a receive without success.
    pub rnr_waits: u8,
    /// Timeouts without an answer.
    pub timeouts: u8,
    /// Requests fetched behind it, and how they end, where that is known.
    pub behind: Vec<Outstanding>,
}

/// A queue pair, with its rings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qp<S, R> {
    /// Stamp.
    pub stamp: u64,
    /// State.
    pub state: QpState,
    /// Kind.
    pub kind: QpKind,
    /// Every request completes with a completion.
    pub signal_all: bool,
    /// Protection domain.
    pub pd: u32,
    /// Context.
    pub context: u32,
    /// Completion queue of the send queue.
    pub send_cq: Reference,
    /// Completion queue of the receive queue.
    pub receive_cq: Reference,
    /// Shared receive queue.
    pub srq: Option<Reference>,
    /// Number.
    pub qpn: Qpn,
    /// Times that it left RESET.
    pub incarnation: u32,
    /// Attributes; the PSNs are the present ones where no transport counts them.
    pub attributes: QpAttributes,
    /// Own address.
    pub source_gid: Gid,
    /// The first message was reported.
    pub established: bool,
    /// A transport carries it.
    pub carried: bool,
    /// Counters.
    pub counters: QpCounters,
    /// What a transport has.
    pub elsewhere: Option<Elsewhere>,
    /// The request that it is at.
    pub current: Option<Current>,
    /// Receives that were taken and are not complete, the oldest first; more than one only where a host's RDMA device had them. (Up to one they are
    /// the bytes of the `Option` that releases before had here; these take more than one for damage.)
    pub taken: Vec<ReceiveRequest>,
    /// The send ring.
    pub send: S,
    /// The receive ring.
    pub receive: Option<R>,
}

/// Why saved state can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidState {
    /// Another version.
    #[error(
        "The saved object has version {0}, this program knows {VERSION}; use the same release on both hosts"
    )]
    Version(u8),
    /// Not bytes of such an object.
    #[error("The saved object is damaged ({0} bytes)")]
    Damaged(usize),
    /// Larger than any object.
    #[error("The saved object has {0} bytes, {MAX_OBJECT} is the most: the source is faulty")]
    Big(usize),
    /// No such device, or one that runs.
    #[error("There is no dormant device that the saved object could belong to")]
    NoDevice,
    /// A value that no object has.
    #[error("The saved {kind} {handle} has an impossible {what}")]
    Field {
        /// Of what.
        kind: &'static str,
        /// Its handle.
        handle: u32,
        /// Which value.
        what: &'static str,
    },
    /// Another device of the segment has that address.
    #[error("The address {0:?} of the saved device belongs to another device of this segment")]
    AddressTaken(Gid),
}

/// A saved object as bytes, its version first.
#[must_use]
pub fn encode<T: Serialize>(object: &T) -> Vec<u8> {
    // Fails only for types that can't be encoded at all, which none of these are.
    postcard::to_extend(object, vec![VERSION]).unwrap_or_default()
}

/// A saved object from bytes that may come from anywhere.
///
/// # Errors
/// When they aren't all of such an object, and no more.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, InvalidState> {
    if bytes.len() > MAX_OBJECT {
        return Err(InvalidState::Big(bytes.len()));
    }
    let damaged = InvalidState::Damaged(bytes.len());
    let (&version, rest) = bytes.split_first().ok_or(damaged.clone())?;
    if version != VERSION {
        return Err(InvalidState::Version(version));
    }
    match postcard::take_from_bytes(rest) {
        Ok((object, [])) => Ok(object),
        _ => Err(damaged),
    }
}
