//! Litmus tests in a real VM of one node. Needs /dev/kvm; without it each test prints that it is skipped. `lab dsm-litmus` runs the
//! whole corpus.

use crate::programs::{Output, programs};
use litmus::model::{Order, Outcome, outcomes};
use litmus::{Instruction, Test, Variant, corpus, fill};
use monitor::payload::PayloadVm;
use payload_litmus::table::Placement;
use serde_json::Value;
use std::time::Duration;

const HANG_LIMIT: Duration = Duration::from_secs(300);

/// Returns the program, or `None` without KVM.
fn program(test: &str) -> Option<Vec<u8>> {
    programs(test).map(|programs| std::fs::read(programs.path("litmus")).unwrap())
}

fn named(name: &str) -> Test {
    corpus::all().unwrap().into_iter().find(|test| test.name == name).unwrap()
}

/// Returns exit code and lines of a file on this many vCPUs.
fn run(file: Vec<u8>, vcpus: u32, arguments: &[&str]) -> (u32, Vec<String>) {
    let output = Output::default();
    let builder = PayloadVm::builder("litmus", file).vcpus(vcpus).memory(64 << 20);
    let mut vm = builder.arguments(arguments.iter().copied()).console(output.clone()).build().unwrap();
    vm.start().unwrap();
    let code = vm.wait_for(HANG_LIMIT).unwrap();
    let text = output.text();
    (code.unwrap_or_else(|| panic!("It still runs: {text}")), text.lines().map(str::to_owned).collect())
}

/// Returns the outcomes of one test with their numbers, and the number of runs.
fn seen(program: &[u8], test: &Test, placement: Placement, arguments: &[&str]) -> (Vec<(Outcome, u64)>, u64) {
    let vcpus = u32::try_from(test.threads.len()).unwrap();
    let (code, lines) = run(fill(program, &[Variant { test, placement }]).unwrap(), vcpus, arguments);
    assert_eq!((code, lines.len()), (0, 1), "{lines:?}");
    let line: Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!((line["test"].as_str(), line["lost"].as_u64()), (Some(test.name.as_str()), Some(0)));
    let numbers =
        |values: &Value| values.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect();
    let outcomes = line["outcomes"].as_array().unwrap();
    let outcomes: Vec<(Outcome, u64)> =
        outcomes.iter().map(|entry| (numbers(&entry[0]), entry[1].as_u64().unwrap())).collect();
    let iterations = line["iterations"].as_u64().unwrap();
    assert_eq!(outcomes.iter().map(|(_, count)| count).sum::<u64>(), iterations);
    (outcomes, iterations)
}

/// Returns whether all observed outcomes are allowed.
fn all_allowed(variant: &Variant<'_>, seen: &[(Outcome, u64)]) -> bool {
    let allowed = outcomes(variant.test, Order::Tso, variant.memory());
    seen.iter().all(|(outcome, _)| allowed.contains(outcome))
}

/// Two, three and four threads, every placement, all kinds of instructions: no forbidden outcome.
#[test]
fn nothing_forbidden_is_seen() {
    let Some(program) = program("nothing_forbidden_is_seen") else { return };
    for (name, placement) in [
        ("SB+mfences", Placement::Pages),
        ("MP64", Placement::Cross),
        ("n6", Placement::Page),
        ("cmpxchgs", Placement::Line),
        ("xadds", Placement::Line),
        ("bits", Placement::Line),
        ("SB+mixed", Placement::Pages),
        ("WRC+locked", Placement::Pages),
        ("IRIW", Placement::Pages),
        ("4.xadds", Placement::Line),
        ("wide-IRIW", Placement::Cross),
    ] {
        let test = named(name);
        let meeting = if test.threads.len() > 2 { "meeting=round" } else { "meeting=each" };
        let (seen, iterations) = seen(&program, &test, placement, &["iterations=20K", "round=1K", meeting]);
        assert_eq!(iterations, 20 << 10);
        assert!(all_allowed(&Variant { test: &test, placement }, &seen), "{name}: {seen:?}");
    }
}

/// The runner makes threads meet: the processor's store buffers show. It would also detect a broken fence: without the fences in the
/// code, the outcomes violate the model of the test with fences. For that two vCPUs must run in parallel, which a shared machine
/// doesn't guarantee.
#[test]
#[ignore = "depends on two vCPUs running at the same time; run by hand with --ignored"]
fn weak_outcomes_are_seen_and_missing_fences_are_found() {
    let test = "weak_outcomes_are_seen_and_missing_fences_are_found";
    let Some(program) = program(test) else { return };
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return facilities::missing(
            facilities::Facility::TwoProcessors,
            "threads never run at the same time",
        );
    }
    let whole = named("SB+mfences");
    let mut broken = whole.clone();
    broken
        .threads
        .iter_mut()
        .for_each(|thread| thread.retain(|instruction| *instruction != Instruction::Fence));
    // A busy machine may keep the two from running in parallel for a while.
    let placement = Placement::Pages;
    let found = (0..20).any(|_| {
        let (seen, _) = seen(&program, &broken, placement, &["iterations=20K", "round=1K"]);
        assert!(all_allowed(&Variant { test: &broken, placement }, &seen), "{seen:?}");
        !all_allowed(&Variant { test: &whole, placement }, &seen)
    });
    assert!(found, "In 400,000 runs, stores were never seen late");
}

/// A file without tests, too few vCPUs and unknown arguments are each refused with a sentence.
#[test]
fn nonsense_is_refused_in_one_sentence() {
    let Some(program) = program("nonsense_is_refused_in_one_sentence") else { return };
    let test = named("wide-IRIW");
    let filled = fill(&program, &[Variant { test: &test, placement: Placement::Cross }]).unwrap();
    for (file, vcpus, argument, words) in [
        (&program, 1, "iterations=1", "has no tests in it"),
        (&filled, 2, "iterations=1", "needs from 4 to 254 vCPUs, and this VM has 2"),
        (&filled, 4, "iterations=0", "iterations=0 is not possible"),
        (&filled, 4, "round=64K", "choose a smaller problem"),
    ] {
        let (code, lines) = run(file.clone(), vcpus, &[argument]);
        assert_eq!((code, lines.len()), (2, 1), "{lines:?}");
        assert!(lines[0].contains(words), "{lines:?}");
    }
    let error = fill(b"no program", &[]).unwrap_err().to_string();
    assert!(error.contains("has 0 tables"), "{error}");
}
