//! Which peer a frame goes to, and which one comes next.

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

/// Kind of a message that is a frame (`NEIGH_PROTO_NET` of `guest/mmnet`) whose checksums, if any, nobody has verified.
const FRAME: u16 = 0x0100;
/// One whose checksum is still to be made: the note says where it begins (high 16 bits), and where it goes from there (low).
const FRAME_OPEN: u16 = 0x0101;
/// One whose first checksum the sender has verified. Only mmnet sends it: a virtio-net driver can't say so.
const FRAME_CHECKED: u16 = 0x0102;
/// Completions: the frame was taken; nobody is there for this kind; it can't be a frame.
const TAKEN: u32 = 0;
const NOBODY: u32 = 0xffff_0002;
const MALFORMED: u32 = 0xffff_0004;

/// Addresses that are remembered; more are found by sending to all.
const MOST_ADDRESSES: usize = 4096;
/// A peer that has given nothing back for so long is not waited for: what is for it is dropped, as by a switch whose port is full.
const PEER_STALL_TIMEOUT: Duration = Duration::from_millis(100);

/// Messages of one peer that aren't frames and are refused at once; then others, and the device's end, have their turn.
const MOST_REFUSED: usize = 64;

type Address = [u8; 6];

/// A frame that peers still read.
struct Lent {
    /// How many of them.
    readers: u32,
}

/// A message that was taken from a peer's ring, and not yet given to the guest.
struct Waiting {
    slot: u32,
    epoch: u32,
    message: Message,
    length: usize,
}

/// What is counted, for `causeway inspect`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Frames that a peer had no room for.
    pub full: u64,
    /// Frames of peers that weren't frames.
    pub malformed: u64,
    /// Connections that ended because a peer broke the rules.
    pub broken: u64,
}

/// The Ethernet of a neighbourhood, as one member sees it. Behind one lock.
pub(super) struct Switch {
    own: Option<Window>,
    peers: BTreeMap<u32, Peer>,
    addresses: HashMap<Address, u32>,
    lent: BTreeMap<u32, Lent>,
    next_number: u32,
    /// By peer and message: the number of the frame.
    messages: HashMap<(u32, u32), u32>,
    returned: VecDeque<u32>,
    waiting: Option<Waiting>,
    /// Whose turn it is to give a frame.
    turn: u32,
    /// A peer's messages were left, for now.
    left: bool,
    /// Whether the guest leaves checksums to be made.
    open_checksums: bool,
    counts: Counts,
    places: Vec<(*const u8, usize)>,
}

// SAFETY: `places` is empty between calls; everything else is `Send`.
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
            turn: 0,
            left: false,
            open_checksums: false,
            counts: Counts::default(),
            places: Vec::new(),
        }
    }

    /// This VM's window: addresses of its buffers.
    pub(super) fn set_own(&mut self, own: Window) {
        self.own = Some(own);
    }

    /// Whether the guest takes frames whose checksum isn't made.
    pub(super) fn set_open_checksums(&mut self, open: bool) {
        self.open_checksums = open;
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Slot, epoch and name of each peer, and whether it is live.
    pub(super) fn peers(&self) -> impl Iterator<Item = (u32, &Peer)> {
        self.peers.iter().map(|(slot, peer)| (*slot, peer))
    }

    pub(super) fn add(&mut self, slot: u32, peer: Peer) {
        self.peers.insert(slot, peer);
    }

    /// Takes a peer away; what was lent to it is the guest's again.
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

    /// Sees which peers have made their rings by now; true when one just has.
    pub(super) fn look(&mut self) -> bool {
        // Each is looked at.
        self.peers.values_mut().filter_map(|peer| peer.look().then_some(())).count() > 0
    }

    /// Peers whose connection is to end.
    pub(super) fn ended(&self) -> Vec<(u32, u32)> {
        self.peers.iter().filter(|(_, peer)| peer.ended).map(|(slot, peer)| (*slot, peer.epoch)).collect()
    }

    /// Whether anything is lent.
    pub(super) fn has_lent(&self) -> bool {
        !self.lent.is_empty()
    }

    /// Ends the connection with each peer that still reads a frame.
    pub(super) fn end_readers(&mut self) -> Vec<(u32, u32)> {
        let readers: Vec<u32> = self.messages.keys().map(|(slot, _)| *slot).collect();
        for slot in readers {
            if let Some(peer) = self.peers.get_mut(&slot) {
                peer.ended = true;
            }
        }
        self.ended()
    }

    /// Says again what [`Switch::returned`] has said already.
    pub(super) fn give_again(&mut self, numbers: Vec<u32>) {
        self.returned.extend(numbers);
    }

    /// One reader less of a frame.
    fn read(&mut self, number: u32) {
        let Some(lent) = self.lent.get_mut(&number) else { return };
        lent.readers = lent.readers.saturating_sub(1);
        if lent.readers == 0 {
            self.lent.remove(&number);
            self.returned.push_back(number);
        }
    }

    /// A frame of the guest's that no peer reads any more. After `None`, peers signal when they give one back.
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
                            // One came while it was armed.
                            Ok(None) => {}
                            Err(violation) => {
                                broken = Some(violation);
                                break;
                            }
                        }
                    }
                }
                if done.last().is_some_and(|(at, _)| *at == slot) {
                    peer.gave_back = Instant::now();
                }
                if let Some(violation) = broken {
                    break_off(peer, &violation, &mut self.counts);
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

    /// Sends a frame of the guest's.
    ///
    /// # Errors
    /// `WouldBlock` when its one receiver has no room at present; others when it is dropped.
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
            // RAM only: nothing else is in the window.
            let address = own.global(segment.address.0, segment.len).ok_or(io::ErrorKind::InvalidInput)?;
            *place = Part { address, length: segment.len };
        }
        let open = header.flags & NEEDS_CSUM != 0;
        let (kind, note) = match open {
            true => (FRAME_OPEN, u32::from(header.csum_start) << 16 | u32::from(header.csum_offset)),
            false => (FRAME, 0),
        };
        // One that gives nothing back doesn't keep the others' places.
        let share = u32::from(QUEUE_SIZE) / 4 / u32::try_from(self.peers.len()).unwrap_or(1).max(1);
        let number = self.next_number;
        let mut readers = 0;
        for slot in targets {
            let Some(peer) = self.peers.get_mut(&slot) else { continue };
            let slow = peer.sender.outstanding() > 0 && peer.gave_back.elapsed() > PEER_STALL_TIMEOUT;
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
                        // Its time begins.
                        peer.gave_back = Instant::now();
                    }
                    self.messages.insert((slot, id), number);
                    readers += 1;
                }
                Err(PostError::Full) if known.is_some() && !slow => {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Err(PostError::Full) => self.counts.full += 1,
                Err(PostError::Broken(violation)) => break_off(peer, &violation, &mut self.counts),
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

    /// Whether messages were left although nobody signals for them. Said once.
    pub(super) fn take_left(&mut self) -> bool {
        std::mem::take(&mut self.left)
    }

    /// Length of the frame that comes next. After `None`, peers signal when there is one, unless [`Switch::take_left`] says otherwise.
    pub(super) fn waiting(&mut self) -> Option<usize> {
        if let Some(waiting) = &self.waiting {
            return Some(waiting.length);
        }
        loop {
            let after = self.peers.range(self.turn..).map(|(slot, _)| *slot);
            let order: Vec<u32> = after.chain(self.peers.range(..self.turn).map(|(slot, _)| *slot)).collect();
            for slot in order {
                if self.take(slot) {
                    self.turn = slot.wrapping_add(1);
                    return self.waiting.as_ref().map(|waiting| waiting.length);
                }
            }
            // One that has just made its rings may have sent before, and doesn't signal for that.
            let mut sleeps = !self.look();
            for peer in self.peers.values_mut().filter(|peer| peer.live && !peer.ended) {
                let (words, _, receiver) = peer.rings();
                sleeps &= receiver.arm(words);
            }
            if sleeps || self.left {
                return None;
            }
        }
    }

    /// Takes the next frame of one peer, if there is one.
    fn take(&mut self, slot: u32) -> bool {
        let Some(peer) = self.peers.get_mut(&slot) else { return false };
        for _ in 0..MOST_REFUSED {
            if !peer.live || peer.ended {
                return false;
            }
            let mut message = Message::default();
            let (words, _, receiver) = peer.rings();
            match receiver.receive(words, &mut message) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(violation) => {
                    break_off(peer, &violation, &mut self.counts);
                    return false;
                }
            }
            let length = message.parts().iter().map(|part| u64::from(part.length)).sum::<u64>();
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let refused = match message.kind {
                FRAME | FRAME_OPEN | FRAME_CHECKED if message.unreachable() => Some(STATUS_UNREACHABLE),
                FRAME | FRAME_OPEN | FRAME_CHECKED if (FRAME_MIN..=FRAME_MAX).contains(&length) => None,
                FRAME | FRAME_OPEN | FRAME_CHECKED => Some(MALFORMED),
                _ => Some(NOBODY),
            };
            match refused {
                Some(status) => {
                    self.counts.malformed += u64::from(status == MALFORMED);
                    give_back(peer, message.id, status);
                }
                None => {
                    let epoch = peer.epoch;
                    self.waiting = Some(Waiting { slot, epoch, message, length });
                    return true;
                }
            }
        }
        self.left = true;
        false
    }

    /// Copies the next frame to the guest's buffers.
    ///
    /// # Errors
    /// `WouldBlock` when there is none, `InvalidData` when it wasn't a frame.
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
        // SAFETY: `places` gives addresses in mappings of the peer's RAM, which stay while `peer` is there; this VM's RAM is mapped elsewhere.
        let copied = found && unsafe { sink.gather(&self.places) };
        self.places.clear();
        let header = if copied { self.finish(&message, length, sink) } else { None };
        let mut head = [0; FRAME_MIN];
        sink.copy_head(&mut head);
        let Some(peer) = self.peers.get_mut(&slot) else { return Err(io::ErrorKind::WouldBlock.into()) };
        give_back(peer, message.id, if header.is_some() { TAKEN } else { MALFORMED });
        let Some(header) = header else {
            self.counts.malformed += 1;
            return Err(io::ErrorKind::InvalidData.into());
        };
        let [.., s0, s1, s2, s3, s4, s5, _, _] = head;
        self.learn([s0, s1, s2, s3, s4, s5], slot);
        Ok(Received { header, length })
    }

    /// The offload header, or the checksum made for a guest that wants it made. `None` when it can't be.
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
        // Group addresses send nothing.
        if first & 1 != 0 {
            return;
        }
        if self.addresses.len() < MOST_ADDRESSES || self.addresses.contains_key(&source) {
            self.addresses.insert(source, slot);
        }
    }
}

/// Gives a message back, and wakes its sender if it waits for that.
fn give_back(peer: &mut Peer, id: u32, status: u32) {
    let (words, _, receiver) = peer.rings();
    receiver.complete(words, id, status);
    if receiver.must_signal(words) {
        peer.signal();
    }
}

fn break_off(peer: &mut Peer, violation: &(dyn std::error::Error + 'static), counts: &mut Counts) {
    if !peer.ended {
        // A neighbour may come back and do it again.
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
