use super::*;
use anyhow::{Context, anyhow};
use std::time::Duration;

const STALL: &str = "[ 1033.162274] watchdog: BUG: soft lockup - CPU#0 stuck for 134s! [vcpu0:618]";

fn host() -> HostState {
    HostState {
        name: "h1".into(),
        answers: true,
        emulator_killed: false,
        own_fault: None,
        console: Vec::new(),
        console_in_step: Vec::new(),
    }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

fn stalled() -> HostState {
    HostState { console: lines(STALL), console_in_step: lines(STALL), ..host() }
}

fn dead() -> HostState {
    HostState { answers: false, ..host() }
}

fn expired() -> anyhow::Error {
    Err::<(), _>(Unfinished::expired(Duration::from_secs(1), "no line came")).context("step").unwrap_err()
}

fn kind(error: &anyhow::Error, hosts: &[HostState]) -> Option<EmulatorFault> {
    found(error, hosts, false).map(|(fault, _)| fault)
}

fn never_up(console: &str) -> anyhow::Error {
    NeverUp::new("Host h1 didn't take commands", console).into()
}

#[test]
fn a_host_that_never_came_up_is_excused() {
    for console in ["", "[ 21.1] rcu: \tPossible timer handling issue on cpu=1 timer-softirq=10\n", STALL] {
        assert_eq!(found_in_boot(&never_up(console)).unwrap().0, EmulatorFault::HostNeverUp);
    }
}

#[test]
fn a_host_whose_boot_failed_otherwise_is_not_excused() {
    for console in [
        "[ 1.0] Kernel panic - not syncing: Attempted to kill init!\n",
        "[ 1.0] Out of memory: Killed process 61 (lab)\n",
        "thread 'main' panicked at testing/lab/src/agent.rs:1:2:\n",
    ] {
        assert!(found_in_boot(&never_up(console)).is_none(), "{console}");
    }
    assert!(found_in_boot(&anyhow!("Host h1 didn't boot: the emulator ended with 1")).is_none());
}

#[test]
fn a_silent_host_is_excused() {
    assert_eq!(kind(&expired(), &[host(), dead()]), Some(EmulatorFault::HostSilent));
    let gone = Unfinished::host_gone("The channel is closed").into();
    assert_eq!(kind(&gone, &[dead()]), Some(EmulatorFault::HostSilent));
}

#[test]
fn a_dead_host_that_may_have_died_of_ours_is_not_excused() {
    for console in [
        "[ 31.1] Out of memory: Killed process 618 (causeway)",
        "[ 31.1] causeway invoked oom-killer: gfp_mask=0x140cca",
        "[ 31.1] oom-kill:constraint=CONSTRAINT_NONE",
        "[ 31.1] Kernel panic - not syncing: Fatal exception",
        "[ 31.1] BUG: kernel NULL pointer dereference, address: 0",
    ] {
        let host = HostState { console: lines(console), ..dead() };
        assert_eq!(kind(&expired(), &[host]), None, "{console}");
    }
    assert_eq!(kind(&expired(), &[HostState { emulator_killed: true, ..dead() }]), None);
    let panicked = Some("thread 'x' panicked at a.rs:1:1:".to_owned());
    assert_eq!(kind(&expired(), &[dead(), HostState { own_fault: panicked, ..host() }]), None);
}

/// As in `vpio-attacks`, where a card writes to any reachable memory.
#[test]
fn a_host_that_a_card_may_have_damaged_is_not_excused() {
    assert!(found(&expired(), &[dead()], true).is_none());
    assert!(found(&expired(), &[stalled()], true).is_none());
    let topology = |name: &str| {
        let scenario = crate::scenario::find(name).unwrap();
        (scenario.topology)(&crate::scenario::Options::default())
    };
    for name in ["vpio-attacks", "vpio-nics", "vpio-recovery", "vpio-handoff"] {
        assert!(hosts_can_be_damaged(&topology(name)), "{name}");
    }
    assert!(!hosts_can_be_damaged(&topology("boot")) && !hosts_can_be_damaged(&topology("migrate-mpi")));
}

#[test]
fn a_stall_within_the_step_is_excused() {
    assert_eq!(kind(&expired(), &[host(), stalled()]), Some(EmulatorFault::HostCpuStall));
    assert_eq!(
        kind(&expired(), &[HostState { answers: false, ..stalled() }]),
        Some(EmulatorFault::HostCpuStall)
    );
    let timer = lines("[   21.1] rcu: \tPossible timer handling issue on cpu=1 timer-softirq=10");
    assert!(cpu_stall(&timer).is_some());
}

#[test]
fn a_stall_before_the_step_and_other_complaints_are_not_excused() {
    assert_eq!(kind(&expired(), &[HostState { console: lines(STALL), ..host() }]), None);
    for line in [
        "[   21.1] rcu: INFO: rcu_preempt self-detected stall on CPU",
        "[   21.1] rcu: rcu_preempt kthread starved for 5251 jiffies!",
        "[  870.1] kvm [609]: vcpu0, guest rIP: 0xffffffffa669d458 Unhandled WRMSR(0xc0010007) = 0xffff",
    ] {
        assert_eq!(cpu_stall(&lines(line)), None, "{line}");
    }
}

#[test]
fn wrong_data_is_never_excused() {
    let wrong = anyhow!("md finds 8 sectors whose parity is wrong");
    let status = anyhow!("The command ended with status 101");
    for error in [wrong, status] {
        for host in [stalled(), dead()] {
            assert_eq!(kind(&error, &[host]), None, "{error}");
        }
    }
    // A time-out with a panic in the output until then.
    let text = "\"causeway run\" didn't end within 60 s; it wrote:\nthread 'x' panicked at a.rs:1:1:";
    let error = Unfinished::expired(Duration::from_secs(60), text).into();
    assert_eq!(kind(&error, &[stalled()]), None);
}

#[test]
fn a_timeout_without_a_signature_is_not_excused() {
    assert_eq!(kind(&expired(), &[host()]), None);
}

#[test]
fn one_fault_is_excused_per_run() {
    let mut excuses = Excuses::default();
    assert_eq!(excuses.by_kind()["host_silent"], 0);
    assert!(excuses.excuse("net", EmulatorFault::HostSilent, "x"));
    assert!(!excuses.excuse("net", EmulatorFault::HostCpuStall, "x"));
    assert_eq!((excuses.total(), excuses.by_kind()["host_silent"].clone()), (1, 1.into()));
    assert_eq!(excuses.by_kind()["host_cpu_stall"], 0);
}

#[test]
fn each_excuse_is_appended_to_the_callers_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("excuses");
    for scenario in ["net", "boot"] {
        let mut excuses = Excuses { faults: Vec::new(), file: Some(file.clone()) };
        assert!(excuses.excuse(scenario, EmulatorFault::HostCpuStall, "a \"line\""));
        assert!(!excuses.excuse(scenario, EmulatorFault::HostCpuStall, "another"));
    }
    let text = std::fs::read_to_string(file).unwrap();
    let entries: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[1], json!({"scenario": "boot", "fault": "host_cpu_stall", "line": "a \"line\""}));
    let mut excuses = Excuses { faults: Vec::new(), file: Some(dir.path().join("none/excuses")) };
    assert!(!excuses.excuse("net", EmulatorFault::HostCpuStall, "x"));
    assert_eq!(excuses.total(), 0);
}
