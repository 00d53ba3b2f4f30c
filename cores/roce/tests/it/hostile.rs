//! A hostile peer: no panic, no growth, and the own requests complete in order, each once.
//!
//! Run with overflow checks (the default of `cargo test`).

use proptest::prelude::*;
use roce::config::{Mtu, Reliability};
use roce::packet::{Aeth, AtomicEth, Header, Operation, Reth, Service};
use roce::{
    Arrival, Atomic, Batch, Config, Connection, Event, Kind, Memory, NoReceive, Received, Refusal, Remote,
    Request, State, Status, Unmoved,
};

/// Memory that accepts any access, and refuses some.
#[derive(Debug, Default)]
struct Sponge {
    posted: u64,
    completed: u64,
    failed: bool,
    in_use: bool,
    receives: u32,
    events: Vec<Event>,
    capacity: u64,
    written: u64,
}

impl Memory for Sponge {
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        assert!(token >= self.completed && token < self.posted);
        assert!(offset + into.len() as u64 <= length(token));
        Ok(())
    }
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        assert_eq!(token, self.completed, "answers are those of the oldest request");
        assert!(offset + data.len() as u64 <= length(token).max(8));
        Ok(())
    }
    fn execute_local(&mut self, _: u64) -> Status {
        Status::Success
    }
    fn complete(&mut self, token: u64, status: Status, _: u32) {
        assert_eq!(token, self.completed, "in order, each once");
        self.completed += 1;
        assert!(!self.failed || status == Status::Flushed);
        self.failed |= status != Status::Success;
    }
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        assert!(!self.in_use);
        self.receives = self.receives.checked_sub(1).ok_or(NoReceive::NotPosted)?;
        if self.receives % 16 == 15 {
            return Err(NoReceive::Unusable);
        }
        self.in_use = true;
        self.capacity = 1000;
        Ok(self.capacity)
    }
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        assert!(self.in_use && offset + data.len() as u64 <= self.capacity);
        Ok(())
    }
    fn complete_receive(&mut self, received: &Received) {
        assert!(std::mem::take(&mut self.in_use));
        assert!(u64::from(received.length) <= self.capacity || received.immediate.is_some());
    }
    fn fail_receive(&mut self, _: Status) {
        assert!(std::mem::take(&mut self.in_use));
    }
    fn keep_receive(&mut self) {
        assert!(std::mem::take(&mut self.in_use));
        self.receives += 1;
    }
    fn write(&mut self, remote: Remote, length: u64, offset: u64, data: &[u8]) -> Result<(), Refusal> {
        assert!(offset + data.len() as u64 <= length && length <= 1 << 31);
        self.written += data.len() as u64;
        if remote.rkey == 3 { Err(Refusal::Access) } else { Ok(()) }
    }
    fn read(&mut self, remote: Remote, length: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        assert!(offset + into.len() as u64 <= length && length <= 1 << 31);
        // Some regions disappear while they are read.
        if remote.rkey == 3 || (remote.rkey == 2 && offset > 512) { Err(Refusal::Access) } else { Ok(()) }
    }
    fn atomic(&mut self, remote: Remote, _: Atomic) -> Result<u64, Refusal> {
        assert_eq!(remote.address % 8, 0);
        if remote.rkey == 3 { Err(Refusal::Operation) } else { Ok(7) }
    }
    fn invalidate(&mut self, rkey: u32) -> Result<(), Refusal> {
        if rkey & 3 == 3 { Err(Refusal::Access) } else { Ok(()) }
    }
    fn event(&mut self, event: Event) {
        if event == Event::Failed {
            assert!(!self.events.contains(&Event::Failed), "it fails once");
            assert_eq!(self.completed, self.posted, "with nothing open");
            // All receives are flushed, the one in use as well.
            self.in_use = false;
        }
        if self.events.len() < 100 {
            self.events.push(event);
        }
    }
}

/// Lengths of the own requests.
fn length(token: u64) -> u64 {
    [0, 8, 256, 300, 1100, 700][usize::try_from(token % 6).unwrap()]
}

fn kind(token: u64, unreliable: bool) -> Kind {
    let remote = Remote { address: 4096, rkey: 1 };
    match token % if unreliable { 2 } else { 6 } {
        0 => Kind::Send { immediate: None, invalidate: None },
        1 => Kind::Write { remote, immediate: None },
        2 | 3 => Kind::Read { remote },
        4 => Kind::FetchAdd { remote, add: 1 },
        _ => Kind::Local { wait: true },
    }
}

#[derive(Debug, Clone)]
enum Step {
    Packet { operation: u8, near: i8, len: u16, rkey: u8, length: u32, syndrome: u8, ack: bool, address: u64 },
    Raw(Vec<u8>),
    Transmit(u8),
    Wait,
    Post,
    Receive,
    Save,
    Hold,
    Resume,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let length = prop_oneof![Just(0u32), 0u32..2000, Just(1 << 31), any::<u32>()];
    let syndrome = prop_oneof![Just(0x1Fu8), Just(0x60), Just(0x2C), Just(0x61), Just(0x62), any::<u8>()];
    let len = prop_oneof![Just(256u16), Just(0), 0u16..300, 0u16..4200];
    let address = prop_oneof![Just(4096u64), any::<u64>(), Just(u64::MAX)];
    let packet = (0u8..32, -6i8..10, len, 0u8..4, length, syndrome, any::<bool>(), address).prop_map(
        |(operation, near, len, rkey, length, syndrome, ack, address)| Step::Packet {
            operation,
            near,
            len,
            rkey,
            length,
            syndrome,
            ack,
            address,
        },
    );
    let step = prop_oneof![
        12 => packet,
        1 => prop::collection::vec(any::<u8>(), 0..80).prop_map(Step::Raw),
        4 => (1u8..20).prop_map(Step::Transmit),
        1 => Just(Step::Wait),
        2 => Just(Step::Post),
        2 => Just(Step::Receive),
        1 => Just(Step::Save),
        1 => Just(Step::Hold),
        1 => Just(Step::Resume),
    ];
    prop::collection::vec(step, 1..120)
}

/// Serialises and restores a connection, as a migration does.
fn through_bytes(connection: &Connection, now: u64) -> Connection {
    let saved = connection.save(now);
    let mut bytes = Vec::new();
    ciborium::into_writer(&saved, &mut bytes).unwrap();
    // About 60 bytes per request and remembered READ, and the attributes.
    assert!(bytes.len() < 40_000, "{} bytes", bytes.len());
    let read: roce::saved::Connection = ciborium::from_reader(&bytes[..]).unwrap();
    assert_eq!(read, saved);
    let restored = Connection::restore(&read, now + 12_345).unwrap();
    assert_eq!(restored.save(now + 12_345), saved, "restoring and saving again gives the same");
    restored
}

fn check(steps: Vec<Step>, unreliable: bool, window: u32, paced: bool) {
    let config = Config {
        reliability: if unreliable { Reliability::Unreliable } else { Reliability::Reliable },
        mtu: Mtu::B256,
        window,
        max_requests: 20,
        max_dest_rd_atomic: 4,
        congestion: paced.then(roce::congestion::Parameters::default),
        ..Config::new(1, 2, 0xFF_FFFE, 3)
    };
    let mut connection = Connection::new(config).unwrap();
    let mut memory = Sponge::default();
    let mut now = 1_000_000;
    let mut buffer = vec![0u8; 20 * 320];
    let mut lengths = Vec::new();
    for step in steps {
        now += 777;
        match step {
            Step::Packet { operation, near, len, rkey, length, syndrome, ack, address } => {
                let operation = if operation == 31 { 0x81 } else { operation };
                let Some((service, operation)) = Operation::decode(operation) else { continue };
                let len = if operation == Operation::Notification { 0 } else { len };
                let service = match service {
                    Service::Rc if unreliable => Service::Uc,
                    other => other,
                };
                let (sent, expected) = connection.psns();
                let base = if operation.is_response() { sent } else { expected };
                let psn = base.wrapping_add_signed(i32::from(near)) & 0xFF_FFFF;
                let mut header = Header::new(service, operation, 1, psn);
                header.ack_request = ack;
                header.reth = Reth { address, rkey: rkey.into(), length };
                header.atomic = AtomicEth { address, rkey: rkey.into(), swap_add: 1, compare: 2 };
                header.aeth = Aeth { syndrome, msn: 1 };
                header.immediate = u32::from(rkey).to_be_bytes();
                let mut bytes = vec![0; header.packet_len(len.into())];
                header.write(&mut bytes, len.into());
                connection.receive(now, &bytes, Arrival { congested: ack, too_fast: !ack }, &mut memory);
            }
            Step::Raw(bytes) => connection.receive(now, &bytes, Arrival::default(), &mut memory),
            Step::Transmit(most) => {
                let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, most.into());
                connection.transmit(now, &mut memory, &mut out);
                assert!(lengths.len() <= most.into());
            }
            Step::Wait => {
                if let Some(timeout) = connection.timeout() {
                    now = now.max(timeout);
                }
                connection.expired(now, &mut memory);
            }
            Step::Post => {
                while connection.room() > 0 && connection.state() == State::Ready {
                    let token = memory.posted;
                    let request =
                        Request::new(token, kind(token, unreliable), u32::try_from(length(token)).unwrap());
                    connection.post(request).unwrap();
                    memory.posted += 1;
                }
            }
            Step::Receive => {
                memory.receives += 3;
                connection.receive_posted();
            }
            Step::Save => {
                connection = through_bytes(&connection, now);
                now += 12_345;
            }
            Step::Hold => connection.suspend(now),
            Step::Resume => connection.resume(now),
        }
        let saved = connection.save(now);
        assert!(saved.responder.resources.len() <= 4 && saved.requester.queue.len() <= 20);
        assert_eq!(connection.outstanding() as u64, memory.posted - memory.completed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn anything_may_come_in(steps in steps(), unreliable: bool, window in 1u32..40, paced: bool) {
        check(steps, unreliable, window, paced);
    }

    /// A saved state may come from a damaged file: restoring refuses it, or yields a usable connection.
    #[test]
    fn a_damaged_state_does_no_harm(
        position in any::<prop::sample::Index>(),
        value: u8,
        steps in steps(),
    ) {
        let mut connection = Connection::new(Config { mtu: Mtu::B256, ..Config::new(1, 2, 5, 6) }).unwrap();
        let mut memory = Sponge { receives: 9, ..Sponge::default() };
        for token in 0..4 {
            let request = Request::new(token, kind(token, false), u32::try_from(length(token)).unwrap());
            connection.post(request).unwrap();
            memory.posted += 1;
        }
        let mut buffer = vec![0u8; 20 * 320];
        let mut lengths = Vec::new();
        let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 3);
        connection.transmit(1000, &mut memory, &mut out);
        let mut header = Header::new(Service::Rc, Operation::ReadRequest, 1, 6);
        header.reth = Reth { address: 0, rkey: 1, length: 700 };
        let mut bytes = vec![0; header.packet_len(0)];
        header.write(&mut bytes, 0);
        connection.receive(1000, &bytes, Arrival::default(), &mut memory);
        let mut bytes = Vec::new();
        ciborium::into_writer(&connection.save(1000), &mut bytes).unwrap();
        let at = position.index(bytes.len());
        bytes[at] = value;
        let Ok(saved) = ciborium::from_reader::<roce::saved::Connection, _>(&bytes[..]) else { return Ok(()) };
        let Ok(mut restored) = Connection::restore(&saved, 0) else { return Ok(()) };
        let mut sink = Anything;
        let mut now = 0;
        for step in steps {
            now += 1_000_000;
            match step {
                Step::Raw(bytes) => restored.receive(now, &bytes, Arrival::default(), &mut sink),
                Step::Packet { operation, near, len, syndrome, .. } => {
                    let Some((service, operation)) = Operation::decode(operation) else { continue };
                    let len = if operation == Operation::Notification { 0 } else { len };
                    let (sent, expected) = restored.psns();
                    let base = if operation.is_response() { sent } else { expected };
                    let psn = base.wrapping_add_signed(i32::from(near)) & 0xFF_FFFF;
                    let mut header = Header::new(service, operation, 1, psn);
                    header.aeth = Aeth { syndrome, msn: 1 };
                    let mut bytes = vec![0; header.packet_len(len.into())];
                    header.write(&mut bytes, len.into());
                    restored.receive(now, &bytes, Arrival::default(), &mut sink);
                }
                Step::Wait => restored.expired(now, &mut sink),
                _ => {
                    let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 20);
                    restored.transmit(now, &mut sink, &mut out);
                }
            }
        }
    }
}

/// Checks nothing: a damaged state may make invalid accesses.
struct Anything;

impl Memory for Anything {
    fn gather(&mut self, _: u64, _: u64, _: &mut [u8]) -> Result<(), Unmoved> {
        Ok(())
    }
    fn place(&mut self, _: u64, _: u64, _: &[u8]) -> Result<(), Unmoved> {
        Ok(())
    }
    fn execute_local(&mut self, _: u64) -> Status {
        Status::Success
    }
    fn complete(&mut self, _: u64, _: Status, _: u32) {}
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        Ok(500)
    }
    fn place_receive(&mut self, _: u64, _: &[u8]) -> Result<(), Unmoved> {
        Ok(())
    }
    fn complete_receive(&mut self, _: &Received) {}
    fn fail_receive(&mut self, _: Status) {}
    fn keep_receive(&mut self) {}
    fn write(&mut self, _: Remote, _: u64, _: u64, _: &[u8]) -> Result<(), Refusal> {
        Ok(())
    }
    fn read(&mut self, _: Remote, _: u64, _: u64, _: &mut [u8]) -> Result<(), Refusal> {
        Ok(())
    }
    fn atomic(&mut self, _: Remote, _: Atomic) -> Result<u64, Refusal> {
        Ok(0)
    }
    fn invalidate(&mut self, _: u32) -> Result<(), Refusal> {
        Ok(())
    }
    fn event(&mut self, _: Event) {}
}
