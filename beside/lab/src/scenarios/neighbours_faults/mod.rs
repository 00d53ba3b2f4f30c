//! Three guests of one neighbourhood, each pair of which has traffic over mmnet and mmblk, and six kinds of faults. What has no part in a fault
//! must see nothing; what has must run again; nothing may be left behind.
//!
//! ```text
//!   a ── n-ab, d-ab ──▶ b      each arrow: a stream of checked records over mmnet (n), and a disk over mmblk (d),
//!   c ── n-ca, d-ca ──▶ a      which the guest at its head serves
//!   c ── n-cb, d-cb ──▶ b
//! ```

mod bed;

use crate::lab::Lab;
use crate::progress;
use crate::rdma::Runs;
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::neighbours_end::{end_daemon, kernel_is_content};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use bed::{Bed, Hang, Held, PATIENCE_MS, STREAMS, Seen};
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-faults",
    about: "three neighbours with traffic, and six kinds of faults: monitors and daemon killed, guests frozen, modules unloaded, wild rings, stores into windows",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(4).memory(3584).neighbours()),
    run,
    prompt: None,
};

/// Faults of each kind without `--count`.
const FAULTS: u32 = 20;
/// Stores of one fault.
const STORES: u64 = 10;
/// How much more memory of its own a process may have after a kind's faults, in KiB: allocators keep some.
const GROWTH_KIB: u64 = 1024;
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

    /// Whether a stream may be interrupted by a fault of this kind that `victim` has.
    fn touches(self, stream: usize, victim: usize) -> bool {
        let Some(stream) = STREAMS.get(stream) else { return false };
        match self {
            Kind::KillDaemon => true,
            Kind::KillMonitor | Kind::Freeze | Kind::Unload => stream.has(victim),
            // Between a and b.
            Kind::WildRing => stream.has(0) && stream.has(1),
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

/// Does one fault, and waits until it is over as far as it goes by itself.
fn fault(bed: &mut Bed<'_>, kind: Kind, number: u32, victim: usize) -> Result<()> {
    match kind {
        Kind::KillMonitor => bed.replace(victim),
        Kind::KillDaemon => bed.replace_daemon(),
        Kind::Freeze => {
            let peer = bed.guest(2)?;
            let name = bed.guest(victim)?.name;
            let stopped = bed.guest(victim)?;
            stopped.guest.session.signal(19)?;
            // Its peer must be told; the guest goes on whatever comes of it.
            let told = peer.sh(&format!(
                "i=0; until for d in /sys/class/net/mm*; do [ $(cat $d/ifalias) = {name} ] && [ $(cat $d/carrier) = 0 ] && exit 0; done; false; do\n\
                 i=$((i+1)); [ $i -gt {} ] && exit 1; sleep 0.1; done",
                PATIENCE_MS / 100 + 200
            ));
            stopped.guest.session.signal(18)?;
            told.map(drop).context("c was not told that its neighbour stands still")
        }
        Kind::Unload => bed.guest(victim)?.sh("sh /lab/up.sh down && sh /lab/up.sh modules").map(drop),
        Kind::WildRing => wild(bed, number, victim),
        Kind::WindowStore => {
            let before = bed.discarded(victim)?;
            let slot = slot(bed, 1 - victim)?;
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

fn slot(bed: &Bed<'_>, guest: usize) -> Result<u64> {
    let name = bed.guest(guest)?.name;
    Ok(bed.members()?.get(name).with_context(|| format!("{name} is not a member"))?.0)
}

/// Breaks the rules towards the other one of a and b, until that has ended the connection: what is written to the ring may be overwritten by
/// the driver that works beside it.
fn wild(bed: &Bed<'_>, number: u32, victim: usize) -> Result<()> {
    let (from, to) = (bed.guest(victim)?, bed.guest(1 - victim)?);
    let epoch = || -> Result<u64> {
        Ok(bed.members()?.get(to.name).and_then(|m| m.1.get(from.name).copied()).unwrap_or(0))
    };
    let (before, slot) = (epoch()?, slot(bed, 1 - victim)?);
    for _ in 0..5 {
        from.sh(&format!("echo {slot} {number} > /sys/module/neigh_fault/parameters/wild"))?;
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            if epoch()? != before {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    bail!("guest {} did not end the connection whose ring holds what is forbidden (case {number})", to.name)
}

/// What a fault did to those who had no part in it; a sentence for each.
fn errors(bed: &Bed<'_>, kind: Kind, victim: usize, before: &Seen, after: &Seen) -> Vec<String> {
    let mut errors = Vec::new();
    for (index, stream) in STREAMS.iter().enumerate() {
        let done = |of: &Seen| of.done.get(stream.name).copied().unwrap_or_default();
        let (old, new) = (done(before), done(after));
        let replaced = kind == Kind::KillMonitor && stream.from == victim;
        let old = if replaced { Default::default() } else { old };
        if new.wrong != old.wrong {
            errors.push(format!("{}: {} blocks with wrong bytes", stream.name, new.wrong - old.wrong));
        }
        let touched = kind.touches(index, victim);
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
            let Some(peer) = bed::NAMES.get(peer) else { continue };
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

/// What is held more than before, once it has settled; a sentence for each.
fn leaks(bed: &Bed<'_>, before: &BTreeMap<String, Held>) -> Result<(Vec<String>, BTreeMap<String, Held>)> {
    let until = Instant::now() + SETTLE;
    loop {
        let after = bed.held()?;
        let mut leaks = Vec::new();
        for (name, old) in before {
            let Some(new) = after.get(name) else {
                leaks.push(format!("{name} is gone"));
                continue;
            };
            if new.fds > old.fds || new.maps > old.maps || new.anon_kib > old.anon_kib + GROWTH_KIB {
                leaks.push(format!("{name} had {old:?} and has {new:?}"));
            }
        }
        if leaks.is_empty() || Instant::now() > until {
            return Ok((leaks, after));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// All faults of a kind.
fn kind_of_faults(
    bed: &mut Bed<'_>,
    kind: Kind,
    count: u32,
    counts: &mut Counts,
    report: &mut Report,
) -> Result<()> {
    let begun = Instant::now();
    let held = bed.held()?;
    for number in 0..count {
        // Either, in turns; the module that is unloaded is the server's, whose peers' traffic goes on.
        let victim = if kind == Kind::Unload { 1 } else { usize::from(number % 2 == 0) };
        let before = bed.seen()?;
        counts.faults += 1;
        let done = fault(bed, kind, number, victim).and_then(|()| bed.until_all_move(&bed.seen()?));
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
        for error in errors(bed, kind, victim, &before, &after) {
            counts.survivor_errors += 1;
            report.check(false, format!("{} {number} of guest {victim}: {error}", kind.name()));
        }
        if number % 10 == 9 {
            progress!("  {} {} in {:.0} s", number + 1, kind.name(), begun.elapsed().as_secs_f64());
        }
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
    progress!(
        "{}: {count} in {:.0} s; held before {held:?}, after {after:?}",
        kind.name(),
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let count = options.count.unwrap_or(FAULTS);
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
        let (before, begun) = (counts.faults, Instant::now());
        result = kind_of_faults(&mut bed, kind, count, &mut counts, report);
        by_kind.insert(
            kind.name().into(),
            json!({"faults": counts.faults - before, "seconds": begun.elapsed().as_secs()}),
        );
        if result.is_err() {
            break;
        }
    }
    report.figure("faults", counts.faults);
    report.figure("hangs", counts.hangs);
    report.figure("leaks", counts.leaks);
    report.figure("survivor_errors", counts.survivor_errors);
    report.figure("kernel", bed.kernel.clone());
    report.figure("kinds", by_kind);
    result?;
    let moved: BTreeMap<String, u64> =
        bed.seen()?.done.iter().map(|(name, done)| (name.clone(), done.blocks)).collect();
    report.figure("blocks_since_boot", json!(moved));
    for guest in &bed.guests {
        let _ = guest.start("busybox poweroff -f")?.wait(Duration::from_secs(20));
        guest.guest.ended(Duration::from_secs(60))?;
    }
    end_daemon(&bed.daemon)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each kind has a connection that must see nothing, but the daemon's, which is everybody's.
    #[test]
    fn every_kind_has_somebody_who_is_not_involved() {
        for kind in Kind::ALL {
            for victim in 0..2 {
                let untouched = (0..STREAMS.len()).filter(|stream| !kind.touches(*stream, victim)).count();
                assert_eq!(untouched > 0, kind != Kind::KillDaemon, "{kind:?}");
            }
        }
    }
}
