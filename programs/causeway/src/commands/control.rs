//! `causeway pause`, `resume`, `reset`: one request each.

use control_api::client::{Client, ClientError};
use control_api::types::Done;

use crate::cli::Target;
use crate::output;

/// Sends a request and says what came of it.
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
