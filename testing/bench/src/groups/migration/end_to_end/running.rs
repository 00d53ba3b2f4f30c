//! A process of the shipped program, which ends with the measurement. Its standard error is a file.

use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Time-out of starts and ends, on a loaded machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A process. Dropping it ends it by its ID.
pub struct Running {
    what: String,
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts `command` with piped input and output, and its standard error in the new file `log`.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(what: &str, mut command: Command, log: PathBuf) -> anyhow::Result<Self> {
        let file = std::fs::File::create(&log)
            .with_context(|| format!("{} could not be made for the log of {what}", log.display()))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let child = command.spawn().with_context(|| format!("{what} could not be started"))?;
        Ok(Self { what: what.to_owned(), child, log })
    }

    /// Returns its input and output.
    ///
    /// # Errors
    /// They were taken before.
    pub fn pipes(&mut self) -> anyhow::Result<(ChildStdin, ChildStdout)> {
        let pipes = self.child.stdin.take().zip(self.child.stdout.take());
        pipes.with_context(|| format!("Input and output of {} were taken before", self.what))
    }

    /// Waits until its log contains a text.
    ///
    /// # Errors
    /// It ends before, or the text doesn't come.
    pub fn await_log(&mut self, text: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        while !read(&self.log).contains(text) {
            if let Some(status) = self.status()? {
                bail!("{} ended before it logged '{text}' ({status}): {}", self.what, self.last_words());
            }
            ensure!(
                Instant::now() < deadline,
                "{} didn't log '{text}' within {STEP_TIMEOUT:?}: {}",
                self.what,
                self.last_words()
            );
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Repeats an attempt to use it until one succeeds.
    ///
    /// # Errors
    /// It ends before, or the last attempt's error.
    pub fn await_success(
        &mut self,
        attempt: &mut dyn FnMut() -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        while let Err(error) = attempt() {
            if let Some(status) = self.status()? {
                bail!("{} ended before it served ({status}): {}", self.what, self.last_words());
            }
            if Instant::now() > deadline {
                return Err(error.context(format!("{} doesn't serve", self.what)));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It doesn't end, or with a failure.
    pub fn await_end(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            if let Some(status) = self.status()? {
                ensure!(status.success(), "{} failed ({status}): {}", self.what, self.last_words());
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{} didn't end within {STEP_TIMEOUT:?}", self.what);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the last line of its log.
    pub fn last_words(&self) -> String {
        let text = read(&self.log);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(|| "it logged nothing".to_owned(), |line| line.trim().to_owned())
    }

    fn status(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("The state of {} can't be determined", self.what))
    }

    fn end(&mut self) -> anyhow::Result<()> {
        if self.status()?.is_some() {
            return Ok(());
        }
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .with_context(|| format!("{} can't be ended", self.what))?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        while self.status()?.is_none() {
            if Instant::now() > deadline {
                self.child.kill().with_context(|| format!("{} can't be killed", self.what))?;
                self.child.wait().with_context(|| format!("{} is lost", self.what))?;
                bail!("{} didn't end within {STEP_TIMEOUT:?} and was killed", self.what);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("bench: {error:#}");
        }
    }
}

/// A log's text so far; a line may be incomplete.
fn read(log: &Path) -> String {
    std::fs::read(log)
        .map_or_else(|error| error.to_string(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}
