//! `causeway cluster`, and the options of other commands for the cluster service.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use cluster::etcd_config::{EtcdConfig, EtcdTls};
use cluster::kv::Kv;
use cluster::{Candidate, RedbStore, Store as _};
use control_api::cluster::{Keys, Service};
use host::transport::TransportKind;

/// Subcommands of `causeway cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Run the cluster service in the foreground: it records where each VM runs, which VMs are connected, and migrations in progress
    Serve(Box<ServeArgs>),
    /// Show the service and migrations
    Status(AskArgs),
    /// Show the hosts, and whether they report
    Hosts(AskArgs),
    /// Show the VMs: where they run, in which epoch, with which addresses
    Vms(AskArgs),
    /// Declare a host permanently gone: its VMs are lost and may be started on other hosts, and migrations stop waiting for it. Refused
    /// while it reports
    Forget(ForgetArgs),
}

/// Arguments of `causeway cluster forget`.
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// Name of the host. Its VMs must not run any more: nothing here can stop them
    #[arg(value_name = "HOST")]
    pub host: String,
    /// The service.
    #[command(flatten)]
    pub ask: AskArgs,
}

/// Files for mutual TLS.
#[derive(Debug, Args, Clone)]
pub struct KeysArgs {
    /// Use TLS, and only with peers whose certificates this authority has signed (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["cert", "key"])]
    pub ca: Option<PathBuf>,
    /// Own certificate (PEM); its name must be what others connect to
    #[arg(long, value_name = "FILE", requires_all = ["ca", "key"])]
    pub cert: Option<PathBuf>,
    /// Private key of --cert (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["ca", "cert"])]
    pub key: Option<PathBuf>,
}

impl KeysArgs {
    /// Loads the keys, if given.
    ///
    /// # Errors
    /// A file can't be read.
    pub fn load(&self) -> anyhow::Result<Option<Keys>> {
        let (Some(ca), Some(cert), Some(key)) = (&self.ca, &self.cert, &self.key) else { return Ok(None) };
        Ok(Some(Keys::load(ca, cert, key)?))
    }

    /// Creates a service's address with the connection's keys.
    ///
    /// # Errors
    /// A file can't be read, or the address is invalid.
    pub fn service(&self, address: &str) -> anyhow::Result<Service> {
        Service::new(address, self.load()?).context("--cluster can't be used")
    }
}

/// etcd, and this instance among several.
#[derive(Debug, Args, Clone)]
pub struct EtcdArgs {
    /// Keep the state in etcd, as one of several instances of which one leads: members of etcd separated by commas, as http://HOST:PORT
    /// or https://HOST:PORT (docs/how-to/run-the-cluster-service.md)
    #[arg(long, value_name = "URL,URL", conflicts_with = "state")]
    pub etcd: Option<String>,
    /// Prefix of its keys; the same for all instances of a cluster, another for each cluster
    #[arg(long, value_name = "PREFIX", default_value = "/causeway", requires = "etcd", value_parser = prefix)]
    pub etcd_prefix: String,
    /// Use TLS with etcd, whose certificates this authority has signed (PEM)
    #[arg(long, value_name = "FILE", requires = "etcd")]
    pub etcd_ca: Option<PathBuf>,
    /// Own certificate for etcd (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["etcd_ca", "etcd_key"])]
    pub etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["etcd_ca", "etcd_cert"])]
    pub etcd_key: Option<PathBuf>,
    /// User of etcd
    #[arg(long, value_name = "NAME", requires = "etcd_password_file")]
    pub etcd_user: Option<String>,
    /// A file with the user's password in its first line
    #[arg(long, value_name = "FILE", requires = "etcd_user")]
    pub etcd_password_file: Option<PathBuf>,
    /// Start with the state in this database of a former service, if etcd has none yet
    #[arg(long, value_name = "FILE", requires = "etcd")]
    pub etcd_import: Option<PathBuf>,
    /// The address at which daemons and the program reach this instance  [default: --listen]
    #[arg(long, value_name = "HOST:PORT", requires = "etcd")]
    pub advertise: Option<String>,
    /// Lease of the leading instance: if it doesn't renew it for this time, another one leads, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 6, requires = "etcd", value_parser = clap::value_parser!(u64).range(2..=60))]
    pub leader_lease: u64,
}

/// Parses a prefix of keys, which begins with a slash and doesn't end with one.
fn prefix(text: &str) -> Result<String, String> {
    let fine = text.len() > 1
        && text.len() <= 256
        && text.starts_with('/')
        && !text.ends_with('/')
        && text.bytes().all(|byte| byte.is_ascii_graphic());
    if fine { Ok(text.to_owned()) } else { Err("write /NAME, without a slash at the end".to_owned()) }
}

impl EtcdArgs {
    /// Returns etcd's client and this instance's role. Returns `None` for a single instance with a file.
    ///
    /// # Errors
    /// A file can't be read, an address is invalid, or this program was built without etcd.
    pub fn client(&self, listen: SocketAddr) -> anyhow::Result<Option<(Arc<dyn Kv>, Candidate)>> {
        let Some(members) = &self.etcd else { return Ok(None) };
        let mut config = EtcdConfig::new(members)?;
        if let Some(ca) = &self.etcd_ca {
            let identity = match (&self.etcd_cert, &self.etcd_key) {
                (Some(cert), Some(key)) => Some((EtcdConfig::read(cert)?, EtcdConfig::read(key)?)),
                _ => None,
            };
            config.tls = Some(EtcdTls { authority: EtcdConfig::read(ca)?, identity });
        }
        if let (Some(user), Some(file)) = (&self.etcd_user, &self.etcd_password_file) {
            let text = String::from_utf8_lossy(&EtcdConfig::read(file)?).into_owned();
            config.user = Some((user.clone(), text.lines().next().unwrap_or_default().to_owned()));
        }
        if self.advertise.is_none() && listen.ip().is_unspecified() {
            bail!(
                "--listen {listen} isn't an address at which others reach this instance: give it with --advertise HOST:PORT"
            );
        }
        if let Some(address) = &self.advertise {
            let port = address
                .rsplit_once(':')
                .and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
            if port.is_none_or(|port| port == 0) || !address.is_ascii() {
                bail!("--advertise {} is no address: write HOST:PORT", address.escape_debug());
            }
        }
        let client = config.client()?;
        let begin_with = match &self.etcd_import {
            // Opening it would create it.
            Some(file) if !file.exists() => bail!("--etcd-import {}: there is no such file", file.display()),
            Some(file) => Some(Arc::new(RedbStore::open(file)?.state().clone())),
            None => None,
        };
        let candidate = Candidate {
            begin_with,
            prefix: self.etcd_prefix.clone(),
            address: self.advertise.clone().unwrap_or_default(),
            lease: Duration::from_secs(self.leader_lease),
        };
        Ok(Some((client, candidate)))
    }
}

/// Arguments of `causeway cluster serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address to listen at
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Database of a single instance; created if it is missing
    #[arg(long, value_name = "FILE", required_unless_present = "etcd")]
    pub state: Option<PathBuf>,
    /// One of several instances: the state is in etcd, and one of them leads.
    #[command(flatten)]
    pub etcd: EtcdArgs,
    /// Keys; without them nothing is authenticated.
    #[command(flatten)]
    pub keys: KeysArgs,
    /// Serve metrics at this address by HTTP, to every client that can connect
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Lease of hosts: one that doesn't report for this time counts as silent, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease: u64,
    /// Limit for a migration's switchover, milliseconds: a longer one is aborted, and the VM resumes at its source
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(10..=600_000))]
    pub switch_limit: u64,
    /// Pin RDMA connections of a VM, or of all that aren't named (*), to a transport: local, fabric, wire or verbs; may be given several
    /// times. Hosts learn of it when they register, and NICs are pinned when they are attached
    #[arg(long, value_name = "VM=TRANSPORT", value_parser = pin)]
    pub pin: Vec<(String, TransportKind)>,
    /// Bytes of payload per packet between hosts: a multiple of 4 from 256 to 4096; 1376 fills links with an MTU of 1500  [default: as before, or 1376]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// UDP sockets of each host, on consecutive ports  [default: as before, or 2]
    #[arg(long, value_name = "COUNT")]
    pub sockets: Option<u16>,
}

/// Arguments of `causeway cluster status`, `hosts` and `vms`.
#[derive(Debug, Args)]
pub struct AskArgs {
    /// The cluster service; several instances separated by commas
    #[arg(long, value_name = "HOST:PORT")]
    pub cluster: String,
    /// Keys, where the service has some.
    #[command(flatten)]
    pub keys: KeysArgs,
}

fn pin(text: &str) -> Result<(String, TransportKind), String> {
    let (vm, transport) =
        text.split_once('=').filter(|(vm, _)| !vm.is_empty()).ok_or("write VM=TRANSPORT, or *=TRANSPORT")?;
    let transport = TransportKind::named(transport).ok_or("a transport is local, fabric, wire or verbs")?;
    Ok((vm.to_owned(), transport))
}
