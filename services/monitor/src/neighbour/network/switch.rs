//! Routing of frames between peers and the guest.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use neighbour::channel::{Message, Part, PostError, STATUS_UNREACHABLE};
use neighbour::layout::MOST_PARTS;
use neighbour::window::Window;
use telemetry::guest_log::GuestLog;
use virtio_devices::net::backend::{Received, Sent};
use virtio_devices::net::header::{DATA_VALID, FRAME_MAX, FRAME_MIN, NEEDS_CSUM, VnetHeader};
use virtio_devices::net::{FrameSink, FrameSource, QUEUE_SIZE};

use super::peer::Peer;

/// Kind of a message that is a frame (`NEIGH_PROTO_NET` of `guest/mmnet`) whose checksums, if any, aren't verified.
const FRAME: u16 = 0x0100;
/// A frame whose checksum is still to be computed. The note has the offset where it starts (high 16 bits), and the offset from there where
/// it is stored (low).
const FRAME_OPEN: u16 = 0x0101;
/// A frame whose first checksum the sender has verified. Only mmnet sends it: a virtio-net driver can't report it.
const FRAME_CHECKED: u16 = 0x0102;
/// Statuses of completions: accepted; no receiver for this kind; not a valid frame.
const STATUS_ACCEPTED: u32 = 0;
const STATUS_NO_RECEIVER: u32 = 0xffff_0002;
const STATUS_MALFORMED: u32 = 0xffff_0004;

/// Limit of learned addresses. Frames for others go to all peers.
const MAX_ADDRESSES: usize = 4096;
/// A peer that completes nothing for this time isn't waited for: frames for it are dropped, as by a switch with a full port.
const PEER_STALL_TIMEOUT: Duration = Duration::from_millis(100);

/// Limit of messages per peer that are refused in one call, so that other peers, and the device's end, aren't delayed.
const MAX_REFUSED_PER_CALL: usize = 64;

type Address = [u8; 6];

/// A frame that peers still read.
struct Lent {
    /// Number of peers that read it.
    readers: u32,
}

/// A message that was received from a peer's ring and not yet delivered to the guest.
struct Waiting {
    slot: u32,
    epoch: u32,
    message: Message,
    length: usize,
}

/// Counters for `causeway inspect`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Frames dropped because a peer had no room.
    pub full: u64,
    /// Messages of peers that weren't valid frames.
    pub malformed: u64,
    /// Connections that ended because a peer violated the protocol.
    pub broken: u64,
}

/// One member's part of a neighbourhood's Ethernet. Used behind one lock.
pub(super) struct Switch {
    own: Option<Window>,
    peers: BTreeMap<u32, Peer>,
    addresses: HashMap<Address, u32>,
    lent: BTreeMap<u32, Lent>,
    next_number: u32,
    /// Number of the frame by peer and message.
    messages: HashMap<(u32, u32), u32>,
    returned: VecDeque<u32>,
    waiting: Option<Waiting>,
    /// Slot from which the search for the next frame starts (round-robin).
    next_slot: u32,
    /// Messages of a peer were left for a later call.
    messages_left: bool,
    /// Whether the guest accepts frames with open checksums.
    open_checksums: bool,
    counts: Counts,
    places: Vec<(*const u8, usize)>,
}

// SAFETY: `places` is empty between calls. All other fields are `Send`.
#[allow(unsafe_code)]
unsafe impl Send for Switch {}

impl Switch {
    pub(super) fn new() -> Self {
        Self {
            own: None,
            peers: BTreeMap::new(),
            addresses: HashMap::new(),
            lent: BTreeMap::new(),
            next_number: 0,
            messages: HashMap::new(),
            returned: VecDeque::new(),
            waiting: None,
            next_slot: 0,
            messages_left: false,
            open_checksums: false,
            counts: Counts::default(),
            places: Vec::new(),
        }
    }

    /// Sets this VM's window, which gives the addresses of its buffers.
    pub(super) fn set_own(&mut self, own: Window) {
        self.own = Some(own);
    }

    /// Sets whether the guest accepts frames with open checksums.
    pub(super) fn set_open_checksums(&mut self, open: bool) {
        self.open_checksums = open;
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// All peers, by slot.
    pub(super) fn peers(&self) -> impl Iterator<Item = (u32, &Peer)> {
        self.peers.iter().map(|(slot, peer)| (*slot, peer))
    }

    pub(super) fn add(&mut self, slot: u32, peer: Peer) {
        self.peers.insert(slot, peer);
    }

    /// Removes a peer. Frames that it was reading are the guest's again.
    pub(super) fn remove(&mut self, slot: u32, epoch: u32) -> Option<Peer> {
        if self.peers.get(&slot).is_none_or(|peer| peer.epoch != epoch) {
            return None;
        }
        if self.waiting.as_ref().is_some_and(|waiting| waiting.slot == slot) {
            self.waiting = None;
        }
        self.addresses.retain(|_, at| *at != slot);
        let mine: Vec<(u32, u32)> = self.messages.keys().filter(|(at, _)| *at == slot).copied().collect();
        for key in mine {
            if let Some(number) = self.messages.remove(&key) {
                self.read(number);
            }
        }
        self.peers.remove(&slot)
    }

    /// Checks which peers have made their rings. Returns true if one has just become live.
    pub(super) fn poll_peers(&mut self) -> bool {
        // `count` visits every peer.
        self.peers.values_mut().filter_map(|peer| peer.poll_ready().then_some(())).count() > 0
    }

    /// Slots and epochs of peers whose connection is to end.
    pub(super) fn ended(&self) -> Vec<(u32, u32)> {
        self.peers.iter().filter(|(_, peer)| peer.ended).map(|(slot, peer)| (*slot, peer.epoch)).collect()
    }

    /// Whether peers read frames of the guest.
    pub(super) fn has_lent(&self) -> bool {
        !self.lent.is_empty()
    }

    /// Ends the connection with each peer that still reads a frame. Returns all ended ones.
    pub(super) fn end_readers(&mut self) -> Vec<(u32, u32)> {
        let readers: Vec<u32> = self.messages.keys().map(|(slot, _)| *slot).collect();
        for slot in readers {
            if let Some(peer) = self.peers.get_mut(&slot) {
                peer.ended = true;
            }
        }
        self.ended()
    }

    /// Makes [`Switch::returned`] report these frames again.
    pub(super) fn requeue_returned(&mut self, numbers: Vec<u32>) {
        self.returned.extend(numbers);
    }

    /// A peer has completed a frame.
    fn read(&mut self, number: u32) {
        let Some(lent) = self.lent.get_mut(&number) else { return };
        lent.readers = lent.readers.saturating_sub(1);
        if lent.readers == 0 {
            self.lent.remove(&number);
            self.returned.push_back(number);
        }
    }

    /// A frame of the guest that no peer reads any more. After `None`, peers signal when they complete one.
    pub(super) fn returned(&mut self) -> Option<u32> {
        loop {
            if let Some(number) = self.returned.pop_front() {
                return Some(number);
            }
            let mut done = Vec::new();
            for (slot, peer) in &mut self.peers {
                if !peer.live || peer.ended {
                    continue;
                }
                let slot = *slot;
                let mut broken = None;
                {
                    let (words, sender, _) = peer.rings();
                    loop {
                        match sender.completion(words) {
                            Ok(Some(completion)) => done.push((slot, completion.id)),
                            Ok(None) if sender.outstanding() == 0 || sender.arm(words) => break,
                            // A completion arrived while this side armed.
                            Ok(None) => {}
                            Err(violation) => {
                                broken = Some(violation);
                                break;
                            }
                        }
                    }
                }
                if done.last().is_some_and(|(at, _)| *at == slot) {
                    peer.last_completion = Instant::now();
                }
                if let Some(violation) = broken {
                    end_connection(peer, &violation, &mut self.counts);
                }
            }
            for key in done {
                if let Some(number) = self.messages.remove(&key) {
                    self.read(number);
                }
            }
            if self.returned.is_empty() {
                return None;
            }
        }
    }

    /// Sends a frame of the guest.
    ///
    /// # Errors
    /// `WouldBlock` if its only receiver has no room at present. With other errors the frame is dropped.
    pub(super) fn send(&mut self, header: VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent> {
        let own = self.own.ok_or(io::ErrorKind::NetworkUnreachable)?;
        let mut head = [0; FRAME_MIN];
        if frame.copy_head(&mut head) < FRAME_MIN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let [a, b, c, d, e, f, ..] = head;
        let to = [a, b, c, d, e, f];
        let known = (a & 1 == 0).then(|| self.addresses.get(&to).copied()).flatten();
        let usable = |peer: &Peer| peer.live && !peer.ended;
        let known = known.filter(|slot| self.peers.get(slot).is_some_and(usable));
        let targets: Vec<u32> = match known {
            Some(slot) => vec![slot],
            None => self.peers.iter().filter(|(_, peer)| usable(peer)).map(|(slot, _)| *slot).collect(),
        };
        if targets.is_empty() {
            return Err(io::ErrorKind::NetworkUnreachable.into());
        }
        let mut parts = [Part::default(); MOST_PARTS];
        let segments = frame.segments();
        let count = segments.len();
        let places = parts.get_mut(..count).ok_or(io::ErrorKind::InvalidInput)?;
        for (place, segment) in places.iter_mut().zip(segments) {
            // Buffers must be in RAM: the window has nothing else.
            let address = own.global(segment.address.0, segment.len).ok_or(io::ErrorKind::InvalidInput)?;
            *place = Part { address, length: segment.len };
        }
        let open = header.flags & NEEDS_CSUM != 0;
        let (kind, note) = match open {
            true => (FRAME_OPEN, u32::from(header.csum_start) << 16 | u32::from(header.csum_offset)),
            false => (FRAME, 0),
        };
        // A share per peer, so that a peer that completes nothing doesn't fill the device's queue.
        let share = u32::from(QUEUE_SIZE) / 4 / u32::try_from(self.peers.len()).unwrap_or(1).max(1);
        let number = self.next_number;
        let mut readers = 0;
        for slot in targets {
            let Some(peer) = self.peers.get_mut(&slot) else { continue };
            let slow = peer.sender.outstanding() > 0 && peer.last_completion.elapsed() > PEER_STALL_TIMEOUT;
            let (words, sender, _) = peer.rings();
            let full = sender.outstanding() >= share.max(1);
            let posted =
                if full { Err(PostError::Full) } else { sender.post(words, &parts[..count], kind, note) };
            match posted {
                Ok(id) => {
                    if sender.must_signal(words) {
                        peer.signal();
                    }
                    if peer.sender.outstanding() == 1 {
                        // Its stall timeout starts.
                        peer.last_completion = Instant::now();
                    }
                    self.messages.insert((slot, id), number);
                    readers += 1;
                }
                Err(PostError::Full) if known.is_some() && !slow => {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Err(PostError::Full) => self.counts.full += 1,
                Err(PostError::Broken(violation)) => end_connection(peer, &violation, &mut self.counts),
                Err(_) => return Err(io::ErrorKind::InvalidInput.into()),
            }
        }
        if readers == 0 {
            return Err(io::ErrorKind::NetworkUnreachable.into());
        }
        self.next_number = self.next_number.wrapping_add(1);
        self.lent.insert(number, Lent { readers });
        Ok(Sent::Lent(number))
    }

    /// Returns true, once, if messages were left for which no peer signals.
    pub(super) fn take_messages_left(&mut self) -> bool {
        std::mem::take(&mut self.messages_left)
    }

    /// Length of the next frame. After `None`, peers signal when there is one, unless [`Switch::take_messages_left`] returns true.
    pub(super) fn waiting(&mut self) -> Option<usize> {
        if let Some(waiting) = &self.waiting {
            return Some(waiting.length);
        }
        loop {
            let after = self.peers.range(self.next_slot..).map(|(slot, _)| *slot);
            let order: Vec<u32> =
                after.chain(self.peers.range(..self.next_slot).map(|(slot, _)| *slot)).collect();
            for slot in order {
                if self.receive_from(slot) {
                    self.next_slot = slot.wrapping_add(1);
                    return self.waiting.as_ref().map(|waiting| waiting.length);
                }
            }
            // A peer that has just made its rings may have sent before, without a signal.
            let mut sleeps = !self.poll_peers();
            for peer in self.peers.values_mut().filter(|peer| peer.live && !peer.ended) {
                let (words, _, receiver) = peer.rings();
                sleeps &= receiver.arm(words);
            }
            if sleeps || self.messages_left {
                return None;
            }
        }
    }

    /// Receives the next frame of one peer. Returns false if there is none.
    fn receive_from(&mut self, slot: u32) -> bool {
        let Some(peer) = self.peers.get_mut(&slot) else { return false };
        for _ in 0..MAX_REFUSED_PER_CALL {
            if !peer.live || peer.ended {
                return false;
            }
            let mut message = Message::default();
            let (words, _, receiver) = peer.rings();
            match receiver.receive(words, &mut message) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(violation) => {
                    end_connection(peer, &violation, &mut self.counts);
                    return false;
                }
            }
            let length = message.parts().iter().map(|part| u64::from(part.length)).sum::<u64>();
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let refused = match message.kind {
                FRAME | FRAME_OPEN | FRAME_CHECKED if message.unreachable() => Some(STATUS_UNREACHABLE),
                FRAME | FRAME_OPEN | FRAME_CHECKED if (FRAME_MIN..=FRAME_MAX).contains(&length) => None,
                FRAME | FRAME_OPEN | FRAME_CHECKED => Some(STATUS_MALFORMED),
                _ => Some(STATUS_NO_RECEIVER),
            };
            match refused {
                Some(status) => {
                    self.counts.malformed += u64::from(status == STATUS_MALFORMED);
                    complete(peer, message.id, status);
                }
                None => {
                    let epoch = peer.epoch;
                    self.waiting = Some(Waiting { slot, epoch, message, length });
                    return true;
                }
            }
        }
        self.messages_left = true;
        false
    }

    /// Copies the next frame into the guest's buffers.
    ///
    /// # Errors
    /// `WouldBlock` if there is none, `InvalidData` if it isn't valid.
    #[allow(unsafe_code)] // The one copy: from a peer's RAM to the guest's.
    pub(super) fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received> {
        if self.waiting().is_none() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let Some(Waiting { slot, epoch, message, length }) = self.waiting.take() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let Some(peer) = self.peers.get_mut(&slot).filter(|peer| peer.epoch == epoch) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let found = peer.places(&message, &mut self.places).is_some();
        // SAFETY: `places` has addresses in mappings of the peer's RAM, which stay while `peer` exists. This VM's RAM is mapped elsewhere.
        let copied = found && unsafe { sink.gather(&self.places) };
        self.places.clear();
        let header = if copied { self.finish(&message, length, sink) } else { None };
        let mut head = [0; FRAME_MIN];
        sink.copy_head(&mut head);
        let Some(peer) = self.peers.get_mut(&slot) else { return Err(io::ErrorKind::WouldBlock.into()) };
        complete(peer, message.id, if header.is_some() { STATUS_ACCEPTED } else { STATUS_MALFORMED });
        let Some(header) = header else {
            self.counts.malformed += 1;
            return Err(io::ErrorKind::InvalidData.into());
        };
        let [.., s0, s1, s2, s3, s4, s5, _, _] = head;
        self.learn([s0, s1, s2, s3, s4, s5], slot);
        Ok(Received { header, length })
    }

    /// The offload header; computes the checksum if the guest doesn't accept an open one. `None` if the checksum's place is invalid.
    fn finish(&self, message: &Message, length: usize, sink: &mut FrameSink<'_>) -> Option<VnetHeader> {
        match message.kind {
            FRAME_OPEN => {}
            FRAME_CHECKED => return Some(VnetHeader { flags: DATA_VALID, ..VnetHeader::default() }),
            _ => return Some(VnetHeader::default()),
        }
        let [b0, b1, b2, b3] = message.note.to_be_bytes();
        let (start, offset) = (u16::from_be_bytes([b0, b1]), u16::from_be_bytes([b2, b3]));
        let end = usize::from(start) + usize::from(offset) + 2;
        if end > length {
            return None;
        }
        if !self.open_checksums {
            return sink
                .finish_checksum(length, usize::from(start), usize::from(offset))
                .then(VnetHeader::default);
        }
        Some(VnetHeader {
            flags: NEEDS_CSUM,
            csum_start: start,
            csum_offset: offset,
            ..VnetHeader::default()
        })
    }

    fn learn(&mut self, source: Address, slot: u32) {
        let [first, ..] = source;
        // A group address is no valid source.
        if first & 1 != 0 {
            return;
        }
        if self.addresses.len() < MAX_ADDRESSES || self.addresses.contains_key(&source) {
            self.addresses.insert(source, slot);
        }
    }
}

/// Completes a message, and wakes its sender if it waits for that.
fn complete(peer: &mut Peer, id: u32, status: u32) {
    let (words, _, receiver) = peer.rings();
    receiver.complete(words, id, status);
    if receiver.must_signal(words) {
        peer.signal();
    }
}

fn end_connection(peer: &mut Peer, violation: &(dyn std::error::Error + 'static), counts: &mut Counts) {
    if !peer.ended {
        // Rate-limited: a neighbour may return and violate the protocol again.
        static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
        telemetry::guest_warn!(
            LOG,
            vm = peer.vm,
            error = violation,
            "A neighbour broke the rules; its connection ends"
        );
        peer.ended = true;
        counts.broken += 1;
    }
}
