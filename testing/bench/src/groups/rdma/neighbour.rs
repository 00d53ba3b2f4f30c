//! Effect of a hostile guest on another guest of the same engine. The victim makes small writes, alone and with a guest that makes
//! all possible errors of a driver and its processes, as fast as it can (`pvrdma_testbed::hostile`).
//!
//! One thread runs guests and engine in turns, so no cache line changes its CPU. The attacker's work between the engine's turns isn't
//! counted, since a real one has its own CPU. This includes its commands, though the engine executes them. So the figures don't
//! contain the engine's delay by commands.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use dma::{MappedMemory, MemoryRegion};
use pvrdma::abi::PAGE;
use pvrdma_testbed::hostile::dice::Seed;
use pvrdma_testbed::hostile::{BASE, Hostile, PAGES};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Writes per sample.
const WRITES: usize = 2000;
/// Acts of the attacker before each write, and between two turns of the engine while it is in flight.
const ACTS_BEFORE: u32 = 24;
const ACTS_BETWEEN: u32 = 2;

/// Median and 99th percentile of a victim's writes, in nanoseconds from post to completion.
#[derive(Debug, Clone, Copy)]
pub struct Latency {
    pub median: f64,
    pub p99: f64,
}

/// The guests and their engine.
pub struct Neighbours(Hostile<MappedMemory, Seed>);

fn memory() -> anyhow::Result<MappedMemory> {
    let size = PAGES as u64 * PAGE;
    let file: OwnedFd = memfd_create("neighbour", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, size)?;
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(MappedMemory::default().with(MemoryRegion::map(BASE, size, &file, 0, true)?)?)
}

impl Neighbours {
    /// Creates an attacker, its peer, and two innocent guests.
    pub fn start(seed: u64) -> anyhow::Result<Self> {
        let mut memories = (0..4).map(|_| memory()).collect::<anyhow::Result<Vec<_>>>()?;
        let mut next = || memories.pop().unwrap_or_default();
        Ok(Self(Hostile::new(&mut next, Seed(seed))))
    }

    /// Lets the victim write [`WRITES`] times in sequence, with or without the attacker.
    pub fn sample(&mut self, attacked: bool) -> anyhow::Result<Latency> {
        let guests = &mut self.0;
        let mut times = Vec::with_capacity(WRITES);
        for _ in 0..WRITES {
            if attacked {
                (0..ACTS_BEFORE).for_each(|_| guests.act());
            }
            let mut took = Duration::ZERO;
            let mut began = Instant::now();
            guests.innocent_posts();
            while !guests.innocent_polls() {
                guests.turn();
                if attacked {
                    took += began.elapsed();
                    (0..ACTS_BETWEEN).for_each(|_| guests.act());
                    began = Instant::now();
                }
            }
            took += began.elapsed();
            times.push(took);
            // The next sample starts with freshly polled queues.
            for _ in 0..4 {
                guests.turn();
            }
        }
        times.sort_unstable();
        let at = |hundredths: usize| -> anyhow::Result<f64> {
            let time = times.get(times.len() * hundredths / 100).context("No writes were timed")?;
            Ok(time.as_secs_f64() * 1e9)
        };
        Ok(Latency { median: at(50)?, p99: at(99)? })
    }

    /// Returns the requests of all guests that the engine has processed, and the attacker's commands.
    pub fn tally(&self) -> (u64, u64) {
        (self.0.tally.requests, self.0.tally.commands)
    }
}
