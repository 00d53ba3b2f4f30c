//! The pause of a migration as users feel it: a VM with an open RDMA connection moves between two hosts.
//!
//! All processes are the shipped program: the cluster service, three host daemons and the monitors, in network namespaces of this machine.
//! The VM's guest (`guest/payload/rdma-echo`) and a peer on the third host send a message back and forth.
//!
//! | figure | time base |
//! |---|---|
//! | guest's pause: largest time between two passes of the guest's loop | the guest's TSC, plus what a restore of the TSC hides |
//! | peer's pause: largest time between two completions | this host's monotonic clock |
//! | phases of the blackout | the source's monitor |
//!
//! Before each move, the same guest is measured for a while in which it doesn't move: what the machine itself adds.

mod hosts;
mod peer;
mod running;
mod vm;

use std::path::Path;
use std::time::Duration;

use control_api::migration::MigrationTimeline;
use hosts::{Hosts, PEER_HOST};
use peer::{Created, Peer};
use serde::Serialize;
use vm::{Settings, Vm};

use crate::figures::{Better, Figure, Figures, Pairs, percentile};
use crate::programs::{Programs, causeway};

/// Measured VMs: queue pairs and RAM in MiB. All but one queue pair are connected and idle. All RAM is written.
const VMS: [(u32, u64); 4] = [(1, 128), (100, 128), (10_000, 128), (1, 1024)];
/// Moves of each VM.
const MOVES: usize = 200;
const QUICK_MOVES: usize = 3;
/// Last byte of the VM's address, 10.80.0.1.
const ADDRESS: u8 = 1;
/// Time of the measurement without a move.
const STILL: Duration = Duration::from_millis(250);
/// Time after a move in which the measurement continues: the first messages.
const AFTER: Duration = Duration::from_millis(50);
/// Time in which all daemons learn the addresses that the service knows.
const SPREAD: Duration = Duration::from_secs(1);

/// Aim for the guest's pause, 99th percentile, in milliseconds.
const AIM_MS: f64 = 10.0;

/// One move, in milliseconds.
#[derive(Debug, Clone, Serialize)]
struct Move {
    /// The guest's pause.
    guest: f64,
    /// Largest time between two completions at the guest.
    connection: f64,
    /// Largest time between two completions at the peer.
    peer: f64,
    /// The guest's and the peer's largest times without a move.
    still_guest: f64,
    still_peer: f64,
    /// Phases of the blackout, by the source's monitor, and their sum.
    stop: f64,
    rest: f64,
    restore: f64,
    commit: f64,
    blackout: f64,
    /// Suspension of the peer's queue pairs, by its daemon.
    suspended: f64,
    /// Pages of the last round.
    last_pages: u64,
    /// The whole migration.
    total: f64,
}

/// Figures of all moves of a VM.
#[derive(Debug, Serialize)]
pub struct Moves {
    queue_pairs: u32,
    memory_mib: u64,
    moves: Vec<Move>,
}

/// Returns why this machine can't measure it, if so.
pub fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root");
    }
    if !Path::new("/dev/kvm").exists() {
        return Some("the VM needs /dev/kvm");
    }
    let missing =
        crate::outside::missing(&[("ip", "-V", "iproute2"), ("setpriv", "--version", "util-linux")]);
    (!missing.is_empty())
        .then_some("network namespaces need the programs ip and setpriv: install iproute2 and util-linux")
}

/// A part of a move, in milliseconds.
type Part = fn(&Move) -> f64;

/// Moves all VMs and adds their figures.
///
/// # Errors
/// A process fails, or a VM doesn't move.
pub fn run(figures: &mut Figures, quick: bool) -> anyhow::Result<Vec<Moves>> {
    let (program, guest) = (causeway()?, Programs::build()?.path("rdma-echo"));
    let moves = if quick { QUICK_MOVES } else { MOVES };
    let mut all = Vec::new();
    for (queue_pairs, memory_mib) in VMS {
        let settings = Settings { guest: &guest, memory_mib };
        let mut bed = Bed::start(&program, settings, queue_pairs)?;
        // The first move warms up and isn't counted.
        bed.step()?;
        let moves = (0..moves).map(|_| bed.step()).collect::<anyhow::Result<Vec<_>>>()?;
        let moves = Moves { queue_pairs, memory_mib, moves };
        add(figures, &moves)?;
        all.push(moves);
    }
    Ok(all)
}

/// The cluster, the VM and its peer. Fields are dropped in order.
struct Bed<'a> {
    peer: Peer,
    vm: Vm,
    hosts: Hosts,
    settings: Settings<'a>,
    tsc_khz: f64,
}

impl<'a> Bed<'a> {
    fn start(program: &Path, settings: Settings<'a>, queue_pairs: u32) -> anyhow::Result<Self> {
        let hosts = Hosts::start(program)?;
        let mut vm = Vm::start(&hosts, 1, settings)?;
        let peer = Created::at(&hosts.daemon(PEER_HOST));
        let qpn = vm.set_up(ADDRESS, queue_pairs, settings.memory_mib)?;
        hosts.await_addresses(&[vm::NAME, peer::NAME])?;
        std::thread::sleep(SPREAD);
        vm.connect(peer.qpn(), peer::ADDRESS)?;
        let peer = peer.connect(qpn, ADDRESS)?;
        Ok(Self { peer, vm, hosts, settings, tsc_khz: crate::peers::tsc_khz() })
    }

    fn milliseconds(&self, ticks: u64) -> f64 {
        super::float(ticks) / self.tsc_khz
    }

    /// Moves the VM to the other host.
    fn step(&mut self) -> anyhow::Result<Move> {
        let from = self.vm.host;
        let to = if from == 1 { 2 } else { 1 };
        let mut there = Vm::waiting(&self.hosts, to, self.settings)?;

        self.begin()?;
        std::thread::sleep(STILL);
        let still = self.end()?;

        let before = self.vm.tsc_offset()?;
        self.begin()?;
        let timeline = self.hosts.migrate(vm::NAME, from, to)?;
        std::thread::sleep(AFTER);
        std::mem::swap(&mut self.vm, &mut there);
        let moved = self.end()?;
        there.await_end()?;
        let hidden = hidden(before, self.vm.tsc_offset()?);
        self.hosts.check()?;
        Ok(self.summary(&still, &moved, hidden, &timeline))
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        self.vm.begin()?;
        self.peer.begin();
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<(vm::Measured, peer::Measured)> {
        // The guest's output is a pause for the peer.
        let peer = self.peer.end()?;
        self.vm.end()?;
        let guest = self.vm.measured()?;
        anyhow::ensure!(
            guest.messages > 0 && peer.messages > 0,
            "The guest received {} messages and the peer {} in a measurement",
            guest.messages,
            peer.messages
        );
        Ok((guest, peer))
    }

    fn summary(
        &self,
        still: &(vm::Measured, peer::Measured),
        moved: &(vm::Measured, peer::Measured),
        hidden: u64,
        timeline: &MigrationTimeline,
    ) -> Move {
        let peer = |measured: &peer::Measured| measured.completion.as_secs_f64() * 1e3;
        let suspended = timeline.peers.iter().map(|peer| peer.pause_ms).fold(0.0, f64::max);
        Move {
            guest: self.milliseconds(moved.0.pass + hidden),
            connection: self.milliseconds(moved.0.completion + hidden),
            peer: peer(&moved.1),
            still_guest: self.milliseconds(still.0.pass),
            still_peer: peer(&still.1),
            stop: timeline.stop_ms,
            rest: timeline.rest_ms,
            restore: timeline.restore_ms,
            commit: timeline.commit_ms,
            blackout: timeline.pause_ms,
            suspended,
            last_pages: timeline.rounds.last().map_or(0, |round| round.pages),
            total: timeline.total_ms,
        }
    }
}

/// Returns the ticks that the guest's TSC lost in a move: by how much this host's is further ahead of it than before. Where bounds of both
/// differences have a common value, nothing was lost, as on hosts where guests read the host's TSC.
fn hidden(before: (i128, i128), after: (i128, i128)) -> u64 {
    if before.0 <= after.1 && after.0 <= before.1 {
        return 0;
    }
    u64::try_from(i128::midpoint(after.0, after.1) - i128::midpoint(before.0, before.1)).unwrap_or(0)
}

/// Returns samples in ascending order.
fn sorted(moves: &Moves, of: Part) -> Vec<f64> {
    let mut samples: Vec<f64> = moves.moves.iter().map(of).collect();
    samples.sort_by(f64::total_cmp);
    samples
}

fn add(figures: &mut Figures, moves: &Moves) -> anyhow::Result<()> {
    let Moves { queue_pairs, memory_mib, .. } = *moves;
    let what = format!("a VM with {queue_pairs} queue pairs and {memory_mib} MiB of written memory moves");
    let name = |of: &str| format!("pause_{of}_{queue_pairs}qp_{memory_mib}MiB");
    let samples = |of: Part, peer: Part| Pairs {
        pairs: moves.moves.iter().map(|sample| (of(sample), peer(sample))).collect(),
    };
    let p99 = |of: Part| percentile(&sorted(moves, of), 99).unwrap_or(f64::NAN);
    // Name, subject, pause, pause without a move, aim.
    let pauses: [(&str, &str, Part, Part, Option<f64>); 2] = [
        ("guest", "Guest's pause", |sample| sample.guest, |sample| sample.still_guest, Some(1.0)),
        ("peer", "Peer's pause", |sample| sample.peer, |sample| sample.still_peer, None),
    ];
    for (of, who, sample, still, aim) in pauses {
        report(&name(of), &sorted(moves, sample));
        figures.add(Figure::new(
            &name(of),
            &format!("{who}: {what}"),
            "ms",
            Better::Lower,
            "the same without a move",
            &samples(sample, still),
            None,
        ))?;
        figures.add(Figure::new(
            &name(&format!("{of}_p99")),
            &format!("{who}, 99th percentile: {what}"),
            "ms",
            Better::Lower,
            "the aim",
            &Pairs { pairs: vec![(p99(sample), AIM_MS)] },
            aim,
        ))?;
    }
    if queue_pairs == super::MIGRRDMA_LIKE {
        let pairs = moves.moves.iter().map(|sample| (sample.guest, super::MIGRRDMA_MS)).collect();
        figures.add(Figure::new(
            &name("guest_migrrdma"),
            &format!("Guest's pause: {what}"),
            "ms",
            Better::Lower,
            "MigrRDMA, 16 queue pairs (published)",
            &Pairs { pairs },
            None,
        ))?;
    }
    phases(figures, moves, &name)
}

/// Prints the median and the 99th percentile.
fn report(name: &str, sorted: &[f64]) {
    let at = |hundredths| percentile(sorted, hundredths).unwrap_or(f64::NAN);
    eprintln!("bench: migration: {name}: p50 {:.2} ms, p99 {:.2} ms", at(50), at(99));
}

/// Adds the parts of the guest's pause.
fn phases(figures: &mut Figures, moves: &Moves, name: &dyn Fn(&str) -> String) -> anyhow::Result<()> {
    let parts: [(&str, &str, Part); 6] = [
        ("stop", "vCPUs and devices stop", |sample| sample.stop),
        ("rest", "the rest of memory and the state are sent", |sample| sample.rest),
        ("restore", "the destination restores the VM and votes", |sample| sample.restore),
        ("commit", "from the commit to the report that the VM runs", |sample| sample.commit),
        ("blackout", "the sum of these four", |sample| sample.blackout),
        ("suspended", "suspension of the peer's queue pairs", |sample| sample.suspended),
    ];
    for (of, what, sample) in parts {
        let pairs = moves.moves.iter().map(|one| (sample(one).max(1e-6), one.guest)).collect();
        figures.add(Figure::new(
            &name(of),
            &format!("Part of the same moves: {what}"),
            "ms",
            Better::Lower,
            "guest's pause, same moves",
            &Pairs { pairs },
            None,
        ))?;
        report(&name(of), &sorted(moves, sample));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::hidden;

    #[test]
    fn what_a_restored_tsc_hides_is_the_growth_of_its_distance() {
        // Overlapping bounds: the same TSC.
        assert_eq!(hidden((-10, 300), (-400, 5)), 0);
        assert_eq!(hidden((1_000, 1_010), (1_005, 1_020)), 0);
        assert_eq!(hidden((1_000, 1_010), (9_000, 9_010)), 8_000);
        // A TSC that is ahead afterwards hides nothing.
        assert_eq!(hidden((1_000, 1_010), (500, 510)), 0);
    }
}
