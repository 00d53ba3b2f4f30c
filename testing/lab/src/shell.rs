//! `lab shell`: a host's shell in this terminal.

use crate::channel::{Session, Sink};
use crate::host::Host;
use crate::protocol::Kind;
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{IsTerminal, Read, Write};
use std::time::{Duration, Instant};

/// Restores the terminal on drop.
struct Raw {
    before: Termios,
}

impl Raw {
    fn enter() -> Result<Self> {
        let before = tcgetattr(std::io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Raw { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

fn size() -> (u16, u16) {
    tcgetwinsize(std::io::stdin()).map_or((24, 80), |w| (w.ws_row.max(1), w.ws_col.max(1)))
}

/// Returns the terminal's type if its name is safe in a shell.
pub(crate) fn terminal_type() -> String {
    let name = std::env::var("TERM").unwrap_or_default();
    let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-+.".contains(c));
    if plain { name } else { "linux".into() }
}

/// Fails without a terminal.
pub fn need_terminal() -> Result<()> {
    if !isatty(std::io::stdin()) || !std::io::stdout().is_terminal() {
        bail!("`lab shell` needs a terminal; use `lab try --cmd '…'` for scripts");
    }
    Ok(())
}

/// Opens a shell on the host until it ends or the user types Ctrl-].
pub fn interactive(host: &Host) -> Result<i32> {
    let intro = format!(
        "\r\nThis is {} (PID 1 and all: you are root). /share is shared with the outside, /lab has guest kernels and disks,\r\n\
         /share/bin is in PATH. Outside, /share is {} while the host runs.\r\n\
         Leave with `exit` or Ctrl-]; host and share are gone then.\r\n\r\n",
        host.name(),
        host.share().display()
    );
    let command = format!("export TERM={}; cd /root; exec bash", terminal_type());
    let code = attach(&intro, Some(0x1d), |size, sink| host.start(&command, Some(size), Some(sink)))?;
    println!("\nLeft {}.", host.name());
    Ok(code)
}

/// Opens a prompt elsewhere on a host: `command` must open a terminal.
pub fn prompt(host: &Host, intro: &str, command: &str) -> Result<i32> {
    let command = format!("export TERM={}; {command}", terminal_type());
    attach(intro, Some(0x1d), |size, sink| host.start(&command, Some(size), Some(sink)))
}

/// Connects this terminal to a session until it ends, or until the byte `leave` is typed.
pub(crate) fn attach(
    intro: &str,
    leave: Option<u8>,
    start: impl FnOnce((u16, u16), Sink) -> Result<Session>,
) -> Result<i32> {
    need_terminal()?;
    let mut out = std::io::stdout();
    out.write_all(intro.as_bytes())?;
    out.flush()?;
    let raw = Raw::enter()?;
    let sink = Box::new(|_: Kind, bytes: &[u8]| {
        let mut out = std::io::stdout();
        // If the terminal has closed, the loop below ends.
        let _ = out.write_all(bytes).and_then(|()| out.flush());
    });
    let mut last = size();
    let session = start(last, sink)?;
    let mut buffer = [0; 4096];
    let mut checked = Instant::now();
    let code = loop {
        if let Some(code) = session.try_wait() {
            break code;
        }
        if checked.elapsed() > Duration::from_millis(300) {
            checked = Instant::now();
            let now = size();
            if now != last {
                last = now;
                session.resize(now.0, now.1)?;
            }
        }
        let stdin = std::io::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        if poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0) {
            let n = stdin.lock().read(&mut buffer)?;
            if n == 0 || leave.is_some_and(|l| buffer[..n].contains(&l)) {
                break 0;
            }
            session.input(&buffer[..n])?;
        }
    };
    drop(raw);
    Ok(code)
}
