//! Cost of a request and a completion in the rings. Ignored by default: the figures need an optimised build on a quiet machine (`cargo test
//! --release -p pvrdma --test speed -- --ignored --nocapture`).

#![allow(clippy::unwrap_used)] // Helpers of tests fail as tests do.

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::time::Instant;

use dma::{Dma, MappedMemory, MemoryRegion};
use hca::names::QpHandle;
use hca::provider::{CompletionQueue, Fetched, SendQueue};
use hca::work::{CompletedOperation, Completion, Status};
use pvrdma::model::{completion_queue, send_queue};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const SIZE: u64 = 1 << 20;
const SLOTS: u32 = 256;
const ROUNDS: u32 = 20_000;

fn memory() -> MappedMemory {
    let file: OwnedFd = memfd_create("speed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, SIZE).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    MappedMemory::default().with(MemoryRegion::map(0, SIZE, &file, 0, true).unwrap()).unwrap()
}

fn nanoseconds(began: Instant, count: u32) -> f64 {
    began.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}

#[test]
#[ignore = "a measurement"]
fn rings() {
    let memory = memory();
    let pages: Vec<u64> = (16..48).map(|page| page * 4096).collect();
    for index in 0..SLOTS {
        let slot = pages[0] + u64::from(index) * 128;
        memory.write(slot, &u64::from(index).to_le_bytes()).unwrap();
        memory.write(slot + 8, &1u32.to_le_bytes()).unwrap();
        memory.write(slot + 16, &0u32.to_le_bytes()).unwrap();
    }
    let mut queue = send_queue(4096, &pages, SLOTS, 3).unwrap();
    SendQueue::<MappedMemory>::start(&mut queue, &memory);
    let (mut tail, mut fetched) = (0, 0u32);
    let began = Instant::now();
    for _ in 0..ROUNDS {
        tail = (tail + 64) & (2 * SLOTS - 1);
        memory.store_u32(4096, tail).unwrap();
        while let Fetched::Request(request) = queue.fetch(&memory) {
            black_box(&request);
            fetched += 1;
        }
        queue.retire(&memory, 64);
    }
    assert_eq!(fetched, ROUNDS * 64);
    let fetch = nanoseconds(began, fetched);

    let mut completions = completion_queue(&memory, 8192, &pages, SLOTS, false).unwrap();
    let done = Completion {
        wr_id: 1,
        qp: QpHandle(3),
        operation: CompletedOperation::Write,
        status: Status::Success,
        byte_len: 8,
        immediate: None,
        invalidated: None,
        source: None,
        grh: None,
    };
    let began = Instant::now();
    for _ in 0..ROUNDS {
        for _ in 0..64 {
            completions.push(&memory, black_box(&done)).unwrap();
        }
        completions.publish(&memory).unwrap();
        let tail = memory.load_u32(8192 + 8).unwrap();
        memory.store_u32(8192 + 12, tail).unwrap();
    }
    let push = nanoseconds(began, ROUNDS * 64);
    println!("fetch {fetch:.1} ns per request, push {push:.1} ns per completion");
}

/// How long the engine's thread is blocked when a process with a full table of queue pairs exits.
#[test]
#[ignore = "a measurement"]
fn a_process_with_all_queue_pairs_ends() {
    let mut host = pvrdma_testbed::Host::default();
    let config = pvrdma::Config::new("speed", hca::names::SegmentId(1), [2, 0, 0, 0, 0, 1]);
    let size = 1 << 20;
    let mut guest = pvrdma_testbed::Guest::new(&mut host, config, dma::HeapMemory::new(size), size as u64);
    guest.probe(&mut host);
    let context = guest.context(&mut host);
    let pd = guest.pd(&mut host, context.1);
    let cq = guest.cq(&mut host, context, 64);
    let options = pvrdma_testbed::guest::QpOptions::default();
    guest.qp(&mut host, context.0, pd, (&cq, &cq), None, options).unwrap();
    let began = Instant::now();
    let made = (1..32_767)
        .take_while(|_| {
            host.write(guest.id, pvrdma::abi::registers::REQUEST, 0);
            host.read(guest.id, pvrdma::abi::registers::ERROR) == 0
        })
        .count();
    let create = began.elapsed();
    let began = Instant::now();
    guest.destroy(&mut host, pvrdma::abi::commands::number::DESTROY_UC, context.1).unwrap();
    println!("{made} queue pairs made in {create:?}, destroyed with their context in {:?}", began.elapsed());
}
