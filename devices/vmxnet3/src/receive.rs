//! RX queues: copying frames into buffers.

use dma::access::CopyFault;
use dma::{Dma, DmaFault};

use crate::descriptors::{Cursor, RxChecksum, RxCompletion, RxDescriptor};
use crate::frame::{FrameBytes, MacKind};
use crate::registers::QueueError;
use crate::shared_area::RxLayout;
use crate::transmit::Traffic;

/// Limit of buffers of a frame: those of the driver's socket buffers (17 pages and a head).
const PIECES_MAX: usize = 18;
/// Limit of BODY buffers of ring 0 that a frame skips; the next frame skips the rest.
const SKIP_MAX: u32 = 64;
/// Number of later buffers that are requested together with a not-present one.
const LATE_AHEAD: u32 = 64;

/// A queue of an active device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RxQueue {
    pub layout: RxLayout,
    pub next: [Cursor; 2],
    pub completion: Cursor,
    pub stopped: Option<u32>,
    pub stats: RxStats,
}

/// Statistics in the order of the queue's entry. Received frames are never coalesced, so LRO counts stay 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct RxStats {
    pub unicast: Traffic,
    pub multicast: Traffic,
    pub broadcast: Traffic,
    pub out_of_buffers: u64,
    pub errors: u64,
}

impl RxStats {
    pub fn words(&self) -> [u64; 10] {
        let Self { unicast, multicast, broadcast, out_of_buffers, errors } = *self;
        [
            0,
            0,
            unicast.packets,
            unicast.bytes,
            multicast.packets,
            multicast.bytes,
            broadcast.packets,
            broadcast.bytes,
            out_of_buffers,
            errors,
        ]
    }
}

/// Why a queue refused a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RxFailure {
    /// Too few buffers are posted; the driver may post more.
    NoBuffers,
    /// It needs more buffers than the limit.
    TooLong,
    /// The sender's memory is invalid; nothing was received.
    Source(DmaFault),
    /// Its buffers are not-present memory, which was requested.
    Late,
    /// The queue must be stopped.
    Queue(QueueError),
}

impl From<DmaFault> for RxFailure {
    fn from(fault: DmaFault) -> Self {
        Self::Queue(fault.into())
    }
}

/// Destination of a piece of a frame.
#[derive(Clone, Copy)]
struct Target {
    ring: usize,
    index: u32,
    address: u64,
    len: usize,
}

impl RxQueue {
    pub fn new(layout: RxLayout) -> Self {
        Self {
            layout,
            next: [Cursor::START; 2],
            completion: Cursor::START,
            stopped: None,
            stats: RxStats::default(),
        }
    }

    fn peek(&self, memory: &impl Dma, ring: usize, at: Cursor) -> Result<Option<RxDescriptor>, RxFailure> {
        if self.layout.ring_sizes[ring] == 0 {
            return Ok(None);
        }
        let found = RxDescriptor::load(memory, at.address(self.layout.rings[ring]), at.generation)?;
        match found {
            Some(RxDescriptor { len: 0, .. }) => Err(RxFailure::Queue(QueueError::SmallBuffer)),
            found => Ok(found),
        }
    }

    /// Reserves buffers for `len` bytes: a HEAD buffer of ring 0, then BODY buffers that follow it there (drivers below revision 7) or are
    /// in ring 1. Returns their number, and the rings' positions behind them.
    fn reserve(
        &mut self,
        memory: &impl Dma,
        len: usize,
        targets: &mut [Target; PIECES_MAX],
    ) -> Result<(usize, [Cursor; 2]), RxFailure> {
        let [size0, size1] = self.layout.ring_sizes;
        let mut skipped = 0;
        let head = loop {
            match self.peek(memory, 0, self.next[0])? {
                Some(descriptor) if !descriptor.body => break descriptor,
                Some(_) if skipped < SKIP_MAX => {
                    // Skipped for good: the driver reclaims all buffers up to the next completed one.
                    self.next[0] = self.next[0].after(size0);
                    skipped += 1;
                }
                _ => return Err(RxFailure::NoBuffers),
            }
        };
        let mut next = self.next;
        let (mut left, mut count) = (len, 0);
        let mut descriptor = Some((0, head));
        while let Some((ring, found)) = descriptor.take() {
            if count == PIECES_MAX {
                return Err(RxFailure::TooLong);
            }
            let now = left.min(usize::try_from(found.len).unwrap_or(0));
            targets[count] = Target { ring, index: next[ring].next, address: found.address, len: now };
            count += 1;
            left -= now;
            next[ring] = next[ring].after(if ring == 0 { size0 } else { size1 });
            if left == 0 {
                return Ok((count, next));
            }
            descriptor = match self.peek(memory, 0, next[0])? {
                Some(body) if body.body => Some((0, body)),
                _ => match self.peek(memory, 1, next[1])? {
                    Some(body) if body.body => Some((1, body)),
                    Some(_) => return Err(RxFailure::Queue(QueueError::NotSupported)),
                    None => None,
                },
            };
        }
        Err(RxFailure::NoBuffers)
    }

    /// Whether buffers are not-present memory. Requests it, and the buffers of the next frames.
    #[cold]
    fn is_late(&self, memory: &impl Dma, targets: &[Target], mut next: Cursor) -> bool {
        // Evaluated for all pieces, so that all their pages are requested.
        let awaited = targets.iter().filter(|to| memory.awaits(to.address, to.len as u64, false)).count();
        for _ in 0..LATE_AHEAD {
            let Ok(Some(buffer)) = self.peek(memory, 0, next) else { break };
            memory.awaits(buffer.address, u64::from(buffer.len), false);
            next = next.after(self.layout.ring_sizes[0]);
        }
        awaited > 0
    }

    /// Whether a HEAD buffer is posted.
    pub fn has_buffer(&self, memory: &impl Dma) -> bool {
        self.stopped.is_none() && matches!(self.peek(memory, 0, self.next[0]), Ok(Some(_)))
    }

    /// Copies a frame into buffers and completes them. `id` is the queue's number, `queues` the number of queues.
    pub fn deliver<M: Dma>(
        &mut self,
        memory: &M,
        (id, queues): (u32, u32),
        frame: &FrameBytes<'_, M>,
        vlan: Option<u16>,
        checksum: RxChecksum,
    ) -> Result<(), RxFailure> {
        let mut targets = [Target { ring: 0, index: 0, address: 0, len: 0 }; PIECES_MAX];
        let total = frame.len();
        let (count, next) = self.reserve(memory, total, &mut targets)?;
        if memory.is_late() && self.is_late(memory, &targets[..count], next[0]) {
            return Err(RxFailure::Late);
        }
        let mut from = 0;
        for target in &targets[..count] {
            frame.copy(from, memory, target.address, target.len).map_err(|fault| match fault {
                CopyFault::Source(fault) => RxFailure::Source(fault),
                CopyFault::Destination(fault) => fault.into(),
            })?;
            from += target.len;
        }
        for (position, target) in targets[..count].iter().enumerate() {
            let completion = RxCompletion {
                index: target.index,
                sop: position == 0,
                eop: position + 1 == count,
                ring_id: if target.ring == 0 { id } else { id + queues },
                len: u32::try_from(target.len).unwrap_or(0),
                vlan,
                checksum,
            };
            completion.store(memory, self.layout.completion, self.completion)?;
            self.completion = self.completion.after(self.layout.completion_size);
        }
        self.next = next;
        let traffic = match MacKind::of(crate::frame::destination(frame.head())) {
            MacKind::Unicast => &mut self.stats.unicast,
            MacKind::Multicast => &mut self.stats.multicast,
            MacKind::Broadcast => &mut self.stats.broadcast,
        };
        traffic.add(1, total);
        Ok(())
    }
}
