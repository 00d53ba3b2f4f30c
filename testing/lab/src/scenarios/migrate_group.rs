//! Two guests with connected RDMA NICs move in one migration: both to the other host, and to each other's places. A program in each
//! exchanges messages over one connection, from before the first migration until after the last, and verifies them.
//!
//! ```text
//!          host h1: causeway cluster, causeway host ═══ link ═══ host h2: causeway host
//!  swap    guest a ────────────────────────────────────▶ ◀───── guest b     a command on each host, one migration
//!  join                                                  ◀───── b           alone
//!  drain   both ◀──────────────────────────────────────────────  a and b
//!  apart   b ───────────────────────────────────────────▶                   alone; then from the beginning, `--group` in place of `drain`
//! ```
//! The guests' network is that of `rdma-fabric`. With `--only verbs`, rxe devices on the hosts' bridges br1 carry their connections.

use super::migrate_talk::{self as talk, Names, STEP_TIMEOUT};
use super::rdma_verbs;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-group",
    about: "two guests that talk by RDMA move as one migration, together and to each other's places: no error, the same queue pairs, every byte right (--only verbs: by the hosts' RDMA devices)",
    topology,
    run,
    prompt: None,
};

/// Ports at which monitors wait for the first and the second guest.
const PORTS: [u32; 2] = [7100, 7101];
const NAMES: [&str; 2] = ["a", "b"];
const TRANSFER: &str = "--downtime 3000 --streams 2";

/// Each host has room for both guests, and for an incoming one while another leaves.
fn topology(_: &Options) -> Topology {
    Topology::new()
        .host(HostSpec::new("h1").memory(4096).rdma())
        .host(HostSpec::new("h2").memory(4096).rdma())
        .link("h1", "h2")
        .link("h1", "h2")
}

/// A migration: the guests' hosts afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    name: &'static str,
    to: [usize; 2],
}

/// The guests' initial hosts.
const FIRST: [usize; 2] = [0, 1];
/// The migrations, back to the initial hosts.
const STEPS: [Step; 8] = [
    Step { name: "swap", to: [1, 0] },
    Step { name: "join", to: [1, 1] },
    Step { name: "drain", to: [0, 0] },
    Step { name: "apart", to: [0, 1] },
    Step { name: "swap", to: [1, 0] },
    Step { name: "join", to: [1, 1] },
    Step { name: "group", to: [0, 0] },
    Step { name: "apart", to: [0, 1] },
];

fn address(guest: usize, host: usize) -> String {
    format!("10.77.0.{}:{}", host + 1, PORTS.get(guest).copied().unwrap_or(0))
}

/// Returns the commands of a step by host, for guests at these hosts, and the guests that move.
fn commands(at: [usize; 2], step: Step) -> (Vec<(usize, String)>, Vec<usize>) {
    let moving: Vec<usize> = (0..2).filter(|guest| at[*guest] != step.to[*guest]).collect();
    let said = match moving.as_slice() {
        [guest] => {
            let command = format!(
                "causeway --json migrate {} --to {} {TRANSFER}",
                NAMES[*guest],
                address(*guest, step.to[*guest])
            );
            vec![(at[*guest], command)]
        }
        [] => Vec::new(),
        _ if at[0] == at[1] => {
            let to = address(0, step.to[0]);
            let command = match step.name {
                "drain" => format!("causeway --json drain --to {to} {TRANSFER}"),
                _ => format!("causeway --json migrate --group a,b --to {to} {TRANSFER}"),
            };
            vec![(at[0], command)]
        }
        _ => {
            let place = |guest: usize, here: usize| {
                let there = if at[guest] == here {
                    format!("={}", address(guest, step.to[guest]))
                } else {
                    String::new()
                };
                format!("{}{there}", NAMES[guest])
            };
            at.map(|here| {
                let group = format!("{},{}", place(0, here), place(1, here));
                (here, format!("causeway --json migrate --group {group} {TRANSFER}"))
            })
            .to_vec()
        }
    };
    (said, moving)
}

/// Executes a step; returns the number of guests that moved.
fn carry_out(lab: &Lab, pair: &mut Pair<'_>, at: [usize; 2], step: Step) -> Result<usize> {
    let (commands, moving) = commands(at, step);
    let next: Vec<(usize, Guest)> = moving
        .iter()
        .map(|guest| {
            let (host, patience) = (step.to[*guest], STEP_TIMEOUT);
            Ok((*guest, pair.await_guest(*guest, host, &address(*guest, host), patience)?))
        })
        .collect::<Result<_>>()?;
    talk::go_on(pair)?;
    let said = talk::at_once(lab, &commands).with_context(|| {
        let tails = |sessions: Vec<String>| sessions.join("\n---\n");
        format!(
            "sources:\n{}\ndestinations:\n{}\ndaemons:\n{}",
            tails(vec![pair.a.guest.session.err.tail(8), pair.b.guest.session.err.tail(8)]),
            tails(next.iter().map(|(_, guest)| guest.session.err.tail(8)).collect()),
            tails(pair.daemons().iter().map(|daemon| daemon.err.tail(12)).collect())
        )
    })?;
    // For a single guest the command prints its timeline, and for a group the outcome of each VM.
    for said in said.iter().filter(|_| moving.len() > 1) {
        if said["moved"] != true {
            bail!("The group hasn't moved, and the command succeeded: {said}");
        }
    }
    for (guest, new) in next {
        let before = pair.moved(guest, new, step.to[guest])?;
        before.ended(STEP_TIMEOUT)?;
    }
    Ok(moving.len())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-group is about Causeway's device");
    }
    let (verbs, mut layout) = (talk::by_verbs(options), talk::layout(&FIRST));
    let _service = if verbs { talk::verbs_of(lab, 2, &mut layout)? } else { talk::service(lab)? };
    let mut pair = Pair::place(lab, options, layout)?;
    let wanted = options.count.unwrap_or(2);
    // Migrations of a single guest take time as well: there is one between two groups.
    let count = talk::begin(&pair, wanted.saturating_mul(2) - 1)?;
    let names = |pair: &Pair<'_>| -> Result<([Names; 2], BTreeSet<String>)> {
        let ((a, of_a), (b, of_b)) = (talk::connected(&pair.a)?, talk::connected(&pair.b)?);
        Ok(([a, b], of_a.into_iter().chain(of_b).collect()))
    };
    let (first, _) = names(&pair)?;
    report.check(
        first.iter().all(|one| !one.is_empty()),
        "no queue pair is connected before the first migration",
    );
    let (mut groups, mut errors, mut at) = (0, 0, FIRST);
    let mut transports = BTreeSet::new();
    for step in STEPS.into_iter().cycle() {
        if groups == wanted {
            break;
        }
        let moved = carry_out(lab, &mut pair, at, step)
            .with_context(|| format!("{} to {:?}, after {groups} groups", step.name, step.to))?;
        at = step.to;
        groups += u32::from(moved > 1);
        if verbs {
            // The first request creates the connection.
            std::thread::sleep(Duration::from_secs(5));
        }
        let (now, reached_by) = names(&pair)?;
        if now != first {
            errors += 1;
            report.check(false, format!("queue pairs were {first:?}, and are {now:?} after {}", step.name));
        }
        progress!(
            "{}: a on h{}, b on h{}, {reached_by:?}; {groups}/{wanted} groups",
            step.name,
            at[0] + 1,
            at[1] + 1
        );
        let expected = match at[0] == at[1] {
            _ if verbs => "verbs",
            true => "local",
            false => "fabric",
        };
        report.check(
            reached_by.iter().eq([expected]),
            format!("after {} guests are reached by {reached_by:?} where {expected} is possible", step.name),
        );
        transports.extend(reached_by);
        // Let the programs run for a while before the next migration.
        std::thread::sleep(Duration::from_secs(5));
    }
    if verbs {
        for host in lab.hosts() {
            let packets = rdma_verbs::packets(host)?;
            progress!("{}: its RDMA device sent and received {packets:?} packets", host.name());
            report.check(packets[0] > 0, format!("{}'s RDMA device sent nothing", host.name()));
        }
    }
    errors += talk::end(&pair, report)?;
    report.figure("groups", groups);
    report.figure("errors", errors);
    report.figure("messages", count);
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each step begins at the previous one's end. Groups are drained, or named with one destination or separate ones, on the guests'
    /// hosts.
    #[test]
    fn steps_follow_each_other_and_are_said_where_guests_are() {
        let mut at = FIRST;
        let said: Vec<_> = STEPS
            .into_iter()
            .map(|step| {
                let said = commands(at, step);
                at = step.to;
                said
            })
            .collect();
        assert_eq!(at, FIRST);
        assert_eq!(said.iter().map(|(_, moving)| moving.len()).collect::<Vec<_>>(), [2, 1, 2, 1, 2, 1, 2, 1]);
        let (swap, _) = &said[0];
        assert_eq!(
            swap.as_slice(),
            [
                (0, format!("causeway --json migrate --group a=10.77.0.2:7100,b {TRANSFER}")),
                (1, format!("causeway --json migrate --group a,b=10.77.0.1:7101 {TRANSFER}")),
            ]
        );
        assert_eq!(said[1].0, [(0, format!("causeway --json migrate b --to 10.77.0.2:7101 {TRANSFER}"))]);
        assert_eq!(said[2].0, [(1, format!("causeway --json drain --to 10.77.0.1:7100 {TRANSFER}"))]);
        assert_eq!(
            said[6].0,
            [(1, format!("causeway --json migrate --group a,b --to 10.77.0.1:7100 {TRANSFER}"))]
        );
    }
}
