//! Rings in plain memory.

use std::any::Any;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use dma::Dma;
use hca::provider::{
    CompletionQueue, CompletionQueueFailed, Consumer, Fetched, Provider, ReceiveQueue, SendQueue,
};
use hca::work::{Completion, Malformed, ReceiveRequest, SendRequest};

/// The provider of these rings, over any memory.
#[derive(Debug)]
pub struct Rings<M>(PhantomData<M>);

impl<M: Dma + Clone + 'static> Provider for Rings<M> {
    type Memory = M;
    type SendQueue = SendRing;
    type ReceiveQueue = ReceiveRing;
    type CompletionQueue = CompletionRing;
}

/// Rings by number, which a saved state contains in place of guest addresses. The number of a dropped ring isn't reused.
static RINGS: Mutex<Vec<Weak<dyn Any + Send + Sync>>> = Mutex::new(Vec::new());

/// The saved state of such a ring: its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedRing(u32);

fn save<T: Send + 'static>(ring: &Arc<Mutex<T>>) -> SavedRing {
    let erased: Arc<dyn Any + Send + Sync> = ring.clone();
    let mut rings = lock(&RINGS);
    let known = rings.iter().position(|other| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(&erased)));
    let number = known.unwrap_or_else(|| {
        rings.push(Arc::downgrade(&erased));
        rings.len() - 1
    });
    SavedRing(u32::try_from(number).unwrap_or(u32::MAX))
}

fn restore<T: Send + 'static>(saved: SavedRing) -> Result<Arc<Mutex<T>>, &'static str> {
    let ring = lock(&RINGS).get(saved.0 as usize).and_then(Weak::upgrade).ok_or("ring")?;
    ring.downcast().map_err(|_| "kind of ring")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Sends {
    posted: VecDeque<Fetched<SendRequest>>,
    in_flight: u32,
    retired: u32,
}

/// A send ring; clones share it.
#[derive(Debug, Clone, Default)]
pub struct SendRing(Arc<Mutex<Sends>>);

impl SendRing {
    /// Posts a request.
    pub fn post(&self, request: SendRequest) {
        lock(&self.0).posted.push_back(Fetched::Request(request));
    }

    /// Posts a malformed request.
    pub fn post_malformed(&self, wr_id: u64, reason: Malformed) {
        lock(&self.0).posted.push_back(Fetched::Malformed { wr_id, reason });
    }

    /// Makes the ring broken.
    pub fn break_ring(&self) {
        lock(&self.0).posted.push_back(Fetched::Broken);
    }

    /// Empties the ring, as a guest does after a transition to RESET.
    pub fn clear(&self) {
        *lock(&self.0) = Sends::default();
    }

    /// Number of requests posted and not fetched.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.0).posted.len()
    }

    /// Number of requests fetched and not retired.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        lock(&self.0).in_flight
    }

    /// Number of released slots.
    #[must_use]
    pub fn retired(&self) -> u32 {
        lock(&self.0).retired
    }
}

impl<M: Dma> SendQueue<M> for SendRing {
    type Saved = SavedRing;

    fn save(&self) -> SavedRing {
        save(&self.0)
    }

    /// These rings aren't guest memory.
    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore(saved: SavedRing) -> Result<Self, &'static str> {
        restore(saved).map(SendRing)
    }

    fn start(&mut self, _memory: &M) {
        self.clear();
    }

    fn pending(&self, _memory: &M) -> bool {
        !lock(&self.0).posted.is_empty()
    }

    fn fetch(&mut self, _memory: &M) -> Fetched<SendRequest> {
        let mut ring = lock(&self.0);
        let fetched = match ring.posted.pop_front() {
            None => return Fetched::Empty,
            Some(Fetched::Broken) => {
                // A broken ring stays broken.
                ring.posted.push_front(Fetched::Broken);
                return Fetched::Broken;
            }
            Some(fetched) => fetched,
        };
        ring.in_flight += 1;
        fetched
    }

    fn retire(&mut self, _memory: &M, count: u32) {
        let mut ring = lock(&self.0);
        assert!(count <= ring.in_flight, "only fetched requests retire");
        ring.in_flight -= count;
        ring.retired += count;
    }
}

/// A receive ring; clones share it.
#[derive(Debug, Clone, Default)]
pub struct ReceiveRing(Arc<Mutex<VecDeque<Fetched<ReceiveRequest>>>>);

impl ReceiveRing {
    /// Posts a request.
    pub fn post(&self, request: ReceiveRequest) {
        lock(&self.0).push_back(Fetched::Request(request));
    }

    /// Posts a malformed request.
    pub fn post_malformed(&self, wr_id: u64, reason: Malformed) {
        lock(&self.0).push_back(Fetched::Malformed { wr_id, reason });
    }

    /// Empties the ring, as a guest does after a transition to RESET.
    pub fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Number of requests that were not consumed.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.0).len()
    }
}

impl<M: Dma> ReceiveQueue<M> for ReceiveRing {
    type Saved = SavedRing;

    fn save(&self) -> SavedRing {
        save(&self.0)
    }

    /// These rings aren't guest memory.
    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore(saved: SavedRing) -> Result<Self, &'static str> {
        restore(saved).map(ReceiveRing)
    }

    fn start(&mut self, _memory: &M) {}

    fn available(&self, _memory: &M) -> u32 {
        u32::try_from(self.waiting()).unwrap_or(u32::MAX)
    }

    fn take(&mut self, _memory: &M) -> Fetched<ReceiveRequest> {
        lock(&self.0).pop_front().unwrap_or(Fetched::Empty)
    }
}

#[derive(Debug)]
struct Completions {
    /// Published and unconsumed completions, then unpublished ones.
    entries: VecDeque<Completion>,
    published: usize,
    capacity: usize,
    consumed: u32,
    broken: bool,
}

/// A completion ring; clones share it.
#[derive(Debug, Clone)]
pub struct CompletionRing(Arc<Mutex<Completions>>);

impl CompletionRing {
    /// A ring of `capacity` entries.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let entries = VecDeque::with_capacity(capacity);
        Self(Arc::new(Mutex::new(Completions {
            entries,
            published: 0,
            capacity,
            consumed: 0,
            broken: false,
        })))
    }

    /// Consumes the oldest completion.
    #[must_use]
    pub fn poll(&self) -> Option<Completion> {
        let mut ring = lock(&self.0);
        ring.published = ring.published.checked_sub(1)?;
        let entry = ring.entries.pop_front()?;
        ring.consumed = ring.consumed.wrapping_add(1);
        Some(entry)
    }

    /// Consumes all completions.
    #[must_use]
    pub fn drain(&self) -> Vec<Completion> {
        std::iter::from_fn(|| self.poll()).collect()
    }

    /// Number of completions published and not consumed.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.0).published
    }

    /// Number of completions pushed and not published.
    #[must_use]
    pub fn hidden(&self) -> usize {
        let ring = lock(&self.0);
        ring.entries.len() - ring.published
    }

    /// Makes the ring broken.
    pub fn break_ring(&self) {
        lock(&self.0).broken = true;
    }
}

impl<M: Dma> CompletionQueue<M> for CompletionRing {
    type Saved = SavedRing;

    fn save(&self) -> SavedRing {
        save(&self.0)
    }

    /// These rings aren't guest memory.
    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore(saved: SavedRing) -> Result<Self, &'static str> {
        restore(saved).map(CompletionRing)
    }

    fn push(&mut self, _memory: &M, completion: &Completion) -> Result<(), CompletionQueueFailed> {
        let mut ring = lock(&self.0);
        if ring.broken {
            return Err(CompletionQueueFailed::Broken);
        }
        if ring.entries.len() >= ring.capacity {
            return Err(CompletionQueueFailed::Overrun);
        }
        ring.entries.push_back(*completion);
        Ok(())
    }

    fn publish(&mut self, _memory: &M) -> Result<(), CompletionQueueFailed> {
        let mut ring = lock(&self.0);
        if ring.broken {
            return Err(CompletionQueueFailed::Broken);
        }
        ring.published = ring.entries.len();
        Ok(())
    }

    fn consumer(&self, _memory: &M) -> Option<Consumer> {
        let ring = lock(&self.0);
        let unconsumed = u32::try_from(ring.entries.len()).unwrap_or(u32::MAX);
        (!ring.broken).then_some(Consumer { position: ring.consumed, unconsumed })
    }
}
