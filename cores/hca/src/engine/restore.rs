//! A device that is restored from saved objects. It is dormant meanwhile: it gets no turns, has no addresses, and no peer reaches it. A
//! newer save of an object replaces an older one. So the last round, after the source has stopped, is small, and so is the work left for
//! [`Engine::start`].

use std::collections::BTreeSet;

use crate::attributes::{Access, QpAttributes, QpKind};
use crate::memory::{Kind as RegionKind, Region};
use crate::names::{DeviceId, GSI, QpHandle, Qpn, SrqHandle};
use crate::objects::{
    Context, Cq, CqRef, Current, Device, Elsewhere, GidEntry, NOT_NOTIFIED, ObjectRef, Path, Pd, Progress,
    Qp, Srq, Wait, WaitList,
};
use crate::provider::{CompletionQueue, Provider, ReceiveQueue, SendQueue};
use crate::saved::{self, InvalidState, Kind, Name};
use crate::work::MAX_SGE;

use super::save::{SavedCq, SavedQp, SavedSrq};
use super::{DeviceConfig, Engine};
use crate::error::VerbsError;

/// Limit of requests that were fetched behind the current one, and of those that a transport has.
const MOST_REQUESTS: usize = 2 * 256;
/// Limit of receives that a queue pair can have taken from its ring: what a host's RDMA device gets, and a margin.
const MOST_TAKEN: usize = 4096;

fn wrong(kind: &'static str, handle: u32, what: &'static str) -> InvalidState {
    InvalidState::Field { kind, handle, what }
}

/// Whether a saved queue pair's attributes are within their ranges.
fn are_attributes_valid(attributes: &QpAttributes, max_reads: u8) -> bool {
    (1..=5).contains(&attributes.path_mtu)
        && attributes.timeout < 32
        && attributes.retry_count < 8
        && attributes.rnr_retry < 8
        && attributes.min_rnr_timer < 32
        && attributes.max_rd_atomic <= max_reads
        && attributes.max_dest_rd_atomic <= max_reads
        && attributes.destination_qpn.0 <= super::PSN_MASK
        && attributes.rq_psn <= super::PSN_MASK
        && attributes.sq_psn <= super::PSN_MASK
}

fn reference((handle, stamp): saved::Reference) -> ObjectRef {
    ObjectRef { handle, stamp }
}

impl<P: Provider> Engine<P> {
    /// Adds a dormant device, to be restored.
    ///
    /// # Errors
    /// As [`Engine::add_device`].
    pub fn add_dormant(&mut self, config: DeviceConfig, memory: P::Memory) -> Result<DeviceId, VerbsError> {
        let device = self.add_device(config, memory)?;
        self.set_enabled(device, false);
        if let Some(found) = self.device_mut(device.0) {
            found.stopped = Some(Vec::new());
            // The kernel's context is restored like any other, with its stamp.
        }
        Ok(device)
    }

    fn dormant(&mut self, device: DeviceId) -> Result<&mut Device<P>, InvalidState> {
        self.device_mut(device.0)
            .filter(|found| found.stopped.is_some() && !found.enabled)
            .ok_or(InvalidState::NoDevice)
    }

    /// Makes all stamps assigned from now on newer than a restored one.
    fn seen(&mut self, stamp: u64, kind: &'static str, handle: u32) -> Result<(), InvalidState> {
        if stamp >= u64::MAX / 2 {
            return Err(wrong(kind, handle, "stamp"));
        }
        self.stamps = self.stamps.max(stamp);
        Ok(())
    }

    /// Removes an object that the source has destroyed.
    ///
    /// # Errors
    /// When the device isn't dormant.
    pub fn restore_gone(&mut self, device: DeviceId, name: Name) -> Result<(), InvalidState> {
        let found = self.dormant(device)?;
        let handle = name.handle;
        match name.kind {
            Kind::Device => return Err(wrong("device", 0, "absence")),
            Kind::Context => drop(found.contexts.remove(handle)),
            Kind::ProtectionDomain => {
                if let Some(gone) = found.pds.remove(handle)
                    && let Some(context) = found.contexts.get_mut(gone.context)
                {
                    context.owned = context.owned.saturating_sub(1);
                }
            }
            Kind::MemoryRegion => {
                if let Some(gone) = found.regions.remove(handle) {
                    found.disown_region(&gone);
                }
            }
            Kind::CompletionQueue => {
                if let Some(gone) = found.cqs.remove(handle)
                    && let Some(context) = found.contexts.get_mut(gone.context)
                {
                    context.owned = context.owned.saturating_sub(1);
                }
            }
            Kind::SharedReceiveQueue => {
                if let Some(gone) = found.srqs.remove(handle) {
                    found.disown(gone.pd);
                    if let Some(context) = found.contexts.get_mut(gone.context) {
                        context.srqs.retain(|other| *other != handle);
                    }
                }
            }
            Kind::QueuePair => {
                if found.qps.get(handle).is_some() {
                    self.destroy_qp(device, QpHandle(handle)).map_err(|_| InvalidState::NoDevice)?;
                }
            }
        }
        Ok(())
    }

    /// Restores a context.
    ///
    /// # Errors
    /// When the handle is invalid.
    pub fn restore_context(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: &saved::Context,
    ) -> Result<(), InvalidState> {
        self.seen(saved.stamp, "context", handle)?;
        let found = self.dormant(device)?;
        if let Some(context) = found.contexts.get_mut(handle) {
            context.exact = saved.exact;
            context.stamp = saved.stamp;
            return Ok(());
        }
        let context = Context { stamp: saved.stamp, exact: saved.exact, ..Context::default() };
        found.contexts.place(handle, context).ok_or(wrong("context", handle, "handle"))
    }

    /// Restores a protection domain.
    ///
    /// # Errors
    /// When the handle is invalid, or its context doesn't exist.
    pub fn restore_pd(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: saved::Pd,
    ) -> Result<(), InvalidState> {
        let found = self.dormant(device)?;
        let owned = match found.pds.get(handle) {
            Some(there) if there.context == saved.context => return Ok(()),
            Some(there) => {
                // The guest destroyed it between two rounds, and another process created it again.
                let (context, owned) = (there.context, there.owned);
                if let Some(context) = found.contexts.get_mut(context) {
                    context.owned = context.owned.saturating_sub(1);
                }
                owned
            }
            None => 0,
        };
        let context = found.contexts.get_mut(saved.context);
        context.ok_or(wrong("protection domain", handle, "context"))?.owned += 1;
        let pd = Pd { context: saved.context, owned };
        let placed = if handle == 0 { None } else { found.pds.place(handle, pd) };
        placed.ok_or(wrong("protection domain", handle, "handle"))
    }

    /// Restores a memory region.
    ///
    /// # Errors
    /// When a value is invalid.
    pub fn restore_region(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: saved::Region,
    ) -> Result<(), InvalidState> {
        let wrong = |what| wrong("memory region", handle, what);
        let found = self.dormant(device)?;
        let size = found.capabilities.max_mr_size;
        let pages = found.capabilities.max_fast_register_pages;
        if handle == 0 || saved.key >> 8 != handle {
            return Err(wrong("key"));
        }
        saved.start.checked_add(saved.length).ok_or(wrong("range"))?;
        let fits = match saved.kind {
            RegionKind::Dma => saved.extent.is_identity() && saved.start == 0,
            RegionKind::User => saved.length > 0 && saved.length <= size && !saved.extent.is_identity(),
            RegionKind::Fast { max_pages } => {
                max_pages <= pages && (!saved.valid || (saved.length <= size && !saved.extent.is_identity()))
            }
        };
        if !fits || !saved.extent.is_sound(saved.length) {
            return Err(wrong("extent"));
        }
        if found.pds.get(saved.pd).is_none() {
            return Err(wrong("protection domain"));
        }
        let mut access = Access::from_bits_truncate(saved.access.bits());
        if saved.kind == RegionKind::Dma {
            access &= Access::LOCAL_WRITE;
        }
        if let Some(gone) = found.regions.remove(handle) {
            found.disown_region(&gone);
        }
        let region = Region {
            key: saved.key,
            pd: saved.pd,
            access,
            valid: saved.valid,
            kind: saved.kind,
            start: saved.start,
            length: saved.length,
            exported: false,
            extent: saved.extent,
        };
        if region.kind == RegionKind::User {
            found.registered_bytes = found.registered_bytes.saturating_add(region.length);
        }
        if let Some(pd) = found.pds.get_mut(region.pd) {
            pd.owned += 1;
        }
        found.regions.place(handle, region).ok_or(wrong("handle"))
    }

    /// Restores a completion queue.
    ///
    /// # Errors
    /// When a value is invalid.
    pub fn restore_cq(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: SavedCq<P>,
    ) -> Result<(), InvalidState> {
        let wrong = |what| wrong("completion queue", handle, what);
        self.seen(saved.stamp, "completion queue", handle)?;
        let found = self.dormant(device)?;
        let ring = CompletionQueue::restore(saved.ring).map_err(wrong)?;
        let unlikely = u64::MAX / 2;
        if saved.pushed >= unlikely || saved.solicited > saved.pushed {
            return Err(wrong("count"));
        }
        let mut users = BTreeSet::new();
        match found.cqs.remove(handle) {
            Some(old) if old.stamp == saved.stamp && old.context == saved.context => users = old.users,
            old => {
                if let Some(old) = old
                    && let Some(context) = found.contexts.get_mut(old.context)
                {
                    context.owned = context.owned.saturating_sub(1);
                }
                found.contexts.get_mut(saved.context).ok_or(wrong("context"))?.owned += 1;
            }
        }
        let cq = Cq {
            stamp: saved.stamp,
            ring,
            context: saved.context,
            failed: saved.failed,
            exact: saved.exact,
            arm: saved.arm,
            pushed: saved.pushed,
            solicited: saved.solicited,
            watched: false,
            watched_at: 0,
            notified_at: saved.notified_at.filter(|at| *at < unlikely).unwrap_or(NOT_NOTIFIED),
            unpublished: false,
            notifying: false,
            users,
        };
        let placed = if handle == 0 { None } else { found.cqs.place(handle, cq) };
        placed.ok_or(wrong("handle"))
    }

    /// Restores a shared receive queue.
    ///
    /// # Errors
    /// When a value is invalid.
    pub fn restore_srq(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: SavedSrq<P>,
    ) -> Result<(), InvalidState> {
        let wrong = |what| wrong("shared receive queue", handle, what);
        self.seen(saved.stamp, "shared receive queue", handle)?;
        let found = self.dormant(device)?;
        let ring = ReceiveQueue::restore(saved.ring).map_err(wrong)?;
        let sound = saved.limit <= saved.max_wr
            && saved.max_wr <= found.capabilities.max_srq_wr
            && saved.max_sge <= found.capabilities.max_srq_sge;
        if !sound {
            return Err(wrong("size"));
        }
        if found.pds.get(saved.pd).is_none_or(|pd| pd.context != saved.context) {
            return Err(wrong("protection domain"));
        }
        let mut users = BTreeSet::new();
        match found.srqs.remove(handle) {
            Some(old) if old.stamp == saved.stamp && old.pd == saved.pd => users = old.users,
            old => {
                if let Some(old) = old {
                    found.disown(old.pd);
                    if let Some(context) = found.contexts.get_mut(old.context) {
                        context.srqs.retain(|other| *other != handle);
                    }
                }
                if let Some(pd) = found.pds.get_mut(saved.pd) {
                    pd.owned += 1;
                }
                found.contexts.get_mut(saved.context).ok_or(wrong("context"))?.srqs.push(handle);
            }
        }
        let srq = Srq {
            stamp: saved.stamp,
            ring,
            pd: saved.pd,
            context: saved.context,
            max_wr: saved.max_wr,
            max_sge: saved.max_sge,
            limit: saved.limit,
            users,
            waiters: WaitList::default(),
        };
        let placed = if handle == 0 { None } else { found.srqs.place(handle, srq) };
        placed.ok_or(wrong("handle"))
    }

    /// Restores a queue pair.
    ///
    /// # Errors
    /// When a value is invalid.
    pub fn restore_qp(
        &mut self,
        device: DeviceId,
        handle: u32,
        saved: SavedQp<P>,
    ) -> Result<(), InvalidState> {
        let wrong = |what| wrong("queue pair", handle, what);
        self.seen(saved.stamp, "queue pair", handle)?;
        let found = self.dormant(device)?;
        Self::check_qp(found, handle, &saved).map_err(wrong)?;
        let mut qp = Self::restored_qp(handle, saved).map_err(wrong)?;
        let old = found.qps.get(handle);
        let same = old.is_some_and(|old| {
            old.stamp == qp.stamp
                && old.pd == qp.pd
                && (old.send_cq, old.receive_cq) == (qp.send_cq, qp.receive_cq)
                && old.srq == qp.srq
        });
        if !same && old.is_some() {
            self.destroy_qp(device, QpHandle(handle)).map_err(|_| InvalidState::NoDevice)?;
        }
        let found = self.dormant(device)?;
        if same {
            if let Some(old) = found.qps.get_mut(handle) {
                qp.context_index = old.context_index;
                **old = qp;
            }
            return Ok(());
        }
        found.qps.place(handle, Box::new(qp)).ok_or(wrong("handle"))?;
        found.add_user(handle);
        Ok(())
    }

    /// Checks a saved queue pair. The error names its invalid part.
    fn check_qp(found: &Device<P>, handle: u32, saved: &SavedQp<P>) -> Result<(), &'static str> {
        let number_fits = match saved.kind {
            QpKind::Gsi => saved.qpn == GSI && (found.gsi == 0 || found.gsi == handle),
            _ => saved.qpn.0 & 0xFFFF == handle && (1..=255).contains(&(saved.qpn.0 >> 16)),
        };
        if handle == 0 || !number_fits {
            return Err("number");
        }
        if saved.receive.is_some() == saved.srq.is_some() {
            return Err("receive queue");
        }
        if found.pds.get(saved.pd).is_none_or(|pd| pd.context != saved.context) {
            return Err("protection domain");
        }
        if !Self::are_requests_valid(saved) {
            return Err("request");
        }
        if !are_attributes_valid(&saved.attributes, found.capabilities.max_qp_rd_atom) {
            return Err("attribute");
        }
        Ok(())
    }

    /// Whether the requests and receives that a saved queue pair has fetched are within their limits.
    fn are_requests_valid(saved: &SavedQp<P>) -> bool {
        let requests = saved.current.iter().map(|current| &current.request).chain(
            saved.current.iter().flat_map(|current| current.behind.iter().map(|behind| &behind.request)),
        );
        let outstanding = saved.elsewhere.iter().flat_map(|elsewhere| &elsewhere.outstanding);
        let mut requests = requests.chain(outstanding.map(|outstanding| &outstanding.request));
        let many = saved.current.as_ref().is_some_and(|current| current.behind.len() > MOST_REQUESTS)
            || saved.elsewhere.as_ref().is_some_and(|elsewhere| {
                elsewhere.outstanding.len() > MOST_REQUESTS || elsewhere.first_token >= u64::MAX / 2
            });
        !many
            && requests.all(|request| request.sges.len() <= MAX_SGE)
            && saved.taken.len() <= MOST_TAKEN
            && saved.taken.iter().all(|receive| receive.sges.len() <= MAX_SGE)
    }

    /// A queue pair from a saved state that was checked. The error names an invalid queue.
    fn restored_qp(handle: u32, saved: SavedQp<P>) -> Result<Qp<P>, &'static str> {
        let send = SendQueue::restore(saved.send)?;
        let receive = saved.receive.map(ReceiveQueue::restore).transpose()?;
        let mut taken = saved.taken.into_iter();
        // The receive of a message in progress, or of the next one: the engine treats both alike.
        let stashed = taken.next().map(Box::new);
        let mut elsewhere = saved.elsewhere.map(|elsewhere| Box::new(Elsewhere::restore(elsewhere)));
        if taken.len() > 0 {
            elsewhere.get_or_insert_default().returned = taken.collect();
        }
        Ok(Qp {
            stamp: saved.stamp,
            state: saved.state,
            kind: saved.kind,
            active: false,
            signal_all: saved.signal_all,
            empty_looks: 0,
            wait: Wait::None,
            pd: saved.pd,
            path: if saved.carried { Path::Elsewhere } else { Path::Unreachable },
            path_at: 0,
            path_version: 0,
            version: 0,
            was_local: false,
            send_cq: reference(saved.send_cq),
            receive_cq: reference(saved.receive_cq),
            current: saved.current.map(|current| {
                Box::new(Current {
                    request: current.request,
                    progress: Progress {
                        rnr_waits: current.rnr_waits,
                        timeouts: current.timeouts,
                        ..Progress::default()
                    },
                    behind: current.behind.into(),
                })
            }),
            elsewhere,
            stashed,
            waiter: None,
            send_queue: send,
            receive_queue: receive,
            srq: saved.srq.map(reference),
            handle: QpHandle(handle),
            qpn: Qpn(saved.qpn.0),
            context: saved.context,
            context_index: 0,
            incarnation: saved.incarnation,
            attributes: saved.attributes,
            source_gid: saved.source_gid,
            established: saved.established,
            deadline: None,
            awaits: None,
            counters: saved.counters,
        })
    }

    /// Restores the device itself: its pending work, and its addresses, which [`Engine::start`] binds.
    ///
    /// # Errors
    /// When an index or handle is invalid.
    pub fn restore_device(&mut self, device: DeviceId, saved: &saved::Device) -> Result<(), InvalidState> {
        let found = self.dormant(device)?;
        let wrong = |what| wrong("device", 0, what);
        found.gids.fill(None);
        for &(index, gid, mac) in &saved.gids {
            let multicast = gid.0[0] == 0xFF || gid.ipv4().is_some_and(|address| address.is_multicast());
            let slot = found.gids.get_mut(index as usize).filter(|_| gid.0 != [0; 16] && !multicast);
            *slot.ok_or(wrong("address"))? = Some(GidEntry { gid, mac });
        }
        let most = found.capabilities.max_qp.max(found.capabilities.max_cq) as usize;
        if [&saved.active, &saved.watched, &saved.notifying].into_iter().any(|list| list.len() > most) {
            return Err(wrong("list"));
        }
        found.counters = saved.counters;
        found.exact = saved.exact;
        found.stopped = Some(saved.active.clone());
        found.watch.clone_from(&saved.watched);
        found.notify.clone_from(&saved.notifying);
        Ok(())
    }

    /// Starts a stopped or restored device: binds its addresses and gives its queue pairs turns. Suspended addresses stay suspended.
    ///
    /// # Errors
    /// When another device has one of its addresses: nothing has changed then.
    pub fn start(&mut self, device: DeviceId) -> Result<(), InvalidState> {
        let index = device.0;
        let found = self.dormant(device)?;
        let segment = found.segment;
        let gids: Vec<_> = found.gids.iter().flatten().map(|entry| entry.gid).collect();
        for &gid in &gids {
            if self.gids.get(&(segment, gid)).is_some_and(|owner| *owner != index) {
                return Err(InvalidState::AddressTaken(gid));
            }
        }
        for gid in gids {
            self.gids.insert((segment, gid), index);
            self.moved.remove(&(segment, gid));
        }
        self.topology_changed();
        let found = self.dormant(device)?;
        found.enabled = true;
        found.marks.set(false);
        let active = found.stopped.take().unwrap_or_default();
        let (watched, notifying) = (std::mem::take(&mut found.watch), std::mem::take(&mut found.notify));
        let contexts = found.contexts.handles(|_| true);
        for qp in active {
            if let Some(at) = self.qp_ref(device, QpHandle(qp)) {
                self.activate(at);
            }
        }
        for cq in watched {
            self.watch(index, cq);
        }
        for cq in notifying {
            let Some(found) = self.device_mut(index).and_then(|found| found.cqs.get_mut(cq)) else {
                continue;
            };
            if !std::mem::replace(&mut found.notifying, true) {
                let stamp = found.stamp;
                self.notifications.push(CqRef { device: index, handle: cq, stamp });
            }
        }
        // Requests posted without a doorbell that reached the engine are found by a scan at full speed.
        for context in contexts {
            if let Some(found) = self.device_mut(index).and_then(|found| found.contexts.get_mut(context)) {
                found.hot = 1;
                found.scanning = false;
            }
            self.scan_context(device, crate::names::ContextHandle(context));
        }
        let srqs = self.device(index).map(|found| found.srqs.handles(|_| true)).unwrap_or_default();
        for srq in srqs {
            self.doorbell_srq(device, SrqHandle(srq));
        }
        Ok(())
    }
}
