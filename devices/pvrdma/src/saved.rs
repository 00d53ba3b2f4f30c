//! The saved state of what this device adds to the engine's: rings, and the function itself. Composed with [`hca::saved`] by whoever moves a
//! VM; the same version rule holds.

use hca::attributes::QpKind;
use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::decode::SendRules;
use crate::phase::Phase;
use crate::ring::{RingError, RingMemory};

/// A ring: its pages as numbers, each as the distance from the one before, which is small.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Guest address of the indices.
    pub state: u64,
    /// Distances between page numbers, from 0.
    pub pages: Vec<i64>,
    /// Slots.
    pub slots: u32,
    /// Bytes of a slot, as a power of two.
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
    /// What its queue pair is.
    pub kind: QpKind,
    /// Posted by the guest's kernel.
    pub kernel: bool,
    /// Elements of a request.
    pub max_sge: u32,
    /// Producer index as last seen.
    pub tail: u32,
    /// Next to fetch.
    pub next: u32,
    /// Oldest slot that the guest has not got back.
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
    /// Elements of a request.
    pub max_sge: u32,
    /// Producer index as last seen.
    pub tail: u32,
    /// Next to take.
    pub head: u32,
}

/// A completion queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionQueue {
    /// Its ring.
    pub ring: Ring,
    /// The guest's kernel owns it.
    pub kernel: bool,
    /// Own producer index.
    pub tail: u32,
    /// Consumer index as last seen.
    pub head: u32,
}

/// What the function remembers of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRecord {
    /// Protection domain.
    pub pd: u32,
    /// Context.
    pub context: u32,
    /// Kind.
    pub kind: QpKind,
    /// Slots of the send queue.
    pub max_send_wr: u32,
    /// Slots of the receive queue.
    pub max_receive_wr: u32,
    /// Elements of a send request.
    pub max_send_sge: u32,
    /// Elements of a receive request.
    pub max_receive_sge: u32,
}

/// One event ring: what counts is where its indices and its page of elements are; how far it is filled is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRing {
    /// Guest address of the indices.
    pub state: u64,
    /// Guest address of the elements.
    pub elements: u64,
    /// Own producer index.
    pub tail: u32,
    /// The guest's index as last seen.
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
    /// How far the driver has come.
    pub phase: Phase,
    /// Bus mastering.
    pub bus_master: bool,
    /// MTU of the Ethernet function.
    pub mtu: u32,
    /// Its link, which is always up: no function has a link that goes down.
    pub link_up: bool,
    /// DSR_LOW.
    pub region_low: u32,
    /// Address of the shared region.
    pub region_address: Option<u64>,
    /// What it said.
    pub region: Option<SharedRegion>,
    /// ERR.
    pub error: u32,
    /// ICR.
    pub cause: u32,
    /// IMR.
    pub masked: bool,
    /// Vectors 1 and 2 that were due while masked.
    pub suppressed: [bool; 2],
    /// Rings of asynchronous and of completion events.
    pub rings: Option<(EventRing, EventRing)>,
    /// Asynchronous events that wait for room: type and object.
    pub waiting: Vec<(u32, u32)>,
    /// Asynchronous events lost.
    pub dropped: u64,
    /// UAR pages in use, by index, and their contexts.
    pub pages: Vec<(u32, u32)>,
    /// Doorbells were trapped.
    pub trapped: bool,
    /// Counters.
    pub counters: Counters,
}
