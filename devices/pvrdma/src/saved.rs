//! The saved state that this device adds to the engine's: rings, and the function itself. A migration combines it with [`hca::saved`]; the
//! same version rule applies.

use hca::attributes::QpKind;
use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::decode::SendRules;
use crate::phase::Phase;
use crate::ring::{RingError, RingMemory};

/// A ring: its page numbers, each as the difference from the previous one, which is small.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Guest address of the indices.
    pub state: u64,
    /// Differences of page numbers, from 0 on.
    pub pages: Vec<i64>,
    /// Number of slots.
    pub slots: u32,
    /// Log2 of the slot size in bytes.
    pub slot_shift: u8,
}

impl Ring {
    pub(crate) fn new(state: u64, pages: &[u64], slots: u32, slot_shift: u32) -> Self {
        let mut before = 0;
        let distances = pages.iter().map(|page| {
            let number = i64::try_from(page >> 12).unwrap_or(0);
            number - std::mem::replace(&mut before, number)
        });
        Self { state, pages: distances.collect(), slots, slot_shift: u8::try_from(slot_shift).unwrap_or(0) }
    }

    pub(crate) fn restore(&self) -> Result<RingMemory, &'static str> {
        let mut number = 0i64;
        let pages: Option<Vec<u64>> = self
            .pages
            .iter()
            .map(|distance| {
                number = number.checked_add(*distance).filter(|number| (0..1 << 52).contains(number))?;
                u64::try_from(number).ok().map(|number| number << 12)
            })
            .collect();
        let size = 1u64.checked_shl(u32::from(self.slot_shift)).ok_or("size of a ring's slots")?;
        if self.state.checked_add(4096).is_none() {
            return Err("address of a ring");
        }
        let ring = RingMemory::new(self.state, &pages.ok_or("page of a ring")?, self.slots, size);
        ring.map_err(|error| match error {
            RingError::Slots(_) => "number of a ring's slots",
            RingError::SlotSize(_) => "size of a ring's slots",
            _ => "number of a ring's pages",
        })
    }
}

/// A send queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendQueue {
    /// Its ring.
    pub ring: Ring,
    /// Type of its queue pair.
    pub kind: QpKind,
    /// Whether the guest's kernel posts to it.
    pub kernel: bool,
    /// Limit of elements per request.
    pub max_sge: u32,
    /// The last loaded producer index.
    pub tail: u32,
    /// Index of the next request to fetch.
    pub next: u32,
    /// Index of the oldest slot that is not released to the guest.
    pub head: u32,
}

impl SendQueue {
    pub(crate) fn rules(&self) -> SendRules {
        SendRules { kind: self.kind, kernel: self.kernel, max_sge: self.max_sge }
    }
}

/// A receive queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveQueue {
    /// Its ring.
    pub ring: Ring,
    /// Limit of elements per request.
    pub max_sge: u32,
    /// The last loaded producer index.
    pub tail: u32,
    /// Index of the next request to consume.
    pub head: u32,
}

/// A completion queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionQueue {
    /// Its ring.
    pub ring: Ring,
    /// Whether the guest's kernel owns it.
    pub kernel: bool,
    /// The device's producer index.
    pub tail: u32,
    /// The last loaded consumer index.
    pub head: u32,
}

/// The function's own state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRecord {
    /// Protection domain.
    pub pd: u32,
    /// Handle of the user context that owns it.
    pub context: u32,
    /// Transport service.
    pub kind: QpKind,
    /// Number of slots of the send queue.
    pub max_send_wr: u32,
    /// Number of slots of the receive queue.
    pub max_receive_wr: u32,
    /// Limit of elements per send request.
    pub max_send_sge: u32,
    /// Limit of elements per receive request.
    pub max_receive_sge: u32,
}

/// One event ring: the location of its indices and of its page of elements. Its contents are in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRing {
    /// Guest address of the indices.
    pub state: u64,
    /// Guest address of the elements.
    pub elements: u64,
    /// The device's producer index.
    pub tail: u32,
    /// The last loaded consumer index of the guest.
    pub head: u32,
}

/// The shared region, as it was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRegion {
    /// Version of the driver.
    pub driver_version: u32,
    /// Guest address of the command slot.
    pub command_slot: u64,
    /// Guest address of the response slot.
    pub response_slot: u64,
    /// Guest page frame of UAR page 0.
    pub uar_pfn: u64,
}

/// The function: registers, shared region, event rings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The driver's progress.
    pub phase: Phase,
    /// Whether bus mastering is enabled.
    pub bus_master: bool,
    /// MTU of the Ethernet function, bytes.
    pub mtu: u32,
    /// Link state of the Ethernet function. Always true: no function's link goes down.
    pub link_up: bool,
    /// Register DSR_LOW.
    pub region_low: u32,
    /// Guest address of the shared region.
    pub region_address: Option<u64>,
    /// The accepted shared region.
    pub region: Option<SharedRegion>,
    /// Register ERR.
    pub error: u32,
    /// Register ICR.
    pub cause: u32,
    /// Register IMR.
    pub masked: bool,
    /// Vectors 1 and 2 that were raised while masked.
    pub suppressed: [bool; 2],
    /// Rings of asynchronous and of completion events.
    pub rings: Option<(EventRing, EventRing)>,
    /// Asynchronous events that wait for room: type and object.
    pub waiting: Vec<(u32, u32)>,
    /// Number of asynchronous events dropped.
    pub dropped: u64,
    /// UAR pages in use, by index, with their contexts.
    pub pages: Vec<(u32, u32)>,
    /// Whether doorbells were trapped.
    pub trapped: bool,
    /// Commands, doorbells and interrupts since the device was created.
    pub counters: Counters,
}
