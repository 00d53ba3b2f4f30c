//! One queue pair without its thread: moves frames between two rings and a channel. The thread calls it on events; tests and the fuzz
//! target `net_frame` call it directly.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;

use machine::memory::{GuestAddressSpace, GuestMemory, GuestMemorySpace};
use telemetry::guest_log::GuestLog;
use virtio_bindings::virtio_net as b;

use super::backend::{NetChannel, Received, Sent};
use super::counters::Counters;
use super::frame::{FrameSink, FrameSource, Storage};
use super::header::{FRAME_MAX, FRAME_MIN, HEADER_LEN, VnetHeader, has};
use crate::device::{ActiveQueue, VirtioInterrupt};
use crate::queue::{self, Chain, GuestIoVecs, Ring, RingError, part, total_len};

/// Limit of frames moved in one direction before the other gets its turn and the guest its interrupt.
pub const BUDGET: usize = 64;

/// A guest error that concerns more than one frame: the device stops.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// A corrupted ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A receive buffer that isn't writable, or too small for the header.
    #[error(
        "Queue {queue}: a receive buffer has {readable} readable buffers and {writable} writable bytes; at least {HEADER_LEN} writable bytes and nothing readable are allowed"
    )]
    ReceiveBuffer {
        /// Index of the queue.
        queue: u16,
        /// Number of readable descriptors.
        readable: usize,
        /// Number of writable bytes.
        writable: u64,
    },
}

/// The next step of a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The budget is used up; more frames wait.
    More,
    /// The ring is empty: continue after a kick.
    NeedsKick,
    /// The backend has no frame, or accepts none: continue when its descriptor is ready.
    NeedsBackend,
    /// The backend has ended.
    Lost,
}

/// A receive buffer that the driver posted.
struct Posted {
    chain: Chain,
    vecs: GuestIoVecs,
    capacity: usize,
}

/// A frame whose first bytes are in the posted buffers and the rest in the spill buffer: it waits for more buffers.
#[derive(Clone, Copy)]
struct Waiting {
    received: Received,
    /// Number of its bytes in the spill buffer.
    spilled: usize,
}

/// A queue pair in use.
pub struct QueuePair {
    receive: Ring,
    transmit: Ring,
    channel: Box<dyn NetChannel>,
    features: u64,
    memory: GuestMemorySpace,
    counters: Arc<Counters>,
    log: Arc<GuestLog>,
    posted: VecDeque<Posted>,
    /// Sum of the capacities of `posted`.
    capacity: usize,
    waiting: Option<Waiting>,
    spill: Box<[u8]>,
    storage: Storage,
    /// Transmit chains whose buffers the backend still reads, by the channel's number.
    lent: BTreeMap<u32, u16>,
    lost: bool,
}

impl QueuePair {
    /// Connects two rings, set up by the driver under `features`, with a channel.
    pub fn new(
        receive: ActiveQueue,
        transmit: ActiveQueue,
        channel: Box<dyn NetChannel>,
        features: u64,
        memory: GuestMemorySpace,
        counters: Arc<Counters>,
        log: Arc<GuestLog>,
    ) -> Self {
        Self {
            receive: Ring::new(receive, features),
            transmit: Ring::new(transmit, features),
            channel,
            features,
            memory,
            counters,
            log,
            posted: VecDeque::new(),
            capacity: 0,
            waiting: None,
            spill: vec![0; FRAME_MAX].into_boxed_slice(),
            storage: Storage::default(),
            lent: BTreeMap::new(),
            lost: false,
        }
    }

    /// Checks the rings; call it once before anything else.
    pub fn check(&mut self) -> Result<(), GuestError> {
        let memory = self.memory.memory().into_inner();
        self.receive.check(&memory)?;
        self.transmit.check(&memory)?;
        // Receive buffers are popped when frames arrive, not when they are posted.
        self.receive.disable_kicks(&memory)?;
        Ok(())
    }

    /// The channel, to poll it.
    pub fn channel(&self) -> &dyn NetChannel {
        &*self.channel
    }

    /// The receive ring.
    pub fn receive_ring(&self) -> &Ring {
        &self.receive
    }

    /// The transmit ring.
    pub fn transmit_ring(&self) -> &Ring {
        &self.transmit
    }

    /// Records an error or a hang-up of the channel, from which nothing more can be read.
    pub fn hung_up(&mut self) {
        self.lose(&io::ErrorKind::UnexpectedEof.into());
    }

    /// Empties the channel's event.
    pub fn drain_channel(&mut self) {
        self.channel.drain();
    }

    /// Whether the backend still reads buffers of the guest.
    pub fn has_lent(&self) -> bool {
        !self.lent.is_empty()
    }

    /// Recalls lent buffers, before the queue stops.
    pub fn recall(&mut self) -> Result<(), GuestError> {
        self.channel.recall();
        let memory = self.memory.memory().into_inner();
        self.take_returned(&memory)?;
        // A frame that the channel doesn't report has been revoked, too.
        while let Some((_, head)) = self.lent.pop_first() {
            self.transmit.complete(&memory, head, 0)?;
        }
        Ok(())
    }

    /// Completes returned buffers; returns whether there were any.
    fn take_returned(&mut self, memory: &Arc<GuestMemory>) -> Result<bool, GuestError> {
        let mut any = false;
        while let Some(number) = self.channel.returned() {
            if let Some(head) = self.lent.remove(&number) {
                self.transmit.complete(memory, head, 0)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Whether the backend has ended.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Returns unused receive buffers to the ring, drops a frame that waits for more of them, and returns the queues and the channel.
    pub fn into_parts(mut self) -> (ActiveQueue, ActiveQueue, Box<dyn NetChannel>) {
        self.unpost();
        (self.receive.into_active(), self.transmit.into_active(), self.channel)
    }

    fn unpost(&mut self) {
        if self.waiting.take().is_some() {
            self.counters.receive_drop.increment();
        }
        for _ in self.posted.drain(..) {
            self.receive.undo_pop();
        }
        self.capacity = 0;
    }

    /// Whether one frame may fill several receive buffers.
    fn mergeable(&self) -> bool {
        has(self.features, b::VIRTIO_NET_F_MRG_RXBUF)
    }

    /// Capacity of the buffers that are popped before a frame is read, bytes: the longest frame that the guest accepts.
    fn wanted(&mut self) -> usize {
        if !self.mergeable() {
            return 1;
        }
        if let Some(length) = self.channel.waiting() {
            return HEADER_LEN + length;
        }
        let long = [
            b::VIRTIO_NET_F_GUEST_TSO4,
            b::VIRTIO_NET_F_GUEST_TSO6,
            b::VIRTIO_NET_F_GUEST_UFO,
            b::VIRTIO_NET_F_GUEST_USO4,
            b::VIRTIO_NET_F_GUEST_USO6,
        ];
        if long.iter().any(|bit| has(self.features, *bit)) {
            HEADER_LEN + FRAME_MAX
        } else {
            // An ordinary frame; a longer one (jumbo) uses the spill buffer and is completed from there.
            HEADER_LEN + 1518
        }
    }

    /// Sends up to [`BUDGET`] frames of the guest. Empty the ring's kick before.
    pub fn transmit(&mut self) -> Result<Progress, GuestError> {
        let memory = self.memory.memory().into_inner();
        if !self.lost {
            match self.channel.flush() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Progress::NeedsBackend),
                Err(error) => self.lose(&error),
            }
        }
        self.take_returned(&memory)?;
        for _ in 0..BUDGET {
            let Some(chain) = self.transmit.pop(&memory)? else {
                if self.transmit.enable_kicks(&memory)? {
                    continue;
                }
                // From now on the channel's event reports returned frames.
                self.take_returned(&memory)?;
                return Ok(Progress::NeedsKick);
            };
            match self.send(&memory, &chain) {
                Ok(Some(Sent::Passed)) => {}
                Ok(Some(Sent::Lent(number))) => {
                    self.lent.insert(number, chain.head());
                    continue;
                }
                Ok(None) => {
                    self.transmit.undo_pop();
                    if self.take_returned(&memory)? {
                        continue;
                    }
                    self.transmit.disable_kicks(&memory)?;
                    self.counters.transmit_waits.increment();
                    return Ok(Progress::NeedsBackend);
                }
                Err(error) => {
                    self.transmit.undo_pop();
                    return Err(error.into());
                }
            }
            if let Err(error) = self.transmit.complete(&memory, chain.head(), 0) {
                self.transmit.undo_pop();
                return Err(error.into());
            }
        }
        self.transmit.disable_kicks(&memory)?;
        Ok(Progress::More)
    }

    /// Sends one frame, or counts why not; `None` when the backend accepts nothing at present.
    fn send(&mut self, memory: &Arc<GuestMemory>, chain: &Chain) -> Result<Option<Sent>, RingError> {
        let queue = self.transmit.index();
        let whole = total_len(chain.readable());
        let Some(length) = whole.checked_sub(HEADER_LEN as u64).filter(|_| chain.writable().is_empty())
        else {
            self.counters.transmit_errs.increment();
            telemetry::guest_warn!(
                self.log,
                "Queue {queue}: a frame of {whole} readable and {} writable bytes was dropped",
                total_len(chain.writable())
            );
            return Ok(Some(Sent::Passed));
        };
        let mut header = [0; HEADER_LEN];
        queue::read(memory, chain.readable(), 0, &mut header)?;
        let length_host = usize::try_from(length).unwrap_or(usize::MAX);
        let header = match VnetHeader::parse(&header).sanitize(self.features, length_host) {
            Ok(header) => header,
            Err(reason) => {
                self.counters.transmit_errs.increment();
                telemetry::guest_warn!(self.log, "Queue {queue}: a frame was dropped. {reason}");
                return Ok(Some(Sent::Passed));
            }
        };
        let have = part(chain.readable(), HEADER_LEN as u64, length).unwrap_or_default();
        let vecs = GuestIoVecs::new(memory, &have)?;
        let Some(frame) = FrameSource::new(&vecs, &have) else {
            self.counters.transmit_errs.increment();
            telemetry::guest_warn!(self.log, "Queue {queue}: a frame in {} pieces was dropped", have.len());
            return Ok(Some(Sent::Passed));
        };
        if self.lost {
            self.counters.transmit_drop.increment();
            return Ok(Some(Sent::Passed));
        }
        loop {
            return match self.channel.send(&header, &frame) {
                Ok(sent) => {
                    self.counters.transmit_packets.increment();
                    self.counters.transmit_bytes.add(length);
                    Ok(Some(sent))
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(None),
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                        self.lose(&error);
                        self.counters.transmit_drop.increment();
                        Ok(Some(Sent::Passed))
                    }
                    // The kernel parses the frame and refuses one that it can't segment, or the link is down.
                    _ => {
                        self.counters.transmit_drop.increment();
                        Ok(Some(Sent::Passed))
                    }
                },
            };
        }
    }

    /// Delivers up to [`BUDGET`] frames to the guest. Empty the ring's kick before.
    pub fn receive(&mut self) -> Result<Progress, GuestError> {
        if self.lost {
            return Ok(Progress::Lost);
        }
        let memory = self.memory.memory().into_inner();
        for _ in 0..BUDGET {
            let wanted = match self.waiting {
                Some(waiting) => HEADER_LEN + waiting.received.length,
                None => self.wanted(),
            };
            self.post(&memory, wanted)?;
            let starved = self.posted.is_empty() || (self.waiting.is_some() && self.capacity < wanted);
            if starved {
                if self.waiting.is_some() && self.posted.len() >= usize::from(self.receive.size()) {
                    // All buffers of the ring together can't hold it.
                    self.waiting = None;
                    self.counters.receive_drop.increment();
                    continue;
                }
                if self.receive.enable_kicks(&memory)? {
                    continue;
                }
                self.counters.receive_no_buffers.increment();
                return Ok(Progress::NeedsKick);
            }
            let waiting = match self.waiting.take() {
                Some(waiting) => waiting,
                None => match self.read() {
                    Ok(waiting) => waiting,
                    Err(error) => match error.kind() {
                        io::ErrorKind::WouldBlock => {
                            self.receive.disable_kicks(&memory)?;
                            return Ok(Progress::NeedsBackend);
                        }
                        io::ErrorKind::Interrupted => continue,
                        io::ErrorKind::InvalidData => {
                            self.counters.receive_errs.increment();
                            continue;
                        }
                        _ => {
                            self.lose(&error);
                            return Ok(Progress::Lost);
                        }
                    },
                },
            };
            self.deliver(&memory, waiting)?;
        }
        Ok(Progress::More)
    }

    /// Pops receive buffers until they hold `wanted` bytes or there are none.
    fn post(&mut self, memory: &Arc<GuestMemory>, wanted: usize) -> Result<(), GuestError> {
        while self.capacity < wanted || self.posted.is_empty() {
            if self.posted.len() >= usize::from(self.receive.size()) {
                return Ok(());
            }
            let Some(chain) = self.receive.pop(memory)? else { return Ok(()) };
            let posted = self.inspect(memory, chain);
            match posted {
                Ok(posted) => {
                    self.capacity += posted.capacity;
                    self.posted.push_back(posted);
                }
                Err(error) => {
                    self.receive.undo_pop();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn inspect(&self, memory: &Arc<GuestMemory>, chain: Chain) -> Result<Posted, GuestError> {
        let writable = total_len(chain.writable());
        if !chain.readable().is_empty() || writable < HEADER_LEN as u64 {
            let (queue, readable) = (self.receive.index(), chain.readable().len());
            return Err(GuestError::ReceiveBuffer { queue, readable, writable });
        }
        let vecs = GuestIoVecs::new(memory, chain.writable())?;
        // Capped at the longest frame, so that the sum over a ring can't overflow.
        let capacity = usize::try_from(writable).unwrap_or(usize::MAX).min(HEADER_LEN + FRAME_MAX);
        Ok(Posted { chain, vecs, capacity })
    }

    /// Reads a frame from the backend into the posted buffers and the spill buffer.
    fn read(&mut self) -> io::Result<Waiting> {
        let usable = if self.mergeable() { self.posted.len() } else { 1 };
        let parts = self.posted.iter().take(usable).map(|posted| &posted.vecs);
        let storage = std::mem::take(&mut self.storage);
        let mut sink = FrameSink::new(storage, parts, HEADER_LEN, &mut self.spill);
        let held = sink.guest_capacity();
        let result = self.channel.receive(&mut sink);
        self.storage = sink.into_storage();
        let received = result?;
        Ok(Waiting { received, spilled: received.length.saturating_sub(held) })
    }

    /// Delivers a frame to the guest, or keeps it until there are enough buffers.
    fn deliver(&mut self, memory: &Arc<GuestMemory>, waiting: Waiting) -> Result<(), GuestError> {
        let Waiting { received, spilled } = waiting;
        let length = received.length;
        let total = HEADER_LEN + length;
        if !(FRAME_MIN..=FRAME_MAX).contains(&length) {
            self.counters.receive_errs.increment();
            return Ok(());
        }
        let limit = if self.mergeable() { self.posted.len() } else { 1 };
        let mut sizes = Vec::with_capacity(8);
        let mut left = total;
        for posted in self.posted.iter().take(limit) {
            let now = left.min(posted.capacity);
            sizes.push(now);
            left -= now;
            if left == 0 {
                break;
            }
        }
        if left > 0 {
            if self.mergeable() {
                self.waiting = Some(waiting);
            } else {
                self.counters.receive_drop.increment();
                telemetry::guest_warn!(
                    self.log,
                    "Queue {}: a frame of {length} bytes was dropped; the receive buffer holds {}",
                    self.receive.index(),
                    total - left - HEADER_LEN
                );
            }
            return Ok(());
        }
        let mut header = received.header.for_guest(self.features);
        header.num_buffers = u16::try_from(sizes.len()).unwrap_or(u16::MAX);
        let header = header.to_bytes();
        let spill_at = total - spilled;
        let mut at = 0;
        let mut done = Vec::with_capacity(sizes.len());
        for (posted, now) in self.posted.iter().zip(&sizes) {
            let (segments, end) = (posted.chain.writable(), at + now);
            if end > spill_at {
                // The spill buffer received this part before these buffers were posted.
                let from = spill_at.max(at);
                let bytes = &self.spill[from - spill_at..end - spill_at];
                queue::write(memory, segments, (from - at) as u64, bytes)?;
            }
            queue::mark_written(memory, segments, *now as u64);
            done.push((posted.chain.head(), u32::try_from(*now).unwrap_or(u32::MAX)));
            at = end;
        }
        if let Some(first) = self.posted.front() {
            queue::write(memory, first.chain.writable(), 0, &header)?;
        }
        self.receive.complete_together(memory, &done)?;
        for posted in self.posted.drain(..done.len()) {
            self.capacity -= posted.capacity;
        }
        self.counters.receive_packets.increment();
        self.counters.receive_bytes.add(length as u64);
        Ok(())
    }

    /// Records that the other side of the channel has ended.
    fn lose(&mut self, error: &io::Error) {
        if !self.lost {
            self.lost = true;
            self.counters.receive_errs.increment();
            tracing::warn!("The back end of queue {} is gone: {error}", self.receive.index());
        }
    }

    /// Raises the interrupts that the driver wants for completed buffers.
    pub fn interrupt(&mut self, interrupt: &dyn VirtioInterrupt) -> Result<(), GuestError> {
        let memory = self.memory.memory().into_inner();
        for ring in [&mut self.receive, &mut self.transmit] {
            if ring.should_interrupt(&memory)? {
                self.counters.interrupts.increment();
                interrupt.queue(ring.index());
            }
        }
        Ok(())
    }
}
