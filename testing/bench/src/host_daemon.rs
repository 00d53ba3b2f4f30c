//! `causeway host` as a user starts it: a separate sandboxed process, which ends with the measurement.
//!
//! ```text
//! folder/host.sock   the daemon's service          folder/host.d/   its sockets and state
//! folder/host.log    its standard error
//! ```
//!
//! Dropping [`HostDaemon`] ends the daemon and then removes the directory. If the bench is killed, the daemon ends with it
//! (parent-death signal), and the next bench removes its directory.
//! its folder is removed by the next one.

#![allow(unsafe_code)] // Between fork and exec, a child requests the signal on its parent's death.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Serialize;

/// Time-out of the daemon's start, and of its end after a signal.
const START_OR_END_TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// Directory names: `PREFIX`, the creating process, `-`, and random characters.
const PREFIX: &str = "causeway-bench-";

/// Creates a directory for one run's sockets, and removes those of killed runs.
///
/// # Errors
/// It can't be created.
pub fn folder() -> anyhow::Result<tempfile::TempDir> {
    let parent = std::env::temp_dir();
    for entry in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        let Some(pid) = owner.and_then(|(pid, _)| pid.parse::<u32>().ok()) else { continue };
        if !Path::new("/proc").join(pid.to_string()).exists()
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            eprintln!("bench: {} of an earlier run can't be removed: {error}", entry.path().display());
        }
    }
    tempfile::Builder::new()
        .prefix(&format!("{PREFIX}{}-", std::process::id()))
        .tempdir_in(&parent)
        .with_context(|| format!("A folder for sockets could not be made in {}", parent.display()))
}

/// A process' confinement, as the kernel reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Confinement {
    /// `Seccomp` in its status file: 2 is a filter.
    pub seccomp: u32,
    /// Whether it can't gain privileges by exec.
    pub no_new_privileges: bool,
    /// Its effective capabilities, a bit each.
    pub capabilities: u64,
}

/// A running daemon. Dropping it ends it.
#[derive(Debug)]
pub struct HostDaemon {
    child: Child,
    socket: PathBuf,
    over: Option<ExitStatus>,
}

impl HostDaemon {
    /// Runs `command` (the program with its wrapper) with `host --socket SOCKET` and `options`; returns when it serves. Its standard
    /// error goes to a file beside the socket.
    ///
    /// # Errors
    /// It can't be started, or ends before it serves: with its last line.
    pub fn start(mut command: Command, socket: &Path, options: &[String]) -> anyhow::Result<Self> {
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("{} could not be made for a daemon's sockets", folder.display()))?;
        }
        let log_path = log_of(socket);
        let log = std::fs::File::create(&log_path)
            .with_context(|| format!("{} could not be made for a daemon's log", log_path.display()))?;
        command.arg("host").arg("--socket").arg(socket).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // SAFETY: the closure makes one system call, which is safe between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let shown = show(&command);
        let child = command.spawn().with_context(|| format!("'{shown}' could not be started"))?;
        let mut daemon = Self { child, socket: socket.to_owned(), over: None };
        let deadline = Instant::now() + START_OR_END_TIMEOUT;
        while !socket.exists() {
            if let Some(status) = daemon.status()? {
                bail!("'{shown}' ended before it served ({status}): {}", daemon.last_words());
            }
            if Instant::now() > deadline {
                let last = daemon.last_words();
                bail!("'{shown}' did not serve within {START_OR_END_TIMEOUT:?}: {last}");
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(daemon)
    }

    /// Returns its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns its process ID.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its confinement.
    ///
    /// # Errors
    /// It has ended, or `/proc` can't be read.
    pub fn confinement(&self) -> anyhow::Result<Confinement> {
        let path = format!("/proc/{}/status", self.id());
        let text = std::fs::read_to_string(&path).with_context(|| format!("{path} could not be read"))?;
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim).with_context(|| format!("{path} says nothing of {name}"))
        };
        Ok(Confinement {
            seccomp: field("Seccomp")?.parse().with_context(|| format!("{path}: Seccomp is no number"))?,
            no_new_privileges: field("NoNewPrivs")? == "1",
            capabilities: u64::from_str_radix(field("CapEff")?, 16)
                .with_context(|| format!("{path}: CapEff is no number"))?,
        })
    }

    /// Returns why it has ended, if it has.
    ///
    /// # Errors
    /// Its state can't be determined.
    pub fn trouble(&mut self) -> anyhow::Result<Option<String>> {
        let ended = self.status()?;
        Ok(ended.map(|status| format!("'causeway host' ended ({status}): {}", self.last_words())))
    }

    /// Ends it by a signal, and waits for its end.
    ///
    /// # Errors
    /// It had ended before, ends with a failure, or must be killed.
    pub fn finish(mut self) -> anyhow::Result<()> {
        if let Some(trouble) = self.trouble()? {
            bail!("{trouble}");
        }
        let status = self.end()?;
        if !status.success() {
            bail!("'causeway host' ended with a failure ({status}): {}", self.last_words());
        }
        Ok(())
    }

    fn status(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.over.is_none() {
            self.over = self.child.try_wait().context("What became of 'causeway host' can't be found out")?;
        }
        Ok(self.over)
    }

    fn end(&mut self) -> anyhow::Result<ExitStatus> {
        let pid = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        let pid = pid.context("A process has an impossible number")?;
        let deadline = Instant::now() + START_OR_END_TIMEOUT;
        if self.status()?.is_none() {
            kill_process(pid, Signal::TERM).context("'causeway host' can't be asked to end")?;
        }
        loop {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.child.kill().context("'causeway host' can't be killed")?;
                self.over = Some(self.child.wait().context("'causeway host' is lost")?);
                let last = self.last_words();
                bail!("'causeway host' did not end within {START_OR_END_TIMEOUT:?} and was killed: {last}");
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns the last line of its log.
    fn last_words(&self) -> String {
        let path = log_of(&self.socket);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(|| "it said nothing".to_owned(), |line| line.trim().to_owned())
    }
}

impl Drop for HostDaemon {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("bench: {error:#}");
        }
    }
}

fn log_of(socket: &Path) -> PathBuf {
    socket.with_extension("log")
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
