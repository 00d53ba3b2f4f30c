//! Delivery: a finished frame goes to a port, or to the waiting queue of a device without buffers.

use std::io;

use dma::Dma;

use super::{Link, Segment, Waiting};
use crate::counters::PortCounters;
use crate::device::Delivery;
use crate::frame::{FrameBytes, Offload, destination};

impl<M: Dma> Segment<M> {
    /// Passes a frame to a port that accepts it as it is. For a device, any offload but "not verified" means that the checksums count as
    /// good.
    pub(super) fn give(&mut self, to: usize, frame: &[u8], offload: Offload) {
        if self.divert(to, frame) {
            return;
        }
        let Some(Some(port)) = self.ports.get_mut(to) else { return };
        let group = destination(frame).is_group();
        let good = offload != Offload::None;
        match &mut port.link {
            Link::Frames(frames) => match frames.send(frame, offload) {
                Ok(()) => count_delivery(&port.counters, Delivery::Delivered, frame.len(), group),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    port.counters.rx_dropped.increment();
                }
                Err(error) => {
                    port.counters.rx_errors.increment();
                    tracing::debug!(port = port.name, "A frame could not be sent: {error}");
                }
            },
            Link::Device(device) => {
                if port.waiting.is_empty() {
                    let delivery = device.deliver(FrameBytes::whole(frame), good);
                    if delivery != Delivery::NoBuffers {
                        count_delivery(&port.counters, delivery, frame.len(), group);
                        return;
                    }
                } else if !device.wants(frame) {
                    return;
                }
                self.queue(to, frame, good);
            }
        }
    }

    /// Queues a frame for a device without buffers.
    fn queue(&mut self, to: usize, frame: &[u8], good: bool) {
        let Some(Some(port)) = self.ports.get_mut(to) else { return };
        port.counters.rx_missed_errors.increment();
        let room = port.waiting.len() < self.config.waiting_frames
            && port.waiting_bytes + frame.len() <= self.config.waiting_bytes;
        if !room {
            port.counters.rx_dropped.increment();
            return;
        }
        let first = port.waiting.is_empty();
        port.waiting_bytes += frame.len();
        port.waiting.push_back(Waiting { frame: frame.to_vec(), good });
        if first {
            if let Some(device) = port.device() {
                device.want_rx_doorbell(true);
            }
            // The guest may have posted buffers before it saw that doorbells are enabled.
            self.flush(to);
        }
    }

    /// Delivers queued frames to a device, as long as it has buffers.
    pub(super) fn flush(&mut self, index: usize) {
        let Some(Some(port)) = self.ports.get_mut(index) else { return };
        let Link::Device(device) = &mut port.link else { return };
        if port.waiting.is_empty() {
            return;
        }
        while let Some(waiting) = port.waiting.front() {
            if device.is_receiving() && !device.has_buffer() {
                return;
            }
            let delivery = device.deliver(FrameBytes::whole(&waiting.frame), waiting.good);
            if delivery == Delivery::NoBuffers {
                return;
            }
            let (len, group) = (waiting.frame.len(), destination(&waiting.frame).is_group());
            count_delivery(&port.counters, delivery, len, group);
            port.waiting_bytes -= len;
            port.waiting.pop_front();
        }
        device.want_rx_doorbell(false);
    }
}

/// Counts the outcome of a frame at its receiver.
pub(super) fn count_delivery(counters: &PortCounters, delivery: Delivery, len: usize, group: bool) {
    match delivery {
        Delivery::Delivered => {
            counters.rx_packets.increment();
            counters.rx_bytes.add(len as u64);
            if group {
                counters.multicast.increment();
            }
        }
        Delivery::TooLong => counters.rx_errors.increment(),
        Delivery::Inactive | Delivery::NoBuffers | Delivery::SourceFault | Delivery::Late => {
            counters.rx_dropped.increment();
        }
        Delivery::Filtered => {}
    }
}
