//! The RDMA function: PCI, registers, commands. It uses no interrupts.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::commands::{ACKNOWLEDGE, CommandHeader, ResponseHeader, number};
use crate::abi::registers::{self, control};
use crate::abi::rings::EVENT_RING_PAGES;
use crate::abi::shared_region::{DriverPart, RingPages};
use crate::abi::{commands, pci};
use crate::fail;
use crate::memory::{PAGE, Pages, load, read, store, word, write};

/// Configuration space of bus 0, 4 KiB per function.
const ECAM: u64 = 0xe000_0000;
/// Where the program places the function's doorbells: the monitor may have placed them above 4 GiB, which isn't mapped. The end of the
/// 32-bit window, far from what the monitor placed there.
const UAR_ADDRESS: u64 = 0xdfe0_0000;

const COMMAND: u64 = 4;
const COMMAND_MEMORY: u32 = 2;
const COMMAND_MASTER: u32 = 4;
const BAR0: u64 = 0x10;

/// The device.
pub struct Device {
    registers: u64,
    command_slot: u64,
    response_slot: u64,
}

/// Returns the configuration space of the RDMA function.
fn find() -> u64 {
    let wanted = u32::from(pci::DEVICE) << 16 | u32::from(pci::VENDOR);
    let mut functions = (0..32).map(|slot| ECAM + (slot << 15 | u64::from(pci::FUNCTION) << 12));
    functions.find(|function| load(*function) == wanted).unwrap_or_else(|| fail("no RDMA function"))
}

impl Device {
    /// Finds and activates the device.
    pub fn start(pages: &mut Pages) -> Self {
        let function = find();
        let bar = |number: u8| function + BAR0 + 4 * u64::from(number);
        store(function + COMMAND, 0);
        store(bar(pci::UAR_BAR), word(UAR_ADDRESS));
        store(bar(pci::UAR_BAR) + 4, 0);
        store(function + COMMAND, COMMAND_MEMORY | COMMAND_MASTER);
        let registers = u64::from(load(bar(pci::REGISTER_BAR)) & !0xf);
        if registers == 0 || load(registers + registers::VERSION) < 20 {
            fail("the RDMA function's registers aren't placed, or of an old version");
        }
        let device = Self { registers, command_slot: pages.take(1), response_slot: pages.take(1) };
        device.describe(pages);
        device
    }

    fn write(&self, register: u64, value: u32) {
        store(self.registers + register, value);
    }

    fn error(&self) -> u32 {
        load(self.registers + registers::ERROR)
    }

    /// Passes the shared region, and activates the device.
    fn describe(&self, pages: &mut Pages) {
        let mut ring = || {
            let first = pages.take(EVENT_RING_PAGES.into());
            let directory = pages.directory(first, EVENT_RING_PAGES.into());
            RingPages { pages: EVENT_RING_PAGES.into(), reserved: 0.into(), directory: directory.into() }
        };
        let part = DriverPart {
            driver_version: registers::INTERFACE_VERSION.into(),
            pad0: 0.into(),
            os: (2 | 1 << 2 | 1 << 6).into(),
            pad1: 0.into(),
            command_slot: self.command_slot.into(),
            response_slot: self.response_slot.into(),
            async_ring: ring(),
            completion_ring: ring(),
            uar_pfn: (UAR_ADDRESS / PAGE).into(),
        };
        let region = pages.take(1);
        write(region, part);
        self.write(registers::DSR_LOW, word(region));
        self.write(registers::DSR_HIGH, 0);
        self.write(registers::INTERRUPT_MASK, u32::MAX);
        self.write(registers::CONTROL, control::ACTIVATE);
        if self.error() != 0 {
            fail("the device wasn't activated");
        }
    }

    fn request(&self, code: u32, body: impl IntoBytes + Immutable) {
        write(
            self.command_slot,
            CommandHeader { response: 0.into(), command: code.into(), reserved: 0.into() },
        );
        write(self.command_slot + commands::HEADER_SIZE as u64, body);
        self.write(registers::REQUEST, 0);
        if self.error() != 0 {
            fail("a command was refused");
        }
    }

    /// Executes a command with a response.
    pub fn command<T: FromBytes>(&self, code: u32, body: impl IntoBytes + Immutable) -> T {
        self.request(code, body);
        let header: ResponseHeader = read(self.response_slot);
        if header.acknowledge.get() != ACKNOWLEDGE | code || header.error != 0 {
            fail("a command failed");
        }
        read(self.response_slot + commands::HEADER_SIZE as u64)
    }

    /// Binds the address of this VM.
    pub fn bind(&self, gid: [u8; 16]) {
        let bind = commands::CreateBind {
            mtu: 1024.into(),
            vlan: 0xfff.into(),
            index: 0.into(),
            gid,
            gid_type: 2,
            reserved: [0; 3],
        };
        self.request(number::CREATE_BIND, bind);
    }
}

/// Returns the page frame number of a page of doorbells.
pub const fn uar_frame(page: u64) -> u64 {
    UAR_ADDRESS / PAGE + page
}

/// Writes a doorbell.
pub fn doorbell(page: u64, word: u64, value: u32) {
    store(UAR_ADDRESS + page * PAGE + word, value);
}
