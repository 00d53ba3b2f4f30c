//! Measures the latency of a cache line between vCPUs 0 and 1. Argument: rounds (1M).

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Both vCPUs use one word of a static.

use core::sync::atomic::AtomicU64;
use payload_runtime::loops::line::{Side, ping_pong};
use payload_runtime::{Barrier, Vcpu, println};

payload_runtime::entry!(main);

/// A cache line of its own, together with the adjacent one that the prefetcher fetches.
#[repr(align(128))]
struct Line(AtomicU64);

static LINE: Line = Line(AtomicU64::new(0));
static BARRIER: Barrier = Barrier::new();

fn main(vcpu: Vcpu) -> u32 {
    if vcpu.count() < 2 {
        println!("Ping-pong needs two vCPUs, and this VM has one");
        return 2;
    }
    if vcpu.index() > 1 {
        return 0;
    }
    let rounds = vcpu.number(1, 1 << 20).max(1);
    let side = if vcpu.index() == 0 { Side::First } else { Side::Second };
    BARRIER.wait(2);
    // SAFETY: the word is aligned, and only these two vCPUs use it, with the same number of rounds.
    let ticks = unsafe { ping_pong(LINE.0.as_ptr() as u64, side, rounds) };
    if vcpu.index() == 0 {
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let one_way = vcpu.nanoseconds(ticks) / (rounds as f64 * 2.0);
        println!("{rounds} rounds: {one_way:.1} ns one way");
    }
    0
}
