//! The destination's threads: one reads faults and requests pages, one per stream places pages in memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use machine::memory::postcopy::PostCopyRam;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::incoming::{Fault, Incoming, WaitStats};
use super::message::{Complete, MAX_WANTED_PAGES, encode_wanted};
use super::presence::Presence;
use super::set::{NoSuchPage, PageSet};
use crate::migration::connection::{Connection, Stop};
use crate::migration::error::{MigrationError, line};
use crate::migration::frame::{Kind, Receiver, Sender};
use crate::migration::message;
use crate::migration::pages::{self, PAGE};

/// Interval at which the fault thread checks whether the post-copy is over.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// A stream may be silent for any time, if no page is requested.
const NO_TIMEOUT: Duration = Duration::MAX;
/// Bytes of a page, as `u64`.
const STEP: u64 = PAGE as u64;

/// A stream after its `End` frame.
pub struct Stream {
    /// The socket.
    pub connection: Connection,
    /// Continues the count of frames.
    pub receiver: Receiver,
}

/// The rest of the VM, after everything else was received.
pub struct RemainingPages {
    /// Not-present pages.
    pub missing: PageSet,
    /// Stream for requests and their pages.
    pub requests: Stream,
    /// Streams for pushed pages.
    pub push_streams: Vec<Stream>,
}

/// Handler for the loss of pages that can't be fetched any more. Its arguments are the number of pages, whether the guest was committed
/// to this side ([`Fetching::commit`]), and the cause. Called once, from a thread of this module. Threads that wait for pages stay
/// blocked.
pub type OnLost = Box<dyn Fn(u64, bool, MigrationError) + Send + Sync>;

/// Progress of a post-copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Pages that aren't present yet.
    pub left: u64,
    /// Waits of threads for pages.
    pub waits: WaitStats,
    /// Faults for pages that are zero because they were never used.
    pub zero: u64,
    /// Received pages that weren't missing.
    pub dropped: u64,
    /// Whether all pages are present.
    pub over: bool,
}

/// A running post-copy. Cheap to clone.
#[derive(Clone)]
pub struct Fetching(Arc<Shared>);

struct Shared {
    ram: PostCopyRam,
    pages: Mutex<Incoming>,
    began: Instant,
    requests: Mutex<(Connection, Sender)>,
    stop: Stop,
    state: Mutex<State>,
    huge: bool,
    on_lost: OnLost,
    /// Presence map for a daemon that also has the memory mapped.
    presence: Option<Presence>,
}

/// State of the post-copy.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// The guest is committed to this side. The source must not get `Complete` before.
    committed: bool,
    /// All pages are in memory.
    complete: bool,
    /// The streams have no more messages to send or receive.
    over: bool,
}

impl Fetching {
    /// Starts the post-copy. `ram` was created without the missing pages of `rest`. `presence`, for a daemon that has the memory mapped,
    /// was filled. The threads end when all pages are present, or with the process. Once they are, the kernel may use huge pages again if
    /// `huge`.
    ///
    /// # Errors
    /// When the host refuses a thread or descriptor.
    pub fn begin(
        rest: RemainingPages,
        ram: PostCopyRam,
        presence: Option<Presence>,
        huge: bool,
        on_lost: OnLost,
    ) -> Result<Self, MigrationError> {
        let stop = Stop::default();
        let RemainingPages { missing, mut requests, mut push_streams } = rest;
        let writer = requests.connection.sender(stop.clone(), super::serving::COMPLETE_TIMEOUT);
        let writer = writer.map_err(MigrationError::stream("used for page requests"))?;
        requests.connection.set_timeout(NO_TIMEOUT);
        for stream in push_streams.iter_mut().chain([&mut requests]) {
            stream.connection.set_stop(stop.clone());
        }
        let fetching = Self(Arc::new(Shared {
            ram,
            pages: Mutex::new(Incoming::new(missing)),
            began: Instant::now(),
            requests: Mutex::new((writer, Sender::new())),
            stop,
            state: Mutex::default(),
            huge,
            on_lost,
            presence,
        }));
        fetching.spawn("faults", Shared::handle_faults)?;
        for stream in push_streams.into_iter().chain([requests]) {
            fetching.spawn("pages", move |shared| shared.receive_pages(stream))?;
        }
        fetching.0.end_if_complete();
        Ok(fetching)
    }

    fn spawn(
        &self,
        name: &str,
        work: impl FnOnce(&Shared) -> Result<(), MigrationError> + Send + 'static,
    ) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.0);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            if let Err(error) = work(&shared) {
                shared.handle_loss(error);
            }
        });
        spawned.map(drop).map_err(MigrationError::machine("given a thread"))
    }

    /// Progress. The time for this call grows with the number of pages that threads waited for.
    pub fn report(&self) -> Report {
        let pages = self.0.pages();
        let (zero, dropped) = pages.others();
        let (left, waits) = (pages.left(), pages.wait_stats());
        Report { left, waits, zero, dropped, over: self.0.state().complete }
    }

    /// Pages that aren't present yet.
    pub fn left(&self) -> u64 {
        self.0.pages().left()
    }

    /// Records that the guest is committed to this side.
    pub fn commit(&self) {
        self.0.complete_if(|state| {
            state.committed = true;
            state.complete
        });
    }

    /// The VM ends, and needs no more pages: reports it to the source. Does nothing if all pages are present, or the guest isn't
    /// committed to this side.
    pub fn end(&self) {
        self.0.complete_if(|state| state.committed);
    }

    /// After an abort: the source keeps or resumes the guest, so pages that can't be fetched are no loss.
    pub fn abandon(&self) {
        self.0.state().over = true;
        self.0.stop.set();
    }
}

impl Shared {
    fn pages(&self) -> MutexGuard<'_, Incoming> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since the start.
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn handle_faults(&self) -> Result<(), MigrationError> {
        let failed = |error: std::io::Error| MigrationError::machine("watched for missing pages")(error);
        let (mut faults, mut wanted) = (Vec::new(), Vec::new());
        loop {
            let State { complete, over, .. } = *self.state();
            if complete || over {
                return Ok(());
            }
            let presence = self.presence.iter().map(Presence::fd);
            let fds = std::iter::once(self.ram.fd()).chain(presence);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut fds, Some(&POLL_INTERVAL)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            faults.clear();
            self.ram.faults(&mut faults).map_err(failed)?;
            wanted.clear();
            let now = self.now();
            for page in &faults {
                // The kernel reports only pages of RAM.
                let fault =
                    self.pages().fault(*page, now).map_err(|error| failed(std::io::Error::other(error)))?;
                match fault {
                    Fault::Request => wanted.push(*page),
                    Fault::Zero => drop(self.ram.place(*page, &[0; PAGE]).map_err(failed)?),
                    Fault::Wait => {}
                }
            }
            faults.clear();
            if let Some(presence) = &self.presence {
                presence.take_requests(&mut faults).map_err(failed)?;
            }
            let mut here = false;
            for page in &faults {
                match self.pages().fault(*page, now).map_err(|error| failed(std::io::Error::other(error)))? {
                    Fault::Request => wanted.push(*page),
                    Fault::Wait => {}
                    // The page has been placed in the meantime.
                    Fault::Zero => here |= self.presence.as_ref().is_some_and(|all| all.placed(*page)),
                }
            }
            if here && let Some(presence) = &self.presence {
                presence.notify();
            }
            for some in wanted.chunks(MAX_WANTED_PAGES) {
                let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
                let (connection, sender) = &mut *requests;
                let sent = sender.send(connection, Kind::Want, &[&encode_wanted(some)]);
                sent.map_err(MigrationError::stream("written"))?;
            }
        }
    }

    fn receive_pages(&self, mut stream: Stream) -> Result<(), MigrationError> {
        loop {
            match stream.receiver.receive(&mut stream.connection)? {
                (Kind::Pages, payload) => {
                    let run = pages::parse(payload)?;
                    let mut wanted = false;
                    for index in 0..u64::from(run.pages) {
                        wanted |= self.place_page(&run, index)?;
                    }
                    if wanted && let Some(presence) = &self.presence {
                        presence.notify();
                    }
                    self.end_if_complete();
                }
                (Kind::Abort, payload) => {
                    return Err(MigrationError::AbortedBySource(message::sentence(payload)));
                }
                (kind, _) => return Err(MigrationError::Protocol(format!("{kind:?} among pages"))),
            }
        }
    }

    /// Places a page in memory. Returns whether the daemon has waited for it.
    fn place_page(&self, run: &pages::Run<'_>, index: u64) -> Result<bool, MigrationError> {
        let invalid = |error: NoSuchPage| MigrationError::Protocol(error.to_string());
        let address =
            run.address.checked_add(index * STEP).ok_or(NoSuchPage(run.address)).map_err(invalid)?;
        if !self.pages().receive(address).map_err(invalid)? {
            return Ok(false);
        }
        let from = usize::try_from(index * STEP).unwrap_or(usize::MAX);
        let page = match run.contents {
            // The parser has checked that the run has contents of this length.
            Some(contents) => contents.get(from..).and_then(|rest| rest.get(..PAGE)).unwrap_or(&[0; PAGE]),
            None => &[0; PAGE],
        };
        self.ram.place(address, page).map_err(MigrationError::machine("given a page that came"))?;
        let now = self.now();
        let wanted = self.presence.as_ref().is_some_and(|presence| presence.placed(address));
        self.pages().placed(address, now);
        Ok(wanted)
    }

    fn end_if_complete(&self) {
        if self.pages().left() > 0 || std::mem::replace(&mut self.state().complete, true) {
            return;
        }
        if let Some(presence) = &self.presence {
            presence.complete();
        }
        self.ram.release(self.huge);
        self.complete_if(|state| state.committed);
        let pages = self.pages();
        let (waits, (zero, dropped)) = (pages.wait_stats(), pages.others());
        tracing::info!(
            faults = waits.count,
            median_us = waits.median_us,
            worst_us = waits.worst_us,
            zero,
            dropped,
            seconds = self.began.elapsed().as_secs_f64(),
            "All of the VM's memory is here"
        );
    }

    /// Applies `change`. If it returns `true`, sends `Complete` to the source once, and ends the streams.
    fn complete_if(&self, change: impl FnOnce(&mut State) -> bool) {
        {
            let mut state = self.state();
            let due = change(&mut state) && !state.over;
            if !due {
                return;
            }
            state.over = true;
        }
        let complete = {
            let pages = self.pages();
            let waits = pages.wait_stats();
            Complete {
                left: pages.left(),
                faults: waits.count,
                median_us: waits.median_us,
                worst_us: waits.worst_us,
            }
        };
        let sent = message::encode(&complete).and_then(|payload| {
            let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            let (connection, sender) = &mut *requests;
            sender.send(connection, Kind::Complete, &[&payload]).map_err(MigrationError::stream("written"))
        });
        if let Err(error) = sent {
            tracing::warn!(
                error = line(&error),
                "The source could not be notified that the post-copy is over"
            );
        }
        self.stop.set();
    }

    /// A stream is lost. If pages are still missing, they can't be fetched any more.
    fn handle_loss(&self, error: MigrationError) {
        let State { committed, complete, over } = {
            let mut state = self.state();
            let before = *state;
            state.over = true;
            before
        };
        self.stop.set();
        if !over && complete {
            tracing::warn!(
                error = line(&error),
                "The source could not be notified that the post-copy is over"
            );
        } else if !over {
            (self.on_lost)(self.pages().left(), committed, error);
        }
    }
}
