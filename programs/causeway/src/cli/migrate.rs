//! `causeway migrate` and `causeway drain`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::Target;

/// How memory is copied, and when the guest is stopped.
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// Limit for the blackout, milliseconds: memory is copied again until the rest is expected to fit
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(0..=600_000))]
    pub downtime: u64,
    /// Abort after this many seconds, unless the guest was stopped by then; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
    /// Limit for throttling vCPUs, and peers' RDMA writes into the VM, when memory changes faster than it is copied, per cent; 0: no
    /// throttling
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u8).range(0..=99))]
    pub max_throttle: u8,
    /// TCP streams for a VM's memory, at least 3 with post-copy  [default: 2, with post-copy 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub streams: Option<u8>,
    /// Also copy the content of disks, into the images of the destination's description (of the same size): these disks, or all that the
    /// guest may write and that aren't shared by both ends
    #[arg(long, value_name = "DISK,...", num_args = 0..=1, value_delimiter = ',')]
    pub mirror: Option<Vec<String>>,
    /// The daemon of this host, which finds the addresses of monitors that wait on the host named by --to
    #[arg(long, value_name = "PATH", default_value = control_api::host::DEFAULT_SOCKET)]
    pub daemon: PathBuf,
    /// Encrypt the streams with the cluster key in this file, which the monitors that wait must have, too (--incoming-key)
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
}

/// `causeway migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// Which VM.
    #[command(flatten)]
    pub target: Target,
    /// Migrate these VMs as a group: all of them, or none. With --to their monitors wait at consecutive ports from that one on, in this
    /// order, or at any port of the named host. Otherwise each VM of this host has its own address, and a command for the same group on
    /// another host migrates the others
    #[arg(long, value_name = "VM[=ADDRESS:PORT|HOST],...", value_delimiter = ',', conflicts_with_all = ["name", "socket"])]
    pub group: Vec<Member>,
    /// Where a monitor of the same description waits for it: an address, or the name of a host of the cluster (`causeway cluster hosts`)
    #[arg(long, value_name = "ADDRESS:PORT|HOST", required_unless_present_any = ["cancel", "group"])]
    pub to: Option<String>,
    /// How it is done.
    #[command(flatten)]
    pub transfer: TransferArgs,
    /// Post-copy: run the guest at the destination at once, and copy its memory afterwards. If a host or the network between them fails
    /// before all pages are present, the VM is lost
    #[arg(long, conflicts_with_all = ["post_copy_after", "group"])]
    pub post_copy: bool,
    /// Hybrid: at most this many rounds of pre-copy, then post-copy; earlier when rounds don't shrink, or at --timeout
    #[arg(long, value_name = "COPIES", conflicts_with = "group", value_parser = clap::value_parser!(u32).range(1..))]
    pub post_copy_after: Option<u32>,
    /// Cancel this VM's running migration; the guest stays here, and so do the VMs of its group
    #[arg(long, conflicts_with_all = ["to", "group", "downtime", "timeout", "max_throttle", "streams", "mirror", "key", "post_copy", "post_copy_after"])]
    pub cancel: bool,
}

/// `causeway drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Where monitors of the same descriptions wait: at consecutive ports from this one on, in the order of the VMs' names. Or the name
    /// of a host of the cluster, where they may wait at any port
    #[arg(long, value_name = "ADDRESS:PORT|HOST")]
    pub to: String,
    /// How it is done.
    #[command(flatten)]
    pub transfer: TransferArgs,
}

/// A VM of a group, and its destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The VM's name.
    pub name: String,
    /// Address and port of its waiting monitor, if given separately.
    pub to: Option<String>,
}

impl FromStr for Member {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, to) = match text.split_once('=') {
            Some((name, to)) => (name, Some(to)),
            None => (text, None),
        };
        if name.is_empty() || to == Some("") {
            return Err("a VM of a group is its name, or its name and where it goes, like a=192.0.2.1:7000"
                .to_owned());
        }
        Ok(Self { name: name.to_owned(), to: to.map(str::to_owned) })
    }
}
