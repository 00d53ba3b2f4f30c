//! Exercises for a VM that spans nodes, which check their results. Arguments: pattern (all), rounds (1000).
//!
//! - `counter`: every vCPU adds to one word.
//! - `message`: vCPU 0 writes a page and then a flag; the others read the flag and then the page.
//! - `sharing`: every vCPU counts in its own word, all in one page.
//! - `turns`: vCPUs write a page in turn.
//! - `private`: every vCPU fills pages that no other vCPU uses.
//!
//! Not in `all`: `endless` prints a line when all vCPUs run, and counts forever. `alone`: vCPU 0 prints the same, and ends after as
//! many milliseconds as there are rounds. The exit code is 0 if all results are correct.

#![no_std]
#![no_main]
#![allow(unsafe_code)] // Words of the free memory.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use payload_runtime::loops::tsc::start as ticks;
use payload_runtime::{Barrier, Vcpu, pointer_to, println};

payload_runtime::entry!(main);

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// A value on a page of its own.
#[repr(align(4096))]
struct Own<T>(T);

static BARRIER: Own<Barrier> = Own(Barrier::new());
static COUNTER: Own<AtomicU64> = Own(AtomicU64::new(0));
static FLAG: Own<AtomicU64> = Own(AtomicU64::new(0));
static DATA: Own<[AtomicU64; WORDS]> = Own([const { AtomicU64::new(0) }; WORDS]);
static SEEN: Own<[AtomicU64; WORDS]> = Own([const { AtomicU64::new(0) }; WORDS]);
static SHARED: Own<[AtomicU64; WORDS]> = Own([const { AtomicU64::new(0) }; WORDS]);
static TURN: Own<AtomicU64> = Own(AtomicU64::new(0));
static WRONG: Own<AtomicU32> = Own(AtomicU32::new(0));

fn main(vcpu: Vcpu) -> u32 {
    let rounds = vcpu.number(2, 1000).max(1);
    let pattern = vcpu.arguments().nth(1).unwrap_or("all");
    let patterns: [(&str, fn(&Vcpu, u64)); 5] = [
        ("counter", counter),
        ("message", message),
        ("sharing", sharing),
        ("turns", turns),
        ("private", private),
    ];
    if pattern == "endless" {
        endless(&vcpu);
    }
    if pattern == "alone" {
        return alone(&vcpu, rounds);
    }
    for (name, run) in patterns.iter().filter(|(name, _)| pattern == "all" || pattern == *name) {
        let begin = ticks();
        BARRIER.0.wait(vcpu.count());
        run(&vcpu, rounds);
        BARRIER.0.wait(vcpu.count());
        if vcpu.index() == 0 {
            let each = vcpu.nanoseconds(ticks() - begin) / rounds as f64;
            println!("{name}: {rounds} rounds, {each:.0} ns each, {} wrong", WRONG.0.load(Ordering::Acquire));
        }
    }
    BARRIER.0.wait(vcpu.count());
    WRONG.0.load(Ordering::Acquire)
}

fn check(right: bool) {
    if !right {
        WRONG.0.fetch_add(1, Ordering::AcqRel);
    }
}

fn endless(vcpu: &Vcpu) -> ! {
    BARRIER.0.wait(vcpu.count());
    if vcpu.index() == 0 {
        println!("all run");
    }
    loop {
        COUNTER.0.fetch_add(1, Ordering::AcqRel);
        SHARED.0[index(vcpu)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Afterwards, other vCPUs' memory is no longer needed.
fn alone(vcpu: &Vcpu, milliseconds: u64) -> u32 {
    BARRIER.0.wait(vcpu.count());
    if vcpu.index() == 0 {
        println!("all run");
        let begin = ticks();
        while vcpu.nanoseconds(ticks() - begin) < milliseconds as f64 * 1e6 {
            spin_loop();
        }
    }
    0
}

fn counter(vcpu: &Vcpu, rounds: u64) {
    for _ in 0..rounds {
        COUNTER.0.fetch_add(1, Ordering::AcqRel);
    }
    BARRIER.0.wait(vcpu.count());
    check(COUNTER.0.load(Ordering::Acquire) == rounds * u64::from(vcpu.count()));
}

fn message(vcpu: &Vcpu, rounds: u64) {
    let me = index(vcpu);
    for round in 1..=rounds {
        if me == 0 {
            for word in &DATA.0 {
                word.store(round, Ordering::Relaxed);
            }
            FLAG.0.store(round, Ordering::Release);
            for other in 1..count(vcpu) {
                while SEEN.0[other].load(Ordering::Acquire) < round {
                    spin_loop();
                }
            }
        } else {
            while FLAG.0.load(Ordering::Acquire) < round {
                spin_loop();
            }
            check(DATA.0.iter().all(|word| word.load(Ordering::Relaxed) == round));
            SEEN.0[me].store(round, Ordering::Release);
        }
    }
}

fn sharing(vcpu: &Vcpu, rounds: u64) {
    let mine = &SHARED.0[index(vcpu)];
    for round in 0..rounds {
        check(mine.load(Ordering::Relaxed) == round);
        mine.store(round + 1, Ordering::Relaxed);
    }
    BARRIER.0.wait(vcpu.count());
    check((0..count(vcpu)).all(|other| SHARED.0[other].load(Ordering::Relaxed) == rounds));
}

fn turns(vcpu: &Vcpu, rounds: u64) {
    let (me, all) = (u64::from(vcpu.index()), u64::from(vcpu.count()));
    for round in 0..rounds {
        let mine = round * all + me;
        while TURN.0.load(Ordering::Acquire) != mine {
            spin_loop();
        }
        for word in &DATA.0 {
            check(mine == 0 || word.load(Ordering::Relaxed) >= round);
            word.store(mine + 1, Ordering::Relaxed);
        }
        TURN.0.store(mine + 1, Ordering::Release);
    }
}

fn private(vcpu: &Vcpu, rounds: u64) {
    let free = vcpu.info().free;
    let part = free.size / u64::from(vcpu.count()) / PAGE as u64 * PAGE as u64;
    let start = (free.start + u64::from(vcpu.index()) * part).next_multiple_of(PAGE as u64);
    let words = (rounds.min(part / PAGE as u64 - 1)) * WORDS as u64;
    for pass in 0..2 {
        for word in 0..words {
            // SAFETY: inside the part of free memory that only this vCPU uses.
            let word_at = unsafe { AtomicU64::from_ptr(pointer_to::<u64>(start + word * 8)) };
            check(pass == 0 || word_at.load(Ordering::Relaxed) == word ^ start);
            word_at.store(word ^ start, Ordering::Relaxed);
        }
    }
}

fn index(vcpu: &Vcpu) -> usize {
    vcpu.index() as usize
}

fn count(vcpu: &Vcpu) -> usize {
    vcpu.count() as usize
}
