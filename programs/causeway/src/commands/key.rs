//! `causeway key`: creates the key that hosts of a cluster share.

use host::transport::ClusterKey;

use crate::cli::KeyArgs;
use crate::output;

/// Writes a new cluster key.
pub fn key(args: &KeyArgs, json: bool) -> anyhow::Result<()> {
    ClusterKey::create(&args.file)?;
    if json {
        output::print_json(&serde_json::json!({ "file": args.file }))
    } else {
        let file = args.file.display();
        output::print(&format!(
            "{file} has a new key; copy it to every host, and give it to `causeway host --cluster-key`\n"
        ))
    }
}
