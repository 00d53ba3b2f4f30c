//! Moves ring pointers that a device exposes but doesn't let software write. The device sends frames to itself, into a
//! ring in the monitor's scratch memory. Their sizes add up to the position in the receive ring, and their number to
//! the next transmit descriptor.

use device_models::describe::Pointers;
use device_models::physical::PhysicalDevice;

use crate::monitor::{Monitor, MonitorError};
pub use crate::scratch::{FRAME, RING, Scratch};

/// Limit of status reads until a frame counts as not sent.
const MAX_SEND_READS: u32 = 1000;
/// Limit of status reads for a frame in a descriptor that may not be next. A frame takes 5 µs on the wire and a read at
/// least 1 µs, so 200 reads suffice.
const FIND: u32 = 200;
/// Smallest and largest frame in bytes.
const SIZES: (u32, u32) = (60, 1512);

/// Returns frame sizes that move a ring pointer by `distance` bytes (modulo `ring`) and whose number is `next` modulo
/// `descriptors`. Returns `None` if no sequence of legal frames does.
pub(crate) fn frames(pointers: &Pointers, distance: u32, ring: u32, next: u32) -> Option<Vec<u32>> {
    let (overhead, round) = pointers.overhead;
    let descriptors = u32::try_from(pointers.descriptors.len()).ok()?;
    let (least, most) = (SIZES.0 + overhead, SIZES.1 + overhead);
    if !distance.is_multiple_of(round) || distance >= ring {
        return None;
    }
    for total in [distance, distance + ring, distance + 2 * ring] {
        let mut count = total.div_ceil(most);
        count += (next + descriptors - count % descriptors) % descriptors;
        if count == 0 || least * count > total {
            continue;
        }
        let mut left = total;
        let sizes = (0..count).rev().map(|after| {
            let here = (left - least * after).min(most);
            left -= here;
            here - overhead
        });
        return Some(sizes.collect());
    }
    None
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Sets the memory for frames that a device sends to itself. A device with hidden ring pointers can't be shared
    /// without it.
    pub fn set_scratch(&mut self, scratch: Box<dyn Scratch + Send>) {
        self.scratch = Some(scratch);
    }

    pub(crate) fn fast_forward(&mut self, at: usize) -> Result<(), MonitorError> {
        let Some(pointers) = &self.device.context.pointers else { return Ok(()) };
        let graph = self.guests[at].model.graph();
        let (receive, transmit) = pointers.config;
        let (distance, next, config) =
            (graph.value(pointers.position), graph.value(pointers.next), graph.value(receive));
        let ring = u32::try_from(graph.number(&pointers.ring)).unwrap_or(u32::MAX);
        if distance == 0 && next == 0 {
            return self.put(at, receive, config);
        }
        // Only if the receiver accepts some frame that the device could send to itself, and the ring has such a
        // position.
        let sizes = frames(pointers, distance, ring, next)
            .filter(|_| config & (pointers.accept.0 | pointers.accept.1) != 0);
        let (Some(scratch), Some(sizes)) = (self.scratch.as_mut(), sizes) else {
            return self.restart(at, pointers);
        };
        let base = u32::try_from(scratch.device_base()).unwrap_or(u32::MAX);
        let mut frame = vec![0; usize::try_from(SIZES.1).unwrap_or(0)];
        // Prefer an address that no station on the wire sends to: a frame from the wire would move the pointer as well.
        let to = if config & pointers.accept.1 != 0 { pointers.station } else { [0xFF; 6] };
        frame[..6].copy_from_slice(&to);
        scratch.write(RING, &frame);
        self.scratch_mapping(true)?;
        self.set_bus_master(true)?;
        self.put(at, pointers.base, base)?;
        self.put(at, pointers.enable.0, pointers.enable.1)?;
        // Write the configuration once: a second write would reset the pointers.
        self.put(at, receive, config)?;
        self.put(at, transmit, pointers.loopback)?;
        let mut position = 0;
        for (size, &(address, command)) in sizes.iter().zip(pointers.descriptors.iter().cycle()) {
            self.put(at, address, base.saturating_add(u32::try_from(RING).unwrap_or(0)))?;
            self.put(at, command, *size)?;
            let mut sent = false;
            for _ in 0..MAX_SEND_READS {
                sent = self.get(at, command)? & pointers.sent != 0;
                if sent {
                    break;
                }
            }
            if !sent {
                self.set_bus_master(false)?;
                self.scratch_mapping(false)?;
                return Err(MonitorError::Stuck {
                    register: self.device.register(command).name,
                    mask: pointers.sent,
                    value: pointers.sent,
                    times: MAX_SEND_READS,
                });
            }
            position = (position + (size + pointers.overhead.0).next_multiple_of(pointers.overhead.1)) % ring;
            self.put(at, pointers.read.0, position.wrapping_sub(pointers.read.1) & 0xFFFF)?;
        }
        let arrived = self.get(at, pointers.position)?;
        for &(address, _) in pointers.descriptors {
            self.put(at, address, 0)?;
        }
        // The device stays in loopback, and so ignores the wire, until the context's last steps.
        self.set_bus_master(false)?;
        self.scratch_mapping(false)?;
        if arrived == distance {
            return Ok(());
        }
        Err(MonitorError::Stuck {
            register: self.device.register(pointers.position).name,
            mask: 0xFFFF,
            value: distance,
            times: 1,
        })
    }

    /// Finds the descriptor that the device sends next: a frame in any other descriptor isn't sent. The frames go to
    /// the device itself, with its receiver disabled. The caller must reset the device afterwards.
    pub(crate) fn find_next(&mut self, at: usize) -> Result<(), MonitorError> {
        let Some(pointers) = &self.device.context.pointers else { return Ok(()) };
        let Some(scratch) = self.scratch.as_mut() else { return Ok(()) };
        let base = u32::try_from(scratch.device_base().saturating_add(RING)).unwrap_or(u32::MAX);
        scratch.write(RING, &[0xFF; SIZES.0 as usize]);
        let receiver = self.device.register(pointers.config.0).name;
        let (enable, sends) = (pointers.enable.0, pointers.enable.1 & !pointers.receives);
        self.scratch_mapping(true)?;
        self.set_bus_master(true)?;
        self.put(at, enable, sends)?;
        self.put(at, pointers.config.1, pointers.loopback)?;
        let mut found = None;
        for (number, &(address, command)) in (0u32..).zip(pointers.descriptors) {
            self.put(at, address, base)?;
            self.put(at, command, SIZES.0)?;
            for _ in 0..FIND {
                if self.get(at, command)? & pointers.sent != 0 {
                    found = Some(number);
                    break;
                }
            }
            if found.is_some() {
                break;
            }
        }
        self.put(at, enable, 0)?;
        self.set_bus_master(false)?;
        self.scratch_mapping(false)?;
        let stuck = MonitorError::Stuck { register: receiver, mask: 0, value: 0, times: FIND };
        let next = found.ok_or(stuck)?;
        self.guests[at].model.latch(pointers.next, next);
        Ok(())
    }

    /// The pointers can't be moved: restarts the guest's ring, and raises the causes that make its driver restart.
    fn restart(&mut self, at: usize, pointers: &Pointers) -> Result<(), MonitorError> {
        let graph = self.guests[at].model.graph();
        let (receive, value) = (pointers.config.0, graph.value(pointers.config.0));
        self.guests[at].model.restart_pointers(pointers);
        self.put(at, receive, value)
    }

    fn scratch_mapping(&mut self, on: bool) -> Result<(), MonitorError> {
        let Some(base) = self.scratch.as_ref().map(|scratch| scratch.device_base()) else { return Ok(()) };
        if !self.physical.has_iommu() {
            return Ok(());
        }
        let mapping = device_models::physical::Mapping {
            device_base: base,
            guest_base: base,
            length: RING + FRAME,
            writable: true,
        };
        if on {
            self.physical.map(mapping)?
        } else {
            self.physical.unmap(mapping)?
        }
        Ok(())
    }
}
#[cfg(test)]
mod tests {
    use device_models::devices::rtl8139::RTL8139;

    use super::{SIZES, frames};

    /// Legal frame sizes reach every position of every ring with every next descriptor.
    #[test]
    fn every_position_is_reached() {
        let pointers = RTL8139.context.pointers.as_ref().unwrap();
        for ring in [8192, 16_384, 32_768, 65_536] {
            for distance in (0..ring).step_by(4) {
                for next in 0..4 {
                    let sizes = frames(pointers, distance, ring, next).unwrap();
                    assert!(
                        sizes.iter().all(|size| (SIZES.0..=SIZES.1).contains(size)),
                        "{distance} {next}: {sizes:?}"
                    );
                    let total: u32 = sizes.iter().map(|size| (size + 8).next_multiple_of(4)).sum();
                    assert_eq!((total % ring, sizes.len() % 4), (distance, next as usize));
                    assert!(sizes.len() <= 96);
                }
            }
            assert_eq!(frames(pointers, 2, ring, 0), None, "not a position");
        }
    }
}
