//! Receives requests to migrate this VM, on a socket beside the API's. A request carries the streams.
//!
//! The monitor's sandbox forbids connections. So the client makes them, and passes the descriptors with the request
//! ([`control_api::migration`]). The thread here only accepts on a socket that was bound before the sandbox was entered.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use control_api::migration::{
    MAX_STREAMS, MigrationPhase, MigrationReport, MigrationRequest, MigrationTimeline, Packets,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use telemetry::guest_log::GuestLog;

use super::connection::Stop;
use super::error::{MigrationError, line};
use super::postcopy;
use super::progress::ProgressReporter;
use super::source::{self, SourceMachine};
use crate::api::{ApiError, SocketFile, listen_for_packets};

/// Time-out for a client's request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The machine to migrate, and its callbacks.
pub trait Migratable: SourceMachine + Send + Sync + 'static {
    /// Why it can't migrate at all; `None` where it can.
    fn migration_blockers(&self) -> Option<String>;
    /// The VM has migrated: ends this monitor.
    fn moved(&self, timeline: &MigrationTimeline);
    /// The VM was lost in the migration: ends this monitor with this error.
    fn lost(&self, error: MigrationError);
}

/// A bound socket that isn't served yet.
#[derive(Debug)]
pub struct RequestListener {
    fd: OwnedFd,
    file: SocketFile,
    /// User id whose requests are accepted, besides root's.
    user: u32,
}

impl RequestListener {
    /// Binds the socket at `path`. The API's socket must be bound already: it excludes a second monitor of the same name.
    ///
    /// # Errors
    /// When it can't be bound.
    pub fn bind(path: &Path) -> Result<Self, ApiError> {
        let (fd, file) = listen_for_packets(path)?;
        Ok(Self { fd, file, user: rustix::process::geteuid().as_raw() })
    }

    /// Serves requests on threads called `migration`, which run `prepare` first. They end with the process.
    ///
    /// # Errors
    /// When the thread can't be started.
    pub fn serve(
        self,
        machine: Arc<dyn Migratable>,
        reporter: Arc<ProgressReporter>,
        prepare: impl FnOnce() + Send + 'static,
    ) -> io::Result<Service> {
        let stop = Stop::default();
        let over = stop.clone();
        let thread = std::thread::Builder::new().name("migration".to_owned()).spawn(move || {
            prepare();
            while !over.is_set() {
                if let Err(error) = accept(&self.fd, self.user, &machine, &reporter) {
                    tracing::warn!(%error, "A migration request could not be taken");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            drop(self.file);
        })?;
        Ok(Service { stop, thread: Some(thread) })
    }
}

/// The running service. Dropping it ends the service, and removes the socket.
#[derive(Debug)]
pub struct Service {
    stop: Stop,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.set();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("The thread that takes migration requests has panicked");
        }
    }
}

fn wait(fd: &impl AsFd, time: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(time).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn accept(
    listener: &OwnedFd,
    user: u32,
    machine: &Arc<dyn Migratable>,
    reporter: &Arc<ProgressReporter>,
) -> io::Result<()> {
    if !wait(listener, Duration::from_millis(100))? {
        return Ok(());
    }
    let fd = match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(fd) => fd,
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let peer = rustix::net::sockopt::socket_peercred(&fd)?.uid;
    if peer.as_raw() != user && !peer.is_root() {
        static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
        telemetry::guest_warn!(
            LOG,
            user = peer.as_raw(),
            "A user who may not move this VM asked for it; refused"
        );
        return Ok(());
    }
    let client = Packets::over(fd);
    if !wait(&client, REQUEST_TIMEOUT)? {
        return Ok(());
    }
    let Some((request, streams)) = client.receive::<MigrationRequest>()? else { return Ok(()) };
    if let Err(problem) = begin(request, streams, &client, machine, reporter) {
        return client.send(&MigrationReport::Refused { problem }, &[], false);
    }
    Ok(())
}

/// Starts the migration on a thread of its own; the error says why not.
fn begin(
    request: MigrationRequest,
    streams: Vec<OwnedFd>,
    client: &Packets,
    machine: &Arc<dyn Migratable>,
    reporter: &Arc<ProgressReporter>,
) -> Result<(), String> {
    if streams.is_empty() || streams.len() > MAX_STREAMS {
        return Err(format!(
            "{} streams came with the request; 1 to {MAX_STREAMS} are possible",
            streams.len()
        ));
    }
    if request.max_throttle_percent > 99 {
        let percent = request.max_throttle_percent;
        return Err(format!("vCPUs can't be throttled by {percent} %; 0 to 99 are possible"));
    }
    if let Some(reasons) = machine.migration_blockers() {
        return Err(line(&MigrationError::Blocked(reasons)));
    }
    if request.post_copy_after.is_some() {
        // The destination's version isn't known yet.
        postcopy::source::check_support(postcopy::POSTCOPY_MIN_VERSION, streams.len())
            .map_err(|error| line(&error))?;
    }
    if !request.together.is_empty() && machine.daemon().is_none() {
        let text = "the VM has no RDMA NIC: the cluster service doesn't know it, and it moves by itself only";
        return Err(format!("It can't move together with others: {text}"));
    }
    let failed = |error: io::Error| format!("The migration could not be begun: {error}");
    let listener = rustix::io::fcntl_dupfd_cloexec(client, 0).map_err(|error| failed(error.into()))?;
    let listener = Arc::new(Packets::over(listener));
    let Some(stop) = reporter.begin(&request.destination, Some(listener)) else {
        return Err(
            "A migration of this VM is under way already; `causeway migrate --cancel` ends it".to_owned()
        );
    };
    let (machine, reporter) = (Arc::clone(machine), Arc::clone(reporter));
    let again = Arc::clone(&reporter);
    let spawned = std::thread::Builder::new().name("mover".to_owned()).spawn(move || {
        let machine: &dyn Migratable = &*machine;
        run(machine, streams, &request, &reporter, &stop);
    });
    spawned.map(drop).map_err(|error| {
        let problem = failed(error);
        again.update(|progress| {
            progress.phase = MigrationPhase::Failed;
            progress.problem = Some(problem.clone());
        });
        problem
    })
}

/// Migrates the VM, and reports the result.
fn run(
    machine: &dyn Migratable,
    streams: Vec<OwnedFd>,
    request: &MigrationRequest,
    reporter: &ProgressReporter,
    stop: &Stop,
) {
    tracing::info!(destination = request.destination, streams = streams.len(), "Moving the VM");
    match source::migrate(machine, streams, request, reporter, stop) {
        Ok(timeline) => {
            reporter.update(|progress| {
                progress.phase = MigrationPhase::Done;
                progress.bytes_sent = timeline.bytes;
                progress.timeline = Some(timeline.clone());
            });
            machine.moved(&timeline);
        }
        Err(error) => {
            tracing::warn!(error = line(&error), "The migration failed");
            reporter.update(|progress| {
                progress.phase = match &error {
                    MigrationError::InDoubt(_) => MigrationPhase::InDoubt,
                    MigrationError::LostDestination { .. } => MigrationPhase::Lost,
                    _ => MigrationPhase::Failed,
                };
                progress.throttle_percent = 0;
                progress.problem = Some(line(&error));
            });
            if matches!(error, MigrationError::LostDestination { .. }) {
                machine.lost(error);
            }
        }
    }
}
