//! Small clusters. Shared with examples/check_migration.rs.

#![allow(dead_code, reason = "the test and the example use parts of it")]

use nomad::config::Config;
use nomad::{HostId, VmId};
use nomad_testbed::world::{Budget, Setup};

/// No faults.
pub const NOTHING: Budget = Budget {
    losses: 0,
    repeats: 0,
    severs: 0,
    kills: 0,
    coordinator_kills: 0,
    deaths: 0,
    renumbers: 0,
    resumes: 0,
    timers: 0,
    cancels: 0,
    more: 0,
    sends: 0,
};

fn config() -> Config {
    // Announcements are counted only as far as it makes a difference.
    Config { fanout: 0, fast_retries: 1, ..Config::default() }
}

fn setup(
    name: &'static str,
    hosts: u32,
    vms: &[u32],
    links: &[(u32, u32)],
    moves: &[(u32, u32)],
    then: &[(u32, u32)],
) -> Setup {
    let vm = |vm: &u32| VmId(*vm);
    Setup {
        name,
        hosts,
        vms: vms.iter().zip(1..).map(|(host, id)| (VmId(id), HostId(*host))).collect(),
        links: links.iter().map(|(a, b)| (vm(a), vm(b))).collect(),
        moves: moves.iter().map(|(a, to)| (vm(a), HostId(*to))).collect(),
        then: then.iter().map(|(a, to)| (vm(a), HostId(*to))).collect(),
        concurrent: Vec::new(),
        direct: true,
        copying: false,
        budget: NOTHING,
        config: config(),
        settle: 0,
    }
}

/// One VM moves from host 1 to host 2; its peers are on hosts 3 and 4.
pub fn two_peers() -> Setup {
    setup("two peers", 4, &[1, 3, 4], &[(1, 2), (1, 3)], &[(1, 2)], &[(1, 1)])
}

/// The same with one peer; afterwards the VM moves on to its host.
pub fn one_peer() -> Setup {
    setup("one peer", 3, &[1, 3], &[(1, 2)], &[(1, 2)], &[(1, 3)])
}

/// One peer is on the source, the other one on the destination.
pub fn peers_on_both_hosts() -> Setup {
    setup("peers on both hosts", 2, &[1, 1, 2], &[(1, 2), (1, 3)], &[(1, 2)], &[(1, 1)])
}

/// Two connected VMs change places.
pub fn swap() -> Setup {
    setup("swap", 2, &[1, 2], &[(1, 2)], &[(1, 2), (2, 1)], &[(1, 1), (2, 2)])
}

/// Two connected VMs move together, with a peer elsewhere.
pub fn pair() -> Setup {
    setup("pair", 3, &[1, 1, 3], &[(1, 2), (1, 3)], &[(1, 2), (2, 2)], &[(3, 2)])
}

/// Two peers whose hosts are notified along a chain.
pub fn chain() -> Setup {
    let plain = two_peers();
    Setup { name: "chain", config: Config { fanout: 1, ..plain.config }, ..plain }
}

/// Another migration is asked for at the same time, and the first one of these moves on when all is over.
fn beside(setup: Setup, moves: &[(u32, u32)]) -> Setup {
    let moves = moves.iter().map(|(vm, to)| (VmId(*vm), HostId(*to))).collect();
    Setup { concurrent: moves, copying: true, ..setup }
}

/// Two connected VMs of two hosts move to a third one, in a migration each.
pub fn peers_apart() -> Setup {
    beside(setup("two peers at once", 3, &[1, 2], &[(1, 2)], &[(1, 3)], &[(1, 1)]), &[(2, 3)])
}

/// Two connected VMs change places, in a migration each.
pub fn peers_cross() -> Setup {
    beside(setup("two peers cross", 2, &[1, 2], &[(1, 2)], &[(1, 2)], &[(1, 1)]), &[(2, 1)])
}

/// Two connected VMs of one host go to two others, in a migration each.
pub fn peers_part() -> Setup {
    beside(setup("two peers part", 3, &[1, 1], &[(1, 2)], &[(1, 2)], &[(1, 1)]), &[(2, 3)])
}

/// A cluster whose hosts don't reach each other directly.
pub fn by_service(setup: Setup) -> Setup {
    Setup { direct: false, ..setup }
}

/// All of them.
pub fn all() -> Vec<Setup> {
    vec![
        two_peers(),
        one_peer(),
        peers_on_both_hosts(),
        swap(),
        pair(),
        chain(),
        peers_apart(),
        peers_cross(),
        peers_part(),
    ]
}

/// Budgets of injected faults, by name.
pub fn budgets() -> Vec<(&'static str, Budget)> {
    vec![
        ("operations", Budget { sends: 2, ..NOTHING }),
        ("a loss", Budget { losses: 1, timers: 1, ..NOTHING }),
        ("a repeated message", Budget { repeats: 1, more: 1, ..NOTHING }),
        ("a kill", Budget { kills: 1, sends: 1, ..NOTHING }),
        ("a kill and a timer", Budget { kills: 1, timers: 1, ..NOTHING }),
        ("two kills", Budget { kills: 2, ..NOTHING }),
        ("a kill of the coordinator", Budget { coordinator_kills: 1, timers: 1, ..NOTHING }),
        ("kills of a host and the coordinator", Budget { kills: 1, coordinator_kills: 1, ..NOTHING }),
        ("a host that never returns", Budget { deaths: 1, timers: 1, ..NOTHING }),
        (
            "a host that never returns, and a kill of the coordinator",
            Budget { deaths: 1, coordinator_kills: 1, ..NOTHING },
        ),
        ("a living daemon that counts as started again", Budget { renumbers: 1, timers: 1, ..NOTHING }),
        ("a kill and a guest in doubt that is to go on", Budget { kills: 1, resumes: 1, ..NOTHING }),
        ("a direct path that breaks", Budget { severs: 1, timers: 1, ..NOTHING }),
        ("a direct path that breaks, and a kill", Budget { severs: 1, kills: 1, ..NOTHING }),
        (
            "a direct path that breaks, and a kill of the coordinator",
            Budget { severs: 1, coordinator_kills: 1, ..NOTHING },
        ),
        ("two timers", Budget { timers: 2, sends: 1, ..NOTHING }),
        ("a cancel", Budget { cancels: 1, more: 1, sends: 1, ..NOTHING }),
    ]
}
