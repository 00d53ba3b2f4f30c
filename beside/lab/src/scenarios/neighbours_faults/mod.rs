//! Three guests of one neighbourhood, each pair of which has traffic over mmnet and mmblk, and six kinds of faults. What has no part in a fault
//! must see nothing; what has must run again; nothing may be left behind.
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
/// Stores of one fault.
const STORES: u64 = 10;
/// How much more memory of its own a process may have after a kind's faults, in KiB: allocators keep some.
const PROCESS_KIB: u64 = 1024;
/// The same of a guest's kernel: the pages that describe one window are 3 MiB.
const KERNEL_KIB: u64 = 3072;
/// The same of the host's files in memory: of RAM that a guest has used before and uses now, but not one guest's RAM (192 MiB) more.
const HOST_KIB: u64 = 96 * 1024;
/// For what a process still holds of a connection that just ended.
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

    /// Whom the fault of a number is done to, and who is at the other end of what it is done with.
    const fn attacked(self, number: u32) -> (usize, usize) {
        match self {
            // c lives through all of them, so that what is lost little by little is seen in it.
            Kind::KillMonitor => {
                if number.is_multiple_of(2) {
                    (0, 1)
                } else {
                    (1, 0)
                }
            }
            // b serves disks and uses none, so that its modules can go while its clients' requests wait.
            Kind::Unload => (1, 0),
            // All pairs, both ways; shifted, so that each case of the ten wild ones comes to each pair.
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

    /// Whether a stream may be interrupted by a fault of this kind between two guests.
    fn touches(self, stream: &Stream, (victim, peer): (usize, usize)) -> bool {
        match self {
            Kind::KillDaemon => true,
            Kind::KillMonitor | Kind::Freeze | Kind::Unload => stream.has(victim),
            Kind::WildRing => stream.has(victim) && stream.has(peer),
            Kind::WindowStore => false,
        }
    }
}

/// What the faults of all kinds have shown.
#[derive(Default)]
struct Counts {
    faults: u32,
    hangs: u32,
    leaks: u32,
    survivor_errors: u32,
}

/// Does one fault, and waits until it is over as far as it goes by itself. `before` is what guests saw before it.
fn fault(
    bed: &mut Bed<'_>,
    kind: Kind,
    number: u32,
    (victim, peer): (usize, usize),
    before: &Seen,
) -> Result<()> {
    // How often the connection of one guest with another had ended.
    let ended = |at: usize, with: usize| {
        let with = NAMES.get(with).copied().unwrap_or_default();
        before.carrier.get(&(at, with.to_owned())).copied().unwrap_or(0)
    };
    match kind {
        Kind::KillMonitor => bed.replace(victim),
        Kind::KillDaemon => bed.replace_daemon(),
        Kind::Freeze => {
            // The monitor with its guest, and the guest alone.
            let whole = number.is_multiple_of(2);
            let (stopped, told) = (bed.guest(victim)?, bed.guest(peer)?);
            if whole {
                stopped.guest.session.signal(19)?;
            } else {
                bed.host.sh(&format!("causeway pause {}", stopped.name))?;
            }
            // Its peer must be told; the guest goes on whatever comes of it.
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
            // What is written to the ring may be overwritten by the driver that works beside it, so it is written again.
            for _ in 0..5 {
                // The connection may be over already: there is no ring then.
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

/// What a fault did to those who had no part in it; a sentence for each.
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
        // Requests of a disk wait for their server: none may fail, whatever happens to it.
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

/// How much more memory may be held under a name of [`Bed::held`].
fn growth_kib(name: &str) -> u64 {
    match name {
        "host" => HOST_KIB,
        _ if name.starts_with("kernel") => KERNEL_KIB,
        _ => PROCESS_KIB,
    }
}

/// What is held more than before; a sentence for each.
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

/// What is held more than before, once it has settled; a sentence for each.
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

/// All faults of a kind; what is to be said of them.
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

/// Blocks that all streams have moved in between; a guest that was booted anew counts from 0.
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
    // With --seconds a kind ends then, and its figures say how many there were.
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

    /// Each kind has a connection that must see nothing, but the daemon's, which is everybody's.
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

    /// Each of the ten wild rings comes to each pair, both ways.
    #[test]
    fn all_pairs_get_all_wild_rings() {
        let got: BTreeSet<_> =
            (0..200).map(|number| (Kind::WildRing.attacked(number), number % 10)).collect();
        assert_eq!(got.len(), 60);
    }

    /// What is held more is a leak, within what each is allowed; and what is gone.
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
