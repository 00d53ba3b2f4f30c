//! One migration of a VM, measured step by step.

use std::time::{Duration, Instant};

use hca::names::Gid;
use host::migration::{Destination, Place, Source};
use nomad::HostId;
use nomad::objects::{Kind, Piece};
use pvrdma_testbed::Lines;

use super::super::{SEGMENT, SEGMENT_NAME, config, gid};
use super::{BUFFER, Engine, MOVER, PEER, Side, connect, engines, idle, nanoseconds, redirect, side, write};

/// Timeout of the requests that complete after the migration.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);
/// Rounds of the pre-copy before the measurement fails.
const MAX_ROUNDS: u32 = 10_000;

/// One migration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// Stop and last round, at the source, nanoseconds.
    pub source_ns: u64,
    /// Restoring the last round and starting, at the destination, nanoseconds.
    pub destination_ns: u64,
    /// Objects in the blackout.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Bytes of requests that were posted and incomplete when the device stopped.
    pub in_flight: u64,
    /// First round, with all objects: saving and restoring, nanoseconds.
    pub whole_ns: u64,
    /// Bytes of all queue pairs and completion queues, divided by the number of queue pairs.
    pub bytes_per_qp: u64,
}

/// Moves a VM with `qps` queue pairs, of which `active` send to another host, with about `in_flight` bytes in flight when it stops.
pub fn blackout(qps: u32, active: u32, in_flight: u64) -> Sample {
    let mut engines = engines(3);
    let each = u32::try_from((in_flight / u64::from(active)).clamp(64, BUFFER)).unwrap();
    let mut left = side(&mut engines[0], MOVER, active, u64::from(each).max(4096));
    let mut right = side(&mut engines[1], PEER, active, u64::from(each).max(4096));
    connect(&mut engines, &mut left, &mut right);
    idle(&mut engines[0], &mut left, qps.saturating_sub(active));
    let mut run = Run { engines, left, right, clock: Instant::now(), posted: 0, done: 0 };
    run.create_connections();
    let mut sample = Sample::default();
    let (mut source, mut arrival) = run.copy_all(qps, &mut sample);
    run.copy_changes(&mut source, &mut arrival);
    run.send_last_requests(each, in_flight > 0);
    sample.in_flight = (run.posted - run.done) * u64::from(each);
    run.switch_over(source, arrival, &mut sample);
    run.complete_at_destination();
    sample
}

/// A VM (left) on host 0 that is connected with one (right) on host 1 and moves to host 2.
struct Run {
    engines: Vec<Engine>,
    left: Side,
    right: Side,
    clock: Instant,
    posted: u64,
    done: u64,
}

impl Run {
    fn now(&self) -> u64 {
        2_000_000_000 + nanoseconds(self.clock)
    }

    /// A turn of the engine at `host`, which the moving VM uses.
    fn turn_left(&mut self, host: usize) {
        let now = self.now();
        self.engines[host].turn(Some(&self.left.guest), now);
    }

    /// Turns of that engine and of the peer's. Counts completions.
    fn turn(&mut self, host: usize) {
        self.turn_left(host);
        let now = self.now();
        self.engines[1].turn(Some(&self.right.guest), now);
        while let Some(entry) = self.left.guest.take(&self.left.cq) {
            assert_eq!(entry.status.get(), 0, "a request failed");
            self.done += 1;
        }
    }

    /// Posts a WRITE on a queue pair.
    fn post(&mut self, at: usize, length: u32) {
        let left = &self.left;
        left.guest.post_send(&left.qps[at].0, &write(left, at, &self.right.qps[at].1, self.posted, length));
        self.posted += 1;
    }

    fn await_completions(&mut self) {
        while self.done < self.posted {
            self.turn(0);
        }
    }

    /// Creates the connections and warms up.
    fn create_connections(&mut self) {
        for at in 0..self.left.qps.len() {
            self.post(at, 64);
        }
        self.await_completions();
    }

    /// The first round: the destination restores everything once, while the VM runs.
    fn copy_all(&mut self, qps: u32, sample: &mut Sample) -> (Source, Destination) {
        let vm = host::transport::VmId(MOVER.0);
        let place = Place { vm, segment: SEGMENT_NAME.to_owned(), segment_id: SEGMENT };
        let mut config = config(MOVER);
        config.capabilities.max_qp = 32_768;
        config.capabilities.max_cq = 32_768;
        let room = self.left.guest.memory.clone();
        let mut arrival = Destination::begin(&mut self.engines[2].parts(), config, room, &place).unwrap();
        let mut pieces: Vec<Piece> = Vec::new();
        let mut source = Source::begin(&mut self.engines[0].parts(), self.left.guest.id);
        let began = Instant::now();
        source.round(&mut self.engines[0].parts(), |piece| pieces.push(piece));
        let states = pieces
            .iter()
            .filter(|piece| matches!(piece.object.kind, Kind::QueuePair | Kind::CompletionQueue));
        let bytes: usize = states.filter_map(|piece| piece.state.as_ref()).map(Vec::len).sum();
        sample.bytes_per_qp = bytes as u64 / u64::from(qps);
        for piece in pieces.drain(..) {
            arrival.take(&mut self.engines[2].parts(), piece).unwrap();
        }
        sample.whole_ns = nanoseconds(began);
        (source, arrival)
    }

    /// Further rounds as in any pre-copy, until a round has only the objects in use: new queue pairs are polled for a while.
    fn copy_changes(&mut self, source: &mut Source, arrival: &mut Destination) {
        let mut pieces: Vec<Piece> = Vec::new();
        for _ in 0..MAX_ROUNDS {
            for _ in 0..100 {
                self.turn(0);
            }
            source.round(&mut self.engines[0].parts(), |piece| pieces.push(piece));
            let few = pieces.len() <= 4 * self.left.qps.len();
            for piece in pieces.drain(..) {
                arrival.take(&mut self.engines[2].parts(), piece).unwrap();
            }
            if few {
                return;
            }
        }
        panic!("the VM is idle, and its objects change all the time");
    }

    /// The VM continues. To have bytes in flight, its last requests are stopped on their way.
    fn send_last_requests(&mut self, each: u32, in_flight: bool) {
        for at in 0..self.left.qps.len() {
            self.post(at, each);
            // Poll after each doorbell: among many queue pairs, an overwritten doorbell is found only milliseconds later.
            self.turn_left(0);
        }
        if in_flight {
            // The engine fetches and sends them all, and no response arrives.
            for _ in 0..100 {
                self.turn_left(0);
            }
        } else {
            self.await_completions();
        }
    }

    /// Peers suspend, the VM stops, and continues at the destination.
    fn switch_over(&mut self, mut source: Source, mut arrival: Destination, sample: &mut Sample) {
        let mut pieces: Vec<Piece> = Vec::new();
        let (device, peer) = (self.left.guest.id, self.right.guest.id);
        let at = self.now();
        self.engines[1].host.engine.hold(peer, Gid(gid(MOVER)));
        self.engines[1].transports.hold(peer, host::transport::VmId(MOVER.0), at);
        self.engines[0].host.now = at;
        self.engines[2].host.now = at;
        let lines = self.engines[0].host.lines.remove(&device).unwrap();
        let began = Instant::now();
        source.stop(&mut self.engines[0].parts(), &self.left.guest.uar, &lines).unwrap();
        source.round(&mut self.engines[0].parts(), |piece| pieces.push(piece));
        let total = source.total().unwrap();
        sample.source_ns = nanoseconds(began);
        sample.objects = pieces.len() as u64;
        sample.bytes =
            pieces.iter().filter_map(|piece| piece.state.as_ref()).map(|state| state.len() as u64).sum();
        let began = Instant::now();
        for piece in pieces.drain(..) {
            arrival.take(&mut self.engines[2].parts(), piece).unwrap();
        }
        arrival.check(total).unwrap();
        self.engines[2].host.engine.hold(arrival.device(), Gid(gid(PEER)));
        let arrived = arrival.start(&mut self.engines[2].parts()).unwrap();
        sample.destination_ns = nanoseconds(began);
        drop(arrival);
        // All of it continues there.
        source.leave(&mut self.engines[0].parts());
        self.engines[2].host.lines.insert(arrived, Lines::default());
        self.left.guest.id = arrived;
        let now = self.now();
        redirect(&mut self.engines[1], peer, MOVER, HostId(3), now);
        let now = self.now();
        redirect(&mut self.engines[2], arrived, PEER, HostId(2), now);
    }

    fn complete_at_destination(&mut self) {
        let began = Instant::now();
        while self.done < self.posted {
            self.turn(2);
            assert!(
                began.elapsed() < COMPLETION_TIMEOUT,
                "{} of {} requests are done a minute after the move",
                self.done,
                self.posted
            );
        }
    }
}
