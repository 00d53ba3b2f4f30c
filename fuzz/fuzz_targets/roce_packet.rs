//! Hostile packets and frames of RoCEv2, to the parsers and to a connection.
//!
//! Checked:
//! - There is no panic and no endless loop.
//! - Parsed packets are encoded identically, except for reserved bits.
//! - A connection accesses only as much memory as its packets' lengths permit, and answers no more packets than its capacity.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use roce::datagram::Datagram;
use roce::frame::{Addresses, Frame, Template};
use roce::{
    Arrival, Atomic, Batch, Config, Connection, Event, Kind, Memory, NoReceive, Packet, Received, Refusal,
    Remote, Request, Status, Unmoved,
};

const STEPS: usize = 40;

#[derive(Debug, Arbitrary)]
enum Step {
    /// A packet: opcode, flags, PSN near the expected one, bytes after the BTH.
    Packet {
        opcode: u8,
        flags: u8,
        ack: bool,
        psn: u8,
        far: bool,
        bytes: Vec<u8>,
    },
    /// Raw bytes.
    Raw {
        bytes: Vec<u8>,
    },
    /// A frame: valid headers around bytes, with a changed byte.
    Frame {
        bytes: Vec<u8>,
        ipv6: bool,
        vlan: bool,
        at: u8,
        mask: u8,
    },
    /// The local program posts.
    Post {
        kind: u8,
        length: u16,
    },
    /// A receive is posted.
    Receive {
        length: u16,
    },
    Transmit,
    Pass {
        microseconds: u16,
    },
}

#[derive(Default)]
struct Owner {
    receives: Vec<u64>,
    in_use: Option<u64>,
    completed: u64,
    open: u64,
}

impl Memory for Owner {
    fn gather(&mut self, _: u64, _: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        into.fill(0x11);
        Ok(())
    }
    fn place(&mut self, _: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        assert!(offset + data.len() as u64 <= 1 << 16, "not beyond a request");
        Ok(())
    }
    fn execute_local(&mut self, _: u64) -> Status {
        Status::Success
    }
    fn complete(&mut self, token: u64, _: Status, _: u32) {
        assert_eq!(token, self.completed, "in order, once");
        self.completed += 1;
        self.open -= 1;
    }
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        assert!(self.in_use.is_none(), "one receive at a time");
        let length = self.receives.pop().ok_or(NoReceive::NotPosted)?;
        self.in_use = Some(length);
        Ok(length)
    }
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        let length = self.in_use.expect("a receive in use");
        assert!(offset + data.len() as u64 <= length, "within the receive");
        Ok(())
    }
    fn complete_receive(&mut self, _: &Received) {
        assert!(self.in_use.take().is_some());
    }
    fn fail_receive(&mut self, _: Status) {
        assert!(self.in_use.take().is_some());
    }
    fn keep_receive(&mut self) {
        self.receives.extend(self.in_use.take());
    }
    fn write(&mut self, _: Remote, length: u64, offset: u64, data: &[u8]) -> Result<(), Refusal> {
        assert!(offset + data.len() as u64 <= length, "within the message");
        if length > 1 << 16 { Err(Refusal::Access) } else { Ok(()) }
    }
    fn read(&mut self, _: Remote, length: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        assert!(offset + into.len() as u64 <= length, "within the message");
        into.fill(0x22);
        if length > 1 << 16 { Err(Refusal::Access) } else { Ok(()) }
    }
    fn atomic(&mut self, at: Remote, _: Atomic) -> Result<u64, Refusal> {
        assert_eq!(at.address % 8, 0);
        Ok(7)
    }
    fn invalidate(&mut self, _: u32) -> Result<(), Refusal> {
        Ok(())
    }
    fn event(&mut self, event: Event) {
        if event == Event::Failed {
            self.in_use = None;
        }
    }
}

fn parse(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    let mut again = vec![0; packet.header.packet_len(packet.payload.len())];
    packet.header.write(&mut again, packet.payload.len()).copy_from_slice(packet.payload);
    assert_eq!(Packet::parse(&again), Ok(packet));
    assert_eq!(Packet::destination(bytes), Some(packet.header.destination));
    if let Some((_, payload)) = Datagram::receive(&packet) {
        assert!(payload.len() < bytes.len());
    }
}

fn frame(bytes: &[u8], ipv6: bool, vlan: bool, at: u8, mask: u8) {
    let ip = |last: u16| {
        if ipv6 {
            std::net::IpAddr::from([0xFD00, 0, 0, 0, 0, 0, 0, last])
        } else {
            [10, 0, 0, last as u8].into()
        }
    };
    let addresses = Addresses {
        source_mac: [2; 6],
        destination_mac: [4; 6],
        vlan: vlan.then_some(5),
        source: ip(1),
        destination: ip(2),
        traffic_class: 2,
        flow_label: 0,
        hop_limit: 0,
        source_port: 0xC001,
    };
    let template = Template::new(&addresses).expect("one family");
    let bytes = &bytes[..bytes.len().min(1024)];
    let mut frame = vec![0; template.before()];
    frame.extend_from_slice(bytes);
    frame.extend_from_slice(&[0; 4]);
    if !template.finish(&mut frame, 1) {
        return;
    }
    if let Ok(taken) = Frame::parse(&frame) {
        assert_eq!(taken.packet, bytes);
    }
    let at = usize::from(at) % frame.len();
    frame[at] ^= mask;
    if let Ok(taken) = Frame::parse(&frame) {
        assert_eq!(taken.receive_header().len(), 40);
        parse(taken.packet);
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut connection = Connection::new(Config::new(5, 6, 100, 200)).expect("a configuration");
    let mut memory = Owner::default();
    let (mut now, mut token) = (0u64, 0u64);
    let (mut buffer, mut lengths) = (vec![0; 16 << 10], Vec::new());
    for step in steps.into_iter().take(STEPS) {
        match step {
            Step::Packet { opcode, flags, ack, psn, far, bytes } => {
                // Responses refer to sent packets, requests to expected ones.
                let near = if opcode & 0x1F >= 0x0D && opcode & 0x1F <= 0x12 { 100 } else { 200 };
                let psn = u32::from(psn).wrapping_add(if far { 0x80_0000 } else { near - 3 });
                let mut packet = vec![opcode, flags & 0xF0, 0xFF, 0xFF, 0, 0, 0, 5, u8::from(ack) << 7];
                packet.extend_from_slice(&psn.to_be_bytes()[1..]);
                packet.extend_from_slice(&bytes);
                parse(&packet);
                connection.receive(
                    now,
                    &packet,
                    Arrival { congested: ack && far, ..Arrival::default() },
                    &mut memory,
                );
            }
            Step::Raw { bytes } => {
                parse(&bytes);
                let _ = Frame::parse(&bytes);
                connection.receive(now, &bytes, Arrival::default(), &mut memory);
            }
            Step::Frame { bytes, ipv6, vlan, at, mask } => frame(&bytes, ipv6, vlan, at, mask),
            Step::Post { kind, length } => {
                let remote = Remote { address: 64, rkey: 9 };
                let kind = match kind % 5 {
                    0 => Kind::Send { immediate: None, invalidate: None },
                    1 => Kind::Write { remote, immediate: Some([1; 4]) },
                    2 => Kind::Read { remote },
                    3 => Kind::FetchAdd { remote, add: 1 },
                    _ => Kind::Write { remote, immediate: None },
                };
                let length = if matches!(kind, Kind::FetchAdd { .. }) { 8 } else { u32::from(length) };
                let request = Request { token, kind, length, solicited: false, fence: false };
                if connection.post(request).is_ok() {
                    token += 1;
                    memory.open += 1;
                }
            }
            Step::Receive { length } => {
                memory.receives.push(u64::from(length));
                connection.receive_posted();
            }
            Step::Transmit => {
                for _ in 0..4 {
                    let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 16);
                    connection.transmit(now, &mut memory, &mut out);
                    let mut at = 0;
                    for &length in &lengths {
                        let end = at + length as usize;
                        assert!(Packet::parse(&buffer[at..end]).is_ok(), "what leaves is a packet");
                        at = end;
                    }
                }
            }
            Step::Pass { microseconds } => {
                now += u64::from(microseconds) * 1000;
                if connection.timeout().is_some_and(|at| at <= now) {
                    connection.expired(now, &mut memory);
                }
            }
        }
    }
    assert_eq!(memory.open, token - memory.completed);
});
