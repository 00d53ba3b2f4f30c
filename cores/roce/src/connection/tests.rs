//! Unit tests of connections: two of them back to back.

use super::*;
use crate::memory::*;
use crate::output::Batch;

/// Memory of one end: one flat region for everything.
#[derive(Debug, Default)]
struct Flat {
    bytes: Vec<u8>,
    receives: VecDeque<u64>,
    in_use: Option<u64>,
    completions: Vec<(u64, Status, u32)>,
    received: Vec<Result<Received, Status>>,
    events: Vec<Event>,
    locals: Vec<u64>,
    refuse: Option<Refusal>,
    /// What is sent and read into lies at `token << 20`.
    lost_from: u64,
}

impl Flat {
    fn new() -> Self {
        let bytes = (0..1u32 << 20).map(|i| ((i.wrapping_mul(2_654_435_761) >> 13) & 0xFF) as u8).collect();
        Self { bytes, lost_from: u64::MAX, ..Self::default() }
    }
    fn slice(&mut self, at: u64, len: usize) -> &mut [u8] {
        let at = usize::try_from(at).unwrap() % (1 << 19);
        &mut self.bytes[at..at + len]
    }
}

impl Memory for Flat {
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Status> {
        if offset >= self.lost_from {
            return Err(Status::LocalProtection);
        }
        let len = into.len();
        into.copy_from_slice(self.slice(token * 4096 + offset, len));
        Ok(())
    }
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Status> {
        self.slice(token * 4096 + offset, data.len()).copy_from_slice(data);
        Ok(())
    }
    fn execute_local(&mut self, token: u64) -> Status {
        self.locals.push(token);
        Status::Success
    }
    fn complete(&mut self, token: u64, status: Status, length: u32) {
        self.completions.push((token, status, length));
    }
    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        let capacity = self.receives.pop_front().ok_or(NoReceive::NotPosted)?;
        assert!(self.in_use.replace(capacity).is_none(), "one receive at a time");
        Ok(capacity)
    }
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Status> {
        assert!(self.in_use.is_some());
        self.slice((1 << 18) + offset, data.len()).copy_from_slice(data);
        Ok(())
    }
    fn complete_receive(&mut self, received: &Received) {
        assert!(self.in_use.take().is_some());
        self.received.push(Ok(*received));
    }
    fn fail_receive(&mut self, status: Status) {
        assert!(self.in_use.take().is_some());
        self.received.push(Err(status));
    }
    fn keep_receive(&mut self) {
        let capacity = self.in_use.take().unwrap();
        self.receives.push_front(capacity);
    }
    fn write(&mut self, remote: Remote, _: u64, offset: u64, data: &[u8]) -> Result<(), Refusal> {
        if let Some(refusal) = self.refuse {
            return Err(refusal);
        }
        self.slice(remote.address + offset, data.len()).copy_from_slice(data);
        Ok(())
    }
    fn read(&mut self, remote: Remote, _: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        if let Some(refusal) = self.refuse {
            return Err(refusal);
        }
        let len = into.len();
        into.copy_from_slice(self.slice(remote.address + offset, len));
        Ok(())
    }
    fn atomic(&mut self, remote: Remote, operation: Atomic) -> Result<u64, Refusal> {
        let word: &mut [u8; 8] = self.slice(remote.address, 8).try_into().unwrap();
        let before = u64::from_ne_bytes(*word);
        let after = match operation {
            Atomic::CompareSwap { compare, swap } => {
                if before == compare {
                    swap
                } else {
                    before
                }
            }
            Atomic::FetchAdd { add } => before.wrapping_add(add),
        };
        *word = after.to_ne_bytes();
        Ok(before)
    }
    fn invalidate(&mut self, _: u32) -> Result<(), Refusal> {
        self.refuse.map_or(Ok(()), Err)
    }
    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// Both ends, and a network that the test is.
struct Pair {
    ends: [(Connection, Flat); 2],
    now: u64,
}

impl Pair {
    fn new(change: impl Fn(&mut Config)) -> Self {
        let mut a = Config { mtu: Mtu::B256, window: 16, ..Config::new(1, 2, 0xFF_FFF0, 100) };
        let mut b = Config { mtu: Mtu::B256, window: 16, ..Config::new(2, 1, 100, 0xFF_FFF0) };
        change(&mut a);
        change(&mut b);
        let end = |config| (Connection::new(config).unwrap(), Flat::new());
        Self { ends: [end(a), end(b)], now: 1000 }
    }

    fn packets(&mut self, end: usize) -> Vec<Vec<u8>> {
        let (connection, memory) = &mut self.ends[end];
        let mut buffer = vec![0; 1 << 20];
        let mut lengths = Vec::new();
        let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 1000);
        connection.transmit(self.now, memory, &mut out);
        let mut position = 0;
        let mut packets = Vec::new();
        for len in lengths {
            let len = len as usize;
            packets.push(buffer[position..position + len].to_vec());
            position += len;
        }
        packets
    }

    fn deliver(&mut self, end: usize, packets: &[Vec<u8>]) {
        let (connection, memory) = &mut self.ends[end];
        for packet in packets {
            connection.receive(self.now, packet, Arrival::default(), memory);
        }
    }

    /// Until nothing is said any more.
    fn settle(&mut self) {
        loop {
            let from_a = self.packets(0);
            self.deliver(1, &from_a);
            let from_b = self.packets(1);
            self.deliver(0, &from_b);
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
        }
    }

    /// Lets time pass up to the next timer of an end.
    fn wait(&mut self, end: usize) {
        let (connection, memory) = &mut self.ends[end];
        self.now = connection.timeout().expect("a timer runs").max(self.now);
        connection.expired(self.now, memory);
    }

    fn post(&mut self, token: u64, kind: Kind, length: u32) {
        self.ends[0].0.post(Request::new(token, kind, length)).unwrap();
    }
}

use crate::config::Mtu;

const SEND: Kind = Kind::Send { immediate: None, invalidate: None };
const AT: Remote = Remote { address: 8192, rkey: 7 };

#[test]
fn every_operation_goes_through() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.extend([4096; 4]);
    pair.post(1, SEND, 1000);
    pair.post(2, Kind::Send { immediate: Some([1, 2, 3, 4]), invalidate: None }, 0);
    pair.post(3, Kind::Send { immediate: None, invalidate: Some(9) }, 256);
    pair.post(4, Kind::Write { remote: AT, immediate: None }, 5000);
    pair.post(5, Kind::Write { remote: AT, immediate: Some([5; 4]) }, 512);
    pair.post(6, Kind::Read { remote: AT }, 10_000);
    pair.post(7, Kind::FetchAdd { remote: AT, add: 5 }, 8);
    pair.post(8, Kind::CompareSwap { remote: AT, compare: 1, swap: 2 }, 8);
    pair.post(9, Kind::Local { wait: true }, 0);
    pair.post(10, Kind::Read { remote: AT }, 0);
    pair.settle();
    let lengths = [1000, 0, 256, 5000, 512, 10_000, 8, 8, 0, 0];
    let expected: Vec<_> = (1..=10).zip(lengths).map(|(token, len)| (token, Status::Success, len)).collect();
    assert_eq!(pair.ends[0].1.completions, expected);
    assert_eq!(pair.ends[0].1.locals, [9]);
    let received: Vec<_> = pair.ends[1].1.received.iter().map(|r| r.unwrap()).collect();
    let lengths: Vec<_> = received.iter().map(|r| r.length).collect();
    assert_eq!(lengths, [1000, 0, 256, 512]);
    assert_eq!(received[1].immediate, Some([1, 2, 3, 4]));
    assert_eq!(received[2].invalidated, Some(9));
    assert_eq!(received[3].operation, ReceivedOperation::WriteImmediate);
    assert_eq!(pair.ends[0].0.counters().retransmitted_packets, 0);
    assert!(pair.ends[0].0.is_drained());
    assert_eq!(pair.ends[0].0.timeout(), None, "no timer without anything outstanding");
}

#[test]
fn a_send_without_receive_waits_as_long_as_the_timer_code_says() {
    let mut pair = Pair::new(|config| config.min_rnr_timer = 14);
    pair.post(1, SEND, 10);
    pair.settle();
    let start = pair.now;
    pair.ends[1].1.receives.push_back(10);
    pair.wait(0);
    assert_eq!(pair.now - start, 1_280_000);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 10)]);
    assert_eq!(pair.ends[1].0.counters().rnr_nak_sent, 1);
}

#[test]
fn a_receive_that_is_posted_ends_the_wait() {
    let mut pair = Pair::new(|config| config.min_rnr_timer = 0);
    pair.post(1, SEND, 10);
    pair.settle();
    pair.ends[1].1.receives.push_back(10);
    pair.ends[1].0.receive_posted();
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 10)]);
}
