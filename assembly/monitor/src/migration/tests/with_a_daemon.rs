//! A VM with served devices: a daemon says when it stops and where it runs, whatever the streams do.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use control_api::host::HostError;
use control_api::host::proto::BeginTogether;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;

use super::*;

/// What a daemon was told, and what it answers, one after the other; the last answer stays.
type Answers = Vec<Result<(State, &'static str), &'static str>>;

fn daemon(answers: Answers) -> (Daemon, Arc<Mutex<Vec<Step>>>) {
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
    assert_eq!(machine.life.load(Ordering::SeqCst), 1, "it stands still here");
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

/// A daemon that can't say how it ended: the guest stands still, in doubt. So it does when the streams break and it had been decided.
#[test]
fn a_guest_whose_fate_is_unknown_stands_still() {
    let (here, machine, _, _) =
        go(vec![Ok((State::Copy, "")), Ok((State::Stop, "")), Ok((State::Stop, "")), Err("no such VM")]);
    assert!(matches!(here, Err(MigrationError::InDoubt(_))));
    assert_eq!(machine.life.load(Ordering::SeqCst), 2);
    let (here, machine, _, _) = go(vec![
        Ok((State::Copy, "")),
        Ok((State::Stop, "")),
        Err("the daemon was started again"),
        Ok((State::Moved, "")),
    ]);
    assert!(matches!(here, Err(MigrationError::InDoubt(_))));
    assert_eq!(machine.life.load(Ordering::SeqCst), 2);
}
