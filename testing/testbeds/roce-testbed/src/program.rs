//! Random programs for the endpoints.

#![allow(clippy::cast_possible_truncation)] // Numbers of at most a few requests.

use roce::config::{Config, Mtu, Plant, Reliability};
use roce::congestion::Parameters;
use roce::memory::Remote;
use roce::packet::DEFAULT_PKEY;
use roce::request::{Kind, Request};
use roce::status::Status;

use facilities::rng::SplitMix64;

/// Bytes of every receive.
pub(super) const RECEIVE: u32 = 4096;
/// Shared words per endpoint, for atomics.
pub(super) const WORDS: usize = 4;
/// The key of all accessible memory.
pub(super) const KEY: u32 = 0x1234_5678;

/// A request, and its expected outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Op {
    pub request: Request,
    /// Status if no fault interferes.
    pub expected: Status,
    /// Its memory is gone from this offset on.
    pub lost_from: Option<u32>,
    /// The responder must refuse it.
    pub refused: bool,
}

impl Op {
    /// Whether the peer sees it.
    pub(super) fn is_remote(&self) -> bool {
        !matches!(self.request.kind, Kind::Local { .. } | Kind::Failed(_))
    }
}

/// Faults of the network, in parts of 1000, and nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    pub loss: u32,
    pub duplication: u32,
    pub reordering: u32,
    pub marking: u32,
    pub jitter: u32,
    pub partitions: u32,
    pub migrations: u32,
    pub saves: u32,
    /// An endpoint disappears.
    pub kill: bool,
    /// Requests that must fail.
    pub errors: bool,
    /// Receives that are posted late.
    pub late_receives: u32,
    /// Receives that are never posted.
    pub no_receives: bool,
    /// Accesses that find not-present memory.
    pub late_memory: u32,
}

impl Faults {
    pub(super) fn roll(rng: &mut SplitMix64) -> Self {
        let mut some = |most: u32, parts: u32| if rng.chance(parts) { rng.between(1, most) } else { 0 };
        Self {
            loss: some(150, 700),
            duplication: some(100, 500),
            reordering: some(150, 500),
            marking: some(300, 300),
            jitter: some(5000, 700),
            partitions: some(3, 200),
            migrations: some(3, 250),
            saves: some(100, 300),
            late_receives: some(700, 600),
            kill: rng.chance(80),
            errors: rng.chance(150),
            no_receives: rng.chance(50),
            late_memory: if rng.chance(300) { rng.between(1, 100) } else { 0 },
        }
    }
}

/// Attributes of both ends of a connection, consistent with each other.
pub(super) fn roll_configs(rng: &mut SplitMix64, faults: &Faults, plant: Plant, index: u32) -> [Config; 2] {
    let first_psn = |rng: &mut SplitMix64| match rng.below(4) {
        // Just before the wrap.
        0 => 0xFF_FFFF - rng.below(20),
        1 => rng.below(3),
        _ => rng.below(1 << 24),
    };
    let psns = [first_psn(rng), first_psn(rng)];
    let depths = [u8_below(rng, 4) + 1, u8_below(rng, 4) + 1];
    let reliability = if rng.chance(60) { Reliability::Unreliable } else { Reliability::Reliable };
    let window = [1, 2, 3, 4, 8, 16, 32][rng.below(7) as usize];
    let congestion = (faults.marking > 0).then(|| Parameters {
        line_rate: 1e9,
        // A packet takes less than a sixth of the shortest timeout.
        minimum_rate: 2e7,
        additive: 1e7,
        hyper: 5e7,
        ..Parameters::default()
    });
    let timeout = u8_below(rng, 2) + 5;
    let rnr_retry = if faults.no_receives { u8_below(rng, 4) } else { 7 };
    let min_rnr_timer = u8_below(rng, 8) + 1;
    let max_requests = rng.between(1, 8);
    let yields_to_loss = rng.chance(500);
    [0, 1].map(|side: usize| Config {
        reliability,
        qpn: 2 * index + u32::from(side == 1) + 2,
        peer_qpn: 2 * index + u32::from(side == 0) + 2,
        sq_psn: psns[side],
        rq_psn: psns[1 - side],
        // Not a power of two in two of three programs: engines agree on any size.
        mtu: Mtu::from_bytes(256 + 4 * (psns[0] % 3)).unwrap_or(Mtu::B256),
        pkey: DEFAULT_PKEY,
        timeout,
        retry_count: 7,
        rnr_retry,
        min_rnr_timer,
        max_rd_atomic: depths[side],
        max_dest_rd_atomic: depths[1 - side],
        max_requests,
        window,
        window_bytes: u32::MAX,
        yields_to_loss,
        congestion,
        plant,
    })
}

fn u8_below(rng: &mut SplitMix64, limit: u32) -> u8 {
    u8::try_from(rng.below(limit)).unwrap_or(0)
}

/// The address that encodes request `index` of a flow; a word's number follows it.
pub(super) fn address(index: usize, word: u32) -> u64 {
    ((index as u64 + 1) << 32) | (u64::from(word) * 8)
}

/// The request that an address encodes.
pub(super) fn index_of(address: u64) -> Option<usize> {
    usize::try_from((address >> 32).checked_sub(1)?).ok()
}

/// A program of a few requests.
pub(super) fn roll_program(rng: &mut SplitMix64, faults: &Faults, config: &Config) -> Vec<Op> {
    let count = rng.below(7) as usize;
    let unreliable = config.reliability == Reliability::Unreliable;
    let mut ops = Vec::with_capacity(count);
    for index in 0..count {
        let length = match rng.below(6) {
            0 => 0,
            1 => rng.between(1, 8),
            2 => 256 * rng.between(1, 8),
            3 => rng.between(1, RECEIVE),
            _ => rng.between(1, 1500),
        };
        let remote = Remote { address: address(index, 0), rkey: KEY };
        let word = Remote { address: address(index, rng.below(4)), rkey: KEY };
        let mark = (index as u32).to_be_bytes();
        let kind = match rng.below(if unreliable { 4 } else { 11 }) {
            0 => Kind::Send { immediate: unreliable.then_some(mark), invalidate: None },
            1 => Kind::Send { immediate: Some(mark), invalidate: None },
            2 => Kind::Write { remote, immediate: None },
            3 => Kind::Write { remote, immediate: Some(mark) },
            4 => Kind::Send { immediate: None, invalidate: Some(index as u32) },
            5 | 6 => Kind::Read { remote },
            7 | 8 => Kind::FetchAdd { remote: word, add: rng.bits() },
            9 => Kind::CompareSwap { remote: word, compare: 0, swap: rng.bits() },
            _ => Kind::Local { wait: rng.chance(500) },
        };
        let mut request = Request::new(index as u64, kind, length);
        request.fence = rng.chance(100);
        request.solicited = rng.chance(200);
        let mut op = Op { request, expected: Status::Success, lost_from: None, refused: false };
        if faults.errors && !unreliable && rng.chance(150) {
            make_wrong(rng, &mut op);
        }
        ops.push(op);
    }
    ops
}

/// Makes a request invalid.
fn make_wrong(rng: &mut SplitMix64, op: &mut Op) {
    match (&mut op.request.kind, rng.below(3)) {
        (Kind::Send { .. }, 0) => {
            op.request.length = RECEIVE + rng.between(1, 600);
            op.expected = Status::RemoteInvalidRequest;
            op.refused = true;
        }
        (Kind::Send { .. } | Kind::Write { .. }, 1) if op.request.length > 0 => {
            op.lost_from = Some(rng.below(op.request.length) / 256 * 256);
            op.expected = Status::LocalProtection;
        }
        (Kind::Write { remote, .. } | Kind::Read { remote }, _) if op.request.length > 0 => {
            remote.rkey = 1;
            op.expected = Status::RemoteAccess;
            op.refused = true;
        }
        (Kind::FetchAdd { remote, .. } | Kind::CompareSwap { remote, .. }, 0) => {
            remote.address += 4;
            op.expected = Status::RemoteInvalidRequest;
            op.refused = true;
        }
        (Kind::FetchAdd { remote, .. } | Kind::CompareSwap { remote, .. }, _) => {
            remote.rkey = 1;
            op.expected = Status::RemoteAccess;
            op.refused = true;
        }
        (kind @ Kind::Local { .. }, _) => {
            *kind = Kind::Failed(Status::LocalQpOperation);
            op.expected = Status::LocalQpOperation;
        }
        _ => {}
    }
}

/// Byte `offset` of a request's message.
#[inline]
pub(super) fn byte(flow: u32, index: usize, offset: u64) -> u8 {
    // Differs between flows, requests, and packets of a message.
    let mixed = (offset ^ (offset >> 8).wrapping_mul(0x9D))
        .wrapping_add(index as u64 * 0x55)
        .wrapping_add(u64::from(flow) * 0x1F);
    (mixed & 0xFF) as u8
}
