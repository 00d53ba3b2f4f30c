//! The service's process is killed at any moment and started again on its file: what it had answered is there.

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cluster::{RedbStore, Server, ServerConfig, Store as _};
use common::Says as _;
use control_api::cluster::Service;
use control_api::cluster::proto::Speaker;
use facilities::rng::SplitMix64;

struct Process {
    child: Child,
    service: Service,
}

impl Process {
    fn start(state: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["killed::serves_until_killed", "--exact", "--ignored", "--nocapture"])
            .env("STATE", state)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // The test runner's own words may stand before it in the line.
        let address = lines.find_map(|line| line.split_once("serves at ").map(|(_, at)| at.to_owned()));
        let service = Service::new(&address.unwrap(), None).unwrap();
        Self { child, service }
    }

    /// Sends SIGKILL, and waits until the process has ended.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Not a test: the process that others kill.
#[test]
#[ignore = "run by the tests of this file"]
fn serves_until_killed() {
    let Some(state) = std::env::var_os("STATE") else { return };
    let server = Server::start(&ServerConfig::new("127.0.0.1:0".parse().unwrap(), state)).unwrap();
    println!("serves at {}", server.address());
    std::thread::sleep(Duration::from_secs(120));
    panic!("not killed in time");
}

/// The state that the service has acknowledged to its clients. Its file must have it after a kill.
#[derive(Debug, Default, Clone, PartialEq)]
struct Acknowledged {
    /// By name: number and epoch, or that it has ended.
    vms: BTreeMap<String, Option<(u32, u64)>>,
    links: BTreeSet<(u32, u32)>,
}

impl Acknowledged {
    fn end(&mut self, name: &str, id: u32) {
        self.vms.insert(name.to_owned(), None);
        self.links.retain(|(a, b)| *a != id && *b != id);
    }

    /// One random step. Whether it was answered.
    fn step(&mut self, rng: &mut SplitMix64, service: &Service, host: Speaker) -> bool {
        let name = format!("vm{}", rng.below(6));
        let running: Vec<(String, (u32, u64))> =
            self.vms.iter().filter_map(|(name, vm)| Some((name.clone(), (*vm)?))).collect();
        let ids: Vec<u32> = running.iter().map(|(_, (id, _))| *id).collect();
        match rng.below(5) {
            0..=2 => match service.vm(host, &name, 0, u8::try_from(rng.below(200)).unwrap()) {
                Ok(vm) => {
                    let before = self.vms.insert(name, Some(vm)).flatten();
                    assert!(before.is_none_or(|before| before == vm), "{before:?} became {vm:?}");
                    true
                }
                Err(error) => answered(&error),
            },
            3 if !running.is_empty() => {
                let (name, (id, epoch)) = &running[rng.below(u32::try_from(running.len()).unwrap()) as usize];
                match service.end(host, *id, *epoch) {
                    Ok(()) => {
                        self.end(name, *id);
                        true
                    }
                    Err(error) => answered(&error),
                }
            }
            4 if ids.len() > 1 => {
                let links: BTreeSet<(u32, u32)> =
                    ids.windows(2).map(|pair| (pair[0].min(pair[1]), pair[0].max(pair[1]))).collect();
                match service.links(host, &links.iter().copied().collect::<Vec<_>>()) {
                    Ok(()) => {
                        self.links = links;
                        true
                    }
                    Err(error) => answered(&error),
                }
            }
            _ => true,
        }
    }
}

fn answered(error: &control_api::cluster::ClusterError) -> bool {
    assert!(!error.is_refusal(), "{error}");
    false
}

fn found(path: &Path) -> Acknowledged {
    let store = RedbStore::open(path).unwrap();
    let state = store.state();
    Acknowledged {
        vms: state
            .vms
            .iter()
            .map(|(vm, about)| (about.name.clone(), Some((vm.0, state.ledger.vms[vm].epoch.0))))
            .collect(),
        links: state.ledger.links.iter().map(|(a, b)| (a.0, b.0)).collect(),
    }
}

fn without_ended(acknowledged: &Acknowledged) -> Acknowledged {
    let mut shown = acknowledged.clone();
    shown.vms.retain(|_, vm| vm.is_some());
    shown
}

/// Killed after each answered step: exactly what was answered is there.
#[test]
fn what_was_answered_is_there_after_each_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.redb");
    let mut process = Process::start(&path);
    let host = process.service.host("h1", 1, 0).unwrap();
    let mut acknowledged = Acknowledged::default();
    let mut rng = SplitMix64::new(3);
    for step in 0..40 {
        assert!(acknowledged.step(&mut rng, &process.service, host), "step {step}");
        process.kill();
        assert_eq!(found(&path), without_ended(&acknowledged), "after step {step}");
        process = Process::start(&path);
        // Its daemon wasn't started again: what it was given holds.
        assert_eq!(process.service.host("h1", 1, host.incarnation).unwrap(), host);
    }
    process.kill();
}

/// Killed in the middle of steps: what was answered is there; of the one step under way all or nothing.
#[test]
fn a_kill_in_the_middle_loses_nothing_that_was_answered() {
    let folder = tempfile::tempdir().unwrap();
    let mut steps = 0;
    // On a busy machine a round answers few steps.
    for round in 0..150_u64 {
        if round >= 15 && steps > 100 {
            break;
        }
        let path = folder.path().join(format!("{round}.redb"));
        let process = Process::start(&path);
        let service = process.service.clone();
        let host = service.host("h1", 1, 0).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let client = std::thread::spawn(move || {
            let (mut acknowledged, mut rng) = (Acknowledged::default(), SplitMix64::new(round));
            let mut before;
            let mut steps = 0;
            loop {
                before = rng.clone();
                if !acknowledged.step(&mut rng, &service, host) || ended.load(Ordering::SeqCst) {
                    return (acknowledged, before, steps);
                }
                steps += 1;
            }
        });
        std::thread::sleep(Duration::from_millis(20 + 37 * (round % 8)));
        process.kill();
        stop.store(true, Ordering::SeqCst);
        let (acknowledged, rng, answered) = client.join().unwrap();
        steps += answered;
        let there = found(&path);
        if there == without_ended(&acknowledged) {
            continue;
        }
        // Then the step that wasn't answered has happened wholly. An end of a VM:
        let ended = acknowledged.vms.iter().filter_map(|(name, vm)| Some((name, (*vm)?.0)));
        let by_end = ended.clone().any(|(name, id)| {
            let mut after = acknowledged.clone();
            after.end(name, id);
            without_ended(&after) == there
        });
        if by_end {
            continue;
        }
        // Or something that, said again to a new process, changes nothing.
        let process = Process::start(&path);
        assert_eq!(process.service.host("h1", 1, host.incarnation).unwrap(), host);
        let (mut repeated, mut rng) = (acknowledged.clone(), rng);
        assert!(repeated.step(&mut rng, &process.service, host));
        process.kill();
        assert_eq!(found(&path), there, "round {round}");
        assert_eq!(without_ended(&repeated), there, "round {round}");
    }
    assert!(steps > 100, "only {steps} steps were answered");
}
