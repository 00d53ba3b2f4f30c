//! `causeway host`.

use std::time::Duration;

use anyhow::Context as _;
use host::access::Access;
use host::cluster::ClusterConfig;
use host::engine::EngineSetup;
use host::{Daemon, DaemonConfig, DirectorySource, FabricConfig};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::HostArgs;
use crate::exposure::{self, Exposed};
use crate::output;

/// Runs the daemon until a signal.
pub fn host(args: &HostArgs, json: bool) -> anyhow::Result<()> {
    // Before the sockets exist: a signal during the start must end the daemon cleanly, too.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("Signals can't be listened to")?;
    let config = DaemonConfig {
        socket: args.socket.clone(),
        access: Access { uids: args.allow_uid.clone(), gids: args.allow_gid.clone() },
        metrics: args.metrics,
        sandbox: !args.no_sandbox,
        direct_messages: !args.no_direct_messages,
        fabric: fabric(args)?,
        neighbours: args.neighbourhoods.config()?,
        engine: EngineSetup {
            cpu: args.engine_cpu,
            busy_window: Duration::from_millis(args.doorbell_window),
            ..EngineSetup::default()
        },
    };
    let daemon = Daemon::start(&config)?;
    if let Some(service) = args.cluster.as_ref().filter(|_| args.keys.ca.is_none()) {
        tracing::warn!(
            "The cluster service isn't authenticated: this daemon trusts any server that answers at {service}; --ca, --cert and --key authenticate it"
        );
    }
    if json {
        let metrics = daemon.metrics().map(|address| address.to_string());
        output::print_json(&serde_json::json!({ "socket": daemon.socket(), "metrics": metrics }))?;
    } else {
        tracing::info!("The host daemon serves monitors at {}", daemon.socket().display());
    }
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "The host daemon ends: its NICs fail until it is back");
    }
    drop(daemon);
    Ok(())
}

/// Returns the configuration for other hosts, if any.
fn fabric(args: &HostArgs) -> anyhow::Result<Option<FabricConfig>> {
    let directory = match (&args.directory, &args.cluster, &args.name) {
        (Some(file), ..) => DirectorySource::File(file.clone()),
        (None, Some(address), Some(name)) => {
            let service = args.keys.service(address)?;
            DirectorySource::Cluster(ClusterConfig { service, name: name.clone() })
        }
        _ => return Ok(None),
    };
    if let Some(address) = args.fabric_address {
        let exposed = Exposed {
            flag: "--fabric-address",
            address: &address.to_string(),
            key_flag: "--cluster-key",
            risk: "anyone who can send packets there can read and write memory that guests have registered",
        };
        exposure::check(exposed, [address.ip()], args.cluster_key.is_some(), args.insecure)?;
    }
    // The command line requires both or none.
    Ok(args.fabric_address.map(|address| FabricConfig {
        directory,
        address,
        cluster_key: args.cluster_key.clone(),
        verbs: args.verbs,
    }))
}
