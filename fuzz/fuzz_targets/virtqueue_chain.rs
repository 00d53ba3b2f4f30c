//! A split virtqueue whose rings, descriptors and indirect tables contain anything.
//!
//! Checked: no panic and no endless loop; an accepted chain is entirely in RAM, in every translation; its parts add up; the queue's
//! positions survive saving and restoring.

#![no_main]

use causeway_fuzz::ring::{Address, Buffer, Driver, Guest, Poke, RingShape};
use libfuzzer_sys::fuzz_target;
use machine::memory::{Address as _, GuestMemoryBackend};
use virtio_devices::queue::{self, GuestIoVecs, MAX_SEGMENTS, Ring, SavedQueue, total_len};

/// Limit of chains per execution: overlapping rings can feed themselves forever.
const POPS: usize = 40;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    shape: RingShape,
    chains: Vec<(Option<Address>, Vec<Buffer>)>,
    pokes: Vec<Poke>,
    /// Operations on the next chains.
    steps: Vec<Step>,
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    Complete { written: u32 },
    Together { written: u16 },
    Undo,
    Keep,
    Copy { offset: u16, len: u16, advance: u16 },
    Poke(Poke),
    Interrupt,
    Kicks { on: bool },
    Restore,
}

thread_local! {
    static GUEST: Guest = Guest::new();
}

fuzz_target!(|input: Input| {
    GUEST.with(|guest| {
        guest.clear();
        run(guest, &input);
    });
});

fn run(guest: &Guest, input: &Input) {
    let mut driver = Driver::new(guest, &input.shape, 0);
    for (table, buffers) in &input.chains {
        let buffers: Vec<_> =
            buffers.iter().map(|buffer| (buffer.address.0, buffer.len.0, buffer.writable)).collect();
        driver.push(&buffers, table.map(|table| table.0));
    }
    for poke in &input.pokes {
        guest.put(poke.address.0, &poke.bytes);
    }
    let memory = guest.memory();
    let features = input.shape.features();
    let mut ring = Ring::new(driver.finish(0), features);
    if ring.check(&memory).is_err() {
        // A device never continues here, but the ring must tolerate it.
        drop(ring.pop(&memory));
        return;
    }
    let mut steps = input.steps.iter();
    let mut held = Vec::new();
    let mut data = [0; 0x400];
    for _ in 0..POPS {
        let chain = match ring.pop(&memory) {
            Ok(Some(chain)) => chain,
            Ok(None) | Err(_) => break,
        };
        assert!(ring.in_flight() > 0 && ring.in_flight() <= ring.size());
        let all = [chain.readable(), chain.writable()].concat();
        assert!(!all.is_empty() && all.len() <= MAX_SEGMENTS);
        assert!(total_len(&all) <= u64::from(u32::MAX));
        for segment in &all {
            let len = usize::try_from(segment.len).expect("64 bits");
            assert!(len > 0 && memory.check_range(segment.address, len), "{segment:?} isn't RAM");
            assert!(segment.address.checked_add(len as u64).is_some());
        }
        let vecs = GuestIoVecs::new(&memory, &all).expect("checked above");
        assert_eq!(vecs.total() as u64, total_len(&all));
        match steps.next().unwrap_or(&Step::Complete { written: 0 }) {
            Step::Complete { written } => {
                if ring.complete(&memory, chain.head(), *written).is_err() {
                    break;
                }
            }
            Step::Together { written } => {
                held.push((chain.head(), u32::from(*written)));
                if ring.complete_together(&memory, &held).is_err() {
                    break;
                }
                held.clear();
            }
            Step::Undo => {
                ring.undo_pop();
                // The same chain would be returned forever.
                break;
            }
            Step::Keep => held.push((chain.head(), 0)),
            Step::Copy { offset, len, advance } => {
                let part = queue::part(&all, (*offset).into(), (*len).into());
                let fits = u64::from(*offset) + u64::from(*len) <= total_len(&all);
                assert_eq!(part.is_some(), fits);
                assert!(part.is_none_or(|part| total_len(&part) == u64::from(*len)));
                let buffer = &mut data[..usize::from(*len % 0x401)];
                let offset = u64::from(*offset);
                let copied = queue::read(&memory, chain.readable(), offset, buffer).is_ok();
                let enough = offset + buffer.len() as u64 <= total_len(chain.readable());
                assert_eq!(copied, enough);
                let written = queue::write(&memory, chain.writable(), offset, buffer).is_ok();
                assert_eq!(written, offset + buffer.len() as u64 <= total_len(chain.writable()));
                queue::mark_written(&memory, chain.writable(), offset);
                let mut vecs = vecs;
                let before = vecs.total();
                vecs.advance(usize::from(*advance).min(before));
                assert_eq!(vecs.total(), before - usize::from(*advance).min(before));
                held.push((chain.head(), 0));
            }
            Step::Poke(poke) => {
                // The guest writes to a buffer that the device has checked: the copy doesn't change.
                guest.put(poke.address.0, &poke.bytes);
                assert_eq!([chain.readable(), chain.writable()].concat(), all);
                held.push((chain.head(), 0));
            }
            Step::Interrupt => {
                held.push((chain.head(), 0));
                drop(ring.should_interrupt(&memory));
            }
            Step::Kicks { on } => {
                held.push((chain.head(), 0));
                let done = if *on {
                    ring.enable_kicks(&memory).is_ok()
                } else {
                    ring.disable_kicks(&memory).is_ok()
                };
                if !done {
                    break;
                }
            }
            Step::Restore => {
                for (head, written) in held.drain(..) {
                    drop(ring.complete(&memory, head, written));
                }
                drop(ring.complete(&memory, chain.head(), 0));
                if ring.in_flight() > 0 {
                    break;
                }
                let mut active = ring.into_active();
                let saved = SavedQueue::of(active.index, &active.queue);
                active.queue = saved.restore().expect("what was saved can be restored");
                assert_eq!(SavedQueue::of(active.index, &active.queue), saved);
                ring = Ring::new(active, features);
            }
        }
    }
    for (head, written) in held {
        drop(ring.complete(&memory, head, written));
    }
    drop(ring.should_interrupt(&memory));
}
