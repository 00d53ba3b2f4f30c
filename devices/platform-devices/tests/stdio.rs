//! The console on a terminal: raw mode while it runs, escapes, and the restored terminal after any end of the process.
//! The process under test is this program again, with a pseudo-terminal of its own.
#![allow(unsafe_code)] // Giving a child process its terminal.
#![allow(clippy::unwrap_used)] // Helpers of tests, too.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use machine::bus::BusDevice;
use platform_devices::MachineEvent;
use platform_devices::console::{Console, ConsoleBackend};
use platform_devices::serial::Serial;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

const CHILD: &str = "CAUSEWAY_STDIO_TEST_CHILD";
const LONG: Duration = Duration::from_secs(20);

/// Prints each key as `<hex>`. Panics on `p`, exits on `e`, and ends on the quit escape.
#[test]
#[ignore = "the child process of the other tests"]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (events, quit) = mpsc::channel();
    let sink = Arc::new(move |event| events.send(event).unwrap());
    let console = Console::open(&ConsoleBackend::Stdio, sink).unwrap();
    let serial = Serial::new("com1", console, Arc::new(|| Ok(()))).unwrap();
    let print = |text: String| text.bytes().for_each(|byte| serial.write(0, &[byte]));
    let read = |port: u64| {
        let mut byte = [0];
        serial.read(port, &mut byte);
        byte[0]
    };
    print("ready\r\n".to_owned());
    let begin = Instant::now();
    while begin.elapsed() < LONG {
        if read(5) & 1 != 0 {
            match read(0) {
                b'p' => panic!("as asked"),
                b'e' => std::process::exit(3),
                key => print(format!("<{key:x}>")),
            }
        }
        if quit.try_recv() == Ok(MachineEvent::ConsoleQuit) {
            print("bye\r\n".to_owned());
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Terminal {
    master: File,
    slave: OwnedFd,
    child: Child,
    seen: String,
}

impl Terminal {
    fn new() -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--ignored", "--nocapture"]).env(CHILD, "1");
        command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap());
        command.stderr(slave.try_clone().unwrap());
        // SAFETY: between fork and exec only two system calls are made.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                Ok(rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?)
            });
        }
        let child = command.spawn().unwrap();
        let mut terminal = Self { master: master.into(), slave, child, seen: String::new() };
        terminal.expect("ready");
        assert!(!terminal.line_mode(), "raw while it runs");
        terminal
    }

    fn keys(&mut self, keys: &[u8]) {
        self.master.write_all(keys).unwrap();
    }

    fn expect(&mut self, text: &str) {
        // The other side ends within LONG; then reading fails.
        while !self.seen.contains(text) {
            let mut bytes = [0; 256];
            match self.master.read(&mut bytes) {
                Ok(count) if count > 0 => self.seen += &String::from_utf8_lossy(&bytes[..count]),
                other => panic!("no {text:?} in {:?}: {other:?}", self.seen),
            }
        }
    }

    fn line_mode(&self) -> bool {
        tcgetattr(self.slave.as_fd()).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Waits for the process's end; returns the exit code.
    fn end(mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(self.line_mode(), "the terminal is as it was");
                return status.code();
            }
            assert!(begin.elapsed() < LONG, "it does not end: {:?}", self.seen);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn keys_reach_the_guest_and_ctrl_a_does_what_its_help_says() {
    let mut terminal = Terminal::new();
    // Ctrl-C goes to the guest, too.
    terminal.keys(b"a\x03");
    terminal.expect("<61><3>");
    terminal.keys(b"\x01h");
    terminal.expect("Ctrl-A x");
    terminal.keys(b"\x01\x01");
    terminal.expect("<1>");
    terminal.keys(b"\x01x");
    terminal.expect("bye");
    assert_eq!(terminal.end(), Some(0));
}

#[test]
fn a_panic_leaves_the_terminal_as_it_was() {
    let mut terminal = Terminal::new();
    terminal.keys(b"p");
    terminal.expect("as asked");
    assert_ne!(terminal.end(), Some(0));
}

#[test]
fn an_exit_from_anywhere_leaves_the_terminal_as_it_was() {
    let mut terminal = Terminal::new();
    terminal.keys(b"e");
    assert_eq!(terminal.end(), Some(3));
}
