//! The simulator: clean over some seeds, and able to find injected bugs.

use roce::config::Plant;
use roce_testbed::{Options, Report, run};

#[test]
fn a_few_hundred_seeds_are_clean() {
    let mut total = Report::default();
    for seed in 0..600 {
        match run(seed, &Options::default()) {
            Ok(report) => total.add(&report),
            Err(violation) => panic!("{violation}"),
        }
    }
    // The runs were clean although faults did happen.
    let counters = total.counters;
    for (name, count) in counters.list() {
        assert!(count > 0, "{name} never moved");
    }
    assert!(total.succeeded > 5000 && total.failed > 100, "{total:?}");
    assert!(total.lost > 1000 && total.disturbed > 1000 && total.restored > 1000, "{total:?}");
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    for seed in 0..50 {
        let [first, second] = [0, 1].map(|_| run(seed, &Options::default()).unwrap());
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
    }
}

fn is_found(plant: Plant) {
    let options = Options { plant, ..Options::default() };
    let found = (0..200).find_map(|seed| run(seed, &options).err());
    assert!(found.is_some(), "{plant:?} is not found in 200 seeds");
}

#[test]
fn a_responder_that_skips_a_psn_is_found() {
    is_found(Plant::SkipPsn);
}

#[test]
fn a_responder_that_forgets_results_of_atomics_is_found() {
    is_found(Plant::ForgetReplay);
}

#[test]
fn a_responder_that_acknowledges_too_early_is_found() {
    is_found(Plant::EarlyAck);
}
