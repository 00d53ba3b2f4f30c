//! The source's threads: one answers the destination's requests, the others push pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace};

use super::message::{Complete, decode_wanted};
use super::outgoing::Outgoing;
use super::set::PageSet;
use crate::migration::connection::{Connection, Stop};
use crate::migration::error::{MigrationError, line};
use crate::migration::frame::{Kind, MAX_PAGES_PER_FRAME, Receiver, Sender};
use crate::migration::message;
use crate::migration::pages::{PAGE, send_run};

/// Time-out for the destination's `Complete`, once all pages were sent.
pub(super) const COMPLETE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// The request stream may be silent for any time.
const NO_TIMEOUT: Duration = Duration::MAX;

/// A stream after its `End` frame.
pub struct Stream {
    /// The socket.
    pub connection: Connection,
    /// Continues the count of frames.
    pub sender: Sender,
}

/// The threads that send the remaining pages. They end when this value is dropped.
pub struct Serving {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    memory: GuestMemorySpace,
    pages: Mutex<Outgoing>,
    end: Mutex<Option<Result<Complete, MigrationError>>>,
    ended: Condvar,
    stop: Stop,
    bytes: AtomicU64,
}

/// Progress of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServingProgress {
    /// Pages that weren't sent yet.
    pub left: u64,
    /// Pages that were sent on request.
    pub requested: u64,
    /// Pages that were pushed.
    pub pushed: u64,
    /// Bytes sent.
    pub bytes: u64,
}

impl Shared {
    fn pages(&self) -> MutexGuard<'_, Outgoing> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) -> MutexGuard<'_, Option<Result<Complete, MigrationError>>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the end; only the first one counts.
    fn finish(&self, how: Result<Complete, MigrationError>) {
        let mut end = self.end();
        if end.is_none() {
            *end = Some(how);
        }
        drop(end);
        self.stop.set();
        self.ended.notify_all();
    }

    fn wait_for_end(&self) {
        let mut end = self.end();
        while end.is_none() && !self.stop.is_set() {
            end = self.ended.wait_timeout(end, REPORT_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, stream: &mut Stream, start: u64, pages: usize) -> Result<(), MigrationError> {
        let mut run = vec![0; pages * PAGE];
        let read = self.memory.memory().read_slice(&mut run, GuestAddress(start));
        read.map_err(MigrationError::machine("read"))?;
        let before = stream.sender.bytes();
        let sent = send_run(&run, start, false, &mut stream.sender, &mut stream.connection);
        self.bytes.fetch_add(stream.sender.bytes() - before, Ordering::Relaxed);
        sent.map(drop)
    }

    fn push(&self, stream: &mut Stream) -> Result<(), MigrationError> {
        loop {
            let Some((start, pages)) = self.pages().push(MAX_PAGES_PER_FRAME) else { return Ok(()) };
            self.send(stream, start, pages)?;
        }
    }

    fn serve_requests(&self, mut stream: Stream) -> Result<Complete, MigrationError> {
        let mut receiver = Receiver::new();
        loop {
            let wanted = match receiver.receive(&mut stream.connection)? {
                (Kind::Want, payload) => decode_wanted(payload)?,
                (Kind::Complete, payload) => return message::decode(payload, "the end of post-copy"),
                (kind, _) => {
                    return Err(MigrationError::Protocol(format!("{kind:?} in place of requests for pages")));
                }
            };
            for page in wanted {
                let send = self.pages().request(page);
                if send.map_err(|error| MigrationError::Protocol(format!("a request for {error}")))? {
                    self.send(&mut stream, page, 1)?;
                }
            }
        }
    }
}

impl Serving {
    /// Sends the pages `left` of memory that doesn't change any more. `request_stream` carries requests and the pages for them.
    ///
    /// # Errors
    /// When the host refuses a thread.
    pub fn begin(
        memory: GuestMemorySpace,
        left: PageSet,
        request_stream: Stream,
        push_streams: Vec<Stream>,
    ) -> Result<Self, MigrationError> {
        let shared = Arc::new(Shared {
            memory,
            pages: Mutex::new(Outgoing::new(left)),
            end: Mutex::default(),
            ended: Condvar::new(),
            stop: Stop::default(),
            bytes: AtomicU64::new(0),
        });
        let mut serving = Self { shared, threads: Vec::new() };
        serving.spawn("page-requests", request_stream, |shared, mut stream| {
            stream.connection.set_timeout(NO_TIMEOUT);
            let end = shared.serve_requests(stream);
            shared.finish(end);
        })?;
        for stream in push_streams {
            serving.spawn("push", stream, |shared, mut stream| match shared.push(&mut stream) {
                // The stream stays open until everything is over: the destination would treat its end as a loss.
                Ok(()) => shared.wait_for_end(),
                Err(error) => shared.finish(Err(error)),
            })?;
        }
        Ok(serving)
    }

    fn spawn(
        &mut self,
        name: &str,
        mut stream: Stream,
        work: impl FnOnce(&Shared, Stream) + Send + 'static,
    ) -> Result<(), MigrationError> {
        stream.connection.set_stop(self.shared.stop.clone());
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&shared, stream));
        self.threads.push(spawned.map_err(MigrationError::machine("given a thread"))?);
        Ok(())
    }

    /// Progress of sending.
    pub fn progress(&self) -> ServingProgress {
        let pages = self.shared.pages();
        let (requested, pushed) = pages.sent();
        ServingProgress {
            left: pages.left(),
            requested,
            pushed,
            bytes: self.shared.bytes.load(Ordering::Relaxed),
        }
    }

    /// Waits until the destination has everything, or ends without it. Calls `report` with the progress at intervals.
    ///
    /// # Errors
    /// When the connection to the destination is lost, or it sends invalid data.
    pub fn wait(&self, report: &mut dyn FnMut(ServingProgress)) -> Result<Complete, MigrationError> {
        let mut since = Instant::now();
        let mut end = self.shared.end();
        loop {
            if let Some(ended) = end.take() {
                return ended;
            }
            end = self
                .shared
                .ended
                .wait_timeout(end, REPORT_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            let progress = self.progress();
            if progress.left > 0 {
                since = Instant::now();
            } else if since.elapsed() > COMPLETE_TIMEOUT {
                let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
                return Err(MigrationError::stream("heard of, once all pages were sent")(timed_out));
            }
            report(progress);
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.shared.stop.set();
        self.shared.ended.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("A thread that sends pages has panicked");
            }
        }
        if let Some(Err(error)) = &*self.shared.end() {
            tracing::debug!(error = line(error), "Pages were no longer sent");
        }
    }
}
