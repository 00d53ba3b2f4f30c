//! Two connected ends, and what tests send between them.

use super::*;
use crate::config::Mtu;
use crate::output::Batch;

pub(super) const SEND: Kind = Kind::Send { immediate: None, invalidate: None };
pub(super) const AT: Remote = Remote { address: 8192, rkey: 7 };

/// Memory of one end: one flat region for everything.
#[derive(Debug, Default)]
pub(super) struct Flat {
    pub(super) bytes: Vec<u8>,
    pub(super) receives: VecDeque<u64>,
    pub(super) in_use: Option<u64>,
    pub(super) completions: Vec<(u64, Status, u32)>,
    pub(super) received: Vec<Result<Received, Status>>,
    pub(super) events: Vec<Event>,
    pub(super) locals: Vec<u64>,
    pub(super) refuse: Option<Refusal>,
    /// Buffers of sends and reads lie at `token << 20`.
    pub(super) lost_from: u64,
}

impl Flat {
    pub(super) fn new() -> Self {
        let bytes = (0..1u32 << 20).map(|i| ((i.wrapping_mul(2_654_435_761) >> 13) & 0xFF) as u8).collect();
        Self { bytes, lost_from: u64::MAX, ..Self::default() }
    }
    pub(super) fn slice(&mut self, at: u64, len: usize) -> &mut [u8] {
        let at = usize::try_from(at).unwrap() % (1 << 19);
        &mut self.bytes[at..at + len]
    }
}

impl Memory for Flat {
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        if offset >= self.lost_from {
            return Err(Status::LocalProtection.into());
        }
        let len = into.len();
        into.copy_from_slice(self.slice(token * 4096 + offset, len));
        Ok(())
    }
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
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
        if self.refuse == Some(Refusal::Gone) {
            return Err(NoReceive::Gone);
        }
        let capacity = self.receives.pop_front().ok_or(NoReceive::NotPosted)?;
        assert!(self.in_use.replace(capacity).is_none(), "one receive at a time");
        Ok(capacity)
    }
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        if self.refuse == Some(Refusal::Gone) {
            return Err(Status::Flushed.into());
        }
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
        if let Some(refusal) = self.refuse {
            return Err(refusal);
        }
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

/// Both ends; the test itself is the network.
pub(super) struct Pair {
    pub(super) ends: [(Connection, Flat); 2],
    pub(super) now: u64,
}

impl Pair {
    pub(super) fn new(change: impl Fn(&mut Config)) -> Self {
        let mut a = Config { mtu: Mtu::B256, window: 16, ..Config::new(1, 2, 0xFF_FFF0, 100) };
        let mut b = Config { mtu: Mtu::B256, window: 16, ..Config::new(2, 1, 100, 0xFF_FFF0) };
        change(&mut a);
        change(&mut b);
        let end = |config| (Connection::new(config).unwrap(), Flat::new());
        Self { ends: [end(a), end(b)], now: 1000 }
    }

    pub(super) fn packets(&mut self, end: usize) -> Vec<Vec<u8>> {
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

    pub(super) fn deliver(&mut self, end: usize, packets: &[Vec<u8>]) {
        let (connection, memory) = &mut self.ends[end];
        for packet in packets {
            connection.receive(self.now, packet, Arrival::default(), memory);
        }
    }

    /// Delivers packets until neither end sends any more.
    pub(super) fn settle(&mut self) {
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

    /// Advances time to the next timer of an end.
    pub(super) fn wait(&mut self, end: usize) {
        let (connection, memory) = &mut self.ends[end];
        self.now = connection.timeout().expect("a timer runs").max(self.now);
        connection.expired(self.now, memory);
    }

    pub(super) fn post(&mut self, token: u64, kind: Kind, length: u32) {
        self.ends[0].0.post(Request::new(token, kind, length)).unwrap();
    }
}
