//! The client side: a device that another process serves. Thread-safe.

mod error;
mod migration;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

pub use error::ClientError;

use crate::device::{InterruptFlags, Interrupts, RegionIoFd};
use crate::doorbell_mode;
use crate::region_info::{self, RegionDescription};
use crate::socket::{Message, Socket, SocketError, Wait};
use crate::version::{Offer, PeerLimits, client_offer};
use crate::wire::{
    DEVICE_PCI, DEVICE_RESETTABLE, DMA_READABLE, DMA_WRITABLE, DeviceInfo, DmaMap, DmaUnmap, FLAG_ERROR,
    FLAG_NO_REPLY, FLAG_REPLY, HEADER, Header, IRQ_AUTOMASKED, IRQ_EVENTFD, IRQ_MASKABLE, IRQ_NO_RESIZE,
    IoFdsInfo, IrqInfo, IrqSet, MAX_VERSION_DATA, RegionAccess, RegionInfo, SET_ACTION_MASK,
    SET_ACTION_TRIGGER, SET_ACTION_UNMASK, SET_DATA_EVENTFD, SET_DATA_NONE, VERSION_MAJOR, VERSION_MINOR,
    Version, command, wire_len,
};

/// Default time-out of a request, during which a vCPU may wait.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit in bytes of a reply without region data.
const MAX_REPLY: usize = 64 << 10;
/// Limit of commands from the server that the client answers while it waits for a reply. Beyond it the server counts as
/// broken.
const MAX_FOREIGN: usize = 64;
/// Limit of regions or interrupt indices of a device.
const MAX_INDICES: u32 = 4096;

/// Properties of the server's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceDescription {
    /// It supports [`Client::reset`].
    pub resettable: bool,
    /// Number of region indices.
    pub regions: u32,
    /// Number of interrupt indices.
    pub interrupts: u32,
}

/// A connection to a server. Thread-safe; requests are serialized. After a time-out or a lost connection, all calls fail.
#[derive(Debug)]
pub struct Client {
    socket: Socket,
    /// Held from a request to its reply. Contains the next message ID.
    turn: Mutex<u16>,
    failed: AtomicBool,
    timeout: Duration,
    server: PeerLimits,
}

/// A request about to be sent.
struct Request<'a> {
    command: u16,
    name: &'static str,
    parts: &'a [&'a [u8]],
    fds: &'a [BorrowedFd<'a>],
    /// Limit of the reply's body in bytes.
    reply_limit: usize,
}

impl Client {
    /// Connects and negotiates the version. `timeout` limits each request.
    ///
    /// # Errors
    /// No server listens there, or its version isn't supported.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream =
            connect(path).map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Self::from_stream(stream, timeout)
    }

    /// Negotiates the version on a connected stream.
    ///
    /// # Errors
    /// The server's version isn't supported, or it doesn't respond.
    pub fn from_stream(stream: UnixStream, timeout: Duration) -> Result<Self, ClientError> {
        let mut client = Self {
            socket: Socket::new(stream),
            turn: Mutex::new(0),
            failed: AtomicBool::new(false),
            timeout,
            server: PeerLimits::default(),
        };
        let version = Version { major: VERSION_MAJOR, minor: VERSION_MINOR };
        let offer = client_offer();
        let name = "VERSION";
        let reply = client.request(
            &Request {
                command: command::VERSION,
                name,
                parts: &[version.as_bytes(), &offer],
                fds: &[],
                reply_limit: size_of::<Version>() + MAX_VERSION_DATA,
            },
            &|| format!("{VERSION_MAJOR}.{VERSION_MINOR}"),
        )?;
        let malformed = |what| ClientError::Malformed { request: name, what };
        let (answer, data) = Version::read_from_prefix(&reply.body).map_err(|_| malformed("it is cut"))?;
        if answer.major != VERSION_MAJOR || answer.minor > VERSION_MINOR {
            return Err(malformed("it is a version that wasn't proposed"));
        }
        let offer = Offer::parse(data).ok_or_else(|| malformed("its capabilities can't be read"))?;
        client.server = offer.limits();
        Ok(client)
    }

    /// Returns whether the connection is lost, which is final.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Closes the connection: requests in flight and later ones fail.
    pub fn close(&self) {
        self.failed.store(true, Ordering::Release);
        self.socket.shutdown();
    }

    /// Returns the limit in bytes of one [`Client::region_read`] or [`Client::region_write`].
    #[must_use]
    pub fn max_transfer(&self) -> u32 {
        self.server.max_transfer
    }

    /// Returns the properties of the server's device.
    ///
    /// # Errors
    /// The connection is lost, the server refuses, or the device isn't a PCI device.
    pub fn device(&self) -> Result<DeviceDescription, ClientError> {
        let name = "DEVICE_GET_INFO";
        let request = DeviceInfo { argsz: wire_len(size_of::<DeviceInfo>()), ..DeviceInfo::default() };
        let info: DeviceInfo = self.simple(command::DEVICE_GET_INFO, name, request.as_bytes())?;
        let malformed = |what| ClientError::Malformed { request: name, what };
        if info.flags & DEVICE_PCI == 0 {
            return Err(malformed("it is no PCI device"));
        }
        if info.num_regions > MAX_INDICES || info.num_irqs > MAX_INDICES {
            return Err(malformed("it has too many regions or interrupts"));
        }
        Ok(DeviceDescription {
            resettable: info.flags & DEVICE_RESETTABLE != 0,
            regions: info.num_regions,
            interrupts: info.num_irqs,
        })
    }

    /// Returns a region with descriptors of its mappable parts. A missing region has size 0.
    ///
    /// # Errors
    /// The connection is lost, the server refuses, or its reply is invalid.
    pub fn region(&self, index: u32) -> Result<RegionDescription, ClientError> {
        let name = "DEVICE_GET_REGION_INFO";
        let malformed = |what| ClientError::Malformed { request: name, what };
        let mut argsz = wire_len(size_of::<RegionInfo>());
        for _ in 0..2 {
            let request = RegionInfo { argsz, index, ..RegionInfo::default() };
            let reply = self.request(
                &Request {
                    command: command::DEVICE_GET_REGION_INFO,
                    name,
                    parts: &[request.as_bytes()],
                    fds: &[],
                    reply_limit: MAX_REPLY,
                },
                &|| format!("region {index}"),
            )?;
            let (info, _) = RegionInfo::read_from_prefix(&reply.body).map_err(|_| malformed("it is cut"))?;
            if info.argsz <= argsz {
                return region_info::parse(index, &reply.body, reply.fds).map_err(malformed);
            }
            argsz = info.argsz;
        }
        Err(malformed("its size changes"))
    }

    /// Returns a region's addresses whose writes signal eventfds. The others' writes are messages. The client sends this
    /// optional command only to servers that announce it (`region_io_fds`), since others may lose their place in the stream.
    ///
    /// # Errors
    /// The connection is lost, or the server's reply is invalid.
    pub fn region_io_fds(&self, index: u32) -> Result<Vec<RegionIoFd>, ClientError> {
        if !self.server.region_io_fds {
            return Ok(Vec::new());
        }
        let name = "DEVICE_GET_REGION_IO_FDS";
        let malformed = |what| ClientError::Malformed { request: name, what };
        let mut argsz = wire_len(size_of::<IoFdsInfo>());
        for _ in 0..2 {
            let request = IoFdsInfo { argsz, index, ..IoFdsInfo::default() };
            let result = self.request(
                &Request {
                    command: command::DEVICE_GET_REGION_IO_FDS,
                    name,
                    parts: &[request.as_bytes()],
                    fds: &[],
                    reply_limit: MAX_REPLY,
                },
                &|| format!("region {index}"),
            );
            let reply = match result {
                Ok(reply) => reply,
                // Optional in the protocol: many servers don't support it.
                Err(ClientError::Refused { .. }) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            };
            let (info, _) = IoFdsInfo::read_from_prefix(&reply.body).map_err(|_| malformed("it is cut"))?;
            if info.argsz <= argsz {
                return region_info::parse_io_fds(index, &reply.body, reply.fds).map_err(malformed);
            }
            argsz = info.argsz;
        }
        Err(malformed("its size changes"))
    }

    /// Returns whether this is the region of [`doorbell_mode`].
    #[must_use]
    pub fn is_doorbell_mode(region: &RegionDescription) -> bool {
        region.index == doorbell_mode::REGION
            && region.size == doorbell_mode::REGION_SIZE
            && region.kind == Some((doorbell_mode::REGION_TYPE, doorbell_mode::REGION_SUBTYPE))
    }

    /// Returns the interrupts of an index.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn interrupts(&self, index: u32) -> Result<Interrupts, ClientError> {
        let name = "DEVICE_GET_IRQ_INFO";
        let request = IrqInfo { argsz: wire_len(size_of::<IrqInfo>()), index, ..IrqInfo::default() };
        let info: IrqInfo = self.simple(command::DEVICE_GET_IRQ_INFO, name, request.as_bytes())?;
        if info.index != index {
            return Err(ClientError::Malformed { request: name, what: "it is another interrupt's" });
        }
        Ok(Interrupts {
            index,
            count: info.count,
            flags: InterruptFlags {
                eventfd: info.flags & IRQ_EVENTFD != 0,
                maskable: info.flags & IRQ_MASKABLE != 0,
                automasked: info.flags & IRQ_AUTOMASKED != 0,
                no_resize: info.flags & IRQ_NO_RESIZE != 0,
            },
        })
    }

    /// Connects interrupts `start..` of `index` to eventfds; `None` detaches.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn set_eventfds(
        &self,
        index: u32,
        start: u32,
        eventfds: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), ClientError> {
        let mut at = 0;
        while let Some(first) = eventfds.get(at) {
            let same = eventfds[at..].iter().take_while(|fd| fd.is_some() == first.is_some());
            let fds: Vec<BorrowedFd<'_>> =
                same.clone().take(self.server.max_fds.max(1)).filter_map(|fd| *fd).collect();
            let count = if fds.is_empty() { same.count() } else { fds.len() };
            let first = start.saturating_add(wire_len(at));
            self.set_irqs(SET_DATA_EVENTFD | SET_ACTION_TRIGGER, index, first, wire_len(count), &fds)?;
            at += count;
        }
        Ok(())
    }

    /// Detaches all eventfds of `index`.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn disable_interrupts(&self, index: u32) -> Result<(), ClientError> {
        self.set_irqs(SET_DATA_NONE | SET_ACTION_TRIGGER, index, 0, 0, &[])
    }

    /// Masks or unmasks one interrupt.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn mask_interrupt(&self, index: u32, number: u32, masked: bool) -> Result<(), ClientError> {
        let action = if masked { SET_ACTION_MASK } else { SET_ACTION_UNMASK };
        self.set_irqs(SET_DATA_NONE | action, index, number, 1, &[])
    }

    fn set_irqs(
        &self,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let set = IrqSet { argsz: wire_len(size_of::<IrqSet>()), flags, index, start, count };
        self.request(
            &Request {
                command: command::DEVICE_SET_IRQS,
                name: "DEVICE_SET_IRQS",
                parts: &[set.as_bytes()],
                fds,
                reply_limit: 0,
            },
            &|| format!("interrupts {start}+{count} of index {index}"),
        )
        .map(drop)
    }

    /// Reads `data.len()` bytes at `offset` of a region.
    ///
    /// # Errors
    /// The connection is lost or the server refuses; `data` is then unchanged.
    pub fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), ClientError> {
        let name = "REGION_READ";
        let access = RegionAccess { offset, region, count: self.transfer(data.len())? };
        let reply = self.request(
            &Request {
                command: command::REGION_READ,
                name,
                parts: &[access.as_bytes()],
                fds: &[],
                reply_limit: size_of::<RegionAccess>() + data.len(),
            },
            &|| format!("region {region}, offset {offset:#x}, {} bytes", access.count),
        )?;
        match RegionAccess::read_from_prefix(&reply.body) {
            Ok((answer, found)) if answer.count == access.count && found.len() == data.len() => {
                data.copy_from_slice(found);
                Ok(())
            }
            _ => Err(ClientError::Malformed { request: name, what: "it has another length" }),
        }
    }

    /// Writes at `offset` of a region. Returns after the device has the data.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let name = "REGION_WRITE";
        let access = RegionAccess { offset, region, count: self.transfer(data.len())? };
        let reply = self.request(
            &Request {
                command: command::REGION_WRITE,
                name,
                parts: &[access.as_bytes(), data],
                fds: &[],
                reply_limit: size_of::<RegionAccess>(),
            },
            &|| format!("region {region}, offset {offset:#x}, {} bytes", access.count),
        )?;
        match RegionAccess::read_from_prefix(&reply.body) {
            Ok((answer, _)) if answer.count == access.count => Ok(()),
            _ => Err(ClientError::Malformed { request: name, what: "it has another length" }),
        }
    }

    /// Writes at `offset` of a region without waiting for the device. The device gets posted writes and later requests
    /// in order.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn region_write_posted(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let access = RegionAccess { offset, region, count: self.transfer(data.len())? };
        let mut turn = self.turn();
        self.transmit(
            &mut turn,
            &Request {
                command: command::REGION_WRITE,
                name: "REGION_WRITE",
                parts: &[access.as_bytes(), data],
                fds: &[],
                reply_limit: 0,
            },
            FLAG_NO_REPLY,
            &self.wait(),
        )
        .map(drop)
    }

    fn transfer(&self, len: usize) -> Result<u32, ClientError> {
        u32::try_from(len).ok().filter(|len| *len <= self.server.max_transfer).ok_or_else(|| {
            ClientError::TooMuch {
                what: format!("A transfer of {len} bytes"),
                limit: self.server.max_transfer.into(),
            }
        })
    }

    /// Maps `size` bytes of `fd` from `fd_offset` for the device, at guest-physical `address`.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn dma_map(
        &self,
        fd: BorrowedFd<'_>,
        fd_offset: u64,
        address: u64,
        size: u64,
        writable: bool,
    ) -> Result<(), ClientError> {
        if self.server.max_fds == 0 {
            return Err(ClientError::TooMuch { what: "A file descriptor".to_owned(), limit: 0 });
        }
        let map = DmaMap {
            argsz: wire_len(size_of::<DmaMap>()),
            flags: DMA_READABLE | if writable { DMA_WRITABLE } else { 0 },
            offset: fd_offset,
            address,
            size,
        };
        self.request(
            &Request {
                command: command::DMA_MAP,
                name: "DMA_MAP",
                parts: &[map.as_bytes()],
                fds: &[fd],
                reply_limit: 0,
            },
            &|| format!("{size:#x} bytes at {address:#x}"),
        )
        .map(drop)
    }

    /// Unmaps exactly one range of [`Client::dma_map`].
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn dma_unmap(&self, address: u64, size: u64) -> Result<(), ClientError> {
        let unmap = DmaUnmap { argsz: wire_len(size_of::<DmaUnmap>()), flags: 0, address, size };
        let name = "DMA_UNMAP";
        self.request(
            &Request {
                command: command::DMA_UNMAP,
                name,
                parts: &[unmap.as_bytes()],
                fds: &[],
                reply_limit: size_of::<DmaUnmap>(),
            },
            &|| format!("{size:#x} bytes at {address:#x}"),
        )
        .map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    /// The connection is lost or the server refuses.
    pub fn reset(&self) -> Result<(), ClientError> {
        self.request(
            &Request {
                command: command::DEVICE_RESET,
                name: "DEVICE_RESET",
                parts: &[],
                fds: &[],
                reply_limit: 0,
            },
            &String::new,
        )
        .map(drop)
    }

    fn turn(&self) -> MutexGuard<'_, u16> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) -> Wait<'static> {
        Wait { stop: None, deadline: Instant::now().checked_add(self.timeout) }
    }

    /// Sends a request whose reply is one fixed structure.
    fn simple<T: FromBytes>(
        &self,
        command: u16,
        name: &'static str,
        request: &[u8],
    ) -> Result<T, ClientError> {
        let reply = self.request(
            &Request { command, name, parts: &[request], fds: &[], reply_limit: MAX_REPLY },
            &String::new,
        )?;
        T::read_from_prefix(&reply.body)
            .map(|(value, _)| value)
            .map_err(|_| ClientError::Malformed { request: name, what: "it is cut" })
    }

    /// Sends a request and waits for its reply.
    fn request(&self, request: &Request<'_>, values: &dyn Fn() -> String) -> Result<Message, ClientError> {
        let mut turn = self.turn();
        let wait = self.wait();
        let id = self.transmit(&mut turn, request, 0, &wait)?;
        let reply = self.reply(id, request, &wait).map_err(|error| self.lose(request.name, error))?;
        drop(turn);
        if reply.header.flags & FLAG_ERROR == 0 {
            return Ok(reply);
        }
        let code = i32::try_from(reply.header.error).unwrap_or(0);
        let code = if code == 0 { Errno::IO.raw_os_error() } else { code };
        Err(ClientError::Refused {
            request: request.name,
            values: values(),
            source: io::Error::from_raw_os_error(code),
        })
    }

    /// Sends a request; returns its message ID.
    fn transmit(
        &self,
        turn: &mut u16,
        request: &Request<'_>,
        flags: u32,
        wait: &Wait<'_>,
    ) -> Result<u16, ClientError> {
        if self.is_failed() {
            let source = io::ErrorKind::NotConnected.into();
            return Err(ClientError::Lost { request: request.name, source });
        }
        let id = *turn;
        *turn = turn.wrapping_add(1);
        let size = wire_len(HEADER + request.parts.iter().map(|part| part.len()).sum::<usize>());
        let header = Header { id, command: request.command, size, flags, error: 0 };
        self.socket
            .send(&header, request.parts, request.fds, wait)
            .map_err(|error| self.lose(request.name, error))?;
        Ok(id)
    }

    fn reply(&self, id: u16, request: &Request<'_>, wait: &Wait<'_>) -> Result<Message, SocketError> {
        let limit = HEADER + request.reply_limit;
        for _ in 0..MAX_FOREIGN {
            let message = self.socket.receive(limit.max(MAX_REPLY), wait)?;
            if message.header.is_reply() {
                let matches = message.header.id == id
                    && message.header.command == request.command
                    && HEADER + message.body.len() <= limit;
                return if matches { Ok(message) } else { Err(unexpected()) };
            }
            // A command from the server, for instance DMA_READ. The client supports none.
            if message.header.is_command() && !message.header.no_reply() {
                let answer = Header {
                    size: wire_len(HEADER),
                    flags: FLAG_REPLY | FLAG_ERROR,
                    error: u32::try_from(Errno::NOTSUP.raw_os_error()).unwrap_or(0),
                    ..message.header
                };
                self.socket.send(&answer, &[], &[], wait)?;
            }
        }
        Err(unexpected())
    }

    /// Marks the connection as lost: later messages can't be matched to requests.
    fn lose(&self, request: &'static str, error: SocketError) -> ClientError {
        self.close();
        let source = match error {
            SocketError::Io(source) => source,
            SocketError::TimedOut => io::ErrorKind::TimedOut.into(),
            SocketError::Closed => io::ErrorKind::ConnectionReset.into(),
            error @ (SocketError::Cut | SocketError::Size { .. } | SocketError::Stopped) => {
                io::Error::new(io::ErrorKind::InvalidData, error)
            }
        };
        ClientError::Lost { request, source }
    }
}

/// Connects without blocking. A listener whose queue is full returns EAGAIN, where a blocking connect would wait
/// forever.
fn connect(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

fn unexpected() -> SocketError {
    SocketError::Io(io::Error::new(io::ErrorKind::InvalidData, "the reply doesn't belong to the request"))
}

/// For polling the server's end of the connection: readable with HUP after it has closed. Don't read from it.
impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.stream().as_fd()
    }
}
