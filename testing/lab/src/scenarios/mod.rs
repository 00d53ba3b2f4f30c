//! The scenarios.

mod appliance_load;
mod appliance_stacks;
mod block_crash;
mod boot;
mod compare;
mod demo;
mod driver_faults;
mod dsm_rdma;
mod fio;
mod host;
mod migrate;
mod migrate_blackout;
mod migrate_converge;
mod migrate_exact;
mod migrate_faults;
mod migrate_group;
mod migrate_hosts;
mod migrate_many;
mod migrate_mirror;
mod migrate_mpi;
mod migrate_postcopy;
mod migrate_programs;
mod migrate_rdma;
mod migrate_talk;
mod migrate_verbs;
mod migrate_wire;
mod neighbours;
mod neighbours_appliance;
mod neighbours_block;
mod neighbours_disk;
mod neighbours_end;
mod neighbours_esp;
mod neighbours_faults;
mod neighbours_integrity;
mod neighbours_member;
mod neighbours_selftest;
mod neighbours_table;
mod neighbours_tools;
mod neighbours_virtio;
mod net;
mod rdma_boot;
mod rdma_exits;
mod rdma_fabric;
mod rdma_netem;
mod rdma_pyverbs;
mod rdma_tools;
mod rdma_ulp;
mod rdma_verbs;
mod rdma_wire;
mod tutorials;
mod vpio_attacks;
mod vpio_handoff;
mod vpio_nics;
mod vpio_recovery;
mod wakeups;
mod walks;

use crate::scenario::Scenario;

/// All scenarios, in the order of `--list`.
pub const ALL: &[Scenario] = &[
    boot::SCENARIO,
    block_crash::SCENARIO,
    net::SCENARIO,
    compare::SCENARIO,
    demo::SCENARIO,
    dsm_rdma::SCENARIO,
    host::SCENARIO,
    tutorials::SCENARIO,
    migrate::SCENARIO,
    migrate_hosts::SCENARIO,
    migrate_mirror::SCENARIO,
    migrate_postcopy::SCENARIO,
    migrate_rdma::SCENARIO,
    migrate_blackout::SCENARIO,
    migrate_exact::SCENARIO,
    migrate_many::SCENARIO,
    migrate_faults::SCENARIO,
    migrate_converge::SCENARIO,
    migrate_group::SCENARIO,
    migrate_mpi::SCENARIO,
    migrate_verbs::SCENARIO,
    migrate_wire::SCENARIO,
    neighbours::SCENARIO,
    neighbours_block::SCENARIO,
    neighbours_appliance::SCENARIO,
    neighbours_faults::SCENARIO,
    neighbours_selftest::SCENARIO,
    neighbours_virtio::SCENARIO,
    rdma_boot::SCENARIO,
    rdma_tools::SCENARIO,
    rdma_pyverbs::SCENARIO,
    rdma_ulp::SCENARIO,
    rdma_exits::SCENARIO,
    rdma_fabric::SCENARIO,
    rdma_netem::SCENARIO,
    rdma_wire::SCENARIO,
    rdma_verbs::SCENARIO,
    vpio_nics::SCENARIO,
    vpio_handoff::SCENARIO,
    vpio_attacks::SCENARIO,
    vpio_recovery::SCENARIO,
    wakeups::SCENARIO,
    walks::SCENARIO,
];
