//! A Fast Ethernet card with a transmitter: an RTL8139's registers in a page of memory, which a thread polls as a card does its own.
//! It reads frames from guest memory and discards them, at 100 Mbit/s with preamble, checksum and gap.
//!
//! For a guest the page is like a passed-through card's BAR: loads and stores without exits. A real card's loads take about a
//! microsecond more. The card's thread also harvests the causes for the monitor, since there are only two processors:
//! [`Card::start`]'s callback runs after each frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use device_models::devices::rtl8139::{OWN, TE, TOK, TOK_BIT};
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace};
use machine::slots::SharedPage;

use crate::peers;

/// Offsets of the RTL8139's registers; `TSD0` and `TSAD0` begin arrays of four.
pub const TSD0: u32 = 0x10;
pub const TSAD0: u32 = 0x20;
pub const CR: u32 = 0x37;
pub const ISR: u32 = 0x3E;
/// Transmit descriptors.
pub const DESCRIPTORS: u32 = 4;
/// Overhead bytes per frame on the wire: preamble, checksum, gap.
const AROUND: usize = 8 + 4 + 12;
const NANOSECONDS_PER_BYTE: u64 = 80;

/// State shared by card, thread and users.
pub struct Registers {
    pub page: SharedPage,
    causes: AtomicU32,
    sent: AtomicU64,
    /// Checksum and length of the last frame.
    last: AtomicU64,
    /// Number of frames that couldn't be read.
    lost: AtomicU64,
    stop: AtomicBool,
}

impl Registers {
    fn clear(&self) {
        for at in 0..DESCRIPTORS {
            self.page.store(TSD0 + 4 * at, 4, OWN);
        }
        self.page.store(CR, 1, 0);
        self.page.store(ISR, 2, 0);
        self.causes.store(0, Ordering::SeqCst);
    }

    /// Returns the number of sent frames, and the last one's [`sum`].
    pub fn sent(&self) -> (u64, u64) {
        (self.sent.load(Ordering::SeqCst), self.last.load(Ordering::SeqCst))
    }

    /// Returns the number of frames outside the memory.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::SeqCst)
    }
}

/// Returns a checksum that distinguishes frames.
pub fn sum(frame: &[u8]) -> u64 {
    frame.iter().fold(frame.len() as u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

/// The running card. Dropping it ends it.
pub struct Card {
    pub registers: Arc<Registers>,
    thread: Option<JoinHandle<()>>,
}

impl Card {
    /// Creates registers without a card.
    pub fn registers() -> anyhow::Result<Arc<Registers>> {
        let registers = Registers {
            page: SharedPage::new("rtl8139").context("No page for a card's registers")?,
            causes: AtomicU32::new(0),
            sent: AtomicU64::new(0),
            last: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        registers.clear();
        Ok(Arc::new(registers))
    }

    /// Starts the card on a processor. `caused` runs on its thread when its line is asserted.
    pub fn start(
        registers: &Arc<Registers>,
        memory: GuestMemorySpace,
        cpu: usize,
        caused: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let its = Arc::clone(registers);
        let thread = std::thread::Builder::new().name("card".to_owned()).spawn(move || {
            // If pinning fails, the figures' spread shows it.
            let _ = peers::pin(cpu);
            run(&its, &memory, caused);
        })?;
        Ok(Self { registers: Arc::clone(registers), thread: Some(thread) })
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.registers.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // The thread has already printed its panic.
            let _ = thread.join();
        }
    }
}

fn run(registers: &Registers, memory: &GuestMemorySpace, caused: impl Fn()) {
    let (page, mut next, mut frame) = (&registers.page, 0, vec![0; 0x2000]);
    let mut wire_free = Instant::now();
    while !registers.stop.load(Ordering::Relaxed) {
        let at = TSD0 + 4 * next;
        let descriptor = page.load(at, 4);
        if page.load(CR, 1) & TE == 0 {
            next = 0;
            std::thread::sleep(Duration::from_micros(50));
            continue;
        }
        if descriptor & OWN != 0 {
            std::hint::spin_loop();
            continue;
        }
        let length = (descriptor & 0x1FFF) as usize;
        let address = GuestAddress(u64::from(page.load(TSAD0 + 4 * next, 4)));
        if memory.memory().read_slice(&mut frame[..length], address).is_err() {
            registers.lost.fetch_add(1, Ordering::SeqCst);
        }
        let takes = Duration::from_nanos((length.max(60) + AROUND) as u64 * NANOSECONDS_PER_BYTE);
        wire_free = wire_free.max(Instant::now()) + takes;
        while Instant::now() < wire_free {
            std::hint::spin_loop();
        }
        registers.last.store(sum(&frame[..length]), Ordering::SeqCst);
        registers.sent.fetch_add(1, Ordering::SeqCst);
        registers.causes.fetch_or(TOK, Ordering::SeqCst);
        page.store(at, 4, descriptor | OWN | TOK_BIT);
        next = (next + 1) % DESCRIPTORS;
        caused();
    }
}

/// The monitor's access to the card.
pub struct Host(pub Arc<Registers>);

impl PhysicalDevice for Host {
    fn read(&mut self, _: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        if offset == ISR {
            return Ok(self.0.causes.load(Ordering::SeqCst));
        }
        Ok(self.0.page.load(offset, size))
    }

    fn write(&mut self, _: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        if offset == ISR {
            self.0.causes.fetch_and(!value, Ordering::SeqCst);
        } else {
            self.0.page.store(offset, size, value);
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
