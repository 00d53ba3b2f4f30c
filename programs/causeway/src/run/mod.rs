//! `causeway run`: from flags and file to a description, and from there to the guest's end.

mod describe;
pub mod flags;
mod options;
mod payload;
mod vm;

use std::process::ExitCode;

use monitor::description::Guest;

use crate::cli::RunArgs;

/// Runs a VM in the foreground.
pub fn run(args: RunArgs, json: bool) -> anyhow::Result<ExitCode> {
    let description = describe::describe(args)?;
    match &description.guest {
        Guest::Linux(_) => vm::run(description, json),
        Guest::Payload(payload) => payload::run(&description, payload, json),
    }
}
