//! The two event rings. The device writes elements as events occur, and publishes and signals them once per batch.

use std::collections::{BTreeSet, VecDeque};

use dma::Dma;
use hca::names::{CqHandle, DeviceId};
use hca::provider::Sink;
use hca::work::AsyncEvent;

use crate::abi::PAGE;
use crate::abi::rings::{event, state};
use crate::ring::Indices;
use crate::saved;

/// Limit of asynchronous events that wait for room in the ring. An object waits at most once with each type.
pub(super) const MAX_WAITING: usize = 4096;
/// First delay before a guest that consumes no events is interrupted again, nanoseconds. It doubles with each reminder (exponential
/// back-off).
const REMIND_AFTER: u64 = 20_000_000;
/// Limit of that delay, nanoseconds.
const REMIND_AT_MOST: u64 = 2_000_000_000;
/// Limit of reminders in a row. The driver ignores vector 1 until its registration is complete, which takes seconds at worst.
const MAX_REMINDERS: u32 = 16;

/// An event ring. Only its first page of elements is used.
#[derive(Debug)]
pub(super) struct EventRing {
    state: u64,
    elements: u64,
    element_size: u64,
    indices: Indices,
    tail: u32,
    published: u32,
    /// The last loaded consumer index of the guest.
    head: u32,
}

impl EventRing {
    /// `None` if the indices in memory are invalid.
    pub fn new(memory: &impl Dma, state: u64, elements: u64, slots: u32, element_size: u64) -> Option<Self> {
        let indices = Indices::new(slots)?;
        let tail = memory.load_u32(state + state::RX_TAIL).ok()?;
        let head = memory.load_u32(state + state::RX_HEAD).ok()?;
        indices.between(tail, head)?;
        Some(Self { state, elements, element_size, indices, tail, published: tail, head })
    }

    /// Saves its state. Publish before.
    fn save(&self) -> saved::EventRing {
        saved::EventRing { state: self.state, elements: self.elements, tail: self.tail, head: self.head }
    }

    /// Restores a ring; `None` if the state is invalid.
    pub fn restore(saved: saved::EventRing, slots: u32, element_size: u64) -> Option<Self> {
        let indices = Indices::new(slots)?;
        let saved::EventRing { state, elements, tail, head } = saved;
        indices.between(tail, head)?;
        let fits = state.is_multiple_of(PAGE) && elements.is_multiple_of(PAGE);
        let ends = state.checked_add(PAGE).is_some() && elements.checked_add(PAGE).is_some();
        (fits && ends).then_some(Self { state, elements, element_size, indices, tail, published: tail, head })
    }

    /// Appends an element; `false` when the ring is full or broken.
    pub fn push(&mut self, memory: &impl Dma, element: &[u8]) -> bool {
        debug_assert_eq!(element.len() as u64, self.element_size);
        if self.tail == self.head ^ self.indices.slots() {
            let Ok(head) = memory.load_u32(self.state + state::RX_HEAD) else { return false };
            match self.indices.between(self.tail, head) {
                Some(filled) if filled < self.indices.slots() => self.head = head,
                _ => return false,
            }
        }
        let slot = u64::from(self.indices.slot(self.tail));
        if memory.write(self.elements + slot * self.element_size, element).is_err() {
            return false;
        }
        self.tail = self.indices.advance(self.tail, 1);
        true
    }

    /// Publishes the pushed elements. Returns whether there were any.
    pub fn publish(&mut self, memory: &impl Dma) -> bool {
        let new = self.tail != self.published;
        if new && memory.store_u32(self.state + state::RX_TAIL, self.tail).is_ok() {
            self.published = self.tail;
            return true;
        }
        false
    }

    /// Whether the guest has consumed all published elements. A broken ring counts as drained.
    fn drained(&self, memory: &impl Dma) -> bool {
        match memory.load_u32(self.state + state::RX_HEAD) {
            Ok(head) => !matches!(self.indices.between(self.published, head), Some(1..)),
            Err(_) => true,
        }
    }
}

/// Result of a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Due {
    pub asynchronous: bool,
    pub completion: bool,
    /// Time of the next flush, if nothing else happens.
    pub again_at: Option<u64>,
}

/// Reminders of events that were signalled while the guest didn't listen.
#[derive(Debug, Clone, Copy)]
struct Reminder {
    at: u64,
    delay: u64,
    left: u32,
}

/// The event rings of one device, and asynchronous events that wait for room.
#[derive(Debug)]
pub(super) struct Events<M> {
    device: DeviceId,
    pub memory: M,
    /// Bus mastering is enabled.
    pub enabled: bool,
    rings: Option<(EventRing, EventRing)>,
    /// Type and object, in order.
    waiting: VecDeque<(u32, u32)>,
    waits: BTreeSet<(u32, u32)>,
    reminder: Option<Reminder>,
    /// Events of other devices, which the engine passed to this one.
    pub strays: Vec<(DeviceId, AsyncEvent)>,
    pub dropped: u64,
}

impl<M: Dma> Events<M> {
    pub fn new(device: DeviceId, memory: M) -> Self {
        Self {
            device,
            memory,
            enabled: false,
            rings: None,
            waiting: VecDeque::new(),
            waits: BTreeSet::new(),
            reminder: None,
            strays: Vec::new(),
            dropped: 0,
        }
    }

    pub fn attach(&mut self, async_ring: EventRing, completion_ring: EventRing) {
        self.rings = Some((async_ring, completion_ring));
    }

    /// Detaches the rings: nothing is posted any more, and waiting events are dropped.
    pub fn detach(&mut self) {
        self.rings = None;
        self.waiting.clear();
        self.waits.clear();
        self.reminder = None;
    }

    /// Saves both rings: of asynchronous and of completion events.
    pub fn save(&self) -> Option<(saved::EventRing, saved::EventRing)> {
        self.rings.as_ref().map(|(asynchronous, completion)| (asynchronous.save(), completion.save()))
    }

    /// Events that wait for room, in order.
    pub fn save_waiting(&self) -> Vec<(u32, u32)> {
        self.waiting.iter().copied().collect()
    }

    /// Restores rings and waiting events. A guest that has events waiting gets a reminder soon.
    pub fn restore(&mut self, rings: Option<(EventRing, EventRing)>, waiting: &[(u32, u32)], dropped: u64) {
        self.rings = rings;
        self.waiting = waiting.iter().copied().collect();
        self.waits = waiting.iter().copied().collect();
        self.reminder = Some(Reminder { at: 0, delay: REMIND_AFTER, left: MAX_REMINDERS });
        self.dropped = dropped;
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Drops events of destroyed objects, so that a new object with the same handle doesn't get them.
    pub fn forget(&mut self, of: impl Fn(u32, u32) -> bool) {
        if !self.waiting.is_empty() {
            self.waiting.retain(|(kind, object)| !of(*kind, *object));
            self.waits.retain(|(kind, object)| !of(*kind, *object));
        }
    }

    fn post(&mut self, kind: u32, object: u32) -> bool {
        let Some((ring, _)) = self.rings.as_mut().filter(|_| self.enabled) else { return false };
        let mut element = [0; 8];
        element[..4].copy_from_slice(&kind.to_le_bytes());
        element[4..].copy_from_slice(&object.to_le_bytes());
        ring.push(&self.memory, &element)
    }

    fn post_waiting(&mut self) {
        while let Some(&(kind, object)) = self.waiting.front() {
            if !self.post(kind, object) {
                return;
            }
            self.waiting.pop_front();
            self.waits.remove(&(kind, object));
        }
    }

    pub fn flush(&mut self, now: u64) -> Due {
        self.post_waiting();
        let Some((asynchronous, completion)) = self.rings.as_mut().filter(|_| self.enabled) else {
            return Due::default();
        };
        let mut due = Due {
            asynchronous: asynchronous.publish(&self.memory),
            completion: completion.publish(&self.memory),
            again_at: None,
        };
        if due.asynchronous {
            self.reminder =
                Some(Reminder { at: now + REMIND_AFTER, delay: REMIND_AFTER, left: MAX_REMINDERS });
        } else if let Some(reminder) = self.reminder.as_mut().filter(|reminder| reminder.at <= now) {
            if asynchronous.drained(&self.memory) && self.waiting.is_empty() || reminder.left == 0 {
                self.reminder = None;
            } else {
                due.asynchronous = true;
                reminder.left -= 1;
                reminder.delay = (reminder.delay * 2).min(REMIND_AT_MOST);
                reminder.at = now + reminder.delay;
            }
        }
        due.again_at = self.reminder.map(|reminder| reminder.at);
        due
    }
}

impl<M: Dma> Sink for Events<M> {
    #[inline]
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool {
        if device != self.device {
            // The event of another device: the engine keeps it for its next poll.
            return false;
        }
        let Some((_, ring)) = self.rings.as_mut().filter(|_| self.enabled) else { return false };
        ring.push(&self.memory, &cq.0.to_le_bytes())
    }

    fn async_event(&mut self, device: DeviceId, event: AsyncEvent) {
        if device != self.device {
            self.strays.push((device, event));
            return;
        }
        if self.rings.is_none() {
            return;
        }
        let element @ (kind, object) = number(event);
        if self.waiting.is_empty() && self.post(kind, object) {
            return;
        }
        if self.waits.contains(&element) {
            return;
        }
        if self.waiting.len() >= MAX_WAITING {
            self.dropped += 1;
            return;
        }
        self.waits.insert(element);
        self.waiting.push_back(element);
    }
}

/// Type and object of an event.
fn number(event: AsyncEvent) -> (u32, u32) {
    match event {
        AsyncEvent::CqError(cq) => (event::CQ_ERROR, cq.0),
        AsyncEvent::QpFatal(qp) => (event::QP_FATAL, qp.0),
        AsyncEvent::QpRequestError(qp) => (event::QP_REQUEST_ERROR, qp.0),
        AsyncEvent::QpAccessError(qp) => (event::QP_ACCESS_ERROR, qp.0),
        AsyncEvent::CommunicationEstablished(qp) => (event::COMMUNICATION_ESTABLISHED, qp.0),
        AsyncEvent::SqDrained(qp) => (event::SQ_DRAINED, qp.0),
        AsyncEvent::LastWqeReached(qp) => (event::QP_LAST_WQE_REACHED, qp.0),
        AsyncEvent::SrqError(srq) => (event::SRQ_ERROR, srq.0),
        AsyncEvent::SrqLimitReached(srq) => (event::SRQ_LIMIT_REACHED, srq.0),
        AsyncEvent::DeviceFatal => (event::DEVICE_FATAL, 1),
        AsyncEvent::PortActive => (event::PORT_ACTIVE, 1),
        AsyncEvent::PortError => (event::PORT_ERROR, 1),
    }
}

/// Whether events of type `kind` refer to a queue pair.
pub(super) fn about_qp(kind: u32) -> bool {
    matches!(
        kind,
        event::QP_FATAL
            | event::QP_REQUEST_ERROR
            | event::QP_ACCESS_ERROR
            | event::COMMUNICATION_ESTABLISHED
            | event::SQ_DRAINED
            | event::QP_LAST_WQE_REACHED
    )
}
