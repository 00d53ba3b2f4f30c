//! `causeway card`: runs the daemon that shares one card between guests.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use host::card::{CardConfig, CardDaemon, Settings};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::CardArgs;
use crate::output;

/// Parent directory of the default socket directory.
const FOLDER: &str = "/run/causeway";

/// Runs the daemon of a card until a signal.
pub fn card(args: &CardArgs, json: bool) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("Signals can't be listened to")?;
    let config = CardConfig {
        device: args.device.clone(),
        folder: folder(args),
        guests: args.guest.clone(),
        settings: Settings {
            slice: Duration::from_millis(args.slice),
            limit: Duration::from_millis(args.limit),
            policy: args.policy,
        },
        sandbox: !args.no_sandbox,
    };
    let daemon = CardDaemon::start(&config)?;
    if json {
        output::print_json(&serde_json::json!({ "folder": daemon.folder() }))?;
    } else {
        tracing::info!("Card {} is shared at {}", args.device, daemon.folder().display());
    }
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "The card's daemon ends: its guests' cards fail until it is back");
    }
    drop(daemon);
    Ok(())
}

fn folder(args: &CardArgs) -> PathBuf {
    args.folder.clone().unwrap_or_else(|| PathBuf::from(format!("{FOLDER}/card-{}", args.device)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser as _;

    fn parse(line: &[&str]) -> Result<CardArgs, clap::Error> {
        let line = ["causeway", "card", "0000:03:00.0"].iter().chain(line);
        match Cli::try_parse_from(line)?.command {
            Command::Card(args) => Ok(args),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn guests_are_named_and_may_have_addresses_and_users() {
        let args = parse(&["--guest", "a", "--guest", "b,mac=52:54:00:00:00:02,uid=7"]).unwrap();
        assert_eq!(folder(&args), PathBuf::from("/run/causeway/card-0000:03:00.0"));
        let b = &args.guest[1];
        assert_eq!((b.name.as_str(), b.address, b.uid), ("b", Some([0x52, 0x54, 0, 0, 0, 2]), Some(7)));
        assert_eq!((args.guest[0].address, args.guest[0].uid), (None, None));
    }

    #[test]
    fn what_makes_no_guest_is_refused() {
        assert!(parse(&[]).is_err(), "nobody to share it");
        for guest in ["a,mac=x", "a,uid=-1", "a,b=c", ",mac=52:54:00:00:00:02"] {
            assert!(parse(&["--guest", guest]).is_err(), "{guest}");
        }
        assert!(parse(&["--guest", "a", "--policy", "hope"]).is_err());
    }
}
