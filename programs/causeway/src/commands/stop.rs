//! `causeway stop`: requests the end and waits for it.

use std::time::{Duration, Instant};

use anyhow::bail;
use control_api::client::Client;
use control_api::discovery::{SocketState, probe};

use crate::cli::StopArgs;
use crate::output;

/// Interval at which the command checks whether the VM has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Stops a VM.
pub fn stop(args: &StopArgs, json: bool) -> anyhow::Result<()> {
    let (name, client) = super::select(&args.target)?;
    if args.force {
        client.stop()?;
    } else {
        client.power_button()?;
    }
    let timeout = Duration::from_secs(args.timeout);
    if !ends_within(&client, timeout) {
        let advice =
            if args.force { "its monitor may be stuck" } else { "causeway stop --force ends it at once" };
        bail!("{name} was still there after {} s; {advice}", timeout.as_secs());
    }
    if json {
        return output::print_json(&serde_json::json!({ "ended": true }));
    }
    output::print(&format!("{name} has ended\n"))
}

fn ends_within(client: &Client, timeout: Duration) -> bool {
    let start = Instant::now();
    loop {
        if probe(client.socket()) == SocketState::Stale {
            return true;
        }
        if start.elapsed() >= timeout {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
