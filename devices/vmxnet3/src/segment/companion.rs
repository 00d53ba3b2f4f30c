//! A companion shares a device's address and port: it receives some of the device's frames, and sends others with its address. For
//! instance, an RDMA function is the companion of its NIC's Ethernet function.

use std::time::Duration;

use dma::Dma;

use super::delivery::count_delivery;
use super::{HEAD, Link, PortId, Scratch, Segment};
use crate::device::Delivery;
use crate::frame::{ETHERNET_HEADER, FRAME_MAX, Offload, destination, source};

/// A companion of a device. The segment's thread calls it; it must not block.
pub trait Companion: Send {
    /// Whether a frame for the device is the companion's. `head` is the frame's beginning, 256 bytes or all of it, and may be hostile.
    fn wants(&mut self, head: &[u8]) -> bool;

    /// Receives a frame that it wants. Checksums may be partial.
    fn take(&mut self, frame: &[u8]);

    /// Puts the next frame to send into `frame` (empty before). `false` when there is none.
    fn next(&mut self, frame: &mut Vec<u8>) -> bool;
}

impl<M: Dma> Segment<M> {
    /// Sets or removes a device's companion, which is removed with the device's port.
    pub fn set_companion(&mut self, id: PortId, companion: Option<Box<dyn Companion>>) {
        if let Some(Some(port)) = self.ports.get_mut(id.0)
            && matches!(port.link, Link::Device(_))
        {
            port.companion = companion;
            port.ready = true;
        }
    }

    /// Passes a frame for a device to its companion, if that wants it.
    pub(super) fn divert(&mut self, to: usize, frame: &[u8]) -> bool {
        let Some(Some(port)) = self.ports.get_mut(to) else { return false };
        let Some(companion) = &mut port.companion else { return false };
        if !companion.wants(&frame[..frame.len().min(HEAD)]) {
            return false;
        }
        companion.take(frame);
        count_delivery(&port.counters, Delivery::Delivered, frame.len(), destination(frame).is_group());
        true
    }

    /// Sends one frame of a device's companion. Returns its cost, `None` when there was none.
    pub(super) fn send_for_companion(
        &mut self,
        index: usize,
        now: Duration,
        scratch: &mut Scratch,
    ) -> Option<usize> {
        let port = self.ports[index].as_mut()?;
        let rules = port.rules;
        scratch.frame.clear();
        if !port.companion.as_mut()?.next(&mut scratch.frame) {
            return None;
        }
        let len = scratch.frame.len();
        if !(ETHERNET_HEADER..=FRAME_MAX).contains(&len) {
            port.counters.tx_errors.increment();
            return Some(len);
        }
        if !port.device()?.link_is_up() {
            port.counters.tx_dropped.increment();
            return Some(len);
        }
        let (to, from) = (destination(&scratch.frame), source(&scratch.frame));
        if !self.switch.admit(index, from, rules.any_source, now) {
            let counters = &self.ports[index].as_ref()?.counters;
            counters.tx_spoofed.increment();
            counters.tx_dropped.increment();
            return Some(len);
        }
        let route = self.switch.route(index, to, now);
        self.find_targets(index, route, &mut scratch.targets);
        self.dispatch(&mut scratch.frame, Offload::None, &scratch.targets, &mut scratch.segment);
        let counters = &self.ports[index].as_ref()?.counters;
        counters.tx_packets.increment();
        counters.tx_bytes.add(len as u64);
        Some(len)
    }
}
