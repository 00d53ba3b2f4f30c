//! The registry's clock: a service that stands still, and hosts that do.

use super::*;
use crate::RedbStore;

const LEASE: Duration = Duration::from_secs(6);

struct World {
    registry: Registry,
    hosts: [Speaker; 2],
    began: Instant,
    _folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&folder.path().join("cluster.redb")).unwrap();
        let began = Instant::now();
        let mut registry = Registry::new(Box::new(store), LEASE, Duration::from_secs(2), began).unwrap();
        let hosts = ["h1", "h2"].map(|name| {
            let address = format!("127.0.0.{}:4792", &name[1..]).parse().unwrap();
            registry.register_host(name, address, Incarnation(0), began).unwrap()
        });
        Self { registry, hosts, began, _folder: folder }
    }

    fn tick(&mut self, at_ms: u64) {
        self.registry.tick(self.began + Duration::from_millis(at_ms)).unwrap();
    }

    fn beat(&mut self, host: usize, at_ms: u64) {
        self.registry.heartbeat(self.hosts[host], self.began + Duration::from_millis(at_ms)).unwrap();
    }

    fn heard(&self) -> [bool; 2] {
        self.hosts.map(|speaker| self.registry.is_heard(speaker.host))
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

/// What hosts don't answer is said again, once each time: setting a timer anew, as each stage of a migration does, replaces the one before. While memory is
/// copied that is seldom.
#[test]
fn what_is_not_answered_is_said_again_once_and_seldom_while_memory_is_copied() {
    let mut world = World::new();
    let began = world.began;
    let at = |ms: u64| began + Duration::from_millis(ms);
    let [source, destination] = world.hosts;
    world.registry.register_vm(source, "a", nomad::Epoch(0), Vec::new(), began).unwrap();
    let wish = [("a".to_owned(), "h2".to_owned())];
    let migration = world.registry.migrate(&wish, &|_| true, began).unwrap();
    world.registry.take_messages();
    let said = |world: &mut World, from: u64, to: u64| {
        (from..to).for_each(|ms| world.tick(ms));
        world.registry.take_messages().len()
    };
    let config = nomad::Config::default();
    let (retry, calm) = (u64::from(config.retry_ms), u64::from(config.calm_ms));
    assert_eq!(said(&mut world, 1, 5 * retry + 1), 5, "room is asked for");
    let reserved = Message {
        from: nomad::Node::Host(destination.host),
        incarnation: destination.incarnation,
        to: nomad::Node::Coordinator,
        body: nomad::Body::Reserved { migration },
    };
    let now = 5 * retry + 1;
    world.registry.message(reserved, at(now)).unwrap();
    assert_eq!(world.registry.take_messages().len(), 1, "the source shall copy");
    assert_eq!(said(&mut world, now, now + 4 * calm + 1), 4, "and is told again");
}
