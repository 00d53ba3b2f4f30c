//! VMs move among hosts of one process while their programs work over RDMA: each operation happens once and in order, whatever the path is
//! and becomes. The long run is `cargo run --release -p host --example migrate_exact`.

use host::testing::moving::Cluster;

fn check(hosts: usize, vms: u32, seed: u64, operations: u64, every_ns: u64) {
    let mut cluster = Cluster::new(hosts, vms, seed);
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

#[test]
fn two_vms_on_two_hosts_meet_and_part() {
    check(2, 2, 1, 20_000, 3_000_000);
}

#[test]
fn three_vms_on_three_hosts_move_alone_and_in_groups() {
    check(3, 3, 2, 8_000, 3_000_000);
}
