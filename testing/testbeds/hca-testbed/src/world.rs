//! Guests of an engine, with their objects.

use dma::{Dma, HeapMemory};
use hca::attributes::{Access, QpAttributeMask as Mask, QpAttributes, QpKind, QpState};
use hca::engine::{DeviceConfig, Engine, EngineConfig, MrInfo, MrInit, Progress, QpInfo, QpInit, SrqInit};
use hca::error::VerbsError;
use hca::limits::{Capabilities, Limits};
use hca::names::{CqHandle, DeviceId, Gid, PdHandle, QpHandle, Qpn, SegmentId, SrqHandle};
use hca::provider::Sink;
use hca::work::{AsyncEvent, ReceiveRequest, SendRequest, Sge};

use crate::{CompletionRing, ReceiveRing, Rings, SendRing};

/// Events that the engine sent to the guests.
#[derive(Debug, Default)]
pub struct Events {
    /// Completion events, in order.
    pub completions: Vec<(DeviceId, CqHandle)>,
    /// Asynchronous events, in order.
    pub others: Vec<(DeviceId, AsyncEvent)>,
    /// Whether the event ring accepts nothing.
    pub full: bool,
}

impl Sink for Events {
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool {
        if !self.full {
            self.completions.push((device, cq));
        }
        !self.full
    }

    fn async_event(&mut self, device: DeviceId, event: AsyncEvent) {
        self.others.push((device, event));
    }
}

/// The IPv4 address 10.0.0.`number` as a GID.
#[must_use]
pub fn gid(number: u8) -> Gid {
    Gid(std::net::Ipv4Addr::new(10, 0, 0, number).to_ipv6_mapped().octets())
}

/// A locally administered MAC.
#[must_use]
pub fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

/// A guest: a device with one protection domain.
#[derive(Debug, Clone)]
pub struct Guest<M = HeapMemory> {
    /// Its device.
    pub device: DeviceId,
    /// Its RAM.
    pub memory: M,
    /// Its protection domain, in the kernel's context.
    pub pd: PdHandle,
    /// Its address, at GID index 0.
    pub gid: Gid,
}

/// A queue pair with its rings and completion queue.
#[derive(Debug, Clone)]
pub struct Connected {
    /// Its device.
    pub device: DeviceId,
    /// Its names.
    pub qp: QpInfo,
    /// Its completion queue, for both directions.
    pub cq: CqHandle,
    /// Send ring.
    pub sends: SendRing,
    /// Receive ring; unused with a shared receive queue.
    pub receives: ReceiveRing,
    /// Completion ring.
    pub completions: CompletionRing,
}

/// An engine, its guests, and the time.
pub struct World<M: Dma + Clone + 'static = HeapMemory> {
    /// The engine.
    pub engine: Engine<Rings<M>>,
    /// Events of the engine.
    pub events: Events,
    /// Current time, nanoseconds.
    pub now: u64,
    guests: u8,
}

impl<M: Dma + Clone + 'static> Default for World<M> {
    fn default() -> Self {
        Self::new(EngineConfig::default())
    }
}

#[expect(clippy::missing_panics_doc, reason = "for tests: what a test sets up wrongly shall panic")]
#[expect(clippy::unwrap_used, reason = "for tests: what a test sets up wrongly shall panic")]
impl<M: Dma + Clone + 'static> World<M> {
    /// A world without guests.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self { engine: Engine::new(config), events: Events::default(), now: 1, guests: 0 }
    }

    /// A world whose guests' numbers, and so addresses, follow `last`: a host beside another one.
    #[must_use]
    pub fn after(last: u8) -> Self {
        Self { guests: last, ..Self::new(EngineConfig::default()) }
    }

    /// Adds a guest with that RAM, in segment 1, with the address [`gid`] of its number.
    pub fn guest(&mut self, memory: M) -> Guest<M> {
        self.guests += 1;
        let config = DeviceConfig {
            name: format!("guest{}", self.guests),
            segment: SegmentId(1),
            limits: Limits::default(),
            capabilities: Capabilities::default(),
        };
        let device = self.engine.add_device(config, memory.clone()).unwrap();
        self.engine.bind_gid(device, 0, gid(self.guests), mac(self.guests)).unwrap();
        self.engine.set_arm_exact(device, true);
        let pd = self.engine.create_pd(device, hca::names::ContextHandle(0)).unwrap();
        Guest { device, memory, pd, gid: gid(self.guests) }
    }

    /// Registers contiguous guest memory under its own address.
    pub fn register(&mut self, guest: &Guest<M>, start: u64, length: u64, access: Access) -> MrInfo {
        let first = start & !0xFFF;
        let pages = (start % 4096 + length).div_ceil(4096);
        let pages = (0..pages).map(|page| first + page * 4096).collect();
        let init = MrInit { start, length, access: access.bits(), pages };
        self.engine.register_mr(guest.device, guest.pd, init).unwrap()
    }

    /// Creates a queue pair in RESET, with its own completion queue.
    pub fn queue_pair(&mut self, guest: &Guest<M>, kind: QpKind, srq: Option<SrqHandle>) -> Connected {
        let completions = CompletionRing::new(4096);
        let context = hca::names::ContextHandle(0);
        let cq = self.engine.create_cq(guest.device, context, 4096, completions.clone()).unwrap();
        self.queue_pair_on(guest, kind, srq, cq, completions)
    }

    /// Creates a queue pair in RESET on an existing completion queue.
    pub fn queue_pair_on(
        &mut self,
        guest: &Guest<M>,
        kind: QpKind,
        srq: Option<SrqHandle>,
        cq: CqHandle,
        completions: CompletionRing,
    ) -> Connected {
        let (sends, receives) = (SendRing::default(), ReceiveRing::default());
        let init = QpInit {
            pd: guest.pd,
            kind,
            send_cq: cq,
            receive_cq: cq,
            srq,
            signal_all: false,
            max_send_wr: 64,
            max_receive_wr: 64,
            max_send_sge: 4,
            max_receive_sge: 4,
        };
        let own = srq.is_none().then(|| receives.clone());
        let qp = self.engine.create_qp(guest.device, init, sends.clone(), own).unwrap();
        Connected { device: guest.device, qp, cq, sends, receives, completions }
    }

    /// Creates a shared receive queue.
    pub fn shared_queue(&mut self, guest: &Guest<M>, limit: u32) -> (SrqHandle, ReceiveRing) {
        let ring = ReceiveRing::default();
        let init = SrqInit { max_wr: 64, max_sge: 4, limit };
        (self.engine.create_srq(guest.device, guest.pd, init, ring.clone()).unwrap(), ring)
    }

    /// Modifies a queue pair.
    pub fn modify(
        &mut self,
        device: DeviceId,
        qp: QpHandle,
        mask: Mask,
        attributes: &QpAttributes,
    ) -> Result<(), VerbsError> {
        self.engine.modify_qp(device, qp, mask | Mask::STATE, attributes, &mut self.events)
    }

    /// Attributes to connect a queue pair, for all transitions.
    #[must_use]
    pub fn attributes(peer: Gid, qpn: Qpn) -> QpAttributes {
        let mut attributes = QpAttributes::in_reset();
        attributes.path_mtu = 3;
        attributes.qkey = 0x1234;
        attributes.rq_psn = 7;
        attributes.sq_psn = 7;
        attributes.destination_qpn = qpn;
        attributes.access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        attributes.max_rd_atomic = 4;
        attributes.max_dest_rd_atomic = 4;
        attributes.min_rnr_timer = 1;
        attributes.timeout = 1;
        attributes.retry_count = 2;
        attributes.rnr_retry = 2;
        attributes.address.dgid = peer;
        attributes
    }

    /// Moves a queue pair to RTS, or to a state on the way there.
    pub fn raise(&mut self, device: DeviceId, qp: QpHandle, kind: QpKind, to: QpState, with: &QpAttributes) {
        let mut with = *with;
        let steps = match kind {
            QpKind::Rc => [
                Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS,
                Mask::ADDRESS_VECTOR
                    | Mask::PATH_MTU
                    | Mask::DESTINATION_QPN
                    | Mask::RQ_PSN
                    | Mask::MAX_DEST_RD_ATOMIC
                    | Mask::MIN_RNR_TIMER,
                Mask::SQ_PSN | Mask::TIMEOUT | Mask::RETRY_COUNT | Mask::RNR_RETRY | Mask::MAX_RD_ATOMIC,
            ],
            QpKind::Uc => [
                Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS,
                Mask::ADDRESS_VECTOR | Mask::PATH_MTU | Mask::DESTINATION_QPN | Mask::RQ_PSN,
                Mask::SQ_PSN,
            ],
            QpKind::Ud => [Mask::PKEY_INDEX | Mask::PORT | Mask::QKEY, Mask::empty(), Mask::SQ_PSN],
            QpKind::Gsi => [Mask::PKEY_INDEX | Mask::QKEY, Mask::empty(), Mask::SQ_PSN],
        };
        let states = [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend];
        for (state, mask) in states.into_iter().zip(steps) {
            with.state = state;
            self.modify(device, qp, mask, &with).unwrap();
            if state == to {
                return;
            }
        }
    }

    /// Two connected queue pairs in RTS.
    pub fn connect(&mut self, a: &Guest<M>, b: &Guest<M>, kind: QpKind) -> (Connected, Connected) {
        let left = self.queue_pair(a, kind, None);
        let right = self.queue_pair(b, kind, None);
        self.join(a, &left, b, &right, kind);
        (left, right)
    }

    /// Moves two queue pairs in RESET to RTS, as peers.
    pub fn join(&mut self, a: &Guest<M>, left: &Connected, b: &Guest<M>, right: &Connected, kind: QpKind) {
        let to_right = Self::attributes(b.gid, right.qp.qpn);
        self.raise(left.device, left.qp.handle, kind, QpState::ReadyToSend, &to_right);
        let to_left = Self::attributes(a.gid, left.qp.qpn);
        self.raise(right.device, right.qp.handle, kind, QpState::ReadyToSend, &to_left);
    }

    /// Posts a send and rings the doorbell.
    pub fn send(&mut self, at: &Connected, request: SendRequest) {
        at.sends.post(request);
        self.engine.doorbell_send(at.device, at.qp.handle);
    }

    /// Posts a receive and rings the doorbell.
    pub fn receive(&mut self, at: &Connected, wr_id: u64, sges: &[Sge]) {
        at.receives.post(ReceiveRequest { wr_id, sges: sges.iter().copied().collect() });
        self.engine.doorbell_receive(at.device, at.qp.handle);
    }

    /// One poll.
    pub fn poll(&mut self) -> Progress {
        self.engine.poll(self.now, &mut self.events)
    }

    /// Polls until nothing is left to do now.
    pub fn settle(&mut self) {
        while self.poll().next.is_some_and(|next| next <= self.now) {}
    }

    /// Advances the time, with polls at the times that the engine returns.
    pub fn pass(&mut self, nanoseconds: u64) {
        let end = self.now + nanoseconds;
        loop {
            let next = self.poll().next.unwrap_or(u64::MAX);
            if next > end {
                break;
            }
            self.now = self.now.max(next);
        }
        self.now = end;
    }

    /// The state of a queue pair.
    #[must_use]
    pub fn state(&self, at: &Connected) -> QpState {
        self.engine.query_qp(at.device, at.qp.handle).unwrap().0.state
    }
}
