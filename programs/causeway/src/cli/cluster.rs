//! `causeway cluster`, and what others need to speak with the cluster service.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use control_api::cluster::{Keys, Service};

/// `causeway cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Run the cluster service in the foreground: where each VM is, who is connected to whom, which migrations are under way
    Serve(ServeArgs),
    /// Show the service, groups and migrations
    Status(AskArgs),
    /// Show the hosts, and whether they are heard of
    Hosts(AskArgs),
    /// Show the VMs: where they run, in which epoch, with which addresses
    Vms(AskArgs),
}

/// Files for mutual TLS.
#[derive(Debug, Args, Clone)]
pub struct KeysArgs {
    /// Speak TLS, and only with those whose certificates this authority has signed (PEM)
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
    /// The keys, where they are given.
    ///
    /// # Errors
    /// When a file can't be read.
    pub fn load(&self) -> anyhow::Result<Option<Keys>> {
        let (Some(ca), Some(cert), Some(key)) = (&self.ca, &self.cert, &self.key) else { return Ok(None) };
        Ok(Some(Keys::load(ca, cert, key)?))
    }

    /// A service, and how to speak with it.
    ///
    /// # Errors
    /// When a file can't be read, or the address is none.
    pub fn service(&self, address: &str) -> anyhow::Result<Service> {
        Service::new(address, self.load()?).context("--cluster can't be used")
    }
}

/// `causeway cluster serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// The database; made where there is none
    #[arg(long, value_name = "FILE")]
    pub state: PathBuf,
    /// Keys; without them nothing is authenticated.
    #[command(flatten)]
    pub keys: KeysArgs,
    /// Serve metrics at this address by HTTP, to everybody who reaches it
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// A host that isn't heard of for so long counts as silent, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease: u64,
    /// How long a migration's switch-over may take, in milliseconds: what takes longer is given up, and the VM goes on where it was.
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(10..=600_000))]
    pub switch_limit: u64,
    /// Bytes of payload per packet between hosts: a multiple of 4 from 256 to 4096; 1376 fills links with an MTU of 1500  [default: as before, or 1376]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// UDP sockets of each host, on consecutive ports  [default: as before, or 2]
    #[arg(long, value_name = "COUNT")]
    pub sockets: Option<u16>,
}

/// `causeway cluster status|hosts|vms`.
#[derive(Debug, Args)]
pub struct AskArgs {
    /// The cluster service
    #[arg(long, value_name = "HOST:PORT")]
    pub cluster: String,
    /// Keys, where the service has some.
    #[command(flatten)]
    pub keys: KeysArgs,
}
