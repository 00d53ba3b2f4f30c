//! The verbs objects of a link: a queue pair with its completion queues and buffers, created and connected.

#![allow(unsafe_code)] // Calls a C library and the targets of its inline functions, and copies to memory that a device reads.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;

use ibverbs::abi::{
    self, AhAttr, Channel, Cq, HostSge, Mr, Pd, Qp, QpAttr, QpCap, QpInitAttr, Rdma, RecvWr, SendWr, Target,
    Wc, mask, opcode, send, state,
};
use ibverbs::outcome;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::device::Device;
use super::flow::{Flow, HEADER, Port, Shape};
use super::handshake::Offer;

/// Send buffers and receive buffers of a link, 1 MiB in all. A message is one packet: it must fit the path MTU, of at most 4096 bytes.
/// Longer messages fail with rdma_rxe after packet loss (docs/decisions/0045-one-packet-per-rdma-message.md).
const SENDS: Shape = Shape { count: 128, size: 4096 };
pub(super) const RECEIVES: Shape = Shape { count: 128, size: 4096 };
/// Messages up to this length are copied into the request, if the device supports it: the device then needn't read memory. Bytes.
const INLINE: u32 = 128;
/// Code of the acknowledgment timeout: 4.096 µs · 2^15 = 134 ms. (A later packet reveals most losses earlier.)
const TIMEOUT: u8 = 15;
/// Retries after that timeout: the device gives up after 7 · 134 ms = 0.94 s, just after the link's silence timeout of 0.9 s. The code 7
/// must not be used: rdma_rxe takes it for no limit (docs/decisions/0045-one-packet-per-rdma-message.md).
const RETRIES: u8 = 6;
/// Retries when the peer has no receive buffer, which flow control prevents; and the code of the pause before each, 0.01 ms.
const RETRIES_NOT_READY: u8 = 3;
const PAUSE_NOT_READY: u8 = 1;
const HOP_LIMIT: u8 = 64;
/// Completions per poll.
pub(super) const BATCH: usize = 16;

/// Why a queue pair can't be created or connected.
#[derive(Debug, thiserror::Error)]
#[error("the RDMA device {device} refuses to {what}: {error}{}", advice(error))]
pub(super) struct Refused {
    device: String,
    what: &'static str,
    error: io::Error,
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => {
            "; it pins 1 MiB per link: raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)"
        }
        _ => "",
    }
}

/// The library's objects. One thread at a time uses them.
pub(super) struct Objects {
    device: Arc<Device>,
    pd: *mut Pd,
    memory: *mut c_void,
    mr: *mut Mr,
    channel: *mut Channel,
    /// Completion queues of sends, which raises events only when armed for a waiting send, and of receives.
    pub(super) send_cq: *mut Cq,
    pub(super) receive_cq: *mut Cq,
    qp: *mut Qp,
    /// Longest message that can be sent inline, bytes.
    inline: u32,
}

// SAFETY: the library's objects may be used from any thread, and `Objects` owns them exclusively.
unsafe impl Send for Objects {}

/// Bytes of all send and receive buffers.
const MEMORY: usize =
    (SENDS.count as usize) * (SENDS.size as usize) + (RECEIVES.count as usize) * (RECEIVES.size as usize);

fn size_of(shape: Shape) -> usize {
    usize::try_from(shape.size).unwrap_or(usize::MAX)
}

impl Objects {
    fn empty(device: &Arc<Device>) -> Self {
        let device = Arc::clone(device);
        let (pd, mr, channel) = (null_mut(), null_mut(), null_mut());
        let (send_cq, receive_cq, qp) = (null_mut(), null_mut(), null_mut());
        Self { device, pd, memory: null_mut(), mr, channel, send_cq, receive_cq, qp, inline: INLINE }
    }

    fn refused(&self, what: &'static str, error: io::Error) -> Refused {
        Refused { device: self.device.info.device.clone(), what, error }
    }

    /// Checks the result of a call that creates an object.
    fn made<T>(&self, what: &'static str, object: *mut T) -> Result<*mut T, Refused> {
        if object.is_null() { Err(self.refused(what, io::Error::last_os_error())) } else { Ok(object) }
    }

    fn make(device: &Arc<Device>) -> Result<Self, Refused> {
        let mut all = Self::empty(device);
        let (functions, context) = (&device.library.functions, device.context);
        // SAFETY: an open context.
        all.pd = all.made("allocate a protection domain", unsafe { (functions.alloc_pd)(context) })?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, where there is none.
        let memory = unsafe { mmap_anonymous(null_mut(), MEMORY, protection, flags) };
        all.memory = memory.map_err(|error| all.refused("have buffers", error.into()))?;
        let start = u64::try_from(all.memory.expose_provenance()).unwrap_or(0);
        let (register, access) = (functions.reg_mr_iova, abi::ACCESS_LOCAL_WRITE);
        // SAFETY: memory that stays mapped until it is deregistered.
        let mr = unsafe { register(all.pd, all.memory, MEMORY, start, access) };
        all.mr = all.made("register buffers", mr)?;
        // SAFETY: as above.
        let channel = unsafe { (functions.create_comp_channel)(context) };
        all.channel = all.made("create a completion channel", channel)?;
        let flags = fcntl_getfl(all.fd());
        let flags = flags.and_then(|flags| fcntl_setfl(all.fd(), flags | OFlags::NONBLOCK));
        flags.map_err(|error| all.refused("have a completion channel that doesn't block", error.into()))?;
        let queue = |count: u16| {
            // SAFETY: an open context and its channel.
            unsafe { (functions.create_cq)(context, c_int::from(count), null_mut(), all.channel, 0) }
        };
        let (send_cq, receive_cq) = (queue(SENDS.count), queue(RECEIVES.count));
        // Stored before either is checked, so that `drop` destroys both.
        (all.send_cq, all.receive_cq) = (send_cq, receive_cq);
        all.made("create a completion queue", send_cq)?;
        all.made("create a completion queue", receive_cq)?;
        all.qp = all.create_qp(INLINE).or_else(|_| all.create_qp(0))?;
        Ok(all)
    }

    fn create_qp(&mut self, inline: u32) -> Result<*mut Qp, Refused> {
        let mut init = QpInitAttr {
            qp_context: null_mut(),
            send_cq: self.send_cq,
            recv_cq: self.receive_cq,
            srq: null_mut(),
            cap: QpCap {
                max_send_wr: SENDS.count.into(),
                max_recv_wr: RECEIVES.count.into(),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a protection domain and completion queues that live.
        let qp = unsafe { (self.device.library.functions.create_qp)(self.pd, &raw mut init) };
        self.inline = init.cap.max_inline_data.min(INLINE);
        self.made("create a queue pair", qp)
    }

    fn modify(&self, what: &'static str, attributes: &mut QpAttr, mask: i32) -> Result<(), Refused> {
        // SAFETY: a queue pair that lives, and attributes that do for the call.
        let result = unsafe { (self.device.library.functions.modify_qp)(self.qp, attributes, mask) };
        outcome(result).map_err(|error| self.refused(what, error))
    }

    /// The completion channel's descriptor. It becomes readable by events of armed completion queues.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel isn't null where this is called, and lives as long as `self`, as does its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    /// Offset of a send buffer in the memory.
    fn send_buffer(buffer: u16) -> usize {
        usize::from(buffer) * size_of(SENDS)
    }

    fn receive_buffer(buffer: u16) -> usize {
        usize::from(SENDS.count) * size_of(SENDS) + usize::from(buffer) * size_of(RECEIVES)
    }

    fn element(&self, offset: usize, length: u32) -> HostSge {
        let addr = u64::try_from(self.memory.expose_provenance() + offset).unwrap_or(0);
        // SAFETY: the library's object, whose keys don't change.
        HostSge { addr, length, lkey: unsafe { (*self.mr).lkey } }
    }

    /// The memory of a received message. An error if the device's report is out of range.
    pub(super) fn message(&self, buffer: u16, length: u32) -> io::Result<*const [u8]> {
        if buffer >= RECEIVES.count || length > RECEIVES.size {
            return Err(io::Error::other("its RDMA device reports a message that can't be"));
        }
        let at = self.memory.cast::<u8>().wrapping_add(Self::receive_buffer(buffer));
        Ok(std::ptr::slice_from_raw_parts(at, usize::try_from(length).unwrap_or(0)))
    }

    /// Polls completions of one queue. Returns their number.
    pub(super) fn poll(&self, cq: *mut Cq, into: &mut [Wc; BATCH]) -> io::Result<usize> {
        // SAFETY: an open context, whose table of operations doesn't change.
        let poll = unsafe { (*self.device.context).ops.poll_cq }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: a completion queue that lives, and room for the number of completions that is passed.
        let count = unsafe { poll(cq, c_int::try_from(BATCH).unwrap_or(0), into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| io::Error::other("its RDMA device's completions can't be read"))
    }

    /// Arms a completion queue: its next completion makes the channel's descriptor readable. The caller must poll again, for earlier
    /// completions.
    pub(super) fn arm(&self, cq: *mut Cq) -> io::Result<()> {
        // SAFETY: as in `poll`.
        let arm = unsafe { (*self.device.context).ops.req_notify_cq }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: a completion queue that lives.
        outcome(unsafe { arm(cq, 0) })
    }

    /// Acknowledges all pending events of the channel.
    pub(super) fn take_events(&self) {
        let functions = &self.device.library.functions;
        loop {
            let (mut cq, mut user) = (null_mut(), null_mut());
            // SAFETY: a channel that lives, whose descriptor doesn't block.
            if unsafe { (functions.get_cq_event)(self.channel, &raw mut cq, &raw mut user) } != 0 {
                return;
            }
            // SAFETY: the event named this queue. Each event is acknowledged once, as destroying the queue requires.
            unsafe { (functions.ack_cq_events)(cq, 1) };
        }
    }
}

impl Port for Objects {
    fn send(&mut self, buffer: u16, header: [u8; HEADER], part: &[u8]) -> io::Result<()> {
        let length = HEADER + part.len();
        if buffer >= SENDS.count || length > size_of(SENDS) {
            return Err(io::Error::other("a message is longer than its buffer; this is a bug"));
        }
        let at = self.memory.cast::<u8>().wrapping_add(Self::send_buffer(buffer));
        // SAFETY: the buffer lies within the memory and has room for both; no request uses it (see `Port::send`).
        unsafe {
            std::ptr::copy_nonoverlapping(header.as_ptr(), at, HEADER);
            std::ptr::copy_nonoverlapping(part.as_ptr(), at.wrapping_add(HEADER), part.len());
        }
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let mut element = self.element(Self::send_buffer(buffer), length);
        let inline = if length <= self.inline { send::INLINE } else { 0 };
        let mut request = SendWr {
            wr_id: buffer.into(),
            next: null_mut(),
            sg_list: &raw mut element,
            num_sge: 1,
            opcode: opcode::SEND,
            send_flags: send::SIGNALED | inline,
            imm_data: [0; 4],
            wr: Target { rdma: Rdma { remote_addr: 0, rkey: 0 } },
            qp_type: 0,
            bind_mw: [0; 6],
        };
        let mut bad = null_mut();
        // SAFETY: as in `poll`.
        let post = unsafe { (*self.device.context).ops.post_send }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the queue pair lives; request and element do for the call, which copies them.
        outcome(unsafe { post(self.qp, &raw mut request, &raw mut bad) })
    }

    fn receive(&mut self, buffer: u16) -> io::Result<()> {
        let mut element = self.element(Self::receive_buffer(buffer), RECEIVES.size);
        let mut request =
            RecvWr { wr_id: buffer.into(), next: null_mut(), sg_list: &raw mut element, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: as in `poll`.
        let post = unsafe { (*self.device.context).ops.post_recv }.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: as in `send`. The buffer lies within the memory, and this program doesn't read it until the device has completed the
        // receive.
        outcome(unsafe { post(self.qp, &raw mut request, &raw mut bad) })
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        let functions = &self.device.library.functions;
        // SAFETY: `make` created each object that isn't null. Nothing uses them any more, and each goes before the objects that it depends
        // on.
        unsafe {
            if !self.qp.is_null() {
                (functions.destroy_qp)(self.qp);
            }
            for cq in [self.send_cq, self.receive_cq] {
                if !cq.is_null() {
                    (functions.destroy_cq)(cq);
                }
            }
            if !self.channel.is_null() {
                (functions.destroy_comp_channel)(self.channel);
            }
            if !self.mr.is_null() {
                (functions.dereg_mr)(self.mr);
            }
            if !self.memory.is_null() {
                // Fails only for memory that isn't mapped, and this is.
                let _ = munmap(self.memory, MEMORY);
            }
            if !self.pd.is_null() {
                (functions.dealloc_pd)(self.pd);
            }
        }
    }
}

/// A queue pair without a peer. Its receives are posted.
pub(super) struct Unconnected {
    objects: Objects,
    psn: u32,
}

impl Unconnected {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, Refused> {
        let mut objects = Objects::make(device)?;
        let mut attributes =
            QpAttr { qp_state: state::INIT, port_num: device.info.port, ..QpAttr::default() };
        let what = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
        objects.modify("initialise a queue pair", &mut attributes, what)?;
        for buffer in 0..RECEIVES.count {
            let posted = objects.receive(buffer);
            posted.map_err(|error| objects.refused("take receives", error))?;
        }
        let mut psn = [0; 4];
        // If the system has no random bytes, zeros are a valid PSN as well.
        let _ = rustix::rand::getrandom(&mut psn[..3], rustix::rand::GetRandomFlags::empty());
        Ok(Self { objects, psn: u32::from_le_bytes(psn) })
    }

    /// The data that the peer needs.
    pub(super) fn offer(&self) -> Offer {
        let device = &self.objects.device;
        // SAFETY: the library's object, whose number doesn't change.
        let number = unsafe { (*self.objects.qp).qp_num };
        let gid = device.address().octets();
        Offer { number, psn: self.psn, gid, mtu: device.info.mtu, receives: RECEIVES }
    }

    /// Connects the queue pair with the peer's.
    pub(super) fn connect(self, there: &Offer) -> Result<Ready, Refused> {
        let info = &self.objects.device.info;
        // The smaller code: 1 to 5 for 256 to 4096 bytes.
        let mtu = info.mtu.min(there.mtu);
        let mut attributes = QpAttr {
            qp_state: state::RTR,
            path_mtu: mtu.into(),
            rq_psn: there.psn,
            dest_qp_num: there.number,
            ah_attr: AhAttr {
                dgid: abi::RawGid(there.gid),
                sgid_index: info.gid_index,
                hop_limit: HOP_LIMIT,
                is_global: 1,
                port_num: info.port,
                ..AhAttr::default()
            },
            max_dest_rd_atomic: 1,
            min_rnr_timer: PAUSE_NOT_READY,
            ..QpAttr::default()
        };
        let what = mask::STATE
            | mask::AV
            | mask::PATH_MTU
            | mask::DEST_QPN
            | mask::RQ_PSN
            | mask::MAX_DEST_RD_ATOMIC
            | mask::MIN_RNR_TIMER;
        self.objects.modify("connect a queue pair", &mut attributes, what)?;
        let mut attributes = QpAttr {
            qp_state: state::RTS,
            sq_psn: self.psn,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES_NOT_READY,
            max_rd_atomic: 1,
            ..QpAttr::default()
        };
        let what = mask::STATE
            | mask::SQ_PSN
            | mask::TIMEOUT
            | mask::RETRY_CNT
            | mask::RNR_RETRY
            | mask::MAX_QP_RD_ATOMIC;
        self.objects.modify("let a queue pair send", &mut attributes, what)?;
        let packet = Shape { size: SENDS.size.min(128 << mtu), ..SENDS };
        let flow = Flow::new(packet, RECEIVES, there.receives);
        Ok(Ready { objects: self.objects, flow })
    }
}

/// A connected queue pair.
pub(super) struct Ready {
    pub(super) objects: Objects,
    pub(super) flow: Flow,
}
