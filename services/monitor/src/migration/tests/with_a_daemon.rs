//! A VM with served devices: the daemon determines when it stops and where it runs, whatever happens on the streams.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use control_api::host::HostError;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, ClaimVm};

use super::super::daemon::{DecisionWait, MigrationOutcome};
use super::*;

/// The daemon's answers, one per step; the last one repeats.
type Answers = Vec<Result<(State, &'static str), &'static str>>;

pub(super) fn daemon(answers: Answers) -> (Daemon, Arc<Mutex<Vec<Step>>>) {
    let steps_sent = Arc::new(Mutex::new(Vec::new()));
    let (recorded, next) = (Arc::clone(&steps_sent), AtomicUsize::new(0));
    let daemon = Daemon::with_answers(move |step: &Step| {
        if matches!(step, Step::Look(_)) {
            // Only a slow machine sends this step while so little is copied.
            return Ok((State::Copy, String::new()));
        }
        recorded.lock().unwrap().push(step.clone());
        let at = next.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1);
        match answers[at] {
            Ok((state, reason)) => Ok((state, reason.to_owned())),
            Err(reason) => Err(HostError::Refused { reason: reason.to_owned() }),
        }
    });
    (daemon, steps_sent)
}

/// Received pieces of devices' state: number and bytes.
type ReceivedState = Vec<(u32, Vec<u8>)>;

/// Devices of the destination that record what they receive.
#[derive(Default)]
struct Recorder(Mutex<ReceivedState>);

impl DestinationDevices for Recorder {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(Some("h2".to_owned()))
    }
    fn receive_state(&self, number: u32, data: &[u8]) -> Result<(), MigrationError> {
        self.0.lock().unwrap().push((number, data.to_vec()));
        Ok(())
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn disks(&self) -> &[DiskContent] {
        &[]
    }
}

/// A migration with such a daemon; the destination only receives. Returns the result, the machine, and what was received.
fn go(answers: Answers) -> (Result<MigrationTimeline, MigrationError>, StandIn, ReceivedState, Vec<Step>) {
    go_with(answers, &[])
}

/// As [`go`], in a group.
fn go_with(
    answers: Answers,
    others: &[&str],
) -> (Result<MigrationTimeline, MigrationError>, StandIn, ReceivedState, Vec<Step>) {
    let (scripted, steps_sent) = daemon(answers);
    let mut machine = StandIn::new(vec![vec![5], vec![6, 7]]);
    machine.daemon = Some(scripted);
    machine.devices =
        Mutex::new(vec![vec![b"last".to_vec(), vec![3; 2 << 20]], vec![b"first".to_vec(), Vec::new()]]);
    let (to, recorder) = (ram(MIB), Recorder::default());
    let (a, b, _) = wires(2, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let here = std::thread::scope(|scope| {
        let destination_thread = scope.spawn(|| {
            let theirs = Stop::default();
            let taken = Streams::over(b, None, &theirs)
                .and_then(|streams| streams.receive(&shape(), &to.memory(), &recorder, &theirs));
            if let Ok((mut incoming, _)) = taken {
                // The destination's own daemon decides the rest.
                let _ = incoming.restored();
            }
        });
        let together = others.iter().map(|other| (*other).to_owned()).collect();
        let requested = MigrationRequest { together, ..request(1000, 0) };
        let here = migrate(&machine, a, &requested, &reporter, &stop);
        destination_thread.join().unwrap();
        here
    });
    let steps = steps_sent.lock().unwrap().clone();
    (here, machine, recorder.0.into_inner().unwrap(), steps)
}

/// The source ends when its daemon reports that the VM has migrated, and not before. Devices' state is received completely and in order.
#[test]
fn the_daemons_decision_ends_the_source() {
    let (here, machine, received, steps) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Pending, "")),
        Ok((State::Stop, "")),
        Ok((State::Stop, "")),
        Ok((State::Pending, "")),
        Ok((State::Moved, "")),
    ]);
    here.unwrap();
    assert_ne!(machine.run_state.load(Ordering::SeqCst), 0, "it stands still here");
    let expected = [
        Step::Begin("h2".to_owned()),
        Step::Converged(true),
        Step::Converged(true),
        Step::Stopped(true),
        Step::Wait(true),
        Step::Wait(true),
    ];
    assert_eq!(steps, expected);
    let of = |number| {
        received
            .iter()
            .filter(|(at, _)| *at == number)
            .flat_map(|(_, data)| data.clone())
            .collect::<Vec<u8>>()
    };
    assert_eq!(of(0), b"firstlast");
    assert_eq!(of(1), vec![3; 2 << 20]);
}

/// In a group the monitor waits until all VMs have begun, copies, and copies again while others aren't ready. The destination has all
/// writes in the end.
#[test]
fn a_vm_of_a_group_waits_for_the_others() {
    let (here, machine, received, steps) = go_with(
        vec![
            Ok((State::Pending, "waits for VM b of its group")),
            Ok((State::Pending, "waits for VM b of its group")),
            Ok((State::Copy, "")),
            Ok((State::Copy, "")),
            Ok((State::Stop, "")),
            Ok((State::Stop, "")),
            Ok((State::Moved, "")),
        ],
        &["a", "b"],
    );
    let timeline = here.unwrap();
    assert_eq!(
        timeline.rounds.iter().filter(|round| !round.stopped).count(),
        2,
        "copied again while it waited"
    );
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 1, "it stands still here");
    let vms = vec!["a".to_owned(), "b".to_owned()];
    let Some(Step::BeginTogether(BeginTogether { attempt, .. })) = steps.first().cloned() else {
        panic!("{steps:?}")
    };
    let ask = Step::BeginTogether(BeginTogether { host: "h2".to_owned(), vms, attempt });
    let rest = [Step::Converged(true), Step::Converged(true), Step::Stopped(true), Step::Wait(true)];
    assert_eq!(steps, [vec![ask; 3], rest.to_vec()].concat());
    let of = |number| {
        received
            .iter()
            .filter(|(at, _)| *at == number)
            .flat_map(|(_, data)| data.clone())
            .collect::<Vec<u8>>()
    };
    assert_eq!((of(0), of(1)), (b"firstlast".to_vec(), vec![3; 2 << 20]));
}

/// A peer migrates first: the user sees which one, memory is copied meanwhile, and the guest is stopped afterwards. A cancel ends the
/// wait.
#[test]
fn a_vm_waits_until_its_peer_has_migrated() {
    let waits_for = Arc::new(Mutex::new(Vec::new()));
    let go = |cancels: bool| {
        let reporter = Arc::new(ProgressReporter::default());
        let stop = reporter.begin("there", None).unwrap();
        let (seen, requested) = (Arc::clone(&waits_for), AtomicUsize::new(0));
        let polled = Arc::clone(&reporter);
        let scripted = Daemon::with_answers(move |step: &Step| match step {
            Step::Begin(_) | Step::Look(_) => Ok((State::Copy, String::new())),
            Step::Converged(_) => {
                seen.lock().unwrap().push(polled.progress().unwrap().waits_for);
                match requested.fetch_add(1, Ordering::SeqCst) {
                    0 | 1 => Ok((State::Copy, "b".to_owned())),
                    2 if cancels => {
                        polled.cancel().unwrap();
                        Ok((State::Copy, "b".to_owned()))
                    }
                    _ => Ok((State::Stop, String::new())),
                }
            }
            Step::Broken(_) => Ok((State::Stays, "it was cancelled".to_owned())),
            _ => Ok((State::Moved, String::new())),
        });
        let mut machine = StandIn::new(vec![vec![5], vec![6, 7]]);
        machine.daemon = Some(scripted);
        let (to, recorder) = (ram(MIB), Recorder::default());
        let (a, b, _) = wires(2, u64::MAX);
        let here = std::thread::scope(|scope| {
            scope.spawn(|| {
                let theirs = Stop::default();
                let taken = Streams::over(b, None, &theirs)
                    .and_then(|streams| streams.receive(&shape(), &to.memory(), &recorder, &theirs));
                if let Ok((mut incoming, _)) = taken {
                    let _ = incoming.restored();
                }
            });
            migrate(&machine, a, &request(1000, 0), &reporter, &stop)
        });
        (here, machine, reporter.progress().unwrap().waits_for)
    };
    let (here, _, left) = go(false);
    let copied = here.unwrap().rounds.iter().filter(|round| !round.stopped).count();
    assert_eq!((copied, left), (3, None), "copied again, twice, while it waited");
    let b = || Some("b".to_owned());
    assert_eq!(std::mem::take(&mut *waits_for.lock().unwrap()), [None, b(), b()]);
    let (here, machine, left) = go(true);
    assert!(matches!(here, Err(MigrationError::Cancelled)), "{here:?}");
    assert_eq!((machine.stops.load(Ordering::SeqCst), left), (0, None), "its guest has never stopped");
}

/// A refused group: the guest is never stopped, and nothing was copied.
#[test]
fn a_refused_group_stops_no_guest() {
    let (here, machine, received, _) = go_with(vec![Err("The cluster has no VM nobody")], &["a", "nobody"]);
    assert!(super::super::error::line(&here.unwrap_err()).contains("no VM nobody"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    assert!(received.is_empty());
}

/// Refused, or aborted before the stop: the guest is never stopped, and dirty logging is off.
#[test]
fn an_abort_before_the_stop_never_stops_the_guest() {
    let (here, machine, _, _) = go(vec![Err("QP 7 is connected by transport wire")]);
    assert!(super::super::error::line(&here.unwrap_err()).contains("QP 7"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    let (here, machine, _, steps) = go(vec![Ok((State::Copy, "")), Ok((State::Stays, "a peer was silent"))]);
    assert!(here.unwrap_err().to_string().contains("a peer was silent"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(steps.last(), Some(&Step::Broken(true)));
}

/// A destination whose devices receive nothing for now, so that the streams' buffers fill.
struct Stalled(Mutex<()>);

impl DestinationDevices for Stalled {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(Some("h2".to_owned()))
    }
    fn receive_state(&self, _: u32, _: &[u8]) -> Result<(), MigrationError> {
        drop(self.0.lock().unwrap());
        Ok(())
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    fn disks(&self) -> &[DiskContent] {
        &[]
    }
}

/// Another host aborts the migration while memory is copied: the source learns of it at once, and not when little is left.
#[test]
fn an_abort_while_memory_is_copied_reaches_the_source_at_once() {
    let polls = Arc::new(AtomicUsize::new(0));
    let polled = Arc::clone(&polls);
    let scripted = Daemon::with_answers(move |step: &Step| match step {
        Step::Begin(_) => Ok((State::Copy, String::new())),
        Step::Look(_) if polled.fetch_add(1, Ordering::SeqCst) == 0 => Ok((State::Copy, String::new())),
        Step::Look(_) | Step::Broken(_) => Ok((State::Stays, "host h3 was silent".to_owned())),
        other => panic!("{other:?}"),
    });
    let mut machine = StandIn::new(vec![vec![5]]);
    machine.daemon = Some(scripted);
    machine.devices = Mutex::new(vec![Vec::new(), vec![vec![3; 8 << 20]]]);
    let (to, stalled) = (ram(MIB), Stalled(Mutex::new(())));
    let (a, b, _) = wires(1, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let here = std::thread::scope(|scope| {
        let stalled_lock = stalled.0.lock().unwrap();
        scope.spawn(|| {
            let theirs = Stop::default();
            let taken = Streams::over(b, None, &theirs)
                .and_then(|streams| streams.receive(&shape(), &to.memory(), &stalled, &theirs));
            assert!(taken.is_err());
        });
        let here = migrate(&machine, a, &request(1000, 0), &reporter, &stop);
        drop(stalled_lock);
        here
    });
    let error = here.unwrap_err();
    assert!(matches!(error, MigrationError::Aborted(_)), "{error:?}");
    assert!(error.to_string().contains("host h3 was silent"), "{error}");
    assert_eq!(polls.load(Ordering::SeqCst), 2);
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
}

/// Aborted when everything was sent: the source resumes the guest.
#[test]
fn an_abort_after_the_stop_resumes_the_guest() {
    let (here, machine, _, _) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Stop, "")),
        Ok((State::Stop, "")),
        Ok((State::Stays, "it took too long")),
    ]);
    assert!(here.unwrap_err().to_string().contains("it took too long"));
    assert_eq!((machine.run_state.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
}

/// A daemon that doesn't know the decision for any time: the guest stays stopped, in doubt, and the monitor repeats its request until the
/// daemon knows.
#[test]
fn a_guest_in_doubt_stays_stopped_until_the_decision_is_known() {
    let ask = |last: &[Result<(State, &'static str), &'static str>]| {
        let mut answers = vec![Ok((State::Copy, "")), Ok((State::Stop, "")), Ok((State::Stop, ""))];
        // In turn, the daemon can't be reached, was restarted, and can't reach the service.
        for _ in 0..50 {
            answers.extend([Err("no such VM"), Ok((State::Pending, "the cluster service can't be asked"))]);
            answers.extend([Ok((State::Unknown, "")), Ok((State::Pending, "it hasn't decided"))]);
        }
        answers.extend_from_slice(last);
        go(answers)
    };
    let (here, machine, _, steps) = ask(&[Ok((State::Moved, ""))]);
    here.unwrap();
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 2, "it was in doubt, and has never run here since");
    assert_eq!(machine.doubts.load(Ordering::SeqCst), 1);
    let claims = steps.iter().filter(|step| matches!(step, Step::Claim(ClaimVm { epoch: 3, keeps: true })));
    assert!(claims.count() >= 90, "the service is asked in the epoch that the daemon said");
    let (here, machine, ..) = ask(&[Ok((State::Stays, "it took too long"))]);
    assert!(here.unwrap_err().to_string().contains("it took too long"));
    assert_eq!((machine.run_state.load(Ordering::SeqCst), machine.doubts.load(Ordering::SeqCst)), (0, 1));
}

/// A restarted daemon that doesn't know the migration is no decision. The service reports that the VM has migrated, or that this host
/// still has it.
#[test]
fn a_restarted_daemon_decides_nothing() {
    let stopped = vec![Ok((State::Copy, "")), Ok((State::Stop, "")), Ok((State::Stop, ""))];
    let forgotten = |claimed| {
        let unknown = Ok((State::Unknown, "this host's daemon knows of no migration of it"));
        [stopped.clone(), vec![unknown, Ok(claimed)]].concat()
    };
    let (here, machine, _, steps) = go(forgotten((State::Moved, "host h2 has it, in epoch 4")));
    here.unwrap();
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 1, "it stands still here");
    assert_eq!(steps.last(), Some(&Step::Claim(ClaimVm { epoch: 3, keeps: true })));
    let (here, machine, ..) = go(forgotten((State::Runs, "")));
    assert!(matches!(here, Err(MigrationError::Aborted(_))));
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 0, "the guest runs at its source");
}

/// This side fails after the stop, and the coordinator had committed: the VM has migrated.
#[test]
fn a_source_that_fails_after_the_decision_has_moved() {
    let (here, machine, ..) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Stop, "")),
        Err("the daemon was started again"),
        Ok((State::Moved, "")),
    ]);
    here.unwrap();
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 1, "it stands still here");
}

/// The user resumes a guest in doubt: the monitor no longer asks for the decision.
#[test]
fn a_resumed_guest_in_doubt_ends_the_wait() {
    let requested = Arc::new(AtomicUsize::new(0));
    let (counted, run_state) = (Arc::clone(&requested), Arc::new(AtomicU32::new(1)));
    let daemon = Daemon::with_answers(move |_: &Step| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok((State::Pending, String::new()))
    });
    let (doubt, resumed) = (Arc::clone(&run_state), Arc::clone(&run_state));
    let on_doubt = move |_: &str| doubt.store(0, Ordering::SeqCst);
    let is_over = move || resumed.load(Ordering::SeqCst) == 0;
    let outcome = daemon.await_decision(&DecisionWait { on_doubt: &on_doubt, is_over: &is_over });
    assert!(matches!(outcome, Err(MigrationError::WaitEnded)), "{outcome:?}");
    assert!(requested.load(Ordering::SeqCst) <= 2);
}

/// A destination that has voted waits for the decision without a time limit, and runs the guest after a commit. It doesn't trust a
/// restarted daemon, and asks the service. The answer is that the migration was aborted, or that this host has the VM and its devices are
/// lost.
#[test]
fn a_vote_is_not_revoked() {
    let vote = |answers: Answers| {
        let (daemon, steps_sent) = daemon(answers);
        let doubts = AtomicU32::new(0);
        let on_doubt = |_: &str| {
            doubts.fetch_add(1, Ordering::SeqCst);
        };
        daemon.register().unwrap();
        let outcome = daemon.vote(&DecisionWait { on_doubt: &on_doubt, is_over: &|| false });
        (outcome, doubts.into_inner(), steps_sent.lock().unwrap().clone())
    };
    let silence = |last: &[Result<(State, &'static str), &'static str>]| {
        let away = [Ok((State::Pending, "")), Err("nobody answers")];
        [std::iter::repeat_n(away, 100).flatten().collect(), last.to_vec()].concat()
    };
    let (outcome, doubts, _) = vote(silence(&[Ok((State::Runs, ""))]));
    assert_eq!((outcome.unwrap(), doubts), (MigrationOutcome::RunsHere, 1));
    let forgotten = |claimed| silence(&[Ok((State::Unknown, "")), Ok(claimed)]);
    let (outcome, _, steps) = vote(forgotten((State::Moved, "host h1 has it, in epoch 2")));
    assert_eq!(outcome.unwrap(), MigrationOutcome::Aborted("host h1 has it, in epoch 2".to_owned()));
    assert_eq!(steps.last(), Some(&Step::Claim(ClaimVm { epoch: 3, keeps: false })));
    let (outcome, ..) = vote(forgotten((State::Runs, "")));
    assert!(outcome.unwrap_err().to_string().contains("RDMA NICs don't work"));
}
