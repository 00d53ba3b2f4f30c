//! VMs move among hosts of one process while their programs work over RDMA: each operation happens once and in order, whatever the path is
//! and becomes. The long run is `cargo run --release -p host --example migrate_exact`.

use host::testing::moving::Cluster;

/// How long a turn takes in the tests' time, nanoseconds: about what it takes here with optimization.
const TURN_NS: u64 = 20_000;

fn check(hosts: usize, vms: u32, seed: u64, operations: u64, every_ns: u64) {
    let mut cluster = Cluster::new(hosts, vms, seed);
    cluster.simulate_time(TURN_NS);
    let verdict =
        cluster.run_until(operations, every_ns, |_, _| {}).unwrap_or_else(|wrong| panic!("{wrong}"));
    let pairs = u64::from(vms) * u64::from(vms - 1);
    assert_eq!(verdict.operations, pairs * operations);
    assert!(verdict.is_clean());
    let moves = cluster.moves;
    assert!(moves.vms >= 3, "too little moved to show anything: {moves:?}");
    assert!(
        moves.local > 0 && moves.remote > 0 && moves.came_local > 0,
        "not all paths were taken: {moves:?}"
    );
    // As the drivers made them: ready to send, with the numbers that they were given.
    assert!(cluster.states().iter().all(|(state, _)| *state == 3));
}

/// Connections are the hosts' devices', also between VMs of one host: these are done with everything when a VM stops, whose connections are made anew by
/// the device of the host where it is then. Each operation happens once and in order.
fn check_by_verbs(hosts: usize, vms: u32, seed: u64, operations: u64) {
    let mut cluster = Cluster::by_verbs(hosts, vms, seed);
    cluster.simulate_time(TURN_NS);
    let verdict =
        cluster.run_until(operations, 3_000_000, |_, _| {}).unwrap_or_else(|wrong| panic!("{wrong}"));
    assert_eq!(verdict.operations, u64::from(vms) * u64::from(vms - 1) * operations);
    assert!(verdict.is_clean(), "{verdict:?}");
    let moves = cluster.moves;
    eprintln!("{moves:?}");
    assert!(moves.vms >= 3, "too little moved to show anything: {moves:?}");
    assert!(moves.local > 0 && moves.remote > 0, "VMs weren't on one host, and on two: {moves:?}");
    assert_eq!(moves.came_local, 0, "what is pinned to the devices doesn't go from RAM to RAM");
    assert!(cluster.states().iter().all(|(state, _)| *state == 3));
    // Ends and regions of VMs that have left are gone.
    let held = cluster.devices_hold();
    let (ends, regions) = held.iter().fold((0, 0), |sum, host| (sum.0 + host.0, sum.1 + host.1));
    let most = (vms * (vms - 1)) as usize;
    assert!(ends <= most && regions <= most, "{held:?}");
}

#[test]
fn two_vms_by_the_hosts_devices_meet_and_part() {
    check_by_verbs(2, 2, 5, 10_000);
}

#[test]
fn three_vms_by_the_hosts_devices_move_alone_and_in_groups() {
    check_by_verbs(3, 3, 6, 4_000);
}

#[test]
fn two_vms_on_two_hosts_meet_and_part() {
    check(2, 2, 1, 20_000, 3_000_000);
}

#[test]
fn three_vms_on_three_hosts_move_alone_and_in_groups() {
    check(3, 3, 2, 8_000, 3_000_000);
}

/// Beside their connections with each other, VMs have some with a peer that knows of no cluster, over a link that loses frames or doesn't: whatever moves, is
/// cancelled or changes places, each operation happens once and in order, no queue pair fails, and nothing is sent from where a VM doesn't run.
fn check_outside(hosts: usize, vms: u32, seed: u64, loss_percent: u64, operations: u64) {
    let mut cluster = Cluster::with_outside(hosts, vms, seed, loss_percent);
    cluster.simulate_time(TURN_NS);
    let verdict =
        cluster.run_until(operations, 1_000_000, |_, _| {}).unwrap_or_else(|wrong| panic!("{wrong}"));
    let directions = u64::from(vms) * u64::from(vms - 1) + 2 * u64::from(vms);
    assert_eq!(verdict.operations, directions * operations);
    assert!(verdict.is_clean());
    let (moves, frames) = (cluster.moves, cluster.frames());
    eprintln!("{moves:?}, {frames:?}");
    assert!(moves.vms >= 3 && moves.aborted > 0, "too little moved to show anything: {moves:?}");
    assert!(frames.passed > 2 * operations && (frames.lost > 0) == (loss_percent > 0), "{frames:?}");
    assert_eq!(frames.announced, moves.vms, "each VM that has come says so once per address");
    assert_eq!(frames.strays, 0, "a host sent in the name of a VM that doesn't run there");
    assert!(cluster.states().iter().all(|(state, _)| *state == 3));
}

#[test]
fn a_peer_outside_keeps_its_connection_while_its_vm_moves() {
    check_outside(2, 1, 3, 0, 8_000);
}

#[test]
fn peers_outside_and_inside_at_once_with_frames_lost() {
    check_outside(3, 2, 4, 2, 3_000);
}
