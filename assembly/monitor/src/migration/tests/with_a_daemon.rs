//! A VM with served devices: a daemon says when it stops and where it runs, whatever the streams do.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use control_api::host::HostError;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, ClaimVm};

use super::super::served::{Verdict, Waits};
use super::*;

/// What a daemon was told, and what it answers, one after the other; the last answer stays.
type Answers = Vec<Result<(State, &'static str), &'static str>>;

pub(super) fn daemon(answers: Answers) -> (Daemon, Arc<Mutex<Vec<Step>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (told, next) = (Arc::clone(&heard), AtomicUsize::new(0));
    let daemon = Daemon::answering(move |step: &Step| {
        if matches!(step, Step::Look(_)) {
            // Only a slow machine asks this while so little is copied.
            return Ok((State::Copy, String::new()));
        }
        told.lock().unwrap().push(step.clone());
        let at = next.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1);
        match answers[at] {
            Ok((state, reason)) => Ok((state, reason.to_owned())),
            Err(reason) => Err(HostError::Refused { reason: reason.to_owned() }),
        }
    });
    (daemon, heard)
}

/// Pieces of devices' state, as they came: number and bytes.
type Came = Vec<(u32, Vec<u8>)>;

/// The destination's devices note what comes.
#[derive(Default)]
struct Noting(Mutex<Came>);

impl Devices for Noting {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(Some("h2".to_owned()))
    }
    fn take(&self, number: u32, data: &[u8]) -> Result<(), MigrationError> {
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

/// A move with such a daemon; the destination only takes what comes. What the guest's life is afterwards, and what came.
fn go(answers: Answers) -> (Result<MigrationTimeline, MigrationError>, StandIn, Came, Vec<Step>) {
    go_with(answers, &[])
}

/// As [`go`], together with others.
fn go_with(
    answers: Answers,
    others: &[&str],
) -> (Result<MigrationTimeline, MigrationError>, StandIn, Came, Vec<Step>) {
    let (said, heard) = daemon(answers);
    let mut machine = StandIn::new(vec![vec![5], vec![6, 7]]);
    machine.daemon = Some(said);
    machine.devices =
        Mutex::new(vec![vec![b"last".to_vec(), vec![3; 2 << 20]], vec![b"first".to_vec(), Vec::new()]]);
    let (to, noting) = (ram(MIB), Noting::default());
    let (a, b, _) = wires(2, u64::MAX);
    let watch = Watch::default();
    let stop = watch.begin("there", None).unwrap();
    let here = std::thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            let theirs = Stop::default();
            let taken = Streams::over(b, None, &theirs)
                .and_then(|streams| streams.take(&shape(), &to.memory(), &noting, &theirs));
            if let Ok((mut landing, _)) = taken {
                // Its own daemon tells it the rest.
                let _ = landing.restored();
            }
        });
        let together = others.iter().map(|other| (*other).to_owned()).collect();
        let asked = MigrationRequest { together, ..request(1000, 0) };
        let here = migrate(&machine, a, &asked, &watch, &stop);
        arriving.join().unwrap();
        here
    });
    let steps = heard.lock().unwrap().clone();
    (here, machine, noting.0.into_inner().unwrap(), steps)
}

/// The source ends when its daemon says that the VM has moved, and not before; devices' state comes whole and in order.
#[test]
fn the_daemon_s_word_ends_the_source() {
    let (here, machine, came, steps) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Pending, "")),
        Ok((State::Stop, "")),
        Ok((State::Stop, "")),
        Ok((State::Pending, "")),
        Ok((State::Moved, "")),
    ]);
    here.unwrap();
    assert_ne!(machine.life.load(Ordering::SeqCst), 0, "it stands still here");
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
        came.iter().filter(|(at, _)| *at == number).flat_map(|(_, data)| data.clone()).collect::<Vec<u8>>()
    };
    assert_eq!(of(0), b"firstlast");
    assert_eq!(of(1), vec![3; 2 << 20]);
}

/// With others it asks until all have, copies, and copies again while others of them aren't ready: all that was written is there in the end.
#[test]
fn a_vm_that_moves_with_others_waits_for_them() {
    let (here, machine, came, steps) = go_with(
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
    assert_eq!(machine.life.load(Ordering::SeqCst), 1, "it stands still here");
    let vms = vec!["a".to_owned(), "b".to_owned()];
    let Some(Step::BeginTogether(BeginTogether { attempt, .. })) = steps.first().cloned() else {
        panic!("{steps:?}")
    };
    let ask = Step::BeginTogether(BeginTogether { host: "h2".to_owned(), vms, attempt });
    let rest = [Step::Converged(true), Step::Converged(true), Step::Stopped(true), Step::Wait(true)];
    assert_eq!(steps, [vec![ask; 3], rest.to_vec()].concat());
    let of = |number| {
        came.iter().filter(|(at, _)| *at == number).flat_map(|(_, data)| data.clone()).collect::<Vec<u8>>()
    };
    assert_eq!((of(0), of(1)), (b"firstlast".to_vec(), vec![3; 2 << 20]));
}

/// A peer moves first: the user sees which one, memory is copied on, and the guest is stopped when it is its turn. A cancel ends the wait.
#[test]
fn a_vm_waits_until_its_peer_has_moved() {
    let waits_for = Arc::new(Mutex::new(Vec::new()));
    let go = |cancels: bool| {
        let watch = Arc::new(Watch::default());
        let stop = watch.begin("there", None).unwrap();
        let (seen, asked) = (Arc::clone(&waits_for), AtomicUsize::new(0));
        let looked = Arc::clone(&watch);
        let said = Daemon::answering(move |step: &Step| match step {
            Step::Begin(_) | Step::Look(_) => Ok((State::Copy, String::new())),
            Step::Converged(_) => {
                seen.lock().unwrap().push(looked.progress().unwrap().waits_for);
                match asked.fetch_add(1, Ordering::SeqCst) {
                    0 | 1 => Ok((State::Copy, "b".to_owned())),
                    2 if cancels => {
                        looked.cancel().unwrap();
                        Ok((State::Copy, "b".to_owned()))
                    }
                    _ => Ok((State::Stop, String::new())),
                }
            }
            Step::Broken(_) => Ok((State::Stays, "it was cancelled".to_owned())),
            _ => Ok((State::Moved, String::new())),
        });
        let mut machine = StandIn::new(vec![vec![5], vec![6, 7]]);
        machine.daemon = Some(said);
        let (to, noting) = (ram(MIB), Noting::default());
        let (a, b, _) = wires(2, u64::MAX);
        let here = std::thread::scope(|scope| {
            scope.spawn(|| {
                let theirs = Stop::default();
                let taken = Streams::over(b, None, &theirs)
                    .and_then(|streams| streams.take(&shape(), &to.memory(), &noting, &theirs));
                if let Ok((mut landing, _)) = taken {
                    let _ = landing.restored();
                }
            });
            migrate(&machine, a, &request(1000, 0), &watch, &stop)
        });
        (here, machine, watch.progress().unwrap().waits_for)
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

/// A group that can't be: the guest never stands still, and nothing was copied.
#[test]
fn a_group_that_is_refused_stops_nobody() {
    let (here, machine, came, _) = go_with(vec![Err("The cluster has no VM nobody")], &["a", "nobody"]);
    assert!(super::super::error::line(&here.unwrap_err()).contains("no VM nobody"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    assert!(came.is_empty());
}

/// Refused, or given up before the stop: the guest never stands still, and the log is off.
#[test]
fn what_is_given_up_before_the_stop_never_stops_the_guest() {
    let (here, machine, _, _) = go(vec![Err("QP 7 is connected by transport wire")]);
    assert!(super::super::error::line(&here.unwrap_err()).contains("QP 7"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    let (here, machine, _, steps) = go(vec![Ok((State::Copy, "")), Ok((State::Stays, "a peer was silent"))]);
    assert!(here.unwrap_err().to_string().contains("a peer was silent"));
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(steps.last(), Some(&Step::Broken(true)));
}

/// A destination whose devices take nothing for the time being, so that the streams fill up.
struct Stalled(Mutex<()>);

impl Devices for Stalled {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(Some("h2".to_owned()))
    }
    fn take(&self, _: u32, _: &[u8]) -> Result<(), MigrationError> {
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

/// Another host gives it up while memory is copied: that is heard of then, and not when little is left.
#[test]
fn what_is_given_up_while_it_is_copied_is_heard_of_at_once() {
    let looks = Arc::new(AtomicUsize::new(0));
    let looked = Arc::clone(&looks);
    let said = Daemon::answering(move |step: &Step| match step {
        Step::Begin(_) => Ok((State::Copy, String::new())),
        Step::Look(_) if looked.fetch_add(1, Ordering::SeqCst) == 0 => Ok((State::Copy, String::new())),
        Step::Look(_) | Step::Broken(_) => Ok((State::Stays, "host h3 was silent".to_owned())),
        other => panic!("{other:?}"),
    });
    let mut machine = StandIn::new(vec![vec![5]]);
    machine.daemon = Some(said);
    machine.devices = Mutex::new(vec![Vec::new(), vec![vec![3; 8 << 20]]]);
    let (to, stalled) = (ram(MIB), Stalled(Mutex::new(())));
    let (a, b, _) = wires(1, u64::MAX);
    let watch = Watch::default();
    let stop = watch.begin("there", None).unwrap();
    let here = std::thread::scope(|scope| {
        let stands = stalled.0.lock().unwrap();
        scope.spawn(|| {
            let theirs = Stop::default();
            let taken = Streams::over(b, None, &theirs)
                .and_then(|streams| streams.take(&shape(), &to.memory(), &stalled, &theirs));
            assert!(taken.is_err());
        });
        let here = migrate(&machine, a, &request(1000, 0), &watch, &stop);
        drop(stands);
        here
    });
    let error = here.unwrap_err();
    assert!(matches!(error, MigrationError::GivenUp(_)), "{error:?}");
    assert!(error.to_string().contains("host h3 was silent"), "{error}");
    assert_eq!(looks.load(Ordering::SeqCst), 2);
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
}

/// Given up when all had been sent: the guest goes on.
#[test]
fn what_is_given_up_after_the_stop_lets_the_guest_go_on() {
    let (here, machine, _, _) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Stop, "")),
        Ok((State::Stop, "")),
        Ok((State::Stays, "it took too long")),
    ]);
    assert!(here.unwrap_err().to_string().contains("it took too long"));
    assert_eq!((machine.life.load(Ordering::SeqCst), machine.logging.load(Ordering::SeqCst)), (0, 0));
}

/// A daemon that can't say how it ended, for however long: the guest stands still, in doubt, and the daemon is asked until it can.
#[test]
fn a_guest_whose_fate_is_unknown_stands_still_until_it_is_known() {
    let ask = |last: &[Result<(State, &'static str), &'static str>]| {
        let mut answers = vec![Ok((State::Copy, "")), Ok((State::Stop, "")), Ok((State::Stop, ""))];
        // The daemon is away, has been started again, and asks a service that is away.
        for _ in 0..50 {
            answers.extend([Err("no such VM"), Ok((State::Pending, "the cluster service can't be asked"))]);
            answers.extend([Ok((State::Unknown, "")), Ok((State::Pending, "it hasn't decided"))]);
        }
        answers.extend_from_slice(last);
        go(answers)
    };
    let (here, machine, _, steps) = ask(&[Ok((State::Moved, ""))]);
    here.unwrap();
    assert_eq!(machine.life.load(Ordering::SeqCst), 2, "it was in doubt, and has never run here since");
    assert_eq!(machine.doubts.load(Ordering::SeqCst), 1);
    let claims = steps.iter().filter(|step| matches!(step, Step::Claim(ClaimVm { epoch: 3, keeps: true })));
    assert!(claims.count() >= 90, "the service is asked in the epoch that the daemon said");
    let (here, machine, ..) = ask(&[Ok((State::Stays, "it took too long"))]);
    assert!(here.unwrap_err().to_string().contains("it took too long"));
    assert_eq!((machine.life.load(Ordering::SeqCst), machine.doubts.load(Ordering::SeqCst)), (0, 1));
}

/// A daemon that was started again knows of no migration: that is no decision. The service says that the VM has moved, or that it is still this host's.
#[test]
fn a_daemon_that_was_started_again_decides_nothing() {
    let stopped = vec![Ok((State::Copy, "")), Ok((State::Stop, "")), Ok((State::Stop, ""))];
    let forgotten = |claimed| {
        let unknown = Ok((State::Unknown, "this host's daemon knows of no migration of it"));
        [stopped.clone(), vec![unknown, Ok(claimed)]].concat()
    };
    let (here, machine, _, steps) = go(forgotten((State::Moved, "host h2 has it, in epoch 4")));
    here.unwrap();
    assert_eq!(machine.life.load(Ordering::SeqCst), 1, "it stands still here");
    assert_eq!(steps.last(), Some(&Step::Claim(ClaimVm { epoch: 3, keeps: true })));
    let (here, machine, ..) = go(forgotten((State::Runs, "")));
    assert!(matches!(here, Err(MigrationError::GivenUp(_))));
    assert_eq!(machine.life.load(Ordering::SeqCst), 0, "it goes on here");
}

/// This side fails after the stop, and it had been decided: the VM has moved.
#[test]
fn a_source_that_fails_after_the_decision_has_moved() {
    let (here, machine, ..) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Stop, "")),
        Err("the daemon was started again"),
        Ok((State::Moved, "")),
    ]);
    here.unwrap();
    assert_eq!(machine.life.load(Ordering::SeqCst), 1, "it stands still here");
}

/// Its user lets a guest in doubt go on: it isn't asked any longer how that ended.
#[test]
fn a_guest_in_doubt_that_is_let_go_on_is_left_alone() {
    let asked = Arc::new(AtomicUsize::new(0));
    let (counted, life) = (Arc::clone(&asked), Arc::new(AtomicU32::new(1)));
    let daemon = Daemon::answering(move |_: &Step| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok((State::Pending, String::new()))
    });
    let (doubt, stands) = (Arc::clone(&life), Arc::clone(&life));
    let doubtful = move |_: &str| doubt.store(0, Ordering::SeqCst);
    let is_over = move || stands.load(Ordering::SeqCst) == 0;
    let verdict = daemon.outcome(&Waits { doubtful: &doubtful, is_over: &is_over });
    assert!(matches!(verdict, Err(MigrationError::NotAwaited)), "{verdict:?}");
    assert!(asked.load(Ordering::SeqCst) <= 2);
}

/// A destination that has voted waits for the decision, however long nothing is heard, and runs the guest when it is heard. It doesn't believe a daemon that was started again,
/// and asks the service, which tells it that it was given up, or that the VM is this host's, whose devices are lost.
#[test]
fn a_vote_is_not_taken_back() {
    let arrived = |answers: Answers| {
        let (daemon, heard) = daemon(answers);
        let doubts = AtomicU32::new(0);
        let doubtful = |_: &str| {
            doubts.fetch_add(1, Ordering::SeqCst);
        };
        daemon.look().unwrap();
        let verdict = daemon.arrived(&Waits { doubtful: &doubtful, is_over: &|| false });
        (verdict, doubts.into_inner(), heard.lock().unwrap().clone())
    };
    let silence = |last: &[Result<(State, &'static str), &'static str>]| {
        let away = [Ok((State::Pending, "")), Err("nobody answers")];
        [std::iter::repeat_n(away, 100).flatten().collect(), last.to_vec()].concat()
    };
    let (verdict, doubts, _) = arrived(silence(&[Ok((State::Runs, ""))]));
    assert_eq!((verdict.unwrap(), doubts), (Verdict::RunsHere, 1));
    let forgotten = |claimed| silence(&[Ok((State::Unknown, "")), Ok(claimed)]);
    let (verdict, _, steps) = arrived(forgotten((State::Moved, "host h1 has it, in epoch 2")));
    assert_eq!(verdict.unwrap(), Verdict::GivenUp("host h1 has it, in epoch 2".to_owned()));
    assert_eq!(steps.last(), Some(&Step::Claim(ClaimVm { epoch: 3, keeps: false })));
    let (verdict, ..) = arrived(forgotten((State::Runs, "")));
    assert!(verdict.unwrap_err().to_string().contains("RDMA NICs don't work"));
}
