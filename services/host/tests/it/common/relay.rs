//! A bad link between two daemons: a relay that loses, repeats, delays and reorders their datagrams, like tc netem in a kernel that has it.
//! It has an address for each daemon, at which the other one reaches it.

use std::collections::BinaryHeap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Treatment of each datagram, in parts per million.
#[derive(Debug, Clone, Copy)]
pub struct Troubles {
    pub lost: u32,
    pub repeated: u32,
    /// Datagrams delivered at once, before delayed ones.
    pub overtaking: u32,
    /// Others are delayed by `delay` - `jitter` to `delay` + `jitter`.
    pub delay: Duration,
    pub jitter: Duration,
}

#[derive(Debug, Default)]
pub struct Counts {
    pub relayed: AtomicU64,
    pub lost: AtomicU64,
    pub repeated: AtomicU64,
    pub overtaking: AtomicU64,
}

/// One direction.
pub struct Way {
    /// Receives datagrams.
    pub at: UdpSocket,
    /// Sends the datagrams.
    pub from: UdpSocket,
    /// Address of the daemon that receives them.
    pub to: SocketAddr,
}

/// Runs until it is dropped.
pub struct Relay {
    pub counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// A datagram in flight. The earliest compares as the greatest, as the heap requires.
#[derive(PartialEq, Eq)]
struct Held {
    due: Instant,
    number: u64,
    bytes: Vec<u8>,
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Relay {
    pub fn start(ways: [Way; 2], troubles: Troubles, seed: u8) -> Self {
        let (counts, stop) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let threads = ways.into_iter().zip([seed, !seed]).map(|(way, seed)| {
            let (counts, stop) = (Arc::clone(&counts), Arc::clone(&stop));
            std::thread::spawn(move || relay(&way, troubles, seed, &counts, &stop))
        });
        Self { threads: threads.collect(), counts, stop }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn relay(way: &Way, troubles: Troubles, seed: u8, counts: &Counts, stop: &AtomicBool) {
    let mut random = TestRng::from_seed(RngAlgorithm::XorShift, &[seed; 16]);
    let mut held = BinaryHeap::new();
    let (mut number, mut buffer) = (0, vec![0; 1 << 16]);
    way.at.set_nonblocking(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        for _ in 0..64 {
            let Ok(length) = way.at.recv(&mut buffer) else { break };
            counts.relayed.fetch_add(1, Ordering::Relaxed);
            let mut happens = |often: u32, count: &AtomicU64| {
                let so = random.next_u32() % 1_000_000 < often;
                count.fetch_add(u64::from(so), Ordering::Relaxed);
                so
            };
            if happens(troubles.lost, &counts.lost) {
                continue;
            }
            let copies = 1 + usize::from(happens(troubles.repeated, &counts.repeated));
            let at_once = happens(troubles.overtaking, &counts.overtaking);
            for _ in 0..copies {
                let spread = 2 * u64::try_from(troubles.jitter.as_nanos()).unwrap() + 1;
                let wait = troubles.delay.saturating_sub(troubles.jitter)
                    + Duration::from_nanos(random.next_u64() % spread);
                let due = if at_once { now } else { now + wait };
                number += 1;
                held.push(Held { due, number, bytes: buffer[..length].to_vec() });
            }
        }
        while held.peek().is_some_and(|first| first.due <= now) {
            if let Some(first) = held.pop() {
                // A full buffer loses datagrams, as a link does.
                let _ = way.from.send_to(&first.bytes, way.to);
            }
        }
        let next =
            held.peek().map_or(Duration::from_millis(10), |first| first.due.saturating_duration_since(now));
        let next = next.min(Duration::from_millis(10));
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(next.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(&way.at, PollFlags::IN)], Some(&timeout));
    }
}
