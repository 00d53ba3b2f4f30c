//! `causeway`: virtual machines on Linux KVM. One module per command in `commands/`.
//!
//! Exit status: 0 if the command succeeded, 1 otherwise. `run --payload` returns the payload's own status.

mod cli;
mod commands;
mod doctor;
mod exposure;
mod failure;
mod open_files;
mod output;
mod run;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    failure::install_panic_hook();
    #[cfg(debug_assertions)]
    failure::panic_for_tests();
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    open_files::raise_limit();
    let json = cli.json;
    let log = telemetry::logging::LogOptions { filter: cli.log_level.clone(), json: cli.log_json };
    let result = telemetry::logging::init(&log).map_err(anyhow::Error::new).and_then(|()| commands::run(cli));
    result.unwrap_or_else(|error| failure::report(&error, json))
}
