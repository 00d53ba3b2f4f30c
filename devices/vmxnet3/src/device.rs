//! The device: registers, activation, state of the queues.
//!
//! ```text
//! new / restore -> registers by the driver -> ACTIVATE -> (frames) -> QUIESCE -> ACTIVATE ...
//!                                                └ RESET, function reset, or a stopped queue ┘
//! ```
//!
//! # Which register writes may be lost
//!
//! Writes to TXPROD, RXPROD and RXPROD2 (BAR 0, [`crate::pci::doorbell_offsets`]) are doorbells without contents: the device finds packets
//! and free buffers by the generation bits in the rings. So a PCI shell may make them ioeventfds, which lose values and repetitions. It
//! must call [`Vmxnet3::kick`] some time after each, and have the segment served. All other writes must arrive, in order: IMR (an unmask
//! may release a pending interrupt) and all of BAR 1.
//!
//! # Threads
//!
//! A device belongs to one thread at a time. In the product [`crate::runner`] owns the devices.

use std::collections::HashSet;
use std::sync::Arc;

use dma::Dma;
use telemetry::guest_log::GuestLog;
use telemetry::guest_warn;

use crate::counters::PortCounters;
use crate::descriptors::RxChecksum;
use crate::filter::RxFilter;
use crate::frame::{FrameBytes, MacKind, Piece, Transport, gather, vlan_tag};
use crate::interrupts::{Interrupts, Vectors};
use crate::mac::MacAddress;
use crate::receive::{RxFailure, RxQueue};
use crate::registers::{QueueError, event, feature};
use crate::shared_area::{ActivationError, DriverShared, offset, read_multicast, read_vlans};
use crate::transmit::{TxPacket, TxQueue};

mod commands;
mod registers_access;

/// Configuration of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vmxnet3Config {
    /// Name for logs, for instance `vm1-nic0`.
    pub name: String,
    /// Built-in station address; unicast.
    pub mac: MacAddress,
    /// Link speed reported to the guest, Mbit/s.
    pub link_mbps: u16,
}

/// State that lasts from activation to QUIESCE or reset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Active {
    /// Guest address of the driver-shared area.
    pub shared: u64,
    pub features: u64,
    pub mtu: u32,
    pub filter: RxFilter,
    pub tx: Vec<TxQueue>,
    pub rx: Vec<RxQueue>,
    pub event_vector: u8,
    /// The event word, which the driver only reads.
    pub events: u32,
    /// TX queue that is served first.
    pub turn: usize,
}

/// Outcome of a packet to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TxOutcome {
    /// Sent, with this length in bytes.
    Sent { kind: MacKind, bytes: usize },
    /// Dropped, for a reason outside of the packet.
    Discarded,
    /// Dropped, for a reason in the packet: its descriptors or headers are malformed.
    Bad,
}

/// Outcome of a frame to deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The guest has it.
    Delivered,
    /// The guest's filter dropped it.
    Filtered,
    /// The guest has posted no buffers.
    NoBuffers,
    /// It is longer than the guest's buffers.
    TooLong,
    /// The device isn't active, or its queue is stopped.
    Inactive,
    /// The sender's memory is invalid.
    SourceFault,
    /// The guest's buffers are not-present memory.
    Late,
}

/// A vmxnet3 function without its PCI shell. `M` is the guest's memory.
pub struct Vmxnet3<M> {
    pub(crate) config: Vmxnet3Config,
    pub(crate) log: GuestLog,
    pub(crate) counters: Arc<PortCounters>,
    pub(crate) interrupts: Box<dyn Interrupts>,
    pub(crate) memory: Option<M>,
    pub(crate) bus_master: bool,
    pub(crate) link_up: bool,
    /// Station address that the driver set.
    pub(crate) station: MacAddress,
    /// Guest address of the driver-shared area (registers DSAL and DSAH).
    pub(crate) shared_area: u64,
    /// Result of the last command.
    pub(crate) result: u32,
    /// Revision that the driver selected by VRRS.
    pub(crate) revision: u32,
    pub(crate) vectors: Vectors,
    pub(crate) active: Option<Active>,
    pub(crate) kicked: bool,
}

impl<M> std::fmt::Debug for Vmxnet3<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vmxnet3")
            .field("config", &self.config)
            .field("station", &self.station)
            .field("vectors", &self.vectors)
            .field("active", &self.active)
            .finish_non_exhaustive()
    }
}

impl<M: Dma> Vmxnet3<M> {
    /// A device in its power-on state: link up, no memory.
    #[must_use]
    pub fn new(config: Vmxnet3Config, interrupts: Box<dyn Interrupts>) -> Self {
        Self {
            station: config.mac,
            config,
            log: GuestLog::new(),
            counters: Arc::default(),
            interrupts,
            memory: None,
            bus_master: true,
            link_up: true,
            shared_area: 0,
            result: 0,
            revision: 0,
            vectors: Vectors::new(),
            active: None,
            kicked: false,
        }
    }

    /// Configuration of the device.
    #[must_use]
    pub fn config(&self) -> &Vmxnet3Config {
        &self.config
    }

    /// Sets or replaces the guest's memory, or removes it. Without memory the device is suspended and keeps its state.
    pub fn set_memory(&mut self, memory: Option<M>) {
        self.memory = memory;
        self.kicked = true;
    }

    /// Sets the bus master bit of the PCI command register. Without it the device is suspended: no access to memory, no interrupts. It is
    /// set after [`Vmxnet3::new`]. A PCI shell that has the register passes it on, beginning with "off".
    pub fn set_bus_master(&mut self, on: bool) {
        self.bus_master = on;
        self.kicked = true;
    }

    /// Function or machine reset: the state after [`Vmxnet3::new`], except for memory, bus master bit, link and counters.
    pub fn reset(&mut self) {
        self.active = None;
        self.station = self.config.mac;
        self.shared_area = 0;
        self.result = 0;
        self.revision = 0;
        self.vectors = Vectors::new();
        self.kicked = false;
    }

    /// Records a doorbell: there may be work in the rings. Cheap; serving the segment does the work.
    pub fn kick(&mut self) {
        self.kicked = true;
        self.counters.kicks.increment();
    }

    /// Whether [`Vmxnet3::kick`] was called, or something similar happened, since the last call.
    pub(crate) fn take_kick(&mut self) -> bool {
        std::mem::take(&mut self.kicked)
    }

    /// Traffic counters. They live as long as the device, and any thread may read them.
    #[must_use]
    pub fn counters(&self) -> Arc<PortCounters> {
        Arc::clone(&self.counters)
    }

    /// Whether a driver has activated the device.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// Sets the link state. The guest gets an event when it changed.
    pub fn set_link(&mut self, up: bool) {
        if std::mem::replace(&mut self.link_up, up) != up {
            self.raise_event(event::LINK);
            self.fire();
        }
    }

    /// Whether the link is up.
    #[must_use]
    pub fn link_is_up(&self) -> bool {
        self.link_up
    }

    /// The guest's memory, while the device may access it.
    pub(crate) fn dma(&self) -> Option<&M> {
        self.memory.as_ref().filter(|_| self.bus_master)
    }

    /// Sets event bits in the shared area, and requests the event interrupt.
    fn raise_event(&mut self, bits: u32) {
        let memory = self.memory.as_ref().filter(|_| self.bus_master);
        let (Some(active), Some(memory)) = (self.active.as_mut(), memory) else { return };
        active.events |= bits;
        // A driver that removed its own area gets no more events.
        let _ = memory.store_u32(active.shared.wrapping_add(offset::EVENTS), active.events);
        self.vectors.request(active.event_vector);
    }

    /// Raises the interrupts that are due, unless the driver has disabled all.
    pub(crate) fn fire(&mut self) {
        if !self.vectors.any_due() {
            return;
        }
        let (Some(active), Some(memory)) = (self.active.as_ref(), self.dma()) else { return };
        let control = memory.load_u32(active.shared.wrapping_add(offset::INTERRUPT_CONTROL));
        if control.is_ok_and(|control| control & 1 == 0) {
            let mut due = self.vectors.take_due();
            while due != 0 {
                let vector = due.trailing_zeros();
                due &= due - 1;
                self.counters.interrupts.increment();
                self.interrupts.raise(u16::try_from(vector).unwrap_or(u16::MAX));
            }
        }
    }

    /// Stops a queue until the driver resets the device, and sends the driver an event.
    fn stop_queue(&mut self, rx: bool, index: usize, error: QueueError) {
        let Some(active) = self.active.as_mut() else { return };
        let (entry, stopped) = if rx {
            let Some(queue) = active.rx.get_mut(index) else { return };
            (queue.layout.entry, &mut queue.stopped)
        } else {
            let Some(queue) = active.tx.get_mut(index) else { return };
            (queue.layout.entry, &mut queue.stopped)
        };
        if stopped.is_some() {
            return;
        }
        *stopped = Some(error.code());
        let direction = if rx { "RX" } else { "TX" };
        guest_warn!(
            self.log,
            "{}: {direction} queue {index} stopped: {error}; it resumes when the guest's driver resets the device",
            self.config.name
        );
        if let Some(memory) = self.dma() {
            commands::write_status(memory, entry, Some(error.code()));
        }
        self.raise_event(if rx { event::RQ_ERROR } else { event::TQ_ERROR });
        self.fire();
    }

    /// Whether a packet to send waits in any queue.
    pub(crate) fn has_packets(&self) -> bool {
        match (&self.active, self.dma()) {
            (Some(active), Some(memory)) => active.tx.iter().any(|queue| queue.has_work(memory)),
            _ => false,
        }
    }

    /// The next packet to send, round robin over the queues; puts its pieces into `pieces`. It stays in its queue until
    /// [`Vmxnet3::complete`].
    pub(crate) fn fetch(&mut self, pieces: &mut Vec<Piece>) -> Option<TxPacket> {
        let queues = self.active.as_ref()?.tx.len();
        for _ in 0..queues {
            let memory = self.memory.as_ref().filter(|_| self.bus_master)?;
            let active = self.active.as_mut()?;
            let index = active.turn % queues;
            active.turn = (index + 1) % queues;
            let queue = active.tx.get(index).filter(|queue| queue.stopped.is_none());
            match queue.map(|queue| queue.fetch(index, memory, pieces)) {
                Some(Ok(Some(packet))) => return Some(packet),
                Some(Err(error)) => self.stop_queue(false, index, error),
                Some(Ok(None)) | None => {}
            }
        }
        None
    }

    /// Copies bytes of a packet out of guest memory. After a fault it stops the queue and returns `false`.
    pub(crate) fn read(&mut self, packet: &TxPacket, pieces: &[Piece], skip: usize, into: &mut [u8]) -> bool {
        let result = self.dma().map(|memory| gather(memory, pieces, skip, into));
        match result {
            Some(Ok(())) => true,
            Some(Err(fault)) => {
                self.stop_queue(false, packet.queue, fault.into());
                false
            }
            None => false,
        }
    }

    /// Whether part of a packet is not-present memory; requests it.
    pub(crate) fn is_late(&self, pieces: &[Piece]) -> bool {
        let Some(memory) = self.dma().filter(|memory| memory.is_late()) else { return false };
        // Evaluated for all pieces, so that all their pages are requested.
        pieces.iter().filter(|piece| memory.awaits(piece.address, piece.len as u64, false)).count() > 0
    }

    /// Stops the queue of a packet whose memory is invalid.
    pub(crate) fn packet_fault(&mut self, packet: &TxPacket) {
        self.stop_queue(false, packet.queue, QueueError::Invalid);
    }

    /// Completes a packet. The next [`Vmxnet3::fire`] raises the interrupt.
    pub(crate) fn complete(&mut self, packet: &TxPacket, outcome: TxOutcome) {
        let memory = self.memory.as_ref().filter(|_| self.bus_master);
        let (Some(active), Some(memory)) = (self.active.as_mut(), memory) else { return };
        let Some(queue) = active.tx.get_mut(packet.queue) else { return };
        match outcome {
            TxOutcome::Sent { kind, bytes } => {
                queue.stats.sent(kind, bytes);
                if matches!(packet.offload, crate::frame::Offload::Tso { .. }) {
                    queue.stats.tso.add(1, bytes);
                }
            }
            TxOutcome::Discarded => queue.stats.discards = queue.stats.discards.wrapping_add(1),
            TxOutcome::Bad => queue.stats.errors = queue.stats.errors.wrapping_add(1),
        }
        let vector = queue.layout.vector;
        match queue.complete(memory, packet) {
            Ok(()) => self.vectors.request(vector),
            Err(error) => self.stop_queue(false, packet.queue, error),
        }
    }

    /// Whether the guest accepts frames without a checksum that are reported as good.
    pub(crate) fn checks_offloaded(&self) -> bool {
        self.active.as_ref().is_some_and(|active| active.features & feature::RXCSUM != 0)
    }

    /// Whether the filters accept a frame.
    pub(crate) fn wants(&self, frame: &[u8]) -> bool {
        self.active.as_ref().is_some_and(|active| active.filter.accepts(frame, self.station))
    }

    /// Whether frames can be delivered once buffers are posted.
    pub(crate) fn is_receiving(&self) -> bool {
        let queue = self.active.as_ref().and_then(|active| active.rx.first());
        self.link_up && self.dma().is_some() && queue.is_some_and(|queue| queue.stopped.is_none())
    }

    /// Whether a buffer is posted.
    pub(crate) fn has_buffer(&self) -> bool {
        match (&self.active, self.dma()) {
            (Some(active), Some(memory)) => active.rx.first().is_some_and(|queue| queue.has_buffer(memory)),
            _ => false,
        }
    }

    /// Enables or disables the driver's doorbells for posted buffers.
    pub(crate) fn want_rx_doorbell(&mut self, wanted: bool) {
        if let (Some(active), Some(memory)) = (&self.active, self.dma())
            && let Some(queue) = active.rx.first()
        {
            let address = queue.layout.entry.wrapping_add(offset::UPDATE_RX_PROD);
            // If the write fails, the driver omits doorbells at worst, and the retry timer finds the buffers.
            let _ = memory.write(address, &[u8::from(wanted)]);
        }
    }

    /// Puts a frame into the guest's buffers, always in RX queue 0. `good`: its checksums are verified. The next [`Vmxnet3::fire`] raises
    /// the interrupt.
    pub(crate) fn deliver(&mut self, frame: FrameBytes<'_, M>, good: bool) -> Delivery {
        let memory = self.memory.as_ref().filter(|_| self.bus_master);
        let (Some(active), Some(memory), true) = (self.active.as_mut(), memory, self.link_up) else {
            return Delivery::Inactive;
        };
        let head = frame.head();
        if !active.filter.accepts(head, self.station) {
            return Delivery::Filtered;
        }
        let queues = u32::try_from(active.rx.len()).unwrap_or(0);
        let Some(queue) = active.rx.first_mut().filter(|queue| queue.stopped.is_none()) else {
            return Delivery::Inactive;
        };
        let len = frame.len();
        let tag = vlan_tag(head);
        let overhead = 14 + if tag.is_some() { 4 } else { 0 };
        if len > usize::try_from(active.mtu).unwrap_or(0) + overhead {
            queue.stats.errors = queue.stats.errors.wrapping_add(1);
            return Delivery::TooLong;
        }
        let checksum = match Transport::parse(head) {
            Some(transport) if good && crate::checksum::ipv4_is_good(head, &transport) => {
                RxChecksum::Good { v6: transport.v6, udp: transport.udp }
            }
            _ => RxChecksum::Unknown,
        };
        let strip = tag.filter(|_| active.features & feature::RXVLAN != 0);
        let frame = if strip.is_some() { frame.without_tag() } else { frame };
        match queue.deliver(memory, (0, queues), &frame, strip, checksum) {
            Ok(()) => {
                self.vectors.request(queue.layout.vector);
                Delivery::Delivered
            }
            Err(RxFailure::NoBuffers) => {
                queue.stats.out_of_buffers = queue.stats.out_of_buffers.wrapping_add(1);
                Delivery::NoBuffers
            }
            Err(RxFailure::TooLong) => {
                queue.stats.errors = queue.stats.errors.wrapping_add(1);
                Delivery::TooLong
            }
            Err(RxFailure::Source(_)) => Delivery::SourceFault,
            Err(RxFailure::Late) => {
                queue.stats.out_of_buffers = queue.stats.out_of_buffers.wrapping_add(1);
                Delivery::Late
            }
            Err(RxFailure::Queue(error)) => {
                self.stop_queue(true, 0, error);
                Delivery::Inactive
            }
        }
    }

    /// Reads the driver's shared area and queues, and activates the device.
    fn activate(&mut self) -> Result<(), ActivationError> {
        let memory = self.dma().ok_or(ActivationError::NoMemory)?;
        let shared = DriverShared::read(memory, self.shared_area)?;
        let (tx, rx) = shared.read_queues(memory)?;
        let fault = |source| ActivationError::Memory { what: "filter table", source };
        let filter = RxFilter {
            mode: shared.rx_mode,
            groups: read_multicast(memory, self.shared_area)
                .map_err(fault)?
                .into_iter()
                .collect::<HashSet<_>>(),
            vlans: read_vlans(memory, self.shared_area).map_err(fault)?,
        };
        for layout in &tx {
            // A doorbell for every batch.
            let threshold = layout.entry.wrapping_add(offset::TX_THRESHOLD);
            memory.store_u32(threshold, 1).map_err(fault)?;
            commands::write_status(memory, layout.entry, None);
        }
        for layout in &rx {
            memory.write(layout.entry.wrapping_add(offset::UPDATE_RX_PROD), &[0]).map_err(fault)?;
            commands::write_status(memory, layout.entry, None);
        }
        self.vectors = Vectors { auto_mask: shared.auto_mask, ..Vectors::new() };
        self.active = Some(Active {
            shared: self.shared_area,
            features: shared.features,
            mtu: shared.mtu,
            filter,
            tx: tx.into_iter().map(TxQueue::new).collect(),
            rx: rx.into_iter().map(RxQueue::new).collect(),
            event_vector: shared.event_vector,
            events: 0,
            turn: 0,
        });
        self.kicked = true;
        Ok(())
    }

    /// Executes a write to the command register.
    fn command(&mut self, code: u32) {
        self.result = self.execute(code);
    }

    fn restart(&mut self) -> u32 {
        self.active = None;
        match self.activate() {
            Ok(()) => 0,
            Err(error) => {
                guest_warn!(self.log, "{}: the driver can't start the device: {error}", self.config.name);
                1
            }
        }
    }

    /// Revision that the driver selected: 7, 1, or 0 before the selection.
    #[must_use]
    pub fn driver_revision(&self) -> u32 {
        self.revision.checked_ilog2().map_or(0, |bit| bit + 1)
    }
}

#[cfg(test)]
mod tests;
