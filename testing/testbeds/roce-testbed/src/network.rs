//! The bad network of a run.

#![allow(clippy::cast_possible_truncation)] // Numbers of at most a few thousand things.

use super::world::{Event, MOST_DELAY, World};

impl World {
    /// Sends a packet, which the network may lose, repeat or delay.
    pub(super) fn send(&mut self, link: u32, from: u8, bytes: &[u8]) {
        let faults = self.faults;
        let [a, b] = [0, 1].map(|side: usize| self.links[link as usize].sides[side].endpoint);
        let now = self.now;
        let parted = self.partitions.iter().any(|partition| {
            (partition.endpoint == a || partition.endpoint == b)
                && (partition.from..partition.until).contains(&now)
        });
        if parted || self.rng.chance(faults.loss) {
            self.report.lost += 1;
            self.tell("lost", link, 1 - from, bytes);
            self.disturb(link);
            return;
        }
        let copies = 1 + u32::from(self.rng.chance(faults.duplication));
        for copy in 0..copies {
            let mut delay = 1_000 + u64::from(self.rng.below(faults.jitter + 1));
            if self.rng.chance(faults.reordering) {
                delay += u64::from(self.rng.below(15_000));
            }
            debug_assert!(delay < MOST_DELAY);
            let arrival = self.now + delay;
            let to = &mut self.links[link as usize].sides[usize::from(1 - from)];
            let overtakes = arrival < to.last_arrival;
            to.last_arrival = to.last_arrival.max(arrival);
            if overtakes || copy > 0 {
                self.report.disturbed += 1;
                self.tell("disturbed", link, 1 - from, bytes);
                self.disturb(link);
            }
            let marked = self.rng.chance(faults.marking);
            let packet = self.free.pop().unwrap_or_else(|| {
                self.packets.push(Vec::new());
                (self.packets.len() - 1) as u32
            });
            let slot = &mut self.packets[packet as usize];
            slot.clear();
            slot.extend_from_slice(bytes);
            self.schedule(delay, link, 1 - from, Event::Deliver { packet, marked });
        }
    }

    pub(super) fn tell(&self, what: &str, link: u32, to: u8, bytes: &[u8]) {
        if let Some(trace) = self.trace {
            let at = self.now;
            match roce::Packet::parse(bytes) {
                Ok(packet) => trace(&format!(
                    "{at} link {link} to {to} {what}: {:?} psn {} syndrome {:#04x} {} bytes",
                    packet.header.operation,
                    packet.header.psn,
                    packet.header.aeth.syndrome,
                    packet.payload.len()
                )),
                Err(error) => trace(&format!("{at} link {link} to {to} {what}: {error}")),
            }
        }
    }

    pub(super) fn disturb(&mut self, link: u32) {
        for flow in &mut self.links[link as usize].flows {
            flow.faults += 1;
        }
    }
}
