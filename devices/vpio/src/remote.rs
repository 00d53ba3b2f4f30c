//! A card that another process emulates: QEMU's device models behind a socket (`-machine x-remote`, `x-remote-object`).
//! Debian's QEMU packages include them.
//!
//! [`Remote::start`] starts the process, which ends with the value. It speaks QEMU's protocol between a proxy and a
//! remote device (`hw/remote` of QEMU 7.2, unchanged in later releases): messages of a header and a fixed body, in this
//! machine's byte order. Register accesses use the addresses of the card's BARs in the process. INTx arrives on an
//! eventfd, and a second eventfd makes the process sample the line again. The card reaches only mapped guest memory:
//! the process has descriptors and offsets of these regions and nothing else, so it stands for an IOMMU. It accepts at
//! most seven regions of whole pages, which are always writable.
//!
//! Used by tests and benchmarks on hosts without a card. Each access costs a round trip on the socket.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_models::describe::{Bar, Device};
use device_models::physical::{DeviceError, Mapping, PhysicalDevice, poke};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair, sockopt,
};
use thiserror::Error;

/// Message types.
const SYNC_SYSMEM: u32 = 0;
const RET: u32 = 1;
const CONFIG_WRITE: u32 = 2;
const CONFIG_READ: u32 = 3;
const BAR_WRITE: u32 = 4;
const BAR_READ: u32 = 5;
const SET_IRQFD: u32 = 6;
const DEVICE_RESET: u32 = 7;
/// Header size in bytes: type, padding, size of the body.
const HEAD: usize = 16;
/// Region entries in a message, and how many of them may be used: the process rejects a full message.
const PLACES: usize = 8;
const MOST_PIECES: usize = PLACES - 1;
/// Time-out of a response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// QEMU resets the machine once after its start, which discards earlier writes. No register may change before that.
const SETTLED: Duration = Duration::from_millis(1000);
/// Offsets in configuration space.
const COMMAND: u32 = 4;
const DECODE: u32 = 0x3;
const BUS_MASTER: u32 = 0x4;
const FIRST_BAR: u32 = 0x10;
/// Addresses of the card's BARs in the process: ports, and memory above all RAM.
const PORTS: u64 = 0xC000;
const MEMORY: u64 = 0xF000_0000;
/// Distance in bytes between two BARs.
const APART: u64 = 0x100_0000;
/// A page that the card may always reach, since the protocol can't express an empty set of regions.
const NOTHING: u64 = 0xFFFF_F000;
const PAGE: u64 = 4096;

/// Memory that can be mapped for the card: a range of a file.
#[derive(Debug, Clone)]
pub struct RamFile {
    /// Guest-physical base, a multiple of the page size.
    pub guest_base: u64,
    /// Length in bytes, a multiple of the page size.
    pub length: u64,
    /// The file, a memfd.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

/// The process can't be started or used.
#[derive(Debug, Error)]
pub enum RemoteError {
    /// QEMU has no model of the device.
    #[error("QEMU has no model of {0}")]
    NoModel(&'static str),
    /// The process can't be started.
    #[error("{program} can't be started with a remote {device}; Debian has it in qemu-system-x86")]
    Start {
        /// The program's path.
        program: String,
        /// The device's name.
        device: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The process doesn't follow the protocol.
    #[error("The process that plays {device} doesn't work")]
    Broken {
        /// The device's name.
        device: &'static str,
        /// The failed operation and its error.
        #[source]
        source: DeviceError,
    },
}

/// The card. Dropping it ends the process.
#[derive(Debug)]
pub struct Remote {
    description: &'static Device,
    process: Child,
    socket: OwnedFd,
    /// Each BAR's address, and whether it is a memory BAR.
    bars: Vec<Option<(u64, bool)>>,
    ram: Vec<RamFile>,
    nothing: Arc<OwnedFd>,
    mappings: BTreeMap<u64, Mapping>,
    trigger: OwnedFd,
    resample: OwnedFd,
    signalled: bool,
    master: bool,
}

fn model(device: &Device) -> Option<&'static str> {
    match device.name {
        "ne2000" => Some("ne2k_pci"),
        "rtl8139" => Some("rtl8139"),
        "e1000" => Some("e1000"),
        _ => None,
    }
}

impl Remote {
    /// Starts `program` (QEMU) with a card. `network` has the syntax of QEMU's `-netdev` without its `id`
    /// (`socket,udp=…,localaddr=…`). The card is reset and reaches no memory.
    ///
    /// # Errors
    /// The program is missing, doesn't support the device, or exits.
    pub fn start(
        program: &Path,
        description: &'static Device,
        address: [u8; 6],
        network: &str,
    ) -> Result<Self, RemoteError> {
        let name = model(description).ok_or(RemoteError::NoModel(description.name))?;
        let failed = |source: io::Error| RemoteError::Start {
            program: program.display().to_string(),
            device: description.name,
            source,
        };
        let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(ANSWER_TIMEOUT))
            .and_then(|()| sockopt::set_socket_timeout(&ours, sockopt::Timeout::Send, Some(ANSWER_TIMEOUT)))
            .map_err(|error| failed(error.into()))?;
        let mac = address.map(|byte| format!("{byte:02x}")).join(":");
        let process = Command::new(program)
            .args([
                "-machine",
                "x-remote",
                "-nodefaults",
                "-display",
                "none",
                "-monitor",
                "none",
                "-serial",
                "none",
            ])
            .args(["-netdev", &format!("{},id=net0", network.trim_end_matches(','))])
            .args(["-device", &format!("{name},id=card,netdev=net0,mac={mac},romfile=")])
            .args(["-object", "x-remote-object,id=remote,devid=card,fd=0"])
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let made = event().and_then(|trigger| Ok((trigger, event()?, memory_file(PAGE)?)));
        let (trigger, resample, nothing) = match made {
            Ok(made) => made,
            Err(error) => {
                end(process);
                return Err(failed(error.into()));
            }
        };
        let bars = (0u64..).zip(description.bars).map(|(at, bar)| match bar {
            Bar::Ports(_) => Some((PORTS + at * 0x1000, false)),
            Bar::Memory(_) => Some((MEMORY + at * APART, true)),
            Bar::Hidden => None,
        });
        let mut card = Self {
            description,
            process,
            socket: ours,
            bars: bars.collect(),
            ram: Vec::new(),
            nothing: Arc::new(nothing),
            mappings: BTreeMap::new(),
            trigger,
            resample,
            signalled: false,
            master: false,
        };
        card.begin().map_err(|source| RemoteError::Broken { device: description.name, source })?;
        Ok(card)
    }

    /// Returns the card's description.
    #[must_use]
    pub fn description(&self) -> &'static Device {
        self.description
    }

    /// Sets the memory that may be mapped: the guest's and the monitor's.
    pub fn set_ram(&mut self, ram: Vec<RamFile>) {
        self.ram = ram;
    }

    /// Returns the eventfd of the INTx line.
    #[must_use]
    pub fn interrupt_fd(&self) -> BorrowedFd<'_> {
        self.trigger.as_fd()
    }

    /// Ends an interrupt after its causes were read: a line that is still asserted signals again.
    ///
    /// # Errors
    /// The process has ended.
    pub fn unmask(&mut self) -> Result<(), DeviceError> {
        self.signalled = false;
        rustix::io::write(&self.resample, &1_u64.to_ne_bytes())
            .map_err(|error| self.failed(0, 0, &format!("its line can't be looked at: {error}")))?;
        // The process samples its line in its event loop: at the latest between two messages.
        for _ in 0..2 {
            self.config(CONFIG_READ, 0, 0, 4)?;
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), DeviceError> {
        let ids = self.config(CONFIG_READ, 0, 0, 4)?;
        let pci = &self.description.pci;
        if ids != u32::from(pci.vendor) | u32::from(pci.device) << 16 {
            return Err(self.failed(0, 0, &format!("it says that it is {ids:#010x}")));
        }
        let (mut since, began) = (Instant::now(), Instant::now());
        self.place()?;
        while since.elapsed() < SETTLED {
            std::thread::sleep(Duration::from_millis(20));
            if !self.is_placed()? {
                if began.elapsed() > ANSWER_TIMEOUT {
                    return Err(self.failed(
                        0,
                        0,
                        "its base address registers don't stay as they are written",
                    ));
                }
                self.place()?;
                since = Instant::now();
            }
        }
        let fds = [self.trigger.as_fd(), self.resample.as_fd()];
        send(&self.socket, SET_IRQFD, &[], &fds).map_err(|error| self.failed(0, 0, &error.to_string()))?;
        self.tell_memory()?;
        self.reset()
    }

    /// Sets the addresses of the BARs and enables their decoding.
    fn place(&mut self) -> Result<(), DeviceError> {
        for (at, bar) in (0u32..).zip(self.bars.clone()) {
            if let Some((address, _)) = bar {
                let address = u32::try_from(address).unwrap_or(0);
                self.config(CONFIG_WRITE, FIRST_BAR + 4 * at, address, 4)?;
            }
        }
        self.write_command()
    }

    fn is_placed(&mut self) -> Result<bool, DeviceError> {
        for (at, bar) in (0u32..).zip(self.bars.clone()) {
            let Some((address, _)) = bar else { continue };
            if u64::from(self.config(CONFIG_READ, FIRST_BAR + 4 * at, 0, 4)? & !0xF) != address & !0xF {
                return Ok(false);
            }
        }
        Ok(self.config(CONFIG_READ, COMMAND, 0, 2)? & DECODE == DECODE)
    }

    fn write_command(&mut self) -> Result<(), DeviceError> {
        let value = DECODE | if self.master { BUS_MASTER } else { 0 };
        self.config(CONFIG_WRITE, COMMAND, value, 2).map(drop)
    }

    fn failed(&self, bar: u8, offset: u32, why: &str) -> DeviceError {
        DeviceError { bar, offset, why: format!("{why} (the process that plays {})", self.description.name) }
    }

    /// Sends a request and returns the response.
    fn ask(&mut self, kind: u32, body: &[u8]) -> Result<u64, String> {
        send(&self.socket, kind, body, &[]).map_err(|error| format!("it can't be reached: {error}"))?;
        let word = |bytes: &[u8], at: usize| {
            let bytes: [u8; 8] =
                bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        let mut head = [0; HEAD];
        self.receive(&mut head)?;
        let (kind, bytes) = (word(&head, 0) & 0xFFFF_FFFF, word(&head, 8));
        // The response to a reset has no body.
        if kind != u64::from(RET) || ![0, 8].contains(&bytes) {
            return Err(format!("it answered with a message of kind {kind} and {bytes} bytes"));
        }
        let mut body = [0; 8];
        if bytes == 8 {
            self.receive(&mut body)?;
        }
        Ok(word(&body, 0))
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<(), String> {
        let mut got = 0;
        while let Some(rest) = into.get_mut(got..).filter(|rest| !rest.is_empty()) {
            match recv(&self.socket, rest, RecvFlags::empty()) {
                Ok((0, _)) => return Err("it has ended".to_owned()),
                Ok((more, _)) => got += more,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    return Err(format!("it hasn't answered for {ANSWER_TIMEOUT:?}"));
                }
                Err(error) => return Err(format!("its answer can't be read: {error}")),
            }
        }
        Ok(())
    }

    /// Accesses configuration space.
    fn config(&mut self, kind: u32, offset: u32, value: u32, bytes: u32) -> Result<u32, DeviceError> {
        let mut body = Vec::with_capacity(12);
        for word in [offset, value, bytes] {
            body.extend(word.to_ne_bytes());
        }
        let answer = self.ask(kind, &body).map_err(|why| self.failed(0, offset, &why))?;
        u32::try_from(answer & 0xFFFF_FFFF).map_err(|_| self.failed(0, offset, "its answer is none"))
    }

    fn access(&mut self, kind: u32, bar: u8, offset: u32, size: u8, value: u32) -> Result<u64, DeviceError> {
        let Some(Some((base, memory))) = self.bars.get(usize::from(bar)).copied() else {
            return Err(self.failed(bar, offset, "it has no such BAR"));
        };
        let mut body = Vec::with_capacity(24);
        body.extend((base + u64::from(offset)).to_ne_bytes());
        body.extend(u64::from(value).to_ne_bytes());
        body.extend(u32::from(size).to_ne_bytes());
        body.extend([u8::from(memory), 0, 0, 0]);
        self.ask(kind, &body).map_err(|why| self.failed(bar, offset, &why))
    }

    /// Returns the file ranges of the current mappings, with adjacent ones merged.
    fn pieces(&self) -> Result<Vec<(u64, u64, RamFile)>, DeviceError> {
        let mut pieces: Vec<(u64, u64, RamFile)> = Vec::new();
        for mapping in self.mappings.values() {
            let end = mapping.guest_base.saturating_add(mapping.length);
            let inside = |ram: &&RamFile| {
                mapping.guest_base >= ram.guest_base && end <= ram.guest_base.saturating_add(ram.length)
            };
            let ram = self.ram.iter().find(inside);
            let ram =
                ram.ok_or_else(|| self.failed(0, 0, &format!("{:#x} isn't memory", mapping.guest_base)))?;
            let offset = ram.offset + (mapping.guest_base - ram.guest_base);
            if let Some((base, length, before)) = pieces.last_mut()
                && *base + *length == mapping.device_base
                && Arc::ptr_eq(&before.file, &ram.file)
                && before.offset + *length == offset
            {
                *length += mapping.length;
                continue;
            }
            pieces.push((mapping.device_base, mapping.length, RamFile { offset, ..ram.clone() }));
        }
        Ok(pieces)
    }

    /// Sends the process the set of all regions that the card reaches, which replaces the previous set.
    fn tell_memory(&mut self) -> Result<(), DeviceError> {
        let mut pieces = self.pieces()?;
        if pieces.is_empty() {
            let file =
                RamFile { guest_base: NOTHING, length: PAGE, file: Arc::clone(&self.nothing), offset: 0 };
            pieces.push((NOTHING, PAGE, file));
        }
        if pieces.len() > MOST_PIECES {
            let why =
                format!("the card is to reach {} pieces of memory, {MOST_PIECES} are the most", pieces.len());
            return Err(self.failed(0, 0, &why));
        }
        let mut columns = [[0_u64; PLACES]; 3];
        for (at, (base, length, ram)) in pieces.iter().enumerate() {
            for (column, value) in columns.iter_mut().zip([*base, *length, ram.offset]) {
                if let Some(place) = column.get_mut(at) {
                    *place = value;
                }
            }
        }
        let body: Vec<u8> = columns.iter().flatten().flat_map(|value| value.to_ne_bytes()).collect();
        let fds: Vec<BorrowedFd<'_>> = pieces.iter().map(|(_, _, ram)| ram.file.as_fd()).collect();
        send(&self.socket, SYNC_SYSMEM, &body, &fds)
            .map_err(|error| self.failed(0, 0, &error.to_string()))?;
        // The message has no response. This request's response confirms that the process has handled both.
        self.config(CONFIG_READ, 0, 0, 4).map(drop)
    }
}

/// Sends a message with descriptors.
fn send(socket: &OwnedFd, kind: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend((body.len() as u64).to_ne_bytes());
    bytes.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PLACES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        sent += rustix::net::send(socket, rest, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// Creates a memfd of `bytes` bytes.
///
/// # Errors
/// The kernel refuses.
pub fn memory_file(bytes: u64) -> Result<OwnedFd, rustix::io::Errno> {
    let file = rustix::fs::memfd_create("card", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file)
}

fn end(mut process: Child) {
    // The process may have exited by itself.
    let _ = process.kill();
    let _ = process.wait();
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl PhysicalDevice for Remote {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        let value = self.access(BAR_READ, bar, offset, size, 0)?;
        let mask = u64::from(u32::MAX >> (32 - 8 * u32::from(size.clamp(1, 4))));
        u32::try_from(value & mask).map_err(|_| self.failed(bar, offset, "its answer is none"))
    }

    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        self.access(BAR_WRITE, bar, offset, size, value).map(drop)
    }

    /// Returns whether the line was signalled since [`Remote::unmask`].
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        // QEMU makes descriptors that it receives blocking, for both sides.
        let mut ready = [PollFd::new(&self.trigger, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if matches!(poll(&mut ready, Some(&at_once)), Ok(1..)) {
            rustix::io::read(&self.trigger, &mut [0_u8; 8])
                .map_err(|error| self.failed(0, 0, &format!("its line can't be read: {error}")))?;
            self.signalled = true;
        }
        Ok(self.signalled)
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.master = false;
        self.ask(DEVICE_RESET, &[]).map_err(|why| self.failed(0, 0, &why))?;
        self.place()?;
        let description = self.description;
        poke(description, self, description.reset)
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.master = on;
        self.write_command()
    }

    fn has_iommu(&self) -> bool {
        true
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if !(mapping.device_base | mapping.guest_base | mapping.length).is_multiple_of(PAGE) {
            return Err(self.failed(0, 0, &format!("{:#x} isn't whole pages", mapping.guest_base)));
        }
        self.mappings.insert(mapping.device_base, mapping);
        let told = self.tell_memory();
        if told.is_err() {
            self.mappings.remove(&mapping.device_base);
        }
        told
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.mappings.remove(&mapping.device_base);
        self.tell_memory()
    }
}
