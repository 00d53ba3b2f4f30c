//! The destination's side of a migration.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use machine::memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestMemorySpace};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use telemetry::guest_log::GuestLog;
use virtio_devices::block::DiskContent;

use super::connection::{Connection, Stop};
use super::error::{MigrationError, line};
use super::frame::{Kind, Receiver, Sender};
use super::keepalive::Keepalive;
use super::message::{self, Accepted, End, Hello};
use super::mirror;
use super::mirror::destination::MirrorDestination;
use super::pages;
use super::postcopy::fetching::{self, RemainingPages};
use super::postcopy::message::decode_missing;
use super::postcopy::set::PageSet;
use super::postcopy::{POSTCOPY_MIN_STREAMS, POSTCOPY_MIN_VERSION};
use super::sealed;
use super::shape::Shape;

/// Time-out for the source's next bytes, once it has sent something.
const SOURCE_SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for a new stream's greeting, and for all streams of a migration to connect.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// One stream of the destination, after its greeting.
struct Stream {
    connection: Connection,
    receiver: Receiver,
}

/// Devices of the destination that another process serves, and its disks.
pub trait DestinationDevices: Sync {
    /// This host's name in its cluster; `None` where no other process serves devices.
    fn host(&self) -> Result<Option<String>, MigrationError>;
    /// Receives bytes of one device's state, in order.
    fn receive_state(&self, number: u32, data: &[u8]) -> Result<(), MigrationError>;
    /// Prepares for post-copy, before any memory is received. The error says why it isn't possible.
    fn post_copy(&self) -> Result<(), MigrationError>;
    /// Disks whose images can be filled, if the source requests it.
    fn disks(&self) -> &[DiskContent];
}

/// The streams of one migration.
pub struct Streams {
    streams: Vec<Stream>,
    version: u16,
    from: String,
}

/// Waits for a source and all its streams, which are encrypted if there is a `key`. Closes connections that are no stream of a migration.
/// Drops a source whose streams don't all connect in time, and waits for the next one.
///
/// # Errors
/// When the wait is stopped, or the socket fails.
pub fn accept_streams(
    listener: &TcpListener,
    key: Option<&ClusterKey>,
    stop: &Stop,
) -> Result<Streams, MigrationError> {
    // Any host that reaches the port can cause these log lines; the log limits their rate.
    let log = GuestLog::new();
    let mut found: Vec<(Hello, Stream)> = Vec::new();
    let (mut first_accepted, mut from) = (Instant::now(), String::new());
    let version = loop {
        if !found.is_empty() && first_accepted.elapsed() > HANDSHAKE_TIMEOUT {
            telemetry::guest_warn!(
                log,
                "A source of a migration didn't open all its streams; it is sent away"
            );
            found.clear();
        }
        let Some((fd, address)) = accept(listener, stop)? else { continue };
        let (hello, spoken, stream) = match read_hello(fd, key, stop) {
            Ok(greeted) => greeted,
            Err(error) => {
                telemetry::guest_warn!(
                    log,
                    error = line(&error),
                    "A connection to the migration port is no stream of a VM"
                );
                continue;
            }
        };
        let fits = found
            .first()
            .is_none_or(|(first, _)| hello.migration == first.migration && hello.streams == first.streams);
        if !fits || found.iter().any(|(other, _)| other.stream == hello.stream) {
            telemetry::guest_warn!(log, "A stream of another migration was sent away");
            continue;
        }
        if found.is_empty() {
            first_accepted = Instant::now();
            from = address;
        }
        found.push((hello, stream));
        if found.len() == usize::from(hello.streams) {
            break spoken;
        }
    };
    found.sort_by_key(|(hello, _)| hello.stream);
    Ok(Streams { streams: found.into_iter().map(|(_, stream)| stream).collect(), version, from })
}

/// Accepts a stream; returns its socket and the peer's address.
fn accept(listener: &TcpListener, stop: &Stop) -> Result<Option<(OwnedFd, String)>, MigrationError> {
    if stop.is_set() {
        return Err(MigrationError::Cancelled);
    }
    let every = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let failed = |error: Errno| MigrationError::stream("awaited")(error.into());
    match poll(&mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)], Some(&every)) {
        Ok(0) | Err(Errno::INTR) => return Ok(None),
        Ok(_) => {}
        Err(error) => return Err(failed(error)),
    }
    match acceptfrom_with(listener, SocketFlags::CLOEXEC) {
        Ok((fd, address)) => {
            let address = address.and_then(|address| SocketAddr::try_from(address).ok());
            Ok(Some((fd, address.map_or_else(|| "its source".to_owned(), |address| address.to_string()))))
        }
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

fn read_hello(
    fd: OwnedFd,
    key: Option<&ClusterKey>,
    stop: &Stop,
) -> Result<(Hello, u16, Stream), MigrationError> {
    let mut connection = Connection::new(fd, stop.clone(), HANDSHAKE_TIMEOUT);
    sealed::as_destination(&mut connection, key)?;
    let mut receiver = Receiver::new();
    let (hello, version) = match receiver.receive(&mut connection)? {
        (Kind::Hello, payload) => Hello::decode(payload).inspect_err(|error| {
            // A source of another version can read this frame.
            let _ = Sender::new().send(&mut &mut connection, Kind::Refused, &[line(error).as_bytes()]);
        })?,
        (kind, _) => return Err(MigrationError::Protocol(format!("{kind:?} before a greeting"))),
    };
    connection.set_timeout(SOURCE_SILENCE_TIMEOUT);
    Ok((hello, version, Stream { connection, receiver }))
}

impl Streams {
    /// Uses connected streams, one after the other: for tests and fuzzing, which have no port.
    ///
    /// # Errors
    /// When a stream has no valid greeting.
    pub fn over(fds: Vec<OwnedFd>, key: Option<&ClusterKey>, stop: &Stop) -> Result<Self, MigrationError> {
        let mut streams = Vec::new();
        for fd in fds {
            streams.push(read_hello(fd, key, stop)?.2);
        }
        Ok(Self { streams, version: super::message::VERSION, from: "a test".to_owned() })
    }

    /// Receives the VM into memory that was never written. Returns its encoded state, and the connection for the rest of the protocol. On
    /// an error the function sends the reason to the source, if it can.
    ///
    /// # Errors
    /// When the VM doesn't fit `ours`, or the source disconnects or sends invalid data.
    pub fn receive(
        self,
        ours: &Shape,
        memory: &GuestMemorySpace,
        devices: &dyn DestinationDevices,
        stop: &Stop,
    ) -> Result<(IncomingMigration, Vec<u8>), MigrationError> {
        let Self { mut streams, version, from } = self;
        if streams.is_empty() {
            return Err(MigrationError::Protocol("no stream".to_owned()));
        }
        let control = streams.remove(0);
        let mut incoming = IncomingMigration {
            connection: control.connection,
            receiver: control.receiver,
            sender: Sender::new(),
            from,
            remaining: None,
            blackout: None,
        };
        match incoming.receive(streams, ours, memory, devices, version, stop) {
            Ok(state) => Ok((incoming, state)),
            Err(error) => {
                incoming.refuse(&line(&error));
                Err(error)
            }
        }
    }
}

/// A VM that was received, and whose source waits.
pub struct IncomingMigration {
    connection: Connection,
    receiver: Receiver,
    sender: Sender,
    from: String,
    remaining: Option<RemainingPages>,
    blackout: Option<Blackout>,
}

/// State of the first stream, which also carries the control frames.
struct Control<'a> {
    devices: &'a dyn DestinationDevices,
    sender: &'a mut Sender,
    version: u16,
    streams: usize,
    memory: &'a GuestMemorySpace,
    /// Not-present pages, if the source has requested post-copy.
    missing: Option<PageSet>,
    /// Start of the guest's blackout.
    blackout: Option<Blackout>,
}

/// Duration of the guest's blackout so far, by monotonic clocks: the source's clock until it had sent everything, this host's clock from
/// the reception on. The network's transit time between them isn't measured.
#[derive(Debug, Clone, Copy)]
pub struct Blackout {
    at_source: Duration,
    received_at: Instant,
}

impl Blackout {
    /// Duration until now.
    pub fn elapsed(&self) -> Duration {
        self.at_source.saturating_add(self.received_at.elapsed())
    }
}

/// Disks that are copied, for one stream's thread.
#[derive(Clone, Copy)]
struct Disks<'a> {
    mirror: &'a OnceLock<MirrorDestination>,
    stream: usize,
    stop: &'a Stop,
}

impl<'a> Disks<'a> {
    fn mirror(&self) -> Result<&'a MirrorDestination, MigrationError> {
        let none = || MigrationError::Protocol("a piece of a disk without having asked for that".to_owned());
        self.mirror.get().ok_or_else(none)
    }
}

impl Control<'_> {
    /// Handles the source's request to copy its disks here.
    fn mirror(
        &mut self,
        connection: &mut Connection,
        request: &[u8],
        disks: &Disks<'_>,
    ) -> Result<(), MigrationError> {
        if self.version < mirror::MIRROR_MIN_VERSION || disks.mirror.get().is_some() {
            return Err(MigrationError::Protocol("Mirror among pages".to_owned()));
        }
        let request = message::decode(request, "a request for disks")?;
        let (mirror, answer) = MirrorDestination::accept(&request, self.devices.disks(), self.streams)?;
        // No race: only the first stream's thread sets it.
        let _ = disks.mirror.set(mirror);
        let answer = message::encode(&answer)?;
        self.sender.send(connection, Kind::Mirror, &[&answer]).map_err(MigrationError::stream("written"))
    }

    /// Makes a round of disks durable, however long that takes, and reports it.
    fn settle(&mut self, connection: &mut Connection, disks: &Disks<'_>) -> Result<(), MigrationError> {
        let (mirror, keepalive) = (disks.mirror()?, Keepalive::of(self.version));
        let show = || keepalive.send_if_silent(self.sender, connection);
        keepalive.while_busy(|| mirror.settle(disks.stop), show)??;
        self.sender.send(connection, Kind::Settled, &[]).map_err(MigrationError::stream("written"))
    }

    /// Handles the source's request for post-copy.
    fn accept_post_copy(&mut self, connection: &mut Connection) -> Result<(), MigrationError> {
        if self.version < POSTCOPY_MIN_VERSION || self.missing.is_some() {
            return Err(MigrationError::Protocol("Postcopy among pages".to_owned()));
        }
        if self.streams < POSTCOPY_MIN_STREAMS {
            let text = format!(
                "a request for post-copy over {} streams; it takes {POSTCOPY_MIN_STREAMS}",
                self.streams
            );
            return Err(MigrationError::Protocol(text));
        }
        self.devices.post_copy()?;
        let ranges: Vec<_> =
            self.memory.memory().iter().map(|region| (region.start_addr().0, region.len())).collect();
        self.missing = Some(PageSet::empty(&ranges));
        let accepted = message::encode(&Accepted { version: self.version, host: None })?;
        self.sender.send(connection, Kind::Accepted, &[&accepted]).map_err(MigrationError::stream("written"))
    }
}

/// The pages that are still at the source, with the streams on which they are requested and arrive.
fn remaining_pages(missing: PageSet, streams: Vec<Stream>) -> Option<RemainingPages> {
    let mut streams = streams
        .into_iter()
        .map(|stream| fetching::Stream { connection: stream.connection, receiver: stream.receiver });
    let requests = streams.next()?;
    Some(RemainingPages { missing, requests, push_streams: streams.collect() })
}

impl IncomingMigration {
    /// Address of the source, for messages.
    pub fn source_address(&self) -> &str {
        &self.from
    }

    /// Duration of the blackout, where the source sends its start. Valid once everything was received.
    pub fn blackout(&self) -> Option<Blackout> {
        self.blackout
    }

    /// Pages that the post-copy still fetches, if there is one. Returned once.
    pub fn take_remaining(&mut self) -> Option<RemainingPages> {
        self.remaining.take()
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), MigrationError> {
        self.sender.send(&mut self.connection, kind, &[payload]).map_err(MigrationError::stream("written"))
    }

    /// Receives the shape of the source's machine, and compares it with `ours`.
    fn accept_offer(&mut self, ours: &Shape, streams: usize) -> Result<(), MigrationError> {
        let offered: Shape = match self.receiver.receive(&mut self.connection)? {
            (Kind::Offer, payload) => message::decode(payload, "a description")?,
            (kind, _) => {
                return Err(MigrationError::Protocol(format!("{kind:?} where an offer was to come")));
            }
        };
        if let Some(incompatibility) = ours.incompatibility(&offered) {
            return Err(MigrationError::Protocol(format!("a VM that can't run here: {incompatibility}")));
        }
        tracing::info!(vm = offered.name, source = offered.program, streams, "A VM is being received");
        Ok(())
    }

    fn receive(
        &mut self,
        others: Vec<Stream>,
        ours: &Shape,
        memory: &GuestMemorySpace,
        devices: &dyn DestinationDevices,
        version: u16,
        stop: &Stop,
    ) -> Result<Vec<u8>, MigrationError> {
        let mut others = others;
        let streams = others.len() + 1;
        self.accept_offer(ours, streams)?;
        let accepted = message::encode(&Accepted { version, host: devices.host()? })?;
        self.send(Kind::Accepted, &accepted)?;
        let mut control = Control {
            devices,
            sender: &mut self.sender,
            version,
            streams,
            memory,
            missing: None,
            blackout: None,
        };
        let mirror = OnceLock::new();
        let disks = Disks { mirror: &mirror, stream: 0, stop };
        let (first, rest) = std::thread::scope(|scope| {
            let threads: Vec<_> = others
                .iter_mut()
                .zip(1..)
                .map(|(stream, number)| {
                    scope.spawn(move || {
                        let disks = Disks { stream: number, ..disks };
                        let result = receive_stream(
                            &mut stream.receiver,
                            &mut stream.connection,
                            memory,
                            &disks,
                            None,
                        );
                        if result.is_err() {
                            // The other streams must not wait for their end.
                            stop.set();
                        }
                        result
                    })
                })
                .collect();
            let first =
                receive_stream(&mut self.receiver, &mut self.connection, memory, &disks, Some(&mut control));
            if first.is_err() {
                stop.set();
            }
            let panicked = || MigrationError::Protocol("what made a thread of this side panic".to_owned());
            let rest: Vec<_> =
                threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect();
            (first, rest)
        });
        let state = first_error(std::iter::once(first).chain(rest)).and_then(|state| {
            mirror.get().map_or(Ok(()), MirrorDestination::finish)?;
            Ok(state)
        });
        let state =
            state.inspect_err(|_| mirror.get().into_iter().for_each(MirrorDestination::warn_incomplete))?;
        self.blackout = control.blackout;
        let missing = control.missing.filter(|missing| missing.count() > 0);
        self.remaining = missing.and_then(|missing| remaining_pages(missing, others));
        state.ok_or_else(|| MigrationError::Protocol("no state".to_owned()))
    }

    /// Reports to the source that the VM can't run here. The source then resumes its guest.
    pub fn refuse(&mut self, reason: &str) {
        let reason: String = reason.chars().take(1000).collect();
        // The answer must be sent although this side's streams were stopped.
        self.connection.set_stop(Stop::default());
        self.connection.set_timeout(Duration::from_secs(1));
        if let Err(error) = self.sender.send(&mut self.connection, Kind::Refused, &[reason.as_bytes()]) {
            tracing::debug!(%error, "The reason for the refusal could not be sent to the source");
        }
    }

    /// Everything is restored: reports it to the source, and waits for the commit. After success the guest must run here, and nowhere
    /// else.
    ///
    /// # Errors
    /// When the source aborts or disconnects: the guest must not run here.
    pub fn ready(&mut self) -> Result<(), MigrationError> {
        self.send(Kind::Ready, &[])?;
        match self.receiver.receive(&mut self.connection)? {
            (Kind::Go, _) => Ok(()),
            (Kind::Abort, payload) => Err(MigrationError::AbortedBySource(message::sentence(payload))),
            (kind, _) => Err(MigrationError::Protocol(format!("{kind:?} where the commit was to come"))),
        }
    }

    /// Everything is restored: reports it to the source. The coordinator decides where the guest runs.
    ///
    /// # Errors
    /// When the report can't be sent. The coordinator may commit nevertheless.
    pub fn restored(&mut self) -> Result<(), MigrationError> {
        self.send(Kind::Ready, &[])
    }

    /// The guest runs: reports it to the source, which ends.
    ///
    /// # Errors
    /// When the source has disconnected. The guest runs here nevertheless.
    pub fn running(mut self) -> Result<(), MigrationError> {
        self.send(Kind::Running, &[])
    }
}

/// The state that one of the streams carried. Otherwise the first error that the stop didn't cause, because it is the reason for the
/// stop.
fn first_error(
    results: impl Iterator<Item = Result<Option<Vec<u8>>, MigrationError>>,
) -> Result<Option<Vec<u8>>, MigrationError> {
    let (mut state, mut stopped) = (None, None);
    for result in results {
        match result {
            Ok(found) => state = state.or(found),
            Err(MigrationError::Stream { what, source })
                if source.kind() == io::ErrorKind::ConnectionAborted =>
            {
                stopped = Some(MigrationError::Stream { what, source });
            }
            Err(error) => return Err(error),
        }
    }
    stopped.map_or(Ok(state), Err)
}

/// Receives frames until the stream's end; returns the state if this stream carried it.
fn receive_stream(
    receiver: &mut Receiver,
    connection: &mut Connection,
    memory: &GuestMemorySpace,
    disks: &Disks<'_>,
    mut control: Option<&mut Control<'_>>,
) -> Result<Option<Vec<u8>>, MigrationError> {
    let memory = memory.memory();
    let (mut pages, mut state) = (0, None);
    loop {
        match receiver.receive(connection)? {
            (Kind::Pages, payload) => pages += pages::apply(payload, &memory)?,
            (Kind::Block, payload) => disks.mirror()?.apply(payload)?,
            (Kind::Keepalive, _) if disks.stop.is_set() => {
                return Err(MigrationError::stream("read")(io::ErrorKind::ConnectionAborted.into()));
            }
            (Kind::Keepalive, _) => {}
            (Kind::Settle, _) => match &mut control {
                Some(control) => control.settle(connection, disks)?,
                None => disks.mirror()?.round_received(disks.stream),
            },
            (Kind::Mirror, payload) => match &mut control {
                Some(control) => control.mirror(connection, payload, disks)?,
                None => return Err(MigrationError::Protocol("Mirror on a further stream".to_owned())),
            },
            (Kind::Device, payload) => {
                let number = payload.split_first_chunk::<4>();
                let (number, data) = number.ok_or_else(|| {
                    MigrationError::Protocol("a device's state without its number".to_owned())
                })?;
                let control = control.as_ref().ok_or_else(|| {
                    MigrationError::Protocol("a device's state on a further stream".to_owned())
                })?;
                control.devices.receive_state(u32::from_le_bytes(*number), data)?;
            }
            (Kind::Postcopy, _) => match &mut control {
                Some(control) => control.accept_post_copy(connection)?,
                None => return Err(MigrationError::Protocol("Postcopy on a further stream".to_owned())),
            },
            (Kind::Missing, payload) => {
                let missing = control.as_mut().and_then(|control| control.missing.as_mut());
                let missing = missing.ok_or_else(|| {
                    MigrationError::Protocol("missing pages without having asked for post-copy".to_owned())
                })?;
                decode_missing(payload, missing)?;
            }
            (Kind::State, payload) if state.is_none() => state = Some(payload.to_vec()),
            (Kind::End, payload) => {
                let end: End = message::decode(payload, "an end")?;
                if end.pages != pages {
                    let text = format!("{pages} pages on a stream whose end announces {}", end.pages);
                    return Err(MigrationError::Protocol(text));
                }
                if let (None, Some(mirror)) = (&control, disks.mirror.get()) {
                    mirror.stream_ended(disks.stream);
                }
                if let Some(control) = control {
                    let blackout =
                        |us| Blackout { at_source: Duration::from_micros(us), received_at: Instant::now() };
                    control.blackout = end.blackout_us.map(blackout);
                }
                return Ok(state);
            }
            (Kind::Abort, payload) => {
                return Err(MigrationError::AbortedBySource(message::sentence(payload)));
            }
            (kind, _) => return Err(MigrationError::Protocol(format!("{kind:?} among pages"))),
        }
    }
}
