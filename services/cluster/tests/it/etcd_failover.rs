//! Failover with processes on a real etcd. Instances of the service are killed (SIGKILL) or stopped (SIGSTOP, later
//! SIGCONT) at each step of a migration. Members of etcd are killed too: one, and the majority.
#![cfg(feature = "etcd")]

use crate::common;
use crate::common::etcd;
use crate::common::moving;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cluster::etcd_config::EtcdConfig;
use cluster::{Candidate, Server, ServerConfig};
use common::Says as _;
use control_api::cluster::proto::{self, Speaker};
use control_api::cluster::{ClusterError, Service};
use etcd::{Members, is_installed};
use moving::{Host, STEPS, settle, steps};
use nomad::{Body, MigrationId};
use rustix::process::{Pid, Signal, kill_process};

/// Longer than etcd's minimum: a loaded machine shouldn't cause a change of leaders.
const LEASE: Duration = Duration::from_secs(3);

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process of one instance.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(members: &Members, prefix: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["etcd_failover::serves_until_killed", "--exact", "--ignored", "--nocapture"])
            .envs([("ETCD", members.addresses().as_str()), ("PREFIX", prefix)])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // The test runner's output may precede the address in the line.
        let address = lines.find_map(|line| line.split_once("serves at ").map(|(_, at)| at.to_owned()));
        Self { child, address: address.unwrap() }
    }

    fn service(&self) -> Service {
        Service::new(&self.address, None).unwrap()
    }

    /// The instance's role, if it answers.
    fn role(&self) -> Option<proto::Role> {
        self.service().roles().unwrap().remove(0).1.ok()
    }

    fn leads(&self) -> bool {
        self.role().is_some_and(|role| role.leads)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Not a test: the process that tests kill.
#[test]
#[ignore = "run by the tests of this file"]
fn serves_until_killed() {
    let (Ok(members), Ok(prefix)) = (std::env::var("ETCD"), std::env::var("PREFIX")) else { return };
    let kv = EtcdConfig::new(&members).unwrap().client().unwrap();
    let candidate = Candidate { prefix, address: String::new(), begin_with: None, lease: LEASE };
    let config = ServerConfig::new("127.0.0.1:0".parse().unwrap(), "");
    let server = Server::elected(&config, kv, &candidate).unwrap();
    println!("serves at {}", server.address());
    std::thread::sleep(Duration::from_secs(240));
    panic!("not killed in time");
}

fn both(one: &Process, other: &Process) -> Service {
    Service::new(&format!("{},{}", one.address, other.address), None).unwrap()
}

/// Sends a request to one instance, whether it leads or not.
fn directly(process: &Process, vm: &str, host: Speaker) -> Result<(), ClusterError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (speaker, name, nics) = (Some(host), vm.to_owned(), vec![common::nic(9)]);
    let request = proto::RegisterVmRequest { speaker, name, epoch: 0, nics };
    let service = process.service();
    runtime.block_on(async {
        let mut client = service.connect().await?;
        service.within("RegisterVm", client.register_vm(request)).await.map(drop)
    })
}

/// A migration of a VM between two hosts that has reached a step, and the instances that coordinate it.
struct Moving {
    first: Process,
    second: Process,
    service: Service,
    hosts: [Speaker; 2],
    /// The VM's number, and its epoch before the migration.
    vm: (u32, u64),
    migration: u64,
    step: usize,
    /// Whether a host has received the commit.
    heard: bool,
    /// The hosts' streams, open when the fault is injected.
    _streams: [Host; 2],
}

impl Moving {
    /// Starts the instances, of which the first leads, and takes the migration to the step.
    fn begin(members: &Members, prefix: &str, step: usize) -> Self {
        let first = Process::start(members, prefix);
        wait_until("a leader", || first.leads());
        let second = Process::start(members, prefix);
        let service = both(&first, &second);
        let hosts = [service.host("h1", 1, 0).unwrap(), service.host("h2", 2, 0).unwrap()];
        let vm = service.vm(hosts[0], "a", 0, 1).unwrap();
        let [mut source, mut destination] = hosts.map(|host| Host::new(&service, host));
        let migration = service.migrate("a", "h2").unwrap();
        let heard = steps(&mut source, &mut destination, migration, step);
        let _streams = [source, destination];
        Self { first, second, service, hosts, vm, migration, step, heard, _streams }
    }

    /// Checks that one host runs the VM, as all hosts' decisions have it. Returns whether the migration was committed.
    fn judge(&self, told: Option<bool>) -> bool {
        let (Self { hosts: [h1, h2], vm: (id, epoch), step, .. }, state) =
            (self, self.service.state().unwrap());
        let found = &state.vms[0];
        let committed = (found.host, found.epoch) == (h2.host, epoch + 1);
        assert!(committed || (found.host, found.epoch) == (h1.host, *epoch), "step {step}: {found:?}");
        assert_eq!(found.id, *id);
        assert!(!self.heard || committed, "step {step}: a host was told of a commit that isn't");
        assert!(told.is_none_or(|told| told == committed), "step {step}: told {told:?}");
        committed
    }
}

/// Kills or stops the leader at one step of a migration. A stopped leader resumes when the other one has ended the
/// migration. Returns whether it was committed.
fn takes_over(members: &Members, step: usize, stop: bool) -> bool {
    let prefix = format!("/{}{step}", if stop { "stop" } else { "kill" });
    let moving = Moving::begin(members, &prefix, step);
    let Moving { first, second, service, hosts: [h1, h2], migration, .. } = &moving;
    let (h1, h2, migration) = (*h1, *h2, *migration);
    first.signal(if stop { Signal::STOP } else { Signal::KILL });
    wait_until("the other to lead", || second.leads());
    // Hosts register again when they have lost the service. The first of the two addresses refuses connections, or
    // hangs.
    for (host, number) in [(h1, 1), (h2, 2)] {
        assert_eq!(service.host(&format!("h{number}"), number, host.incarnation).unwrap(), host);
    }
    let (mut source, mut destination) = (Host::new(service, h1), Host::new(service, h2));
    let over = || service.state().unwrap().migrations.is_empty();
    let told = settle(&mut source, &mut destination, migration, over);
    let committed = moving.judge(told);
    if stop {
        let revision = service.state().unwrap().revision;
        // The former leader resumes in the middle of its term.
        first.signal(Signal::CONT);
        let error = directly(first, "ghost", h1).unwrap_err();
        assert!(!error.is_refusal(), "{error:?}");
        wait_until("the first to stand by", || {
            first.role().is_some_and(|role| role.leader == second.address && !role.leads)
        });
        let state = service.state().unwrap();
        assert_eq!((state.vms.len(), state.revision), (1, revision), "it has changed something");
    }
    committed
}

fn at_each_step(test: &str, stop: bool) {
    if !is_installed(test) {
        return;
    }
    let members = Members::start(1);
    let mut ends = [0, 0];
    // A few at a time: most of the time passes in waiting for leases.
    let all: Vec<usize> = (0..=STEPS).collect();
    for portion in all.chunks(5) {
        std::thread::scope(|scope| {
            let members = &members;
            let running: Vec<_> =
                portion.iter().map(|step| scope.spawn(move || takes_over(members, *step, stop))).collect();
            for one in running {
                ends[usize::from(one.join().unwrap())] += 1;
            }
        });
    }
    assert!(ends.iter().all(|times| *times >= 2), "{ends:?}");
}

#[test]
fn a_leader_is_killed_at_each_step_of_a_migration() {
    at_each_step("a_leader_is_killed_at_each_step_of_a_migration", false);
}

#[test]
fn a_leader_is_stopped_at_each_step_of_a_migration_and_wakes_up() {
    at_each_step("a_leader_is_stopped_at_each_step_of_a_migration_and_wakes_up", true);
}

/// Kills a member of etcd at one step of a migration. The instance that leads then ends the migration, with an abort if
/// it isn't decided. Returns whether it was committed.
fn goes_on(members: &mut Members, step: usize) -> bool {
    let prefix = format!("/member{step}");
    let moving = Moving::begin(members, &prefix, step);
    let Moving { service, hosts: [h1, h2], migration, .. } = &moving;
    let (h1, h2, migration) = (*h1, *h2, *migration);
    let member = step % 3;
    members.kill(member);
    // Either instance may lead, or a new term begin: hosts retry their registration, and open another stream when
    // theirs ends.
    let join = |host: Speaker, number: u8| {
        let name = format!("h{number}");
        wait_until("the host's registration", || {
            service.host(&name, number, host.incarnation).is_ok_and(|known| known == host)
        });
        Host::try_new(service, host)
    };
    let mut ends = [(h1, None), (h2, None)];
    let mut told = None;
    let deadline = Instant::now() + Duration::from_secs(60);
    while !service.state().is_ok_and(|state| state.migrations.is_empty()) {
        assert!(Instant::now() < deadline, "step {step}: the migration doesn't end");
        // The coordinator aborts a migration that isn't decided, and sends a decision to both hosts otherwise.
        let _ = service.cancel(migration);
        for (number, (host, end)) in (1..).zip(&mut ends) {
            if end.is_none() {
                *end = join(*host, number);
            }
            let Some(open) = end else { continue };
            let committed = match open.soon_unless_broken() {
                Some(Some(Body::Commit { .. })) => true,
                Some(Some(Body::Abort { .. })) => false,
                Some(_) => continue,
                None => {
                    *end = None;
                    continue;
                }
            };
            assert!(told.is_none_or(|told| told == committed), "one is told to commit, one to give it up");
            told = Some(committed);
            open.say(Body::Settled { migration: MigrationId(migration), lost: Vec::new() });
        }
    }
    let committed = moving.judge(told);
    drop(moving);
    members.run(member);
    members.wait();
    committed
}

#[test]
fn a_member_of_etcd_is_killed_at_each_step_of_a_migration() {
    if !is_installed("a_member_of_etcd_is_killed_at_each_step_of_a_migration") {
        return;
    }
    let mut members = Members::start(3);
    let mut ends = [0, 0];
    for step in 0..=STEPS {
        ends[usize::from(goes_on(&mut members, step))] += 1;
    }
    assert!(ends.iter().all(|times| *times >= 2), "{ends:?}");
}

/// A client that registers VMs until it is stopped, and retries requests without an answer. Returns the acknowledged
/// VMs.
struct Client {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(BTreeMap<String, u32>, Duration)>,
}

impl Client {
    fn start(service: &Service, host: Speaker) -> Self {
        let (service, stop) = (service.clone(), Arc::new(AtomicBool::new(false)));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut answered, mut longest) = (BTreeMap::new(), Duration::ZERO);
            while !ended.load(Ordering::SeqCst) {
                let name = format!("vm{}", answered.len());
                let began = Instant::now();
                loop {
                    match service.vm(host, &name, 0, u8::try_from(answered.len() % 200).unwrap()) {
                        Ok((id, epoch)) => {
                            assert_eq!(epoch, 1, "{name}");
                            answered.insert(name, id);
                            break;
                        }
                        Err(error) => assert!(!error.is_refusal(), "{name}: {error}"),
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
                longest = longest.max(began.elapsed());
            }
            (answered, longest)
        });
        Self { stop, thread }
    }

    /// Stops it after its next acknowledged request. Returns the VMs, and the longest time that one took.
    fn end(self) -> (BTreeMap<String, u32>, Duration) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// Retries as a client has to: for up to a minute, while there is no leader. A loaded machine may let a lease expire.
fn asked_again<T>(mut ask: impl FnMut() -> Result<T, ClusterError>) -> Result<T, ClusterError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match ask() {
            Err(error) if !error.is_refusal() && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            answer => return answer,
        }
    }
}

/// Three instances on three members of etcd. One of each dies, also the leaders; then etcd's majority dies and returns.
/// No acknowledged change is lost. While no instance can lead, clients receive an error.
#[test]
fn one_of_each_may_die_and_without_etcds_majority_nothing_hangs() {
    if !is_installed("one_of_each_may_die_and_without_etcds_majority_nothing_hangs") {
        return;
    }
    let mut members = Members::start(3);
    let mut instances: Vec<_> = (0..3).map(|_| Process::start(&members, "/causeway")).collect();
    let service = |instances: &[Process]| {
        let addresses: Vec<_> = instances.iter().map(|instance| instance.address.as_str()).collect();
        Service::new(&addresses.join(","), None).unwrap()
    };
    wait_until("a leader", || service(&instances).state().is_ok());
    let host = service(&instances).host("h1", 1, 0).unwrap();
    let mut answered = BTreeMap::new();
    let mut check = |instances: &[Process], client: Client, what: &str| {
        let (more, longest) = client.end();
        println!("{what}: {} answers, the longest after {longest:?}", more.len());
        answered.extend(more);
        let state = asked_again(|| service(instances).state()).unwrap();
        let there: BTreeMap<String, u32> = state.vms.iter().map(|vm| (vm.name.clone(), vm.id)).collect();
        assert_eq!(there, answered, "{what}");
        for name in there.keys() {
            let id = answered[name];
            let mut tries = 0;
            let ended = asked_again(|| {
                tries += 1;
                service(instances).end(host, id, 1)
            });
            // A request whose first try had no answer may have been carried out.
            assert!(ended.is_ok() || tries > 1, "{what}: {name}: {ended:?}");
        }
        let state = asked_again(|| service(instances).state()).unwrap();
        assert!(state.vms.is_empty(), "{what}: {:?}", state.vms);
        answered.clear();
    };
    // Each member of etcd in turn, so that etcd's leader is among them.
    for member in 0..3 {
        let client = Client::start(&service(&instances), host);
        std::thread::sleep(Duration::from_millis(300));
        members.kill(member);
        std::thread::sleep(Duration::from_secs(1));
        check(&instances, client, &format!("etcd's member {member} killed"));
        members.run(member);
        wait_until("a leader", || service(&instances).state().is_ok());
    }
    // The leading instance.
    let client = Client::start(&service(&instances), host);
    std::thread::sleep(Duration::from_millis(300));
    let leads = instances.iter().position(Process::leads).unwrap();
    instances[leads].signal(Signal::KILL);
    std::thread::sleep(Duration::from_millis(500));
    check(&instances, client, "the instance that leads killed");
    drop(instances.remove(leads));
    instances.push(Process::start(&members, "/causeway"));
    // The majority of etcd's members.
    members.kill(0);
    members.kill(1);
    wait_until("nobody to lead", || instances.iter().all(|instance| !instance.leads()));
    wait_until("all to know why", || {
        instances.iter().all(|instance| instance.role().is_some_and(|role| !role.store_answers))
    });
    let began = Instant::now();
    let error = service(&instances).state().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ClusterError::NoLeader { .. }) && text.contains("doesn't answer"), "{text}");
    println!("without a majority, said after {:?}: {text}", began.elapsed());
    members.run(0);
    wait_until("a leader", || service(&instances).state().is_ok());
    let client = Client::start(&service(&instances), host);
    std::thread::sleep(Duration::from_millis(300));
    check(&instances, client, "etcd's majority is back");
}
