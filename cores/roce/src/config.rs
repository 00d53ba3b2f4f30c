//! Attributes of a connection.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::congestion;
use crate::packet::DEFAULT_PKEY;

/// Path MTU: bytes of payload in a full packet. RoCEv2 defines five sizes, which have names here. Two engines may agree on any other size
/// that pads no packet but the last ([`Mtu::from_bytes`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Mtu(u32);

#[allow(missing_docs)] // The names say it.
impl Mtu {
    pub const B256: Self = Self(256);
    pub const B512: Self = Self(512);
    pub const B1024: Self = Self(1024);
    pub const B2048: Self = Self(2048);
    pub const B4096: Self = Self(4096);
}

impl Mtu {
    /// The smallest and the largest size, bytes.
    pub const RANGE: RangeInclusive<u32> = 256..=4096;

    /// The MTU of a verbs code, 1 to 5.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096]
            .get(usize::from(code.checked_sub(1)?))
            .copied()
    }

    /// An MTU of any multiple of 4 in [`Mtu::RANGE`].
    #[must_use]
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (Self::RANGE.contains(&bytes) && bytes.is_multiple_of(4)).then_some(Self(bytes))
    }

    /// Size in bytes.
    #[inline]
    #[must_use]
    pub fn bytes(self) -> u32 {
        self.0
    }
}

/// No path MTU has this size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("A path MTU of {0} bytes isn't a multiple of 4 from 256 to 4096")]
pub struct NoSuchMtu(u32);

impl TryFrom<u32> for Mtu {
    type Error = NoSuchMtu;

    fn try_from(bytes: u32) -> Result<Self, NoSuchMtu> {
        Self::from_bytes(bytes).ok_or(NoSuchMtu(bytes))
    }
}

impl From<Mtu> for u32 {
    fn from(mtu: Mtu) -> u32 {
        mtu.bytes()
    }
}

/// Kind of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reliability {
    /// RC: lost packets are retransmitted, and requests are acknowledged.
    Reliable,
    /// UC: a message with a lost packet is dropped, and nothing is acknowledged.
    Unreliable,
}

/// An injected bug, to prove that tests find it. Never set outside of tests.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Plant {
    #[default]
    None,
    /// The responder accepts the packet behind a missing one as if it were the missing one.
    SkipPsn,
    /// The responder executes repeated atomics again.
    ForgetReplay,
    /// The responder acknowledges packets whose predecessors are missing.
    EarlyAck,
}

/// Attributes of a connection. Fields of a few bits are used modulo their range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// RC or UC.
    pub reliability: Reliability,
    /// Own queue pair number, 24 bits.
    pub qpn: u32,
    /// The peer's queue pair number, 24 bits.
    pub peer_qpn: u32,
    /// First PSN sent, 24 bits.
    pub sq_psn: u32,
    /// First PSN expected, 24 bits.
    pub rq_psn: u32,
    /// Path MTU.
    pub mtu: Mtu,
    /// Partition key, sent and required.
    pub pkey: u16,
    /// Local ACK timeout code, 5 bits; 0 is no timeout.
    pub timeout: u8,
    /// Retransmissions without progress before a request fails, 3 bits.
    pub retry_count: u8,
    /// RNR waits without progress before a request fails, 3 bits; 7 is no limit.
    pub rnr_retry: u8,
    /// RNR timer code for the NAKs of this end, 5 bits.
    pub min_rnr_timer: u8,
    /// Limit of outstanding READs and atomics as requester. With 0 such requests fail with `LocalQpOperation`.
    pub max_rd_atomic: u8,
    /// Limit of outstanding READs and atomics as responder: as many are kept for repetition. With 0 such requests are refused.
    pub max_dest_rd_atomic: u8,
    /// Capacity of the send queue: requests that [`crate::Connection::post`] accepts before the oldest is complete.
    pub max_requests: u32,
    /// Limit of unacknowledged packets, expected READ responses included; at most 2^22. A READ that is longer than half of it is sent as
    /// several READ requests, which the peer executes separately.
    pub window: u32,
    /// Limit of unacknowledged bytes, counted as full packets; the smaller of both limits applies.
    pub window_bytes: u32,
    /// Whether a loss halves the window (to no fewer than 2 packets), and acknowledgements grow it again. This keeps retransmissions from
    /// flooding a network that drops excess packets without marking them.
    #[serde(default)]
    pub yields_to_loss: bool,
    /// Congestion control; `None` switches it off, for sending and for receiving.
    pub congestion: Option<congestion::Parameters>,
    #[doc(hidden)]
    #[serde(skip)]
    pub plant: Plant,
}

/// Limit of [`Config::max_requests`].
pub const MOST_REQUESTS: u32 = 1 << 16;
/// Limit of [`Config::window`]: half of what the protocol allows.
pub const MOST_WINDOW: u32 = 1 << 22;

impl Config {
    /// A reliable connection with values for a local network: MTU 1024, timeout code 14, 7 retries, 16 READs and atomics.
    #[must_use]
    pub fn new(qpn: u32, peer_qpn: u32, sq_psn: u32, rq_psn: u32) -> Self {
        Self {
            reliability: Reliability::Reliable,
            qpn,
            peer_qpn,
            sq_psn,
            rq_psn,
            mtu: Mtu::B1024,
            pkey: DEFAULT_PKEY,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            max_requests: 256,
            window: 512,
            window_bytes: 1 << 20,
            yields_to_loss: true,
            congestion: None,
            plant: Plant::None,
        }
    }

    /// The window in packets.
    pub(crate) fn window_packets(&self) -> u32 {
        self.window.min(self.window_bytes / self.mtu.bytes()).clamp(1, MOST_WINDOW)
    }

    /// Validates the attributes.
    pub(crate) fn check(&self) -> Result<(), InvalidConfig> {
        if self.max_requests == 0 || self.max_requests > MOST_REQUESTS {
            return Err(InvalidConfig::Requests(self.max_requests));
        }
        if self.congestion.is_some_and(|parameters| !parameters.are_valid()) {
            return Err(InvalidConfig::Congestion);
        }
        Ok(())
    }
}

/// Attributes that are out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// [`Config::max_requests`] is 0 or above its limit.
    #[error("A connection can't have room for {0} requests; 1 to 65536 are possible")]
    Requests(u32),
    /// [`Config::congestion`] has a parameter out of range.
    #[error(
        "The parameters of congestion control are no positive numbers, or the minimum rate is above the line rate"
    )]
    Congestion,
}
