//! Queries of an engine's state.

use crate::attributes::{QpAttributes, QpState};
use crate::counters::{DeviceCounters, QpReport};
use crate::error::VerbsError;
use crate::limits::{Capabilities, Limits};
use crate::names::{DeviceId, Gid, QpHandle};
use crate::objects::Qp;
use crate::provider::Provider;

use super::Engine;

/// Numbers of a device's objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct ObjectCounts {
    /// User contexts.
    pub contexts: u32,
    /// Protection domains.
    pub protection_domains: u32,
    /// Memory regions.
    pub memory_regions: u32,
    /// Bytes in user memory regions.
    pub registered_bytes: u64,
    /// Completion queues.
    pub completion_queues: u32,
    /// Shared receive queues.
    pub shared_receive_queues: u32,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Queue pairs on the active list.
    pub active_queue_pairs: u32,
    /// Queue pairs that wait for the rate limit.
    pub throttled_queue_pairs: u32,
}

/// State of a device.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceReport {
    /// Configured name.
    pub name: String,
    /// Configured segment.
    pub segment: u32,
    /// Whether it may access guest memory.
    pub enabled: bool,
    /// Configured capabilities.
    pub capabilities: Capabilities,
    /// Current limits.
    pub limits: Limits,
    /// Addresses by index.
    pub gids: Vec<(u32, String)>,
    /// Numbers of existing objects.
    pub objects: ObjectCounts,
    /// Counts since the device was created.
    pub counters: DeviceCounters,
    /// Queue pairs.
    pub queue_pairs: Vec<QpReport>,
}

impl<P: Provider> Engine<P> {
    /// Attributes of a queue pair, and whether its send queue is draining. PSNs are the current ones.
    pub fn query_qp(&self, device: DeviceId, qp: QpHandle) -> Result<(QpAttributes, bool), VerbsError> {
        let found = self
            .device(device.0)
            .ok_or(VerbsError::NoSuchDevice(device))?
            .qps
            .get(qp.0)
            .ok_or(VerbsError::missing("queue pair", qp.0))?;
        let mut attributes = found.attributes;
        attributes.state = found.state;
        attributes.current_state = found.state;
        let draining = found.state == QpState::SendQueueDrained && found.current.is_some();
        Ok((attributes, draining))
    }

    /// Counters of a device; all 0 if it doesn't exist.
    #[must_use]
    pub fn counters(&self, device: DeviceId) -> DeviceCounters {
        self.device(device.0).map(|found| found.counters).unwrap_or_default()
    }

    /// Counters of a device's queue pairs.
    #[must_use]
    pub fn qp_counters(&self, device: DeviceId) -> Vec<QpReport> {
        let Some(found) = self.device(device.0) else { return Vec::new() };
        let report = |qp: &Qp<P>| QpReport {
            handle: qp.handle,
            qpn: qp.qpn,
            kind: qp.kind,
            state: qp.state,
            counters: qp.counters,
        };
        found.qps.iter().map(|(_, qp)| report(qp)).collect()
    }

    /// A device's addresses: index, address, MAC.
    #[must_use]
    pub fn gid_table(&self, device: DeviceId) -> Vec<(u32, Gid, [u8; 6])> {
        let Some(found) = self.device(device.0) else { return Vec::new() };
        let entries = (0u32..).zip(&found.gids);
        entries.filter_map(|(index, entry)| entry.map(|entry| (index, entry.gid, entry.mac))).collect()
    }

    /// State of a device; `None` when it doesn't exist.
    #[must_use]
    pub fn inspect(&self, device: DeviceId) -> Option<DeviceReport> {
        let found = self.device(device.0)?;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let active = found.qps.iter().filter(|(_, qp)| qp.active).count();
        Some(DeviceReport {
            name: found.name.clone(),
            segment: found.segment.0,
            enabled: found.enabled,
            capabilities: found.capabilities,
            limits: found.limits,
            gids: self
                .gid_table(device)
                .into_iter()
                .map(|(index, gid, _)| (index, format!("{gid:?}")))
                .collect(),
            objects: ObjectCounts {
                contexts: found.contexts.len() - 1,
                protection_domains: found.pds.len(),
                memory_regions: found.regions.table().len(),
                registered_bytes: found.registered_bytes,
                completion_queues: found.cqs.len(),
                shared_receive_queues: found.srqs.len(),
                queue_pairs: found.qps.len(),
                active_queue_pairs: count(active),
                throttled_queue_pairs: count(found.throttled.len()),
            },
            counters: found.counters,
            queue_pairs: self.qp_counters(device),
        })
    }
}
