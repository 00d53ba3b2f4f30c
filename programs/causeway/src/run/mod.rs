//! `causeway run`: creates a description from flags and file, and runs the guest to its end.

mod describe;
pub mod flags;
mod options;
mod payload;
pub mod spanning;
mod vm;

use std::process::ExitCode;

use cluster_key::ClusterKey;
use monitor::description::Guest;
use monitor::vm::Incoming;

use crate::cli::RunArgs;
use crate::exposure::{self, Exposed};

/// Runs a VM in the foreground.
pub fn run(mut args: RunArgs, json: bool) -> anyhow::Result<ExitCode> {
    let span = spanning::Span::take(&mut args)?;
    let key = args.incoming_key.take().as_deref().map(ClusterKey::load).transpose()?;
    let incoming = args.incoming.take().map(|address| Incoming { address, key });
    if let Some(Incoming { address, key }) = &incoming {
        let exposed = Exposed {
            flag: "--incoming",
            address: &address.to_string(),
            key_flag: "--incoming-key",
            risk: "anyone who can reach it can send a VM in place of yours, and anyone on the network path can read and change its memory",
        };
        exposure::check(exposed, [address.ip()], key.is_some(), args.insecure)?;
    }
    let description = describe::describe(args)?;
    match (&description.guest, span) {
        (Guest::Linux(_), _) => vm::run(description, incoming, json),
        (Guest::Payload(_), _) if incoming.is_some() => {
            anyhow::bail!("--incoming: payload guests can't move; describe a VM with a kernel")
        }
        (Guest::Payload(payload), None) => payload::run(&description, payload, json),
        (Guest::Payload(payload), Some(span)) => spanning::run(&description, payload, &span, json),
    }
}
