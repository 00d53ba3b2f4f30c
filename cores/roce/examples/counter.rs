//! Fetch-and-adds on one counter from several connections, over a network that loses, reorders and delays packets as `tc netem` does, in
//! virtual time. The sum must be exact, and each value must be returned once.
//!
//! `cargo run --release -p roce --example counter -- [--operations N] [--connections N] [--seed S] [--loss 1] [--reorder 5]
//! [--duplicate 1] [--delay 10] [--jitter 10] [--plant forget-replay]`
//!
//! Progress goes to stderr, one line of JSON to stdout. Exit status 1 when an addition was lost or repeated, or a connection failed. The
//! lab's `rdma-netem` does the same with guests and a real network, for as many operations as an emulated host manages.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use clap::Parser;
use roce::config::Plant;
use roce::{
    Arrival, Atomic, Batch, Config, Connection, Event, Kind, Memory, NoReceive, Received, Refusal, Remote,
    Request, Status, Unmoved,
};
use roce_testbed::SplitMix64;

#[derive(Parser, Clone)]
#[command(about = "Counts by fetch-and-add over a bad network")]
struct Arguments {
    /// Fetch-and-adds, of all connections together.
    #[arg(long, default_value_t = 10_000_000)]
    operations: u64,
    /// Connections that add to the counter.
    #[arg(long, default_value_t = 4)]
    connections: usize,
    /// Seed of the network's random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Packets lost, in percent.
    #[arg(long, default_value_t = 1)]
    loss: u32,
    /// Packets that overtake, without delay, in percent.
    #[arg(long, default_value_t = 5)]
    reorder: u32,
    /// Packets that arrive twice, in percent.
    #[arg(long, default_value_t = 1)]
    duplicate: u32,
    /// Milliseconds of a packet's way.
    #[arg(long, default_value_t = 10)]
    delay: u32,
    /// Milliseconds more or less.
    #[arg(long, default_value_t = 10)]
    jitter: u32,
    /// The responder forgets what it has answered: additions are repeated, which must be found.
    #[arg(long)]
    plant: bool,
}

/// The counter, and which of its values were returned.
struct Counter {
    value: u64,
    /// A bit per value that a completed addition returned.
    returned: Vec<u64>,
    repeated: u64,
    beyond: u64,
}

/// One end of a connection.
struct End {
    counter: Rc<RefCell<Counter>>,
    completed: u64,
    failed: Option<Status>,
}

impl Memory for End {
    fn gather(&mut self, _: u64, _: u64, _: &mut [u8]) -> Result<(), Unmoved> {
        Err(Status::LocalProtection.into())
    }
    fn place(&mut self, _: u64, _: u64, data: &[u8]) -> Result<(), Unmoved> {
        let value = u64::from_ne_bytes(data.try_into().map_err(|_| Status::BadResponse)?);
        let mut counter = self.counter.borrow_mut();
        let word = usize::try_from(value / 64).ok().and_then(|word| counter.returned.get_mut(word));
        match word {
            Some(word) if *word >> (value % 64) & 1 == 0 => *word |= 1 << (value % 64),
            Some(_) => counter.repeated += 1,
            None => counter.beyond += 1,
        }
        Ok(())
    }
    fn execute_local(&mut self, _: u64) -> Status {
        Status::Success
    }
    fn complete(&mut self, token: u64, status: Status, _: u32) {
        if status != Status::Success || token != self.completed {
            self.failed.get_or_insert(status);
        }
        self.completed += 1;
    }
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        Err(NoReceive::NotPosted)
    }
    fn place_receive(&mut self, _: u64, _: &[u8]) -> Result<(), Unmoved> {
        Ok(())
    }
    fn complete_receive(&mut self, _: &Received) {}
    fn fail_receive(&mut self, _: Status) {}
    fn keep_receive(&mut self) {}
    fn write(&mut self, _: Remote, _: u64, _: u64, _: &[u8]) -> Result<(), Refusal> {
        Err(Refusal::Access)
    }
    fn read(&mut self, _: Remote, _: u64, _: u64, _: &mut [u8]) -> Result<(), Refusal> {
        Err(Refusal::Access)
    }
    fn atomic(&mut self, _: Remote, operation: Atomic) -> Result<u64, Refusal> {
        let Atomic::FetchAdd { add } = operation else { return Err(Refusal::Access) };
        let mut counter = self.counter.borrow_mut();
        let before = counter.value;
        counter.value += add;
        Ok(before)
    }
    fn invalidate(&mut self, _: u32) -> Result<(), Refusal> {
        Err(Refusal::Access)
    }
    fn event(&mut self, _: Event) {}
}

/// An event: a packet arrives at an end, or an end is polled.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Happens {
    at: u64,
    /// Keeps events of the same time in order.
    number: u64,
    end: usize,
    packet: Option<Vec<u8>>,
}

struct World {
    arguments: Arguments,
    ends: Vec<(Connection, End)>,
    /// Additions that each connection still has to post.
    left: Vec<u64>,
    posted: Vec<u64>,
    queue: BinaryHeap<Reverse<Happens>>,
    /// When each end is polled next, as far as the queue knows.
    looks: Vec<u64>,
    rng: SplitMix64,
    now: u64,
    number: u64,
    sent: u64,
    lost: u64,
    buffer: Vec<u8>,
    lengths: Vec<u32>,
}

impl World {
    fn happens(&mut self, at: u64, end: usize, packet: Option<Vec<u8>>) {
        self.number += 1;
        self.queue.push(Reverse(Happens { at, number: self.number, end, packet }));
    }

    /// Sends a packet as netem does: it is lost, or arrives once or twice, after a delay or at once.
    fn carry(&mut self, to: usize, bytes: &[u8]) {
        let percent = |rng: &mut SplitMix64, parts: u32| rng.chance(parts * 10);
        self.sent += 1;
        if percent(&mut self.rng, self.arguments.loss) {
            self.lost += 1;
            return;
        }
        let copies = 1 + u32::from(percent(&mut self.rng, self.arguments.duplicate));
        for _ in 0..copies {
            let (delay, jitter) = (self.arguments.delay * 1000, self.arguments.jitter * 1000);
            let micros = match percent(&mut self.rng, self.arguments.reorder) {
                true => 1,
                false => (delay + self.rng.below(2 * jitter + 1)).saturating_sub(jitter).max(1),
            };
            self.happens(self.now + u64::from(micros) * 1000, to, Some(bytes.to_vec()));
        }
    }

    /// Lets an end post and send, and schedules its next poll.
    fn drive(&mut self, end: usize) {
        let connection = end / 2;
        let now = self.now;
        if end.is_multiple_of(2) {
            while self.left[connection] > 0 && self.ends[end].0.room() > 0 {
                let kind = Kind::FetchAdd { remote: Remote { address: 0, rkey: 1 }, add: 1 };
                if self.ends[end].0.post(Request::new(self.posted[connection], kind, 8)).is_err() {
                    break;
                }
                self.posted[connection] += 1;
                self.left[connection] -= 1;
            }
        }
        loop {
            let (mut buffer, mut lengths) =
                (std::mem::take(&mut self.buffer), std::mem::take(&mut self.lengths));
            let (connection, memory) = &mut self.ends[end];
            let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 64);
            connection.transmit(now, memory, &mut out);
            let mut position = 0;
            for &len in &lengths {
                let len = usize::try_from(len).unwrap_or(0);
                self.carry(end ^ 1, &buffer[position..position + len]);
                position += len;
            }
            let full = lengths.len() == 64;
            lengths.clear();
            (self.buffer, self.lengths) = (buffer, lengths);
            if !full {
                break;
            }
        }
        if let Some(at) = self.ends[end].0.timeout() {
            let at = at.max(now + 1);
            if at < self.looks[end] || self.looks[end] <= now {
                self.looks[end] = at;
                self.happens(at, end, None);
            }
        }
    }

    /// Processes one event; `false` when none is left.
    fn step(&mut self) -> bool {
        let Some(Reverse(next)) = self.queue.pop() else { return false };
        self.now = next.at;
        let (connection, memory) = &mut self.ends[next.end];
        match next.packet {
            Some(bytes) => connection.receive(next.at, &bytes, Arrival::default(), memory),
            None => connection.expired(next.at, memory),
        }
        self.drive(next.end);
        true
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.connections == 0 || arguments.connections > 1000 {
        eprintln!("counter: {} connections can't be made; 1 to 1000 can", arguments.connections);
        return ExitCode::FAILURE;
    }
    let words = usize::try_from(arguments.operations.div_ceil(64)).unwrap_or(usize::MAX);
    let counter =
        Rc::new(RefCell::new(Counter { value: 0, returned: vec![0; words], repeated: 0, beyond: 0 }));
    let mut world = World {
        ends: Vec::new(),
        left: Vec::new(),
        posted: vec![0; arguments.connections],
        queue: BinaryHeap::new(),
        looks: vec![0; arguments.connections * 2],
        rng: SplitMix64::new(arguments.seed),
        now: 0,
        number: 0,
        sent: 0,
        lost: 0,
        buffer: vec![0; 64 * 4200],
        lengths: Vec::new(),
        arguments: arguments.clone(),
    };
    let all = u64::try_from(arguments.connections).unwrap_or(1);
    for connection in 0..all {
        world.left.push(arguments.operations / all + u64::from(connection < arguments.operations % all));
        let qpn = u32::try_from(connection).unwrap_or(0) * 2 + 2;
        for (own, peer) in [(qpn, qpn + 1), (qpn + 1, qpn)] {
            let mut made = match Connection::new(Config::new(own, peer, 0xFF_FF00, 0xFF_FF00)) {
                Ok(made) => made,
                Err(error) => {
                    eprintln!("counter: {error}");
                    return ExitCode::FAILURE;
                }
            };
            if arguments.plant {
                made.plant(Plant::ForgetReplay);
            }
            world.ends.push((made, End { counter: counter.clone(), completed: 0, failed: None }));
        }
    }
    let start = Instant::now();
    let mut told = start;
    for end in 0..world.ends.len() {
        world.drive(end);
    }
    let completed = |world: &World| world.ends.iter().map(|(_, end)| end.completed).sum::<u64>();
    let failure = |world: &World| world.ends.iter().find_map(|(_, end)| end.failed);
    let mut steps = 0_u64;
    while completed_or_failed(&world, arguments.operations, &mut steps) && world.step() {
        if steps.is_multiple_of(65_536) && told.elapsed().as_secs() >= 10 {
            told = Instant::now();
            eprintln!(
                "{} of {} after {} s",
                completed(&world),
                arguments.operations,
                start.elapsed().as_secs()
            );
        }
    }
    let retransmitted: u64 =
        world.ends.iter().map(|(connection, _)| connection.counters().retransmitted_packets).sum();
    let counter = counter.borrow();
    let returned: u64 = counter.returned.iter().map(|word| u64::from(word.count_ones())).sum();
    let exact = counter.value == arguments.operations
        && returned == arguments.operations
        && counter.repeated == 0
        && counter.beyond == 0
        && completed(&world) == arguments.operations
        && failure(&world).is_none();
    println!(
        "{}",
        serde_json::json!({
            "operations": completed(&world),
            "sum": counter.value,
            "returned_once": returned,
            "repeated": counter.repeated,
            "beyond": counter.beyond,
            "failed": failure(&world).map(|status| format!("{status:?}")),
            "exact": exact,
            "connections": arguments.connections,
            "seed": arguments.seed,
            "packets": world.sent,
            "lost": world.lost,
            "retransmitted": retransmitted,
            "simulated_seconds": world.now / 1_000_000_000,
            "seconds": start.elapsed().as_secs_f64(),
        })
    );
    if exact != arguments.plant { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether to continue. Checks only every so many steps, since a check visits every end.
fn completed_or_failed(world: &World, operations: u64, steps: &mut u64) -> bool {
    *steps += 1;
    if !steps.is_multiple_of(1024) {
        return true;
    }
    let done: u64 = world.ends.iter().map(|(_, end)| end.completed).sum();
    done < operations && world.ends.iter().all(|(_, end)| end.failed.is_none())
}
