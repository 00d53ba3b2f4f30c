//! What a guest ABI implements so that the engine can serve it, and what it is told.
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

/// A guest ABI: its rings, and how guest memory is reached. One type per engine; a device that speaks another ABI is another
/// variant of the same provider.
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

/// One look at a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched<T> {
    /// Nothing new.
    Empty,
    /// A request, copied out of guest memory.
    Request(T),
    /// A request that can't be executed; it takes part in order and completes with an error.
    Malformed {
        /// As it stands in the ring.
        wr_id: u64,
        /// What is wrong.
        reason: Malformed,
    },
    /// The ring itself is unusable: its indices are invalid or its memory is gone. The queue pair fails.
    Broken,
}

/// The send queue of one queue pair. The engine may hold several fetched requests; they retire in order.
pub trait SendQueue<M: Dma>: Sized {
    /// Its saved state: where its ring is, and how far the engine has come in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// The state as it is now; for a queue that nothing is hidden in ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// A queue in a saved state, which may come from anywhere. What is wrong, in a word or two, where no queue can have it.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// Starts at the ring's present consumer index; called when the queue pair leaves RESET.
    fn start(&mut self, memory: &M);
    /// Whether a request waits behind those fetched: one load, no side effect. A broken ring counts as work.
    fn pending(&self, memory: &M) -> bool;
    /// Where the guest's producer index is in its memory, and its value when no request waits: while a load finds that, a look at this
    /// queue would find nothing. `None` when that can't be told by a load.
    fn watch(&self) -> Option<(u64, u32)> {
        None
    }
    /// A turn comes soon: asks the CPU for the lines that [`SendQueue::fetch`] will read. No effect but on time.
    fn prefetch_next(&self, memory: &M) {
        let _ = memory;
    }
    /// Copies the next request and moves the fetch position past it; the guest's head stays.
    fn fetch(&mut self, memory: &M) -> Fetched<SendRequest>;
    /// Gives the `count` oldest fetched requests' slots back to the guest. Before their completions are published.
    fn retire(&mut self, memory: &M, count: u32);
}

/// A receive queue. Slots go back to the guest as soon as they are copied.
pub trait ReceiveQueue<M: Dma>: Sized {
    /// Its saved state: where its ring is, and how far the engine has come in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// The state as it is now; for a queue that nothing is hidden in ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// A queue in a saved state, which may come from anywhere. What is wrong, in a word or two, where no queue can have it.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// As [`SendQueue::start`].
    fn start(&mut self, memory: &M);
    /// How many requests wait. A broken ring has 0.
    fn available(&self, memory: &M) -> u32;
    /// Copies the next request and gives its slot back.
    fn take(&mut self, memory: &M) -> Fetched<ReceiveRequest>;
}

/// A completion queue. The guest polls the index that [`CompletionQueue::publish`] stores, so each store costs both sides a cache
/// line's way: the engine publishes several completions at once where they come in one go.
pub trait CompletionQueue<M: Dma>: Sized {
    /// Its saved state: where its ring is, and how far the engine has come in it.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;
    /// The state as it is now; for a queue that nothing is hidden in ([`crate::engine::Engine::poll`] has returned).
    fn save(&self) -> Self::Saved;
    /// A queue in a saved state, which may come from anywhere. What is wrong, in a word or two, where no queue can have it.
    fn restore(saved: Self::Saved) -> Result<Self, &'static str>;
    /// Its ring in guest memory: addresses and lengths.
    fn memory(&self, each: &mut dyn FnMut(u64, u64));
    /// Appends a completion, which the guest can't see yet. Never touches entries that are published already.
    fn push(&mut self, memory: &M, completion: &Completion) -> Result<(), CompletionQueueFailed>;
    /// Makes all that was pushed visible.
    fn publish(&mut self, memory: &M) -> Result<(), CompletionQueueFailed>;
    /// Where the guest's consumer stands, and whether anything is unconsumed. `None` when the ring is broken.
    fn consumer(&self, memory: &M) -> Option<Consumer>;
}

/// The consumer's side of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Consumer {
    /// Its index; changes whenever the guest consumed something.
    pub position: u32,
    /// Completions that it has not consumed, those not published yet among them.
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

/// Takes what the engine has to tell a guest. Called from within the engine: collect, don't call back.
pub trait Sink {
    /// A completion event is due. `false` when the event ring is full: the engine tries again later.
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool;
    /// An asynchronous event. The sink bounds how many it keeps.
    fn async_event(&mut self, device: DeviceId, event: AsyncEvent);
}
