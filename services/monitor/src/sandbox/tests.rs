//! Each case runs in a process of its own: this test binary again, with the case's name in the environment.
#![allow(unsafe_code)] // Forbidden calls are made on purpose.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Output};

use platform_devices::console::{Console, ConsoleBackend};
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::LocalModes;

use super::*;
use crate::description;

const CASE: &str = "CAUSEWAY_SANDBOX_CASE";

fn command(case: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "sandbox::tests::case", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        // The harness has threads before the sandbox can set this itself.
        .env("MALLOC_ARENA_MAX", "1")
        .env_remove("RUST_LOG");
    command
}

fn run(case: &str) -> Output {
    command(case).output().unwrap()
}

fn describe(text: &str) -> VmDescription {
    let (vm, _) = description::parse(text, "vm.toml".as_ref()).unwrap();
    description::validate(&vm).unwrap()
}

fn sandbox(mode: SandboxMode) -> Sandbox {
    let mut vm = describe("kernel = \"k\"\napi_socket = \"/tmp/causeway-test.sock\"");
    vm.sandbox = mode;
    Sandbox::prepare(&vm).unwrap()
}

/// Enters the sandbox on a thread of its own, like the monitor's main thread, and runs `act` as a thread of a kind.
fn confined(mode: SandboxMode, kind: ThreadKind, act: impl FnOnce() + Send + 'static) {
    let sandbox = sandbox(mode);
    std::thread::Builder::new()
        .name("confined".to_owned())
        .spawn(move || {
            let report = sandbox.enter_process().unwrap();
            eprintln!("report: {}", serde_json::to_string(&report).unwrap());
            sandbox.thread_filter(kind).apply().unwrap();
            act();
            eprintln!("survived");
        })
        .unwrap()
        .join()
        .unwrap();
}

fn ordinary_work() {
    let text = "x".repeat(3 << 20);
    assert!(text.len() > 1 << 20);
    let start = std::time::Instant::now();
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert!(start.elapsed().as_nanos() > 0);
    assert!(std::collections::HashMap::from([(1, 2)]).contains_key(&1));
    let lock = std::sync::Mutex::new(0);
    *lock.lock().unwrap() += 1;
}

/// A node's thread makes a request to an RDMA device (standard input stands in for it). With a device, it has no capability.
fn node(rdma: Option<std::path::PathBuf>) {
    let has_device = rdma.is_some();
    let places = super::NodePlaces { rdma, ..super::NodePlaces::default() };
    let sandbox = Sandbox::prepare_node(&describe("kernel = \"k\""), &places).unwrap();
    let thread = std::thread::Builder::new().name("confined".to_owned()).spawn(move || {
        sandbox.enter_process().unwrap();
        if has_device {
            let held = rustix::thread::capabilities(None).unwrap();
            assert!(held.effective.is_empty() && held.permitted.is_empty());
        }
        sandbox.thread_filter(ThreadKind::Node).apply().unwrap();
        // SAFETY: standard input doesn't support the request.
        unsafe { libc::ioctl(0, 0xc018_1b01, std::ptr::null_mut::<libc::c_void>()) };
        eprintln!("survived");
    });
    thread.unwrap().join().unwrap();
}

/// Start of Landlock's report on a kernel without it.
const NOT_IN_FORCE: &str = "not in force";

fn open() {
    drop(std::fs::File::open("/etc/hostname"));
}

/// A thread takes its own filter, within the one of the thread that made it.
fn narrow() {
    let worker = sandbox(SandboxMode::On).thread_filter(ThreadKind::DeviceWorker);
    confined(SandboxMode::On, ThreadKind::Main, move || {
        std::thread::spawn(move || {
            worker.apply().unwrap();
            ordinary_work();
        })
        .join()
        .unwrap();
    });
}

/// Without a filter of its own, so that only the process-wide rules apply.
fn exec_anywhere() {
    let sandbox = sandbox(SandboxMode::On);
    let thread = std::thread::Builder::new().name("confined".to_owned()).spawn(move || {
        sandbox.enter_process().unwrap();
        let nothing: [*const libc::c_char; 1] = [std::ptr::null()];
        // SAFETY: a path and two empty lists, all NUL-terminated.
        unsafe { libc::execve(c"/bin/true".as_ptr(), nothing.as_ptr(), nothing.as_ptr()) };
    });
    thread.unwrap().join().unwrap();
}

/// Without a thread filter, so that only Landlock acts.
fn landlock() {
    let sandbox = sandbox(SandboxMode::On);
    let report = sandbox.enter_process().unwrap();
    eprintln!("landlock: {}", report.landlock);
    if report.landlock.starts_with(NOT_IN_FORCE) {
        return;
    }
    let error = std::fs::File::open("/etc/hostname").unwrap_err();
    eprintln!("error: {error:?}");
    let held = rustix::thread::capabilities(None).unwrap();
    assert!(held.effective.is_empty() && held.permitted.is_empty());
    assert!(rustix::thread::no_new_privs().unwrap());
    eprintln!("survived");
}

fn log() {
    telemetry::logging::init(&telemetry::logging::LogOptions::default()).unwrap();
    confined(SandboxMode::Log, ThreadKind::Vcpu, || {
        assert!(std::fs::File::open("/etc/passwd").is_ok());
        assert!(std::fs::File::open("/etc/passwd").is_ok());
        std::thread::spawn(ordinary_work).join().unwrap();
    });
    // Another thread writes the report before the call continues.
    std::thread::sleep(std::time::Duration::from_millis(200));
}

fn signals() {
    // The handler runs on the thread that receives the signal, here the one that also waits for it.
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGUSR1]).unwrap();
    confined(SandboxMode::On, ThreadKind::Signals, move || {
        // SAFETY: the signal has a handler.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert_eq!(signals.forever().next(), Some(libc::SIGUSR1));
    });
}

/// A thread of each kind that may not run the handler gets the signals that end the VM; they stay pending.
fn signals_elsewhere() {
    let _handlers = signal_hook::iterator::Signals::new(END_SIGNALS).unwrap();
    let sandbox = sandbox(SandboxMode::On);
    sandbox.enter_process().unwrap();
    let others =
        ThreadKind::ALL.into_iter().filter(|kind| !matches!(kind, ThreadKind::Main | ThreadKind::Signals));
    for kind in others {
        let filter = sandbox.thread_filter(kind);
        let thread = std::thread::Builder::new().name("confined".to_owned()).spawn(move || {
            filter.apply().unwrap();
            for signal in END_SIGNALS {
                // SAFETY: the signal has a handler.
                unsafe { libc::raise(signal) };
            }
        });
        thread.unwrap().join().unwrap();
    }
    eprintln!("survived");
}

fn terminal() {
    let console = Console::open(&ConsoleBackend::Stdio, std::sync::Arc::new(|_| ())).unwrap();
    let settings = rustix::termios::tcgetattr(rustix::stdio::stdin()).unwrap();
    assert!(!settings.local_modes.contains(LINE_MODE), "the console has made it raw");
    confined(SandboxMode::On, ThreadKind::Signals, open);
    drop(console);
}

/// Serves the API within the sandbox to a client outside of it.
fn api() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vm.sock");
    let mut vm = describe("kernel = \"k\"");
    vm.api_socket = Some(socket.clone());
    let (address, serving) = std::sync::mpsc::channel();
    let (finish, finished) = std::sync::mpsc::channel::<()>();
    let server = std::thread::spawn(move || {
        let listener = crate::api::ApiListener::bind(&socket).unwrap();
        let sandbox = Sandbox::prepare(&vm).unwrap();
        sandbox.enter_process().unwrap();
        let fake = crate::api::tests::Fake(std::sync::Mutex::new(control_api::types::VmState::Running));
        let filter = sandbox.thread_filter(ThreadKind::Api);
        let server = listener.serve(Arc::new(fake), move || filter.apply().unwrap()).unwrap();
        sandbox.thread_filter(ThreadKind::Main).apply().unwrap();
        address.send(socket.clone()).unwrap();
        finished.recv().unwrap();
        server.stop();
    });
    let client = control_api::Client::new(serving.recv().unwrap());
    client.summary().unwrap();
    client.pause().unwrap();
    assert!(client.reset(false).is_err() && client.inspect(Some("nothing")).is_err());
    client.metrics().unwrap();
    client.openapi().unwrap();
    client.stop().unwrap();
    finish.send(()).unwrap();
    server.join().unwrap();
    assert!(!client.socket().exists());
    eprintln!("survived");
}

/// Not a test by itself: the body of the child process. No effect in an ordinary run.
#[test]
fn case() {
    let Ok(case) = std::env::var(CASE) else { return };
    match case.as_str() {
        "work" => confined(SandboxMode::On, ThreadKind::DeviceWorker, ordinary_work),
        "spawn" => {
            confined(SandboxMode::On, ThreadKind::Main, || std::thread::spawn(ordinary_work).join().unwrap())
        }
        "narrow" => narrow(),
        "open" => confined(SandboxMode::On, ThreadKind::Vcpu, open),
        // SAFETY: plain system calls whose memory arguments don't matter. They must be refused.
        "exec-memory" => confined(SandboxMode::On, ThreadKind::Main, || unsafe {
            libc::mmap(std::ptr::null_mut(), 4096, 7, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        }),
        // SAFETY: as above.
        "tiocsti" => confined(SandboxMode::On, ThreadKind::Main, || unsafe {
            libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr());
        }),
        // SAFETY: as above.
        "fork" => confined(SandboxMode::On, ThreadKind::Main, || unsafe {
            libc::fork();
        }),
        "exec-anywhere" => exec_anywhere(),
        // SAFETY: as above.
        "network" => confined(SandboxMode::On, ThreadKind::Main, || unsafe {
            libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        }),
        // SAFETY: as above.
        "signal-others" => confined(SandboxMode::On, ThreadKind::Vcpu, || unsafe {
            libc::syscall(libc::SYS_tgkill, 1, 1, 0);
        }),
        "landlock" => landlock(),
        "log" => log(),
        "signals" => signals(),
        "signals-elsewhere" => signals_elsewhere(),
        "terminal" => terminal(),
        // SAFETY: as above.
        "other-terminal-request" => confined(SandboxMode::On, ThreadKind::Signals, || unsafe {
            libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr());
        }),
        "api" => api(),
        "rdma" => node(Some("/dev/null".into())),
        "rdma-without" => node(None),
        "off" => confined(SandboxMode::Off, ThreadKind::Vcpu, open),
        other => panic!("no case {other}"),
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn ordinary_work_and_making_threads_are_allowed() {
    for case in ["work", "spawn", "narrow", "api", "signals", "signals-elsewhere", "rdma", "off"] {
        let output = run(case);
        assert!(output.status.success() && stderr(&output).contains("survived"), "{case}: {output:?}");
    }
}

#[test]
fn what_is_refused_ends_the_process_and_is_named() {
    for (case, call) in [
        ("open", "openat (257)"),
        ("exec-anywhere", "execve (59)"),
        ("exec-memory", "mmap (9)"),
        ("tiocsti", "ioctl (16)"),
        ("rdma-without", "ioctl (16)"),
        ("other-terminal-request", "ioctl (16)"),
        ("fork", "clone (56)"),
        ("network", "socket (41)"),
        ("signal-others", "tgkill (234)"),
    ] {
        let output = run(case);
        let text = stderr(&output);
        assert_eq!(
            output.status.code(),
            Some(REFUSED_EXIT_CODE),
            "{case}: {:?} {text}",
            output.status.signal()
        );
        let line = format!("the sandbox refused the system call {call} in thread \"confined\"");
        assert!(text.contains(&line) && !text.contains("survived"), "{case}: {text}");
    }
}

/// Line mode: the terminal collects keys into lines and echoes them.
const LINE_MODE: LocalModes = LocalModes::ICANON.union(LocalModes::ECHO);

#[test]
fn a_refused_call_leaves_the_terminal_as_it_was() {
    use std::os::unix::process::CommandExt as _;

    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
    let line_mode = || rustix::termios::tcgetattr(&slave).unwrap().local_modes.contains(LINE_MODE);
    assert!(line_mode());
    let mut command = command("terminal");
    command.stdin(slave.try_clone().unwrap());
    // SAFETY: between fork and exec only two system calls are made.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?)
        });
    }
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(REFUSED_EXIT_CODE), "{text}");
    assert!(text.contains("openat (257) in thread \"confined\"") && line_mode(), "{text}");
}

#[test]
fn files_are_out_of_reach_and_capabilities_gone() {
    let output = run("landlock");
    let text = stderr(&output);
    if output.status.success() && text.contains(&format!("landlock: {NOT_IN_FORCE}")) {
        return facilities::missing(facilities::Facility::Landlock, "this kernel doesn't enforce it");
    }
    assert!(output.status.success() && text.contains("survived"), "{text}");
    assert!(text.contains("PermissionDenied"), "{text}");
}

#[test]
fn log_mode_names_each_refused_call_once_and_lets_it_pass() {
    let output = run("log");
    let text = stderr(&output);
    assert!(output.status.success() && text.contains("survived"), "{text}");
    let lines = text.lines().filter(|line| line.contains("would refuse")).collect::<Vec<_>>();
    assert_eq!(lines.iter().filter(|line| line.contains("openat")).count(), 1, "{text}");
    assert!(lines.iter().all(|line| line.contains("confined")), "{text}");
}

#[test]
fn a_vcpu_may_do_nothing_that_only_device_workers_need() {
    let vm = describe(
        "kernel = \"k\"\n[[disks]]\npath = \"d\"\n[[net]]\nuser = true\n[[net]]\ntap = \"t\"\n\
         [vsock]\ncid = 3\nsocket = \"s\"",
    );
    let allowed = |kind| super::allow_lists::allowed(kind, &vm);
    for call in [libc::SYS_clone3, libc::SYS_io_uring_enter, libc::SYS_connect] {
        assert!(
            !allowed(ThreadKind::Vcpu).contains(&call) && allowed(ThreadKind::DeviceWorker).contains(&call)
        );
    }
    assert!(allowed(ThreadKind::DeviceWorker).is_subset(&allowed(ThreadKind::Main)));
    let never = [libc::SYS_execve, libc::SYS_open, libc::SYS_openat, libc::SYS_ptrace, libc::SYS_bind];
    for kind in ThreadKind::ALL {
        assert!(never.iter().all(|call| !allowed(kind).contains(call)), "{kind:?}");
    }
}

/// A node may open files and connect where Landlock allows it. It may not run programs, access other processes' memory, or raise its
/// privileges.
#[test]
fn a_node_may_connect_and_start_nothing() {
    let vm = describe("kernel = \"k\"");
    let allowed = super::allow_lists::allowed(ThreadKind::Node, &vm);
    assert!([libc::SYS_openat, libc::SYS_connect, libc::SYS_bind].iter().all(|call| allowed.contains(call)));
    assert!(super::allow_lists::NEVER.iter().all(|call| !allowed.contains(call)));
    let others = [libc::SYS_userfaultfd, libc::SYS_setuid, libc::SYS_io_uring_setup];
    assert!(others.iter().all(|call| !allowed.contains(call)));
}

#[test]
fn timers_are_set_only_for_local_apics_in_the_monitor() {
    let call = libc::SYS_timerfd_settime;
    for (interrupts, expected) in [("kernel", false), ("monitor", true)] {
        let vm = describe(&format!("kernel = \"k\"\ninterrupts = \"{interrupts}\""));
        for kind in [ThreadKind::Vcpu, ThreadKind::Interrupts, ThreadKind::Api, ThreadKind::Main] {
            assert_eq!(super::allow_lists::allowed(kind, &vm).contains(&call), expected, "{kind:?}");
        }
    }
}

#[test]
fn a_device_that_the_vm_has_not_widens_nothing() {
    let without = describe("kernel = \"k\"");
    let with = describe("kernel = \"k\"\n[vsock]\ncid = 3\nsocket = \"s\"\n[[disks]]\npath = \"d\"");
    for kind in [ThreadKind::DeviceWorker, ThreadKind::Main] {
        let allowed = super::allow_lists::allowed(kind, &without);
        let more = super::allow_lists::allowed(kind, &with);
        for call in [libc::SYS_connect, libc::SYS_io_uring_enter] {
            assert!(!allowed.contains(&call) && more.contains(&call), "{kind:?} {call}");
        }
    }
}
