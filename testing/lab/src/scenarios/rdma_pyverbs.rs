//! rdma-core's own Python tests on Causeway's device, each separately, and on rxe in the same guest. A skip that rxe has, too, is
//! caused by Linux or the tests. Other skips need an explanation.

use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Device, Member, Pair, Port};
use crate::scenario::{Options, Report, Scenario};
use crate::scenarios::driver_faults;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-pyverbs",
    about: "rdma-core's own Python tests in a guest, every skip named and compared with those of rxe in the same guest",
    topology: rdma::topology,
    run,
    prompt: Some(rdma::prompt),
};

/// Time-out of one test in seconds.
pub(super) const LIMIT: u64 = 90;
/// Time-out of all tests.
const SUITE_TIMEOUT: Duration = Duration::from_secs(45 * 60);

/// Missing features of PVRDMA's interface: words of a test's name or of its skip's reason, and the feature. A skip without an entry
/// here that rxe doesn't have fails the scenario.
const ABSENT: &[(&str, &str)] = &[
    ("test_uc_", "unreliable connections: the Linux driver refuses them"),
    ("UC QP", "unreliable connections: the Linux driver refuses them"),
    ("XRC", "extended reliable connections: the interface has no such queue pair"),
    ("xrc", "extended reliable connections: the interface has no such queue pair"),
    ("Raw Packet", "raw Ethernet queue pairs: the interface has no such type"),
    ("raw", "raw Ethernet queue pairs: the interface has no such type"),
    ("Memory window", "memory windows: the interface has no command for them"),
    ("MWTest", "memory windows: the interface has no command for them"),
    ("_mw", "memory windows: the interface has no command for them"),
    (
        "ex_",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "extended attrs is not supported",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "Extended QP is not supported",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "QPEX",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "cqex",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "CqEx",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    (
        "CQEX",
        "extended queue pairs and completion queues (ibv_create_qp_ex, ibv_create_cq_ex): the provider has none",
    ),
    ("mcast", "multicast groups: the driver has no attach"),
    ("multicast", "multicast groups: the driver has no attach"),
    ("resize_cq", "resizing completion queues: the driver has no such call"),
    ("rereg", "re-registering memory: the driver has no such call"),
];

/// One test's outcome.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Outcome {
    pub(super) test: String,
    pub(super) verdict: String,
    pub(super) why: String,
}

type Outcomes = BTreeMap<String, Outcome>;

fn parse(text: &str) -> Result<Outcomes> {
    let lines = text.lines().filter_map(|l| l.strip_prefix("PYVERBS "));
    let all = lines.map(|l| {
        serde_json::from_str::<Outcome>(l).with_context(|| format!("The tests' runner printed {l:?}"))
    });
    all.map(|o| o.map(|o| (o.test.clone(), o))).collect()
}

/// Directory of the tests in the guest.
pub(super) const TESTS: &str = "/usr/share/doc/rdma-core/tests";

/// Runs all tests on one device.
fn test(member: &Member<'_>, port: &Port, only: &[String]) -> Result<Outcomes> {
    let words: Vec<String> = only.iter().map(|w| rdma::quoted(w)).collect();
    let script = format!(
        "exec python3 -W ignore /lab/pyverbs-run.py {TESTS} {} {} {LIMIT} {}",
        port.device,
        port.gid,
        words.join(" ")
    );
    let output = member.run(&script, SUITE_TIMEOUT)?;
    if !output.stdout.contains("PYVERBS-END") {
        bail!(
            "rdma-core's tests on {} didn't come to their end (status {}): {}\n{}",
            port.device,
            output.code,
            output.stdout.lines().last().unwrap_or_default(),
            output.stderr.trim()
        );
    }
    parse(&output.stdout)
}

fn count(outcomes: &Outcomes, verdict: &str) -> usize {
    outcomes.values().filter(|o| o.verdict == verdict).count()
}

/// Returns the missing feature that explains a skip.
fn lacking(o: &Outcome) -> Option<&'static str> {
    ABSENT.iter().find(|(word, _)| o.test.contains(word) || o.why.contains(word)).map(|(_, what)| *what)
}

/// Groups skips by their reason.
fn by_reason(outcomes: &Outcomes) -> BTreeMap<&str, Vec<&str>> {
    let mut listed: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for o in outcomes.values().filter(|o| o.verdict == "skipped") {
        listed.entry(&o.why).or_default().push(&o.test);
    }
    listed
}

/// Returns the skips that rxe doesn't have, with the missing feature that explains them, if any.
fn only_here<'a>(outcomes: &'a Outcomes, rxe: &Outcomes) -> Vec<(&'a Outcome, Option<&'static str>)> {
    let there = |o: &Outcome| rxe.get(&o.test).is_none_or(|r| r.verdict == "skipped");
    outcomes.values().filter(|o| o.verdict == "skipped" && !there(o)).map(|o| (o, lacking(o))).collect()
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let pair = Pair::start(lab, options)?;
    let ours = test(&pair.a, &pair.a.port, &options.only)?;
    for o in ours.values().filter(|o| o.verdict == "failed") {
        progress!("FAILED  {}: {}", o.test, o.why);
    }
    let drivers = match pair.device {
        Device::Rxe => Vec::new(),
        Device::Pvrdma => driver_faults::shown(&pair.a, &ours)?,
    };
    for fault in &drivers {
        progress!("{}: {}", fault.test, fault);
    }
    let (passed, skipped) = (count(&ours, "passed"), count(&ours, "skipped"));
    let failed = count(&ours, "failed");
    progress!(
        "{}: {passed} passed, {skipped} skipped, {failed} failed, {} of them shown to fail in the guest's driver or provider",
        pair.device.name(),
        drivers.iter().filter(|f| f.shown).count()
    );
    let reference = match pair.device {
        Device::Rxe => None,
        Device::Pvrdma => {
            let (port, _) = pair.add_rxe()?;
            let rxe = test(&pair.a, &port, &options.only)?;
            progress!(
                "rxe: {} passed, {} skipped, {} failed",
                count(&rxe, "passed"),
                count(&rxe, "skipped"),
                count(&rxe, "failed")
            );
            Some(rxe)
        }
    };
    let named = reference.as_ref().map(|rxe| only_here(&ours, rxe)).unwrap_or_default();
    for (o, what) in &named {
        progress!("skipped here and not on rxe: {}: {} ({})", o.test, o.why, what.unwrap_or("UNEXPLAINED"));
    }
    let unexplained = named.iter().filter(|n| n.1.is_none()).count();
    let listed: Vec<Value> =
        named.iter().map(|(o, what)| json!({"test": o.test, "why": o.why, "lacking": what})).collect();
    report.figure("run", ours.len());
    report.figure("passed", passed);
    report.figure("skipped", skipped);
    report.figure("failed", failed);
    let told: Vec<Value> = drivers.iter().map(driver_faults::Fault::json).collect();
    report.figure("failed_in_the_driver", told);
    report.figure("device", pair.device.name());
    report.figure("skips", json!(by_reason(&ours)));
    report.figure("skips_not_on_rxe", listed);
    report.figure("unexplained_skips", unexplained);
    let broken: Vec<Value> = ours
        .values()
        .filter(|o| o.verdict == "failed")
        .map(|o| {
            let there = reference.as_ref().and_then(|r| r.get(&o.test)).map(|r| r.verdict.clone());
            json!({"test": o.test, "why": o.why, "rxe": there})
        })
        .collect();
    report.figure("failures", broken);
    if let Some(rxe) = &reference {
        report.figure("rxe", json!({"run": rxe.len(), "passed": count(rxe, "passed"), "skipped": count(rxe, "skipped"), "failed": count(rxe, "failed")}));
    }
    report.check(!ours.is_empty(), "no test was run");
    // A test that this run proves to fail in the driver says nothing about the device. The figure still includes it.
    let of_the_device = failed - drivers.iter().filter(|fault| fault.shown).count();
    report.figure("failed_but_for_the_driver", of_the_device);
    report.check(
        of_the_device == 0,
        format!("{failed} of rdma-core's tests failed, {of_the_device} of them not shown to fail in the guest's driver or provider"),
    );
    report.check(
        unexplained == 0,
        format!("{unexplained} tests are skipped here, not on rxe, and not for what the interface lacks"),
    );
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(list: &[(&str, &str, &str)]) -> Outcomes {
        let one = |(t, v, w): &(&str, &str, &str)| {
            ((*t).to_owned(), Outcome { test: (*t).into(), verdict: (*v).into(), why: (*w).into() })
        };
        list.iter().map(one).collect()
    }

    #[test]
    fn the_runners_lines_are_read() {
        let text = "noise\nPYVERBS {\"test\": \"a.b\", \"verdict\": \"skipped\", \"why\": \"x\", \"seconds\": 0.1}\nPYVERBS-END\n";
        assert_eq!(parse(text).unwrap(), outcomes(&[("a.b", "skipped", "x")]));
        assert!(parse("PYVERBS nonsense\n").is_err());
    }

    #[test]
    fn a_skip_must_be_rxes_too_or_named() {
        let ours = outcomes(&[
            ("test_qp.test_a", "skipped", "why"),
            ("test_qp.test_uc_b", "skipped", "Create UC QP is not supported"),
            ("test_qp.test_c", "skipped", "shared"),
            ("test_qp.test_d", "passed", ""),
        ]);
        let rxe = outcomes(&[
            ("test_qp.test_a", "passed", ""),
            ("test_qp.test_uc_b", "passed", ""),
            ("test_qp.test_c", "skipped", "shared"),
        ]);
        let named = only_here(&ours, &rxe);
        let unexplained: Vec<&str> =
            named.iter().filter(|n| n.1.is_none()).map(|n| n.0.test.as_str()).collect();
        assert_eq!((named.len(), unexplained), (2, vec!["test_qp.test_a"]));
        assert_eq!(by_reason(&ours)["shared"], ["test_qp.test_c"]);
    }
}
