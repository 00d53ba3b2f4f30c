//! A guest with a persistent shell. A command costs a line each way, instead of three new processes in the host and as many in the
//! guest, which take seconds on an emulated CPU.

use crate::channel::Session;
use crate::guest::Guest;
use crate::host::Host;
use crate::transcript::Waited;
use anyhow::{Context, Result, bail};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time-out of a command, which may take long on a busy machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);
/// The shell prints this after a command, followed by its number and status.
const OVER: &str = "RESIDENT-OVER";

/// A guest that accepts commands.
pub struct Resident {
    /// Its name.
    pub name: &'static str,
    /// The guest.
    pub guest: Guest,
    shell: Session,
    asked: AtomicU32,
}

impl Resident {
    /// Opens the shell and runs `first` in it. Waits until the guest accepts commands.
    pub fn new(host: &Host, name: &'static str, guest: Guest, first: &str) -> Result<Self> {
        let shell = host.start(&format!("exec /share/bin/lab in --wait 120 {name} 'exec sh'"), None, None)?;
        let resident = Resident { name, guest, shell, asked: AtomicU32::new(0) };
        resident.shell.input(format!("{first}\n").as_bytes())?;
        resident.sh("true")?;
        Ok(resident)
    }

    /// Runs a script in a subshell with the first one's functions, and returns its output. Fails if the script does.
    pub fn sh(&self, script: &str) -> Result<String> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let from = self.shell.out.position();
        let mark = format!("{OVER} {number} ");
        self.shell.input(
            format!("( {script}\n) </dev/null; s=$?; printf '\\n{OVER} %s %s\\n' {number} $s\n").as_bytes(),
        )?;
        let first = || script.trim().lines().next().unwrap_or_default().to_owned();
        let line = match self.shell.wait_for(&mark, from, COMMAND_TIMEOUT) {
            Waited::Line(line, _) => line,
            Waited::Ended => {
                bail!("The shell in guest {} ended at {:?}: {}", self.name, first(), self.shell.err.tail(8))
            }
            Waited::Timeout => {
                self.guest.session.suspect();
                bail!(
                    "{:?} in guest {} did not end within {} s",
                    first(),
                    self.name,
                    COMMAND_TIMEOUT.as_secs()
                )
            }
        };
        let status: i32 = line
            .strip_prefix(&mark)
            .and_then(|status| status.trim().parse().ok())
            .with_context(|| format!("Guest {} said {line:?}", self.name))?;
        if status != 0 {
            bail!(
                "{:?} ended with status {status} in guest {}: {}",
                first(),
                self.name,
                self.shell.err.tail(8).trim()
            );
        }
        let said = self.shell.out.lines_from(from);
        Ok(said
            .iter()
            .take_while(|line| !line.starts_with(&mark))
            .fold(String::new(), |all, line| all + line + "\n"))
    }

    /// Starts a script without waiting for its end.
    pub fn begin(&self, script: &str) -> Result<()> {
        self.shell.input(format!("{script}\n").as_bytes())
    }
}
