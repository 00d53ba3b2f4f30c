//! Verbs that create and modify objects, without queue pairs' states.

use std::collections::BTreeSet;

use crate::attributes::{Access, QpAttributes, QpKind, QpState};
use crate::counters::QpCounters;
use crate::error::VerbsError;
use crate::memory::{Extent, Kind as RegionKind, MrPages, NotAPage, Region};
use crate::names::{
    ContextHandle, CqHandle, DeviceId, GSI, Gid, MrHandle, PdHandle, QpHandle, Qpn, SrqHandle,
};
use crate::objects::{Context, Cq, Device, NOT_NOTIFIED, ObjectRef, Path, Pd, Qp, Srq, Wait, WaitList};
use crate::provider::{Provider, ReceiveQueue};

use crate::saved::Kind;

use super::{Engine, MrInfo, MrInit, QpInfo, QpInit, SrqAttributes, SrqInit};

/// Fails when `count` objects fill a quota.
fn room(what: &'static str, count: u32, quota: u32) -> Result<(), VerbsError> {
    if count < quota { Ok(()) } else { Err(VerbsError::OutOfResources { what, limit: u64::from(quota) }) }
}

/// Fails when a size is not within 1..=`most`.
fn within(what: &'static str, value: u32, most: u32) -> Result<(), VerbsError> {
    if (1..=most).contains(&value) { Ok(()) } else { Err(VerbsError::invalid(what, value)) }
}

fn full(what: &'static str, limit: u32) -> VerbsError {
    VerbsError::OutOfResources { what, limit: u64::from(limit) }
}

impl<P: Provider> Engine<P> {
    pub(crate) fn of(&mut self, device: DeviceId) -> Result<&mut Device<P>, VerbsError> {
        self.device_mut(device.0).ok_or(VerbsError::NoSuchDevice(device))
    }

    /// Opens a context for a user process. The kernel's context, 0, always exists.
    pub fn create_context(&mut self, device: DeviceId) -> Result<ContextHandle, VerbsError> {
        let stamp = self.stamp();
        let found = self.of(device)?;
        // The kernel's context isn't counted.
        room("contexts", found.contexts.len() - 1, found.limits.contexts)?;
        let exact = found.exact;
        let handle = found
            .contexts
            .insert(|_| Context { stamp, exact, ..Context::default() })
            .ok_or(full("contexts", found.capabilities.max_contexts))?;
        found.marks.touch(Kind::Context, handle);
        Ok(ContextHandle(handle))
    }

    /// Creates a protection domain.
    pub fn create_pd(&mut self, device: DeviceId, context: ContextHandle) -> Result<PdHandle, VerbsError> {
        let found = self.of(device)?;
        room("protection domains", found.pds.len(), found.limits.protection_domains)?;
        let owner = found.contexts.get_mut(context.0).ok_or(VerbsError::missing("context", context.0))?;
        let handle = found
            .pds
            .insert(|_| Pd { context: context.0, owned: 0 })
            .ok_or(full("protection domains", found.capabilities.max_pd))?;
        owner.owned += 1;
        found.marks.touch(Kind::ProtectionDomain, handle);
        Ok(PdHandle(handle))
    }

    /// Registers user memory. Fails when the page list does not fit the length, a page is not aligned, or a quota is full.
    pub fn register_mr(
        &mut self,
        device: DeviceId,
        pd: PdHandle,
        init: MrInit,
    ) -> Result<MrInfo, VerbsError> {
        let mut pages = MrPages::new(init.start);
        init.pages
            .iter()
            .try_for_each(|page| pages.push(*page))
            .map_err(|NotAPage(page)| VerbsError::invalid("A page of a memory region", page))?;
        self.register_mr_pages(device, pd, (init.start, init.length), init.access, pages)
    }

    /// As [`Engine::register_mr`], for `length` bytes from `start` on, with pages that were collected before.
    pub fn register_mr_pages(
        &mut self,
        device: DeviceId,
        pd: PdHandle,
        (start, length): (u64, u64),
        access: u32,
        pages: MrPages,
    ) -> Result<MrInfo, VerbsError> {
        let found = self.of(device)?;
        let first = start % 4096;
        if length == 0 || length > found.capabilities.max_mr_size {
            return Err(VerbsError::invalid("The length of a memory region", length));
        }
        // Both are far below 2^64: the length is at most max_mr_size, the offset below a page.
        if pages.count() != (first + length).div_ceil(4096) {
            return Err(VerbsError::invalid(
                "The number of pages of a memory region of that length",
                pages.count(),
            ));
        }
        let access = Access::from_bits_truncate(access);
        let start = if access.contains(Access::ZERO_BASED) { 0 } else { start };
        start.checked_add(length).ok_or(VerbsError::invalid("The start of a memory region", start))?;
        let none = VerbsError::invalid("The number of pages of a memory region of that length", 0_u32);
        let extent = pages.into_extent().ok_or(none)?;
        let bytes = found.registered_bytes.saturating_add(length);
        if bytes > found.limits.registered_bytes {
            return Err(VerbsError::OutOfResources {
                what: "registered bytes",
                limit: found.limits.registered_bytes,
            });
        }
        let region = Region {
            key: 0,
            pd: pd.0,
            access,
            valid: true,
            kind: RegionKind::User,
            start,
            length,
            exported: false,
            extent,
        };
        let info = self.add_region(device, pd, region)?;
        self.of(device)?.registered_bytes = bytes;
        Ok(info)
    }

    /// Creates a region of all guest memory, addressed by guest addresses. Only its owner can use it: remote rights are dropped.
    pub fn register_dma_mr(
        &mut self,
        device: DeviceId,
        pd: PdHandle,
        access: u32,
    ) -> Result<MrInfo, VerbsError> {
        let access = Access::from_bits_truncate(access) & Access::LOCAL_WRITE;
        let region = Region {
            key: 0,
            pd: pd.0,
            access,
            valid: true,
            kind: RegionKind::Dma,
            start: 0,
            length: u64::MAX,
            exported: false,
            extent: Extent::Identity,
        };
        self.add_region(device, pd, region)
    }

    /// Creates an empty region for fast registrations of up to `max_pages` pages.
    pub fn allocate_fast_mr(
        &mut self,
        device: DeviceId,
        pd: PdHandle,
        max_pages: u32,
    ) -> Result<MrInfo, VerbsError> {
        let most = self.of(device)?.capabilities.max_fast_register_pages;
        within("The number of pages of a fast-register region", max_pages, most)?;
        let region = Region {
            key: 0,
            pd: pd.0,
            access: Access::empty(),
            valid: false,
            kind: RegionKind::Fast { max_pages },
            start: 0,
            length: 0,
            exported: false,
            extent: Extent::Identity,
        };
        self.add_region(device, pd, region)
    }

    fn add_region(&mut self, device: DeviceId, pd: PdHandle, region: Region) -> Result<MrInfo, VerbsError> {
        let seed = self.stamp();
        let found = self.of(device)?;
        room("memory regions", found.regions.table().len(), found.limits.memory_regions)?;
        let owner = found.pds.get_mut(pd.0).ok_or(VerbsError::missing("protection domain", pd.0))?;
        let (handle, key) =
            found.regions.insert(region, seed).ok_or(full("memory regions", found.capabilities.max_mr))?;
        owner.owned += 1;
        found.marks.touch(Kind::MemoryRegion, handle);
        Ok(MrInfo { handle: MrHandle(handle), lkey: key, rkey: key })
    }

    /// Creates a completion queue of `entries` entries.
    pub fn create_cq(
        &mut self,
        device: DeviceId,
        context: ContextHandle,
        entries: u32,
        ring: P::CompletionQueue,
    ) -> Result<CqHandle, VerbsError> {
        let stamp = self.stamp();
        let found = self.of(device)?;
        room("completion queues", found.cqs.len(), found.limits.completion_queues)?;
        within("The number of entries of a completion queue", entries, found.capabilities.max_cqe)?;
        let owner = found.contexts.get_mut(context.0).ok_or(VerbsError::missing("context", context.0))?;
        let exact = owner.exact;
        let cq = |_| Cq {
            stamp,
            ring,
            context: context.0,
            failed: false,
            exact,
            arm: None,
            pushed: 0,
            solicited: 0,
            watched: false,
            watched_at: 0,
            notified_at: NOT_NOTIFIED,
            unpublished: false,
            notifying: false,
            users: BTreeSet::new(),
        };
        let handle = found.cqs.insert(cq).ok_or(full("completion queues", found.capabilities.max_cq))?;
        owner.owned += 1;
        found.marks.touch(Kind::CompletionQueue, handle);
        Ok(CqHandle(handle))
    }

    /// Creates a shared receive queue, whose ring starts at once.
    pub fn create_srq(
        &mut self,
        device: DeviceId,
        pd: PdHandle,
        init: SrqInit,
        mut ring: P::ReceiveQueue,
    ) -> Result<SrqHandle, VerbsError> {
        let stamp = self.stamp();
        let found = self.of(device)?;
        room("shared receive queues", found.srqs.len(), found.limits.shared_receive_queues)?;
        within("The size of a shared receive queue", init.max_wr, found.capabilities.max_srq_wr)?;
        within("The elements of a shared request", init.max_sge, found.capabilities.max_srq_sge)?;
        if init.limit > init.max_wr {
            return Err(VerbsError::invalid("The limit of a shared receive queue", init.limit));
        }
        let owner = found.pds.get_mut(pd.0).ok_or(VerbsError::missing("protection domain", pd.0))?;
        let context = owner.context;
        ring.start(&found.memory);
        let srq = |_| Srq {
            stamp,
            ring,
            pd: pd.0,
            context,
            max_wr: init.max_wr,
            max_sge: init.max_sge,
            limit: init.limit,
            users: BTreeSet::new(),
            waiters: WaitList::default(),
        };
        let handle =
            found.srqs.insert(srq).ok_or(full("shared receive queues", found.capabilities.max_srq))?;
        owner.owned += 1;
        if let Some(context) = found.contexts.get_mut(context) {
            context.srqs.push(handle);
        }
        found.marks.touch(Kind::SharedReceiveQueue, handle);
        Ok(SrqHandle(handle))
    }

    /// Arms the limit event of a shared receive queue; a limit of 0 disarms it.
    pub fn modify_srq(&mut self, device: DeviceId, srq: SrqHandle, limit: u32) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        found.marks.touch(Kind::SharedReceiveQueue, srq.0);
        let found = found.srqs.get_mut(srq.0).ok_or(VerbsError::missing("shared receive queue", srq.0))?;
        if limit > found.max_wr {
            return Err(VerbsError::invalid("The limit of a shared receive queue", limit));
        }
        found.limit = limit;
        Ok(())
    }

    /// Attributes of a shared receive queue.
    pub fn query_srq(&self, device: DeviceId, srq: SrqHandle) -> Result<SrqAttributes, VerbsError> {
        let found = self
            .device(device.0)
            .ok_or(VerbsError::NoSuchDevice(device))?
            .srqs
            .get(srq.0)
            .ok_or(VerbsError::missing("shared receive queue", srq.0))?;
        Ok(SrqAttributes { max_wr: found.max_wr, max_sge: found.max_sge, limit: found.limit })
    }

    /// Creates a queue pair in RESET, with a receive ring unless it has a shared receive queue.
    pub fn create_qp(
        &mut self,
        device: DeviceId,
        init: QpInit,
        send: P::SendQueue,
        receive: Option<P::ReceiveQueue>,
    ) -> Result<QpInfo, VerbsError> {
        let stamp = self.stamp();
        let found = self.of(device)?;
        check_qp_init(found, &init, receive.is_some())?;
        let refers = refers_to(found, &init)?;
        let max_qp = found.capabilities.max_qp;
        let qp = |handle| Box::new(new_qp::<P>(handle, stamp, &init, &refers, send, receive));
        let handle = found.qps.insert(qp).ok_or(full("queue pairs", max_qp))?;
        found.marks.touch(Kind::QueuePair, handle);
        found.add_user(handle);
        let qpn = found.qps.get(handle).map_or(Qpn(0), |qp| qp.qpn);
        Ok(QpInfo { handle: QpHandle(handle), qpn })
    }
}

/// Checks a new queue pair's kind and sizes. `has_ring`: whether it has a receive ring.
fn check_qp_init<P: Provider>(device: &Device<P>, init: &QpInit, has_ring: bool) -> Result<(), VerbsError> {
    room("queue pairs", device.qps.len(), device.limits.queue_pairs)?;
    within("The size of a send queue", init.max_send_wr, device.capabilities.max_qp_wr)?;
    if init.max_send_sge > device.capabilities.max_sge {
        return Err(VerbsError::invalid("The elements of a send request", init.max_send_sge));
    }
    if init.max_receive_sge > device.capabilities.max_sge {
        return Err(VerbsError::invalid("The elements of a receive request", init.max_receive_sge));
    }
    if init.max_receive_wr > device.capabilities.max_qp_wr {
        return Err(VerbsError::invalid("The size of a receive queue", init.max_receive_wr));
    }
    if init.srq.is_some() == has_ring || (init.kind == QpKind::Gsi && init.srq.is_some()) {
        let what = "Whether a queue pair has a shared receive queue";
        return Err(VerbsError::invalid(what, init.srq.is_some()));
    }
    if init.kind == QpKind::Gsi && device.gsi != 0 {
        return Err(full("general services queue pairs", 1));
    }
    Ok(())
}

/// The objects that a new queue pair refers to.
struct RefersTo {
    context: u32,
    send_cq: ObjectRef,
    receive_cq: ObjectRef,
    srq: Option<ObjectRef>,
}

fn refers_to<P: Provider>(device: &Device<P>, init: &QpInit) -> Result<RefersTo, VerbsError> {
    let pd = device.pds.get(init.pd.0).ok_or(VerbsError::missing("protection domain", init.pd.0))?;
    let context = pd.context;
    let cq = |handle: CqHandle| match device.cqs.get(handle.0) {
        Some(cq) if cq.context == context => Ok(ObjectRef { handle: handle.0, stamp: cq.stamp }),
        _ => Err(VerbsError::missing("completion queue of that context", handle.0)),
    };
    let (send_cq, receive_cq) = (cq(init.send_cq)?, cq(init.receive_cq)?);
    let srq = |handle: SrqHandle| match device.srqs.get(handle.0) {
        Some(srq) if srq.context == context => Ok(ObjectRef { handle: handle.0, stamp: srq.stamp }),
        _ => Err(VerbsError::missing("shared receive queue of that context", handle.0)),
    };
    Ok(RefersTo { context, send_cq, receive_cq, srq: init.srq.map(srq).transpose()? })
}

/// A queue pair in RESET.
fn new_qp<P: Provider>(
    handle: u32,
    stamp: u64,
    init: &QpInit,
    refers: &RefersTo,
    send: P::SendQueue,
    receive: Option<P::ReceiveQueue>,
) -> Qp<P> {
    // Numbers below 2^16 are not used, so that none is accidentally 0 or 1.
    let generation = u32::from(u8::try_from(stamp % 255).unwrap_or(0)) + 1;
    let qpn = if init.kind == QpKind::Gsi { GSI } else { Qpn((generation << 16) | handle) };
    Qp {
        stamp,
        state: QpState::Reset,
        kind: init.kind,
        active: false,
        signal_all: init.signal_all,
        empty_looks: 0,
        wait: Wait::None,
        pd: init.pd.0,
        path: Path::Unreachable,
        path_at: 0,
        path_version: 0,
        version: 0,
        was_local: false,
        send_cq: refers.send_cq,
        receive_cq: refers.receive_cq,
        current: None,
        elsewhere: None,
        stashed: None,
        waiter: None,
        send_queue: send,
        receive_queue: receive,
        srq: refers.srq,
        handle: QpHandle(handle),
        qpn,
        context: refers.context,
        context_index: 0,
        incarnation: 0,
        attributes: QpAttributes::in_reset(),
        source_gid: Gid([0; 16]),
        established: false,
        deadline: None,
        awaits: None,
        counters: QpCounters::default(),
    }
}
