//! A participant of a migration is killed, stopped or cut off at each step. The VM always has at most one owner, and before the commit
//! the source is unaffected.
//!
//! ```text
//!  host h1: causeway host        host h2: causeway host              host h3: causeway host, causeway cluster
//!  guest a ── moves, and back ─────▶ a                                  guest b, connected with a
//!  segment s0   tap, br1 ── x0 ═══════ link ═══════ x0 ── br1 ── x2 ═══════ link ═══════ x0 ── br1
//!  virtio-net        br0 ── x1 ═══════ link ═══════ x1 ── br0 ── x3 ═══════ link ═══════ x1 ── br0 10.79.0.103: heartbeats of a
//! ```
//! Guests run `rdma-exact` without end, which counts lost, repeated, reordered and corrupted operations. Guest a sends numbered
//! datagrams to the third host: two running copies of it would continue from the same number.
//!
//! The lines of the source's daemon show a migration's step. The lab injects a fault as soon as it reads the line, so the fault may
//! come a step late. It counts for the daemon's step at that time. With `--only etcd` the service stores its state in three members of
//! etcd, and a member or the service is killed or stopped. The program must be built with the feature `etcd` for it.

mod etcd;
mod plan;

use self::etcd::{Etcd, MEMBERS};
use self::plan::{Beats, Dice, Ending, Fault, How, Step, Who, faults, faults_with_etcd};
use super::migrate_mpi::{H2, H3};
use super::migrate_talk::{self as talk, STEP_TIMEOUT};
use crate::channel::Session;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Layout, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use crate::transcript::Waited;
use anyhow::{Context, Result, anyhow, bail};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-faults",
    about: "each participant of a migration is killed, stopped, cut off or destroyed at each step (--count faults in an order of --seed; --only 'Kill Service Stop': of these; --only etcd: the service and members of etcd): one owner, the source unharmed",
    topology,
    run,
    prompt: None,
};

const PORT: u32 = 7100;
/// Time-out until everything is decided and reported, and until a silent host can be forgotten.
const SETTLES: Duration = Duration::from_secs(120);
/// Time-out until operations continue after a fault: the connections retransmit after 2 s, with growing back-off.
const GOES_ON: Duration = Duration::from_secs(90);
const HEART: u16 = 7002;
/// Limit of migrations that abort before a fault's step.
const TRIES: u32 = 3;

fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").rdma())
        .host(HostSpec::new("h2").rdma())
        .host(HostSpec::new("h3").rdma())
        .link("h1", "h2")
        .link("h1", "h2")
        .link("h2", "h3")
        .link("h2", "h3")
}

fn program(m: &Member<'_>, server: Option<&str>) -> String {
    let to = server.unwrap_or("");
    format!(
        "rdma-exact --device {} --gid {} --connections 2 --count 1000000000 {to}",
        m.port.device, m.port.gid
    )
}

/// Counts over all faults.
#[derive(Debug, Default)]
struct Tally {
    faults: u32,
    double_owners: u64,
    lost_vms: u32,
    lost_with_their_process: u32,
    errors: u32,
    moved: u32,
    stayed: u32,
    given_up: u32,
    in_doubt: u32,
    by_step: BTreeMap<String, u32>,
    by_kind: BTreeMap<String, u32>,
}

struct World<'l> {
    lab: &'l Lab,
    pair: Pair<'l>,
    service: Option<Session>,
    /// The members of etcd, if the service uses it.
    etcd: Option<Etcd>,
    /// The member that a fault is injected into.
    member: usize,
    heart: Session,
    beats: Beats,
    beats_read: usize,
    /// Guest a's number of boots.
    boot: u64,
    /// Guest a's current host.
    at: usize,
    dice: Dice,
    tally: Tally,
    wrong: Vec<String>,
}

impl World<'_> {
    /// Adds a sentence about a violation.
    fn error(&mut self, text: String) {
        progress!("WRONG: {text}");
        self.tally.errors += 1;
        self.wrong.push(text);
    }

    /// Starts the programs of both guests.
    fn work(&self) -> Result<()> {
        for m in [&self.pair.a, &self.pair.b] {
            m.sh("pkill -x rdma-exact; for i in $(seq 50); do pgrep -x rdma-exact > /dev/null || break; sleep 0.2; done; true")?;
        }
        talk::detach(&self.pair.b, &program(&self.pair.b, None))?;
        talk::detach(&self.pair.a, &program(&self.pair.a, Some(&self.pair.b.tcp)))?;
        self.goes_on().map(drop)
    }

    /// Starts guest a's heartbeat after a boot.
    fn live(&mut self) -> Result<()> {
        self.boot += 1;
        let beat = format!(
            "exec 3>/dev/udp/10.79.0.103/{HEART}; n=0; while :; do n=$((n+1)); echo BEAT {} $n >&3; sleep 0.25; done",
            self.boot
        );
        let start = format!("setsid bash -c '{beat}' < /dev/null > /dev/null 2>&1 & sleep 1");
        self.pair.a.sh(&start)?;
        talk::shrink(&self.pair.a)
    }

    /// Waits until both programs have made progress.
    fn goes_on(&self) -> Result<u64> {
        let of = |m: &Member<'_>| -> Result<u64> {
            let said = m.sh("tail -n 2 /run/work.out; cat /run/work.code 2>/dev/null; true")?;
            if said.contains("ERROR") || !talk::works(m)? {
                bail!("The program in guest {} has ended: {said}", m.name);
            }
            let line = said.lines().rev().find(|line| line.starts_with("DONE")).unwrap_or_default();
            if !line.is_empty() && !line.contains("lost=0 repeated=0 reordered=0 corrupt=0") {
                bail!("Guest {} counted what must not be: {line}", m.name);
            }
            let rounds = line.split_whitespace().find_map(|word| word.strip_prefix("rounds="));
            Ok(rounds.and_then(|n| n.parse().ok()).unwrap_or(0))
        };
        let both = || Ok::<_, anyhow::Error>([of(&self.pair.a)?, of(&self.pair.b)?]);
        let (before, until) = (both()?, Instant::now() + GOES_ON);
        loop {
            std::thread::sleep(Duration::from_secs(2));
            let now = both()?;
            if now[0] > before[0] && now[1] > before[1] {
                return Ok(now[0]);
            }
            if Instant::now() > until {
                bail!("Operations don't go on within {} s: {before:?}, {now:?}", GOES_ON.as_secs());
            }
        }
    }

    /// Reads received heartbeats.
    fn listen(&mut self) {
        let position = self.heart.out.position();
        for line in self.heart.out.lines_from(self.beats_read) {
            self.beats.take(&line);
        }
        self.beats_read = position;
    }

    /// Returns the states that guest a's monitors on the first two hosts report; `None` if no monitor answers.
    fn states(&self) -> Result<[Option<String>; 2]> {
        let of = |host: usize| -> Result<Option<String>> {
            let output =
                self.lab.host(host)?.run("timeout 10 causeway inspect a summary --json", STEP_TIMEOUT)?;
            let state = serde_json::from_str::<serde_json::Value>(output.stdout.trim())
                .ok()
                .and_then(|summary| summary["state"].as_str().map(str::to_owned));
            Ok(state)
        };
        Ok([of(0)?, of(1)?])
    }

    /// Injects the fault. Returns what must be undone after a while.
    fn strike(&self, fault: Fault, next: &Guest) -> Result<()> {
        let process = match fault.who {
            Who::SourceMonitor => &self.pair.a.guest.session,
            Who::DestinationMonitor => &next.session,
            Who::SourceDaemon => &self.pair.daemons()[self.at],
            Who::DestinationDaemon => &self.pair.daemons()[1 - self.at],
            Who::PeerDaemon => &self.pair.daemons()[2],
            Who::Service => self.service.as_ref().context("The service doesn't run")?,
            Who::Etcd => self.etcd.as_ref().context("etcd doesn't run")?.member(self.member)?,
        };
        let links =
            |state: &str| format!("for i in /sys/class/net/x*; do ip link set ${{i##*/}} {state}; done");
        let host = self.lab.host(fault.host(self.at))?;
        match fault.how {
            How::Kill => process.kill(),
            How::Stop => {
                process.signal(19)?;
                std::thread::sleep(fault.how.lasts());
                process.signal(18)
            }
            How::Cut | How::Outage => {
                host.sh(&links("down"))?;
                std::thread::sleep(fault.how.lasts());
                host.sh(&links("up")).map(drop)
            }
            How::Destroy => {
                let monitor = if fault.who == Who::SourceDaemon { &self.pair.a.guest } else { next };
                process.kill()?;
                monitor.session.kill()
            }
        }
    }

    /// Declares a destroyed host permanently gone, as an operator does who finds it silent.
    fn forget(&self, host: usize) -> Result<()> {
        let command = format!("causeway cluster forget h{} --cluster {}", host + 1, talk::listens_at(2));
        let until = Instant::now() + SETTLES;
        loop {
            let output = self.lab.host(2)?.run(&command, STEP_TIMEOUT)?;
            if output.code == 0 {
                progress!("forgotten: {}", output.stdout.lines().collect::<Vec<_>>().join("; "));
                return Ok(());
            }
            if Instant::now() > until {
                bail!("Host h{} isn't forgotten in {} s: {}", host + 1, SETTLES.as_secs(), output.stderr);
            }
            std::thread::sleep(Duration::from_secs(2));
        }
    }

    /// Restarts killed processes other than monitors. A destroyed host returns as an empty one.
    fn mend(&mut self, fault: Fault) -> Result<()> {
        match fault.how {
            How::Kill => {}
            How::Destroy => self.forget(fault.host(self.at))?,
            How::Stop | How::Cut | How::Outage => return Ok(()),
        }
        let daemon = match fault.who {
            Who::SourceDaemon => self.at,
            Who::DestinationDaemon => 1 - self.at,
            Who::PeerDaemon => 2,
            Who::Service => {
                self.service = None;
                self.service = Some(serve(self.lab, self.etcd.as_ref())?);
                return Ok(());
            }
            Who::Etcd => {
                return match &mut self.etcd {
                    Some(etcd) => etcd.restart(self.lab, self.member),
                    None => Ok(()),
                };
            }
            Who::SourceMonitor | Who::DestinationMonitor => return Ok(()),
        };
        self.pair.daemons()[daemon].wait(STEP_TIMEOUT)?;
        self.pair.restart_daemon(daemon).map(drop)
    }

    /// Waits for the decision, and returns the VM's owner. Counts each moment with more than one running copy. `in_doubt`: the source
    /// has reported to its user that the VM is in doubt. `unopened`: the source may have ended before all its streams were open. Then
    /// the destination keeps waiting, as without any source.
    fn settle(&mut self, in_doubt: bool, unopened: bool) -> Result<Ending> {
        let until = Instant::now() + SETTLES;
        let (mut same, mut before) = (0, [None, None]);
        loop {
            let states = self.states()?;
            let runs = |host: usize| states[host].as_deref() == Some("running");
            let ending = match (runs(self.at), runs(1 - self.at)) {
                (true, true) => {
                    self.tally.double_owners += 1;
                    bail!("Both monitors say that they run guest a");
                }
                (true, false) => Ending::Source,
                (false, true) => Ending::Destination,
                (false, false) => Ending::Nowhere,
            };
            // A stopped VM may be waiting for the decision; or it is in doubt, and waits for its user.
            let waits = unopened && same >= 20 && states[1 - self.at].as_deref() == Some("incoming");
            let open = (0..2).any(|host| {
                let stands = states[host].as_deref().is_some_and(|state| state != "running");
                stands && !(waits && host != self.at)
            });
            same = if states == before { same + 1 } else { 0 };
            if !open && same >= 2 {
                return Ok(ending);
            }
            let doubt = in_doubt && ending == Ending::Nowhere && states[1 - self.at].is_none();
            if doubt && same >= 10 {
                self.tally.in_doubt += 1;
                return Ok(ending);
            }
            if Instant::now() > until {
                self.error(format!("after {} s monitors are {states:?}", SETTLES.as_secs()));
                return Ok(ending);
            }
            before = states;
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Runs one migration, with or without a fault. Returns false if it was aborted before the fault's step, as after an election in a
    /// starved host's etcd. The guest is then at its source.
    fn trial(&mut self, fault: Option<Fault>) -> Result<bool> {
        let (from, to) = (self.at, 1 - self.at);
        let address = format!("10.77.0.{}:{PORT}", to + 1);
        let next = self.pair.await_guest(0, to, &address, STEP_TIMEOUT)?;
        let position = self.pair.daemons()[from].err.position();
        let command = self.lab.host(from)?.start(
            &format!(
                "exec causeway --json migrate a --to {address} --downtime 3000 --streams 2 --timeout 100"
            ),
            None,
            None,
        )?;
        let mut at = Step::Begun;
        if let Some(fault) = fault {
            let log = self.pair.daemons()[from].err.clone();
            if let Some(said) = fault.step.said() {
                let until = Instant::now() + STEP_TIMEOUT;
                loop {
                    if let Waited::Line(..) = log.wait_for(said, position, Duration::from_secs(5)) {
                        break;
                    }
                    let ended = command.wait(Duration::ZERO)?.is_some();
                    if ended && self.settle(false, true)? == Ending::Source {
                        progress!("{fault:?}: given up before its step: {}", command.err.tail(1));
                        next.session.kill()?;
                        self.tally.given_up += 1;
                        return Ok(false);
                    }
                    if ended || Instant::now() > until {
                        bail!(
                            "No new migration comes to {said:?}: {}{}{}",
                            self.pair.daemons()[from].err.tail(12),
                            command.err.tail(6),
                            next.session.err.tail(6)
                        );
                    }
                }
            }
            let some = match fault.step {
                Step::Begun => 400,
                Step::Copying => 9000,
                _ => 150,
            };
            std::thread::sleep(Duration::from_millis(self.dice.roll() % some));
            at = Step::of(&log.lines_from(position));
            self.member = usize::try_from(self.dice.roll())? % MEMBERS;
            self.strike(fault, &next)?;
            self.tally.faults += 1;
            *self.tally.by_step.entry(format!("{at:?}")).or_default() += 1;
            *self.tally.by_kind.entry(format!("{:?} {:?}", fault.how, fault.who)).or_default() += 1;
            std::thread::sleep(Duration::from_secs(2));
            self.mend(fault)?;
        }
        let code = command.wait(STEP_TIMEOUT)?;
        if code.is_none() {
            self.error(format!("{fault:?} at {at:?}: the command doesn't end"));
            command.kill()?;
        }
        let said = command.err.text();
        let ending = self.settle(said.contains("stopped here, in doubt"), at == Step::Begun)?;
        let last = said.lines().last().unwrap_or_default();
        progress!(
            "{}: {fault:?} at {at:?}: status {code:?}, guest a at {ending:?}: {last}",
            self.tally.faults
        );
        self.judge(fault, (at, ending), code, next)?;
        Ok(true)
    }

    fn judge(
        &mut self,
        fault: Option<Fault>,
        (at, ending): (Step, Ending),
        code: Option<i32>,
        next: Guest,
    ) -> Result<()> {
        let what = format!("{fault:?} at {at:?}, then {ending:?}");
        let (from, to) = (self.at, 1 - self.at);
        let mut anew = false;
        match ending {
            Ending::Destination => {
                self.tally.moved += 1;
                let before = self.pair.moved(0, next, to)?;
                before.session.kill()?;
                self.at = to;
            }
            Ending::Source => {
                self.tally.stayed += 1;
                if fault.is_none() || code == Some(0) {
                    self.error(format!(
                        "{what}: the command ended with {code:?} and the guest is at its source"
                    ));
                }
                next.session.kill()?;
            }
            Ending::Nowhere => {
                if fault.is_some_and(|fault| fault.may_lose(at)) {
                    self.tally.lost_with_their_process += 1;
                } else {
                    self.tally.lost_vms += 1;
                    let tails =
                        [&self.pair.a.guest.session, &next.session].map(|session| session.err.tail(10));
                    let daemons: String =
                        self.pair.daemons().iter().map(|daemon| daemon.err.tail(14)).collect();
                    self.error(format!("{what}: the guest is lost: {tails:?} {daemons}"));
                }
                if code == Some(0) && !fault.is_some_and(|fault| fault.ends_what_has_moved(at)) {
                    self.error(format!("{what}: the guest is lost, and the command succeeded"));
                }
                next.session.kill()?;
                anew = true;
            }
        }
        anew |= fault.is_some_and(|fault| fault.harms_the_mover(ending));
        let peer = fault.is_some_and(Fault::harms_the_peer);
        if anew {
            let session = &self.pair.a.guest.session;
            session.kill()?;
            session.wait(STEP_TIMEOUT)?;
            self.pair.reboot(0, from).context("Guest a")?;
            self.at = from;
            self.live()?;
        }
        if peer {
            let session = &self.pair.b.guest.session;
            session.kill()?;
            session.wait(STEP_TIMEOUT)?;
            self.pair.reboot(1, 2).context("Guest b")?;
        }
        if anew || peer {
            self.work().with_context(|| what.clone())?;
        } else if let Err(error) = self.goes_on() {
            self.error(format!("{what}: {error:#}"));
            self.work().with_context(|| what.clone())?;
        }
        // The heartbeat comes from the guest's host, and from no other.
        let (before, until) = (self.beats.newest(self.boot), Instant::now() + GOES_ON);
        loop {
            self.listen();
            if self.beats.newest(self.boot) > before + 4 {
                break;
            }
            if Instant::now() > until {
                self.error(format!("{what}: guest a's heart doesn't beat"));
                break;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        self.tally.double_owners = self.tally.double_owners.max(self.beats.doubles);
        Ok(())
    }

    fn figures(&self, report: &mut Report) {
        let t = &self.tally;
        let counts = |counts: &BTreeMap<String, u32>| serde_json::to_value(counts).unwrap_or_default();
        report.figure("faults", t.faults);
        report.figure("double_owners", t.double_owners);
        report.figure("lost_vms", t.lost_vms);
        report.figure("lost_with_their_process", t.lost_with_their_process);
        report.figure("in_doubt_of_these", t.in_doubt);
        report.figure("errors", t.errors);
        report.figure("moved", t.moved);
        report.figure("stayed", t.stayed);
        report.figure("given_up_before_the_fault", t.given_up);
        report.figure("heartbeats", self.beats.taken);
        report.figure("by_step", counts(&t.by_step));
        report.figure("by_kind", counts(&t.by_kind));
    }
}

/// Starts the service with its previous state.
fn serve(lab: &Lab, etcd: Option<&Etcd>) -> Result<Session> {
    match etcd {
        Some(_) => {
            let service = talk::service_kept(lab, 2, &Etcd::flags())?;
            Etcd::await_leader(lab, &talk::listens_at(2), &service)?;
            Ok(service)
        }
        None => talk::service_on(lab, 2),
    }
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-faults is about Causeway's device");
    }
    lab.host(2)?.sh(H3)?;
    lab.install_causeway()?;
    for number in 0..3 {
        super::rdma_fabric::prepare(lab.host(number)?, number)?;
    }
    lab.host(1)?.sh(H2)?;
    let on_etcd = options.only.iter().any(|only| only == "etcd");
    let etcd = if on_etcd { Some(Etcd::begin(lab)?) } else { None };
    let service = serve(lab, etcd.as_ref())?;
    let layout = Layout { cmdline: talk::SMALL, ..talk::layout_served(&[0, 2], 3, 2) };
    let pair = Pair::place(lab, options, layout)?;
    let third = lab.host(2)?;
    third.sh("ip addr add 10.79.0.103/24 dev br0")?;
    let heart = third.start(&format!("exec socat -u UDP-RECV:{HEART} -"), None, None)?;
    let dice = Dice(options.seed.unwrap_or(1));
    let mut world = World {
        lab,
        pair,
        service: Some(service),
        etcd,
        member: 0,
        heart,
        beats: Beats::default(),
        beats_read: 0,
        boot: 0,
        at: 0,
        dice,
        tally: Tally::default(),
        wrong: Vec::new(),
    };
    world.live()?;
    world.work()?;
    let wanted = usize::try_from(options.count.unwrap_or(100))?;
    let mut planned = Vec::new();
    while planned.len() < wanted {
        let all = if on_etcd { faults_with_etcd(&mut world.dice) } else { faults(&mut world.dice) };
        let chosen = |fault: &Fault| {
            on_etcd || options.wants(&format!("{:?} {:?} {:?}", fault.how, fault.who, fault.step))
        };
        let before = planned.len();
        planned.extend(all.into_iter().filter(chosen));
        if planned.len() == before {
            bail!("No fault has a name with {:?}, such as 'Kill SourceDaemon Stop'", options.only);
        }
    }
    let mut result = Ok(());
    for fault in planned.into_iter().take(wanted) {
        let mut tries = (0..TRIES).map(|_| world.trial(Some(fault)).with_context(|| format!("{fault:?}")));
        result = match tries.find(|done| !matches!(done, Ok(false))) {
            Some(done) => done.map(drop),
            None => Err(anyhow!("{fault:?}: {TRIES} migrations were given up before its step")),
        };
        if result.is_err() {
            break;
        }
    }
    // Finally a migration without a fault.
    if result.is_ok() {
        result = world.trial(None).context("The migration without a fault").map(drop);
    }
    world.figures(report);
    for text in &world.wrong {
        report.check(false, text.clone());
    }
    report.check(world.tally.double_owners == 0, "two guests ran");
    result?;
    report.check(world.tally.faults > 0, "nothing was done");
    for m in [&world.pair.a, &world.pair.b] {
        m.sh("pkill -x rdma-exact; true")?;
    }
    world.pair.finish()
}
