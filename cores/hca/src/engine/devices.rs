//! Devices and their addresses.

use crate::error::VerbsError;
use crate::limits::Limits;
use crate::names::{ContextHandle, DeviceId, Gid, QpHandle};
use crate::objects::{Device, GidEntry, NOT_NOTIFIED, Path, QpRef};
use crate::provider::{CompletionQueue, Provider};
use crate::saved::Kind;
use crate::transport::Action;
use crate::work::{Arm, MAX_SGE};

use super::{DeviceConfig, Engine, Timer};

impl<P: Provider> Engine<P> {
    /// Adds a device without objects. Its identifier is never reused.
    pub fn add_device(&mut self, config: DeviceConfig, memory: P::Memory) -> Result<DeviceId, VerbsError> {
        let capabilities = config.capabilities;
        let most_sge = u32::try_from(MAX_SGE).unwrap_or(u32::MAX);
        let bounds: [(&'static str, u32, u32); 4] = [
            ("The number of queue pairs of a device", capabilities.max_qp, 65_535),
            ("The scatter-gather elements of a request", capabilities.max_sge, most_sge),
            ("The scatter-gather elements of a shared request", capabilities.max_srq_sge, most_sge),
            ("The number of GIDs of a device", capabilities.gid_table_len, 256),
        ];
        for (what, value, most) in bounds {
            if value > most {
                return Err(VerbsError::invalid(what, value));
            }
        }
        let id = u32::try_from(self.devices.len())
            .map_err(|_| VerbsError::OutOfResources { what: "devices", limit: u64::from(u32::MAX) })?;
        let device = Device::new(config.name, config.segment, capabilities, config.limits, memory);
        self.devices.push(Some(Box::new(device)));
        Ok(DeviceId(id))
    }

    /// Removes a device and all that it owns. Requests of its peers end in timeouts.
    pub fn remove_device(&mut self, device: DeviceId) {
        if self.device(device.0).is_none() {
            return;
        }
        self.reset_device(device);
        self.watch_inbound(device, false);
        self.set_late(device, false);
        self.held.retain(|(of, _)| *of != device.0);
        self.devices[device.0 as usize] = None;
    }

    /// Resets a device to its power-on state: no objects, no addresses. Counters and limits stay.
    pub fn reset_device(&mut self, device: DeviceId) {
        if self.is_tracked(device) {
            // Marks all of its objects, which are about to be destroyed.
            self.track(device, true);
        }
        let handles = self.device(device.0).map(|found| found.qps.handles(|qp| qp.path == Path::Elsewhere));
        for handle in handles.unwrap_or_default() {
            if let Some(at) = self.qp_ref(device, QpHandle(handle)) {
                self.close_elsewhere(at);
            }
        }
        let regions = self.device(device.0).into_iter().flat_map(|found| found.regions.table().iter());
        let exported = regions.filter(|(_, region)| region.exported);
        let gone: Vec<_> =
            exported.map(|(_, region)| Action::RegionGone { device, key: region.key }).collect();
        self.actions.extend(gone);
        let Some(old) = self.device_mut(device.0) else { return };
        let mut new = Device::new(
            std::mem::take(&mut old.name),
            old.segment,
            old.capabilities,
            old.limits,
            old.memory.clone(),
        );
        new.counters = old.counters;
        new.detour = old.detour;
        new.enabled = old.enabled;
        new.exact = old.exact;
        new.scheduled = old.scheduled;
        new.inbound = old.inbound.take();
        new.late = old.late.take();
        new.memory_waits = old.memory_waits;
        new.port_mtu = old.port_mtu;
        std::mem::swap(&mut new.marks, &mut old.marks);
        let old = std::mem::replace(old, new);
        self.active_qps -= u32::try_from(old.active.len()).unwrap_or(0);
        for gid in old.gids.iter().flatten() {
            // A stopped device doesn't own its addresses any more.
            if self.gids.get(&(old.segment, gid.gid)) == Some(&device.0) {
                self.gids.remove(&(old.segment, gid.gid));
            }
        }
        for (_, qp) in old.qps.iter() {
            let at = QpRef { device: device.0, handle: qp.handle.0, stamp: qp.stamp };
            if let Some(deadline) = qp.deadline {
                self.timers.remove(&(deadline, Timer::Qp(at)));
            }
            self.stop_awaiting(at, qp.awaits);
            self.leave_lists(at, qp.wait);
            self.leave_late(at, true);
        }
        self.stop_device_timer(Timer::Device(device.0));
        self.events.retain(|(of, _)| *of != device.0);
        self.set_arm_exact(device, old.exact);
        self.topology += 1;
    }

    /// Replaces a device's view of its guest's memory.
    pub fn set_memory(&mut self, device: DeviceId, memory: P::Memory) {
        if let Some(device) = self.device_mut(device.0) {
            device.memory = memory;
        }
    }

    /// Changes quotas and rates. Objects beyond a lowered quota stay.
    pub fn set_limits(&mut self, device: DeviceId, limits: Limits) {
        if let Some(found) = self.device_mut(device.0) {
            found.set_limits(limits);
            self.release_throttled(device.0, usize::MAX);
        }
    }

    /// Sets the active MTU of a device's port, bytes. A longer datagram isn't sent.
    pub fn set_port_mtu(&mut self, device: DeviceId, bytes: u32) {
        if let Some(found) = self.device_mut(device.0) {
            found.port_mtu = bytes;
        }
    }

    /// The active MTU of a device's port, bytes.
    #[must_use]
    pub fn port_mtu(&self, device: DeviceId) -> Option<u32> {
        self.device(device.0).map(|found| found.port_mtu)
    }

    /// Permits or forbids access to guest memory (bus master). While it is forbidden, work waits, and peers get no response.
    pub fn set_enabled(&mut self, device: DeviceId, bus_master: bool) {
        let Some(found) = self.device_mut(device.0) else { return };
        if found.enabled == bus_master {
            return;
        }
        found.enabled = bus_master;
        self.topology += 1;
        if bus_master {
            let contexts = self.device(device.0).map(|found| found.contexts.handles(|_| true));
            for context in contexts.unwrap_or_default() {
                self.scan_context(device, ContextHandle(context));
            }
            // The engine did not watch their consumers meanwhile.
            let awaited = self.device(device.0).map(|found| found.cqs.handles(|cq| !cq.exact && !cq.failed));
            for cq in awaited.unwrap_or_default() {
                self.watch(device.0, cq);
            }
        }
    }

    /// Declares how arms of a device's completion queues reach the engine. Exact arms are trapped; sampled ones, where doorbells are plain
    /// memory, may be lost. A change to exact arms counts each completion queue as armed once, since the engine may have missed an arm.
    pub fn set_arm_exact(&mut self, device: DeviceId, exact: bool) {
        let Some(found) = self.device_mut(device.0) else { return };
        found.exact = exact;
        for (handle, context) in found.contexts.iter_mut() {
            found.marks.touch(Kind::Context, handle);
            context.exact = exact;
        }
        self.set_cqs_exact(device.0, exact, |_| true);
    }

    /// As [`Engine::set_arm_exact`], for one context: the kernel's may be trapped where user contexts' are not.
    pub fn set_context_arm_exact(&mut self, device: DeviceId, context: ContextHandle, exact: bool) {
        let Some(found) = self.device_mut(device.0) else { return };
        let Some(owner) = found.contexts.get_mut(context.0) else { return };
        owner.exact = exact;
        found.marks.touch(Kind::Context, context.0);
        self.set_cqs_exact(device.0, exact, |of| of == context.0);
    }

    fn set_cqs_exact(&mut self, device: u32, exact: bool, which: impl Fn(u32) -> bool) {
        let Some(found) = self.device_mut(device) else { return };
        let mut unconsumed = Vec::new();
        for (handle, cq) in found.cqs.iter_mut() {
            if cq.exact == exact || cq.failed || !which(cq.context) {
                continue;
            }
            cq.exact = exact;
            found.marks.touch(Kind::CompletionQueue, handle);
            let consumer = if found.enabled { cq.ring.consumer(&found.memory) } else { None };
            let Some(consumer) = consumer else { continue };
            let consumed = cq.pushed.wrapping_sub(u64::from(consumer.unconsumed));
            let told = cq.notified_at != NOT_NOTIFIED && cq.notified_at == consumed;
            if exact && !told && cq.arm.is_none() {
                cq.arm = Some(Arm::Next);
            }
            if consumer.unconsumed > 0 {
                unconsumed.push(handle);
            }
        }
        for handle in unconsumed {
            if exact {
                self.notify_if_awaited(device, handle);
            } else {
                self.watch(device, handle);
            }
        }
    }

    /// Binds an address to an index of the GID table, and replaces the previous one.
    pub fn bind_gid(
        &mut self,
        device: DeviceId,
        index: u32,
        gid: Gid,
        mac: [u8; 6],
    ) -> Result<(), VerbsError> {
        let found = self.device(device.0).ok_or(VerbsError::NoSuchDevice(device))?;
        if index as usize >= found.gids.len() {
            return Err(VerbsError::invalid("The index into the GID table", index));
        }
        let multicast = gid.0[0] == 0xFF || gid.ipv4().is_some_and(|address| address.is_multicast());
        if gid.0 == [0; 16] || multicast {
            return Err(VerbsError::invalid("The first half of a GID", u64::from_be_bytes(half(gid))));
        }
        let place = (found.segment, gid);
        if self.gids.get(&place).is_some_and(|owner| *owner != device.0) {
            return Err(VerbsError::AddressTaken { gid });
        }
        self.clear_gid(device.0, index);
        if let Some(found) = self.device_mut(device.0) {
            found.gids[index as usize] = Some(GidEntry { gid, mac });
        }
        self.gids.insert(place, device.0);
        self.topology += 1;
        Ok(())
    }

    /// Removes an address from the GID table. Queue pairs that use it become unreachable.
    pub fn unbind_gid(&mut self, device: DeviceId, index: u32, gid: Gid) -> Result<(), VerbsError> {
        let found = self.device(device.0).ok_or(VerbsError::NoSuchDevice(device))?;
        match found.gids.get(index as usize) {
            Some(Some(entry)) if entry.gid == gid => {
                self.clear_gid(device.0, index);
                Ok(())
            }
            _ => Err(VerbsError::missing("GID table entry of that address", index)),
        }
    }

    fn clear_gid(&mut self, device: u32, index: u32) {
        let Some(found) = self.device_mut(device) else { return };
        let Some(entry) = found.gids.get_mut(index as usize).and_then(Option::take) else { return };
        let elsewhere = found.gids.iter().flatten().any(|other| other.gid == entry.gid);
        let place = (found.segment, entry.gid);
        if !elsewhere {
            self.gids.remove(&place);
        }
        self.topology += 1;
    }
}

fn half(gid: Gid) -> [u8; 8] {
    std::array::from_fn(|index| gid.0[index])
}
