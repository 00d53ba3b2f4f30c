//! A hostile guest against the device, with guard pages and an oracle.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dma::{MappedMemory, MemoryRegion};
use pvrdma_testbed::hostile::dice::Seed;
use pvrdma_testbed::hostile::{BASE, Hostile, PAGES};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// A guest's RAM as the daemon maps it. Memory around it in this process is not guest memory.
fn memory() -> MappedMemory {
    let size = PAGES as u64 * 4096;
    let file: OwnedFd = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, size).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    MappedMemory::default().with(MemoryRegion::map(BASE, size, &file, 0, true).unwrap()).unwrap()
}

/// Runs until that many requests and commands were processed.
fn attack(seed: u64, requests: u64, commands: u64) {
    let mut hostile = Hostile::new(memory, Seed(seed));
    let stop = Arc::new(AtomicBool::new(false));
    let scribbler = hostile.scribbler(seed + 1);
    let thread = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || scribbler.run(&stop)
    });
    let began = Instant::now();
    let mut shown = 0;
    while hostile.tally.requests < requests || hostile.tally.commands < commands {
        hostile.step();
        let seconds = began.elapsed().as_secs();
        if seconds >= shown + 20 {
            shown = seconds;
            println!("{seconds} s: {:?}", hostile.tally);
        }
    }
    stop.store(true, Ordering::Relaxed);
    let scribbled = thread.join().unwrap();
    println!(
        "seed {seed}: {:?}, {scribbled} words rewritten meanwhile, {:?}",
        hostile.tally,
        began.elapsed()
    );
    let tally = hostile.tally;
    assert!(tally.verified > 0 && tally.accepted > tally.commands / 20, "the attack got nowhere: {tally:?}");
}

#[test]
fn a_short_attack() {
    attack(1, 20_000, 500);
}

/// `PVRDMA_SEED`, `PVRDMA_REQUESTS` and `PVRDMA_COMMANDS` choose another attack.
#[test]
#[ignore = "runs for minutes: 10^8 requests and 10^6 commands"]
fn a_long_attack() {
    let number =
        |name: &str, default: u64| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    attack(
        number("PVRDMA_SEED", 7),
        number("PVRDMA_REQUESTS", 100_000_000),
        number("PVRDMA_COMMANDS", 1_000_000),
    );
}
