//! The commands, one module each.

mod card;
mod cluster;
mod control;
mod doctor;
mod dsm_top;
mod host;
mod inspect;
mod key;
mod limits;
mod list;
mod migrate;
mod migrate_group;
mod stop;

use std::process::ExitCode;

use control_api::client::Client;
use control_api::discovery;

use crate::cli::{Cli, Command, DsmCommand, ForcedTarget, Target};

/// Executes the command line.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let json = cli.json;
    match cli.command {
        Command::Run(args) => return crate::run::run(*args, json),
        Command::List => list::list(json)?,
        Command::Inspect(args) => inspect::inspect(args, json)?,
        Command::Pause(target) => control::control(&target, json, "paused", Client::pause)?,
        Command::Resume(ForcedTarget { target, force }) => {
            control::control(&target, json, "running again", |client| client.resume(force))?;
        }
        Command::Reset(ForcedTarget { target, force }) => {
            control::control(&target, json, "reset", |client| client.reset(force))?;
        }
        Command::Nic(args) => control::nic(&args, json)?,
        Command::Migrate(args) => return migrate::migrate(&args, json),
        Command::Drain(args) => return migrate_group::drain(&args, json),
        Command::Stop(args) => stop::stop(&args, json)?,
        Command::Host(args) => host::host(&args, json)?,
        Command::Card(args) => card::card(&args, json)?,
        Command::Limits(args) => limits::limits(&args, json)?,
        Command::Key(args) => key::key(&args, json)?,
        Command::Cluster(command) => cluster::cluster(&command, json)?,
        Command::Dsm(DsmCommand::Top(args)) => dsm_top::top(&args, json)?,
        Command::Doctor => return doctor::doctor(json),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a command's VM: its name for messages, and its client.
fn select(target: &Target) -> anyhow::Result<(String, Client)> {
    if let Some(socket) = &target.socket {
        return Ok((socket.display().to_string(), Client::new(socket)));
    }
    let found = discovery::select(&discovery::runtime_directory(), target.name.as_deref())?;
    Ok((found.name.clone(), found.client()))
}
