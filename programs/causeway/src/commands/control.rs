//! `causeway pause`, `resume`, `reset`, `nic`: one request each.

use control_api::client::{Client, ClientError};
use control_api::types::{Done, NicBehind};

use crate::cli::{Behind, NicArgs, Target};
use crate::output;

/// Sends a request and prints the outcome.
pub fn control(
    target: &Target,
    json: bool,
    result: &str,
    request: impl FnOnce(&Client) -> Result<Done, ClientError>,
) -> anyhow::Result<()> {
    let (name, client) = super::select(target)?;
    let done = request(&client)?;
    if json { output::print_json(&done) } else { output::print(&format!("{name} is {result}\n")) }
}

/// Changes a NIC's backend.
pub fn nic(args: &NicArgs, json: bool) -> anyhow::Result<()> {
    let behind = match args.behind {
        Behind::Card => NicBehind::Card,
        Behind::Emulation => NicBehind::Emulation,
        Behind::Passthrough => NicBehind::Passthrough,
    };
    let (name, client) = super::select(&args.target)?;
    let done = client.change_nic(&args.nic, behind)?;
    if json {
        output::print_json(&done)
    } else {
        let text = match behind {
            NicBehind::Card | NicBehind::Emulation => format!("has its {behind} behind it"),
            NicBehind::Passthrough => "has its card passed through".to_owned(),
        };
        output::print(&format!("{} of {name} {text}\n", args.nic))
    }
}
