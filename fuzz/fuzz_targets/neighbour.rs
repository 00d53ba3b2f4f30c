//! The segment of a pair after a hostile neighbour's writes, and the registers of the function that a guest drives.
//!
//! Checked: received messages are entirely in the sender's window; buffers complete at most once; a broken connection stays broken;
//! the remaining content doesn't disturb a correct pair in the same segment an epoch later.

#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use neighbour::channel::{Message, Part, PostError, Receiver, Sender};
use neighbour::device::{Device, Effect};
use neighbour::layout::{Header, Layout, Side};
use neighbour::ring::stamp;
use neighbour::window::Geometry;

const EPOCH: u32 = 3;
const ENTRIES: u32 = 8;
const STRIDE: u64 = 1 << 30;
const RAM: &[(u64, u64)] = &[(0, 0x8000), (0x10_0000, 0x4000)];

#[derive(Debug, Arbitrary)]
struct Input {
    steps: Vec<Step>,
    accesses: Vec<(bool, u16, u32)>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// Any word of the segment.
    Poke {
        word: u16,
        value: u64,
    },
    /// A message entry that is well-formed except for the input's changes.
    Entry {
        number: u8,
        address: u16,
        far: Option<u64>,
        length: u16,
        flags: u8,
        id: u8,
        epoch: u8,
    },
    /// A completion entry that is well-formed except for the input's changes.
    Completion {
        number: u8,
        id: u8,
        epoch: u8,
    },
    Taken {
        count: u8,
        epoch: u8,
    },
    Post {
        parts: u8,
    },
    Receive,
    Complete,
    Collect,
    Arm,
    Signal,
}

fn epoch(choice: u8) -> u32 {
    // Mostly the right one.
    match choice {
        0..=7 => u32::from(choice),
        _ => EPOCH,
    }
}

fuzz_target!(|input: Input| run(&input));

fn run(input: &Input) {
    let layout = Layout::new(ENTRIES).expect("a possible layout");
    let geometry = Geometry::new(STRIDE, STRIDE, 4).expect("a possible geometry");
    let theirs = geometry.window(1, RAM).expect("RAM that fits");
    let own = geometry.window(2, RAM).expect("RAM that fits");
    let memory: Vec<AtomicU64> = (0..layout.size() / 8).map(|_| AtomicU64::new(0)).collect();
    let words = &memory[..];
    layout.write_header(words, EPOCH, &geometry, [1, 2]).expect("enough room");
    // This is the second side; the first is the hostile neighbour.
    let sender = |epoch| Sender::new(words, &layout, epoch, Side::Second, own, [0; ENTRIES as usize]);
    let receiver = |epoch| Receiver::new(words, &layout, epoch, Side::First, theirs);
    let mut sending = sender(EPOCH).expect("enough room");
    let mut receiving = receiver(EPOCH).expect("enough room");
    let mut message = Message::default();
    let mut held = Vec::new();
    let mut outstanding = 0_u32;
    let put = |word: usize, value: u64| {
        if let Some(place) = memory.get(word) {
            place.store(value, Ordering::Relaxed);
        }
    };
    for step in input.steps.iter().take(256) {
        match *step {
            Step::Poke { word, value } => put(usize::from(word) % memory.len(), value),
            Step::Entry { number, address, far, length, flags, id, epoch: of } => {
                let at = layout.messages(Side::First).first + 4 * usize::from(number % 8);
                put(at, far.unwrap_or(theirs.start() + u64::from(address)));
                put(at + 1, u64::from(flags & 3) << 32 | u64::from(length));
                put(at + 2, u64::from(id % 10));
                put(at + 3, stamp(epoch(of), u32::from(number)));
            }
            Step::Completion { number, id, epoch: of } => {
                let at = layout.completions(Side::Second).first + 2 * usize::from(number % 8);
                put(at, u64::from(id % 10));
                put(at + 1, stamp(epoch(of), u32::from(number)));
            }
            Step::Taken { count, epoch: of } => {
                put(layout.taken(Side::Second), u64::from(epoch(of)) << 32 | u64::from(count));
            }
            Step::Post { parts } => {
                let parts = vec![Part { address: own.start(), length: 16 }; usize::from(parts % 10)];
                match sending.post(words, &parts, 1, 2) {
                    Ok(id) => {
                        assert!(id < ENTRIES && sending.is_outstanding(id));
                        outstanding += 1;
                    }
                    Err(PostError::Outside(part)) => panic!("{part:?} is our own"),
                    Err(_) => {}
                }
            }
            Step::Receive => match receiving.receive(words, &mut message) {
                Ok(true) => {
                    assert!(message.parts().is_empty() == message.unreachable() && message.id < ENTRIES);
                    for part in message.parts() {
                        let at = part.address.checked_sub(theirs.start()).expect("in the window");
                        let end = at + u64::from(part.length);
                        assert!(
                            part.length > 0
                                && RAM.iter().any(|(start, size)| at >= *start && end <= start + size)
                        );
                    }
                    held.push(message.id);
                }
                Ok(false) => {}
                Err(violation) => {
                    let again = receiving.receive(words, &mut message);
                    assert_eq!(again, Err(violation), "it got over a violation by being asked again");
                }
            },
            Step::Complete => {
                if let Some(id) = held.pop() {
                    receiving.complete(words, id, 0);
                }
            }
            Step::Collect => {
                if let Ok(Some(completion)) = sending.completion(words) {
                    assert!(!sending.is_outstanding(completion.id));
                    outstanding = outstanding.checked_sub(1).expect("more came back than was sent");
                }
            }
            Step::Arm => {
                let _ = (sending.arm(words), receiving.arm(words));
            }
            Step::Signal => {
                let _ = (sending.must_signal(words), receiving.must_signal(words));
            }
        }
        assert_eq!(sending.outstanding(), outstanding);
        assert!(outstanding <= ENTRIES);
    }
    if let Ok((header, found)) = Header::read(words) {
        assert!(found.size() <= memory.len() * 8 && header.epoch != 0);
    }

    // An epoch above all that the input can have written: older content is ignored.
    let later = 1 << 30;
    let clean = memory.iter().all(|word| word.load(Ordering::Relaxed) >> 32 != u64::from(later));
    if clean {
        let (mut sending, mut receiving) = (
            Sender::new(words, &layout, later, Side::First, theirs, [0; ENTRIES as usize])
                .expect("enough room"),
            Receiver::new(words, &layout, later, Side::First, theirs).expect("enough room"),
        );
        assert_eq!(receiving.receive(words, &mut message), Ok(false));
        assert_eq!(sending.completion(words), Ok(None));
        let part = Part { address: theirs.start() + 0x10_0000, length: 0x4000 };
        let id = sending.post(words, &[part], 0, 0).expect("an empty ring has room");
        assert_eq!(receiving.receive(words, &mut message), Ok(true));
        assert_eq!((message.id, message.parts()), (id, &[part][..]));
    }

    let mut device = Device::new(geometry, layout, 100);
    assert!(device.offer(theirs, EPOCH, "neighbour", [2, 0, 0, 0, 0, 1]));
    for (write, offset, value) in input.accesses.iter().take(256) {
        if *write {
            if let Some(Effect::Release { slot, epoch }) =
                device.write(u64::from(*offset), &value.to_le_bytes())
            {
                assert_eq!((slot, epoch), (1, EPOCH), "only what is mapped can be released");
            }
        } else {
            let mut data = [0; 8];
            device.read(u64::from(*offset), &mut data[..if value & 1 == 0 { 4 } else { 8 }]);
        }
    }
}
