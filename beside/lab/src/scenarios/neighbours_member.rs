//! A guest with neighbours that takes commands.

use crate::channel::{Output, Session};
use crate::guest::Guest;
use crate::host::Host;
use crate::rdma::{self, Runs};
use anyhow::{Context, Result};
use std::time::Duration;

/// For a command in a guest.
pub const PATIENCE: Duration = Duration::from_secs(480);

/// See the module.
pub struct Member<'a> {
    /// Its name, and its monitor's.
    pub name: &'static str,
    /// The guest and its console.
    pub guest: Guest,
    /// The host that it runs on.
    pub host: &'a Host,
}

impl Runs for Member<'_> {
    fn start(&self, script: &str) -> Result<Session> {
        self.host.start(&self.command(script), None, None)
    }

    fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.host
            .run(&self.command(script), timeout)
            .with_context(|| format!("Guest {}: {:?}", self.name, script.lines().next().unwrap_or_default()))
    }
}

impl Member<'_> {
    fn command(&self, script: &str) -> String {
        let script = rdma::quoted(&format!("export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root; {script}"));
        format!("exec /share/.lab/lab in --wait 60 {} {script}", self.name)
    }

    /// Runs a script that must succeed, and returns what it printed.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.run(script, PATIENCE)?.success().with_context(|| {
            format!("{:?} failed in guest {}", script.trim().lines().next().unwrap_or_default(), self.name)
        })
    }
}
