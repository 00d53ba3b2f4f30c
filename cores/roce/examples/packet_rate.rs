//! The protocol's own cost: two connections back to back in memory, without a network, beside a plain copy of the same bytes.
//!
//! `cargo run --release -p roce --example packet_rate`
//!
//! Figures are per second of processor time of one core, which does the work of both ends. Each byte is copied twice: from the sender's
//! memory into a packet, and from the packet into the receiver's memory. "copies" is these two copies alone, in pieces of the same size,
//! through a buffer of the same size.

#![allow(clippy::unwrap_used)] // A failure to set up should panic.
#![allow(clippy::cast_precision_loss)] // Figures for people.

use std::hint::black_box;

use rustix::time::{ClockId, clock_gettime};

use roce::{
    Arrival, Atomic, Batch, Config, Connection, Event, Kind, Memory, Mtu, NoReceive, Received, Refusal,
    Remote, Request, Status, Unmoved,
};

/// Bytes of each end's message buffer: more than the caches of one core hold.
const REGION: usize = 16 << 20;
/// Seconds of processor time per figure.
const RUN: f64 = 0.7;

/// One end: a memory region, and a receive queue that never runs empty.
struct End {
    bytes: Vec<u8>,
    message: usize,
    /// Where the message with token 0 begins; messages are contiguous.
    receive_at: usize,
    completed: u64,
    received: u64,
    failed: bool,
}

impl End {
    fn new(message: usize) -> Self {
        Self { bytes: vec![0x5A; REGION], message, receive_at: 0, completed: 0, received: 0, failed: false }
    }

    fn at(&self, token: u64, offset: u64) -> usize {
        let slots = (REGION / self.message) as u64;
        usize::try_from((token % slots) * self.message as u64 + offset).unwrap()
    }
}

impl Memory for End {
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        let at = self.at(token, offset);
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        let at = self.at(token, offset);
        self.bytes[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn execute_local(&mut self, _: u64) -> Status {
        Status::Success
    }
    fn complete(&mut self, _: u64, status: Status, _: u32) {
        self.completed += 1;
        self.failed |= status != Status::Success;
    }
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        Ok(self.message as u64)
    }
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        let at = self.receive_at + usize::try_from(offset).unwrap();
        self.bytes[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn complete_receive(&mut self, _: &Received) {
        self.received += 1;
        self.receive_at += self.message;
        if self.receive_at + self.message > REGION {
            self.receive_at = 0;
        }
    }
    fn fail_receive(&mut self, _: Status) {
        self.failed = true;
    }
    fn keep_receive(&mut self) {}
    fn write(&mut self, remote: Remote, _: u64, offset: u64, data: &[u8]) -> Result<(), Refusal> {
        let at = self.at(remote.address, offset);
        self.bytes[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn read(&mut self, remote: Remote, _: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let at = self.at(remote.address, offset);
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }
    fn atomic(&mut self, _: Remote, _: Atomic) -> Result<u64, Refusal> {
        Ok(0)
    }
    fn invalidate(&mut self, _: u32) -> Result<(), Refusal> {
        Ok(())
    }
    fn event(&mut self, event: Event) {
        self.failed |= event == Event::Failed;
    }
}

/// Processor time of this thread, seconds: other programs on the machine don't count.
fn spent() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

struct Figures {
    packets: f64,
    messages: f64,
    bytes: f64,
}

/// Runs messages of one kind through two connections.
fn run(mtu: Mtu, message: usize, kind: impl Fn(u64) -> Kind) -> Figures {
    let config = |qpn, peer| Config { mtu, ..Config::new(qpn, peer, 0, 0) };
    let mut a = (Connection::new(config(1, 2)).unwrap(), End::new(message));
    let mut b = (Connection::new(config(2, 1)).unwrap(), End::new(message));
    let mut buffer = vec![0u8; 64 * 4200];
    let mut lengths = Vec::new();
    let mut token = 0;
    let start = spent();
    let mut now = 0;
    while spent() - start < RUN {
        for _ in 0..100 {
            now += 1;
            while a.0.room() > 0 {
                a.0.post(Request::new(token, kind(token), u32::try_from(message).unwrap())).unwrap();
                token += 1;
            }
            step(now, &mut a, &mut b, &mut buffer, &mut lengths);
            step(now, &mut b, &mut a, &mut buffer, &mut lengths);
        }
    }
    let seconds = spent() - start;
    assert!(!a.1.failed && !b.1.failed, "nothing goes wrong here");
    assert_eq!(a.0.counters().retransmitted_packets, 0);
    let packets = a.0.counters().sent_packets + b.0.counters().sent_packets;
    Figures {
        packets: packets as f64 / seconds,
        messages: a.1.completed as f64 / seconds,
        bytes: a.1.completed as f64 * message as f64 / seconds,
    }
}

/// Delivers the packets of one end to the other.
fn step(
    now: u64,
    from: &mut (Connection, End),
    to: &mut (Connection, End),
    buffer: &mut [u8],
    lengths: &mut Vec<u32>,
) {
    let mut out = Batch::new(buffer, lengths, 0, 0, 64);
    from.0.transmit(now, &mut from.1, &mut out);
    let mut position = 0;
    for &len in lengths.iter() {
        let end = position + len as usize;
        to.0.receive(now, &buffer[position..end], Arrival::default(), &mut to.1);
        position = end;
    }
}

/// The two copies alone, in bytes per second.
fn copies(piece: usize) -> f64 {
    let from = vec![0x5Au8; REGION];
    let mut to = vec![0u8; REGION];
    let mut buffer = vec![0u8; 64 * 4200];
    let start = spent();
    let mut bytes = 0u64;
    let mut at = 0;
    while spent() - start < RUN {
        for _ in 0..100 {
            let batch = 64.min((REGION - at) / piece);
            for index in 0..batch {
                let source = at + index * piece;
                buffer[index * piece..(index + 1) * piece].copy_from_slice(&from[source..source + piece]);
            }
            for index in 0..batch {
                let target = at + index * piece;
                to[target..target + piece].copy_from_slice(&buffer[index * piece..(index + 1) * piece]);
            }
            black_box(&mut to);
            bytes += (batch * piece) as u64;
            at += batch * piece;
            if at + piece > REGION {
                at = 0;
            }
        }
    }
    bytes as f64 / (spent() - start)
}

fn main() {
    let send = |_| Kind::Send { immediate: None, invalidate: None };
    let write = |token| Kind::Write { remote: Remote { address: token, rkey: 1 }, immediate: None };
    let read = |token| Kind::Read { remote: Remote { address: token, rkey: 1 } };
    println!(
        "{:<28}{:>12}{:>12}{:>10}{:>14}{:>8}",
        "", "packets/s", "messages/s", "GB/s", "copies GB/s", "ratio"
    );
    let large = 1 << 20;
    type Make<'a> = &'a dyn Fn(u64) -> Kind;
    let cases: [(&str, Mtu, usize, Make<'_>); 9] = [
        ("SEND 1 MiB, MTU 4096", Mtu::B4096, large, &send),
        ("WRITE 1 MiB, MTU 4096", Mtu::B4096, large, &write),
        ("READ 1 MiB, MTU 4096", Mtu::B4096, large, &read),
        ("SEND 1 MiB, MTU 1024", Mtu::B1024, large, &send),
        ("WRITE 1 MiB, MTU 1024", Mtu::B1024, large, &write),
        ("READ 1 MiB, MTU 1024", Mtu::B1024, large, &read),
        ("SEND 8 bytes", Mtu::B1024, 8, &send),
        ("WRITE 8 bytes", Mtu::B1024, 8, &write),
        ("READ 8 bytes", Mtu::B1024, 8, &read),
    ];
    for (name, mtu, message, kind) in cases {
        let piece = message.min(mtu.bytes() as usize);
        let copied = copies(piece) / 1e9;
        let figures = run(mtu, message, kind);
        let bytes = figures.bytes / 1e9;
        println!(
            "{name:<28}{:>12.0}{:>12.0}{bytes:>10.3}{copied:>14.3}{:>8.2}",
            figures.packets,
            figures.messages,
            bytes / copied
        );
    }
}
