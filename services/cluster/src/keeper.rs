//! The thread that owns the registry, and what follows from its decisions: events for watchers, messages for hosts.
//!
//! ```text
//!  requests that wait ─▶ each is carried out in memory ─▶ one write for all ─▶ answers, events, messages ─▶ questions are answered
//!                                                          └─ it fails: all these requests fail, and nothing has changed
//! ```
//! Requests that come during a write are the next batch, so a request waits for two writes at most, however many others there are. A watcher
//! that doesn't take its events is dropped; it comes back, and gets what it missed or, where that isn't known any more, the whole state.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_api::cluster::proto;
use nomad::{HostId, Message, MigrationId, Node};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::group_requests::{GroupRequests, Requested};
use crate::messages;
use crate::peer_pauses::PeerPauses;
use crate::refusal::Refusal;
use crate::registry::{Event, Registry};
use crate::store_error::StoreError;
use crate::term::Term;

/// Events that are kept for watchers that come back.
const MAX_LOGGED_EVENTS: usize = 4096;
/// Events that may wait for one watcher.
const MAX_EVENTS_PER_WATCHER: usize = 1024;
/// Watchers at most.
const MAX_WATCHERS: usize = 8192;
/// Messages that may wait for one host; the protocol repeats those beyond, which are lost.
const MAX_MESSAGES_PER_HOST: usize = 256;
/// A database that can't be written is tried again after this long.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Requests whose changes one write takes.
const MAX_REQUESTS_PER_WRITE: usize = 512;
/// Changes after which a write takes no further request.
const MAX_CHANGES_PER_WRITE: usize = 16_384;

/// Sends an answer, which depends on the write of its batch.
type Answer = Box<dyn FnOnce(Result<(), &Status>) + Send>;

type Change = Box<dyn FnOnce(&mut Keeper, Instant) -> Answer + Send>;
/// With whether what is written can be read.
type Question = Box<dyn FnOnce(&mut Keeper, Result<(), &Status>, Instant) + Send>;

/// A request to the thread.
pub(crate) enum Job {
    /// May change the state: the answer waits for the write.
    Change(Change),
    /// Depends on what is written, and changes nothing of it: waits until nothing is staged.
    Question(Question),
    /// Ends the thread, after the batch.
    End,
}

/// Sends to the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    jobs: Sender<Job>,
    /// While it holds, answers count.
    pub term: Arc<Term>,
}

impl Handle {
    /// Has a request carried out that may change the state. Its changes are on the disk when this returns, and with them all that the answer shows.
    ///
    /// # Errors
    /// When they can't be written, or the term is over.
    pub async fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, Instant) -> R + Send + 'static,
    ) -> Result<R, Status> {
        self.send(|answer| {
            Job::Change(Box::new(move |keeper, now| {
                let result = job(keeper, now);
                // The caller may have gone.
                Box::new(move |written: Result<(), &Status>| {
                    drop(answer.send(written.map_err(Clone::clone).map(|()| result)))
                })
            }))
        })
        .await
    }

    /// Has a request carried out that changes nothing on the disk. It is carried out on what is written.
    ///
    /// # Errors
    /// When that can't be read, or the term is over.
    pub async fn question<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Keeper, Instant) -> R + Send + 'static,
    ) -> Result<R, Status> {
        self.send(|answer| {
            Job::Question(Box::new(move |keeper, readable, now| {
                let result = readable.map_err(Clone::clone).map(|()| job(keeper, now));
                drop(answer.send(result));
            }))
        })
        .await
    }

    /// Has a request without an answer carried out, which may change the state; after those that this caller sent before.
    pub fn post(&self, job: impl FnOnce(&mut Keeper, Instant) + Send + 'static) {
        let job = Job::Change(Box::new(move |keeper, now| {
            job(keeper, now);
            Box::new(|_| {})
        }));
        // It may have ended.
        let _ = self.jobs.send(job);
    }

    /// What isn't done when the term is over isn't answered.
    async fn send<R>(
        &self,
        job: impl FnOnce(oneshot::Sender<Result<R, Status>>) -> Job,
    ) -> Result<R, Status> {
        let gone = || {
            Status::unavailable(
                "This instance of the cluster service has just ended, or doesn't lead any more: ask again",
            )
        };
        let (answer, result) = oneshot::channel();
        self.jobs.send(job(answer)).map_err(|_| gone())?;
        result.await.map_err(|_| gone())?
    }

    /// Has the thread end after the requests that it is at.
    pub fn end(&self) {
        // It may have ended.
        let _ = self.jobs.send(Job::End);
    }
}

/// What the thread owns.
pub(crate) struct Keeper {
    pub registry: Registry,
    /// This start of the service, for watchers that come back.
    pub instance: u64,
    log: VecDeque<proto::WatchEvent>,
    /// The last [`Keeper::whole`].
    whole: Option<proto::WatchEvent>,
    /// The revision after which the log has all events.
    log_from: u64,
    /// The revision of the last event that watchers were sent; what they had before this start is older.
    pub shown: u64,
    watchers: Vec<mpsc::Sender<Result<proto::WatchEvent, Status>>>,
    hosts: HashMap<HostId, mpsc::Sender<Result<proto::Envelope, Status>>>,
    pub group_requests: GroupRequests,
    pub peer_pauses: PeerPauses,
    /// Watchers that were dropped because they took nothing.
    pub slow_watchers: u64,
    /// Messages of the coordinator that found no host, or no room.
    pub lost_messages: u64,
    /// Answers that wait for the next write.
    answers: Vec<Answer>,
    /// Groups whose migration began in changes that aren't written.
    unwritten_groups: Vec<Vec<String>>,
    /// How many writes had succeeded before the last one that failed.
    failing_since: Option<u64>,
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

/// Carries requests out until all handles are gone, or one has ended it.
pub(crate) fn run(registry: Registry, instance: u64, term: Arc<Term>, inbox: &Inbox) {
    let mut keeper = Keeper {
        log_from: registry.state().revision,
        registry,
        instance,
        log: VecDeque::new(),
        whole: None,
        shown: 0,
        watchers: Vec::new(),
        hosts: HashMap::new(),
        group_requests: GroupRequests::default(),
        peer_pauses: PeerPauses::default(),
        slow_watchers: 0,
        lost_messages: 0,
        answers: Vec::new(),
        unwritten_groups: Vec::new(),
        failing_since: None,
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
            let first = match next {
                _ if self.registry.has_staged() => Err(RecvTimeoutError::Timeout),
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            if matches!(first, Err(RecvTimeoutError::Disconnected)) {
                return;
            }
            let questions = self.carry_out(first.ok(), inbox);
            let now = Instant::now();
            let due = now >= not_before && self.registry.next().is_some_and(|at| at <= now);
            let ticked = if due && self.term.holds() { self.registry.tick(now) } else { Ok(()) };
            // What can't be healed has staged nothing.
            let written = self.registry.flush().and(ticked);
            if written.is_err() {
                not_before = now + WRITE_RETRY_INTERVAL;
            }
            self.end_batch(written);
            self.answer(questions, now);
        }
    }

    /// Carries a batch of requests out in memory. Questions among them are due after the write.
    fn carry_out(&mut self, first: Option<Job>, inbox: &Receiver<Job>) -> Vec<Question> {
        let mut questions: Vec<Question> = Vec::new();
        let mut count = 0;
        let mut next = first;
        while let Some(job) = next {
            count += 1;
            let now = Instant::now();
            match job {
                Job::End => self.ending = true,
                // Nothing is answered when the term is over.
                _ if !self.term.holds() => {}
                Job::Change(change) => {
                    let answer = change(self, now);
                    self.answers.push(answer);
                }
                Job::Question(question) => questions.push(question),
            }
            let full =
                count >= MAX_REQUESTS_PER_WRITE || self.registry.staged_changes() >= MAX_CHANGES_PER_WRITE;
            next = if full || self.ending { None } else { inbox.try_recv().ok() };
        }
        questions
    }

    /// After the write of a batch: its events, messages and answers, or the error for all of its requests.
    fn end_batch(&mut self, written: Result<(), StoreError>) {
        let groups = std::mem::take(&mut self.unwritten_groups);
        let failed = written.err().map(|error| {
            // Once per outage.
            let writes = Some(self.registry.writes());
            if std::mem::replace(&mut self.failing_since, writes) != writes {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "The cluster's state can't be written"
                );
            }
            groups.iter().for_each(|group| self.group_requests.retract(group));
            crate::service::status(&Refusal::Store(error))
        });
        self.deliver();
        for answer in std::mem::take(&mut self.answers) {
            if self.term.holds() {
                answer(failed.as_ref().map_or(Ok(()), Err));
            }
        }
    }

    /// Answers questions, by what is written.
    fn answer(&mut self, questions: Vec<Question>, now: Instant) {
        if questions.is_empty() {
            return;
        }
        // After a write that failed, the state is read again.
        let readable =
            self.registry.settle(now).map_err(|error| crate::service::status(&Refusal::Store(error)));
        for question in questions {
            if self.term.holds() {
                question(self, readable.as_ref().copied(), now);
            }
        }
        self.deliver();
    }

    /// Sends what the last write has left.
    fn deliver(&mut self) {
        if !self.term.holds() {
            // Another instance leads by now, and decides what is sent.
            return;
        }
        let (mut merged, mut events) = (None::<Event>, self.registry.take_events());
        events.retain(|event| !event.hosts.is_empty() || !event.vms.is_empty());
        // One event for all changes of a write: a change costs each watcher less, the more there are.
        for event in events {
            match &mut merged {
                Some(merged) => merged.merge(event),
                None => merged = Some(event),
            }
        }
        if let Some(event) = merged {
            self.publish(&event);
        }
        for message in self.registry.take_messages() {
            self.send(&message);
        }
    }

    fn publish(&mut self, event: &Event) {
        let event = self.shown(event);
        if self.log.len() >= MAX_LOGGED_EVENTS
            && let Some(first) = self.log.pop_front()
        {
            self.log_from = first.revision;
        }
        self.shown = event.revision;
        let before = self.watchers.len();
        self.watchers.retain(|watcher| watcher.try_send(Ok(event.clone())).is_ok());
        self.slow_watchers += u64::try_from(before - self.watchers.len()).unwrap_or(0);
        self.log.push_back(event);
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

    /// All hosts and VMs as an event. After an outage each watcher gets one, mostly of the same revision.
    fn whole(&mut self) -> proto::WatchEvent {
        let revision = self.registry.state().revision;
        if let Some(whole) = self.whole.as_ref().filter(|whole| whole.revision == revision) {
            return whole.clone();
        }
        let (hosts, vms) = (messages::hosts(&self.registry), messages::vms(self.registry.state()));
        let (gone, gone_hosts) = (Vec::new(), Vec::new());
        let whole = proto::WatchEvent {
            instance: self.instance,
            revision,
            whole: true,
            hosts,
            vms,
            gone,
            gone_hosts,
        };
        self.whole.insert(whole).clone()
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
        let (watcher, events) = mpsc::channel(MAX_EVENTS_PER_WATCHER);
        let missed = self.log.len() - self.log.partition_point(|event| event.revision <= revision);
        let known = instance == self.instance
            && (self.log_from..=self.registry.state().revision).contains(&revision)
            && missed < MAX_EVENTS_PER_WATCHER;
        // There is room: the channel is new.
        if known {
            for event in self.log.range(self.log.len() - missed..) {
                let _ = watcher.try_send(Ok(event.clone()));
            }
        } else {
            drop(watcher.try_send(Ok(self.whole())));
        }
        self.watchers.push(watcher);
        Ok(events)
    }

    /// Begins a migration of VMs.
    pub fn migrate(&mut self, requests: &[(String, String)], now: Instant) -> Result<MigrationId, Refusal> {
        let Self { registry, hosts, .. } = self;
        let listens = |host: HostId| hosts.get(&host).is_some_and(|stream| !stream.is_closed());
        registry.migrate(requests, &listens, now)
    }

    /// A VM's request to move to a host, together with others that each have a request of their own. Returns those without one, or the migration
    /// once it has begun.
    pub fn migrate_together(
        &mut self,
        (vm, host): (&str, &str),
        attempt: u64,
        together: &[String],
        now: Instant,
    ) -> Result<proto::MigrateReply, Refusal> {
        self.registry.check_group_request(vm, host, together)?;
        let begun =
            |migration: MigrationId| proto::MigrateReply { migration: migration.0, ..Default::default() };
        match self.group_requests.request(vm, host, attempt, together, now)? {
            Requested::Missing(missing) => Ok(proto::MigrateReply { migration: 0, missing }),
            Requested::Begun(migration) => Ok(begun(migration)),
            Requested::Complete(all) => {
                let result = self.migrate(&all, now);
                let outcome = result.as_ref().copied().map_err(ToString::to_string);
                self.group_requests.ended(together, outcome, now);
                if result.is_ok() {
                    self.unwritten_groups.push(together.to_vec());
                }
                result.map(begun)
            }
        }
    }

    /// A host's message for another host, which has its stream here as well. It is lost where that host doesn't listen; the protocol
    /// repeats it.
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
        let (stream, messages) = mpsc::channel(MAX_MESSAGES_PER_HOST);
        self.hosts.insert(host, stream);
        messages
    }
}

#[cfg(test)]
mod tests;
