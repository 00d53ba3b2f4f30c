//! The registry's clock: pauses of the service itself, and hosts that fall silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::RedbStore;

const LEASE: Duration = Duration::from_secs(6);

struct World {
    registry: Registry,
    hosts: [Speaker; 2],
    began: Instant,
    folder: tempfile::TempDir,
    /// The next write fails.
    fails: Arc<AtomicBool>,
}

/// A database whose disk refuses a write now and then.
#[derive(Debug)]
struct Flaky {
    /// Always there but while it is opened again.
    store: Option<RedbStore>,
    path: std::path::PathBuf,
    fails: Arc<AtomicBool>,
}

impl Flaky {
    fn store(&mut self) -> &mut RedbStore {
        self.store.as_mut().unwrap()
    }
}

impl Store for Flaky {
    fn state(&self) -> &State {
        self.store.as_ref().unwrap().state()
    }

    fn stage(&mut self, changes: &[Change]) {
        self.store().stage(changes);
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        if self.fails.swap(false, Ordering::SeqCst) {
            // What was staged is gone, as after a transaction that failed.
            drop(self.store.take());
            self.store = Some(RedbStore::open(&self.path)?);
            return Err(StoreError::Damaged("a test's disk is full".to_owned()));
        }
        self.store().commit()
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        self.store().recover()
    }
}

impl World {
    fn new() -> Self {
        let fails = Arc::new(AtomicBool::new(false));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.redb");
        let store = Some(RedbStore::open(&path).unwrap());
        let store = Flaky { store, path, fails: Arc::clone(&fails) };
        let began = Instant::now();
        let mut registry = Registry::new(Box::new(store), LEASE, Duration::from_secs(2), began).unwrap();
        let hosts = ["h1", "h2"].map(|name| {
            let address = format!("127.0.0.{}:4792", &name[1..]).parse().unwrap();
            registry.register_host(name, address, Incarnation(0), began).unwrap()
        });
        registry.flush().unwrap();
        drop((registry.take_messages(), registry.take_events()));
        Self { registry, hosts, began, folder, fails }
    }

    /// A VM's registration that can't be written.
    fn register_unwritten(&mut self, name: &str) {
        self.registry.register_vm(self.hosts[1], name, nomad::Epoch(0), Vec::new(), self.began).unwrap();
        self.fails.store(true, Ordering::SeqCst);
        let error = self.registry.flush().unwrap_err();
        assert!(error.to_string().contains("a test's disk is full"));
    }

    /// The service is started again on the same database.
    fn restart(&mut self, at_ms: u64) {
        let now = self.began + Duration::from_millis(at_ms);
        let path = self.folder.path().join("other.redb");
        // The file is locked as long as the first one lives.
        let store = RedbStore::open(&path).unwrap();
        let registry = Registry::new(Box::new(store), LEASE, Duration::from_secs(2), now).unwrap();
        drop(std::mem::replace(&mut self.registry, registry));
        let store = RedbStore::open(&self.folder.path().join("cluster.redb")).unwrap();
        self.registry = Registry::new(Box::new(store), LEASE, Duration::from_secs(2), now).unwrap();
    }

    fn tick(&mut self, at_ms: u64) {
        self.registry.tick(self.began + Duration::from_millis(at_ms)).unwrap();
        self.registry.flush().unwrap();
    }

    /// Writes what calls have changed; the messages that follow.
    fn messages(&mut self) -> Vec<Message> {
        self.registry.flush().unwrap();
        self.registry.take_messages()
    }

    fn beat(&mut self, host: usize, at_ms: u64) {
        self.registry.heartbeat(self.hosts[host], self.began + Duration::from_millis(at_ms)).unwrap();
    }

    fn heard(&self) -> [bool; 2] {
        self.hosts.map(|speaker| self.registry.has_lease(speaker.host))
    }

    fn next_ms(&self) -> u128 {
        (self.registry.next().unwrap() - self.began).as_millis()
    }
}

#[test]
fn a_host_that_says_nothing_is_silent_when_its_lease_ends() {
    let mut world = World::new();
    world.beat(1, 3_000);
    assert_eq!(world.next_ms(), 6_000);
    world.tick(6_001);
    assert_eq!(world.heard(), [false, true]);
}

#[test]
fn time_in_which_the_service_itself_stood_still_is_no_silence() {
    let mut world = World::new();
    // What hosts said meanwhile is still in the sockets.
    world.tick(60_000);
    assert_eq!(world.heard(), [true, true]);
    assert_eq!(world.next_ms(), 62_000, "a third of a lease to be heard again");
    world.beat(0, 60_010);
    world.tick(62_000);
    assert_eq!(world.heard(), [true, false], "the other had its time");
}

#[test]
fn a_service_that_always_comes_late_finds_silent_hosts_all_the_same() {
    let mut world = World::new();
    world.tick(20_000);
    assert_eq!(world.heard(), [true, true]);
    world.tick(40_000);
    assert_eq!(world.heard(), [false, false]);
}

/// A message without an answer is repeated, once each time: setting a timer anew, as each stage of a migration does, replaces the one before. While memory is
/// copied that is seldom.
#[test]
fn a_message_without_an_answer_is_repeated_once_and_seldom_while_memory_is_copied() {
    let mut world = World::new();
    let began = world.began;
    let at = |ms: u64| began + Duration::from_millis(ms);
    let [source, destination] = world.hosts;
    world.registry.register_vm(source, "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    world.messages();
    let said = |world: &mut World, from: u64, to: u64| {
        (from..to).for_each(|ms| world.tick(ms));
        world.messages().len()
    };
    let config = nomad::Config::default();
    let (retry, calm) = (u64::from(config.retry_ms), u64::from(config.precopy_retry_ms));
    assert_eq!(said(&mut world, 1, 5 * retry + 1), 5, "room is asked for");
    let reserved = Message {
        from: nomad::Node::Host(destination.host),
        incarnation: destination.incarnation,
        to: nomad::Node::Coordinator,
        body: nomad::Body::Reserved { migration },
    };
    let now = 5 * retry + 1;
    world.registry.message(reserved, at(now)).unwrap();
    assert_eq!(world.messages().len(), 1, "the source shall copy");
    assert_eq!(said(&mut world, now, now + 4 * calm + 1), 4, "and the request is repeated");
}

/// What a host says of a migration.
fn says(world: &mut World, host: usize, body: nomad::Body, at_ms: u64) {
    let Speaker { host, incarnation } = world.hosts[host];
    let message = Message { from: nomad::Node::Host(host), incarnation, to: nomad::Node::Coordinator, body };
    world.registry.message(message, world.began + Duration::from_millis(at_ms)).unwrap();
    world.registry.flush().unwrap();
}

/// VM a moves from the first host to the second; the commit is written at 100 ms.
fn committed(world: &mut World) -> nomad::MigrationId {
    let began = world.began;
    world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    says(world, 1, nomad::Body::Reserved { migration }, 10);
    says(world, 0, nomad::Body::Converged { migration }, 20);
    says(world, 1, nomad::Body::Loaded { migration }, 90);
    says(world, 0, nomad::Body::Yield { migration }, 100);
    world.messages();
    migration
}

/// Writes staged changes, takes all outgoing messages, and returns the decisions for one host.
fn told(world: &mut World, host: usize) -> Vec<nomad::Body> {
    let to = nomad::Node::Host(world.hosts[host].host);
    let all = world.messages().into_iter().filter(|message| message.to == to);
    let decision =
        |body: &nomad::Body| matches!(body, nomad::Body::Commit { .. } | nomad::Body::Abort { .. });
    all.map(|message| message.body).filter(decision).collect()
}

/// A source falls silent after its vote. After the settle time-out the committed migration no longer binds its VM. The service keeps the
/// decision, also over its own restart, and sends it when the source returns.
#[test]
fn a_decided_migration_ends_without_a_host_that_is_silent() {
    let mut world = World::new();
    let migration = committed(&mut world);
    says(&mut world, 1, nomad::Body::Settled { migration, lost: Vec::new() }, 150);
    let settle_ms = u64::from(nomad::Config::default().settle_ms);
    for ms in (200..=settle_ms + 200).step_by(100) {
        world.beat(1, ms);
        world.tick(ms);
    }
    let vm = world.registry.state().vm("a").unwrap().0;
    assert_eq!(world.registry.state().ledger.migration_of(vm), None, "it is free");
    let owed = world.registry.state().ledger.migrations[&migration].owed.clone().unwrap();
    assert_eq!(owed.keys().copied().collect::<Vec<_>>(), [world.hosts[0].host]);
    let request = [("a".to_owned(), "h1".to_owned())];
    let now = world.began + Duration::from_millis(settle_ms + 300);
    let refused = world.registry.migrate(&request, &|_| true, now).unwrap_err().to_string();
    assert!(refused.contains("isn't heard of"), "{refused}");
    world.restart(settle_ms + 400);
    world.messages();
    says(&mut world, 0, nomad::Body::Hello, settle_ms + 500);
    let told = told(&mut world, 0);
    assert!(matches!(&told[..], [nomad::Body::Commit { migration: of, .. }] if *of == migration), "{told:?}");
    says(&mut world, 0, nomad::Body::Settled { migration, lost: Vec::new() }, settle_ms + 600);
    assert!(world.registry.state().ledger.migrations.is_empty());
    let now = world.began + Duration::from_millis(settle_ms + 700);
    world.registry.end_vm(world.hosts[1], vm, nomad::Epoch(2), now).unwrap();
}

/// A destination that is gone for good with the VM that was committed to it: when its user has the cluster forget it, the VM may be started elsewhere, in a new epoch. Should it
/// come back, it hears that the VM isn't its own; messages of its old start are refused.
#[test]
fn a_host_is_forgotten_and_its_vms_are_started_elsewhere() {
    let mut world = World::new();
    let migration = committed(&mut world);
    says(&mut world, 0, nomad::Body::Settled { migration, lost: Vec::new() }, 150);
    let at = |ms: u64, world: &World| world.began + Duration::from_millis(ms);
    let now = at(200, &world);
    let refused = world.registry.forget_host("h2", now).unwrap_err().to_string();
    assert!(refused.contains("it was heard of in the last 6 s"), "{refused}");
    assert!(world.registry.forget_host("h9", now).unwrap_err().to_string().contains("no host h9"));
    let settle_ms = u64::from(nomad::Config::default().settle_ms);
    for ms in (200..=settle_ms + 200).step_by(100) {
        world.beat(0, ms);
        world.tick(ms);
    }
    let now = at(settle_ms + 300, &world);
    assert_eq!(world.registry.forget_host("h2", now).unwrap(), ["a"]);
    assert!(world.registry.forget_host("h2", now).is_err(), "it is forgotten");
    assert!(crate::messages::host(&world.registry, world.hosts[1].host).is_none(), "nobody is shown it");
    let registered =
        world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), now).unwrap();
    assert_eq!((registered.epoch, registered.after), (nomad::Epoch(3), migration), "peers' holds end");
    let old = world.registry.heartbeat(world.hosts[1], now).unwrap_err().to_string();
    assert!(old.contains("was started again since"), "{old}");
    let address = "127.0.0.2:4792".parse().unwrap();
    let back = world.registry.register_host("h2", address, Incarnation(0), now).unwrap();
    assert_eq!(back.host, world.hosts[1].host, "its number stays its own");
    world.hosts[1] = back;
    world.messages();
    says(&mut world, 1, nomad::Body::Loaded { migration }, settle_ms + 400);
    let told = told(&mut world, 1);
    assert!(matches!(&told[..], [nomad::Body::Commit { places, .. }] if places.is_empty()), "{told:?}");
}

/// A monitor whose daemon knows nothing any more asks whether its VM may run: not before that is decided, not where it has moved, and in a new epoch where it was counted as lost.
#[test]
fn a_vm_is_claimed_by_the_host_that_may_run_it() {
    use nomad::coordinator::MayRun;

    let mut world = World::new();
    let began = world.began;
    let [source, destination] = world.hosts;
    world.registry.register_vm(source, "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let claim = |world: &mut World, of: Speaker, epoch: u64, keeps: bool| {
        world.registry.claim_vm(of, "a", nomad::Epoch(epoch), keeps, began).unwrap()
    };
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    assert_eq!(claim(&mut world, source, 1, true), MayRun::Undecided(migration));
    assert_eq!(claim(&mut world, destination, 2, false), MayRun::Undecided(migration));
    says(&mut world, 1, nomad::Body::Reserved { migration }, 10);
    says(&mut world, 0, nomad::Body::Converged { migration }, 20);
    says(&mut world, 1, nomad::Body::Loaded { migration }, 90);
    says(&mut world, 0, nomad::Body::Yield { migration }, 100);
    assert!(
        matches!(claim(&mut world, source, 1, true), MayRun::Elsewhere(owner) if owner.host == destination.host)
    );
    assert_eq!(claim(&mut world, destination, 2, false), MayRun::Here(nomad::Epoch(2)));
    // Its daemon is started again, and hasn't it.
    let address = "127.0.0.2:4792".parse().unwrap();
    world.hosts[1] = world.registry.register_host("h2", address, Incarnation(0), began).unwrap();
    let destination = world.hosts[1];
    says(&mut world, 0, nomad::Body::Settled { migration, lost: Vec::new() }, 150);
    says(&mut world, 1, nomad::Body::Settled { migration, lost: vec![nomad::VmId(1)] }, 160);
    assert_eq!(claim(&mut world, destination, 2, false), MayRun::Lost);
    assert_eq!(
        claim(&mut world, destination, 2, true),
        MayRun::Here(nomad::Epoch(3)),
        "before others start it"
    );
    let refused = world.registry.register_vm(source, "a", nomad::Epoch(0), Vec::new(), began).unwrap_err();
    assert!(refused.to_string().contains("it runs on host h2"), "{refused}");
}

/// A write that fails fails its requests, at any point of a migration, and the migration suffers nothing.
#[test]
fn a_failed_write_gives_no_migration_up() {
    type Step = fn(&mut World, nomad::MigrationId) -> (usize, nomad::Body);
    let steps: [Step; 4] = [
        |_, migration| (1, nomad::Body::Reserved { migration }),
        |_, migration| (0, nomad::Body::Converged { migration }),
        |_, migration| (1, nomad::Body::Loaded { migration }),
        |_, migration| (0, nomad::Body::Yield { migration }),
    ];
    for fails_before in 0..=steps.len() {
        let mut world = World::new();
        let began = world.began;
        world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), began).unwrap();
        let request = [("a".to_owned(), "h2".to_owned())];
        let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
        world.registry.flush().unwrap();
        for (at, step) in steps.iter().enumerate() {
            if at == fails_before {
                world.register_unwritten("b");
                assert!(world.registry.state().vm("b").is_none(), "it isn't written");
            }
            let (host, body) = step(&mut world, migration);
            says(&mut world, host, body, 10);
        }
        if fails_before == steps.len() {
            world.register_unwritten("b");
        }
        let decision = world.registry.state().ledger.migrations[&migration].decision;
        assert_eq!(decision, Some(nomad::coordinator::Decision::Committed), "before step {fails_before}");
        world.messages();
        world.tick(u64::from(nomad::Config::default().retry_ms) + 20);
        assert_eq!(told(&mut world, 0).len(), 1, "hosts are told, and told again");
    }
}

/// The commit itself can't be written: no host hears of one, and it is written when a vote is repeated.
#[test]
fn a_commit_that_can_not_be_written_is_written_later() {
    let mut world = World::new();
    let began = world.began;
    world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    says(&mut world, 1, nomad::Body::Reserved { migration }, 10);
    says(&mut world, 0, nomad::Body::Converged { migration }, 20);
    says(&mut world, 1, nomad::Body::Loaded { migration }, 90);
    world.messages();
    world.registry.take_events();
    world.fails.store(true, Ordering::SeqCst);
    let Speaker { host, incarnation } = world.hosts[0];
    let body = nomad::Body::Yield { migration };
    let vote = Message { from: nomad::Node::Host(host), incarnation, to: nomad::Node::Coordinator, body };
    world.registry.message(vote.clone(), began).unwrap();
    assert!(world.registry.flush().is_err());
    assert!(world.registry.take_messages().is_empty() && world.registry.take_events().is_empty());
    assert!(told(&mut world, 0).is_empty() && told(&mut world, 1).is_empty());
    world.registry.message(vote, began).unwrap();
    let decision = world.registry.state().ledger.migrations[&migration].decision;
    assert_eq!(decision, Some(nomad::coordinator::Decision::Committed));
    assert_eq!(told(&mut world, 0).len(), 1);
}

/// Requests of one write: all of them are made, with one transaction, and in their order.
#[test]
fn requests_of_one_write_see_each_other() {
    let mut world = World::new();
    let (began, writes) = (world.began, world.registry.writes());
    world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    world.registry.cancel(migration, began).unwrap();
    assert!(world.registry.has_staged());
    assert!(world.registry.take_messages().is_empty(), "nothing is written");
    assert!(world.registry.take_events().is_empty());
    let messages = world.messages();
    assert!(messages.iter().any(|message| matches!(message.body, nomad::Body::Abort { .. })), "{messages:?}");
    assert_eq!(world.registry.writes(), writes + 1);
    world.restart(100);
    let decision = world.registry.state().ledger.migrations[&migration].decision;
    assert_eq!(decision, Some(nomad::coordinator::Decision::Aborted));
}

/// A lease that runs out in changes that can't be written: the migrations that need the host are aborted all the same, with the next write.
#[test]
fn a_silent_host_is_not_forgotten_by_a_failed_write() {
    let mut world = World::new();
    let began = world.began;
    world.registry.register_vm(world.hosts[0], "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let request = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&request, &|_| true, began).unwrap();
    says(&mut world, 1, nomad::Body::Reserved { migration }, 10);
    for ms in (100..6_000).step_by(100) {
        world.beat(0, ms);
        world.tick(ms);
    }
    world.fails.store(true, Ordering::SeqCst);
    // The destination's lease was renewed by its message.
    world.registry.tick(began + Duration::from_millis(6_020)).unwrap();
    assert!(world.registry.flush().is_err());
    assert_eq!(world.registry.leases_lost(), 1);
    assert_eq!(world.registry.state().ledger.migrations[&migration].decision, None, "it isn't written");
    world.tick(6_030);
    assert_eq!(world.registry.leases_lost(), 1);
    let decision = world.registry.state().ledger.migrations[&migration].decision;
    assert_eq!(decision, Some(nomad::coordinator::Decision::Aborted));
}

/// An all-to-all job on few hosts, each with more than 65,536 pairs. Each pair is on the list once; a host's next report
/// removes those that it names no more, unless the other end's host reports them.
#[test]
fn an_all_to_all_job_is_reported() {
    const VMS: u32 = 600;
    const HOSTS: u32 = 3;
    let mut world = World::new();
    let now = world.began;
    let register = |registry: &mut Registry, host: u32| {
        let address = format!("127.0.1.{host}:4792").parse().unwrap();
        registry.register_host(&format!("r{host}"), address, Incarnation(0), now).unwrap()
    };
    let hosts: Vec<Speaker> = (0..HOSTS).map(|host| register(&mut world.registry, host)).collect();
    let vms: Vec<VmId> = (0..VMS)
        .map(|rank| {
            let (host, name) = (hosts[(rank % HOSTS) as usize], format!("rank{rank}"));
            world.registry.register_vm(host, &name, nomad::Epoch(0), Vec::new(), now).unwrap().vm
        })
        .collect();
    let of = |host: u32| -> Vec<(VmId, VmId)> {
        let own = (0..VMS).filter(move |rank| rank % HOSTS == host);
        let elsewhere = |rank: &u32| *rank % HOSTS != host;
        own.flat_map(|rank| (0..VMS).filter(elsewhere).map(move |peer| (rank, peer)))
            .map(|(rank, peer)| (vms[rank as usize], vms[peer as usize]))
            .collect()
    };
    for host in 0..HOSTS {
        assert!(of(host).len() > 65_536, "{}", of(host).len());
        world.registry.report_links(hosts[host as usize], &of(host), now).unwrap();
        world.registry.flush().unwrap();
    }
    let pairs = (VMS * (VMS - VMS / HOSTS) / 2) as usize;
    assert_eq!(world.registry.state().ledger.links.len(), pairs);
    world.registry.report_links(hosts[0], &[], now).unwrap();
    assert_eq!(world.registry.state().ledger.links.len(), pairs, "the others' hosts report them");
    world.registry.report_links(hosts[1], &[], now).unwrap();
    let between = (VMS / HOSTS * (VMS / HOSTS)) as usize;
    assert_eq!(world.registry.state().ledger.links.len(), pairs - between, "no host reports those of both");
    let many: Vec<_> = (0..=MAX_LINKS).map(|_| (vms[0], vms[1])).collect();
    let refused = world.registry.report_links(hosts[0], &many, now).unwrap_err().to_string();
    assert!(refused.contains("262145 connections of VMs are too many"), "{refused}");
}
