//! Runs of one migration, or of two at once, with one fault or none.

use std::collections::BTreeMap;

use nomad::config::InjectedBug;
use nomad::names::{HostId, VmId};

use super::{FAULTS_END, FaultAtStep, Report, Run, config};
use crate::cluster::Cluster;
use facilities::rng::SplitMix64;

/// How messages between hosts travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paths {
    /// Over direct connections, without the service.
    Direct,
    /// By the service: no host reaches another one directly.
    ByService,
}

/// What moves in a run with one fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scene {
    /// One VM, from host 1 to host 2; peers on hosts 3 and 4.
    One,
    /// Three VMs of a ring of four, to two hosts.
    Group,
    /// Two connected VMs change places, with a peer elsewhere.
    Swap,
    /// As [`Scene::Swap`], in a migration each, at the same time.
    Peers,
}

type Pairs = &'static [(u32, u32)];

/// A run in which one fault happens at one step, and nothing else.
///
/// # Errors
/// What is wrong.
pub fn run_with(
    scene: Scene,
    paths: Paths,
    fault_at: Option<FaultAtStep>,
    bug: InjectedBug,
) -> Result<Report, String> {
    run_scene(scene_run(7, paths, bug), scene, fault_at)
}

fn scene_run(seed: u64, paths: Paths, bug: InjectedBug) -> Run {
    let mut out = Vec::new();
    let mut cluster = Cluster::new(4, 30, config(bug, 0), &mut out);
    if paths == Paths::ByService {
        cluster.pairs().into_iter().for_each(|pair| cluster.sever(pair));
    }
    Run::new(SplitMix64::new(seed), cluster, out)
}

/// A run without faults whose messages overtake each other by up to 60 ms.
///
/// # Errors
/// What is wrong.
pub fn run_slowly(scene: Scene, paths: Paths, seed: u64, bug: InjectedBug) -> Result<Report, String> {
    let mut run = scene_run(seed, paths, bug);
    run.delays = 500;
    run_scene(run, scene, None)
}

fn run_scene(mut run: Run, scene: Scene, fault_at: Option<FaultAtStep>) -> Result<Report, String> {
    // All hosts have reported before anything moves, also where messages are slow afterwards.
    let delays = std::mem::take(&mut run.delays);
    run.suspended = Some(BTreeMap::new());
    run.schedule();
    while run.step(5_000) {}
    run.delays = delays;
    let (vms, links, moves): (&[u32], Pairs, Pairs) = match scene {
        Scene::One => (&[1, 3, 4], &[(1, 2), (1, 3), (2, 3)], &[(1, 2)]),
        Scene::Group => (&[1, 1, 2, 3], &[(1, 2), (2, 3), (3, 4), (1, 4)], &[(1, 4), (2, 4), (3, 1)]),
        Scene::Swap | Scene::Peers => (&[1, 2, 3], &[(1, 2), (1, 3)], &[(1, 2), (2, 1)]),
    };
    for (vm, host) in (1..).map(VmId).zip(vms) {
        run.cluster.start_vm(vm, HostId(*host), &mut run.out);
    }
    for (a, b) in links {
        run.cluster.link(VmId(*a), VmId(*b), &mut run.out);
    }
    let moves: Vec<_> = moves.iter().map(|(vm, to)| (VmId(*vm), HostId(*to))).collect();
    run.report.steps = 0;
    let all: Vec<_> = if scene == Scene::Peers { moves.chunks(1).collect() } else { vec![&moves[..]] };
    for moves in all {
        run.cluster.migrate(moves, &mut run.out).ok_or("The migration isn't begun")?;
    }
    run.schedule();
    let start = run.report.steps;
    let mut fault_at = fault_at;
    let mut faults_end = FAULTS_END;
    while run.now < faults_end {
        let next = run.now + if run.now < FAULTS_END { 200 } else { 5_000 };
        while run.step(next) {
            if let Some(FaultAtStep { node, fault, step }) = fault_at
                && run.report.steps - start >= step
            {
                run.inject(node, fault, fault.duration_us());
                faults_end = faults_end.max(run.now + fault.duration_us());
                fault_at = None;
            }
        }
        run.send();
    }
    run.end()
}
