//! `causeway inspect`.

use crate::cli::{InspectArgs, Target};
use crate::output;

/// Prints the live device tree or a part of it. With `--socket`, a single word is the path.
pub fn inspect(args: InspectArgs, json: bool) -> anyhow::Result<()> {
    let (name, path) = match (&args.socket, args.name, args.path) {
        (Some(_), name, None) => (None, name),
        (_, name, path) => (name, path),
    };
    let (_, client) = super::select(&Target { name, socket: args.socket })?;
    let tree = client.inspect(path.as_deref())?;
    if json { output::print_json(&tree) } else { output::print(&output::tree(&tree)) }
}
