//! A run: endpoints, connections between them, a bad network, time.

#![allow(clippy::cast_possible_truncation)] // Numbers of at most a few thousand things.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use roce::config::{Config, Plant};
use roce::connection::{Arrival, Connection, State};
use roce::counters::Counters;
use roce::output::Batch;
use roce::request::{Kind, PostError};
use roce::saved;
use roce::timing;

use super::oracle::{End, Flow, Late, Verdict};
use super::program::{Faults, WORDS, roll_configs, roll_program};
use facilities::rng::SplitMix64;

/// Options of all runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The injected bug.
    #[doc(hidden)]
    pub plant: Plant,
    /// Called with a line per packet that is sent, lost or delivered.
    pub trace: Option<fn(&str)>,
}

/// Counts of a clean run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Report {
    /// Number of endpoints.
    pub endpoints: u64,
    /// Connections between them.
    pub connections: u64,
    /// Requests that completed well.
    pub succeeded: u64,
    /// Requests that failed, each as it had to, or were flushed.
    pub failed: u64,
    /// Packets delivered.
    pub delivered: u64,
    /// Packets lost.
    pub lost: u64,
    /// Packets repeated or reordered.
    pub disturbed: u64,
    /// Connections saved and restored.
    pub restored: u64,
    /// Times that not-present memory of an access arrived.
    pub came: u64,
    /// Sum over all connections.
    pub counters: Counters,
}

impl Report {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.endpoints += other.endpoints;
        self.connections += other.connections;
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.delivered += other.delivered;
        self.lost += other.lost;
        self.disturbed += other.disturbed;
        self.restored += other.restored;
        self.came += other.came;
        self.counters.add(&other.counters);
    }
}

/// An error that a run found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Seed {seed}: {text}")]
pub struct Violation {
    /// Seed of the run.
    pub seed: u64,
    /// The deviation that the oracle found.
    pub text: String,
}

/// Limit of events in a run; more means that the program makes no progress.
const MOST_EVENTS: u64 = 3_000_000;
/// Limit of a packet's delay, nanoseconds.
pub(super) const MOST_DELAY: u64 = 25_000;
/// Limit of the time until not-present memory arrives, nanoseconds.
pub(super) const MOST_LATE: u32 = 60_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Deliver { packet: u32, marked: bool },
    Transmit,
    Wake,
    Post,
    Receive,
    Save,
    Hold { until: u64 },
    Arrive,
    Came,
}

/// Time, order among events of that time, link, side, event.
type Scheduled = (u64, u64, u32, u8, Event);

pub(super) struct Side {
    pub connection: Connection,
    pub endpoint: usize,
    pub failed: bool,
    pub dead: bool,
    pub wake: u64,
    pub transmit: bool,
    /// On the way to another host: packets for it are lost.
    pub moving: Option<Box<saved::Connection>>,
    pub receives_due: u32,
    pub last_arrival: u64,
    pub posted_at: u64,
    /// Until when its memory is not present, and whether the end of that is scheduled.
    pub late_until: u64,
    pub comes: bool,
}

pub(super) struct Link {
    pub sides: [Side; 2],
    pub flows: [Flow; 2],
}

pub(super) struct Partition {
    pub endpoint: usize,
    pub from: u64,
    pub until: u64,
}

pub(super) struct World {
    pub seed: u64,
    pub rng: SplitMix64,
    pub now: u64,
    pub faults: Faults,
    pub links: Vec<Link>,
    pub words: Vec<[u64; WORDS]>,
    pub partitions: Vec<Partition>,
    /// The endpoint that disappears, and when.
    pub kill: Option<(usize, u64)>,
    pub queue: BinaryHeap<Reverse<Scheduled>>,
    pub sequence: u64,
    pub packets: Vec<Vec<u8>>,
    pub free: Vec<u32>,
    pub verdict: Verdict,
    pub report: Report,
    pub buffer: Vec<u8>,
    pub lengths: Vec<u32>,
    pub trace: Option<fn(&str)>,
}

/// Runs the programs of a seed.
///
/// # Errors
/// The first deviation from the expected outcome.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut world = World::new(seed, options);
    world.run();
    match world.verdict.take() {
        None => Ok(world.report),
        Some(text) => Err(Violation { seed, text }),
    }
}

impl World {
    fn new(seed: u64, options: &Options) -> Self {
        let mut rng = SplitMix64::new(seed);
        let faults = Faults::roll(&mut rng);
        let endpoints = match rng.below(100) {
            0..70 => 2,
            70..95 => rng.between(3, 8),
            _ => rng.between(9, 64),
        } as usize;
        let connections = if endpoints == 2 { rng.between(1, 3) as usize } else { endpoints };
        let mut world = Self {
            seed,
            now: 1_000_000,
            faults,
            links: Vec::with_capacity(connections),
            words: vec![[0; WORDS]; endpoints],
            partitions: Vec::new(),
            kill: None,
            queue: BinaryHeap::new(),
            sequence: 0,
            packets: Vec::new(),
            free: Vec::new(),
            verdict: None,
            report: Report::default(),
            buffer: vec![0; 16 * 320],
            lengths: Vec::new(),
            trace: options.trace,
            rng,
        };
        world.report.endpoints = endpoints as u64;
        world.report.connections = connections as u64;
        for index in 0..connections {
            // Each endpoint is connected to some other; two are connected to each other.
            let from = index % endpoints;
            let step = 1 + world.rng.below(endpoints as u32 - 1) as usize;
            world.connect(index, [from, (from + step) % endpoints], options.plant);
        }
        for _ in 0..faults.partitions {
            let endpoint = world.rng.below(endpoints as u32) as usize;
            let from = world.now + u64::from(world.rng.below(500_000));
            let until = from + u64::from(world.rng.below(2_000_000));
            world.partitions.push(Partition { endpoint, from, until });
        }
        if faults.kill {
            let endpoint = world.rng.below(endpoints as u32) as usize;
            world.kill = Some((endpoint, world.now + u64::from(world.rng.below(200_000))));
        }
        world
    }

    fn connect(&mut self, index: usize, endpoints: [usize; 2], plant: Plant) {
        let configs = roll_configs(&mut self.rng, &self.faults, plant, index as u32);
        let programs = [0, 1].map(|side: usize| roll_program(&mut self.rng, &self.faults, &configs[side]));
        let mut sides = Vec::new();
        let mut flows = Vec::new();
        for (side, program) in programs.into_iter().enumerate() {
            let connection = match Connection::new(configs[side]) {
                Ok(connection) => connection,
                Err(error) => {
                    self.verdict = Some(error.to_string());
                    return;
                }
            };
            let needed = program
                .iter()
                .filter(|op| {
                    matches!(op.request.kind, Kind::Send { .. } | Kind::Write { immediate: Some(_), .. })
                })
                .count();
            let mut needed = u32::try_from(needed).unwrap_or(0);
            if self.faults.no_receives && self.rng.chance(500) {
                needed = self.rng.below(needed + 1);
            }
            let mut flow = Flow::new((2 * index + side) as u32, program, configs[side].reliability);
            let late = (0..needed).filter(|_| self.rng.chance(self.faults.late_receives)).count() as u32;
            flow.receives = needed - late;
            flows.push(flow);
            sides.push((connection, endpoints[side], late));
        }
        let receives = [sides[1].2, sides[0].2];
        let mut sides =
            sides.into_iter().zip(receives).map(|((connection, endpoint, _), receives_due)| Side {
                connection,
                endpoint,
                failed: false,
                dead: false,
                wake: u64::MAX,
                transmit: false,
                moving: None,
                receives_due,
                last_arrival: 0,
                posted_at: 0,
                late_until: 0,
                comes: false,
            });
        let (Some(a), Some(b)) = (sides.next(), sides.next()) else { return };
        let mut flows = flows.into_iter();
        let (Some(there), Some(back)) = (flows.next(), flows.next()) else { return };
        self.links.push(Link { sides: [a, b], flows: [there, back] });
        let link = (self.links.len() - 1) as u32;
        for side in 0..2 {
            let after = u64::from(self.rng.below(20_000));
            self.schedule(after, link, side, Event::Post);
            self.schedule_receive(link, side);
        }
        for _ in 0..self.faults.migrations {
            let at = u64::from(self.rng.below(150_000));
            let until = self.now + at + u64::from(self.rng.below(1_000_000));
            let side = self.rng.below(2) as u8;
            self.schedule(at, link, side, Event::Hold { until });
        }
        if self.faults.saves > 0 {
            let at = u64::from(self.rng.below(50_000));
            self.schedule(at, link, 0, Event::Save);
        }
    }

    pub(super) fn schedule(&mut self, after: u64, link: u32, side: u8, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((self.now + after, self.sequence, link, side, event)));
    }

    fn schedule_receive(&mut self, link: u32, side: u8) {
        let after = u64::from(self.rng.below(100_000));
        if self.links[link as usize].sides[usize::from(side)].receives_due > 0 {
            self.schedule(after, link, side, Event::Receive);
        }
    }

    fn run(&mut self) {
        let mut events = 0;
        while self.verdict.is_none() {
            let Some(Reverse((at, _, link, side, event))) = self.queue.pop() else { break };
            self.now = at;
            events += 1;
            if events > MOST_EVENTS {
                self.verdict = Some(format!("still busy after {MOST_EVENTS} events, at {at} ns"));
                return;
            }
            if let Some((endpoint, when)) = self.kill
                && at >= when
            {
                let found = &mut self.links[link as usize].sides[usize::from(side)];
                found.dead |= found.endpoint == endpoint;
                let other = &mut self.links[link as usize].sides[usize::from(1 - side)];
                other.dead |= other.endpoint == endpoint;
            }
            self.handle(link, side, event);
        }
        self.finish();
    }

    fn handle(&mut self, link: u32, at: u8, event: Event) {
        let found = &mut self.links[link as usize].sides[usize::from(at)];
        if let Event::Deliver { packet, marked } = event {
            let bytes = std::mem::take(&mut self.packets[packet as usize]);
            if found.dead || found.moving.is_some() {
                self.report.lost += 1;
                self.tell("nobody there", link, at, &bytes);
            } else {
                self.tell("delivered", link, at, &bytes);
                self.report.delivered += 1;
                self.with(link, at, |connection, end| {
                    connection.receive(
                        end.now,
                        &bytes,
                        Arrival { congested: marked, ..Arrival::default() },
                        end,
                    );
                });
                self.transmit_soon(link, at);
            }
            self.packets[packet as usize] = bytes;
            self.free.push(packet);
            return;
        }
        if found.dead && event != Event::Arrive {
            return;
        }
        match event {
            Event::Deliver { .. } => {}
            Event::Transmit => {
                found.transmit = false;
                self.drive(link, at);
            }
            Event::Wake => {
                found.wake = u64::MAX;
                if found.moving.is_none() {
                    self.with(link, at, |connection, end| connection.expired(end.now, end));
                    self.drive(link, at);
                }
            }
            Event::Post => self.post(link, at),
            Event::Receive => {
                found.receives_due -= 1;
                let tell = found.moving.is_none() && self.seed & 1 == 0;
                if tell {
                    found.connection.receive_posted();
                }
                self.links[link as usize].flows[usize::from(1 - at)].receives += 1;
                if tell {
                    // Only now may a packet announce the receive, since the count had to be raised first.
                    self.transmit_soon(link, at);
                }
                self.schedule_receive(link, at);
            }
            Event::Save => self.save(link),
            Event::Hold { until } => self.hold(link, at, until),
            Event::Arrive => self.arrive(link, at),
            Event::Came => {
                found.comes = false;
                found.connection.memory_came();
                self.report.came += 1;
                self.transmit_soon(link, at);
            }
        }
    }

    /// Calls a connection with the oracle of its end.
    pub(super) fn with<R>(
        &mut self,
        link: u32,
        at: u8,
        call: impl FnOnce(&mut Connection, &mut End<'_>) -> R,
    ) -> R {
        let Link { sides, flows } = &mut self.links[link as usize];
        let [a, b] = flows;
        let (out, back) = if at == 0 { (a, b) } else { (b, a) };
        let [left, right] = sides;
        let (own, other) = if at == 0 { (left, right) } else { (right, left) };
        let config = *own.connection.config();
        let mut end = End {
            out,
            back,
            words: &mut self.words[own.endpoint],
            now: self.now,
            retry_count: u32::from(config.retry_count),
            peer_gone: other.dead || other.failed,
            finite_rnr: config.rnr_retry != 7,
            own_failed: &mut own.failed,
            verdict: &mut self.verdict,
            late: Some(Late {
                until: &mut own.late_until,
                rng: &mut self.rng,
                chance: self.faults.late_memory,
            }),
        };
        let result = call(&mut own.connection, &mut end);
        let until = own.late_until;
        if until > self.now && !std::mem::replace(&mut own.comes, true) {
            self.schedule(until - self.now, link, at, Event::Came);
        }
        result
    }

    fn post(&mut self, link: u32, at: u8) {
        if self.links[link as usize].sides[usize::from(at)].moving.is_some() {
            let after = 10_000 + u64::from(self.rng.below(10_000));
            self.schedule(after, link, at, Event::Post);
            return;
        }
        let now = self.now;
        let Link { sides, flows } = &mut self.links[link as usize];
        let (side, flow) = (&mut sides[usize::from(at)], &mut flows[usize::from(at)]);
        side.posted_at = now;
        let mut again = None;
        while let Some(op) = flow.program.get(flow.posted) {
            match side.connection.post(op.request) {
                Ok(()) => flow.posted += 1,
                Err(PostError::Full) => {
                    again = Some(2_000 + u64::from(self.rng.below(20_000)));
                    break;
                }
                Err(PostError::Failed) => {
                    // The caller flushes requests that it couldn't post.
                    if flow.completed != flow.posted {
                        self.verdict = Some(format!("flow {}: failed with open requests", flow.number));
                    }
                    flow.posted = flow.program.len();
                    self.report.failed += (flow.program.len() - flow.completed) as u64;
                    flow.completed = flow.program.len();
                }
                Err(error) => {
                    self.verdict = Some(error.to_string());
                    break;
                }
            }
            if self.rng.chance(200) {
                again = Some(u64::from(self.rng.below(30_000)));
                break;
            }
        }
        if side.connection.outstanding() > side.connection.config().max_requests as usize {
            self.verdict = Some("more requests than there is room for".to_owned());
        }
        if let Some(after) = again {
            self.schedule(after, link, at, Event::Post);
        }
        self.drive(link, at);
    }

    fn transmit_soon(&mut self, link: u32, at: u8) {
        let side = &mut self.links[link as usize].sides[usize::from(at)];
        if !std::mem::replace(&mut side.transmit, true) {
            let after = u64::from(self.rng.below(2_000));
            self.schedule(after, link, at, Event::Transmit);
        }
    }

    /// Lets a connection send everything that it has.
    pub(super) fn drive(&mut self, link: u32, at: u8) {
        if self.links[link as usize].sides[usize::from(at)].moving.is_some() {
            return;
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut lengths = std::mem::take(&mut self.lengths);
        let mut idle = 0;
        while self.verdict.is_none() {
            let most = 1 + self.rng.below(16) as usize;
            let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, most);
            self.with(link, at, |connection, end| connection.transmit(end.now, end, &mut out));
            let mut position = 0;
            for &len in &lengths {
                let len = len as usize;
                self.send(link, at, &buffer[position..position + len]);
                position += len;
            }
            if !self.links[link as usize].sides[usize::from(at)].connection.wants_transmit(self.now) {
                break;
            }
            idle = if lengths.is_empty() { idle + 1 } else { 0 };
            if idle > 3 {
                self.verdict = Some(format!("link {link} side {at} wants to transmit, and doesn't"));
            }
        }
        self.buffer = buffer;
        self.lengths = lengths;
        let side = &mut self.links[link as usize].sides[usize::from(at)];
        if let Some(timeout) = side.connection.timeout()
            && timeout < side.wake
        {
            side.wake = timeout.max(self.now + 1);
            let after = side.wake - self.now;
            self.schedule(after, link, at, Event::Wake);
        }
    }

    /// Checks the final state of a run.
    fn finish(&mut self) {
        let mut words = vec![[0u64; WORDS]; self.words.len()];
        let mut checked = true;
        for (number, link) in self.links.iter().enumerate() {
            for side in 0..2 {
                let (own, flow) = (&link.sides[side], &link.flows[side]);
                self.report.counters.add(own.connection.counters());
                self.report.succeeded += (flow.completed as u64).saturating_sub(u64::from(flow.failed));
                self.report.failed += u64::from(flow.failed);
                let target = &mut words[link.sides[1 - side].endpoint];
                for (op, _) in flow.program.iter().zip(&flow.originals).filter(|(_, value)| value.is_some()) {
                    match op.request.kind {
                        Kind::FetchAdd { remote, add } => {
                            let word = ((remote.address & 0xFFFF_FFFF) / 8) as usize;
                            target[word] = target[word].wrapping_add(add);
                        }
                        // A sum proves nothing where words are swapped as well.
                        _ => checked = false,
                    }
                }
                if own.dead || self.verdict.is_some() {
                    continue;
                }
                if !flow.is_done() {
                    self.verdict = Some(format!(
                        "link {number} side {side}: {} of {} requests are complete, and nothing happens: {:?}",
                        flow.completed,
                        flow.program.len(),
                        own.connection
                    ));
                } else if let Some(late) = self.overdue(own, &link.sides[1 - side], flow) {
                    self.verdict = Some(format!("link {number} side {side}: {late}"));
                }
            }
        }
        if checked && self.verdict.is_none() && words != self.words {
            self.verdict = Some("the sums of the atomics are wrong".to_owned());
        }
    }

    /// Whether a request to an endpoint that is gone failed too late.
    fn overdue(&self, own: &Side, other: &Side, flow: &Flow) -> Option<String> {
        let (_, killed) = self.kill?;
        // Timers restart whenever the not-present memory of a request arrives.
        let late = self.faults.late_receives > 0 || self.faults.late_memory > 0;
        let waits = !other.dead || self.faults.migrations > 0 || late;
        if waits || own.connection.state() == State::Ready {
            return None;
        }
        let config: &Config = own.connection.config();
        let failure = timing::time_to_failure(config.timeout, config.retry_count)?;
        // Allows for packets in flight when the peer vanished, and for delays by congestion control.
        let slack = 2 * MOST_DELAY + 400_000;
        let bound = killed.max(own.posted_at) + failure + slack;
        (flow.completed_at > bound).then(|| {
            format!(
                "the peer was gone at {killed}, the last request ended at {}, after {bound}",
                flow.completed_at
            )
        })
    }
}
