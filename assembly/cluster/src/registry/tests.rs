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
