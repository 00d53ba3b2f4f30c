//! `causeway limits`: changes resource limits of a VM's NICs while it runs.

use control_api::host::{HostClient, proto};

use crate::cli::{LimitChange, LimitsArgs};
use crate::output;

/// Sends the given limits to the host daemon; others stay.
pub fn limits(args: &LimitsArgs, json: bool) -> anyhow::Result<()> {
    let devices = HostClient::new(&args.daemon).set_limits(&args.vm, change(&args.change))?;
    if json {
        output::print_json(&serde_json::json!({ "vm": args.vm, "devices": devices }))
    } else {
        let noun = if devices == 1 { "NIC has" } else { "NICs have" };
        output::print(&format!(
            "{devices} {noun} new limits; `causeway inspect host vms/{}` shows them\n",
            args.vm
        ))
    }
}

fn change(change: &LimitChange) -> proto::Limits {
    proto::Limits {
        queue_pairs: change.queue_pairs,
        completion_queues: change.completion_queues,
        shared_receive_queues: change.shared_receive_queues,
        memory_regions: change.memory_regions,
        protection_domains: change.protection_domains,
        contexts: change.contexts,
        registered_bytes: change.registered_bytes.map(|size| size.0),
        messages_per_second: change.messages_per_second,
        bytes_per_second: change.bytes_per_second.map(|size| size.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser as _;

    #[test]
    fn only_what_is_given_changes() {
        let line = ["causeway", "limits", "a", "--queue-pairs", "0", "--bytes-per-second", "1G"];
        let Command::Limits(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!("another command")
        };
        let expected = proto::Limits {
            queue_pairs: Some(0),
            bytes_per_second: Some(1 << 30),
            ..proto::Limits::default()
        };
        assert_eq!((args.vm.as_str(), change(&args.change)), ("a", expected));
        assert!(Cli::try_parse_from(["causeway", "limits", "a"]).is_err(), "nothing to change");
    }
}
