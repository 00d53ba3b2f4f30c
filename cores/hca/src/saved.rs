//! The saved state of an HCA: one object at a time, in types of their own, separate from those at run time.
//!
//! ```text
//! source:       Engine::track ─ touched ─▶ save ─▶ bytes … stop … objects touched since ─▶ bytes
//! destination:  Engine::add_device, dormant ─▶ restore, object by object ─▶ start
//! ```
//! Names (handles, queue pair numbers, keys) don't change, and neither do stamps. References between objects are handle and stamp, so a
//! reference to a destroyed object finds nothing on the destination either. The provider defines the guest's rings ([`crate::provider`]).
//!
//! Version rule: [`VERSION`] precedes each object. A field more or less is another version, for which a type of its own here fills in the
//! missing fields. Other versions are refused with one sentence. The bytes may be hostile: decoding checks every length against the bytes
//! available, and restoring checks every value that the engine relies on.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::attributes::{Access, QpAttributes, QpKind, QpState};
use crate::counters::{DeviceCounters, QpCounters};
use crate::memory::{Extent, Kind as RegionKind};
use crate::names::{Gid, Qpn};
use crate::work::{Arm, ReceiveRequest, SendRequest, Status};

/// Version of these types.
pub const VERSION: u8 = 1;
/// Limit of the size of one object, bytes.
pub const MAX_OBJECT: usize = 1 << 20;

/// Kind of object, in order of creation: later kinds refer to earlier ones.
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
    /// Kind of object.
    pub kind: Kind,
    /// Its handle.
    pub handle: u32,
}

/// A device. Saved last, when it is stopped: its lists are its pending work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Addresses: index, address, MAC.
    pub gids: Vec<(u32, Gid, [u8; 6])>,
    /// Counts since the device was created, without those that a migration doesn't transfer.
    pub counters: DeviceCounters,
    /// Whether arms of completion queues are exact.
    pub exact: bool,
    /// Queue pairs that were active, or waited.
    pub active: Vec<u32>,
    /// Completion queues whose consumers were to be checked.
    pub watched: Vec<u32>,
    /// Completion queues with an event that the sink had no room for.
    pub notifying: Vec<u32>,
}

/// A context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// Number that is never reused; it distinguishes objects with the same handle.
    pub stamp: u64,
    /// Whether arms of its completion queues are exact.
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
    /// Number that is never reused; it distinguishes objects with the same handle.
    pub stamp: u64,
    /// Handle of the user context that owns it.
    pub context: u32,
    /// Accepts no completions any more.
    pub failed: bool,
    /// Arms are exact.
    pub exact: bool,
    /// The armed event.
    pub arm: Option<Arm>,
    /// Number of completions pushed.
    pub pushed: u64,
    /// Value of `pushed` after the last solicited completion.
    pub solicited: u64,
    /// Number consumed when the last event was sent; `None` before the first.
    pub notified_at: Option<u64>,
    /// The ring.
    pub ring: R,
}

/// A shared receive queue, with its ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Srq<R> {
    /// Number that is never reused; it distinguishes objects with the same handle.
    pub stamp: u64,
    /// Protection domain.
    pub pd: u32,
    /// Handle of the user context that owns it.
    pub context: u32,
    /// Capacity, requests.
    pub max_wr: u32,
    /// Limit of elements per request.
    pub max_sge: u32,
    /// Limit of the limit event.
    pub limit: u32,
    /// The ring.
    pub ring: R,
}

/// A request that a transport has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outstanding {
    /// The request.
    pub request: SendRequest,
    /// Outcome, while earlier requests are not complete.
    pub outcome: Option<Result<u32, Status>>,
}

/// State of a queue pair with a remote peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elsewhere {
    /// Token of the first outstanding request.
    pub first_token: u64,
    /// Requests that the transport has, in order.
    pub outstanding: Vec<Outstanding>,
    /// The peer waits for a receive.
    pub awaits_receive: bool,
}

/// The current request of a send queue. Its progress to a local peer isn't saved: when the path changes, it restarts with the receive that
/// it had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Current {
    /// The request.
    pub request: SendRequest,
    /// RNR waits without success.
    pub rnr_waits: u8,
    /// Timeouts without a response.
    pub timeouts: u8,
    /// Requests fetched behind it, with their outcomes if known.
    pub behind: Vec<Outstanding>,
}

/// A queue pair, with its rings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qp<S, R> {
    /// Number that is never reused; it distinguishes objects with the same handle.
    pub stamp: u64,
    /// State of IBTA's queue pair state machine.
    pub state: QpState,
    /// Transport service.
    pub kind: QpKind,
    /// Whether every send request produces a completion.
    pub signal_all: bool,
    /// Protection domain.
    pub pd: u32,
    /// Handle of the user context that owns it.
    pub context: u32,
    /// Completion queue of the send queue.
    pub send_cq: Reference,
    /// Completion queue of the receive queue.
    pub receive_cq: Reference,
    /// Shared receive queue.
    pub srq: Option<Reference>,
    /// Number in packets, 24 bits.
    pub qpn: Qpn,
    /// Number of times that it left RESET.
    pub incarnation: u32,
    /// Attributes; the PSNs are the current ones if no transport counts them.
    pub attributes: QpAttributes,
    /// Own address.
    pub source_gid: Gid,
    /// The first message was reported.
    pub established: bool,
    /// Whether a transport serves it.
    pub carried: bool,
    /// Counts since the queue pair was created.
    pub counters: QpCounters,
    /// State of requests and receives that a transport has.
    pub elsewhere: Option<Elsewhere>,
    /// The current request.
    pub current: Option<Current>,
    /// Receives that were taken and are not complete, oldest first. More than one only if a host's RDMA device had them. (Up to one is
    /// encoded as the `Option` of earlier releases, which refuse more than one as damaged.)
    pub taken: Vec<ReceiveRequest>,
    /// The send ring.
    pub send: S,
    /// The receive ring.
    pub receive: Option<R>,
}

/// Why a saved state is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidState {
    /// A version other than [`VERSION`].
    #[error(
        "The saved object has version {0}, this program knows {VERSION}; use the same release on both hosts"
    )]
    Version(u8),
    /// Bytes that don't decode as such an object.
    #[error("The saved object is damaged ({0} bytes)")]
    Damaged(usize),
    /// Larger than [`MAX_OBJECT`].
    #[error("The saved object has {0} bytes, {MAX_OBJECT} is the most: the source is faulty")]
    Big(usize),
    /// The device doesn't exist, or isn't stopped.
    #[error("There is no dormant device that the saved object could belong to")]
    NoDevice,
    /// An invalid value.
    #[error("The saved {kind} {handle} has an impossible {what}")]
    Field {
        /// Kind of object.
        kind: &'static str,
        /// Its handle.
        handle: u32,
        /// Name of the value.
        what: &'static str,
    },
    /// Another device of the segment has that address.
    #[error("The address {0:?} of the saved device belongs to another device of this segment")]
    AddressTaken(Gid),
}

/// Encodes an object, its version first.
#[must_use]
pub fn encode<T: Serialize>(object: &T) -> Vec<u8> {
    // Fails only for types that postcard can't encode, which these aren't.
    postcard::to_extend(object, vec![VERSION]).unwrap_or_default()
}

/// Decodes a saved object from bytes that may be hostile.
///
/// # Errors
/// When the bytes aren't exactly one such object.
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
