//! Post-copy: both sides against each other over real userfaultfd, a source that is lost, a hostile one, and destinations without
//! support. Where this machine has no userfaultfd the tests report that and end.

use std::collections::HashSet;
use std::sync::mpsc;

use machine::memory::postcopy::{PostCopyRam, disable_huge_pages};
use machine::memory::{Userfault, UserfaultError};

use super::*;
use crate::migration::connection::Connection;
use crate::migration::frame::{Kind, Receiver, Sender};
use crate::migration::message::{self, Accepted, End, Hello};
use crate::migration::postcopy::fetching::{Fetching, Report};
use crate::migration::postcopy::message::{Complete, decode_wanted};

pub(super) fn uffd() -> Option<Userfault> {
    match Userfault::for_postcopy() {
        Ok(uffd) => Some(uffd),
        Err(UserfaultError::Open(error)) => {
            facilities::missing(facilities::Facility::Userfaultfd, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A destination that accepts post-copy.
struct PostCopyDevices<'a>(&'a GuestRam, &'a [DiskContent]);

impl DestinationDevices for PostCopyDevices<'_> {
    fn host(&self) -> Result<Option<String>, MigrationError> {
        Ok(None)
    }
    fn receive_state(&self, number: u32, _: &[u8]) -> Result<(), MigrationError> {
        Err(MigrationError::Protocol(format!("state of device {number}")))
    }
    fn post_copy(&self) -> Result<(), MigrationError> {
        disable_huge_pages(self.0.regions()).map_err(MigrationError::machine("prepared"))
    }
    fn disks(&self) -> &[DiskContent] {
        self.1
    }
}

/// The result at the destination: a report, or the lost pages, whether the guest was committed, and the cause.
pub(super) type Lost = Result<Report, (u64, bool, String)>;

/// Receives the VM, runs `guest` on its memory after the commit, and waits for the last page or the loss.
fn postcopy_destination(
    uffd: Userfault,
    to: &GuestRam,
    ends: (Vec<OwnedFd>, Option<ClusterKey>),
    guest: impl FnOnce(&GuestRam),
) -> Result<Lost, MigrationError> {
    postcopy_destination_with(uffd, to, &[], ends, guest)
}

/// The same with disks to fill.
pub(super) fn postcopy_destination_with(
    uffd: Userfault,
    to: &GuestRam,
    disks: &[DiskContent],
    (ends, key): (Vec<OwnedFd>, Option<ClusterKey>),
    guest: impl FnOnce(&GuestRam),
) -> Result<Lost, MigrationError> {
    let stop = Stop::default();
    let streams = Streams::over(ends, key.as_ref(), &stop)?;
    let (mut incoming, state) =
        streams.receive(&shape(), &to.memory(), &PostCopyDevices(to, disks), &stop)?;
    assert_eq!(state, STATE);
    let Some(rest) = incoming.take_remaining() else {
        incoming.ready()?;
        guest(to);
        let _ = incoming.running();
        let waits = crate::migration::postcopy::incoming::WaitStats::default();
        return Ok(Ok(Report { left: 0, waits, zero: 0, dropped: 0, over: true }));
    };
    let ram = PostCopyRam::new(uffd, to.regions().to_vec(), rest.missing.sets()).unwrap();
    let (tell, lost) = mpsc::channel();
    let tell = Mutex::new(tell);
    let on_lost = move |left, committed, error: MigrationError| {
        let _ = tell.lock().unwrap().send((left, committed, crate::migration::error::line(&error)));
    };
    let fetching = Fetching::begin(rest, ram, None, false, Box::new(on_lost))?;
    if let Err(error) = incoming.ready() {
        fetching.abandon();
        return Err(error);
    }
    fetching.commit();
    let _ = incoming.running();
    guest(to);
    loop {
        let report = fetching.report();
        if report.over {
            return Ok(Ok(report));
        }
        if let Ok(lost) = lost.recv_timeout(Duration::from_millis(5)) {
            return Ok(Err(lost));
        }
    }
}

pub(super) fn postcopy_request(after: u32) -> MigrationRequest {
    MigrationRequest { post_copy_after: Some(after), ..request(0, 60) }
}

/// Reads and writes all of RAM from its end on, as a guest would.
pub(super) fn use_all(ram: &GuestRam) {
    for page in (0..1024u64).rev() {
        let at = GuestAddress(page * 4096 + 1024);
        ram.memory().memory().write_obj(page ^ 0x55, at).unwrap();
    }
}

/// Compares contents, apart from the writes of [`use_all`].
pub(super) fn same_but_for_use(from: &GuestRam, to: &GuestRam) -> bool {
    (0..1024u64).for_each(|page| {
        from.memory().memory().write_obj(page ^ 0x55, GuestAddress(page * 4096 + 1024)).unwrap();
    });
    same(from, to)
}

/// A guest with many pages runs before any of them is present, or after rounds that don't converge. It finds all contents, including
/// pages that were sent and then changed. Each missing page is sent once, and writes at the destination aren't overwritten.
#[test]
fn a_guest_runs_before_its_memory_is_present() {
    let many: Vec<Vec<u64>> = vec![(0..900).collect(), (5..700).collect()];
    let few: Vec<Vec<u64>> = vec![vec![0, 1, 2, 3], vec![0, 1], vec![1], vec![2, 900]];
    // Six pages are used at first. Nine hundred after six don't converge, so there is no second round.
    for (after, streams, writes, rounds, missing) in [
        (0, 3, &many, 0, 901),
        (0, 5, &many, 0, 901),
        (1, 3, &many, 1, 900),
        (4, 4, &many, 1, 900),
        (3, 4, &few, 3, 3),
    ] {
        let Some(uffd) = uffd() else { return };
        let machine = StandIn::new(writes.clone());
        let to = ram(MIB);
        let (a, b, _) = wires(streams, u64::MAX);
        let reporter = ProgressReporter::default();
        let stop = reporter.begin("there", None).unwrap();
        let (timeline, report) = std::thread::scope(|scope| {
            // Cases with more than the least number of streams are encrypted.
            let requested =
                if streams > 3 { sealed(postcopy_request(after)) } else { postcopy_request(after) };
            let key = key_of(&requested);
            let to = &to;
            let destination_thread = scope.spawn(move || postcopy_destination(uffd, to, (b, key), use_all));
            let timeline = migrate(&machine, a, &requested, &reporter, &stop).unwrap();
            (timeline, destination_thread.join().unwrap().unwrap().unwrap())
        });
        assert_eq!(machine.run_state.load(Ordering::SeqCst), 1);
        assert!(same_but_for_use(&machine.ram, &to), "after {after} rounds over {streams} streams");
        let post = timeline.post_copy.unwrap();
        assert_eq!((timeline.rounds.len(), post.missing_pages), (rounds, missing));
        assert_eq!(post.asked_pages + post.pushed_pages, post.missing_pages);
        assert_eq!((post.left_pages, report.left, report.dropped), (0, 0, 0));
        assert_eq!(post.faults, report.waits.count);
        assert!(report.waits.count >= post.asked_pages);
        assert!(timeline.bytes >= post.bytes && timeline.total_ms >= post.took_ms);
    }
}

/// A guest that converges is migrated without post-copy, although it was allowed.
#[test]
fn what_converges_needs_no_post_copy() {
    let Some(uffd) = uffd() else { return };
    let machine = StandIn::new(vec![vec![3], vec![4]]);
    let to = ram(MIB);
    let (a, b, _) = wires(3, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let requested = MigrationRequest { downtime_ms: 300, ..postcopy_request(5) };
    let timeline = std::thread::scope(|scope| {
        let destination_thread = scope.spawn(|| postcopy_destination(uffd, &to, (b, None), |_| {}));
        let timeline = migrate(&machine, a, &requested, &reporter, &stop).unwrap();
        destination_thread.join().unwrap().unwrap().unwrap();
        timeline
    });
    assert!(timeline.post_copy.is_none() && same(&machine.ram, &to));
}

/// The streams are cut at many points. Before the destination runs the guest, the source has it. Afterwards both sides report the loss
/// and the number of missing pages, unless all were received. At no point do both run it.
#[test]
fn a_connection_that_is_lost_is_reported_for_what_it_is() {
    let go = |limit: u64| {
        let uffd = uffd()?;
        let machine = StandIn::new(vec![(0..900).collect()]);
        let to = ram(MIB);
        let (a, b, carried) = wires(3, limit);
        let reporter = ProgressReporter::default();
        let stop = reporter.begin("there", None).unwrap();
        let (here, there) = std::thread::scope(|scope| {
            // The guest accesses no page: a thread that waits for a lost page would block forever.
            let destination_thread = scope.spawn(|| postcopy_destination(uffd, &to, (b, None), |_| {}));
            let here = migrate(&machine, a, &postcopy_request(0), &reporter, &stop);
            (here, destination_thread.join().unwrap())
        });
        Some((here, there, machine, carried.load(Ordering::SeqCst)))
    };
    let Some((here, _, _, whole)) = go(u64::MAX) else { return };
    here.unwrap();
    let mut seen = HashSet::new();
    for cut in
        (0..whole).filter(|cut| *cut < 1500 && cut % 23 == 0 || *cut + 100 > whole || cut % 80_021 == 0)
    {
        let Some((here, there, machine, _)) = go(cut) else { return };
        let run_state = machine.run_state.load(Ordering::SeqCst);
        match (here, there) {
            (Err(MigrationError::LostDestination { .. }), Ok(Err((left, committed, error)))) => {
                assert!(
                    run_state == 1 && committed && left > 0 && !error.is_empty(),
                    "cut {cut}: {left} {committed}"
                );
                seen.insert("lost");
            }
            (Err(MigrationError::InDoubt(_)), _) => {
                assert_eq!(run_state, 2);
                seen.insert("doubt");
            }
            // All pages were received, and the cut hit `Complete` or the end of the streams.
            (Err(MigrationError::LostDestination { .. }) | Ok(_), Ok(Ok(report))) => {
                assert_eq!((report.left, run_state), (0, 1), "cut {cut}");
                seen.insert("all");
            }
            (Err(_), Err(_)) => {
                assert_eq!(run_state, 0, "cut {cut}");
                seen.insert("stays");
            }
            (Err(_), Ok(Err((_, committed, _)))) if run_state == 0 => assert!(!committed, "cut {cut}"),
            (here, there) => panic!("cut {cut}: {here:?}, {there:?}, life {run_state}"),
        }
    }
    assert!(seen.contains("stays") && seen.contains("lost"), "{seen:?}");
}

/// Destinations without support: one sends the reason; one of an unsupported version is detected from its answer. The guest isn't
/// disturbed.
#[test]
fn an_incapable_destination_is_detected_before_the_guest_is_stopped() {
    let machine = StandIn::new(vec![]);
    let outcome = super::go(&machine, &shape(), 3, u64::MAX, &postcopy_request(0), Ok(()));
    let error = outcome.here.unwrap_err().to_string();
    assert!(error.contains("refuses") && error.contains("there is no userfaultfd"), "{error}");
    let outcome = super::go(&machine, &shape(), 2, u64::MAX, &postcopy_request(0), Ok(()));
    assert!(outcome.here.unwrap_err().to_string().contains("it takes 3 streams"));

    let (a, b, _) = wires(3, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut control =
                Connection::new(b.into_iter().next().unwrap(), Stop::default(), Duration::from_secs(5));
            let mut receiver = Receiver::new();
            receiver.receive(&mut control).unwrap();
            receiver.receive(&mut control).unwrap();
            let accepted = message::encode(&Accepted { version: 2, host: None }).unwrap();
            Sender::new().send(&mut control, Kind::Accepted, &[&accepted]).unwrap();
            let _ = receiver.receive(&mut control);
        });
        let error = migrate(&machine, a, &postcopy_request(0), &reporter, &stop).unwrap_err().to_string();
        assert!(error.contains("version 2, which was not offered"), "{error}");
    });
    assert_eq!((machine.stops.load(Ordering::SeqCst), machine.run_state.load(Ordering::SeqCst)), (0, 0));
}

/// One side's end of a stream, for a hostile peer.
pub(super) struct Peer {
    connection: Connection,
    sender: Sender,
    receiver: Receiver,
}

impl Peer {
    pub(super) fn over(fd: OwnedFd) -> Self {
        let connection = Connection::new(fd, Stop::default(), Duration::from_secs(5));
        Self { connection, sender: Sender::new(), receiver: Receiver::new() }
    }
    pub(super) fn send(&mut self, kind: Kind, payload: &[u8]) {
        self.sender.send(&mut self.connection, kind, &[payload]).unwrap();
    }
    /// As [`Peer::send`], to a peer that may have disconnected.
    pub(super) fn send_if_heard(&mut self, kind: Kind, payload: &[u8]) {
        let _ = self.sender.send(&mut self.connection, kind, &[payload]);
    }
    pub(super) fn expect(&mut self, wanted: Kind) -> Vec<u8> {
        let (kind, payload) = self.receiver.receive(&mut self.connection).unwrap();
        assert_eq!(kind, wanted, "{}", message::sentence(payload));
        payload.to_vec()
    }
}

fn page_frame(address: u64, byte: u8) -> Vec<u8> {
    let mut frame = address.to_le_bytes().to_vec();
    frame.extend_from_slice(&1u32.to_le_bytes());
    frame.extend_from_slice(&0u32.to_le_bytes());
    frame.resize(16 + 4096, byte);
    frame
}

/// A hostile source: pages that aren't missing, and repeated pages with other contents, are dropped, and the guest's writes stay. A page
/// outside RAM ends the migration as a loss, with the number of missing pages.
#[test]
fn a_hostile_source_cannot_overwrite_the_guest() {
    for hostile in [None, Some(4u64 << 20), Some(u64::MAX - 4095), Some(77)] {
        let Some(uffd) = uffd() else { return };
        let to = ram(MIB);
        let (a, b, _) = wires(3, u64::MAX);
        std::thread::scope(|scope| {
            let read = |page: u64| to.memory().memory().read_obj::<u8>(GuestAddress(page * 4096)).unwrap();
            let (written, wait) = mpsc::channel();
            let to = &to;
            let destination_thread = scope.spawn(move || {
                postcopy_destination(uffd, to, (b, None), move |ram| {
                    // The write waits for page 5; page 6 is never accessed.
                    ram.memory().memory().write_obj(0xEEu8, GuestAddress(5 * 4096 + 9)).unwrap();
                    written.send(()).unwrap();
                })
            });
            let mut ends: Vec<Peer> = a.into_iter().map(Peer::over).collect();
            for (end, stream) in ends.iter_mut().zip(0u16..) {
                let hello = Hello { version: 3, oldest: 2, stream, streams: 3, migration: [9; 16] };
                end.send(Kind::Hello, &hello.encode());
            }
            let [control, requests, push] = &mut ends[..] else { panic!() };
            control.send(Kind::Offer, &message::encode(&shape()).unwrap());
            control.expect(Kind::Accepted);
            control.send(Kind::Postcopy, &[]);
            control.expect(Kind::Accepted);
            // Pages 5 and 6 are missing.
            control.send(Kind::Missing, &[0u64.to_le_bytes(), 0b110_0000u64.to_le_bytes()].concat());
            control.send(Kind::State, STATE);
            let none = message::encode(&End { pages: 0, blackout_us: None }).unwrap();
            control.send(Kind::End, &none);
            requests.send(Kind::End, &none);
            push.send(Kind::End, &none);
            control.expect(Kind::Ready);
            control.send(Kind::Go, &[]);
            control.expect(Kind::Running);
            assert_eq!(decode_wanted(&requests.expect(Kind::Want)).unwrap(), [5 * 4096]);
            push.send(Kind::Pages, &page_frame(100 * 4096, 0xBB));
            requests.send(Kind::Pages, &page_frame(5 * 4096, 1));
            wait.recv().unwrap();
            requests.send(Kind::Pages, &page_frame(5 * 4096, 2));
            match hostile {
                None => {
                    push.send(Kind::Pages, &page_frame(6 * 4096, 3));
                    let complete: Complete = message::decode(&requests.expect(Kind::Complete), "it").unwrap();
                    assert_eq!((complete.left, complete.faults), (0, 1));
                    let report = destination_thread.join().unwrap().unwrap().unwrap();
                    assert!((1..=2).contains(&report.dropped), "{report:?}");
                    assert_eq!((read(5), read(6), read(100)), (1, 3, 0));
                    let written = to.memory().memory().read_obj::<u8>(GuestAddress(5 * 4096 + 9)).unwrap();
                    assert_eq!(written, 0xEE);
                }
                Some(hostile) => {
                    push.send(Kind::Pages, &page_frame(hostile, 3));
                    let (left, committed, error) = destination_thread.join().unwrap().unwrap().unwrap_err();
                    // Page 6; also page 5, while its placement isn't recorded although its waiter has seen it.
                    assert!((1..=2).contains(&left) && committed, "{left}");
                    assert!(error.contains("isn't RAM") || error.contains("can't be"), "{error}");
                }
            }
        });
    }
}

/// A hostile destination: invalid page requests cause a rollback before the source has committed, and a loss after it.
#[test]
fn a_hostile_destination_is_detected() {
    for requested in [vec![4u64 << 20], vec![1], vec![]] {
        let machine = StandIn::new(vec![(0..900).collect()]);
        let (a, b, _) = wires(3, u64::MAX);
        let reporter = ProgressReporter::default();
        let stop = reporter.begin("there", None).unwrap();
        std::thread::scope(|scope| {
            let requested = &requested;
            scope.spawn(move || {
                let mut ends: Vec<Peer> = b.into_iter().map(Peer::over).collect();
                ends.iter_mut().for_each(|end| drop(end.expect(Kind::Hello)));
                let [control, requests, _push] = &mut ends[..] else { panic!() };
                control.expect(Kind::Offer);
                let accepted = message::encode(&Accepted { version: 3, host: None }).unwrap();
                control.send(Kind::Accepted, &accepted);
                control.expect(Kind::Postcopy);
                control.send(Kind::Accepted, &accepted);
                control.expect(Kind::Missing);
                control.expect(Kind::State);
                control.send(Kind::Ready, &[]);
                control.expect(Kind::End);
                control.expect(Kind::Go);
                control.send(Kind::Running, &[]);
                let bytes: Vec<u8> = requested.iter().flat_map(|page| page.to_le_bytes()).collect();
                requests.send(Kind::Want, &bytes);
                // Until the source has detected it.
                while requests.receiver.receive(&mut requests.connection).is_ok() {}
            });
            let error = migrate(&machine, a, &postcopy_request(0), &reporter, &stop).unwrap_err();
            let text = crate::migration::error::line(&error);
            assert!(matches!(error, MigrationError::LostDestination { .. }), "{text}");
            assert!(text.contains("a request for"), "{text}");
        });
        assert_eq!(machine.run_state.load(Ordering::SeqCst), 1, "the guest isn't run here again");
    }
}

/// The stream breaks when everything but the post-copy pages was received, and the daemon reports that the VM has migrated: it is lost,
/// not in doubt.
#[test]
fn a_source_whose_destination_is_lost_after_the_commit_is_not_in_doubt() {
    use control_api::host::proto::move_vm_reply::State;

    let answers = [State::Copy, State::Stop, State::Stop, State::Moved].map(|state| Ok((state, "")));
    let (scripted, _) = super::with_a_daemon::daemon(answers.to_vec());
    let mut machine = StandIn::new(vec![(0..900).collect()]);
    machine.daemon = Some(scripted);
    machine.devices = Mutex::new(vec![Vec::new()]);
    let (a, b, _) = wires(3, u64::MAX);
    let reporter = ProgressReporter::default();
    let stop = reporter.begin("there", None).unwrap();
    let error = std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut ends: Vec<Peer> = b.into_iter().map(Peer::over).collect();
            ends.iter_mut().for_each(|end| drop(end.expect(Kind::Hello)));
            let mut control = ends.remove(0);
            control.expect(Kind::Offer);
            let accepted = Accepted { version: 4, host: Some("h2".to_owned()) };
            let accepted = message::encode(&accepted).unwrap();
            control.send(Kind::Accepted, &accepted);
            control.expect(Kind::Postcopy);
            control.send(Kind::Accepted, &accepted);
            // The other streams read nothing, so pages stay unsent.
            while !matches!(control.receiver.receive(&mut control.connection).unwrap(), (Kind::State, _)) {}
            drop((control, ends));
        });
        migrate(&machine, a, &postcopy_request(1), &reporter, &stop).unwrap_err()
    });
    let text = crate::migration::error::line(&error);
    assert!(matches!(error, MigrationError::LostDestination { left: 1.., .. }), "{text}");
    assert_eq!(machine.doubts.load(Ordering::SeqCst), 0);
    assert_eq!(machine.run_state.load(Ordering::SeqCst), 1, "the guest isn't run here again");
}
