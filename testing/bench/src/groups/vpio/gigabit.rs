//! A gigabit card: an e1000's registers in pages of memory, which a thread polls as a card does its own. It discards the frames of
//! its driver's transmit ring, and receives generated frames into the other ring, both at 1 Gbit/s with preamble, checksum and gap.
//!
//! As in [`super::card`], for a guest the pages are like a passed-through card's BAR, and the card's thread also harvests the causes
//! for the monitor. It does so at most every [`THROTTLE`], the interrupt interval that Linux's driver sets, and while the card is
//! idle.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use device_models::devices::e1000::{EN, RXT0, TXDW};
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace};
use machine::slots::SharedPage;

use super::card::sum;
use crate::peers;

/// Offsets of the e1000's registers; `RX` and `TX` begin those of the rings.
pub const CTRL: u32 = 0x0;
pub const STATUS: u32 = 0x8;
pub const ICR: u32 = 0xC0;
pub const IMS: u32 = 0xD0;
pub const IMC: u32 = 0xD8;
pub const RCTL: u32 = 0x100;
pub const TCTL: u32 = 0x400;
pub const RX: u32 = 0x2800;
pub const TX: u32 = 0x3800;
/// Offsets from [`RX`] or [`TX`]: the ring's address, its size in bytes, the card's position, the driver's position.
pub const BASE: u32 = 0x00;
pub const LENGTH: u32 = 0x08;
pub const HEAD: u32 = 0x10;
pub const TAIL: u32 = 0x18;
/// Size in bytes of a descriptor, and its status' offset and bits: done, end of packet.
pub const DESCRIPTOR: u64 = 16;
pub const AT_STATUS: u64 = 12;
pub const DONE: u32 = 0x01;
const END: u32 = 0x02;

/// Start of the pages that contain implemented registers.
pub const PAGES: [u32; 3] = [0x0000, 0x2000, 0x3000];
const PAGE: u32 = 4096;
/// Overhead bytes per frame on the wire: preamble, checksum, gap.
const AROUND: usize = 8 + 4 + 12;
const NANOSECONDS_PER_BYTE: u64 = 8;
/// Minimum time between two interrupts (ITR of 195: 20,000 per second).
const THROTTLE: Duration = Duration::from_micros(50);
/// Number of polls of an idle card before it yields its processor.
const LOOKS: u32 = 64;

/// State shared by card, thread and users.
pub struct Registers {
    pages: [SharedPage; PAGES.len()],
    causes: AtomicU32,
    sent: AtomicU64,
    received: AtomicU64,
    /// Frames that the wire still has for the card.
    coming: AtomicU64,
    /// Checksum of the last sent frame.
    last: AtomicU64,
    /// Number of frames and descriptors that couldn't be accessed.
    lost: AtomicU64,
    /// The frame that arrives on the wire.
    frame: Mutex<Vec<u8>>,
    works: AtomicBool,
    stop: AtomicBool,
}

impl Registers {
    /// Creates the registers of a reset card.
    pub fn new() -> anyhow::Result<Arc<Self>> {
        let page = || SharedPage::new("e1000").context("No page for a card's registers");
        let registers = Self {
            pages: [page()?, page()?, page()?],
            causes: AtomicU32::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            coming: AtomicU64::new(0),
            last: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            frame: Mutex::default(),
            works: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        };
        registers.clear();
        Ok(Arc::new(registers))
    }

    fn clear(&self) {
        for offset in (0..PAGE).step_by(4) {
            self.pages.iter().for_each(|page| page.store(offset, 4, 0));
        }
        self.causes.store(0, Ordering::SeqCst);
    }

    /// Returns the page at a position of [`PAGES`].
    pub fn page(&self, number: usize) -> Option<&SharedPage> {
        self.pages.get(number)
    }

    fn place(&self, offset: u32) -> Option<(&SharedPage, u32)> {
        let number = PAGES.iter().position(|page| *page == offset / PAGE * PAGE)?;
        Some((&self.pages[number], offset % PAGE))
    }

    fn load(&self, offset: u32) -> u32 {
        self.place(offset).map_or(0, |(page, at)| page.load(at, 4))
    }

    fn store(&self, offset: u32, value: u32) {
        if let Some((page, at)) = self.place(offset) {
            page.store(at, 4, value);
        }
    }

    /// Returns the number of sent frames, and the last one's [`sum`].
    pub fn sent(&self) -> (u64, u64) {
        (self.sent.load(Ordering::SeqCst), self.last.load(Ordering::SeqCst))
    }

    /// Returns the number of received frames.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::SeqCst)
    }

    /// Returns the number of failed accesses.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::SeqCst)
    }

    /// Lets `many` of these frames arrive on the wire, each when the card has room.
    pub fn expect(&self, frame: &[u8], many: u64) {
        let mut place = self.frame.lock().unwrap_or_else(PoisonError::into_inner);
        frame.clone_into(&mut place);
        self.coming.store(many, Ordering::SeqCst);
    }

    /// Returns the card's state, for time-out messages.
    pub fn state(&self) -> String {
        let ring = |at: u32| {
            let [length, head, tail] = [LENGTH, HEAD, TAIL].map(|register| self.load(at + register));
            format!("head {head}, tail {tail} of {} descriptors", u64::from(length) / DESCRIPTOR)
        };
        format!(
            "transmitter {:#x}: {}, {} sent; receiver {:#x}: {}, {} received, {} to come; {} lost",
            self.load(TCTL),
            ring(TX),
            self.sent().0,
            self.load(RCTL),
            ring(RX),
            self.received(),
            self.coming.load(Ordering::SeqCst),
            self.lost()
        )
    }
}

/// The running card. Dropping it ends it.
pub struct Gigabit {
    pub registers: Arc<Registers>,
    thread: Option<JoinHandle<()>>,
}

impl Gigabit {
    /// Starts an idle card on a processor. Its thread calls `attend`: with `true` when its line is asserted, and else while it is
    /// idle.
    pub fn start(
        registers: &Arc<Registers>,
        memory: GuestMemorySpace,
        cpu: usize,
        attend: impl Fn(bool) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let its = Arc::clone(registers);
        let thread = std::thread::Builder::new().name("card".to_owned()).spawn(move || {
            // If pinning fails, the figures' spread shows it.
            let _ = peers::pin(cpu);
            Running { registers: &its, memory: &memory, wire: Instant::now(), busy: false }.run(attend);
        })?;
        Ok(Self { registers: Arc::clone(registers), thread: Some(thread) })
    }

    /// Lets the card run or idle. An idle card uses no processor time and does nothing.
    pub fn work(&self, works: bool) {
        self.registers.works.store(works, Ordering::SeqCst);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Gigabit {
    fn drop(&mut self) {
        self.registers.stop.store(true, Ordering::SeqCst);
        self.work(false);
        if let Some(thread) = self.thread.take() {
            // The thread has already printed its panic.
            let _ = thread.join();
        }
    }
}

struct Running<'a> {
    registers: &'a Registers,
    memory: &'a GuestMemorySpace,
    /// Time at which the wire is free.
    wire: Instant,
    /// Whether there was always a frame for the wire since then.
    busy: bool,
}

impl Running<'_> {
    fn run(mut self, attend: impl Fn(bool)) {
        let (mut told, mut idle) = (Instant::now(), 0);
        while !self.registers.stop.load(Ordering::Relaxed) {
            if !self.registers.works.load(Ordering::SeqCst) {
                self.busy = false;
                std::thread::park();
                continue;
            }
            let did = [self.send(), self.receive()].contains(&true);
            self.busy = did;
            if self.registers.causes.load(Ordering::SeqCst) != 0 && told.elapsed() >= THROTTLE {
                told = Instant::now();
                attend(true);
            } else if !did {
                attend(false);
            }
            idle = if did { 0 } else { idle + 1 };
            if idle == LOOKS {
                idle = 0;
                // Another thread of the same priority would wait forever.
                std::thread::yield_now();
            }
        }
    }

    /// Returns a ring's descriptor at its head if the card owns it: its number, the next one's, and its address.
    fn next(&self, engine: u32, ring: u32) -> Option<(u32, u64)> {
        let registers = self.registers;
        let [head, tail, length] = [HEAD, TAIL, LENGTH].map(|register| registers.load(ring + register));
        if registers.load(engine) & EN == 0 || head == tail {
            return None;
        }
        let next = head + 1;
        let next = if u64::from(next) * DESCRIPTOR >= u64::from(length) { 0 } else { next };
        Some((next, u64::from(registers.load(ring + BASE)) + u64::from(head) * DESCRIPTOR))
    }

    /// Waits until the wire has transmitted a frame. A frame that was ready before the wire was free follows the previous one without
    /// a gap, even if this thread is late.
    fn wire(&mut self, length: usize) {
        let takes = Duration::from_nanos((length.max(60) + AROUND) as u64 * NANOSECONDS_PER_BYTE);
        let begin = if self.busy { self.wire } else { self.wire.max(Instant::now()) };
        self.wire = begin + takes;
        while Instant::now() < self.wire {
            std::hint::spin_loop();
        }
    }

    fn read(&self, address: u64, into: &mut [u8]) {
        if self.memory.memory().read_slice(into, GuestAddress(address)).is_err() {
            self.registers.lost.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        if self.memory.memory().write_slice(bytes, GuestAddress(address)).is_err() {
            self.registers.lost.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Completes a descriptor. The last word has the status, which the driver reads first.
    fn done(&self, at: u64, status: u32, (head, next): (u32, u32), cause: u32) {
        let place = GuestAddress(at + AT_STATUS);
        if self.memory.memory().store(status, place, Ordering::Release).is_err() {
            self.registers.lost.fetch_add(1, Ordering::SeqCst);
        }
        self.registers.store(head, next);
        self.registers.causes.fetch_or(cause, Ordering::SeqCst);
    }

    fn send(&mut self) -> bool {
        let Some((next, at)) = self.next(TCTL, TX) else { return false };
        let mut words = [0; 16];
        self.read(at, &mut words);
        let word = u128::from_le_bytes(words);
        let length = usize::try_from(word >> 64 & 0x3FFF).unwrap_or(0);
        let mut frame = vec![0; length];
        self.read(u64::try_from(word & u128::from(u64::MAX)).unwrap_or(0), &mut frame);
        self.wire(length);
        self.registers.last.store(sum(&frame), Ordering::SeqCst);
        self.registers.sent.fetch_add(1, Ordering::SeqCst);
        self.done(at, DONE, (TX + HEAD, next), TXDW);
        true
    }

    fn receive(&mut self) -> bool {
        if self.registers.coming.load(Ordering::SeqCst) == 0 {
            return false;
        }
        let Some((next, at)) = self.next(RCTL, RX) else { return false };
        let mut address = [0; 8];
        self.read(at, &mut address);
        let frame = self.registers.frame.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.wire(frame.len());
        self.write(u64::from_le_bytes(address), &frame);
        self.write(at + 8, &u32::try_from(frame.len()).unwrap_or(0).to_le_bytes());
        self.registers.coming.fetch_sub(1, Ordering::SeqCst);
        self.registers.received.fetch_add(1, Ordering::SeqCst);
        self.done(at, DONE | END, (RX + HEAD, next), RXT0);
        true
    }
}

/// The monitor's access to the card.
pub struct Host(pub Arc<Registers>);

impl PhysicalDevice for Host {
    fn read(&mut self, _: u8, offset: u32, _: u8) -> Result<u32, DeviceError> {
        // A read clears causes.
        Ok(if offset == ICR { self.0.causes.swap(0, Ordering::SeqCst) } else { self.0.load(offset) })
    }

    fn write(&mut self, _: u8, offset: u32, _: u8, value: u32) -> Result<(), DeviceError> {
        match offset {
            ICR => {
                self.0.causes.fetch_and(!value, Ordering::SeqCst);
            }
            // A reset is immediate. There is no mask, since only this thread reads the line.
            CTRL | IMS | IMC => {}
            _ => self.0.store(offset, value),
        }
        Ok(())
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        Ok(self.0.causes.load(Ordering::SeqCst) != 0)
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.0.clear();
        Ok(())
    }

    fn set_bus_master(&mut self, _: bool) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The card's memory is all of the guest's, which contains what the model permits.
    fn has_iommu(&self) -> bool {
        true
    }

    fn map(&mut self, _: Mapping) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap(&mut self, _: Mapping) -> Result<(), DeviceError> {
        Ok(())
    }
}
