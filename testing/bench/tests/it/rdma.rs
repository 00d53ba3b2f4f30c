//! Group `rdma` measures the shipped daemon. It runs in its sandbox, RDMA writes of a program in a real VM go through it, and nothing
//! of it remains after any end of a measurement.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bench::groups::rdma::bed::{Bed, Plan};
use bench::host_daemon::{self, HostDaemon};
use bench::programs::{Programs, causeway_beside};

const MIB: u64 = 1 << 20;
const HANG_TIMEOUT: Duration = Duration::from_secs(60);

/// A stand-in for `causeway`: a shell script whose third argument is the socket's path. The shell reads it from a file that need not
/// be executable: a child of another test may still have a just-written file open.
fn script(folder: &Path, text: &str) -> Command {
    let path = folder.join("stand-in");
    std::fs::write(&path, text).unwrap();
    let mut command = Command::new("sh");
    command.arg(path);
    command
}

/// Returns a script that serves until SIGTERM, and then ends with that status.
fn serving(status: u32) -> String {
    format!(
        "trap 'rm \"$3\"; echo it was asked to end >&2; exit {status}' TERM; : >\"$3\"; while :; do sleep 0.02; done"
    )
}

fn start(command: Command, folder: &Path) -> anyhow::Result<HostDaemon> {
    HostDaemon::start(command, &folder.join("host.sock"), &["--option".to_owned()])
}

fn is_alive(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Returns whether a process has the path among its arguments.
fn is_used(path: &Path) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut commands = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    commands.any(|command| String::from_utf8_lossy(&command).contains(&path.display().to_string()))
}

#[test]
fn a_daemon_that_cannot_start_says_why_in_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let error = format!("{:#}", start(Command::new(folder.path().join("none")), folder.path()).unwrap_err());
    let socket = folder.path().join("host.sock");
    let command = format!("none host --socket {} --option' could not be started", socket.display());
    assert!(error.contains(&command), "{error}");
    let ends = script(folder.path(), "echo 'first line' >&2; echo \"no CPU '9'; choose 0\" >&2; exit 3");
    let error = format!("{:#}", start(ends, folder.path()).unwrap_err());
    assert!(error.contains("ended before it served (exit status: 3): no CPU '9'; choose 0"), "{error}");
    assert!(!error.contains("first line") && !error.contains('\n'), "{error}");
}

#[test]
fn a_daemon_ends_when_it_is_dropped_and_its_end_is_judged_when_it_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(script(folder.path(), &serving(0)), folder.path()).unwrap();
    let pid = daemon.id();
    assert!(is_alive(pid) && daemon.socket().exists());
    drop(daemon);
    assert!(!is_alive(pid) && !folder.path().join("host.sock").exists());
    start(script(folder.path(), &serving(0)), folder.path()).unwrap().finish().unwrap();

    let fails = script(folder.path(), &serving(7));
    let error = start(fails, folder.path()).unwrap().finish().unwrap_err().to_string();
    assert_eq!(error, "'causeway host' ended with a failure (exit status: 7): it was asked to end");
}

/// A daemon doesn't outlive a killed bench: here the thread that started it stands for the bench.
#[test]
fn a_daemon_ends_with_the_thread_that_started_it() {
    let folder = tempfile::tempdir().unwrap();
    let serves = script(folder.path(), &serving(0));
    let path = folder.path().to_owned();
    let mut daemon = std::thread::spawn(move || start(serves, &path).unwrap()).join().unwrap();
    let deadline = Instant::now() + HANG_TIMEOUT;
    while daemon.trouble().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the daemon outlives the thread that started it");
        std::thread::sleep(Duration::from_millis(2));
    }
    let trouble = daemon.trouble().unwrap().unwrap();
    assert_eq!(trouble, "'causeway host' ended (exit status: 0): it was asked to end");
    assert!(daemon.finish().is_err(), "it ended before it was asked to");
}

#[test]
fn folders_of_runs_that_were_killed_go() {
    let mut ended = Command::new("true").spawn().unwrap();
    let pid = ended.id();
    ended.wait().unwrap();
    let left = std::env::temp_dir().join(format!("causeway-bench-{pid}-left"));
    std::fs::create_dir_all(left.join("host.d")).unwrap();
    let (own, other) = (host_daemon::folder().unwrap(), host_daemon::folder().unwrap());
    assert!(!left.exists() && own.path().exists() && other.path().exists());
}

/// Returns the requirements of the measurements, or why they can't run here.
fn ground() -> Option<(PathBuf, PathBuf, [usize; 2])> {
    use facilities::{Facility, missing};
    let cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).take(2).collect();
    if !Path::new("/dev/kvm").exists() {
        missing(Facility::Kvm, "there is no /dev/kvm");
        return None;
    }
    let &[first, second] = cpus.as_slice() else {
        missing(Facility::TwoProcessors, format!("{cpus:?} are not two"));
        return None;
    };
    let causeway = causeway_beside().unwrap();
    Some((causeway, Programs::build().unwrap().path("measure"), [first, second]))
}

const PLAN: Plan = Plan { queue_pairs: 2, idle: 3, memory: 64 * MIB, buffer: MIB };

#[test]
fn writes_of_a_vm_go_through_the_confined_daemon_and_arrive() {
    let Some((causeway, program, cpus)) = ground() else { return };
    let folder = host_daemon::folder().unwrap();
    let mut by_daemon = Bed::by_daemon(folder, &causeway, &program, cpus, PLAN).unwrap();
    let mut alone = Bed::engine_alone(&program, cpus, PLAN).unwrap();
    let confinement = by_daemon.daemon().unwrap().confinement().unwrap();
    // CAP_NET_ADMIN is the only capability that it may keep.
    assert!(confinement.seccomp == 2 && confinement.no_new_privileges, "{confinement:?}");
    assert_eq!(confinement.capabilities & !(1 << 12), 0, "{confinement:?}");
    assert!(alone.daemon().is_none());
    for bed in [&mut by_daemon, &mut alone] {
        for (length, seed) in [(1, 3), (4097, 7), (1 << 20, 11)] {
            bed.verify(length, seed).unwrap();
        }
        assert!(bed.write(8, 2, 32, 1000).unwrap() > 0);
        assert!(bed.write(2 << 20, 1, 1, 1).is_err(), "the buffer has 1 MiB");
        let error = bed.write(8, 1, 1000, 1).unwrap_err().to_string();
        assert!(error.contains("a window of 1000"), "{error}");
    }
    let folder = by_daemon.daemon().unwrap().socket().parent().unwrap().to_owned();
    assert!(folder.exists() && is_used(&folder));
    by_daemon.finish().unwrap();
    alone.finish().unwrap();
    assert!(!folder.exists() && !is_used(&folder));
}

#[test]
fn nothing_stays_behind_when_a_measurement_fails() {
    let Some((causeway, program, cpus)) = ground() else { return };
    // 40 MiB of RAM have no room for a buffer of 64 MiB.
    let plan = Plan { memory: 40 * MIB, buffer: 64 * MIB, ..PLAN };
    let folder = host_daemon::folder().unwrap();
    let path = folder.path().to_owned();
    let error = Bed::by_daemon(folder, &causeway, &program, cpus, plan).err().unwrap();
    let error = format!("{error:#}");
    assert!(error.contains("more pages do not fit into a measuring VM's memory"), "{error}");
    assert!(!path.exists() && !is_used(&path));

    // A daemon that dies while it is in use.
    let folder = host_daemon::folder().unwrap();
    let path = folder.path().to_owned();
    let mut bed = Bed::by_daemon(folder, &causeway, &program, cpus, PLAN).unwrap();
    bed.verify(8, 5).unwrap();
    let pid = i32::try_from(bed.daemon().unwrap().id()).unwrap();
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let error = bed.write(8, 1, 1, 1000).unwrap_err();
    assert!(format!("{error:#}").contains("'causeway host' ended (signal: 9"), "{error:#}");
    drop(bed);
    assert!(!path.exists() && !is_used(&path));
}
