//! Three guests of one neighbourhood with traffic over mmnet and mmblk between each pair, and six kinds of injected faults. Uninvolved
//! connections must see nothing, involved ones must recover, and nothing may leak.
//!
//! ```text
//!   a ── n-ab, d-ab ──▶ b      each arrow: a stream of checked records over mmnet (n), and a disk over mmblk (d),
//!   c ── n-ca, d-ca ──▶ a      which the guest at its head serves
//!   c ── n-cb, d-cb ──▶ b
//! ```

mod bed;
mod resident;

use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use bed::{Bed, Hang, Held, NAMES, PATIENCE_MS, STREAMS, Seen, Stream};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-faults",
    about: "three neighbours with traffic, and six kinds of faults: monitors and daemon killed, guests frozen, modules unloaded, wild rings, stores into windows",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(3072).neighbours()),
    run,
    prompt: None,
};

/// Faults of each kind without `--count`.
const FAULTS: u32 = 20;
/// Stores per fault.
const STORES: u64 = 10;
/// Permitted growth of a process' private memory by a kind's faults, in KiB: allocators keep some.
const PROCESS_KIB: u64 = 1024;
/// Permitted growth of a guest kernel's memory in KiB. The pages that describe one window are 3 MiB.
const KERNEL_KIB: u64 = 3072;
/// Permitted growth of the host's files in memory in KiB: a guest's RAM usage varies, but one guest's whole RAM (192 MiB) more would be
/// a leak.
const HOST_KIB: u64 = 96 * 1024;
/// Time-out for the release of an ended connection's resources.
const SETTLE: Duration = Duration::from_secs(30);

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    KillMonitor,
    KillDaemon,
    Freeze,
    Unload,
    WildRing,
    WindowStore,
}

impl Kind {
    const ALL: [Kind; 6] =
        [Kind::WindowStore, Kind::WildRing, Kind::Unload, Kind::Freeze, Kind::KillDaemon, Kind::KillMonitor];

    const fn name(self) -> &'static str {
        match self {
            Kind::KillMonitor => "kill-monitor",
            Kind::KillDaemon => "kill-daemon",
            Kind::Freeze => "freeze",
            Kind::Unload => "unload",
            Kind::WildRing => "wild-ring",
            Kind::WindowStore => "window-store",
        }
    }

    /// Returns the guest into which fault `number` is injected, and the other end of the connection that it uses.
    const fn attacked(self, number: u32) -> (usize, usize) {
        match self {
            // c survives all of them, so that slow leaks are visible in it.
            Kind::KillMonitor => {
                if number.is_multiple_of(2) {
                    (0, 1)
                } else {
                    (1, 0)
                }
            }
            // b serves disks and uses none, so its modules can be unloaded while its clients' requests wait.
            Kind::Unload => (1, 0),
            // All pairs, both ways. Shifted, so that each of the ten corruptions is injected into each pair.
            _ => match (number + number / 30) % 6 {
                0 => (0, 1),
                1 => (2, 0),
                2 => (1, 2),
                3 => (1, 0),
                4 => (0, 2),
                _ => (2, 1),
            },
        }
    }

    /// Returns whether a fault of this kind between two guests may interrupt a stream.
    fn touches(self, stream: &Stream, (victim, peer): (usize, usize)) -> bool {
        match self {
            Kind::KillDaemon => true,
            Kind::KillMonitor | Kind::Freeze | Kind::Unload => stream.has(victim),
            Kind::WildRing => stream.has(victim) && stream.has(peer),
            Kind::WindowStore => false,
        }
    }
}

/// Counts over the faults of all kinds.
#[derive(Default)]
struct Counts {
    faults: u32,
    hangs: u32,
    leaks: u32,
    survivor_errors: u32,
}

/// Injects one fault, and waits until its own effects end. `before` is the guests' earlier progress.
fn fault(
    bed: &mut Bed<'_>,
    kind: Kind,
    number: u32,
    (victim, peer): (usize, usize),
    before: &Seen,
) -> Result<()> {
    // Number of ended connections between two guests.
    let ended = |at: usize, with: usize| {
        let with = NAMES.get(with).copied().unwrap_or_default();
        before.carrier.get(&(at, with.to_owned())).copied().unwrap_or(0)
    };
    match kind {
        Kind::KillMonitor => bed.replace(victim),
        Kind::KillDaemon => bed.replace_daemon(),
        Kind::Freeze => {
            // The monitor with its guest, or the guest alone.
            let whole = number.is_multiple_of(2);
            let (stopped, told) = (bed.guest(victim)?, bed.guest(peer)?);
            if whole {
                stopped.guest.session.signal(19)?;
            } else {
                bed.host.sh(&format!("causeway pause {}", stopped.name))?;
            }
            // Its peer must get an event; the guest continues in any case.
            let told = told.sh(&format!(
                "ended {} {} {}",
                stopped.name,
                ended(peer, victim),
                PATIENCE_MS / 1000 + 25
            ));
            if whole {
                stopped.guest.session.signal(18)?;
            } else {
                bed.host.sh(&format!("causeway resume {}", stopped.name))?;
            }
            told.map(drop).context("its peer was not told that its neighbour stands still")
        }
        Kind::Unload => bed.guest(victim)?.sh("down && modules").map(drop),
        Kind::WildRing => {
            let slot = bed.slot(peer)?;
            let (from, to) = (bed.guest(victim)?, bed.guest(peer)?);
            let over = format!("ended {} {} 5", from.name, ended(peer, victim));
            // The guest's driver may overwrite the ring in parallel, so the write is repeated.
            for _ in 0..5 {
                // The connection may have ended already: then there is no ring.
                let written =
                    from.sh(&format!("echo {slot} {number} > /sys/module/neigh_fault/parameters/wild"));
                if to.sh(&over).is_ok() {
                    return Ok(());
                }
                written?;
            }
            bail!(
                "guest {} did not end the connection whose ring holds what is forbidden (case {number})",
                to.name
            )
        }
        Kind::WindowStore => {
            let before = bed.discarded(victim)?;
            let slot = bed.slot(peer)?;
            bed.guest(victim)?
                .sh(&format!("echo {slot} {STORES} > /sys/module/neigh_fault/parameters/store"))?;
            let discarded = bed.discarded(victim)? - before;
            if discarded != STORES {
                bail!("of {STORES} stores into a window {discarded} were counted as discarded");
            }
            Ok(())
        }
    }
}

/// Returns a sentence for each effect on an uninvolved connection.
fn errors(bed: &Bed<'_>, kind: Kind, attacked: (usize, usize), before: &Seen, after: &Seen) -> Vec<String> {
    let mut errors = Vec::new();
    for stream in &STREAMS {
        let done = |of: &Seen| of.done.get(stream.name).copied().unwrap_or_default();
        let (old, new) = (done(before), done(after));
        let replaced = kind == Kind::KillMonitor && stream.from == attacked.0;
        let old = if replaced { Default::default() } else { old };
        if new.wrong != old.wrong {
            errors.push(format!("{}: {} blocks with wrong bytes", stream.name, new.wrong - old.wrong));
        }
        let touched = kind.touches(stream, attacked);
        // A disk's requests wait for their server: none may fail after any fault of it.
        if new.breaks != old.breaks && (!touched || stream.name.starts_with("d-")) {
            errors.push(format!("{} was interrupted {} times", stream.name, new.breaks - old.breaks));
        }
        if touched || replaced {
            continue;
        }
        if after.lost.get(stream.name) != before.lost.get(stream.name) {
            errors.push(format!("{} lost its server", stream.name));
        }
        let ends = [(stream.from, stream.to), (stream.to, stream.from)];
        for (guest, peer) in ends {
            let Some(peer) = NAMES.get(peer) else { continue };
            let key = (guest, (*peer).to_owned());
            if after.carrier.get(&key) != before.carrier.get(&key) {
                errors.push(format!("guest {guest} lost its connection to {peer}"));
            }
        }
    }
    for (number, guest) in bed.guests.iter().enumerate() {
        if let Some(code) = guest.guest.session.try_wait() {
            errors.push(format!("the monitor of guest {number} ended with status {code}"));
        }
    }
    errors
}

/// Returns the permitted growth under a name of [`Bed::held`].
fn growth_kib(name: &str) -> u64 {
    match name {
        "host" => HOST_KIB,
        _ if name.starts_with("kernel") => KERNEL_KIB,
        _ => PROCESS_KIB,
    }
}

/// Returns a sentence for each growth beyond the limit.
fn grown(before: &BTreeMap<String, Held>, after: &BTreeMap<String, Held>) -> Vec<String> {
    let mut leaks = Vec::new();
    for (name, old) in before {
        match after.get(name) {
            None => leaks.push(format!("{name} is gone")),
            Some(new) if new.fds > old.fds || new.maps > old.maps || new.kib > old.kib + growth_kib(name) => {
                leaks.push(format!("{name} had {old:?} and has {new:?}"));
            }
            Some(_) => {}
        }
    }
    leaks
}

/// Returns a sentence for each growth that remains after a while, and the current resources.
fn leaks(bed: &Bed<'_>, before: &BTreeMap<String, Held>) -> Result<(Vec<String>, BTreeMap<String, Held>)> {
    let until = Instant::now() + SETTLE;
    loop {
        let after = bed.held()?;
        let leaks = grown(before, &after);
        if leaks.is_empty() || Instant::now() > until {
            return Ok((leaks, after));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Injects all faults of a kind; returns its figures and errors.
fn kind_of_faults(
    bed: &mut Bed<'_>,
    kind: Kind,
    (count, at_most): (u32, Option<Duration>),
    counts: &mut Counts,
    report: &mut Report,
) -> Result<Value> {
    let begun = Instant::now();
    let held = bed.held()?;
    let mut before = bed.seen()?;
    let (mut verified, mut longest, mut faults) = (0, Duration::ZERO, 0);
    for number in 0..count {
        if at_most.is_some_and(|at_most| begun.elapsed() > at_most) {
            progress!("  the time for {} is over", kind.name());
            break;
        }
        let attacked = kind.attacked(number);
        counts.faults += 1;
        let this = Instant::now();
        let done =
            fault(bed, kind, number, attacked, &before).and_then(|()| bed.until_all_move(&bed.seen()?));
        let after = match done {
            Ok(after) => after,
            Err(error) => {
                if error.is::<Hang>() {
                    counts.hangs += 1;
                } else {
                    counts.survivor_errors += 1;
                }
                report.check(false, format!("{} {number}: {error:#}", kind.name()));
                return Err(error.context(format!("{} number {number}", kind.name())));
            }
        };
        longest = longest.max(this.elapsed());
        for error in errors(bed, kind, attacked, &before, &after) {
            counts.survivor_errors += 1;
            report.check(false, format!("{} {number} of guest {}: {error}", kind.name(), attacked.0));
        }
        verified += moved(&before, &after);
        if number % 10 == 9 || begun.elapsed() / 10 < this.elapsed() {
            progress!("  {} {} in {:.0} s", number + 1, kind.name(), begun.elapsed().as_secs_f64());
        }
        before = after;
        faults = number + 1;
    }
    let (left, after) = leaks(bed, &held)?;
    for leak in left {
        counts.leaks += 1;
        report.check(false, format!("{}: {leak}", kind.name()));
    }
    for guest in &bed.guests {
        if let Err(error) = kernel_is_content(guest.name, &guest.guest, |script| guest.sh(script)) {
            counts.survivor_errors += 1;
            report.check(false, format!("{}: {error:#}", kind.name()));
        }
    }
    let seconds = begun.elapsed().as_secs();
    progress!("{}: {faults} in {seconds} s; held before {held:?}, after {after:?}", kind.name());
    Ok(json!({
        "faults": faults,
        "wanted": count,
        "seconds": seconds,
        "longest_s": longest.as_secs_f64(),
        "blocks_verified": verified,
        "held_before": held,
        "held_after": after,
    }))
}

/// Returns the blocks that all streams have moved in between; a rebooted guest counts from 0.
fn moved(before: &Seen, after: &Seen) -> u64 {
    let blocks = |of: &Seen, name: &str| of.done.get(name).map_or(0, |done| done.blocks);
    let by = |stream: &Stream| {
        let (old, new) = (blocks(before, stream.name), blocks(after, stream.name));
        if new < old { new } else { new - old }
    };
    STREAMS.iter().map(by).sum()
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let count = options.count.unwrap_or(FAULTS);
    // With --seconds, a kind ends after that time, and its figures have the number of faults.
    let at_most = options.seconds.map(Duration::from_secs);
    let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| options.wants(kind.name())).collect();
    if kinds.is_empty() {
        let names = Kind::ALL.map(Kind::name).join(", ");
        bail!("There is no kind of fault {:?}; there are {names}", options.only);
    }
    let mut bed = Bed::start(lab, options)?;
    let mut counts = Counts::default();
    let mut by_kind = Map::new();
    let mut result = Ok(());
    for kind in kinds {
        progress!("{}", kind.name());
        match kind_of_faults(&mut bed, kind, (count, at_most), &mut counts, report) {
            Ok(said) => drop(by_kind.insert(kind.name().into(), said)),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    report.figure("faults", counts.faults);
    report.figure("hangs", counts.hangs);
    report.figure("leaks", counts.leaks);
    report.figure("survivor_errors", counts.survivor_errors);
    report.figure("kernel", bed.kernel.clone());
    report.figure("kinds", by_kind);
    result?;
    for guest in &bed.guests {
        guest.begin("poweroff -f")?;
        guest.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&bed.daemon)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Each kind except the daemon's leaves one connection uninvolved.
    #[test]
    fn every_kind_has_somebody_who_is_not_involved() {
        for kind in Kind::ALL {
            for number in 0..200 {
                let attacked = kind.attacked(number);
                assert_ne!(attacked.0, attacked.1);
                let untouched = STREAMS.iter().filter(|stream| !kind.touches(stream, attacked)).count();
                assert_eq!(untouched > 0, kind != Kind::KillDaemon, "{kind:?}");
            }
        }
    }

    /// Each of the ten ring corruptions is injected into each pair, both ways.
    #[test]
    fn all_pairs_get_all_wild_rings() {
        let got: BTreeSet<_> =
            (0..200).map(|number| (Kind::WildRing.attacked(number), number % 10)).collect();
        assert_eq!(got.len(), 60);
    }

    /// Growth beyond the limit is a leak; so is a missing process.
    #[test]
    fn more_is_a_leak() {
        let held = |fds, maps, kib| BTreeMap::from([("kernel of a".to_owned(), Held { fds, maps, kib })]);
        let before = held(3, 4, 50_000);
        assert!(grown(&before, &held(3, 4, 50_000 + KERNEL_KIB)).is_empty());
        for more in [held(4, 4, 50_000), held(3, 5, 50_000), held(3, 4, 50_001 + KERNEL_KIB), BTreeMap::new()]
        {
            assert_eq!(grown(&before, &more).len(), 1, "{more:?}");
        }
    }
}
