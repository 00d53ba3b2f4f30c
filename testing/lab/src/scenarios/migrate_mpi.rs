//! Four guests on three hosts. One of them migrates from host to host, then all four move in one migration, then two change places.
//! Meanwhile an MPI job with a rank in each guest verifies every byte that it exchanges. `--only pingpong` or `--only perftest` run
//! these programs instead, in all four guests. Several of `mpi`, `pingpong` and `perftest` run at the same time.
//!
//! ```text
//!        host h1: causeway cluster, causeway host      host h2: causeway host          host h3: causeway host
//!  first        guest a                                     guests b, d                     guest c
//!  ring         a ──────────────────────────────────────────▶ a ──────────────────────────────▶ a ──▶ h1 …     alone, `--count` times
//!  group        each to the next host, as one migration
//!  swap         a and b to each other's places
//!  segment s0   tap, br1 ── x0 ═══════ link ═══════ x0 ── br1 ── x2 ═══════ link ═══════ x0 ── br1
//!  virtio-net        br0 ── x1 ═══════ link ═══════ x1 ── br0 ── x3 ═══════ link ═══════ x1 ── br0
//! ```
//! With `--only verbs`, rxe devices on the hosts' bridges br1 carry the connections. UCX's connections of the MPI job have shared
//! receive queues.

use super::migrate_programs::{Programs, Wanted, all_at_once};
use super::migrate_talk::{self as talk, Names, STEP_TIMEOUT};
use super::rdma_verbs;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-mpi",
    about: "four guests of an MPI job (--only pingpong, perftest, mpi: of these) on three hosts: one moves (--count N times), then all as a group, then two change places: no error, every byte right (--only verbs: by the hosts' RDMA devices)",
    topology,
    run,
    prompt: None,
};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// The guests' initial hosts.
const FIRST: [usize; 4] = [0, 1, 2, 1];
const HOSTS: usize = 3;
/// Port of the first guest's waiting monitor; the others' ports follow.
const PORT: usize = 7100;
const TRANSFER: &str = "--downtime 3000 --streams 2";

fn topology(_: &Options) -> Topology {
    // Room for resident and incoming guests.
    let host = |name| HostSpec::new(name).memory(4096).rdma();
    Topology::new()
        .host(host("h1"))
        .host(host("h2"))
        .host(host("h3"))
        .link("h1", "h2")
        .link("h1", "h2")
        .link("h2", "h3")
        .link("h2", "h3")
}

/// Bridges the third host's links on the second host, and renames them like the other hosts' first links.
pub(super) const H2: &str = "set -e; for i in x2 x3; do ip addr flush dev $i; done
[ -e /sys/class/net/br0 ] || ip link add br0 type bridge; ip link set br0 up
ip link set x2 master br1 up; ip link set x3 master br0 up";
pub(super) const H3: &str = "set -e; for i in 0 1; do o=x$((i+2)); ip addr flush dev $o; ip link set $o down; ip link set $o name x$i; ip link set x$i up; done";

fn address(guest: usize, host: usize) -> String {
    format!("10.77.0.{}:{}", host + 1, PORT + guest)
}

/// Returns the commands, by host, that move guests in one migration, and the guests that move.
fn commands(at: [usize; 4], to: [usize; 4]) -> (Vec<(usize, String)>, Vec<usize>) {
    let moving: Vec<usize> = (0..NAMES.len()).filter(|guest| at[*guest] != to[*guest]).collect();
    if let [guest] = moving.as_slice() {
        let command = format!(
            "causeway --json migrate {} --to {} {TRANSFER}",
            NAMES[*guest],
            address(*guest, to[*guest])
        );
        return (vec![(at[*guest], command)], moving);
    }
    let here: BTreeSet<usize> = moving.iter().map(|guest| at[*guest]).collect();
    let said = here.into_iter().map(|host| {
        let place = |guest: &usize| {
            let there =
                if at[*guest] == host { format!("={}", address(*guest, to[*guest])) } else { String::new() };
            format!("{}{there}", NAMES[*guest])
        };
        let group: Vec<String> = moving.iter().map(place).collect();
        (host, format!("causeway --json migrate --group {} {TRANSFER}", group.join(",")))
    });
    (said.collect(), moving)
}

struct Guests<'p, 'l> {
    pair: &'p mut Pair<'l>,
    at: [usize; 4],
}

impl Guests<'_, '_> {
    /// Returns each guest's connected queue pairs, and the transports to their peers.
    fn names(&self) -> Result<(Vec<Names>, BTreeSet<String>)> {
        let pair: &Pair<'_> = self.pair;
        let found = all_at_once(0..NAMES.len(), |guest| talk::connected(pair.member(guest)?))?;
        let (all, by): (Vec<Names>, Vec<BTreeSet<String>>) = found.into_iter().unzip();
        Ok((all, by.into_iter().flatten().collect()))
    }

    /// Moves guests in one migration.
    fn go(&mut self, lab: &Lab, to: [usize; 4]) -> Result<usize> {
        let (said, moving) = commands(self.at, to);
        let next: Vec<(usize, Guest)> = moving
            .iter()
            .map(|guest| {
                let host = to[*guest];
                Ok((*guest, self.pair.await_guest(*guest, host, &address(*guest, host), STEP_TIMEOUT)?))
            })
            .collect::<Result<_>>()?;
        let answers = talk::at_once(lab, &said).with_context(|| {
            let tails = |texts: Vec<String>| texts.join("\n---\n");
            let sources = moving.iter().filter_map(|guest| self.pair.member(*guest).ok());
            format!(
                "sources:\n{}\ndestinations:\n{}\ndaemons:\n{}",
                tails(sources.map(|member| member.guest.session.err.tail(8)).collect()),
                tails(next.iter().map(|(_, guest)| guest.session.err.tail(8)).collect()),
                tails(self.pair.daemons().iter().map(|daemon| daemon.err.tail(12)).collect())
            )
        })?;
        // For a single guest the command prints its timeline, and for a group the outcome of each VM.
        if let Some(odd) = answers.iter().find(|said| moving.len() > 1 && said["moved"] != Value::Bool(true))
        {
            bail!("The group hasn't moved, and the command succeeded: {odd}");
        }
        for (guest, new) in next {
            self.pair.moved(guest, new, to[guest])?.ended(STEP_TIMEOUT)?;
        }
        self.at = to;
        Ok(moving.len())
    }
}

/// Returns the migrations: names, and the guests' hosts afterwards.
fn plan(moves: u32) -> Vec<(&'static str, [usize; 4])> {
    let mut at = FIRST;
    let mut plan = Vec::new();
    for _ in 0..moves {
        at[0] = (at[0] + 1) % HOSTS;
        plan.push(("one", at));
    }
    at = at.map(|host| (host + 1) % HOSTS);
    plan.push(("group", at));
    if at[0] == at[1] {
        // They must be on different hosts to change places.
        at[0] = (at[0] + 1) % HOSTS;
        plan.push(("one", at));
    }
    at.swap(0, 1);
    plan.push(("swap", at));
    plan
}

/// Returns whether each guest has the same queue pairs as before, except for the given number that ended with their program.
fn are_the_same(before: &[Names], now: &[Names], gone: [usize; 4]) -> bool {
    let mut pairs = before.iter().zip(now).zip(gone);
    before.len() == now.len()
        && pairs.all(|((before, now), gone)| now.is_subset(before) && before.len() - now.len() <= gone)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-mpi is about Causeway's device");
    }
    let wanted = Wanted::of(options)?;
    lab.host(2)?.sh(H3)?;
    let (verbs, mut layout) = (talk::by_verbs(options), talk::layout_of(&FIRST, HOSTS));
    let _service =
        if verbs { talk::verbs_of(lab, HOSTS, &mut layout)? } else { talk::service_of(lab, HOSTS)? };
    lab.host(1)?.sh(H2)?;
    let mut pair = Pair::place(lab, options, layout)?;
    pair.join()?;
    pair.join()?;
    let mut programs = Programs::start(&pair, wanted)?;
    let mut guests = Guests { pair: &mut pair, at: FIRST };
    let (mut first, by) = guests.names()?;
    progress!("{}; queue pairs {first:?}, by {by:?}", programs.said());
    report.check(
        first.iter().all(|one| !one.is_empty()),
        "a guest has no connected queue pair before the first move",
    );
    let (mut moves, mut groups, mut errors) = (0, 0, 0);
    let mut transports = by;
    let plan = plan(options.count.unwrap_or(3));
    let steps = plan.len();
    for (number, (name, to)) in plan.into_iter().enumerate() {
        if programs.begin_again(guests.pair)? {
            first = guests.names()?.0;
        }
        let moved =
            guests.go(lab, to).with_context(|| format!("{name}, to {to:?}, migration {}", number + 1))?;
        moves += u32::from(moved == 1);
        groups += u32::from(moved > 1);
        programs.go_on(guests.pair).with_context(|| format!("After migration {}, {name}", number + 1))?;
        let (now, by) = guests.names()?;
        let same = are_the_same(&first, &now, programs.gone(guests.pair)?);
        errors += u32::from(!same);
        report.check(
            same,
            format!("queue pairs were {first:?}, and are {now:?} after migration {}", number + 1),
        );
        let pair: &Pair<'_> = guests.pair;
        for failures in all_at_once(0..NAMES.len(), |guest| talk::failures(pair.member(guest)?))? {
            errors += u32::from(!failures.is_empty());
            report.check(failures.is_empty(), format!("after migration {}: {failures:?}", number + 1));
        }
        progress!(
            "{}/{steps} {name}: guests on {:?}, by {by:?}; {}",
            number + 1,
            to.map(|host| host + 1),
            programs.said()
        );
        transports.extend(by);
    }
    errors += programs.end(guests.pair, report)?;
    for guest in 0..NAMES.len() {
        errors += talk::complaints(guests.pair.member(guest)?, report)?;
    }
    let (wanted, other) = if verbs { ("verbs", "fabric") } else { ("fabric", "verbs") };
    report.check(
        transports.contains(wanted) && !transports.contains(other),
        format!("connections between hosts were to go by {wanted}, and went by {transports:?}"),
    );
    if verbs {
        for host in lab.hosts().iter().take(HOSTS) {
            let packets = rdma_verbs::packets(host)?;
            progress!("{}: its RDMA device sent and received {packets:?} packets", host.name());
            report.check(packets[0] > 0, format!("{}'s RDMA device sent nothing", host.name()));
        }
    }
    report.figure("moves", moves);
    report.figure("groups", groups);
    report.figure("errors", errors);
    programs.figures(report);
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that a command names with a destination is on that command's host. All commands of a migration name the same guests.
    #[test]
    fn groups_are_said_on_each_host_that_is_left() {
        let (said, moving) = commands([0, 1, 2, 1], [1, 2, 0, 2]);
        assert_eq!(moving, [0, 1, 2, 3]);
        let expected = [
            "--group a=10.77.0.2:7100,b,c,d",
            "--group a,b=10.77.0.3:7101,c,d=10.77.0.3:7103",
            "--group a,b,c=10.77.0.1:7102,d",
        ];
        for ((host, command), (number, expected)) in said.iter().zip(expected.into_iter().enumerate()) {
            assert_eq!(*host, number);
            assert!(command.contains(&format!("{expected} ")), "{command}");
        }
        let (said, moving) = commands([0, 1, 2, 1], [0, 1, 2, 0]);
        assert_eq!((said.len(), moving), (1, vec![3]));
        assert!(said[0].1.contains("migrate d --to 10.77.0.1:7103 "), "{said:?}");
    }

    /// Only as many queue pairs may be missing as programs have ended in that guest, and none may be new.
    #[test]
    fn queue_pairs_that_are_others_or_too_few_are_seen() {
        let names = |numbers: &[u64]| numbers.iter().map(|number| (number.to_string(), *number)).collect();
        let before: [Names; 2] = [names(&[1, 2, 3]), names(&[4])];
        let same = |now: [Names; 2], gone| are_the_same(&before, &now, gone);
        assert!(same(before.clone(), [0; 4]));
        assert!(same([names(&[1, 3]), names(&[4])], [1, 0, 0, 0]));
        assert!(!same([names(&[1, 3]), names(&[4])], [0, 1, 0, 0]));
        assert!(!same([names(&[1]), names(&[4])], [1, 0, 0, 0]));
        assert!(!same([names(&[1, 2, 5]), names(&[4])], [1, 1, 0, 0]));
        assert!(!are_the_same(&before, &before[..1], [9; 4]));
    }

    /// The group contains all four guests, and two are on different hosts before they change places.
    #[test]
    fn plans_have_a_group_of_all_and_a_swap() {
        for moves in 0..12 {
            let plan = plan(moves);
            let mut at = FIRST;
            for (name, to) in plan {
                let moving = commands(at, to).1.len();
                let expected = match name {
                    "one" => 1,
                    "group" => 4,
                    _ => 2,
                };
                assert_eq!(moving, expected, "{name} from {at:?} to {to:?}");
                at = to;
            }
        }
    }
}
