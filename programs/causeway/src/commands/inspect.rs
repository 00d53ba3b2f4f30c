//! `causeway inspect`: prints the state of a VM's monitor or of the host daemon.

use anyhow::Context as _;
use control_api::host::{DEFAULT_SOCKET, HostClient};

use crate::cli::{InspectArgs, Target};
use crate::output;

/// The word for the host daemon in place of a VM's name.
const DAEMON: &str = "host";

/// Prints the live tree of a VM or of the host daemon, or a part of it. With `--socket` or `--daemon`, a single word is
/// the path.
pub fn inspect(args: InspectArgs, json: bool) -> anyhow::Result<()> {
    let tree = match args {
        InspectArgs { card: Some(folder), .. } => {
            let at = folder.join(host::card::STATE);
            host::card::state_of(&folder).with_context(|| {
                format!(
                    "The daemon of a card at {} doesn't report its state; is it running, and yours?",
                    at.display()
                )
            })?
        }
        InspectArgs { daemon: Some(socket), name, path, .. } => {
            // The word `host` is optional here.
            let path = path.or(name.filter(|name| name != DAEMON));
            HostClient::new(socket).inspect(path.as_deref())?
        }
        InspectArgs { socket: None, name: Some(name), path, .. } if name == DAEMON => {
            HostClient::new(DEFAULT_SOCKET).inspect(path.as_deref())?
        }
        InspectArgs { socket, name, path, .. } => {
            let (name, path) = match (&socket, name, path) {
                (Some(_), name, None) => (None, name),
                (_, name, path) => (name, path),
            };
            let (_, client) = super::select(&Target { name, socket })?;
            client.inspect(path.as_deref())?
        }
    };
    if json { output::print_json(&tree) } else { output::print(&output::tree(&tree)) }
}
