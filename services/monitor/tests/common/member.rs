//! A member of a neighbourhood whose guest is played by the test. Its driver counts, accepts connections, and sends numbered buffers to
//! every peer, which reads them through the window. On request it violates the protocol.
#![allow(unsafe_code)] // Segments are memory that another process writes: they are accessed as atomic words.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace};
use machine::slots::HostMapping;
use neighbour::channel::{Message, Part, Receiver, STATUS_UNREACHABLE, Sender};
use neighbour::layout::{FLAG_MORE, Header, Layout, MOST_PARTS, Side};
use neighbour::registers as reg;
use neighbour::window::{Geometry, Window};
use neighbour::words::Words;
use pci::function::PciFunction;

use super::connection::{Action, Connection, Event};
use super::{Machine, RAM};

/// Start of the buffers. Each peer has 16 pages, one per buffer.
const BUFFERS: u64 = 1 << 20;
const PAGES: u64 = 16;
const PAGE: u64 = 4096;

/// A segment that is mapped here.
struct Segment(Arc<HostMapping>);

impl Segment {
    fn map(fd: &OwnedFd, size: usize) -> Self {
        Self(HostMapping::new("segment", std::os::fd::AsFd::as_fd(fd), 0, size as u64, true).unwrap())
    }

    fn words(&self) -> &[AtomicU64] {
        let words = usize::try_from(self.0.len()).unwrap() / 8;
        // SAFETY: mapped as long as `self`, page-aligned, and used as atomic words by both sides.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<AtomicU64>(), words) }
    }
}

/// An accepted connection.
struct Link {
    segment: Segment,
    layout: Layout,
    side: Side,
    sender: Sender<Vec<u32>>,
    receiver: Receiver,
    /// Numbers of the next buffer to send and to receive.
    sent: u64,
    received: u64,
    doorbell: Arc<OwnedFd>,
    /// The member has violated the protocol on this ring, and doesn't write it any more.
    violated: bool,
}

/// Statistics of a pair.
#[derive(Default, Clone)]
struct PeerCounts {
    /// Buffers with correct and with wrong content.
    right: u64,
    wrong: u64,
    /// Connections that ended, and those that this side ended because of a violation.
    ends: u64,
    violations: u64,
    name: String,
}

#[derive(Default)]
struct Peer {
    connection: Connection,
    link: Option<Link>,
    counts: PeerCounts,
}

/// A member with its driver; see the module.
pub struct Driver {
    machine: Machine,
    own: u32,
    geometry: Geometry,
    layout: Layout,
    peers: BTreeMap<u32, Peer>,
    status: Arc<OwnedFd>,
    beats: u64,
    beaten: Instant,
    /// The guest is suspended until then.
    frozen: Option<Instant>,
    loaded: bool,
}

impl Driver {
    /// Joins the neighbourhood, and loads the driver.
    pub fn start(directory: &Path, name: &str, permits: &[&str]) -> Self {
        let machine = Machine::start(directory, name, permits);
        let own = machine.slot();
        let wide = |offset| u64::from(machine.read(offset)) | u64::from(machine.read(offset + 4)) << 32;
        let geometry = Geometry::new(wide(reg::BASE), wide(reg::STRIDE), machine.read(reg::SLOTS)).unwrap();
        let layout = Layout::new(machine.read(reg::ENTRIES)).unwrap();
        let at = u64::from(own) * u64::from(machine.read(reg::SEGMENT_STRIDE));
        let status = machine.function.mappings().into_iter().find(|mapping| mapping.offset == at).unwrap().fd;
        machine.write(reg::DRIVER, 1);
        Self {
            machine,
            own,
            geometry,
            layout,
            peers: BTreeMap::new(),
            status,
            beats: 0,
            beaten: Instant::now(),
            frozen: None,
            loaded: true,
        }
    }

    /// Handles everything that is due.
    pub fn turn(&mut self) {
        if !self.loaded || self.frozen.is_some_and(|until| until > Instant::now()) {
            return;
        }
        self.frozen = None;
        if self.beaten.elapsed() >= Duration::from_millis(50) || self.beats == 0 {
            self.beats += 1;
            self.beaten = Instant::now();
            rustix::io::pwrite(&self.status, &self.beats.to_le_bytes(), 0).unwrap();
        }
        let own = self.own;
        for slot in (0..self.geometry.slots()).filter(|slot| *slot != own) {
            self.look(slot);
            self.exchange(slot);
        }
    }

    /// Processes a slot's block of registers.
    fn look(&mut self, slot: u32) {
        let state = self.machine.peer(slot, reg::PEER_STATE);
        if state == reg::PEER_NONE && !self.peers.contains_key(&slot) {
            return;
        }
        let epoch = self.machine.peer(slot, reg::PEER_EPOCH);
        match state {
            reg::PEER_OFFERED => self.event(slot, Event::Offer(epoch)),
            reg::PEER_GONE => self.event(slot, Event::Gone(epoch)),
            _ => {}
        }
    }

    fn event(&mut self, slot: u32, event: Event) {
        let peer = self.peers.entry(slot).or_default();
        let actions = peer.connection.on(event);
        for action in actions.into_iter().flatten() {
            match action {
                Action::Prepare(epoch) => self.prepare(slot, epoch),
                Action::Begin(_) => {}
                Action::Fail(_) => {
                    let peer = self.peers.entry(slot).or_default();
                    peer.counts.ends += u64::from(peer.link.take().is_some());
                    peer.counts.violations += u64::from(event == Event::Violation);
                    self.event(slot, Event::LetGo);
                }
                Action::Release(epoch) => self.machine.release(slot, epoch),
            }
        }
    }

    fn window(&self, slot: u32) -> Window {
        self.geometry.window(slot, &[(0, RAM)]).unwrap()
    }

    fn prepare(&mut self, slot: u32, epoch: u32) {
        let at = u64::from(slot) * u64::from(self.machine.read(reg::SEGMENT_STRIDE));
        let found = self.machine.function.mappings().into_iter().find(|mapping| mapping.offset == at);
        let bell_at = reg::DOORBELLS + reg::DOORBELL_STRIDE * u64::from(slot);
        let doorbell =
            self.machine.function.doorbells().into_iter().find(|doorbell| doorbell.offset == bell_at);
        // The connection may just have been removed. The registers will say so.
        let (Some(found), Some(doorbell)) = (found, doorbell) else { return };
        let segment = Segment::map(&found.fd, self.layout.size());
        let words = segment.words();
        let Ok((header, layout)) = Header::read(words) else { return };
        let slots = [self.own.min(slot), self.own.max(slot)];
        if header.agrees(epoch, &self.geometry, slots).is_err() {
            return;
        }
        let side = Side::of(self.own, slot).unwrap();
        let ids = vec![0; layout.entries() as usize];
        let sender = Sender::new(words, &layout, epoch, side, self.window(self.own), ids).unwrap();
        let receiver = Receiver::new(words, &layout, epoch, side.other(), self.window(slot)).unwrap();
        words.store_release(Layout::ready(side), u64::from(epoch));
        rustix::io::write(&doorbell.fd, &1_u64.to_ne_bytes()).unwrap();
        let name = self.name(slot);
        let peer = self.peers.entry(slot).or_default();
        peer.counts.name = name;
        peer.link = Some(Link {
            segment,
            layout,
            side,
            sender,
            receiver,
            sent: 0,
            received: 0,
            doorbell: doorbell.fd,
            violated: false,
        });
    }

    fn name(&self, slot: u32) -> String {
        let bytes: Vec<u8> = (0..reg::PEER_NAME_SIZE as u64 / 4)
            .flat_map(|word| self.machine.peer(slot, reg::PEER_NAME + 4 * word).to_le_bytes())
            .collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }

    /// Sends and receives. The first and the last word of a buffer are its number.
    fn exchange(&mut self, slot: u32) {
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        let Some(link) = &peer.link else { return };
        let ready = link.segment.words().load_acquire(Layout::ready(link.side.other()));
        self.event(slot, Event::PeerReady(ready));
        let (own, ram) = (self.window(self.own), self.machine.ram.memory().memory());
        let Some(peer) = self.peers.get_mut(&slot) else { return };
        if peer.connection.live().is_none() {
            return;
        }
        let Some(link) = peer.link.as_mut().filter(|link| !link.violated) else { return };
        let words = link.segment.words();
        let mut broken = false;
        while link.sender.outstanding() < 8 {
            let at = BUFFERS + (u64::from(slot) * PAGES + link.sent % PAGES) * PAGE;
            for place in [at, at + PAGE - 8] {
                ram.write_obj(link.sent, GuestAddress(place)).unwrap();
            }
            let address = own.global(at, 4096).unwrap();
            match link.sender.post(words, &[Part { address, length: 4096 }], 1, 2) {
                Ok(_) => link.sent += 1,
                Err(_) => break,
            }
        }
        let mut message = Message::default();
        for _ in 0..16 {
            match link.receiver.receive(words, &mut message) {
                Ok(true) if message.unreachable() => {
                    link.receiver.complete(words, message.id, STATUS_UNREACHABLE);
                }
                Ok(true) => {
                    let right = message.parts().iter().all(|part| {
                        let end = part.address + u64::from(part.length) - 8;
                        let word = |at| ram.read_obj::<u64>(GuestAddress(at)).ok();
                        part.length == 4096 && [part.address, end].map(word) == [Some(link.received); 2]
                    });
                    if right && message.parts().len() == 1 {
                        peer.counts.right += 1;
                    } else {
                        peer.counts.wrong += 1;
                    }
                    link.received += 1;
                    link.receiver.complete(words, message.id, 0);
                }
                Ok(false) => break,
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        while !broken {
            match link.sender.completion(words) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => broken = true,
            }
        }
        if link.sender.must_signal(words) || link.receiver.must_signal(words) {
            rustix::io::write(&link.doorbell, &1_u64.to_ne_bytes()).unwrap();
        }
        drop(ram);
        if broken {
            self.event(slot, Event::Violation);
        }
    }

    /// Statistics of each peer's connection, comma-separated: name, live epoch (or 0), correct and wrong buffers, ends, violations.
    pub fn report(&self) -> String {
        let peer = |peer: &Peer| {
            let PeerCounts { right, wrong, ends, violations, name } = &peer.counts;
            format!("{name} {} {right} {wrong} {ends} {violations}", peer.connection.live().unwrap_or(0))
        };
        self.peers
            .values()
            .filter(|peer| !peer.counts.name.is_empty())
            .map(peer)
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Slot of a peer.
    fn slot_of(&self, name: &str) -> Option<u32> {
        self.peers.iter().find(|(_, peer)| peer.counts.name == name).map(|(slot, _)| *slot)
    }

    /// Suspends the guest for a time.
    pub fn freeze(&mut self, time: Duration) {
        self.frozen = Some(Instant::now() + time);
    }

    /// Loads or unloads the driver.
    pub fn load(&mut self, load: bool) {
        if !load {
            self.peers.values_mut().for_each(|peer| peer.link = None);
            self.peers.clear();
        }
        self.machine.write(reg::DRIVER, load.into());
        self.loaded = load;
    }

    /// Stores into a peer's window, as a guest's exit does. Returns how many stores were discarded.
    pub fn store(&mut self, peer: &str, count: u64) -> u64 {
        let before = self.machine.function.discarded();
        let Some(slot) = self.slot_of(peer) else { return 0 };
        for at in 0..count {
            // Where the peer's outgoing buffers are.
            let place = Machine::window(slot) + BUFFERS + at * 520 % RAM;
            self.machine.memory.write(place, &0xdead_beef_u64.to_le_bytes());
        }
        self.machine.function.discarded() - before
    }

    /// Corrupts the ring towards a peer. Returns false without a connection.
    pub fn corrupt_ring(&mut self, peer: &str, number: u64) -> bool {
        let slot = self.slot_of(peer);
        let own = self.window(self.own);
        let link = slot.and_then(|slot| self.peers.get_mut(&slot)).and_then(|peer| peer.link.as_mut());
        let Some(link) = link else { return false };
        link.violated = true;
        let words = link.segment.words();
        let epoch = words.load(neighbour::layout::HEADER_EPOCH / 8);
        let (ring, back) = (link.layout.messages(link.side), link.layout.completions(link.side.other()));
        let entries = u64::from(link.layout.entries());
        // Nothing else writes this side's rings meanwhile, since this is the driver's thread.
        let latest = |first: usize, size: usize| {
            let stamps =
                (0..link.layout.entries() as usize).map(|entry| words.load(first + entry * size + size - 1));
            stamps.filter(|stamp| stamp >> 32 == epoch).map(|stamp| stamp & 0xffff_ffff).max().unwrap_or(0)
        };
        let next = latest(ring.first, 4);
        let post = |at: u64, content: [u64; 3]| {
            let entry = ring.first + usize::try_from((next + at) % entries).unwrap() * 4;
            for (word, value) in (entry..).zip(content) {
                words.store(word, value);
            }
            words.store_release(entry + 3, epoch << 32 | (next + at + 1));
        };
        let complete = |id: u64| {
            let next = latest(back.first, 2);
            let entry = back.first + usize::try_from(next % entries).unwrap() * 2;
            words.store(entry, id);
            words.store_release(entry + 1, epoch << 32 | (next + 1));
        };
        let (mine, id, page) = (own.start() + BUFFERS, entries - 1, 4096_u64);
        let random = |salt: u64| {
            // splitmix64
            let mut z = (number << 32 ^ salt).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        };
        match number % 11 {
            0 => post(0, [0x1000, page, id]),
            1 => post(0, [own.start() + RAM, page, id]),
            2 => post(0, [mine, u64::from(u32::MAX), id]),
            3 => post(0, [u64::MAX - 100, page, id]),
            4 => post(0, [mine, 0, id]),
            5 => post(0, [mine, 0xfff0 << 32 | page, id]),
            6 => post(0, [mine, page, entries + random(1) % 1000]),
            7 => {
                let many = MOST_PARTS as u64 + 8;
                (0..many).rev().for_each(|at| post(at, [mine, u64::from(FLAG_MORE) << 32 | page, id]));
            }
            8 => complete(entries + 5),
            9 => complete(u64::from(u32::MAX)),
            // Entries that the peer hasn't read stay, since it would wait for them as for a peer that is alive and silent.
            _ => (0..entries / 4).rev().for_each(|at| {
                let address = if at % 2 == 0 { random(at) } else { mine + random(at) % RAM };
                post(at, [address, random(at + entries), random(at + 2 * entries)]);
            }),
        }
        rustix::io::write(&link.doorbell, &1_u64.to_ne_bytes()).unwrap();
        true
    }
}
