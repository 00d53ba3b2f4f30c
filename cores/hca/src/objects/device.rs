//! A device: one HCA of one VM, with everything that it owns.

use std::collections::{BTreeSet, VecDeque};

use crate::attributes::QpKind;
use crate::counters::DeviceCounters;
use crate::engine::{Inbound, Late};
use crate::limits::{Bucket, Capabilities, Limits};
use crate::memory::Regions;
use crate::names::{Gid, SegmentId};
use crate::provider::Provider;
use crate::table::Table;

use super::{Cq, Marks, Qp, QpRef, QuietTable, WaitList};

/// A user process's context, or the guest kernel's (0).
#[derive(Debug, Default)]
pub(crate) struct Context {
    pub stamp: u64,
    /// Handles of its queue pairs.
    pub qps: Vec<u32>,
    /// Handles of its shared receive queues.
    pub srqs: Vec<u32>,
    /// Number of its protection domains and completion queues.
    pub owned: u32,
    /// Arms of its completion queues reach the engine exactly.
    pub exact: bool,
    /// A scan is in progress.
    pub scanning: bool,
    /// Another scan follows it.
    pub scan_again: bool,
    /// Scans left at full speed: one has found a queue pair that no doorbell named.
    pub hot: u8,
}

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    pub context: u32,
    /// Number of its memory regions, queue pairs and shared receive queues.
    pub owned: u32,
}

/// A shared receive queue.
pub(crate) struct Srq<R> {
    pub stamp: u64,
    pub ring: R,
    pub pd: u32,
    pub context: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    /// The limit event is due once when fewer requests are posted; 0 is unarmed.
    pub limit: u32,
    /// Queue pairs attached.
    pub users: BTreeSet<u32>,
    /// Requesters that wait for a receive.
    pub waiters: WaitList,
}

/// A GID table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GidEntry {
    pub gid: Gid,
    pub mac: [u8; 6],
}

/// A device.
pub(crate) struct Device<P: Provider> {
    pub name: String,
    pub segment: SegmentId,
    pub memory: P::Memory,
    /// It may access guest memory (bus master).
    pub enabled: bool,
    /// It and other devices of this engine reach each other by a transport, as if they were on different hosts.
    pub detour: bool,
    pub capabilities: Capabilities,
    /// Limit of a datagram, bytes: the port's active MTU.
    pub port_mtu: u32,
    pub limits: Limits,
    pub exact: bool,
    pub contexts: Table<Context>,
    pub pds: Table<Pd>,
    pub regions: Regions,
    pub cqs: Table<Cq<P::CompletionQueue>>,
    pub srqs: Table<Srq<P::ReceiveQueue>>,
    pub qps: Table<Box<Qp<P>>>,
    pub quiet: QuietTable,
    /// Objects that a migration still has to copy.
    pub marks: Marks,
    /// Stopped or dormant: handles of queue pairs that get turns when it continues.
    pub stopped: Option<Vec<u32>>,
    /// Restored: completion queues whose consumers are to be checked, and that have an event to deliver.
    pub watch: Vec<u32>,
    pub notify: Vec<u32>,
    /// Handle of the general services queue pair, 0 if there is none.
    pub gsi: u32,
    pub gids: Vec<Option<GidEntry>>,
    pub registered_bytes: u64,
    pub messages: Bucket,
    pub bytes: Bucket,
    /// Count and limit of peers' writes to its guest's memory, while it is watched.
    pub inbound: Option<Box<Inbound>>,
    /// Requests that wait for not-present pages, during post-copy.
    pub late: Option<Box<Late>>,
    /// How often a request has waited for not-present pages.
    pub memory_waits: u64,
    /// Queue pairs that get turns.
    pub active: VecDeque<QpRef>,
    /// It is in the list of devices that get turns.
    pub scheduled: bool,
    /// Queue pairs that wait for the rate limit.
    pub throttled: WaitList,
    pub counters: DeviceCounters,
}

impl<P: Provider> Device<P> {
    pub fn new(
        name: String,
        segment: SegmentId,
        capabilities: Capabilities,
        limits: Limits,
        memory: P::Memory,
    ) -> Self {
        let mut device = Self {
            name,
            segment,
            memory,
            enabled: true,
            detour: false,
            capabilities,
            port_mtu: capabilities.port_mtu,
            limits,
            exact: false,
            contexts: Table::new(capabilities.max_contexts),
            pds: Table::new(capabilities.max_pd.min(1 << 24)),
            regions: Regions::new(capabilities.max_mr),
            cqs: Table::new(capabilities.max_cq),
            srqs: Table::new(capabilities.max_srq),
            qps: Table::new(capabilities.max_qp),
            quiet: QuietTable::default(),
            marks: Marks::default(),
            stopped: None,
            watch: Vec::new(),
            notify: Vec::new(),
            gsi: 0,
            gids: vec![None; capabilities.gid_table_len as usize],
            registered_bytes: 0,
            messages: Bucket::default(),
            bytes: Bucket::default(),
            inbound: None,
            late: None,
            memory_waits: 0,
            active: VecDeque::new(),
            scheduled: false,
            throttled: WaitList::default(),
            counters: DeviceCounters::default(),
        };
        device.contexts.set_zero(Context::default());
        device.set_limits(limits);
        device
    }

    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.messages.set_rate(limits.messages_per_second);
        self.bytes.set_rate(limits.bytes_per_second);
    }

    /// Adds a queue pair of the table to its context's list.
    pub fn add_to_context(&mut self, context: u32, handle: u32) {
        let (Some(context), Some(qp)) = (self.contexts.get_mut(context), self.qps.get_mut(handle)) else {
            return;
        };
        qp.context_index = u32::try_from(context.qps.len()).unwrap_or(u32::MAX);
        context.qps.push(handle);
    }

    /// Adds a queue pair of the table to the objects that it refers to.
    pub fn add_user(&mut self, handle: u32) {
        let Some(qp) = self.qps.get(handle) else { return };
        let (pd, context, cqs, srq) = (qp.pd, qp.context, [qp.send_cq, qp.receive_cq], qp.srq);
        if qp.kind == QpKind::Gsi {
            self.gsi = handle;
        }
        if let Some(pd) = self.pds.get_mut(pd) {
            pd.owned += 1;
        }
        self.add_to_context(context, handle);
        for cq in cqs {
            if let Some(found) = self.cqs.get_mut(cq.handle).filter(|found| found.stamp == cq.stamp) {
                found.users.insert(handle);
            }
        }
        let Some(srq) = srq else { return };
        if let Some(found) = self.srqs.get_mut(srq.handle).filter(|found| found.stamp == srq.stamp) {
            found.users.insert(handle);
        }
    }

    /// Removes a queue pair that has left the table from its context's list. The last one of the list moves to its position.
    pub fn remove_from_context(&mut self, context: u32, gone: &Qp<P>) {
        let Some(context) = self.contexts.get_mut(context) else { return };
        let index = gone.context_index as usize;
        if context.qps.get(index) != Some(&gone.handle.0) {
            return;
        }
        context.qps.swap_remove(index);
        if let Some(moved) = context.qps.get(index).and_then(|moved| self.qps.get_mut(*moved)) {
            moved.context_index = gone.context_index;
        }
        // A scan in progress counts positions, which have just changed.
        context.scan_again |= context.scanning;
    }

    /// Records that an object of a protection domain is gone.
    pub fn disown(&mut self, pd: u32) {
        if let Some(pd) = self.pds.get_mut(pd) {
            pd.owned = pd.owned.saturating_sub(1);
        }
    }

    /// Records that a region is gone.
    pub fn disown_region(&mut self, gone: &crate::memory::Region) {
        if gone.kind == crate::memory::Kind::User {
            self.registered_bytes = self.registered_bytes.saturating_sub(gone.length);
        }
        self.disown(gone.pd);
    }

    /// The GID at an index of the table.
    pub fn gid(&self, index: u8) -> Option<Gid> {
        Some(self.gids.get(usize::from(index))?.as_ref()?.gid)
    }

    /// The queue pair with a number.
    #[inline]
    pub fn qp_by_number(&self, qpn: crate::names::Qpn) -> Option<&Qp<P>> {
        let handle = if qpn == crate::names::GSI { self.gsi } else { qpn.0 & 0xFFFF };
        self.qps.get(handle).map(Box::as_ref).filter(|qp| qp.qpn == qpn)
    }

    /// End of the time in which the rate limit forbids another message.
    #[inline]
    pub fn throttled_until(&self, now: u64) -> Option<u64> {
        self.messages.blocked_until(now).max(self.bytes.blocked_until(now))
    }
}
