//! VMs migrate among hosts of one process while their programs use RDMA: each operation is executed once and in order, on any path and
//! through any change of it. The long run is `cargo run --release -p host --example migrate_exact`.

use host_testbed::moving::Cluster;

/// Simulated duration of a turn, nanoseconds: about the real one in an optimised build.
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
    // As the drivers set them: RTS, with their original numbers.
    assert!(cluster.states().iter().all(|(state, _)| *state == 3));
}

/// Connections use the hosts' devices, also between VMs of one host. The devices have completed everything when a VM stops. Its connections
/// are created again at the device of the VM's new host. Each operation is executed once and in order.
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

/// VMs also have connections with a peer outside of the cluster, over a link with and without loss. Through migrations, cancellations and
/// exchanges, each operation is executed once and in order, no queue pair fails, and no host sends a VM's frames unless the VM runs there.
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
