//! Linux's own drivers on cards under their models, while root requests from the cards what the models refuse. Each policy lets the
//! driver continue or stops the guest, as docs/reference/vpio.md says. The lab replays the traces of the refused requests without guest
//! and card.
//!
//! ```text
//!   guest: 8139too, e1000, ne2k-pci ──▶ registers ──▶ model ──▶ card ── wire ── e1000 10.82.0.1  host
//!          lab inject (root) ─────────▶    "       ──▶   "  ──▶ refused ──▶ policy, trace
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use vpio::violation::{decides_as_before, read};

use super::vpio_nics::{self, BOOT, CARDS, COMMAND_TIMEOUT, HOST_SIDE, Member, NAME, READY};
use crate::channel::Session;
use crate::dma_attack::beside::{Card, Violation};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma;
use crate::scenario::{Options, Report, Scenario};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "vpio-recovery",
    about: "A guest's root asks for what its card's model refuses, beside 8139too, e1000 or ne2k-pci, by each policy: the driver goes on or the guest is stopped; traces are replayed",
    topology: vpio_nics::topology,
    run,
    prompt: None,
};

/// A policy's documented effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Documented {
    /// The driver continues, with or without an interrupt.
    GoesOn { told: bool },
    /// The guest's kernel dies of a machine check, and the next one gets a reset card.
    DiesOfIt,
    /// The monitor ends the VM.
    Ends,
}

/// The policies, and their effect for a card that can report an error to its driver.
const POLICIES: [(&str, Documented); 4] = [
    ("ignore", Documented::GoesOn { told: false }),
    ("device-error", Documented::GoesOn { told: true }),
    ("machine-check", Documented::DiesOfIt),
    ("stop", Documented::Ends),
];
/// The card that can't: its guest is stopped instead.
const CANT_TELL: (&str, &str) = ("e1000", "device-error");

/// KiB of the exchange that shows that a card works, and of the one during which a request is refused.
const SMALL: u64 = 16;
const LARGE: u64 = 128;
/// Linux's drivers wait 5 to 6 s for a frame before they reset their card; an emulated host is slow.
const WATCHDOG: u32 = 60;
/// Number of violations per guest that a monitor keeps.
const KEPT: u64 = 16;
/// Permits root to map registers that a driver uses.
const WORDS: [&str; 1] = ["iomem=relaxed"];
const MACHINE_CHECK: &str = "Machine Check Exception: 4 Bank 7: b200000000000e0b";

/// Counts over all cards and policies.
#[derive(Debug, Default)]
struct Tally {
    violations: u64,
    /// Number of recoveries by mechanism.
    recovered: BTreeMap<&'static str, u64>,
    /// VMs that were ended, and kernels that died.
    stopped: u64,
    traces: u64,
    /// Sentences about undocumented effects.
    undocumented: Vec<String>,
}

/// A card, a policy, and the path of the traces in the host.
struct Part<'a> {
    host: &'a Host,
    on: &'static vpio_nics::Card,
    card: &'static Card,
    policy: &'static str,
    kernel: &'a str,
}

impl<'a> Part<'a> {
    fn name(&self) -> String {
        format!("{}-{}", self.card.name, self.policy)
    }

    fn file(&self) -> String {
        format!("/tmp/n/refused-{}", self.name())
    }

    fn documented(&self) -> Documented {
        let (_, documented) = POLICIES[POLICIES.iter().position(|one| one.0 == self.policy).unwrap_or(0)];
        if (self.card.name, self.policy) == CANT_TELL { Documented::Ends } else { documented }
    }

    /// Boots a guest whose driver works.
    fn boot(&self) -> Result<Member<'a>> {
        vpio_nics::address_peer(self.host, self.on, "vpio")?;
        let nic = format!("vpio:{},policy={},violations={}", self.on.address(), self.policy, self.file());
        let member = vpio_nics::start(self.host, self.on, "vpio", &nic, &WORDS, self.kernel)?;
        works(&member).context("before anything is refused")?;
        Ok(member)
    }

    /// Returns the command of a violation in the guest.
    fn command(&self, number: usize, bar: u8) -> String {
        format!("/lab/agent inject {} {number} --bar {bar}", self.card.name)
    }

    /// Injects from the host, for a guest that may die before it answers, or is busy.
    fn inject_beside(&self, number: usize, bar: u8) -> Result<Session> {
        let command = rdma::quoted(&self.command(number, bar));
        self.host.spawn("inject", &format!("exec /share/.lab/lab in --wait 60 {NAME} {command}"))
    }

    /// Returns each violation with its number, and the BAR if it is tried once.
    fn once(&self) -> impl Iterator<Item = (usize, u8, &'static Violation)> {
        let bars = self.card.bars;
        self.card.violations.iter().enumerate().map(|(at, one)| (at, bars[at % bars.len()], one))
    }

    fn stop(&self, member: &Member<'_>) -> Result<()> {
        self.host.sh(&format!("causeway stop {NAME} --force"))?;
        member.guest.ended(Duration::from_secs(60))
    }

    /// Returns the lines of the trace file.
    fn traces(&self) -> Result<String> {
        self.host.sh(&format!("cat {}", self.file()))
    }
}

/// Pings, and transfers bytes both ways with compared checksums.
fn works(member: &Member<'_>) -> Result<()> {
    member.run(&format!("ping -q -c 3 -i 0.3 -w 60 {HOST_SIDE}"))?;
    vpio_nics::transfer(member, SMALL)
}

/// Returns how often the watchdog has found an unsent frame.
fn timeouts(member: &Member<'_>) -> Result<u64> {
    let text = member.run("cat /sys/class/net/n0/queues/tx-0/tx_timeout")?;
    text.trim().parse().with_context(|| format!("The watchdog's counter is {text:?}"))
}

/// Returns the monitor's count of refused requests, and the sentences that it keeps.
fn refused(member: &Member<'_>) -> Result<(u64, Vec<String>)> {
    let nic = member.nic()?;
    ensure!(nic["failed"] == false, "The NIC failed: {nic}");
    let count = nic["decisions"]["refused"].as_u64().context("The NIC doesn't count what it refuses")?;
    let kept = nic["violations"].as_array().context("The NIC keeps no violations")?;
    Ok((count, kept.iter().filter_map(|text| Some(text.as_str()?.to_owned())).collect()))
}

/// Returns whether these sentences match a violation: its registers in order, unless the driver was active, and no unrelated ones.
fn are_about(sentences: &[String], violation: &Violation, busy: bool) -> bool {
    let about = |said: &String, name: &str| said.contains(&format!(" to {name} is refused: "));
    let in_order = sentences.iter().zip(violation.refused).all(|(said, name)| about(said, name));
    let known = |said: &String| violation.refused.iter().chain(violation.also).any(|name| about(said, name));
    !sentences.is_empty() && (busy || in_order) && sentences.iter().all(known)
}

/// Checks that the violation was refused since `before`.
fn check_refused(
    member: &Member<'_>,
    before: &(u64, Vec<String>),
    violation: &Violation,
    busy: bool,
) -> Result<()> {
    let (count, kept) = refused(member)?;
    let new = kept.get(before.1.len()..).unwrap_or_default();
    if count == before.0 || !are_about(new, violation, busy) {
        bail!("{:?} were to be refused; {} refusals came: {new:?}", violation.refused, count - before.0);
    }
    Ok(())
}

/// Waits until frames flow again; returns the mechanism. `before` is the watchdog's counter.
fn recovery(member: &Member<'_>, before: u64) -> Result<&'static str> {
    let answered = |seconds: u32| -> Result<bool> {
        let ping = format!(
            "ping -q -c 3 -i 0.3 -w {seconds} {HOST_SIDE} >/dev/null && echo ANSWERED || echo SILENT"
        );
        Ok(member.run(&ping)?.contains("ANSWERED"))
    };
    let soon = answered(4)?;
    let later = soon || answered(WATCHDOG)?;
    if later {
        return Ok(if timeouts(member)? > before {
            "watchdog"
        } else if soon {
            "at_once"
        } else {
            "later"
        });
    }
    member.run("ip link set n0 down; ip link set n0 up")?;
    ensure!(answered(WATCHDOG)?, "The driver doesn't come back, not even by `ip link set n0 down` and `up`");
    Ok("link_down_up")
}

/// One violation without traffic: it is refused, the driver gets an interrupt or not, and continues.
fn alone(
    member: &Member<'_>,
    part: &Part<'_>,
    (number, bar, violation): (usize, u8, &Violation),
    told: bool,
) -> Result<&'static str> {
    let (before, timeouts) = (refused(member)?, timeouts(member)?);
    let count = r"$(sed -n 's/^ *[0-9]*: *\([0-9]*\) .* n0$/\1/p' /proc/interrupts)";
    let text = member.run(&format!(
        "a={count}; sleep 1; b={count}; {} || exit 1; sleep 1; echo INTERRUPTS $a $b {count}",
        part.command(number, bar)
    ))?;
    let numbers = text.lines().find_map(|line| line.strip_prefix("INTERRUPTS "));
    let numbers: Vec<u64> =
        numbers.unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    let [first, second, third] = numbers[..] else {
        bail!("The interrupts were not counted: {text:?}; {}", member.run("cat /proc/interrupts")?)
    };
    let (quiet, after) = (second.saturating_sub(first), third.saturating_sub(second));
    check_refused(member, &before, violation, false)?;
    if told && after == 0 {
        bail!("The driver isn't told: {quiet} interrupts before it, {after} after, {third} in all");
    }
    let how = recovery(member, timeouts)?;
    works(member).context("after it")?;
    progress!(
        "    {}: {}, BAR {bar}: {how}; {after} interrupts ({quiet} in the second before)",
        part.name(),
        violation.name
    );
    Ok(how)
}

/// The same during an exchange, which completes with the right checksums.
fn in_the_midst(
    member: &Member<'_>,
    part: &Part<'_>,
    (number, bar, violation): (usize, u8, &Violation),
) -> Result<&'static str> {
    let (before, waited) = (refused(member)?, timeouts(member)?);
    let session = part.inject_beside(number, bar)?;
    vpio_nics::transfer(member, LARGE).context("an exchange in whose midst something is refused")?;
    ensure!(session.wait(COMMAND_TIMEOUT)? == Some(0), "`lab inject` failed: {}", session.err.tail(4));
    check_refused(member, &before, violation, true)?;
    let how = recovery(member, waited)?;
    progress!("    {}: {}, BAR {bar}, in the midst of an exchange: {how}", part.name(), violation.name);
    Ok(how)
}

/// A policy by which the driver continues: one guest for all violations, through one BAR without traffic, and through the other during
/// an exchange.
fn goes_on(part: &Part<'_>, told: bool, tally: &mut Tally) -> Result<()> {
    let member = part.boot()?;
    let mut watchdogs = 0;
    let (Some(&first), Some(&last)) = (part.card.bars.first(), part.card.bars.last()) else {
        bail!("{} has no BARs", part.card.name)
    };
    for (number, violation) in part.card.violations.iter().enumerate() {
        let mut tried = |found: Result<&'static str>| -> Result<()> {
            tally.violations += 1;
            let how = found.with_context(|| violation.name)?;
            watchdogs += u64::from(how == "watchdog");
            *tally.recovered.entry(how).or_default() += 1;
            Ok(())
        };
        tried(alone(&member, part, (number, first, violation), told))?;
        tried(in_the_midst(&member, part, (number, last, violation)))?;
    }
    // A watchdog's warning includes a call trace.
    let trouble = member.guest.trouble();
    let content = trouble.iter().all(|line| watchdogs > 0 && line.contains("Call Trace"));
    ensure!(content, "The guest's kernel complained: {trouble:?}");
    let (count, _) = refused(&member)?;
    part.stop(&member)?;
    replayed(part, count, tally)
}

/// Policy `machine-check`: the kernel dies of each violation, and the next one gets a reset card.
fn dies_of_it(part: &Part<'_>, tally: &mut Tally) -> Result<()> {
    let member = part.boot()?;
    for (number, bar, violation) in part.once() {
        let before = refused(&member)?;
        let from = member.guest.session.out.position();
        let session = part.inject_beside(number, bar)?;
        tally.violations += 1;
        let said =
            |what, patience| member.guest.expect_from(what, from, patience).with_context(|| violation.name);
        said(MACHINE_CHECK, Duration::from_secs(60))?;
        said("Kernel panic - not syncing: Fatal", COMMAND_TIMEOUT)?;
        session.kill()?;
        tally.stopped += 1;
        said(READY, BOOT)?;
        check_refused(&member, &before, violation, false).with_context(|| violation.name)?;
        works(&member).with_context(|| format!("{}: after the next kernel's start", violation.name))?;
        progress!("    {}: {}, BAR {bar}: the next kernel has the card", part.name(), violation.name);
    }
    let (count, _) = refused(&member)?;
    part.stop(&member)?;
    replayed(part, count, tally)
}

/// A policy that ends the VM: one VM per violation, and one after the last, which gets a reset card.
fn ends(part: &Part<'_>, tally: &mut Tally) -> Result<()> {
    let mut count = 0;
    for (number, bar, violation) in part.once() {
        let member = part.boot().with_context(|| format!("{count} VMs have been stopped"))?;
        let session = part.inject_beside(number, bar)?;
        tally.violations += 1;
        let monitor = &member.guest.session;
        let status = monitor.wait(Duration::from_secs(60))?;
        session.kill()?;
        let sentence = monitor.err.text();
        let named = sentence.contains("nic0")
            && sentence.contains(&format!(" to {} is refused: ", violation.refused[0]));
        ensure!(
            status.is_some_and(|code| code != 0),
            "{}: the monitor goes on, or ended with {status:?}",
            violation.name
        );
        ensure!(
            named,
            "{}: the monitor doesn't say what was refused: {}",
            violation.name,
            monitor.err.tail(4)
        );
        (count, tally.stopped) = (count + 1, tally.stopped + 1);
        let traces = read(&part.traces()?).with_context(|| violation.name)?;
        let last = traces.last().map(|trace| trace.refusal.register.as_str());
        ensure!(last == violation.refused.first().copied(), "{}: its trace is of {last:?}", violation.name);
        progress!("    {}: {}, BAR {bar}: the VM was ended", part.name(), violation.name);
        part.host.forget_consoles();
    }
    let member = part.boot().context("after the last VM was stopped")?;
    part.stop(&member)?;
    replayed(part, count, tally)
}

/// The part has as many traces as refused requests, and this program decides each one like the monitor. They are kept for `vpio`'s
/// example `replay`.
fn replayed(part: &Part<'_>, count: u64, tally: &mut Tally) -> Result<()> {
    let text = part.traces()?;
    let folder = crate::paths::target().join("vpio-recovery");
    let path = folder.join(format!("{}.jsonl", part.name()));
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&path, &text))
        .with_context(|| format!("Can't write {}", path.display()))?;
    let traces = read(&text)?;
    let kept = u64::try_from(traces.len())?;
    ensure!(kept == count.min(KEPT), "{count} requests were refused, and {kept} traces are kept");
    for trace in &traces {
        decides_as_before(trace).with_context(|| format!("The replay of: {}", trace.refusal))?;
    }
    tally.traces += kept;
    progress!("    {}: {kept} traces replayed: {}", part.name(), path.display());
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    vpio_nics::prepare(host)?;
    let kernel = options.kernels.first().map_or("6.1-generic", String::as_str);
    let mut tally = Tally::default();
    for on in &CARDS {
        let card =
            Card::find(on.name()).with_context(|| format!("There are no violations for {}", on.name()))?;
        for (policy, _) in POLICIES {
            let part = Part { host, on, card, policy, kernel };
            if !options.wants(&part.name()) {
                continue;
            }
            progress!("  {}: {:?}", part.name(), part.documented());
            host.sh(&format!("rm -f {}", part.file()))?;
            let done = match part.documented() {
                Documented::GoesOn { told } => goes_on(&part, told, &mut tally),
                Documented::DiesOfIt => dies_of_it(&part, &mut tally),
                Documented::Ends => ends(&part, &mut tally),
            };
            if let Err(error) = done {
                progress!("  {} FAILED: {error:#}", part.name());
                // Immediately, so that the failure counts independently of the next part.
                report.check(false, format!("{}: {error:#}", part.name()));
                if !host.answers() {
                    return Err(error);
                }
                eprint!("{}", host.tails());
                lab.hold()?;
                tally.undocumented.push(format!("{}: {error:#}", part.name()));
                host.run(&format!("causeway stop {NAME} --force"), COMMAND_TIMEOUT)?;
                std::thread::sleep(Duration::from_secs(2));
            }
            host.forget_consoles();
        }
    }
    report.figure("violations", tally.violations);
    report.figure("recovered", tally.recovered.values().sum::<u64>());
    report.figure("recovered_by", serde_json::to_value(&tally.recovered)?);
    report.figure("stopped", tally.stopped);
    report.figure("undocumented", tally.undocumented.len());
    report.figure("traces_replayed", tally.traces);
    report.check(tally.violations > 0, "nothing was injected");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each card of the host has violations, of registers and bytes that its description knows, few enough for the monitor to keep all
    /// of a guest's.
    #[test]
    fn violations_are_of_registers_that_there_are() {
        for on in &CARDS {
            let card = Card::find(on.name()).unwrap();
            let refusals =
                |per: usize| card.violations.iter().map(|one| one.refused.len()).sum::<usize>() * per;
            assert!(refusals(2 * card.bars.len()) <= 16, "{}", card.name);
            for violation in card.violations {
                assert!(!violation.refused.is_empty() && violation.writes.len() >= violation.refused.len());
            }
        }
    }

    #[test]
    fn sentences_are_compared_with_registers() {
        let said = |name: &str| format!("A write of 66h to {name} is refused: why");
        let violation = Violation {
            name: "",
            refused: &["CR", "BNRY"],
            also: &["TPSR"],
            writes: &[(0, 1, 0), (3, 1, 0)],
        };
        let are = |names: &[&str], busy| {
            are_about(&names.iter().map(|name| said(name)).collect::<Vec<_>>(), &violation, busy)
        };
        assert!(are(&["CR", "BNRY"], false) && are(&["CR"], false) && are(&["CR", "BNRY", "TPSR"], false));
        assert!(!are(&["BNRY", "CR"], false) && are(&["BNRY", "CR"], true) && are(&["TPSR"], true));
        assert!(!are(&[], true) && !are(&["TCR"], true) && !are(&["CR", "BNRY", "TCR"], false));
    }
}
