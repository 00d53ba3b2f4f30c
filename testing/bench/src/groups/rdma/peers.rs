//! The peer of group `rdma` in this program: a bare ring in shared memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::bail;

use crate::peers::pin;

/// Slots of the ring, one cache line each.
const SLOTS: usize = 1024;

#[repr(align(64))]
struct Line([AtomicU64; 8]);

impl Line {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// Measures nanoseconds per message of a ring of 64-byte messages between two pinned threads. The sequence number in a slot marks it
/// as full. The only other shared word is a consumer's index, read when the ring seems full.
pub fn ring(cpus: [usize; 2], messages: u64) -> anyhow::Result<f64> {
    let slots: Vec<Line> = (0..SLOTS).map(|_| Line::new()).collect();
    let consumed = Line::new();
    // Both are on their CPUs before one spins: at real-time priority it could keep the other from moving.
    let ready = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let (slots, consumed, ready) = (&slots, &consumed, &ready);
        let consumer = scope.spawn(move || -> anyhow::Result<u64> {
            let pinned = pin(cpus[1]);
            ready.wait();
            pinned?;
            let mut sum = 0_u64;
            for turn in 1..=messages {
                let Some(slot) = slots.get(index(turn)) else { break };
                while slot.0[0].load(Ordering::Acquire) != turn {
                    std::hint::spin_loop();
                }
                sum = slot
                    .0
                    .iter()
                    .skip(1)
                    .fold(sum, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)));
                consumed.0[0].store(turn, Ordering::Release);
            }
            Ok(sum)
        });
        let pinned = pin(cpus[0]);
        ready.wait();
        pinned?;
        let began = Instant::now();
        let mut seen = 0;
        for turn in 1..=messages {
            while turn - seen > SLOTS as u64 {
                seen = consumed.0[0].load(Ordering::Acquire);
            }
            let Some(slot) = slots.get(index(turn)) else { break };
            for word in slot.0.iter().skip(1) {
                word.store(turn, Ordering::Relaxed);
            }
            slot.0[0].store(turn, Ordering::Release);
        }
        let sum = match consumer.join() {
            Ok(sum) => sum?,
            Err(_) => bail!("The ring's consumer panicked"),
        };
        let elapsed = began.elapsed();
        if sum != 7 * (messages * (messages + 1) / 2) {
            bail!("The bare ring lost messages");
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let each = elapsed.as_nanos() as f64 / messages as f64;
        Ok(each)
    })
}

fn index(turn: u64) -> usize {
    usize::try_from(turn).unwrap_or(0) % SLOTS
}
