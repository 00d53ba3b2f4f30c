//! A port's turn: its packets, and the offloads that each needs before its receivers can get it.

use std::sync::Arc;
use std::time::Duration;

use dma::Dma;

use super::delivery::count_delivery;
use super::{FRAME_COST, HEAD, Link, Port, Scratch, Segment, TURN_COST, TURN_PACKETS};
use crate::checksum;
use crate::device::{Delivery, TxOutcome};
use crate::frame::{
    ETHERNET_HEADER, FrameBytes, GuestBytes, LARGE_FRAME_MAX, MacKind, Offload, Transport, VLAN_TAG,
    destination, source,
};
use crate::segmentation::{Plan, SEGMENTS_MAX};
use crate::switch::Route;
use crate::transmit::TxPacket;

impl<M: Dma> Segment<M> {
    /// Gives a port its turn to send.
    pub(super) fn turn(&mut self, index: usize, now: Duration) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let (mut packets, mut cost) = (0, 0);
        let mut more = true;
        while more && packets < TURN_PACKETS && cost < TURN_COST {
            let sent = match self.ports[index].as_ref().map(|port| &port.link) {
                // Alternate, so that neither starves the other.
                Some(Link::Device(_)) if packets % 2 == 0 => self
                    .send_for_companion(index, now, &mut scratch)
                    .or_else(|| self.send_from_device(index, now, &mut scratch)),
                Some(Link::Device(_)) => self
                    .send_from_device(index, now, &mut scratch)
                    .or_else(|| self.send_for_companion(index, now, &mut scratch)),
                Some(Link::Frames(_)) => self.receive_from_port(index, now, &mut scratch),
                None => None,
            };
            match sent {
                Some(one) => {
                    packets += 1;
                    cost += one;
                }
                None => more = false,
            }
        }
        self.scratch = scratch;
        if let Some(port) = self.ports[index].as_mut() {
            port.ready = more;
        }
    }

    /// Sends one packet of a device. Returns its cost, `None` when there was none or its queue was stopped.
    fn send_from_device(&mut self, index: usize, now: Duration, scratch: &mut Scratch) -> Option<usize> {
        let device = self.ports[index].as_mut()?.device()?;
        let Some(packet) = device.fetch(&mut scratch.pieces) else {
            // One queue may just have been stopped, while others continue.
            return device.has_packets().then_some(0);
        };
        let outcome = self.route_packet(index, &packet, now, scratch);
        let port = self.ports[index].as_mut()?;
        match outcome {
            Some(TxOutcome::Sent { bytes, .. }) => {
                port.counters.tx_packets.increment();
                port.counters.tx_bytes.add(bytes as u64);
                if matches!(packet.offload, Offload::Tso { .. }) {
                    port.counters.tx_tso_packets.increment();
                }
            }
            Some(TxOutcome::Discarded) => port.counters.tx_dropped.increment(),
            Some(TxOutcome::Bad) => port.counters.tx_errors.increment(),
            None => return Some(packet.len),
        }
        if let (Some(outcome), Some(device)) = (outcome, port.device()) {
            device.complete(&packet, outcome);
        }
        Some(cost_of(packet.len, packet.offload))
    }

    /// Reads a packet and forwards it. `None`: its queue was stopped, so it must not be completed.
    fn route_packet(
        &mut self,
        index: usize,
        packet: &TxPacket,
        now: Duration,
        scratch: &mut Scratch,
    ) -> Option<TxOutcome> {
        if packet.bad {
            return Some(TxOutcome::Bad);
        }
        let rules = self.ports[index].as_ref()?.rules;
        let device = self.ports[index].as_mut()?.device()?;
        if device.is_late(&scratch.pieces) {
            // Dropped as on a wire, so that packets behind it needn't wait.
            return Some(TxOutcome::Discarded);
        }
        let head = packet.len.min(HEAD);
        let frame = &mut scratch.frame;
        // Leaves room for a tag in front.
        frame.clear();
        frame.resize(VLAN_TAG + head, 0);
        if !device.read(packet, &scratch.pieces, 0, &mut frame[VLAN_TAG..]) {
            return None;
        }
        if !device.link_is_up() {
            return Some(TxOutcome::Discarded);
        }
        let (start, offload) = match packet.vlan {
            None => (VLAN_TAG, packet.offload),
            Some(tag) => (0, insert_tag(frame, tag, packet.offload)?),
        };
        let (to, from) = (destination(&frame[start..]), source(&frame[start..]));
        if !self.switch.admit(index, from, rules.any_source, now) {
            self.ports[index].as_ref()?.counters.tx_spoofed.increment();
            return Some(TxOutcome::Discarded);
        }
        let len = packet.len + VLAN_TAG - start;
        let sent = TxOutcome::Sent { kind: MacKind::of(to), bytes: len };
        let route = self.switch.route(index, to, now);
        if let Route::Port(to) = route
            && let Some(done) = self.send_directly(index, to, packet, (start, offload), scratch)
        {
            return done.then_some(sent);
        }
        scratch.frame.resize(VLAN_TAG + packet.len, 0);
        let device = self.ports[index].as_mut()?.device()?;
        if !device.read(packet, &scratch.pieces, head, &mut scratch.frame[VLAN_TAG + head..]) {
            return None;
        }
        self.find_targets(index, route, &mut scratch.targets);
        let done =
            self.dispatch(&mut scratch.frame[start..], offload, &scratch.targets, &mut scratch.segment);
        Some(if done { sent } else { TxOutcome::Bad })
    }

    /// Copies a packet from the sender's buffers directly into those of a receiver, if it needs no offload. `None`: not possible, use the
    /// other way. `Some(false)`: the sender's queue was stopped.
    fn send_directly(
        &mut self,
        from: usize,
        to: usize,
        packet: &TxPacket,
        (start, offload): (usize, Offload),
        scratch: &Scratch,
    ) -> Option<bool> {
        let ports = self.ports.get_disjoint_mut([from, to]).ok()?;
        let [Some(from), Some(to)] = ports else { return None };
        if !to.waiting.is_empty() {
            return None;
        }
        let head = &scratch.frame[start..];
        // A companion receives whole frames.
        if to.companion.as_mut().is_some_and(|companion| companion.wants(head)) {
            return None;
        }
        let good = match offload {
            Offload::None => false,
            Offload::Checksum { .. } if to.takes_partial() && is_transport_checksum(head, offload) => true,
            _ => return None,
        };
        let (Some(sender), Some(receiver)) = (from.device(), to.device()) else { return None };
        let skip = packet.len.min(HEAD);
        let rest = (packet.len > skip).then_some(GuestBytes {
            memory: sender.dma()?,
            pieces: &scratch.pieces,
            skip,
            len: packet.len - skip,
        });
        let direct = packet.len - skip;
        let bytes = FrameBytes { parts: [head, &[]], rest };
        let (len, multicast) = (bytes.len(), destination(head).is_group());
        match receiver.deliver(bytes, good) {
            Delivery::NoBuffers => return None,
            Delivery::SourceFault => {
                sender.packet_fault(packet);
                return Some(false);
            }
            delivery => {
                if delivery == Delivery::Delivered {
                    to.counters.direct_bytes.add(direct as u64);
                }
                count_delivery(&to.counters, delivery, len, multicast);
            }
        }
        Some(true)
    }

    /// Receives one frame of a port that isn't a device. Returns its cost, `None` when there was none.
    fn receive_from_port(&mut self, index: usize, now: Duration, scratch: &mut Scratch) -> Option<usize> {
        let port = self.ports[index].as_mut()?;
        let rules = port.rules;
        let Link::Frames(frames) = &mut port.link else { return None };
        scratch.frame.clear();
        let offload = match frames.receive(&mut scratch.frame) {
            Ok(offload) => offload?,
            Err(error) => {
                port.counters.tx_errors.increment();
                tracing::debug!(port = port.name, "A frame could not be received: {error}");
                return None;
            }
        };
        let len = scratch.frame.len();
        let counters = Arc::clone(&port.counters);
        if !(ETHERNET_HEADER..=LARGE_FRAME_MAX).contains(&len) {
            counters.tx_errors.increment();
            return Some(len);
        }
        let (to, from) = (destination(&scratch.frame), source(&scratch.frame));
        if !self.switch.admit(index, from, rules.any_source, now) {
            counters.tx_spoofed.increment();
            counters.tx_dropped.increment();
            return Some(len);
        }
        let route = self.switch.route(index, to, now);
        self.find_targets(index, route, &mut scratch.targets);
        if self.dispatch(&mut scratch.frame, offload, &scratch.targets, &mut scratch.segment) {
            counters.tx_packets.increment();
            counters.tx_bytes.add(len as u64);
        } else {
            counters.tx_errors.increment();
        }
        Some(cost_of(len, offload))
    }

    pub(super) fn find_targets(&self, from: usize, route: Route, targets: &mut Vec<usize>) {
        targets.clear();
        match route {
            Route::Port(to) => targets.push(to),
            Route::Nowhere => {}
            Route::Flood => {
                let others = |(index, port): (usize, &Option<Port<M>>)| {
                    (port.is_some() && index != from).then_some(index)
                };
                targets.extend(self.ports.iter().enumerate().filter_map(others));
            }
        }
    }

    /// Forwards a frame to ports, with the offloads that each needs. `false`: it is malformed.
    pub(super) fn dispatch(
        &mut self,
        frame: &mut [u8],
        offload: Offload,
        targets: &[usize],
        segment: &mut Vec<u8>,
    ) -> bool {
        match offload {
            Offload::None | Offload::Verified => {
                for to in targets {
                    self.give(*to, frame, offload);
                }
            }
            Offload::Checksum { start, at } => {
                let usual = is_transport_checksum(frame, offload);
                let (start, at) = (usize::from(start), usize::from(at));
                if start > at || at + 2 > frame.len() {
                    return false;
                }
                let partial = |port: &Port<M>| usual && port.takes_partial();
                self.give_where(targets, frame, offload, partial);
                checksum::complete(frame, start, at);
                let finished = if usual { Offload::Verified } else { Offload::None };
                self.give_where(targets, frame, finished, |port| !partial(port));
            }
            Offload::Tso { mss } => {
                let Some(plan) = Plan::new(&frame[..frame.len().min(HEAD)], frame.len(), mss) else {
                    return false;
                };
                if self.any(targets, Port::takes_large) {
                    plan.prepare_uncut(frame);
                    self.give_where(targets, frame, offload, Port::takes_large);
                }
                if self.any(targets, |port| !port.takes_large()) {
                    for index in 0..plan.count {
                        plan.segment(frame, index, segment);
                        self.give_where(targets, segment, Offload::Verified, |port| !port.takes_large());
                    }
                }
            }
        }
        true
    }

    fn any(&self, targets: &[usize], which: impl Fn(&Port<M>) -> bool) -> bool {
        targets.iter().any(|index| matches!(self.ports.get(*index), Some(Some(port)) if which(port)))
    }

    fn give_where(
        &mut self,
        targets: &[usize],
        frame: &[u8],
        offload: Offload,
        which: impl Fn(&Port<M>) -> bool,
    ) {
        for to in targets {
            if matches!(self.ports.get(*to), Some(Some(port)) if which(port)) {
                self.give(*to, frame, offload);
            }
        }
    }
}

/// The cost of a packet in bytes: its length, plus a constant for each frame that it becomes.
fn cost_of(len: usize, offload: Offload) -> usize {
    match offload {
        Offload::Tso { mss } => len + FRAME_COST * len.div_ceil(usize::from(mss.max(1))).min(SEGMENTS_MAX),
        _ => len,
    }
}

/// Inserts a VLAN tag into a frame with [`VLAN_TAG`] free bytes in front, and returns the adjusted offload. Never `None` for packets that
/// were checked: offsets have room for 4 more.
fn insert_tag(frame: &mut [u8], tag: u16, offload: Offload) -> Option<Offload> {
    frame.copy_within(VLAN_TAG..VLAN_TAG + 12, 0);
    frame[12..14].copy_from_slice(&crate::frame::ETHERTYPE_VLAN.to_be_bytes());
    frame[14..16].copy_from_slice(&tag.to_be_bytes());
    Some(match offload {
        Offload::Checksum { start, at } => {
            Offload::Checksum { start: start.checked_add(4)?, at: at.checked_add(4)? }
        }
        other => other,
    })
}

/// Whether the partial checksum is the one of TCP or UDP, so that the whole frame counts as good with it.
fn is_transport_checksum(head: &[u8], offload: Offload) -> bool {
    let Offload::Checksum { start, at } = offload else { return false };
    Transport::parse(&head[..head.len().min(HEAD)]).is_some_and(|transport| {
        transport.l4 == usize::from(start) && checksum::field(&transport) == usize::from(at)
    })
}
