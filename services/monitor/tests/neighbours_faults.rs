//! Six kinds of faults among three neighbours with real memory, rings and registers. Each monitor and the registry is a process of its own.
//! The test plays the guests' drivers (`common::member`), and traffic flows between all pairs. A member without part in a fault sees
//! nothing of it. A member with part is connected again, and no process holds more resources than before. `CAUSEWAY_FAULTS=200` sets the
//! number of faults of each kind, and a line `FAULTS {…}` reports the results. Requires /dev/kvm. Without it each test reports that, and
//! passes.
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
/// The registry's heartbeat timeout: long for a busy machine, since a delayed member is no fault.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without progress after which the test fails.
const HANG_TIMEOUT: Duration = Duration::from_secs(90);
/// Buffers that each direction must have transferred after a fault.
const MIN_BUFFERS_AFTER_FAULT: u64 = 20;
const STORES: u64 = 10;
/// Limit of the growth of a process's own memory over all faults: allocators keep some.
const GROWTH_KIB: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    KillMonitor,
    KillDaemon,
    Freeze,
    Unload,
    CorruptRing,
    WindowStore,
}

/// Statistics of one member about one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeerCounts {
    epoch: u64,
    right: u64,
    wrong: u64,
    ends: u64,
    violations: u64,
}

type Seen = BTreeMap<(&'static str, String), PeerCounts>;

/// A process of the test: a member or the daemon.
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
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // Output of the test harness may precede the first line.
                if let Some((_, line)) = line.split_once("SAYS ") {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        let process = Self { child, input, lines };
        assert_eq!(process.read_line(), "ready");
        process
    }

    fn read_line(&self) -> String {
        self.lines
            .recv_timeout(HANG_TIMEOUT)
            .unwrap_or_else(|error| panic!("process {} says nothing: {error}", self.child.id()))
    }

    fn command(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.read_line()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Number of descriptors, mappings of neighbours' memory, and own memory in KiB.
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
            for peer in member.command("told").split(',').filter(|line| !line.is_empty()) {
                let mut words = peer.split(' ');
                let of = words.next().unwrap().to_owned();
                let mut number = || words.next().unwrap().parse().unwrap();
                let (epoch, right, wrong) = (number(), number(), number());
                let counts = PeerCounts { epoch, right, wrong, ends: number(), violations: number() };
                seen.insert((name, of), counts);
            }
        }
        seen
    }

    /// Waits until buffers flow both ways between all pairs, over a later connection if `renewed`. The error names the pairs that hang.
    fn until_all_move(&mut self, since: &Seen, renewed: &dyn Fn([&str; 2]) -> bool) -> Result<Seen, String> {
        let base = self.seen();
        let until = Instant::now() + HANG_TIMEOUT;
        loop {
            let now = self.seen();
            let mut still = Vec::new();
            for to in NAMES {
                for from in NAMES.into_iter().filter(|from| *from != to) {
                    let key = (to, from.to_owned());
                    let old = since.get(&key);
                    let moves = now.get(&key).is_some_and(|new| {
                        let from_here = base.get(&key).filter(|base| base.right <= new.right);
                        new.right >= from_here.map_or(0, |base| base.right) + MIN_BUFFERS_AFTER_FAULT
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

    /// Causes one fault, of member `victim` or of the daemon.
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
                let time = HEARTBEAT_TIMEOUT + Duration::from_secs(1);
                if number % 4 < 2 {
                    // The monitor is stopped, and with it the whole VM.
                    self.members[victim].signal(Signal::STOP);
                    std::thread::sleep(time);
                    self.members[victim].signal(Signal::CONT);
                } else {
                    // Only the guest is stopped.
                    self.members[victim].command(&format!("freeze {}", time.as_millis()));
                    std::thread::sleep(time);
                }
            }
            Kind::Unload => {
                self.members[victim].command("unload");
                self.members[victim].command("load");
            }
            Kind::CorruptRing => {
                let done = self.members[victim].command(&format!("wild {other} {number}"));
                if done != "true" {
                    return Err("there was no connection to break the rules of".to_owned());
                }
            }
            Kind::WindowStore => {
                let discarded = self.members[victim].command(&format!("store {other} {STORES}"));
                if discarded != STORES.to_string() {
                    return Err(format!("of {STORES} stores {discarded} were discarded and counted"));
                }
            }
        }
        Ok(())
    }
}

/// Whether a fault ends the connection of a pair.
fn ends(kind: Kind, victim: usize, pair: [&str; 2]) -> bool {
    match kind {
        Kind::KillDaemon => true,
        Kind::KillMonitor | Kind::Freeze | Kind::Unload => pair.contains(&NAMES[victim]),
        Kind::CorruptRing => pair.contains(&"a") && pair.contains(&"b"),
        Kind::WindowStore => false,
    }
}

/// Effects of a fault on members without part in it.
fn errors(bed: &mut Bed, kind: Kind, victim: usize, before: &Seen, after: &Seen) -> Vec<String> {
    let mut errors = Vec::new();
    for ((to, from), new) in after {
        let Some(old) = before.get(&(*to, from.clone())) else { continue };
        let replaced = kind == Kind::KillMonitor && *to == NAMES[victim];
        // Buffers named by the violating member aren't those that its driver sent.
        let lied_to = kind == Kind::CorruptRing && from == NAMES[victim] && *to == NAMES[1 - victim];
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
            // The first fault isn't counted: resources that are created once and kept exist after it.
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
    let right: u64 = bed.seen().values().map(|counts| counts.right).sum();
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

/// A monitor is killed. Its peers stay connected with each other, and connect to its successor.
#[test]
fn a_monitor_is_killed() {
    faults(Kind::KillMonitor);
}

/// The daemon is killed. No member ends, and the next daemon renews all connections.
#[test]
fn the_daemon_is_killed() {
    faults(Kind::KillDaemon);
}

/// A monitor, or its guest, is stopped for longer than the registry's timeout.
#[test]
fn a_guest_is_frozen() {
    faults(Kind::Freeze);
}

/// The driver is unloaded while buffers are in flight, and loaded again.
#[test]
fn a_driver_is_unloaded() {
    faults(Kind::Unload);
}

/// Rings with forbidden addresses, lengths, ids and flags, and rings of random data: the peer ends that connection.
#[test]
fn a_ring_is_corrupted() {
    faults(Kind::CorruptRing);
}

/// Stores to a window are discarded and counted, and affect no member.
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
    config.neighbours.heartbeat = Heartbeat { patience: HEARTBEAT_TIMEOUT, ..Heartbeat::DEFAULT };
    // Confines only the daemon's threads: the one that starts it ends.
    let _daemon = std::thread::spawn(move || Daemon::start(&config).unwrap()).join().unwrap();
    say("ready");
    // Until the test closes its input.
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
        // The test has ended.
        std::process::exit(0);
    });
    loop {
        driver.turn();
        // Some thousand buffers per second and pair are enough traffic, and leave the machine to other processes.
        std::thread::sleep(Duration::from_millis(3));
        let Ok(line) = commands.try_recv() else { continue };
        let words: Vec<&str> = line.split(' ').collect();
        let number = |text: &str| text.parse::<u64>().unwrap();
        let answer = match words.as_slice() {
            ["told"] => driver.report(),
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
            ["wild", peer, what] => driver.corrupt_ring(peer, number(what)).to_string(),
            ["store", peer, count] => driver.store(peer, number(count)).to_string(),
            _ => panic!("an unknown command {line:?}"),
        };
        say(&answer);
    }
}
