//! Four guests on three hosts, a rank of one MPI job in each: one of them moves from host to host, then all four at once, then two change places. The job goes
//! on from before the first move until after the last, and verifies every byte that it exchanges.
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
//! With `--only verbs` rxe devices on the hosts' bridges br1 carry the connections, which have shared receive queues (UCX's).

use super::migrate_talk::{self as talk, Names, PATIENCE};
use super::rdma_tools::RSH;
use super::rdma_verbs;
use crate::guest::Guest;
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-mpi",
    about: "four guests of an MPI job on three hosts: one moves (--count N times), then all as a group, then two change places: no error, every byte right (--only verbs: by the hosts' RDMA devices)",
    topology,
    run,
    prompt: None,
};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// The hosts that they are on first.
const FIRST: [usize; 4] = [0, 1, 2, 1];
const HOSTS: usize = 3;
/// Where monitors wait: the first guest's, and one more for each of the others.
const PORT: usize = 7100;
const TRANSFER: &str = "--downtime 3000 --streams 2";
/// Rounds that the job has to do between two migrations.
const ROUNDS_BETWEEN: u64 = 50;
/// Largest message, bytes: eager ones and those of UCX's rendezvous.
const LARGEST: u32 = 65536;
/// The job ends once this file is in the first guest.
const STOP: &str = "/run/mpi.stop";

fn topology(_: &Options) -> Topology {
    // Room for those that are there and those that come.
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

/// The third host's links join the bridges of the second; there they get the names that the other hosts' first links have.
pub(super) const H2: &str = "set -e; for i in x2 x3; do ip addr flush dev $i; done
[ -e /sys/class/net/br0 ] || ip link add br0 type bridge; ip link set br0 up
ip link set x2 master br1 up; ip link set x3 master br0 up";
pub(super) const H3: &str = "set -e; for i in 0 1; do o=x$((i+2)); ip addr flush dev $o; ip link set $o down; ip link set $o name x$i; ip link set x$i up; done";

fn address(guest: usize, host: usize) -> String {
    format!("10.77.0.{}:{}", host + 1, PORT + guest)
}

/// The commands, by the host that they run on, that move guests from where they are to where they shall be, as one migration; and the guests that move.
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

/// The job, as a file in the first guest: a rank in each.
fn job(a: &Member<'_>) -> String {
    format!(
        "{RSH}rm -f {STOP}; exec mpirun.openmpi --allow-run-as-root -H a:1,b:1,c:1,d:1 -np 4 --map-by node --mca plm_rsh_agent /tmp/rsh \
         --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include net0 --mca pml ucx --mca osc ucx --mca btl self --mca coll ^hcoll --mca mpi_yield_when_idle 1 \
         -x UCX_NET_DEVICES={}:1 -x UCX_IB_GID_INDEX={} -x UCX_TLS=rc_v,self --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any \
         -x UCX_UD_VERBS_ETH_DGID_CHECK=n mpi-steady {STOP} {LARGEST}\n",
        a.port.device, a.port.gid
    )
}

/// Rounds that the job has done, as it says them.
fn rounds(a: &Member<'_>) -> Result<u64> {
    let said = a.sh("grep ROUNDS /run/work.out | tail -n 1 || true")?;
    Ok(said.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// Waits until the job has done so many.
fn await_rounds(a: &Member<'_>, wanted: u64) -> Result<u64> {
    let until = Instant::now() + PATIENCE;
    loop {
        let done = rounds(a)?;
        if done >= wanted {
            return Ok(done);
        }
        if !talk::works(a)? || Instant::now() > until {
            bail!(
                "The MPI job has done {done} rounds, {wanted} are due: {}",
                a.sh("tail -n 12 /run/work.out; ps -e -o pid,stat,wchan:20,args | grep -v '\\]$' | tail -n 15; ss -tnp | head -n 20")?
            );
        }
        std::thread::sleep(Duration::from_secs(2));
    }
}

struct Guests<'p, 'l> {
    pair: &'p mut Pair<'l>,
    at: [usize; 4],
}

impl Guests<'_, '_> {
    /// The connected queue pairs of each, and how their peers are reached.
    fn names(&self) -> Result<(Vec<Names>, BTreeSet<String>)> {
        let mut transports = BTreeSet::new();
        let mut all = Vec::new();
        for guest in 0..NAMES.len() {
            let (names, by) = talk::connected(self.pair.member(guest)?)?;
            all.push(names);
            transports.extend(by);
        }
        Ok((all, transports))
    }

    /// Moves guests as one migration.
    fn go(&mut self, lab: &Lab, to: [usize; 4]) -> Result<usize> {
        let (said, moving) = commands(self.at, to);
        let next: Vec<(usize, Guest)> = moving
            .iter()
            .map(|guest| {
                let host = to[*guest];
                Ok((*guest, self.pair.await_guest(*guest, host, &address(*guest, host), PATIENCE)?))
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
        // One that moves alone prints its timeline, a group how each of its VMs moved.
        if let Some(odd) = answers.iter().find(|said| moving.len() > 1 && said["moved"] != Value::Bool(true))
        {
            bail!("The group hasn't moved, and the command succeeded: {odd}");
        }
        for (guest, new) in next {
            self.pair.moved(guest, new, to[guest])?.ended(PATIENCE)?;
        }
        self.at = to;
        Ok(moving.len())
    }
}

/// The migrations: what they are called, and where guests are then.
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
        // To change places they have to be apart.
        at[0] = (at[0] + 1) % HOSTS;
        plan.push(("one", at));
    }
    at.swap(0, 1);
    plan.push(("swap", at));
    plan
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-mpi is about Causeway's device");
    }
    lab.host(2)?.sh(H3)?;
    let (verbs, mut layout) = (talk::by_verbs(options), talk::layout_of(&FIRST, HOSTS));
    let _service =
        if verbs { talk::verbs_of(lab, HOSTS, &mut layout)? } else { talk::service_of(lab, HOSTS)? };
    lab.host(1)?.sh(H2)?;
    let mut pair = Pair::place(lab, options, layout)?;
    pair.join()?;
    pair.join()?;
    for member in pair.more().iter().chain([&pair.b]) {
        member.sh(&format!(
            "{RSH}setsid socat TCP-LISTEN:514,fork,reuseaddr EXEC:bash < /dev/null > /dev/null 2>&1 & sleep 1"
        ))?;
    }
    for name in NAMES.iter().skip(1) {
        // mpirun waits for as long as it is let where a host can't be reached.
        let said =
            pair.a.sh(&format!("{RSH}timeout 60 /tmp/rsh {name} echo reached $(hostname) 2>&1 || true"))?;
        if !said.contains("reached") {
            bail!("Guest a can't start programs in guest {name} by its virtio-net address: {said}");
        }
    }
    pair.a.sh(&format!("cat > /run/mpi.sh <<'E'\n{}E\n", job(&pair.a)))?;
    talk::detach(&pair.a, "sh /run/mpi.sh")?;
    let mut guests = Guests { pair: &mut pair, at: FIRST };
    let mut done = await_rounds(&guests.pair.a, ROUNDS_BETWEEN)?;
    let (first, by) = guests.names()?;
    progress!("{done} rounds; queue pairs {first:?}, by {by:?}");
    report.check(
        first.iter().all(|one| !one.is_empty()),
        "a guest has no connected queue pair before the first move",
    );
    let (mut moves, mut groups, mut errors) = (0, 0, 0);
    let mut transports = by;
    let plan = plan(options.count.unwrap_or(3));
    let steps = plan.len();
    for (number, (name, to)) in plan.into_iter().enumerate() {
        let moved =
            guests.go(lab, to).with_context(|| format!("{name}, to {to:?}, migration {}", number + 1))?;
        moves += u32::from(moved == 1);
        groups += u32::from(moved > 1);
        done = await_rounds(&guests.pair.a, done + ROUNDS_BETWEEN)?;
        let (now, by) = guests.names()?;
        let same = now == first;
        errors += u32::from(!same);
        report.check(
            same,
            format!("queue pairs were {first:?}, and are {now:?} after migration {}", number + 1),
        );
        progress!(
            "{}/{steps} {name}: guests on {:?}, by {by:?}; {done} rounds",
            number + 1,
            to.map(|host| host + 1)
        );
        transports.extend(by);
    }
    guests.pair.a.sh(&format!("touch {STOP}"))?;
    let (code, said) = talk::ended(&guests.pair.a, PATIENCE * 2)?;
    let right = code == 0 && said.contains("mismatches=0");
    errors += u32::from(!right);
    report.check(right, format!("the MPI job ended with status {code}: {said}"));
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
    report.figure("rounds", done);
    report.figure("said", said.trim().lines().last().unwrap_or_default());
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever is named with a place is on that command's host, and all commands of a migration name the same guests.
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

    /// All four move in the group, and two are on different hosts before they change places.
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
