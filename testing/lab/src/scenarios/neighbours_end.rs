//! Common final checks of the neighbour scenarios: the guests' kernel logs, and the daemon's end.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::channel::Session;
use crate::guest::Guest;

/// Fails if a guest's kernel log has complaints. `sh` runs a command in that guest.
pub fn kernel_is_content(name: &str, guest: &Guest, sh: impl Fn(&str) -> Result<String>) -> Result<()> {
    let log = sh(
        "dmesg | grep -e 'BUG:' -e Oops -e WARNING -e 'Call Trace' -e 'blocked for more' -e 'refcount_t' || true",
    )?;
    let trouble = guest.trouble();
    if !log.trim().is_empty() || !trouble.is_empty() {
        let tail = sh("dmesg | tail -n 60")?;
        bail!("the kernel of {name} complains: {} {trouble:?}\n{tail}", log.trim());
    }
    Ok(())
}

/// Ends the host daemon, which must still run and end successfully.
pub fn end_daemon(daemon: &Session) -> Result<()> {
    if let Some(code) = daemon.try_wait() {
        bail!("The host daemon ended with status {code} while guests used it:\n{}", daemon.err.tail(15));
    }
    daemon.signal(15)?;
    match daemon.wait(Duration::from_secs(60))? {
        Some(0) => Ok(()),
        code => bail!("The host daemon ended with {code:?} at SIGTERM:\n{}", daemon.err.tail(15)),
    }
}
