//! Port between a NIC's Ethernet function, which a segment's thread serves, and its RDMA function, which the engine's thread serves.
//!
//! ```text
//!  segment's thread                                        engine's thread
//!  frame for the NIC ── is it RoCEv2 to an address of the RDMA function? headers, ICRC ──▶ inbox ──▶ Port::drain
//!  sent with the NIC's address ◀───────────────────── outbox ◀─────────────────────────────────────── Port::send
//! ```
//!
//! Both boxes are bounded in bytes; packets without room are dropped and counted, as on any link.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roce::frame::{Frame, NotTaken, PORT};
use rustix::event::{EventfdFlags, eventfd};
use telemetry::Counter;
use vmxnet3::Companion;

use crate::function::descriptors::signal;

/// Capacity of the inbox, bytes of packets.
const INBOX: usize = 2 << 20;
/// Capacity of the outbox, bytes of frames.
const OUTBOX: usize = 1 << 20;
/// Cost of a packet in addition to its bytes.
const EACH: usize = 128;

/// Notifies the engine's thread that packets wait at a port.
#[derive(Debug)]
pub(crate) struct Bell {
    event: OwnedFd,
    rung: AtomicBool,
}

impl Bell {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            rung: AtomicBool::new(false),
        })
    }

    /// Signals the engine's thread. Call it after adding to an empty box.
    fn ring(&self) {
        // In this order: when the descriptor is readable, the flag for emptying it is set, or will be at once.
        signal(self.event.as_fd());
        self.rung.store(true, Ordering::SeqCst);
    }

    /// Whether it was signalled since the last call; then all boxes must be checked.
    pub fn take(&self) -> bool {
        if !self.rung.load(Ordering::SeqCst) {
            return false;
        }
        self.rung.store(false, Ordering::SeqCst);
        // Fails when it was emptied already.
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        true
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Counters of a port.
#[derive(Debug, Default)]
pub(crate) struct WireCounters {
    /// Frames passed to the segment.
    pub packets_sent: Counter,
    /// Bytes of these frames.
    pub bytes_sent: Counter,
    /// Frames for the RDMA function.
    pub packets_received: Counter,
    /// Bytes of these frames.
    pub bytes_received: Counter,
    /// Frames with a wrong ICRC.
    pub icrc_errors: Counter,
    /// Frames with wrong lengths, a wrong IPv4 checksum, or headers that aren't RoCE's.
    pub malformed: Counter,
    /// Frames dropped for lack of room in the inbox.
    pub receive_overruns: Counter,
    /// Packets for a queue pair that doesn't exist, isn't connected, or has no receive.
    pub no_queue_pair: Counter,
    /// Packets from an address that isn't the queue pair's peer, or is of a VM that another transport reaches.
    pub wrong_peer: Counter,
    /// Frames not sent: no room, no Ethernet function, no MAC of the peer.
    pub send_drops: Counter,
    /// Frames received or to be sent while the migrating VM was suspended.
    pub moving_drops: Counter,
}

impl WireCounters {
    /// Name and value of each counter.
    pub fn values(&self) -> [(&'static str, u64); 11] {
        [
            ("packets_sent", self.packets_sent.get()),
            ("bytes_sent", self.bytes_sent.get()),
            ("packets_received", self.packets_received.get()),
            ("bytes_received", self.bytes_received.get()),
            ("icrc_errors", self.icrc_errors.get()),
            ("malformed", self.malformed.get()),
            ("receive_overruns", self.receive_overruns.get()),
            ("no_queue_pair", self.no_queue_pair.get()),
            ("wrong_peer", self.wrong_peer.get()),
            ("send_drops", self.send_drops.get()),
            ("moving_drops", self.moving_drops.get()),
        ]
    }
}

/// An address of the RDMA function, with its MAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub ip: IpAddr,
    pub mac: [u8; 6],
}

/// A received packet without its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub traffic_class: u8,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub congested: bool,
    /// The 40 bytes before a datagram's payload (GRH area).
    pub header: [u8; 40],
    len: usize,
}

/// Packets in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    arrived: Vec<Arrived>,
    bytes: Vec<u8>,
}

impl Inbox {
    /// Each packet, from BTH to pad.
    pub fn packets(&self) -> impl Iterator<Item = (&Arrived, &[u8])> {
        let mut rest = self.bytes.as_slice();
        self.arrived.iter().map(move |arrived| {
            let (packet, behind) = rest.split_at_checked(arrived.len).unwrap_or((rest, &[]));
            rest = behind;
            (arrived, packet)
        })
    }

    fn size(&self) -> usize {
        self.bytes.len() + self.arrived.len() * EACH
    }

    fn clear(&mut self) {
        self.arrived.clear();
        self.bytes.clear();
    }
}

/// Frames in order of sending.
#[derive(Debug, Default)]
struct Outbox {
    lengths: Vec<usize>,
    bytes: Vec<u8>,
}

impl Outbox {
    fn size(&self) -> usize {
        self.bytes.len() + self.lengths.len() * EACH
    }
}

/// Wakes the thread of the Ethernet function's segment.
type Waker = Box<dyn Fn() + Send + Sync>;

/// See the module. Created with the NIC; either function may be added and removed.
#[derive(Default)]
pub struct WirePort {
    /// Addresses of the RDMA function; empty without it.
    addresses: Mutex<Vec<Address>>,
    inbox: Mutex<Inbox>,
    outbox: Mutex<Outbox>,
    /// Set while the Ethernet function is in its segment.
    waker: Mutex<Option<Waker>>,
    /// Set while there is an RDMA function.
    bell: Mutex<Option<Arc<Bell>>>,
    /// The VM migrates and is suspended: nothing is received or sent.
    still: AtomicBool,
    pub(crate) counters: WireCounters,
}

impl std::fmt::Debug for WirePort {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("WirePort").field("counters", &self.counters).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WirePort {
    /// Connects the Ethernet function, which is in its segment; `waker` makes that segment's thread poll [`WirePort::end`].
    pub fn connect(&self, waker: Waker) {
        *locked(&self.waker) = Some(waker);
        // The RDMA function's connections may wait for this.
        if let Some(bell) = &*locked(&self.bell) {
            bell.ring();
        }
    }

    /// Whether the Ethernet function is in its segment.
    pub(crate) fn is_connected(&self) -> bool {
        locked(&self.waker).is_some()
    }

    /// Suspends or resumes the port with its VM, which may soon run on another host. While it is suspended, both boxes are emptied and
    /// received frames are dropped, as on a link.
    pub(crate) fn stand_still(&self, still: bool) {
        self.still.store(still, Ordering::SeqCst);
        if still {
            *locked(&self.inbox) = Inbox::default();
            *locked(&self.outbox) = Outbox::default();
        }
    }

    /// Whether the port is suspended.
    pub(crate) fn is_still(&self) -> bool {
        self.still.load(Ordering::SeqCst)
    }

    /// Disconnects the Ethernet function, which leaves its segment.
    pub(crate) fn disconnect(&self) {
        *locked(&self.waker) = None;
        *locked(&self.outbox) = Outbox::default();
    }

    /// The segment thread's end of the port.
    pub fn end(self: &Arc<Self>) -> Box<dyn Companion> {
        Box::new(End { port: Arc::clone(self), sending: Outbox::default(), next: 0, position: 0 })
    }

    /// Connects the RDMA function.
    pub(crate) fn open(&self, bell: Arc<Bell>) {
        *locked(&self.bell) = Some(bell);
    }

    /// Disconnects the RDMA function: its frames are the Ethernet function's from now on.
    pub(crate) fn close(&self) {
        locked(&self.addresses).clear();
        self.still.store(false, Ordering::SeqCst);
        *locked(&self.bell) = None;
        *locked(&self.inbox) = Inbox::default();
    }

    /// Sets the RDMA function's addresses.
    pub(crate) fn set_addresses(&self, addresses: impl Iterator<Item = Address>) {
        let mut own = locked(&self.addresses);
        own.clear();
        own.extend(addresses);
    }

    /// Moves all received packets to `into`, which is emptied before.
    pub(crate) fn drain(&self, into: &mut Inbox) {
        into.clear();
        std::mem::swap(&mut *locked(&self.inbox), into);
    }

    /// Whether `bytes` more would fit.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        locked(&self.outbox).size() + bytes <= OUTBOX
    }

    /// Sends whole frames. Without room or Ethernet function they are dropped; the protocol retransmits them, as after any loss.
    pub(crate) fn send<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) {
        let waker = locked(&self.waker);
        let mut sent = false;
        for frame in frames {
            if self.is_still() {
                self.counters.moving_drops.increment();
                continue;
            }
            let mut outbox = locked(&self.outbox);
            if waker.is_none() || outbox.size() + frame.len() + EACH > OUTBOX {
                self.counters.send_drops.increment();
                continue;
            }
            outbox.bytes.extend_from_slice(frame);
            outbox.lengths.push(frame.len());
            self.counters.packets_sent.increment();
            self.counters.bytes_sent.add(frame.len() as u64);
            sent = true;
        }
        if sent && let Some(wake) = &*waker {
            wake();
        }
    }

    /// Counters for `inspect`.
    pub(crate) fn inspect(&self) -> serde_json::Value {
        let values = self.counters.values().into_iter();
        serde_json::Value::Object(values.map(|(name, value)| (name.to_owned(), value.into())).collect())
    }

    fn is_own(&self, mac: [u8; 6], ip: IpAddr) -> bool {
        locked(&self.addresses).contains(&Address { ip, mac })
    }

    /// Receives a frame that [`wanted`] selected. It may be hostile beyond the addresses.
    fn receive(&self, frame: &[u8]) {
        self.counters.packets_received.increment();
        self.counters.bytes_received.add(frame.len() as u64);
        if self.is_still() {
            return self.counters.moving_drops.increment();
        }
        let frame = match Frame::parse(frame) {
            Ok(frame) => frame,
            Err(NotTaken::Icrc) => return self.counters.icrc_errors.increment(),
            Err(NotTaken::Malformed | NotTaken::Checksum | NotTaken::Other) => {
                return self.counters.malformed.increment();
            }
        };
        let addresses = &frame.addresses;
        let arrived = Arrived {
            source: addresses.source,
            destination: addresses.destination,
            traffic_class: addresses.traffic_class,
            flow_label: addresses.flow_label,
            hop_limit: addresses.hop_limit,
            congested: frame.congested,
            header: frame.receive_header(),
            len: frame.packet.len(),
        };
        let bell = locked(&self.bell);
        let Some(bell) = &*bell else { return self.counters.no_queue_pair.increment() };
        let first = {
            let mut inbox = locked(&self.inbox);
            if inbox.size() + frame.packet.len() + EACH > INBOX {
                return self.counters.receive_overruns.increment();
            }
            inbox.bytes.extend_from_slice(frame.packet);
            inbox.arrived.push(arrived);
            inbox.arrived.len() == 1
        };
        if first {
            bell.ring();
        }
    }
}

/// The receiver of a RoCEv2 frame: destination MAC and address. `None` for other traffic: another type (a VLAN's too), a fragment, an IPv4
/// header with options, another protocol or port.
fn wanted(head: &[u8]) -> Option<([u8; 6], IpAddr)> {
    let mac = *head.first_chunk::<6>()?;
    let ip = head.get(14..)?;
    let (address, udp) = match head.get(12..14)? {
        [0x08, 0x00] => {
            let header = ip.first_chunk::<20>()?;
            let [0x45, _, _, _, _, _, flags, fragment, _, 17, _, _, _, _, _, _, a, b, c, d] = *header else {
                return None;
            };
            if flags & 0x3F != 0 || fragment != 0 {
                return None;
            }
            (IpAddr::from([a, b, c, d]), ip.get(20..)?)
        }
        [0x86, 0xDD] => {
            let header = ip.first_chunk::<40>()?;
            if header[0] >> 4 != 6 || header[6] != 17 {
                return None;
            }
            let (_, address) = header.split_last_chunk::<16>()?;
            (IpAddr::from(*address), ip.get(40..)?)
        }
        _ => return None,
    };
    (udp.get(2..4)? == PORT.to_be_bytes()).then_some((mac, address))
}

/// The segment's end of the port.
struct End {
    port: Arc<WirePort>,
    /// Frames that are being sent.
    sending: Outbox,
    next: usize,
    position: usize,
}

impl Companion for End {
    fn wants(&mut self, head: &[u8]) -> bool {
        wanted(head).is_some_and(|(mac, ip)| self.port.is_own(mac, ip))
    }

    fn take(&mut self, frame: &[u8]) {
        self.port.receive(frame);
    }

    fn next(&mut self, frame: &mut Vec<u8>) -> bool {
        if self.port.is_still() {
            self.sending = Outbox::default();
            (self.next, self.position) = (0, 0);
            return false;
        }
        if self.next >= self.sending.lengths.len() {
            (self.next, self.position) = (0, 0);
            self.sending.lengths.clear();
            self.sending.bytes.clear();
            std::mem::swap(&mut *locked(&self.port.outbox), &mut self.sending);
        }
        let Some(&len) = self.sending.lengths.get(self.next) else { return false };
        frame.extend_from_slice(
            self.sending.bytes.get(self.position..self.position + len).unwrap_or_default(),
        );
        self.next += 1;
        self.position += len;
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests;
