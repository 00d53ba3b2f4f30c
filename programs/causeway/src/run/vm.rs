//! Runs a Linux guest.

use std::process::ExitCode;

use anyhow::bail;
use control_api::discovery;
use monitor::description::VmDescription;
use monitor::vm::{Incoming, Outcome};

use crate::output;

/// Runs the VM until it ends.
pub fn run(
    mut description: VmDescription,
    incoming: Option<Incoming>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let socket = match &description.api_socket {
        Some(socket) => socket.clone(),
        None => {
            let directory = discovery::runtime_directory();
            discovery::prepare_directory(&directory)?;
            discovery::socket_of(&directory, &description.name)
        }
    };
    // The migration socket is beside it, with a longer name.
    if control_api::migration::socket_of(&socket).as_os_str().len() > 107 {
        bail!(
            "The API socket {} has a longer path than Unix sockets take, 99 bytes; write --api-socket",
            socket.display()
        );
    }
    // The sandbox permits the monitor to remove paths of the description.
    description.api_socket = Some(socket.clone());
    let outcome = monitor::vm::run(description, socket, incoming)?;
    let name = match outcome {
        Outcome::PowerOff => "power-off",
        Outcome::Reboot => "reboot",
        Outcome::Stopped => "stopped",
        Outcome::Moved => "moved",
    };
    if json {
        output::print_json(&serde_json::json!({ "outcome": name }))?;
    }
    Ok(ExitCode::SUCCESS)
}
