//! `causeway list`: prints the running VMs, with what their monitors report.

use std::time::Duration;

use control_api::discovery::{self, SocketState};
use control_api::types::VmSummary;
use monitor::description::ByteSize;
use serde::Serialize;

use crate::output;

/// Time-out, after which a VM is listed as not responding.
const TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Serialize)]
struct Row {
    name: String,
    socket: std::path::PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<VmSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Prints the running VMs. Ignores sockets of dead monitors.
pub fn list(json: bool) -> anyhow::Result<()> {
    let directory = discovery::runtime_directory();
    let running = discovery::find(&directory)?.into_iter().filter(|vm| vm.state != SocketState::Stale);
    let rows: Vec<Row> = running
        .map(|found| {
            let answer = found.client().with_timeout(TIMEOUT).summary();
            let error = answer.as_ref().err().map(|error| {
                let chain =
                    std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
                chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
            });
            Row { name: found.name, socket: found.socket, vm: answer.ok(), error }
        })
        .collect();
    if json {
        return output::print_json(&rows);
    }
    if rows.is_empty() {
        return output::print(&format!("No VM runs here (in {})\n", directory.display()));
    }
    let header = ["NAME", "STATE", "PID", "VCPUS", "MEMORY", "UPTIME", "GUEST"].map(str::to_owned).to_vec();
    let line = |row: Row| match row.vm {
        Some(vm) => vec![
            row.name,
            state(&vm),
            vm.pid.to_string(),
            vm.vcpus.to_string(),
            ByteSize(vm.memory_bytes).to_string(),
            uptime(vm.uptime_seconds),
            vm.guest,
        ],
        None => vec![row.name, "no answer".to_owned(), row.error.unwrap_or_default()],
    };
    output::print(&output::table(
        &std::iter::once(header).chain(rows.into_iter().map(line)).collect::<Vec<_>>(),
    ))
}

fn state(vm: &VmSummary) -> String {
    match &vm.waits_for {
        Some(other) => format!("{}, waits for {other} to move", vm.state),
        None => vm.state.to_string(),
    }
}

/// Formats an uptime: `3d 4h`, `5h 6m`, `7m 8s`, `9s`.
fn uptime(seconds: f64) -> String {
    let seconds = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_secs();
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use control_api::types::VmState;

    /// A VM that is queued behind a peer's switchover is shown with that peer.
    #[test]
    fn a_vm_that_waits_is_shown_with_what_it_waits_for() {
        let mut vm = super::VmSummary {
            name: "a".to_owned(),
            pid: 1,
            state: VmState::Running,
            guest: String::new(),
            vcpus: 1,
            memory_bytes: 0,
            uptime_seconds: 0.0,
            version: String::new(),
            rdma_nics: 1,
            waits_for: None,
        };
        assert_eq!(super::state(&vm), "running");
        vm.waits_for = Some("b".to_owned());
        assert_eq!(super::state(&vm), "running, waits for b to move");
    }

    #[test]
    fn uptimes_have_two_units_at_most() {
        let cases = [
            (0.9, "0s"),
            (59.0, "59s"),
            (61.0, "1m 1s"),
            (7260.0, "2h 1m"),
            (100_000.0, "1d 3h"),
            (-1.0, "0s"),
        ];
        for (seconds, text) in cases {
            assert_eq!(super::uptime(seconds), text);
        }
    }
}
