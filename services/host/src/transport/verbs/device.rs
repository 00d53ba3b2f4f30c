//! A host's RDMA device, opened.

#![allow(unsafe_code)] // Calls a C library, and its inline functions' targets.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use dma::Alias;
use hca::attributes::Access;
use hca::work::{SgeList, Status};
use ibverbs::Verbs;
use ibverbs::abi::{
    self, AhAttr, AsyncEvent, Atomic, Channel, Context, Cq, HostSge, Mr, Pd, Qp, QpAttr, QpCap, QpInitAttr,
    Rdma, RecvWr, SendWr, Target, Wc, event, mask, opcode, send, state,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::library::{Absent, Found};
use super::rnic::{
    HostCompletion, HostEvent, HostMr, HostPd, HostQp, HostRequest, Operation, Receiving, Registered, Rnic,
    RnicError, RnicInfo, Sending,
};

/// Number of entries of a completion queue. Queue pairs share it until their requests could fill it.
const ENTRIES: u32 = 16_384;
/// Limit of completions consumed from a queue at once.
const BATCH: usize = 64;
/// Limit of events consumed at once.
const EVENTS: usize = 16;

struct Queue {
    cq: *mut Cq,
    /// Number of entries that its queue pairs may need.
    used: u32,
}

struct Pair {
    qp: *mut Qp,
    queue: usize,
}

/// The device.
pub(super) struct Device {
    library: Arc<Verbs>,
    context: *mut Context,
    channel: *mut Channel,
    info: RnicInfo,
    gid_index: u8,
    next: u32,
    pds: HashMap<HostPd, *mut Pd>,
    mrs: HashMap<HostMr, *mut Mr>,
    qps: HashMap<HostQp, Pair>,
    queues: Vec<Queue>,
}

// SAFETY: the library's objects may be used from any thread, and this owns them.
unsafe impl Send for Device {}

fn refused(what: &'static str) -> RnicError {
    RnicError::Refused { what, source: io::Error::last_os_error() }
}

/// Converts the return value of a call that returns 0 or an error number.
fn done(what: &'static str, result: c_int) -> Result<(), RnicError> {
    ibverbs::outcome(result).map_err(|source| RnicError::Refused { what, source })
}

fn status(status: u32) -> Status {
    match status {
        0 => Status::Success,
        1 => Status::LocalLength,
        2 => Status::LocalQpOperation,
        4 => Status::LocalProtection,
        5 => Status::Flushed,
        6 => Status::MemoryBind,
        7 => Status::BadResponse,
        8 => Status::LocalAccess,
        9 => Status::RemoteInvalidRequest,
        10 => Status::RemoteAccess,
        11 => Status::RemoteOperation,
        12 => Status::RetryExceeded,
        13 => Status::RnrRetryExceeded,
        _ => Status::General,
    }
}

fn elements(sges: &SgeList) -> Vec<HostSge> {
    sges.iter().map(|sge| HostSge { addr: sge.address, length: sge.length, lkey: sge.lkey }).collect()
}

impl Device {
    /// Opens a found device. The process's credentials must not change any more: the kernel would refuse requests.
    pub fn open(found: &Found) -> Result<Self, Absent> {
        let library = Arc::clone(found.port.library());
        let context = found.port.open()?;
        let failed = || Absent::Open {
            device: found.info().device.clone(),
            why: format!("no completion queue: {}", io::Error::last_os_error()),
        };
        // SAFETY: an open context.
        let channel = unsafe { (library.functions.create_comp_channel)(context) };
        let mut device = Self {
            library,
            context,
            channel,
            info: found.info().clone(),
            gid_index: found.port.info().gid_index,
            next: 0,
            pds: HashMap::new(),
            mrs: HashMap::new(),
            qps: HashMap::new(),
            queues: Vec::new(),
        };
        if channel.is_null() {
            return Err(failed());
        }
        for fd in device.fds() {
            let flags = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
            flags.map_err(|_| failed())?;
        }
        device.queue().map_err(|_| failed())?;
        Ok(device)
    }

    fn name(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.next
    }

    /// Index of a completion queue with room for another queue pair, created if needed.
    fn queue(&mut self) -> Result<usize, RnicError> {
        let needed = self.info.sends + self.info.receives;
        if let Some(index) = self.queues.iter().position(|queue| queue.used + needed <= ENTRIES) {
            return Ok(index);
        }
        let entries = c_int::try_from(ENTRIES).unwrap_or(c_int::MAX);
        // SAFETY: an open context and its channel.
        let cq = unsafe {
            (self.library.functions.create_cq)(self.context, entries, std::ptr::null_mut(), self.channel, 0)
        };
        if cq.is_null() {
            return Err(refused("create a completion queue"));
        }
        self.queues.push(Queue { cq, used: 0 });
        Ok(self.queues.len() - 1)
    }

    fn modify(
        &mut self,
        what: &'static str,
        qp: HostQp,
        attributes: &mut QpAttr,
        mask: i32,
    ) -> Result<(), RnicError> {
        let pair = self.qps.get(&qp).ok_or(RnicError::Gone("queue pair"))?;
        // SAFETY: a queue pair that exists, and attributes that live during the call.
        done(what, unsafe { (self.library.functions.modify_qp)(pair.qp, attributes, mask) })
    }
}

impl Rnic for Device {
    fn info(&self) -> RnicInfo {
        self.info.clone()
    }

    fn allocate_pd(&mut self) -> Result<HostPd, RnicError> {
        // SAFETY: an open context.
        let pd = unsafe { (self.library.functions.alloc_pd)(self.context) };
        if pd.is_null() {
            return Err(refused("allocate a protection domain"));
        }
        let name = HostPd(self.name());
        self.pds.insert(name, pd);
        Ok(name)
    }

    fn free_pd(&mut self, pd: HostPd) {
        if let Some(pd) = self.pds.remove(&pd) {
            // SAFETY: allocated above, and not used any more.
            unsafe { (self.library.functions.dealloc_pd)(pd) };
        }
    }

    fn register(
        &mut self,
        pd: HostPd,
        memory: Alias,
        start: u64,
        access: Access,
    ) -> Result<Registered, RnicError> {
        let pd = *self.pds.get(&pd).ok_or(RnicError::Gone("protection domain"))?;
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(memory.address());
        // The rights have the same numbers in verbs; ZERO_BASED isn't passed to the device.
        let access = (access - Access::ZERO_BASED).bits().cast_signed();
        // SAFETY: `memory` is mapped and writable for its length during the call. The kernel pins its pages, so the view may be unmapped
        // afterwards.
        let mr = unsafe { (self.library.functions.reg_mr_iova)(pd, address, memory.len(), start, access) };
        if mr.is_null() {
            return Err(refused("register a guest's memory"));
        }
        // SAFETY: the library's object, whose keys don't change.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        let name = HostMr(self.name());
        self.mrs.insert(name, mr);
        Ok(Registered { mr: name, lkey, rkey })
    }

    fn deregister(&mut self, mr: HostMr) {
        if let Some(mr) = self.mrs.remove(&mr) {
            // SAFETY: registered above, and not used any more.
            let result = unsafe { (self.library.functions.dereg_mr)(mr) };
            if result != 0 {
                tracing::error!(result, "The host's RDMA device keeps memory that a guest has deregistered");
            }
        }
    }

    fn create_qp(&mut self, pd: HostPd, access: Access) -> Result<(HostQp, u32), RnicError> {
        let pd = *self.pds.get(&pd).ok_or(RnicError::Gone("protection domain"))?;
        let queue = self.queue()?;
        let cq = self.queues[queue].cq;
        let mut init = QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: std::ptr::null_mut(),
            cap: QpCap {
                max_send_wr: self.info.sends,
                max_recv_wr: self.info.receives,
                max_send_sge: 16,
                max_recv_sge: 16,
                max_inline_data: 0,
            },
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a protection domain and a completion queue that exist.
        let qp = unsafe { (self.library.functions.create_qp)(pd, &raw mut init) };
        if qp.is_null() {
            return Err(refused("create a queue pair"));
        }
        // SAFETY: the library's object, whose number doesn't change.
        let number = unsafe { (*qp).qp_num };
        let name = HostQp(self.name());
        self.qps.insert(name, Pair { qp, queue });
        self.queues[queue].used += self.info.sends + self.info.receives;
        let mut attributes = QpAttr {
            qp_state: state::INIT,
            qp_access_flags: access.bits(),
            port_num: self.info.port,
            ..QpAttr::default()
        };
        let mask = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
        if let Err(error) = self.modify("initialise a queue pair", name, &mut attributes, mask) {
            self.destroy_qp(name);
            return Err(error);
        }
        Ok((name, number))
    }

    fn receive_from(&mut self, qp: HostQp, with: &Receiving) -> Result<(), RnicError> {
        let mut attributes = QpAttr {
            qp_state: state::RTR,
            path_mtu: u32::from(with.mtu),
            rq_psn: with.end.psn,
            dest_qp_num: with.end.number,
            ah_attr: AhAttr {
                dgid: abi::RawGid(with.end.gid),
                sgid_index: self.gid_index,
                hop_limit: with.hop_limit,
                traffic_class: with.traffic_class,
                is_global: 1,
                port_num: self.info.port,
                ..AhAttr::default()
            },
            max_dest_rd_atomic: with.served_reads,
            min_rnr_timer: with.min_rnr_timer,
            qp_access_flags: with.access.bits(),
            ..QpAttr::default()
        };
        let mask = mask::STATE
            | mask::AV
            | mask::PATH_MTU
            | mask::DEST_QPN
            | mask::RQ_PSN
            | mask::MAX_DEST_RD_ATOMIC
            | mask::MIN_RNR_TIMER
            | mask::ACCESS_FLAGS;
        self.modify("connect a queue pair", qp, &mut attributes, mask)
    }

    fn send_to(&mut self, qp: HostQp, with: &Sending) -> Result<(), RnicError> {
        let mut attributes = QpAttr {
            qp_state: state::RTS,
            sq_psn: with.psn,
            timeout: with.timeout,
            retry_cnt: with.retry_count,
            rnr_retry: with.rnr_retry,
            max_rd_atomic: with.reads,
            ..QpAttr::default()
        };
        let mask = mask::STATE
            | mask::SQ_PSN
            | mask::TIMEOUT
            | mask::RETRY_CNT
            | mask::RNR_RETRY
            | mask::MAX_QP_RD_ATOMIC;
        self.modify("let a queue pair send", qp, &mut attributes, mask)
    }

    fn destroy_qp(&mut self, qp: HostQp) {
        if let Some(pair) = self.qps.remove(&qp) {
            // SAFETY: created above, and not used any more; its events were acknowledged when they were consumed.
            unsafe { (self.library.functions.destroy_qp)(pair.qp) };
            if let Some(queue) = self.queues.get_mut(pair.queue) {
                queue.used = queue.used.saturating_sub(self.info.sends + self.info.receives);
            }
        }
    }

    fn post_send(&mut self, qp: HostQp, request: &HostRequest) -> Result<(), RnicError> {
        let what = "take a send request";
        let pair = self.qps.get(&qp).ok_or(RnicError::Gone("queue pair"))?;
        let mut sges = elements(&request.sges);
        let rdma = |remote_addr, rkey| Target { rdma: Rdma { remote_addr, rkey } };
        let (opcode, immediate, wr) = match request.operation {
            Operation::Send { immediate: None } => (opcode::SEND, None, rdma(0, 0)),
            Operation::Send { immediate } => (opcode::SEND_WITH_IMM, immediate, rdma(0, 0)),
            Operation::Write { address, rkey, immediate: None } => (opcode::WRITE, None, rdma(address, rkey)),
            Operation::Write { address, rkey, immediate } => {
                (opcode::WRITE_WITH_IMM, immediate, rdma(address, rkey))
            }
            Operation::Read { address, rkey } => (opcode::READ, None, rdma(address, rkey)),
            Operation::CompareSwap { address: remote_addr, rkey, compare: compare_add, swap } => {
                let atomic = Atomic { remote_addr, compare_add, swap, rkey };
                (opcode::CMP_AND_SWP, None, Target { atomic })
            }
            Operation::FetchAdd { address: remote_addr, rkey, add: compare_add } => {
                let atomic = Atomic { remote_addr, compare_add, swap: 0, rkey };
                (opcode::FETCH_AND_ADD, None, Target { atomic })
            }
        };
        let flags =
            [(request.fence, send::FENCE), (request.solicited, send::SOLICITED), (true, send::SIGNALED)];
        let mut wr = SendWr {
            wr_id: request.wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: c_int::try_from(sges.len()).unwrap_or(c_int::MAX),
            opcode,
            send_flags: flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag),
            imm_data: immediate.unwrap_or_default(),
            wr,
            qp_type: 0,
            bind_mw: [0; 6],
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a context that is open for as long as `self`; its table of operations doesn't change.
        let post = unsafe { (*self.context).ops.post_send }.ok_or_else(|| refused(what))?;
        // SAFETY: the queue pair exists; request and elements live during the call, which copies them.
        done(what, unsafe { post(pair.qp, &raw mut wr, &raw mut bad) })
    }

    fn post_receive(&mut self, qp: HostQp, wr_id: u64, sges: &SgeList) -> Result<(), RnicError> {
        let what = "take a receive";
        let pair = self.qps.get(&qp).ok_or(RnicError::Gone("queue pair"))?;
        let mut sges = elements(sges);
        let mut wr = RecvWr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: c_int::try_from(sges.len()).unwrap_or(c_int::MAX),
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_send`.
        let post = unsafe { (*self.context).ops.post_recv }.ok_or_else(|| refused(what))?;
        // SAFETY: as in `post_send`.
        done(what, unsafe { post(pair.qp, &raw mut wr, &raw mut bad) })
    }

    fn poll(&mut self, into: &mut Vec<HostCompletion>) {
        // SAFETY: as in `post_send`.
        let Some(poll) = (unsafe { (*self.context).ops.poll_cq }) else { return };
        let mut batch = [Wc::default(); BATCH];
        for queue in &self.queues {
            // SAFETY: a completion queue that exists, and room for as many completions as the call may write.
            let count = unsafe { poll(queue.cq, c_int::try_from(BATCH).unwrap_or(0), batch.as_mut_ptr()) };
            for wc in batch.iter().take(usize::try_from(count).unwrap_or(0)) {
                into.push(HostCompletion {
                    wr_id: wc.wr_id,
                    status: status(wc.status),
                    length: wc.byte_len,
                    write: wc.opcode == abi::WC_RECV_WRITE_IMM,
                    immediate: (wc.wc_flags & abi::WC_WITH_IMM != 0).then_some(wc.imm_data),
                });
            }
        }
    }

    fn events(&mut self, into: &mut Vec<(HostQp, HostEvent)>) {
        for _ in 0..EVENTS {
            let mut found = AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
            // SAFETY: an open context, whose descriptor doesn't block.
            if unsafe { (self.library.functions.get_async_event)(self.context, &raw mut found) } != 0 {
                return;
            }
            let what = match found.event_type {
                event::QP_FATAL => Some(HostEvent::Fatal),
                event::QP_REQ_ERR => Some(HostEvent::Request),
                event::QP_ACCESS_ERR => Some(HostEvent::Access),
                _ => None,
            };
            let whose = self.qps.iter().find(|(_, pair)| pair.qp.cast::<c_void>() == found.element);
            if let (Some(what), Some((qp, _))) = (what, whose) {
                into.push((*qp, what));
            }
            // SAFETY: consumed above, and acknowledged once.
            unsafe { (self.library.functions.ack_async_event)(&raw mut found) };
        }
    }

    fn arm(&mut self) {
        for _ in 0..EVENTS {
            let (mut cq, mut user) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a channel that exists, whose descriptor doesn't block.
            if unsafe { (self.library.functions.get_cq_event)(self.channel, &raw mut cq, &raw mut user) } != 0
            {
                break;
            }
            // SAFETY: the event's completion queue.
            unsafe { (self.library.functions.ack_cq_events)(cq, 1) };
        }
        // SAFETY: as in `post_send`.
        let Some(arm) = (unsafe { (*self.context).ops.req_notify_cq }) else { return };
        for queue in &self.queues {
            // SAFETY: a completion queue that exists.
            unsafe { arm(queue.cq, 0) };
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut fds = Vec::new();
        if !self.channel.is_null() {
            // SAFETY: the channel lives as long as `self`, its descriptor is open.
            fds.push(unsafe { BorrowedFd::borrow_raw((*self.channel).fd) });
        }
        // SAFETY: the context lives as long as `self`, its descriptor is open.
        fds.push(unsafe { BorrowedFd::borrow_raw((*self.context).async_fd) });
        fds
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let names: Vec<_> = self.qps.keys().copied().collect();
        for qp in names {
            self.destroy_qp(qp);
        }
        let names: Vec<_> = self.mrs.keys().copied().collect();
        for mr in names {
            self.deregister(mr);
        }
        let names: Vec<_> = self.pds.keys().copied().collect();
        for pd in names {
            self.free_pd(pd);
        }
        for queue in self.queues.drain(..) {
            // SAFETY: nothing uses it any more.
            unsafe { (self.library.functions.destroy_cq)(queue.cq) };
        }
        if !self.channel.is_null() {
            // SAFETY: nothing uses it any more.
            unsafe { (self.library.functions.destroy_comp_channel)(self.channel) };
        }
        // SAFETY: nothing of it is left.
        unsafe { (self.library.functions.close_device)(self.context) };
    }
}
