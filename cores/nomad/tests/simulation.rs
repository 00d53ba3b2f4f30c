//! The simulator: clean over some seeds, and able to find what is wrong; and one fault at every step of three migrations.

use nomad::testing::simulate::{Blow, Harm, Report, Scene, run, run_with};
use nomad::{HostId, Node, Plant};

/// Whatever is lost, repeated, killed or cut off: one owner, each operation once and in order, and an end.
#[test]
fn a_few_hundred_seeds_are_clean() {
    let mut total = Report::default();
    for seed in 0..400 {
        match run(seed, Plant::None) {
            Ok(report) => total.add(&report),
            Err(what) => panic!("seed {seed}: {what}"),
        }
    }
    // They were not clean for want of anything happening.
    assert!(total.committed > 400 && total.aborted > 200, "{total:?}");
    assert!(total.kills > 50 && total.coordinator_kills > 20 && total.partitions > 50, "{total:?}");
    assert!(total.lost > 1000 && total.repeated > 100 && total.operations > 10_000, "{total:?}");
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    for seed in 0..20 {
        assert_eq!(run(seed, Plant::None), run(seed, Plant::None));
    }
}

/// Each participant is killed, and cut off, after each event of a migration of one VM, of a group, and of two that change places: all
/// holds, and when the migration is given up, all queue pairs between living VMs are open again within 200 ms of that decision.
#[test]
fn one_fault_at_every_step() {
    let (mut runs, mut committed, mut aborted) = (0, 0, 0);
    for scene in [Scene::One, Scene::Group, Scene::Swap] {
        let calm = run_with(scene, None, Plant::None).unwrap();
        assert_eq!((calm.committed, calm.aborted, calm.vms_lost), (1, 0, 0), "{scene:?}");
        let nodes = (1..=4).map(|host| Node::Host(HostId(host))).chain([Node::Coordinator]);
        for node in nodes {
            for harm in [Harm::Kill, Harm::Partition] {
                for step in 0..200 {
                    let report = run_with(scene, Some(Blow { node, harm, step }), Plant::None)
                        .unwrap_or_else(|what| panic!("{scene:?}, {harm:?} of {node:?} at {step}: {what}"));
                    runs += 1;
                    committed += report.committed;
                    aborted += report.aborted;
                    if harm == Harm::Kill && node != Node::Coordinator {
                        let resumed = report.longest_resume;
                        assert!(resumed <= 200_000, "{scene:?}, {node:?} at {step}: {resumed} µs");
                    }
                    if node == Node::Coordinator || harm == Harm::Partition {
                        assert_eq!(report.vms_lost, 0, "{scene:?}, {harm:?} of {node:?} at {step}");
                    }
                }
            }
        }
    }
    assert!(committed > 500 && aborted > 300, "{runs} runs, {committed} moved, {aborted} stayed");
}

fn is_found(plant: Plant) {
    let found = (0..2000).find_map(|seed| run(seed, plant).err().map(|what| (seed, what)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{plant:?} is not found in 2000 seeds"));
    println!("{plant:?} is found with seed {seed}: {what}");
}

#[test]
fn planted_faults_are_found() {
    for plant in [
        Plant::AckBeforeHeld,
        Plant::CommitWithoutYield,
        Plant::RunAfterYield,
        Plant::NoEpochCheck,
        Plant::ResumeBeforeCommit,
        Plant::DecisionNotWritten,
        Plant::StopBeforeHeld,
        Plant::DecideTwice,
    ] {
        is_found(plant);
    }
}
