//! Frames and control commands of a virtio network device, in both directions, over rings that the guest may have broken. The backend
//! is in this process, and refuses, delays or fails as the input says.
//!
//! Checked:
//! - There is no panic and no endless loop.
//! - Frames at the backend have a checked header and a valid length.
//! - No failure loses a descriptor chain; the rings report a lost one when they are dropped.
//! - The number of queue pairs stays in range.

#![no_main]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use causeway_fuzz::ring::{Address, Buffer, Driver, Guest, Poke, RingShape};
use libfuzzer_sys::fuzz_target;
use virtio_devices::device::VirtioInterrupt;
use virtio_devices::net::backend::{NetBackend, NetChannel, Received, Sent};
use virtio_devices::net::control::{ControlQueue, Shared};
use virtio_devices::net::header::{FRAME_MAX, FRAME_MIN, HEADER_LEN, VnetHeader};
use virtio_devices::net::queue_pair::Progress;
use virtio_devices::net::{FrameSink, FrameSource, MacAddress, QueuePair};
use virtio_devices::queue::Ring;

/// Queue pairs that the control queue offers.
const PAIRS: u16 = 4;
const STEPS: usize = 24;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    features: u64,
    work: Work,
    pokes: Vec<Poke>,
}

// One value per execution.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, arbitrary::Arbitrary)]
enum Work {
    Data {
        receive: RingShape,
        transmit: RingShape,
        posted: Vec<(Option<Address>, Vec<Buffer>)>,
        sent: Vec<GuestFrame>,
        incoming: Vec<Incoming>,
        answers: Vec<Answer>,
        steps: Vec<Step>,
    },
    Control {
        shape: RingShape,
        commands: Vec<(Vec<u8>, Vec<Buffer>)>,
        failing: bool,
    },
}

/// A frame from the guest.
#[derive(Debug, arbitrary::Arbitrary)]
struct GuestFrame {
    header: [u8; HEADER_LEN],
    header_at: Address,
    rest: Vec<Buffer>,
    table: Option<Address>,
}

/// A frame from the host.
#[derive(Debug, Clone, arbitrary::Arbitrary)]
struct Incoming {
    header: [u8; HEADER_LEN],
    length: u16,
    long: bool,
}

/// The backend's answer to a call.
#[derive(Debug, Clone, Copy, arbitrary::Arbitrary)]
enum Answer {
    Done,
    WouldBlock,
    Interrupted,
    Broken,
    Refused,
}

impl Answer {
    fn result(self) -> io::Result<()> {
        match self {
            Self::Done => Ok(()),
            Self::WouldBlock => Err(io::ErrorKind::WouldBlock.into()),
            Self::Interrupted => Err(io::ErrorKind::Interrupted.into()),
            Self::Broken => Err(io::ErrorKind::BrokenPipe.into()),
            Self::Refused => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    Transmit,
    Receive,
    Interrupt,
    HungUp,
    Poke(Poke),
}

struct Channel {
    fd: Arc<OwnedFd>,
    features: u64,
    incoming: VecDeque<Incoming>,
    answers: VecDeque<Answer>,
    copy: Vec<u8>,
}

impl Channel {
    fn answer(&mut self) -> io::Result<()> {
        self.answers.pop_front().unwrap_or(Answer::Done).result()
    }
}

impl NetChannel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received> {
        self.answer()?;
        let frame = self.incoming.pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        let length = usize::from(frame.length) + if frame.long { 20 } else { 0 };
        assert!(sink.capacity() >= FRAME_MAX, "the longest frame always fits");
        let pattern = FRAME.with(|pattern| sink.fill(&pattern[..length]));
        if !pattern && length <= FRAME_MAX {
            panic!("{length} bytes were refused");
        }
        if !pattern {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Received { header: VnetHeader::parse(&frame.header), length })
    }

    fn send(&mut self, header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent> {
        let length = frame.length();
        assert!((FRAME_MIN..=FRAME_MAX).contains(&length), "a frame of {length} bytes");
        assert_eq!(header.sanitize(self.features, length), Ok(*header), "an unchecked header");
        self.answer()?;
        self.copy.clear();
        frame.copy_to(0, &mut self.copy);
        assert_eq!(self.copy.len(), length);
        Ok(Sent::Passed)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A backend for the control queue.
struct Backend {
    failing: bool,
}

impl Backend {
    fn result(&self) -> io::Result<()> {
        if self.failing { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
    }
}

impl NetBackend for Backend {
    fn announce(&self, _mac: MacAddress) -> io::Result<()> {
        self.result()
    }

    fn description(&self) -> String {
        "fuzz".to_owned()
    }

    fn offload_features(&self) -> u64 {
        u64::MAX
    }

    fn set_guest_offloads(&self, _features: u64) -> io::Result<()> {
        self.result()
    }

    fn set_active_pairs(&self, pairs: u16) -> io::Result<()> {
        assert!((1..=PAIRS).contains(&pairs));
        self.result()
    }

    fn set_carrier(&self, _up: bool) -> io::Result<()> {
        Ok(())
    }

    fn end_reason(&self) -> Option<String> {
        None
    }
}

/// Raises no interrupts.
struct Silent;

impl VirtioInterrupt for Silent {
    fn queue(&self, _index: u16) {}

    fn config(&self) {}

    fn failed(&self, _reason: &str) {}
}

thread_local! {
    static GUEST: Guest = Guest::new();
    static EVENT: Arc<OwnedFd> = Arc::new(virtio_devices::worker::new_event().expect("an eventfd"));
    static FRAME: Vec<u8> = vec![0xA5; FRAME_MAX + 20];
}

fuzz_target!(|input: Input| {
    GUEST.with(|guest| {
        guest.clear();
        run(guest, input);
    });
});

fn buffers(list: &[Buffer], writable: bool) -> Vec<(u64, u32, bool)> {
    // Mostly in the right direction. The shape's descriptors yield the others.
    list.iter().map(|buffer| (buffer.address.0, buffer.len.0.max(1), writable)).collect()
}

/// Returns the negotiated features: the input's choice of network features, and those that its rings need.
fn features(chosen: u64, shape: &RingShape) -> u64 {
    const RINGS_AND_RESERVED: u64 = 0x3FF << 24 | 0xFF << 34;
    chosen & !RINGS_AND_RESERVED | shape.features()
}

fn run(guest: &Guest, input: Input) {
    match input.work {
        Work::Data { receive, transmit, posted, sent, incoming, answers, steps } => {
            let features = features(input.features, &receive);
            let mut driver = Driver::new(guest, &receive, 0);
            for (table, list) in &posted {
                driver.push(&buffers(list, true), table.map(|table| table.0));
            }
            let receive = driver.finish(0);
            let mut driver = Driver::new(guest, &transmit, 1);
            for frame in &sent {
                guest.put(frame.header_at.0, &frame.header);
                let mut chain = vec![(frame.header_at.0, HEADER_LEN as u32, false)];
                chain.extend(buffers(&frame.rest, false));
                driver.push(&chain, frame.table.map(|table| table.0));
            }
            let transmit = driver.finish(1);
            for poke in &input.pokes {
                guest.put(poke.address.0, &poke.bytes);
            }
            let channel = Channel {
                fd: EVENT.with(Arc::clone),
                features,
                incoming: incoming.into(),
                answers: answers.into(),
                copy: Vec::new(),
            };
            let mut pair = QueuePair::new(
                receive,
                transmit,
                Box::new(channel),
                features,
                guest.space.clone(),
                Arc::default(),
                Arc::default(),
            );
            if pair.check().is_ok() {
                data(guest, &mut pair, &steps);
            }
            // Panics when a chain is still in flight.
            pair.into_parts();
        }
        Work::Control { shape, commands, failing } => {
            let features = features(input.features, &shape);
            let mut driver = Driver::new(guest, &shape, 0);
            for (at, (command, rest)) in (0_u64..).zip(commands.iter().take(8)) {
                let own = 0x3000 + at * 0x100;
                let command = &command[..command.len().min(0x80)];
                guest.put(own, command);
                let mut chain = Vec::new();
                if !command.is_empty() {
                    chain.push((own, command.len() as u32, false));
                }
                chain.extend(buffers(rest, false));
                chain.push((own + 0xFF, 1, true));
                driver.push(&chain, None);
            }
            let ring = Ring::new(driver.finish(2), features);
            for poke in &input.pokes {
                guest.put(poke.address.0, &poke.bytes);
            }
            if ring.check(&guest.memory()).is_err() {
                return;
            }
            let backend = Box::new(Backend { failing });
            let shared = Arc::new(Shared::new(backend, MacAddress([2, 0, 0, 0, 0, 1])));
            let mut control = ControlQueue::new(
                ring,
                features,
                PAIRS,
                guest.space.clone(),
                Arc::clone(&shared),
                Vec::new(),
            );
            for _ in 0..4 {
                if !control.serve(&Silent).is_ok_and(|more| more) {
                    break;
                }
            }
            assert!((1..=PAIRS).contains(&shared.active_pairs()));
            assert!(shared.state().mac.is_unicast());
            control.into_ring().into_active();
        }
    }
}

fn data(guest: &Guest, pair: &mut QueuePair, steps: &[Step]) {
    let tail = [Step::Transmit, Step::Receive, Step::Interrupt];
    for step in steps.iter().take(STEPS).chain(&tail) {
        let result = match step {
            Step::Transmit => pair.transmit().map(|progress| assert_ne!(progress, Progress::Lost)),
            Step::Receive => pair.receive().map(drop),
            Step::Interrupt => pair.interrupt(&Silent),
            Step::HungUp => {
                pair.hung_up();
                assert!(pair.is_lost());
                Ok(())
            }
            Step::Poke(poke) => {
                guest.put(poke.address.0, &poke.bytes);
                Ok(())
            }
        };
        // The device stops here.
        if result.is_err() {
            return;
        }
    }
}
