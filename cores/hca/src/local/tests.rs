//! Errors that no guest can cause, but that must not look like success if they ever happen.

use dma::HeapMemory;

use super::*;
use crate::engine::{DeviceConfig, EngineConfig};
use crate::limits::{Capabilities, Limits};
use crate::memory::Piece;
use crate::names::SegmentId;
use crate::provider::{
    CompletionQueue, CompletionQueueFailed, Consumer, Fetched, Provider, ReceiveQueue, SendQueue,
};
use crate::work::{Completion, ReceiveRequest, SendRequest};

const PAGE: u64 = 4096;

/// The provider of guests without queues: these tests only copy.
struct NoQueues;
enum NoQueue {}

impl Provider for NoQueues {
    type Memory = HeapMemory;
    type SendQueue = NoQueue;
    type ReceiveQueue = NoQueue;
    type CompletionQueue = NoQueue;
}

/// What the three kinds of queues have in common.
macro_rules! no_queue {
    ($kind:ident { $($rest:tt)* }) => {
        impl $kind<HeapMemory> for NoQueue {
            type Saved = ();
            fn save(&self) -> Self::Saved {
                match *self {}
            }
            fn restore((): Self::Saved) -> Result<Self, &'static str> {
                Err("a queue")
            }
            fn memory(&self, _: &mut dyn FnMut(u64, u64)) {
                match *self {}
            }
            $($rest)*
        }
    };
}

no_queue!(SendQueue {
    fn start(&mut self, _: &HeapMemory) {
        match *self {}
    }
    fn pending(&self, _: &HeapMemory) -> bool {
        match *self {}
    }
    fn fetch(&mut self, _: &HeapMemory) -> Fetched<SendRequest> {
        match *self {}
    }
    fn retire(&mut self, _: &HeapMemory, _: u32) {
        match *self {}
    }
});

no_queue!(ReceiveQueue {
    fn start(&mut self, _: &HeapMemory) {
        match *self {}
    }
    fn available(&self, _: &HeapMemory) -> u32 {
        match *self {}
    }
    fn take(&mut self, _: &HeapMemory) -> Fetched<ReceiveRequest> {
        match *self {}
    }
});

no_queue!(CompletionQueue {
    fn push(&mut self, _: &HeapMemory, _: &Completion) -> Result<(), CompletionQueueFailed> {
        match *self {}
    }
    fn publish(&mut self, _: &HeapMemory) -> Result<(), CompletionQueueFailed> {
        match *self {}
    }
    fn consumer(&self, _: &HeapMemory) -> Option<Consumer> {
        match *self {}
    }
});

fn gathered(sources: &[u64], targets: &[u64]) -> (Engine<NoQueues>, u32, u32) {
    let mut engine = Engine::new(EngineConfig::default());
    let [one, other] = ["one", "other"].map(|name| {
        let config = DeviceConfig {
            name: name.to_owned(),
            segment: SegmentId(1),
            limits: Limits::default(),
            capabilities: Capabilities::default(),
        };
        engine.add_device(config, HeapMemory::new(8 * 4096)).unwrap()
    });
    let pieces = |lens: &[u64]| -> Vec<Piece> {
        (0..).zip(lens).map(|(index, len)| Piece { address: index * PAGE, len: *len }).collect()
    };
    engine.split_source().1.extend(pieces(sources));
    engine.split_target().1.extend(pieces(targets));
    (engine, one.0, other.0)
}

#[test]
fn a_copy_whose_device_is_gone_fails() {
    let (mut engine, from, to) = gathered(&[64], &[64]);
    assert_eq!(engine.copy(from, to), Ok(()));
    engine.remove_device(crate::names::DeviceId(to));
    assert_eq!(engine.copy(from, to), Err(CopyFault::Destination(DmaFault { address: 0, len: 64 })));
    assert_eq!(engine.copy(to, from), Err(CopyFault::Source(DmaFault { address: 0, len: 64 })));
    assert!(engine.write_target(to, &[1; 64]).is_err());
}

#[test]
fn a_copy_between_lists_of_different_lengths_fails_and_moves_nothing() {
    let short = |lens: &[u64], targets: &[u64]| {
        let (engine, from, to) = gathered(lens, targets);
        engine.device(from).unwrap().memory.write(0, &[7; 4096]).unwrap();
        let result = engine.copy(from, to);
        let mut bytes = [0; 4096];
        engine.device(to).unwrap().memory.read(0, &mut bytes).unwrap();
        (result.is_err(), bytes.contains(&7))
    };
    for (sources, targets) in [
        (&[100][..], &[60][..]),
        (&[60], &[100]),
        (&[10, 90], &[60]),
        (&[100], &[]),
        (&[], &[1]),
        (&[10, 50], &[30, 40]),
    ] {
        assert_eq!(short(sources, targets), (true, false), "{sources:?} to {targets:?}");
    }
    assert_eq!(short(&[10, 50], &[30, 30]), (false, true));
    assert_eq!(short(&[], &[]), (false, false));
}
