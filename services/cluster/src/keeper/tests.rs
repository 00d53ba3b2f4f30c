//! Requests that wait for one write: none is answered before it, all fail with it, and questions show what is written.

#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Waker};

use nomad::{Epoch, Incarnation};

use super::*;
use crate::RedbStore;
use crate::registry::Speaker;
use crate::state::{Change, State};
use crate::store::Store;

const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A database of which each write waits for the test's word: whether it succeeds.
#[derive(Debug)]
struct Gated {
    store: Option<RedbStore>,
    path: std::path::PathBuf,
    staged: usize,
    commits: Arc<AtomicUsize>,
    begun: Sender<()>,
    word: Mutex<Receiver<bool>>,
}

impl Store for Gated {
    fn state(&self) -> &State {
        self.store.as_ref().unwrap().state()
    }

    fn stage(&mut self, changes: &[Change]) {
        self.staged += changes.len();
        self.store.as_mut().unwrap().stage(changes);
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        if std::mem::take(&mut self.staged) == 0 {
            return Ok(());
        }
        self.commits.fetch_add(1, Ordering::SeqCst);
        self.begun.send(()).unwrap();
        if self.word.lock().unwrap().recv_timeout(HANG_LIMIT).unwrap() {
            return self.store.as_mut().unwrap().commit();
        }
        drop(self.store.take());
        self.store = Some(RedbStore::open(&self.path)?);
        Err(StoreError::Damaged("a test's disk is full".to_owned()))
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        self.store.as_mut().unwrap().recover()
    }
}

struct World {
    handle: Handle,
    inbox: Option<Inbox>,
    registry: Option<Registry>,
    keeper: Option<JoinHandle<()>>,
    host: Speaker,
    commits: Arc<AtomicUsize>,
    begun: Receiver<()>,
    word: Sender<bool>,
    _folder: tempfile::TempDir,
}

type Asked<R> = Pin<Box<dyn Future<Output = Result<R, Status>>>>;

impl World {
    /// A keeper with one host, which hasn't begun.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.redb");
        let (commits, (begun_at, begun), (word, words)) = (Arc::default(), channel(), channel());
        let store = Gated {
            store: Some(RedbStore::open(&path).unwrap()),
            path,
            staged: 0,
            commits: Arc::clone(&commits),
            begun: begun_at,
            word: Mutex::new(words),
        };
        let now = Instant::now();
        let lease = Duration::from_secs(3600);
        let mut registry = Registry::new(Box::new(store), lease, Duration::from_secs(2), now).unwrap();
        let address = "127.0.0.1:4792".parse().unwrap();
        let host = registry.register_host("h1", address, Incarnation(0), now).unwrap();
        word.send(true).unwrap();
        registry.flush().unwrap();
        begun.recv().unwrap();
        commits.store(0, Ordering::SeqCst);
        let (handle, inbox) = super::channel(Arc::new(Term::alone()));
        let (inbox, registry) = (Some(inbox), Some(registry));
        Self { handle, inbox, registry, keeper: None, host, commits, begun, word, _folder: folder }
    }

    fn begin(&mut self) {
        let (registry, inbox) = (self.registry.take().unwrap(), self.inbox.take().unwrap());
        let term = Arc::clone(&self.handle.term);
        self.keeper = Some(std::thread::spawn(move || run(registry, 1, term, &inbox)));
    }

    /// Sends a request, and returns its answer to be waited for.
    fn send<R: 'static>(&self, asked: impl Future<Output = Result<R, Status>> + 'static) -> Asked<R> {
        let mut asked: Asked<R> = Box::pin(asked);
        assert!(asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        asked
    }

    fn register(&self, name: String) -> Asked<Result<u32, Refusal>> {
        let (handle, host) = (self.handle.clone(), self.host);
        self.send(async move {
            let job = move |keeper: &mut Keeper, now| {
                let registered = keeper.registry.register_vm(host, &name, Epoch(0), Vec::new(), now)?;
                Ok(registered.vm.0)
            };
            handle.ask(job).await
        })
    }

    /// The names of all VMs.
    fn names(&self) -> Asked<Vec<String>> {
        let handle = self.handle.clone();
        self.send(async move {
            let names = |keeper: &mut Keeper, _| {
                let vms = keeper.registry.state().vms.values();
                vms.map(|about| about.name.clone()).collect()
            };
            handle.question(names).await
        })
    }

    /// The answer, which is there or comes.
    fn answer<R>(asked: Asked<R>) -> Result<R, Status> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(HANG_LIMIT, asked).await.unwrap() })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.handle.end();
        if let Some(keeper) = self.keeper.take() {
            assert!(keeper.join().is_ok() || std::thread::panicking());
        }
    }
}

fn is_pending<R>(asked: &mut Asked<R>) -> bool {
    asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// Requests that wait are one write. None is answered before it has ended, and neither is a question that came between them.
#[test]
fn requests_that_wait_are_one_write() {
    let mut world = World::new();
    let mut asked: Vec<_> = (0..100).map(|number| world.register(format!("vm{number}"))).collect();
    let mut names = world.names();
    world.begin();
    world.begun.recv_timeout(HANG_LIMIT).unwrap();
    assert!(asked.iter_mut().all(is_pending), "a request is answered before it is written");
    assert!(is_pending(&mut names), "a question is answered by what isn't written");
    world.word.send(true).unwrap();
    for (vm, one) in (1..).zip(asked) {
        assert_eq!(World::answer(one).unwrap().unwrap(), vm);
    }
    assert_eq!(World::answer(names).unwrap().len(), 100);
    assert_eq!(world.commits.load(Ordering::SeqCst), 1);
}

/// A write is bounded: what is beyond is the next one.
#[test]
fn a_write_takes_a_bounded_number_of_requests() {
    let mut world = World::new();
    let count = MAX_REQUESTS_PER_WRITE + 1;
    let asked: Vec<_> = (0..count).map(|number| world.register(format!("vm{number}"))).collect();
    world.word.send(true).unwrap();
    world.word.send(true).unwrap();
    world.begin();
    for one in asked {
        World::answer(one).unwrap().unwrap();
    }
    assert_eq!(world.commits.load(Ordering::SeqCst), 2);
}

/// A write that fails fails all its requests, with its reason. Questions show that nothing has changed, watchers see nothing, and the next
/// requests are made as if those had never been.
#[test]
fn a_write_that_fails_fails_all_its_requests() {
    let mut world = World::new();
    let handle = world.handle.clone();
    let watch = world.send(async move { handle.question(|keeper, _| keeper.watch(0, 0)).await });
    let asked: Vec<_> = (0..10).map(|number| world.register(format!("vm{number}"))).collect();
    let names = world.names();
    world.begin();
    world.begun.recv_timeout(HANG_LIMIT).unwrap();
    world.word.send(false).unwrap();
    for one in asked {
        let status = World::answer(one).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Internal);
        assert!(status.message().contains("a test's disk is full"), "{status}");
    }
    assert!(World::answer(names).unwrap().is_empty());
    let mut watcher = World::answer(watch).unwrap().unwrap();
    let whole = watcher.try_recv().unwrap().unwrap();
    assert!(whole.whole && whole.vms.is_empty(), "{whole:?}");
    let asked: Vec<_> = (0..10).map(|number| world.register(format!("vm{number}"))).collect();
    // How many writes these are depends on when the keeper looks.
    (0..10).for_each(|_| world.word.send(true).unwrap());
    for (vm, one) in (1..).zip(asked) {
        assert_eq!(World::answer(one).unwrap().unwrap(), vm, "its number wasn't used");
    }
    let mut seen = Vec::new();
    while seen.len() < 10 {
        let event = watcher.blocking_recv().unwrap().unwrap();
        assert!(!event.whole);
        seen.extend(event.vms.into_iter().map(|vm| vm.id));
    }
    assert_eq!(seen, (1..=10).collect::<Vec<_>>());
}

/// A watcher that comes back gets what it missed, one event per write, and the whole state where the log doesn't reach back so far.
#[test]
fn a_watcher_that_comes_back_gets_what_it_missed() {
    let mut world = World::new();
    let first: Vec<_> = (0..5).map(|number| world.register(format!("vm{number}"))).collect();
    world.word.send(true).unwrap();
    world.begin();
    for one in first {
        World::answer(one).unwrap().unwrap();
    }
    let watch = |world: &World, instance, revision| {
        let handle = world.handle.clone();
        let asked = async move { handle.question(move |keeper, _| keeper.watch(instance, revision)).await };
        let mut watcher = World::answer::<Result<_, Status>>(Box::pin(asked)).unwrap().unwrap();
        std::iter::from_fn(move || watcher.try_recv().ok()).map(Result::unwrap).collect::<Vec<_>>()
    };
    let whole = watch(&world, 0, 0);
    assert!(whole.len() == 1 && whole[0].whole, "{whole:?}");
    let revision = whole[0].revision;
    assert_eq!(watch(&world, 1, revision), [], "nothing was missed");
    let second = world.register("one-more".to_owned());
    world.word.send(true).unwrap();
    World::answer(second).unwrap().unwrap();
    let missed = watch(&world, 1, revision);
    assert_eq!(missed.len(), 1);
    assert_eq!((missed[0].whole, missed[0].vms.len(), missed[0].revision), (false, 1, revision + 1));
    let before = revision - 5;
    let missed = watch(&world, 1, before);
    assert_eq!(missed.iter().map(|event| event.vms.len()).collect::<Vec<_>>(), [5, 1], "one per write");
    assert!(watch(&world, 1, before - 1)[0].whole, "before this start");
    assert!(watch(&world, 1, revision + 9)[0].whole, "after the state");
}
