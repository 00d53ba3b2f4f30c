//! Six kinds of faults among three neighbours whose memory, rings and registers are real, each monitor and the registry a process of its own;
//! the guests' drivers are played by the test (`common::member`), and traffic flows between all pairs. Who has no part in a fault sees nothing,
//! who has is connected again, and nobody holds more than before. `CAUSEWAY_FAULTS=200` sets how many of each kind; a line `FAULTS {…}` says
//! what was found. Needs /dev/kvm; without it each test says so loudly and passes.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::has_kvm;
use common::member::Driver;
use host::{Daemon, DaemonConfig};
use neighbour::heartbeat::Heartbeat;
use rustix::process::{Pid, Signal, kill_process};

const DIRECTORY: &str = "CAUSEWAY_TEST_DIRECTORY";
const NAME: &str = "CAUSEWAY_TEST_NAME";
const COUNT: &str = "CAUSEWAY_FAULTS";
const NAMES: [&str; 3] = ["a", "b", "c"];
/// What the registry waits for a member's count: long for a busy machine, since a member that is held up is not a fault.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);
/// Whatever doesn't go on after this long hangs.
const HANG: Duration = Duration::from_secs(90);
/// Buffers that each direction must have brought over after a fault.
const MOVED: u64 = 20;
const STORES: u64 = 10;
/// Memory of its own that a process may have more after all faults: allocators keep some.
const GROWTH_KIB: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    KillMonitor,
    KillDaemon,
    Freeze,
    Unload,
    WildRing,
    WindowStore,
}

/// What one member says about one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Told {
    epoch: u64,
    right: u64,
    wrong: u64,
    ends: u64,
    violations: u64,
}

type Seen = BTreeMap<(&'static str, String), Told>;

/// A process of the test's: a member or the daemon.
struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(role: &str, directory: &Path, name: &str) -> Self {
        let mut child = Command::new("/proc/self/exe")
            .args(["--exact", role, "--ignored", "--nocapture"])
            .env(DIRECTORY, directory)
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (said, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // What the test harness says is before the first of ours, on the same line.
                if let Some((_, line)) = line.split_once("SAYS ") {
                    let _ = said.send(line.to_owned());
                }
            }
        });
        let process = Self { child, input, lines };
        assert_eq!(process.hear(), "ready");
        process
    }

    fn hear(&self) -> String {
        self.lines
            .recv_timeout(HANG)
            .unwrap_or_else(|error| panic!("process {} says nothing: {error}", self.child.id()))
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.hear()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Descriptors, mappings of neighbours' memory, and memory of its own in KiB.
    fn held(&self) -> [u64; 3] {
        let proc = format!("/proc/{}", self.child.id());
        let fds = std::fs::read_dir(format!("{proc}/fd")).unwrap().count() as u64;
        let maps = std::fs::read_to_string(format!("{proc}/maps")).unwrap();
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let anonymous = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
        [fds, maps.lines().filter(|line| line.contains("memfd:causeway")).count() as u64, anonymous]
    }
}

struct Bed {
    directory: tempfile::TempDir,
    daemon: Process,
    members: Vec<Process>,
}

impl Bed {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("host.d")).unwrap();
        let daemon = Process::start("daemon", directory.path(), "");
        let members = NAMES.iter().map(|name| Process::start("member", directory.path(), name)).collect();
        let mut bed = Self { directory, daemon, members };
        bed.until_all_move(&Seen::new(), &|_| false).unwrap();
        bed
    }

    fn seen(&mut self) -> Seen {
        let mut seen = Seen::new();
        for (name, member) in NAMES.into_iter().zip(&mut self.members) {
            for peer in member.ask("told").split(',').filter(|line| !line.is_empty()) {
                let mut words = peer.split(' ');
                let of = words.next().unwrap().to_owned();
                let mut number = || words.next().unwrap().parse().unwrap();
                let (epoch, right, wrong) = (number(), number(), number());
                let told = Told { epoch, right, wrong, ends: number(), violations: number() };
                seen.insert((name, of), told);
            }
        }
        seen
    }

    /// Waits until buffers go both ways between all pairs, over a later connection where `renewed`; says who hangs.
    fn until_all_move(&mut self, since: &Seen, renewed: &dyn Fn([&str; 2]) -> bool) -> Result<Seen, String> {
        let base = self.seen();
        let until = Instant::now() + HANG;
        loop {
            let now = self.seen();
            let mut still = Vec::new();
            for to in NAMES {
                for from in NAMES.into_iter().filter(|from| *from != to) {
                    let key = (to, from.to_owned());
                    let old = since.get(&key);
                    let moves = now.get(&key).is_some_and(|new| {
                        let from_here = base.get(&key).filter(|base| base.right <= new.right);
                        new.right >= from_here.map_or(0, |base| base.right) + MOVED
                            && new.epoch > 0
                            && (!renewed([to, from]) || old.is_none_or(|old| new.epoch > old.epoch))
                    });
                    if !moves {
                        still.push(format!("{from} to {to}: {:?}", now.get(&key)));
                    }
                }
            }
            if still.is_empty() {
                return Ok(now);
            }
            if Instant::now() > until {
                return Err(still.join("; "));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// One fault that member `victim` has, or the daemon.
    fn fault(&mut self, kind: Kind, number: u64, victim: usize) -> Result<(), String> {
        let other = NAMES[1 - victim];
        match kind {
            Kind::KillMonitor => {
                self.members[victim] = {
                    let old = &mut self.members[victim];
                    old.child.kill().unwrap();
                    old.child.wait().unwrap();
                    Process::start("member", self.directory.path(), NAMES[victim])
                };
            }
            Kind::KillDaemon => {
                self.daemon.child.kill().unwrap();
                self.daemon.child.wait().unwrap();
                self.daemon = Process::start("daemon", self.directory.path(), "");
            }
            Kind::Freeze => {
                let time = COUNT_TIMEOUT + Duration::from_secs(1);
                if number % 4 < 2 {
                    // The monitor stands still, and with it all of the VM.
                    self.members[victim].signal(Signal::STOP);
                    std::thread::sleep(time);
                    self.members[victim].signal(Signal::CONT);
                } else {
                    // The guest does.
                    self.members[victim].ask(&format!("freeze {}", time.as_millis()));
                    std::thread::sleep(time);
                }
            }
            Kind::Unload => {
                self.members[victim].ask("unload");
                self.members[victim].ask("load");
            }
            Kind::WildRing => {
                let done = self.members[victim].ask(&format!("wild {other} {number}"));
                if done != "true" {
                    return Err("there was no connection to break the rules of".to_owned());
                }
            }
            Kind::WindowStore => {
                let discarded = self.members[victim].ask(&format!("store {other} {STORES}"));
                if discarded != STORES.to_string() {
                    return Err(format!("of {STORES} stores {discarded} were discarded and counted"));
                }
            }
        }
        Ok(())
    }
}

/// Whether the connection of a pair ends by a fault.
fn ends(kind: Kind, victim: usize, pair: [&str; 2]) -> bool {
    match kind {
        Kind::KillDaemon => true,
        Kind::KillMonitor | Kind::Freeze | Kind::Unload => pair.contains(&NAMES[victim]),
        Kind::WildRing => pair.contains(&"a") && pair.contains(&"b"),
        Kind::WindowStore => false,
    }
}

/// What those saw of a fault who had no part in it.
fn errors(bed: &mut Bed, kind: Kind, victim: usize, before: &Seen, after: &Seen) -> Vec<String> {
    let mut errors = Vec::new();
    for ((to, from), new) in after {
        let Some(old) = before.get(&(*to, from.clone())) else { continue };
        let replaced = kind == Kind::KillMonitor && *to == NAMES[victim];
        // Buffers that the breaker of rules names are not the ones that the driver sent.
        let lied_to = kind == Kind::WildRing && from == NAMES[victim] && *to == NAMES[1 - victim];
        let wrong = if replaced { 0 } else { old.wrong };
        if new.wrong != wrong && !lied_to {
            errors.push(format!("{to} got {} wrong buffers from {from}", new.wrong - wrong));
        }
        if lied_to && new.violations == old.violations {
            errors.push(format!("{to} did not see what {from} did"));
        }
        let ended = ends(kind, victim, [to, from]);
        if !ended && (new.ends, new.epoch) != (old.ends, old.epoch) {
            errors.push(format!("{to} lost its connection to {from}: {old:?} became {new:?}"));
        }
    }
    for (name, member) in NAMES.into_iter().zip(&mut bed.members) {
        if !member.runs() {
            errors.push(format!("the monitor of {name} has ended"));
        }
    }
    if !bed.daemon.runs() {
        errors.push("the daemon has ended".to_owned());
    }
    errors
}

fn leaks(bed: &Bed, before: &[[u64; 3]]) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(15);
    loop {
        let processes = std::iter::once(&bed.daemon).chain(&bed.members);
        let more = |(old, process): (&[u64; 3], &Process)| {
            let new = process.held();
            let grown = new[0] > old[0] || new[1] > old[1] || new[2] > old[2] + GROWTH_KIB;
            grown.then(|| format!("[fds, mappings, KiB] were {old:?} and are {new:?}"))
        };
        let leaks: Vec<String> = before.iter().zip(processes).filter_map(more).collect();
        if leaks.is_empty() || Instant::now() > until {
            return leaks;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn faults(kind: Kind) {
    if !has_kvm(&format!("{kind:?}")) {
        return;
    }
    let count = std::env::var(COUNT).map_or(3, |text| text.parse::<u64>().expect("a number of faults"));
    let begun = Instant::now();
    let mut bed = Bed::start();
    let mut found: [Vec<String>; 3] = Default::default();
    let mut held = Vec::new();
    let mut done = 0;
    for number in 0..=count {
        let victim = usize::try_from(number % 2).unwrap();
        let before = bed.seen();
        let result = bed.fault(kind, number, victim);
        let after = bed.until_all_move(&before, &|pair| ends(kind, victim, pair));
        if number == 0 {
            // The first one isn't counted: what is made once and kept is there after it.
            result.unwrap();
            after.unwrap();
            held = std::iter::once(&bed.daemon).chain(&bed.members).map(Process::held).collect();
            continue;
        }
        done += 1;
        found[1].extend(result.err());
        match after {
            Ok(after) => found[1].extend(errors(&mut bed, kind, victim, &before, &after)),
            Err(still) => {
                found[0].push(format!("number {number}: {still}"));
                break;
            }
        }
    }
    found[2] = leaks(&bed, &held);
    let after: Vec<[u64; 3]> = std::iter::once(&bed.daemon).chain(&bed.members).map(Process::held).collect();
    let right: u64 = bed.seen().values().map(|told| told.right).sum();
    println!(
        "FAULTS {{\"kind\": \"{kind:?}\", \"faults\": {done}, \"hangs\": {}, \"survivor_errors\": {}, \"leaks\": {}, \"buffers\": {right}, \
         \"held_before\": {held:?}, \"held_after\": {after:?}, \"seconds\": {}}}",
        found[0].len(),
        found[1].len(),
        found[2].len(),
        begun.elapsed().as_secs()
    );
    assert!(found.iter().all(Vec::is_empty), "{kind:?}: {found:#?}");
}

/// A monitor that is killed: its peers go on with each other, and with its successor.
#[test]
fn a_monitor_is_killed() {
    faults(Kind::KillMonitor);
}

/// The daemon is killed: nobody ends, and all are connected anew by the next one.
#[test]
fn the_daemon_is_killed() {
    faults(Kind::KillDaemon);
}

/// A monitor, or its guest, stands still for longer than the registry waits.
#[test]
fn a_guest_is_frozen() {
    faults(Kind::Freeze);
}

/// The driver goes while buffers are under way, and comes back.
#[test]
fn a_driver_is_unloaded() {
    faults(Kind::Unload);
}

/// Addresses, lengths, ids and flags that the rules forbid, and rings full of noise: the other side ends that connection.
#[test]
fn a_ring_is_filled_with_what_is_forbidden() {
    faults(Kind::WildRing);
}

/// Stores into a window are discarded and counted, and hurt nobody.
#[test]
fn a_guest_stores_into_a_window() {
    faults(Kind::WindowStore);
}

fn directory() -> std::path::PathBuf {
    std::env::var_os(DIRECTORY).expect("started by the other tests").into()
}

fn say(text: &str) {
    println!("SAYS {text}");
}

/// The daemon's process.
#[test]
#[ignore = "the process that the other tests start"]
fn daemon() {
    let mut config = DaemonConfig::new(directory().join("host.sock"));
    config.sandbox = true;
    config.neighbours.heartbeat = Heartbeat { patience: COUNT_TIMEOUT, ..Heartbeat::DEFAULT };
    // Only its own threads are confined: the one that starts it ends.
    let _daemon = std::thread::spawn(move || Daemon::start(&config).unwrap()).join().unwrap();
    say("ready");
    // Until the test closes it.
    let _ = std::io::stdin().lines().count();
}

/// A member's process.
#[test]
#[ignore = "the process that the other tests start"]
fn member() {
    let name = std::env::var(NAME).unwrap();
    let permits: Vec<&str> = NAMES.into_iter().filter(|peer| *peer != name).collect();
    let mut driver = Driver::start(&directory(), &name, &permits);
    say("ready");
    let (command, commands) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if command.send(line).is_err() {
                break;
            }
        }
        // Nobody asks any more.
        std::process::exit(0);
    });
    loop {
        driver.turn();
        // Some thousand buffers per second and pair are traffic enough, and leave the machine to others.
        std::thread::sleep(Duration::from_millis(3));
        let Ok(line) = commands.try_recv() else { continue };
        let words: Vec<&str> = line.split(' ').collect();
        let number = |text: &str| text.parse::<u64>().unwrap();
        let answer = match words.as_slice() {
            ["told"] => driver.told(),
            ["freeze", time] => {
                driver.freeze(Duration::from_millis(number(time)));
                "frozen".to_owned()
            }
            ["unload"] => {
                driver.load(false);
                "unloaded".to_owned()
            }
            ["load"] => {
                driver.load(true);
                "loaded".to_owned()
            }
            ["wild", peer, what] => driver.wild(peer, number(what)).to_string(),
            ["store", peer, count] => driver.store(peer, number(count)).to_string(),
            _ => panic!("an unknown command {line:?}"),
        };
        say(&answer);
    }
}
