//! Runs the litmus tests that the host has written into this file: `payload_litmus`. Prints a line with all outcomes per test. The
//! host decides which of them are allowed.

#![no_std]
#![no_main]
#![allow(unsafe_code)] // The tests are code in a table of this program.

use core::arch::global_asm;
use payload_litmus::runner::{Bench, Code, Meeting, Test};
use payload_litmus::table::{CAPACITY, HEADER_SIZE, Placement, RECORD_SIZE, Record};
use payload_runtime::spmd::{refuse, with_team};
use payload_runtime::{Vcpu, println};
use payload_spmd::{Heap, Refused, Settings, Team};

payload_runtime::entry!(main);

/// `iterations` per test (1M); `round`: instances per round (1K); `meeting`: each, round, mixed or clock; `interval`: nanoseconds
/// between instances with `clock` (2000).
const NAMES: &[&str] = &["iterations", "round", "meeting", "interval"];

// On separate pages among the code, so that no store changes them. The magic exists only here: the host searches for it.
global_asm!(
    ".section .text.litmus, \"ax\"",
    ".balign 4096",
    ".globl litmus_table",
    "litmus_table:",
    ".ascii \"causeway.litmus\\001\"",
    ".long {capacity}, 0, 0, 0",
    ".zero {capacity}",
    ".balign 4096",
    ".text",
    capacity = const CAPACITY,
);

unsafe extern "C" {
    /// The table, as the host has written it.
    static litmus_table: [u8; HEADER_SIZE + CAPACITY];
}

fn main(vcpu: Vcpu) -> u32 {
    with_team(vcpu, |team, heap| match run(vcpu, team, heap) {
        Ok(()) => 0,
        Err(refused) if team.leads() => refuse("litmus", refused),
        Err(_) => 0,
    })
}

fn run(vcpu: Vcpu, team: &Team<'_>, heap: &mut Heap) -> Result<(), Refused> {
    let settings = Settings::parse(vcpu.arguments().skip(1), NAMES)?;
    let iterations = settings.number("iterations", 1 << 20, 1..=1 << 40)?;
    let round = settings.size("round", 1 << 10, 1..=1 << 16)?;
    let interval = settings.number("interval", 2_000, 1..=1_000_000_000)?;
    let meeting = match settings.word("meeting", &["each", "round", "mixed", "clock"])? {
        0 => Meeting::Each,
        1 => Meeting::Round,
        2 => Meeting::Mixed,
        _ => Meeting::Clock(interval),
    };
    // SAFETY: laid out above; no code writes it while the program runs.
    let (header, tests) = unsafe { litmus_table.split_at(HEADER_SIZE) };
    let word = |at: usize| {
        let bytes = header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        u32::from_le_bytes(bytes.unwrap_or_default()) as usize
    };
    let (length, count) = (word(20), word(24));
    let Some(tests) = tests.get(..length).filter(|_| count > 0) else {
        return Err(Refused::Other("This file has no tests in it; run it with: lab dsm-litmus"));
    };
    let records =
        || tests.chunks_exact(RECORD_SIZE).take(count).map(|bytes| Record::from_bytes(bytes, length));
    let crossing = records().flatten().any(|record| record.placement == Placement::Cross);
    let bench = Bench::new(heap, team, round, crossing)?;
    for record in records() {
        let Some(record) = record else {
            return Err(Refused::Other(
                "The table of tests has a record that is not one; make the file anew",
            ));
        };
        let threads = record.threads as usize;
        if threads > team.count() {
            let what = "A test with a thread per vCPU";
            return Err(Refused::Vcpus { what, least: threads, most: 254, count: team.count() });
        }
        let mut test = Test { record: &record, code: [None; _] };
        for (code, thread) in test.code.iter_mut().zip(&record.thread).take(threads) {
            let address = tests.as_ptr().wrapping_add(thread.code as usize);
            // SAFETY: the host has written a function there.
            *code = Some(unsafe { core::mem::transmute::<*const u8, Code>(address) });
        }
        let mut outcomes = None;
        // SAFETY: the host's code uses only its arguments.
        let ns = team.measure(|| outcomes = Some(unsafe { bench.run(team, &test, meeting, iterations) }));
        if let Some(outcomes) = outcomes.filter(|_| team.leads()) {
            println!(
                "{{\"program\":\"litmus\",\"vcpus\":{},\"nodes\":{},\"test\":\"{}\",\"placement\":\"{}\",\"ns\":{ns},\"iterations\":{},\"apart\":{},\"lost\":{},\"outcomes\":{outcomes}}}",
                team.count(),
                vcpu.info().node_count,
                record.name(),
                record.placement.name(),
                outcomes.iterations(),
                outcomes.apart(),
                outcomes.lost(),
            );
        }
        team.wait();
    }
    Ok(())
}
