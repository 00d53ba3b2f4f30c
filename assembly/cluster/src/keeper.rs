//! The thread that owns the registry, and what follows from its decisions: events for watchers, messages for hosts.
//!
//! Jobs are carried out one after the other. A job's answer, events and messages leave when its transaction is on the disk. A watcher that doesn't
//! take its events is dropped; it comes back, and gets what it missed or, where that isn't known any more, the whole state.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_api::cluster::proto;
use nomad::{HostId, Message, MigrationId, Node};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::gathering::{Gathering, Told};
use crate::holds::Holds;
use crate::messages;
use crate::refusal::Refusal;
use crate::registry::{Event, Registry};
use crate::term::Term;

/// Events that are kept for watchers that come back.
const LOG: usize = 4096;
/// Events that may wait for one watcher.
const WATCHER: usize = 1024;
/// Watchers at most.
const MAX_WATCHERS: usize = 8192;
/// Messages that may wait for one host; what is beyond is lost, and said again by the protocol.
const MESSAGES: usize = 256;
/// A database that can't be written is tried again after this long.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_millis(500);

type Job = Box<dyn FnOnce(&mut Keeper, Instant) + Send>;

/// Sends to the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    jobs: Sender<Job>,
    /// While it holds, answers count.
    pub term: Arc<Term>,
}

impl Handle {
    /// Has a job carried out. It is on the disk when this returns. What isn't done when the term is over isn't answered.
    pub async fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, Instant) -> R + Send + 'static,
    ) -> Result<R, Status> {
        let gone = || {
            Status::unavailable(
                "This instance of the cluster service has just ended, or doesn't lead any more: ask again",
            )
        };
        let (answer, result) = oneshot::channel();
        let job: Job = Box::new(move |keeper, now| {
            if !keeper.term.holds() {
                return;
            }
            let result = job(keeper, now);
            keeper.deliver();
            if keeper.term.holds() {
                // Whoever asked may have gone.
                let _ = answer.send(result);
            }
        });
        self.jobs.send(job).map_err(|_| gone())?;
        result.await.map_err(|_| gone())
    }

    /// Has the thread end after the job that it is at.
    pub fn end(&self) {
        // It may have ended.
        let _ = self.jobs.send(Box::new(|keeper, _| keeper.ending = true));
    }
}

/// What the thread owns.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub registry: Registry,
    /// This start of the service, for watchers that come back.
    pub instance: u64,
    log: VecDeque<proto::WatchEvent>,
    /// The revision of the last event that watchers were sent; what they had before this start is older.
    pub shown: u64,
    watchers: Vec<mpsc::Sender<Result<proto::WatchEvent, Status>>>,
    hosts: HashMap<HostId, mpsc::Sender<Result<proto::Envelope, Status>>>,
    pub gathering: Gathering,
    pub holds: Holds,
    /// Watchers that were dropped because they took nothing.
    pub slow_watchers: u64,
    /// Messages of the coordinator that found no host, or no room.
    pub lost_messages: u64,
    term: Arc<Term>,
    ending: bool,
}

/// Jobs for a thread that isn't there yet.
pub(crate) type Inbox = Receiver<Job>;

/// A handle, and where its jobs arrive.
pub(crate) fn channel(term: Arc<Term>) -> (Handle, Inbox) {
    let (jobs, inbox) = std::sync::mpsc::channel();
    (Handle { jobs, term }, inbox)
}

/// Starts the thread. It ends when all handles are gone, or one has ended it.
pub(crate) fn start(registry: Registry, instance: u64) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let (handle, inbox) = channel(Arc::new(Term::alone()));
    let term = Arc::clone(&handle.term);
    let thread = std::thread::Builder::new()
        .name("keeper".to_owned())
        .spawn(move || run(registry, instance, term, &inbox))?;
    Ok((handle, thread))
}

/// Carries jobs out until all handles are gone, or one has ended it.
pub(crate) fn run(registry: Registry, instance: u64, term: Arc<Term>, inbox: &Inbox) {
    let mut keeper = Keeper {
        registry,
        instance,
        log: VecDeque::new(),
        shown: 0,
        watchers: Vec::new(),
        hosts: HashMap::new(),
        gathering: Gathering::default(),
        holds: Holds::default(),
        slow_watchers: 0,
        lost_messages: 0,
        term,
        ending: false,
    };
    keeper.run(inbox);
}

impl Keeper {
    fn run(&mut self, inbox: &Receiver<Job>) {
        let mut not_before = Instant::now();
        while !self.ending {
            if !self.term.holds() {
                // Its end comes soon; nothing is due until then.
                not_before = not_before.max(Instant::now() + WRITE_RETRY_INTERVAL);
            }
            let next = self.registry.next().map(|at| at.max(not_before));
            let job = match next {
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let now = Instant::now();
            match job {
                Ok(job) => job(self, now),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if now >= not_before
                && self.term.holds()
                && self.registry.next().is_some_and(|at| at <= now)
                && let Err(error) = self.registry.tick(now)
            {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "The cluster's state can't be written"
                );
                not_before = now + WRITE_RETRY_INTERVAL;
            }
            self.deliver();
        }
    }

    /// Sends what the last transactions have left.
    fn deliver(&mut self) {
        if !self.term.holds() {
            // It isn't this instance's to say any more: whoever leads says it.
            return;
        }
        for event in self.registry.take_events() {
            let event = self.shown(&event);
            if self.log.len() >= LOG {
                self.log.pop_front();
            }
            let empty = event.hosts.is_empty() && event.vms.is_empty();
            if !(empty && event.gone.is_empty() && event.gone_hosts.is_empty()) {
                self.shown = event.revision;
                let before = self.watchers.len();
                self.watchers.retain(|watcher| watcher.try_send(Ok(event.clone())).is_ok());
                self.slow_watchers += u64::try_from(before - self.watchers.len()).unwrap_or(0);
            }
            self.log.push_back(event);
        }
        for message in self.registry.take_messages() {
            self.send(&message);
        }
    }

    fn send(&mut self, message: &Message) {
        let Node::Host(host) = message.to else { return };
        let mut bytes = Vec::new();
        nomad::wire::encode(message, &mut bytes);
        let sent = self
            .hosts
            .get(&host)
            .is_some_and(|stream| stream.try_send(Ok(proto::Envelope { message: bytes })).is_ok());
        self.lost_messages += u64::from(!sent);
    }

    fn shown(&self, event: &Event) -> proto::WatchEvent {
        let state = self.registry.state();
        let (mut vms, mut gone) = (Vec::new(), Vec::new());
        for vm in &event.vms {
            match messages::vm(state, *vm) {
                Some(vm) => vms.push(vm),
                None => gone.push(vm.0),
            }
        }
        let (mut hosts, mut gone_hosts) = (Vec::new(), Vec::new());
        for host in &event.hosts {
            match messages::host(&self.registry, *host) {
                Some(host) => hosts.push(host),
                None => gone_hosts.push(host.0),
            }
        }
        proto::WatchEvent {
            instance: self.instance,
            revision: event.revision,
            whole: false,
            hosts,
            vms,
            gone,
            gone_hosts,
        }
    }

    /// The whole state as an event.
    fn whole(&self) -> proto::WatchEvent {
        let state = messages::state(&self.registry);
        proto::WatchEvent {
            instance: self.instance,
            revision: state.revision,
            whole: true,
            hosts: state.hosts,
            vms: state.vms,
            gone: Vec::new(),
            gone_hosts: Vec::new(),
        }
    }

    /// A watcher comes, or comes back with what it has.
    pub fn watch(
        &mut self,
        instance: u64,
        revision: u64,
    ) -> Result<mpsc::Receiver<Result<proto::WatchEvent, Status>>, Status> {
        self.watchers.retain(|watcher| !watcher.is_closed());
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(Status::resource_exhausted(format!(
                "The cluster service has {MAX_WATCHERS} watchers, and takes no more"
            )));
        }
        let (watcher, events) = mpsc::channel(WATCHER);
        let current = self.registry.state().revision;
        let missed = current.checked_sub(revision).and_then(|missed| usize::try_from(missed).ok());
        let missed = missed
            .filter(|missed| instance == self.instance && *missed <= self.log.len() && *missed < WATCHER);
        // There is room: the channel is new.
        match missed {
            Some(missed) => {
                for event in self.log.range(self.log.len() - missed..) {
                    let _ = watcher.try_send(Ok(event.clone()));
                }
            }
            None => drop(watcher.try_send(Ok(self.whole()))),
        }
        self.watchers.push(watcher);
        Ok(events)
    }

    /// Begins a migration of VMs.
    pub fn migrate(&mut self, wishes: &[(String, String)], now: Instant) -> Result<MigrationId, Refusal> {
        let Self { registry, hosts, .. } = self;
        let listens = |host: HostId| hosts.get(&host).is_some_and(|stream| !stream.is_closed());
        registry.migrate(wishes, &listens, now)
    }

    /// A VM asks to move to a host, together with others that ask for themselves. Those that haven't, and the migration once it has begun.
    pub fn migrate_together(
        &mut self,
        (vm, host): (&str, &str),
        attempt: u64,
        together: &[String],
        now: Instant,
    ) -> Result<proto::MigrateReply, Refusal> {
        self.registry.check_wish(vm, host, together)?;
        let begun =
            |migration: MigrationId| proto::MigrateReply { migration: migration.0, ..Default::default() };
        match self.gathering.ask(vm, host, attempt, together, now)? {
            Told::Missing(missing) => Ok(proto::MigrateReply { migration: 0, missing }),
            Told::Begun(migration) => Ok(begun(migration)),
            Told::Complete(all) => {
                let result = self.migrate(&all, now);
                let outcome = result.as_ref().copied().map_err(ToString::to_string);
                self.gathering.ended(together, outcome, now);
                result.map(begun)
            }
        }
    }

    /// A host's message for another host, which has its stream here as well. It is lost where that host doesn't listen; the protocol says it
    /// again.
    pub fn pass_on(&mut self, message: &Message, now: Instant) -> Result<(), Refusal> {
        self.registry.check_sender(message, now)?;
        self.send(message);
        Ok(())
    }

    /// Watchers at present.
    pub fn watchers(&self) -> usize {
        self.watchers.iter().filter(|watcher| !watcher.is_closed()).count()
    }

    /// A host takes the coordinator's messages from now on, in place of an earlier connection of it.
    pub fn attach(&mut self, host: HostId) -> mpsc::Receiver<Result<proto::Envelope, Status>> {
        let (stream, messages) = mpsc::channel(MESSAGES);
        self.hosts.insert(host, stream);
        messages
    }
}
