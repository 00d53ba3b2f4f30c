//! What a stranger can send to a monitor that waits for a VM: greetings, descriptions, pages and state, as frames that are well-formed
//! unless the input breaks them.
#![no_main]

use std::sync::OnceLock;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use machine::memory::{GuestAddressSpace, GuestRam, RamLayout, RamOptions};
use monitor::migration::frame::{Kind, Receiver, Sender};
use monitor::migration::message::{self, Accepted, End, Hello};
use monitor::migration::pages;
use monitor::migration::postcopy::message::{Complete, decode_missing, decode_wanted};
use monitor::migration::postcopy::set::PageSet;
use monitor::migration::shape::Shape;
use monitor::migration::state::SavedMachine;

/// One frame of a stream.
#[derive(Debug, Arbitrary)]
enum Frame {
    Hello { version: u16, oldest: u16, stream: u16, streams: u16 },
    Pages { address: u32, pages: u8, what: u8, contents: u16 },
    Offer(Vec<u8>),
    State(Vec<u8>),
    End(u64),
    Accepted(Vec<u8>),
    Sentence(Vec<u8>),
    Missing { start: u32, words: Vec<u64> },
    Want(Vec<u32>),
    Complete(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct Input {
    frames: Vec<Frame>,
    /// Bytes of the stream that are changed.
    changes: Vec<(u16, u8)>,
}

fn ram() -> &'static GuestRam {
    static RAM: OnceLock<GuestRam> = OnceLock::new();
    RAM.get_or_init(|| {
        let layout = RamLayout::new(&[1 << 20]).expect("1 MiB is possible");
        GuestRam::allocate(&layout, &RamOptions::default()).expect("1 MiB is there")
    })
}

fn payload(frame: &Frame) -> (Kind, Vec<u8>) {
    match frame {
        Frame::Hello { version, oldest, stream, streams } => {
            let (version, oldest, stream, streams) = (*version, *oldest, *stream, *streams);
            (Kind::Hello, Hello { version, oldest, stream, streams, migration: [1; 16] }.encode())
        }
        Frame::Pages { address, pages, what, contents } => {
            let mut bytes = u64::from(*address).to_le_bytes().to_vec();
            bytes.extend_from_slice(&u32::from(*pages).to_le_bytes());
            bytes.extend_from_slice(&u32::from(*what).to_le_bytes());
            // Whole pages unless the input says otherwise.
            let whole = usize::from(*pages) * pages::PAGE;
            let length = if *contents == 0 { whole } else { usize::from(*contents) };
            bytes.resize(pages::RUN_HEADER + if *what == 0 { length.min(64 * pages::PAGE) } else { 0 }, 5);
            (Kind::Pages, bytes)
        }
        Frame::Offer(bytes) => (Kind::Offer, bytes.clone()),
        Frame::State(bytes) => (Kind::State, bytes.clone()),
        Frame::End(pages) => (Kind::End, message::encode(&End { pages: *pages }).expect("it is small")),
        Frame::Accepted(bytes) => (Kind::Accepted, bytes.clone()),
        Frame::Sentence(bytes) => (Kind::Refused, bytes.clone()),
        Frame::Missing { start, words } => {
            let all = std::iter::once(u64::from(*start)).chain(words.iter().copied());
            (Kind::Missing, all.flat_map(u64::to_le_bytes).collect())
        }
        Frame::Want(pages) => {
            (Kind::Want, pages.iter().flat_map(|page| u64::from(*page).to_le_bytes()).collect())
        }
        Frame::Complete(bytes) => (Kind::Complete, bytes.clone()),
    }
}

fuzz_target!(|input: Input| {
    let (mut sender, mut stream) = (Sender::new(), Vec::new());
    for frame in input.frames.iter().take(32) {
        let (kind, payload) = payload(frame);
        // What is too long for its kind isn't sent.
        let _ = sender.send(&mut stream, kind, &[&payload]);
    }
    for (at, byte) in &input.changes {
        if let Some(place) = stream.get_mut(usize::from(*at)) {
            *place = *byte;
        }
    }
    let memory = ram().memory().memory().clone();
    let (mut receiver, mut rest) = (Receiver::new(), stream.as_slice());
    while let Ok((kind, payload)) = receiver.receive(&mut rest) {
        match kind {
            Kind::Hello => {
                if let Ok((hello, version)) = Hello::decode(payload) {
                    assert!(hello.stream < hello.streams && version <= hello.version);
                }
            }
            Kind::Pages => {
                // At most what RAM holds: anything beyond is refused.
                assert!(pages::apply(payload, &memory).unwrap_or(0) <= 256);
            }
            Kind::Offer => {
                let _ = message::decode::<Shape>(payload, "a description");
            }
            Kind::State => {
                let _ = SavedMachine::decode(payload);
            }
            Kind::End => {
                let _ = message::decode::<End>(payload, "an end");
            }
            Kind::Accepted => {
                let _ = message::decode::<Accepted>(payload, "an acceptance");
            }
            Kind::Refused | Kind::Abort => assert!(!message::sentence(payload).chars().any(char::is_control)),
            Kind::Missing => {
                let mut set = PageSet::empty(&[(0, 1 << 20)]);
                let _ = decode_missing(payload, &mut set);
                assert!(set.count() <= 256);
            }
            Kind::Want => assert!(decode_wanted(payload).map_or(0, |pages| pages.len()) <= 64),
            Kind::Complete => {
                let _ = message::decode::<Complete>(payload, "the end of post-copy");
            }
            Kind::Ready | Kind::Go | Kind::Running | Kind::Device | Kind::Postcopy => {}
        }
    }
});
