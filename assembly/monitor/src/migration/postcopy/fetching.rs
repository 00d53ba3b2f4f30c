//! The destination's threads: one takes faults and asks for pages, one per stream puts pages into memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use machine::memory::arriving::ArrivingRam;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::incoming::{Fault, Incoming, Waits};
use super::message::{Complete, MOST_WANTED, encode_wanted};
use super::presence::Presence;
use super::set::{NoSuchPage, PageSet};
use crate::migration::connection::{Connection, Stop};
use crate::migration::error::{MigrationError, line};
use crate::migration::frame::{Kind, Receiver, Sender};
use crate::migration::message;
use crate::migration::pages::{self, PAGE};

/// How often the thread that takes faults looks whether all is over.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Nothing may be asked for for long.
const FOREVER: Duration = Duration::MAX;
/// Bytes of a page as addresses count them.
const STEP: u64 = PAGE as u64;

/// A stream as it was left at its `End`.
pub struct Stream {
    /// The socket.
    pub connection: Connection,
    /// Counts on.
    pub receiver: Receiver,
}

/// What is still at the source when all else is here.
pub struct Rest {
    /// Which pages.
    pub missing: PageSet,
    /// Where they are asked for.
    pub wishes: Stream,
    /// Where others come.
    pub others: Vec<Stream>,
}

/// How it ends when pages can't come any more: how many, whether the guest was this side's ([`Fetching::commit`]), and why. Called once, from a
/// thread of this module. Threads that wait for pages wait on.
pub type OnLost = Box<dyn Fn(u64, bool, MigrationError) + Send + Sync>;

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Pages that haven't come.
    pub left: u64,
    /// Pages that were waited for.
    pub waits: Waits,
    /// Faults for pages that are zero, as they were never used.
    pub zero: u64,
    /// Pages that came and weren't missing.
    pub dropped: u64,
    /// Whether all have come.
    pub over: bool,
}

/// Pages that come in. Cheap to clone.
#[derive(Clone)]
pub struct Fetching(Arc<Shared>);

struct Shared {
    ram: ArrivingRam,
    pages: Mutex<Incoming>,
    began: Instant,
    wishes: Mutex<(Connection, Sender)>,
    stop: Stop,
    state: Mutex<State>,
    huge: bool,
    on_lost: OnLost,
    /// What a daemon that has the memory mapped, too, is told.
    presence: Option<Presence>,
}

/// What has happened.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// The guest is this side's. Not before may the source hear that it isn't needed any more.
    given: bool,
    /// All pages are in memory.
    all_here: bool,
    /// There is no more to say or to take.
    over: bool,
}

impl Fetching {
    /// Begins: `ram` was made without the missing pages of `rest`, and `presence`, where a daemon has the memory mapped, filled. Threads end when all pages are there, or with the process. Once all are there,
    /// huge pages are possible again with `huge`.
    ///
    /// # Errors
    /// When the host refuses a thread or descriptor.
    pub fn begin(
        rest: Rest,
        ram: ArrivingRam,
        presence: Option<Presence>,
        huge: bool,
        on_lost: OnLost,
    ) -> Result<Self, MigrationError> {
        let stop = Stop::default();
        let Rest { missing, mut wishes, mut others } = rest;
        let writer = wishes.connection.sender(stop.clone(), super::serving::LAST_WORD);
        let writer = writer.map_err(MigrationError::stream("used for wishes"))?;
        wishes.connection.set_patience(FOREVER);
        for stream in others.iter_mut().chain([&mut wishes]) {
            stream.connection.set_stop(stop.clone());
        }
        let fetching = Self(Arc::new(Shared {
            ram,
            pages: Mutex::new(Incoming::new(missing)),
            began: Instant::now(),
            wishes: Mutex::new((writer, Sender::new())),
            stop,
            state: Mutex::default(),
            huge,
            on_lost,
            presence,
        }));
        fetching.spawn("faults", Shared::take_faults)?;
        for stream in others.into_iter().chain([wishes]) {
            fetching.spawn("pages", move |shared| shared.take_pages(stream))?;
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
                shared.lose(error);
            }
        });
        spawned.map(drop).map_err(MigrationError::machine("given a thread"))
    }

    /// How far it is. Takes time that grows with the number of pages that were waited for.
    pub fn report(&self) -> Report {
        let pages = self.0.pages();
        let (zero, dropped) = pages.others();
        let (left, waits) = (pages.left(), pages.waits());
        Report { left, waits, zero, dropped, over: self.0.state().all_here }
    }

    /// Pages that haven't come.
    pub fn left(&self) -> u64 {
        self.0.pages().left()
    }

    /// The guest is this side's from here on.
    pub fn commit(&self) {
        self.0.say(|state| {
            state.given = true;
            state.all_here
        });
    }

    /// The VM ends, and needs no more pages: tells the source. Nothing if all are there, or the guest isn't this side's.
    pub fn end(&self) {
        self.0.say(|state| state.given);
    }

    /// The guest stays with its source, or goes on there; pages that can't come are no loss.
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

    /// Nanoseconds since the beginning.
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn take_faults(&self) -> Result<(), MigrationError> {
        let failed = |error: std::io::Error| MigrationError::machine("watched for missing pages")(error);
        let (mut faults, mut wanted) = (Vec::new(), Vec::new());
        loop {
            let State { all_here, over, .. } = *self.state();
            if all_here || over {
                return Ok(());
            }
            let presence = self.presence.iter().map(Presence::fd);
            let fds = std::iter::once(self.ram.fd()).chain(presence);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut fds, Some(&LOOK_EVERY)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            faults.clear();
            self.ram.faults(&mut faults).map_err(failed)?;
            wanted.clear();
            let now = self.now();
            for page in &faults {
                // The kernel names pages of RAM only.
                let fault =
                    self.pages().fault(*page, now).map_err(|error| failed(std::io::Error::other(error)))?;
                match fault {
                    Fault::Ask => wanted.push(*page),
                    Fault::Zero => drop(self.ram.place(*page, &[0; PAGE]).map_err(failed)?),
                    Fault::Wait => {}
                }
            }
            faults.clear();
            if let Some(presence) = &self.presence {
                presence.wishes(&mut faults).map_err(failed)?;
            }
            let mut here = false;
            for page in &faults {
                match self.pages().fault(*page, now).map_err(|error| failed(std::io::Error::other(error)))? {
                    Fault::Ask => wanted.push(*page),
                    Fault::Wait => {}
                    // It has come in this moment.
                    Fault::Zero => here |= self.presence.as_ref().is_some_and(|all| all.placed(*page)),
                }
            }
            if here && let Some(presence) = &self.presence {
                presence.came();
            }
            for some in wanted.chunks(MOST_WANTED) {
                let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
                let (connection, sender) = &mut *wishes;
                let sent = sender.send(connection, Kind::Want, &[&encode_wanted(some)]);
                sent.map_err(MigrationError::stream("written"))?;
            }
        }
    }

    fn take_pages(&self, mut stream: Stream) -> Result<(), MigrationError> {
        loop {
            match stream.receiver.receive(&mut stream.connection)? {
                (Kind::Pages, payload) => {
                    let run = pages::parse(payload)?;
                    let mut wanted = false;
                    for index in 0..u64::from(run.pages) {
                        wanted |= self.take_page(&run, index)?;
                    }
                    if wanted && let Some(presence) = &self.presence {
                        presence.came();
                    }
                    self.end_if_complete();
                }
                (Kind::Abort, payload) => return Err(MigrationError::Aborted(message::sentence(payload))),
                (kind, _) => return Err(MigrationError::Protocol(format!("{kind:?} among pages"))),
            }
        }
    }

    /// Puts a page where it belongs. Whether the daemon has waited for it.
    fn take_page(&self, run: &pages::Run<'_>, index: u64) -> Result<bool, MigrationError> {
        let wild = |error: NoSuchPage| MigrationError::Protocol(error.to_string());
        let address = run.address.checked_add(index * STEP).ok_or(NoSuchPage(run.address)).map_err(wild)?;
        if !self.pages().arrives(address).map_err(wild)? {
            return Ok(false);
        }
        let from = usize::try_from(index * STEP).unwrap_or(usize::MAX);
        let page = match run.contents {
            // As long as the run says.
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
        if self.pages().left() > 0 || std::mem::replace(&mut self.state().all_here, true) {
            return;
        }
        if let Some(presence) = &self.presence {
            presence.complete();
        }
        self.ram.release(self.huge);
        self.say(|state| state.given);
        let pages = self.pages();
        let (waits, (zero, dropped)) = (pages.waits(), pages.others());
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

    /// Says the last word to the source after this change, if it is due, and ends the streams.
    fn say(&self, change: impl FnOnce(&mut State) -> bool) {
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
            let waits = pages.waits();
            Complete {
                left: pages.left(),
                faults: waits.count,
                median_us: waits.median_us,
                worst_us: waits.worst_us,
            }
        };
        let said = message::encode(&complete).and_then(|payload| {
            let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
            let (connection, sender) = &mut *wishes;
            sender.send(connection, Kind::Complete, &[&payload]).map_err(MigrationError::stream("written"))
        });
        if let Err(error) = said {
            tracing::warn!(error = line(&error), "The source doesn't hear that it isn't needed any more");
        }
        self.stop.set();
    }

    /// A stream is lost. Pages can't come any more, or needn't.
    fn lose(&self, error: MigrationError) {
        let State { given, all_here, over } = {
            let mut state = self.state();
            let before = *state;
            state.over = true;
            before
        };
        self.stop.set();
        if !over && all_here {
            tracing::warn!(error = line(&error), "The source doesn't hear that it isn't needed any more");
        } else if !over {
            (self.on_lost)(self.pages().left(), given, error);
        }
    }
}
