//! What a guest ABI implements so that the engine can serve it, and the events that it receives.
//!
//! ```text
//! guest writes WQE, tail ──▶ SendQueue::fetch ──▶ engine executes ──▶ CompletionQueue::push
//!                                                        │           and at the end of the turn SendQueue::retire (head),
//! guest writes RQE, tail ──▶ ReceiveQueue::take ─────────┘           then CompletionQueue::publish (tail),
//!                                                                    then Sink::completion_event, if armed
//! ```

use std::fmt::Debug;

use dma::Dma;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::names::{CqHandle, DeviceId};
use crate::work::{AsyncEvent, Completion, Malformed, ReceiveRequest, SendRequest};

/// A guest ABI: its rings, and access to guest memory. An engine has one provider; devices with another ABI are a variant of the same
/// provider.
pub trait Provider: Sized + 'static {
    /// Guest memory of one VM; cheap to clone.
    type Memory: Dma + Clone;
    /// A send queue.
    type SendQueue: SendQueue<Self::Memory>;
    /// A receive queue, of one queue pair or shared.
    type ReceiveQueue: ReceiveQueue<Self::Memory>;
    /// A completion queue.
    type CompletionQueue: CompletionQueue<Self::Memory>;
}

/// Result of fetching from a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched<T> {
    /// The ring is empty.
    Empty,
    /// A request, copied out of guest memory.
    Request(T),
    /// A malformed request; it is processed in order, and completes with an error.
    Malformed {
        /// Work request identifier from the ring.
        wr_id: u64,
        /// The error.
        reason: Malformed,
    },
    /// The ring itself is unusable: its indices are invalid or its memory is gone. The queue pair fails.
    Broken,
}

/// The send queue of one queue pair. The engine may have fetched several requests; they retire in order.
pub trait SendQueue<M: Dma>: Sized {
    /// Its saved state: the location of its ring, and the engine's position in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// Saves the state. All work must be published ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// Restores a queue from a saved state, which may be hostile. The error names the invalid part in a word or two.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Calls `each` with the parts of its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// Starts at the ring's current consumer index; called when the queue pair leaves RESET.
    fn start(&mut self, memory: &M);
    /// Whether a request follows those fetched: one load, no side effect. A broken ring counts as work.
    fn pending(&self, memory: &M) -> bool;
    /// Guest address of the guest's producer index, and its value when no request waits: while a load returns that value, the queue is
    /// empty. `None` when a load doesn't suffice.
    fn watch(&self) -> Option<(u64, u32)> {
        None
    }
    /// Prefetches the cache lines that [`SendQueue::fetch`] will read, since a turn follows soon. Affects only time.
    fn prefetch_next(&self, memory: &M) {
        let _ = memory;
    }
    /// Copies the next request and advances the fetch position; the guest's head index doesn't change.
    fn fetch(&mut self, memory: &M) -> Fetched<SendRequest>;
    /// Releases the slots of the `count` oldest fetched requests to the guest, before their completions are published.
    fn retire(&mut self, memory: &M, count: u32);
}

/// A receive queue. A slot is released to the guest as soon as it is copied.
pub trait ReceiveQueue<M: Dma>: Sized {
    /// Its saved state: the location of its ring, and the engine's position in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// Saves the state. All work must be published ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// Restores a queue from a saved state, which may be hostile. The error names the invalid part in a word or two.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Calls `each` with the parts of its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// As [`SendQueue::start`].
    fn start(&mut self, memory: &M);
    /// Number of posted requests. 0 for a broken ring.
    fn available(&self, memory: &M) -> u32;
    /// Copies the next request and releases its slot.
    fn take(&mut self, memory: &M) -> Fetched<ReceiveRequest>;
}

/// A completion queue. The guest polls the index that [`CompletionQueue::publish`] stores, so each store transfers a cache line both ways.
/// The engine therefore publishes several completions with one store where it can.
pub trait CompletionQueue<M: Dma>: Sized {
    /// Its saved state: the location of its ring, and the engine's position in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// Saves the state. All work must be published ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// Restores a queue from a saved state, which may be hostile. The error names the invalid part in a word or two.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Calls `each` with the parts of its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// Appends a completion, which stays invisible to the guest. Never changes published entries.
    fn push(&mut self, memory: &M, completion: &Completion) -> Result<(), CompletionQueueFailed>;
    /// Makes all pushed completions visible to the guest.
    fn publish(&mut self, memory: &M) -> Result<(), CompletionQueueFailed>;
    /// The guest's consumer index, and the number of unconsumed completions. `None` when the ring is broken.
    fn consumer(&self, memory: &M) -> Option<Consumer>;
}

/// The consumer side of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consumer {
    /// The consumer index; changes whenever the guest consumes a completion.
    pub position: u32,
    /// Number of unconsumed completions, unpublished ones included.
    pub unconsumed: u32,
}

/// A completion could not be delivered; the completion queue and its queue pairs fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompletionQueueFailed {
    /// It is full.
    #[error("The completion queue is full")]
    Overrun,
    /// Its indices are invalid or its memory is gone.
    #[error("The completion queue's ring is broken")]
    Broken,
}

/// Receives the engine's events for a guest. The engine calls it: collect the events, and don't call back.
pub trait Sink {
    /// A completion event. `false` when the event ring is full: the engine retries later.
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool;
    /// An asynchronous event. The sink bounds how many it keeps.
    fn async_event(&mut self, device: DeviceId, event: AsyncEvent);
}
