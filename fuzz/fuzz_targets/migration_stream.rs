//! A hostile source of a migration: greetings, descriptions, pages, pieces of disks and state. The frames are well-formed unless the
//! input breaks them. They arrive over one or two streams at the monitor's destination code.
#![no_main]

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use machine::interrupt::IrqchipKind;
use machine::memory::{GuestAddressSpace, GuestRam, RamLayout, RamOptions};
use monitor::migration::MigrationError;
use monitor::migration::connection::Stop;
use monitor::migration::destination::{DestinationDevices, Streams};
use monitor::migration::error::line;
use monitor::migration::frame::{Kind, Sender};
use monitor::migration::message::{self, Accepted, End, Hello};
use monitor::migration::mirror::message::{MirrorRequest, RequestedDisk, header};
use monitor::migration::pages;
use monitor::migration::postcopy::message::{Complete, decode_wanted};
use monitor::migration::shape::{Shape, ShapeDevice};
use monitor::migration::state::SavedMachine;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use virtio_devices::block::{Block, BlockConfig, DiskContent, EngineChoice};

/// Size of the disk in bytes.
const DISK: u64 = 256 << 10;
/// Size of RAM in bytes.
const RAM: u64 = 1 << 20;

/// One frame of a stream.
#[derive(Debug, Arbitrary)]
enum Frame {
    Hello { version: u16, oldest: u16, stream: u16, streams: u16 },
    Pages { address: u32, pages: u8, what: u8, contents: u16 },
    Offer(Vec<u8>),
    State(Vec<u8>),
    End(u8),
    EndOf(Vec<u8>),
    Accepted(Vec<u8>),
    Sentence(Vec<u8>),
    Missing { start: u32, words: Vec<u64> },
    Want(Vec<u32>),
    Complete(Vec<u8>),
    Mirror { bytes: Option<u32>, named: bool, device: bool, twice: bool },
    MirrorOf(Vec<u8>),
    Block { disk: u8, zero: bool, offset: u32, bytes: u16, contents: Option<u16> },
    Whole { disk: u8 },
    Device(Vec<u8>),
    Settle,
    Postcopy,
    Go,
    Abort,
}

/// One stream.
#[derive(Debug, Arbitrary)]
struct Line {
    /// Whether the greeting is valid, and the first stream offers the matching VM.
    proper: bool,
    frames: Vec<Frame>,
    /// Changed bytes of the stream.
    changes: Vec<(u16, u8)>,
}

#[derive(Debug, Arbitrary)]
struct Input {
    first: Line,
    second: Option<Line>,
}

fn ram() -> GuestRam {
    let layout = RamLayout::new(&[RAM]).expect("1 MiB is possible");
    GuestRam::allocate(&layout, &RamOptions::default()).expect("1 MiB is there")
}

fn shape() -> &'static Shape {
    static SHAPE: OnceLock<Shape> = OnceLock::new();
    SHAPE.get_or_init(|| Shape {
        version: Shape::VERSION,
        name: "a".to_owned(),
        program: "0".to_owned(),
        vcpus: vec![0],
        memory: vec![(0, RAM, 0)],
        windows: Vec::new(),
        console: false,
        devices: vec![ShapeDevice { name: "disk0".to_owned(), device_id: 2, queues: vec![256] }],
        interrupts: IrqchipKind::Kernel,
        cpuid: Vec::new(),
    })
}

/// Accepts all disk content.
struct There(Vec<DiskContent>);

impl DestinationDevices for There {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(None)
    }
    fn receive_state(&self, _: u32, _: &[u8]) -> Result<(), MigrationError> {
        Ok(())
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn disks(&self) -> &[DiskContent] {
        &self.0
    }
}

fn disk() -> Block {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).expect("memfds are there");
    let file = std::fs::File::from(file);
    file.set_len(DISK).expect("it is small");
    let config = BlockConfig {
        claim: false,
        engine: EngineChoice::Synchronous,
        ..BlockConfig::new("disk0", "(memory)")
    };
    Block::from_file(file, config).expect("it is a disk")
}

fn payload(frame: &Frame) -> (Kind, Vec<u8>) {
    match frame {
        Frame::Hello { version, oldest, stream, streams } => {
            let (version, oldest, stream, streams) = (*version, *oldest, *stream, *streams);
            (Kind::Hello, Hello { version, oldest, stream, streams, migration: [1; 16] }.encode())
        }
        Frame::Pages { address, pages, what, contents } => {
            let mut bytes = u64::from(*address).to_le_bytes().to_vec();
            bytes.extend_from_slice(&u32::from(*pages % 8).to_le_bytes());
            bytes.extend_from_slice(&u32::from(*what).to_le_bytes());
            // Whole pages unless the input says otherwise.
            let whole = usize::from(*pages % 8) * pages::PAGE;
            let length = if *contents == 0 { whole } else { usize::from(*contents) };
            bytes.resize(pages::RUN_HEADER + if *what == 0 { length } else { 0 }, 5);
            (Kind::Pages, bytes)
        }
        Frame::Offer(bytes) => (Kind::Offer, bytes.clone()),
        Frame::State(bytes) => (Kind::State, bytes.clone()),
        Frame::End(pages) => (Kind::End, encoded(&End { blackout_us: None, pages: u64::from(*pages) })),
        Frame::EndOf(bytes) => (Kind::End, bytes.clone()),
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
        Frame::Mirror { bytes, named, device, twice } => {
            let bytes = bytes.map_or(DISK, u64::from);
            let one = RequestedDisk { name: "disk0".to_owned(), bytes, device: *device, named: *named };
            (Kind::Mirror, encoded(&MirrorRequest { disks: vec![one; 1 + usize::from(*twice)] }))
        }
        Frame::MirrorOf(bytes) => (Kind::Mirror, bytes.clone()),
        Frame::Block { disk, zero, offset, bytes, contents } => {
            let length = contents.unwrap_or(if *zero { 0 } else { *bytes });
            let mut frame = header(u32::from(*disk), *zero, u64::from(*offset), u64::from(*bytes)).to_vec();
            frame.resize(frame.len() + usize::from(length), 9);
            (Kind::Block, frame)
        }
        Frame::Whole { disk } => (Kind::Block, header(u32::from(*disk), true, 0, DISK).to_vec()),
        Frame::Device(bytes) => (Kind::Device, bytes.clone()),
        Frame::Settle => (Kind::Settle, Vec::new()),
        Frame::Postcopy => (Kind::Postcopy, Vec::new()),
        Frame::Go => (Kind::Go, Vec::new()),
        Frame::Abort => (Kind::Abort, b"no".to_vec()),
    }
}

fn encoded<T: serde::Serialize>(message: &T) -> Vec<u8> {
    message::encode(message).expect("it is small")
}

/// Returns a socket with all bytes of a stream, followed by its end. The other end is kept, so that responses can be sent.
fn stream(line: &Line, number: u16, streams: u16) -> (OwnedFd, OwnedFd) {
    let (mut sender, mut bytes) = (Sender::new(), Vec::new());
    let mut put = |kind, payload: &[u8]| {
        // A payload that exceeds its kind's limit isn't sent.
        let _ = sender.send(&mut bytes, kind, &[payload]);
    };
    if line.proper {
        let hello = Hello { version: 4, oldest: 3, stream: number, streams, migration: [1; 16] };
        put(Kind::Hello, &hello.encode());
        if number == 0 {
            put(Kind::Offer, &encoded(shape()));
        }
    }
    for frame in line.frames.iter().take(32) {
        let (kind, payload) = payload(frame);
        put(kind, &payload);
    }
    for (at, byte) in &line.changes {
        if let Some(place) = bytes.get_mut(usize::from(*at)) {
            *place = *byte;
        }
    }
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .expect("sockets are there");
    // Bytes that the socket doesn't accept at once are dropped.
    let mut rest = &bytes[..];
    while let Ok(sent @ 1..) = send(&ours, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        rest = &rest[sent..];
    }
    rustix::net::shutdown(&ours, rustix::net::Shutdown::Write).expect("it is connected");
    (ours, theirs)
}

fuzz_target!(|input: Input| {
    // Responses of the destination, as its source parses them.
    for frame in input.first.frames.iter().take(8) {
        match payload(frame) {
            (Kind::Accepted, bytes) => drop(message::decode::<Accepted>(&bytes, "an acceptance")),
            (Kind::Want, bytes) => {
                assert!(decode_wanted(&bytes).map_or(0, |pages| pages.len()) <= 64);
            }
            (Kind::Complete, bytes) => drop(message::decode::<Complete>(&bytes, "the end of post-copy")),
            (Kind::Refused, bytes) => assert!(!message::sentence(&bytes).chars().any(char::is_control)),
            _ => {}
        }
    }
    let streams = 1 + u16::from(input.second.is_some());
    let mut kept = Vec::new();
    let mut ends = Vec::new();
    for (line, number) in std::iter::once(&input.first).chain(&input.second).zip(0..) {
        let (ours, theirs) = stream(line, number, streams);
        kept.push(ours);
        ends.push(theirs);
    }
    let (ram, disk, stop) = (ram(), disk(), Stop::default());
    let there = There(vec![disk.content()]);
    let taken = Streams::over(ends, None, &stop)
        .and_then(|streams| streams.receive(shape(), &ram.memory(), &there, &stop));
    match taken {
        Ok((mut landing, state)) => {
            let _ = SavedMachine::decode(&state);
            if landing.ready().is_ok() {
                let _ = landing.running();
            }
        }
        Err(error) => assert!(!line(&error).is_empty()),
    }
    drop(ram.memory().memory());
});
