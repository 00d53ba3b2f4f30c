//! The command line.

pub mod cluster;
mod migrate;
pub mod neighbourhood;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use monitor::description::{BootProtocol, ByteSize, CpuList, IrqchipKind, OnReboot, SandboxMode, written};
use monitor::dsm::NodeAddress;

use crate::run::flags;

pub use migrate::{DrainArgs, Member, MigrateArgs, TransferArgs};

/// Virtual machines on Linux KVM.
#[derive(Debug, Parser)]
#[command(name = "causeway", version, max_term_width = 110, arg_required_else_help = true)]
pub struct Cli {
    /// Print JSON to standard output, and errors as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to log to standard error: error, warn, info, debug, trace, off, or TARGET=LEVEL,...  [default: info; or RUST_LOG]
    #[arg(long, global = true, value_name = "FILTER")]
    pub log_level: Option<String>,
    /// Log one JSON object per line
    #[arg(long, global = true)]
    pub log_json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a VM in the foreground, described by a TOML file, by flags, or by both (flags win)
    Run(Box<RunArgs>),
    /// List the VMs that run on this host, by their sockets in the runtime directory
    List,
    /// Show the live tree of a VM's devices, or of the host's daemon (`inspect host`), with counters
    Inspect(InspectArgs),
    /// Stop a VM's vCPUs and devices until `resume`
    Pause(Target),
    /// Resume a paused VM
    Resume(ForcedTarget),
    /// Press a VM's reset button
    Reset(ForcedTarget),
    /// Switch a VM's commodity NIC between its card and the card's emulation while the guest runs (docs/reference/vpio.md)
    Nic(NicArgs),
    /// Move a running VM to another monitor, which waits for it with `causeway run --incoming`
    Migrate(MigrateArgs),
    /// Move all VMs of this host to another one, as one migration: all of them, or none
    Drain(DrainArgs),
    /// End a VM: by its power button, or at once
    Stop(StopArgs),
    /// Run this host's daemon in the foreground: it serves RDMA NICs to VMs
    Host(HostArgs),
    /// Share one card of this host between VMs by time slices, in the foreground; each guest uses its own driver (docs/reference/vpio.md)
    Card(CardArgs),
    /// Change what a VM may use of this host's RDMA: quotas and rates, at once (root and the daemon's user only)
    Limits(LimitsArgs),
    /// Write a new cluster key for `causeway host --cluster-key` to a file that isn't there yet
    Key(KeyArgs),
    /// Run or query the cluster service: where VMs run, and which VMs are connected (docs/how-to/run-the-cluster-service.md)
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Inspect the memory that nodes of a VM share
    #[command(subcommand)]
    Dsm(DsmCommand),
    /// Show what this host supports, what is missing and how to get it
    Doctor,
}

/// A VM, and whether the user accepts the risk that it runs twice.
#[derive(Debug, Args)]
pub struct ForcedTarget {
    /// The VM to act on.
    #[command(flatten)]
    pub target: Target,
    /// For a VM in doubt (`causeway list`): run it here although it may run at the other host of its migration. Only if it certainly
    /// doesn't run there: two copies write the same disks
    #[arg(long)]
    pub force: bool,
}

/// Which VM.
#[derive(Debug, Args)]
pub struct Target {
    /// Name of the VM; not needed when only one runs
    pub name: Option<String>,
    /// The VM whose API is at this socket, instead of a name
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
}

/// `causeway nic`.
#[derive(Debug, Args)]
pub struct NicArgs {
    /// Which VM.
    #[command(flatten)]
    pub target: Target,
    /// Which NIC, as `causeway inspect` names it
    #[arg(long, value_name = "NIC", default_value = "nic0")]
    pub nic: String,
    /// What the guest drives: the host's card, or the card's emulation with the tap that --nic named (`--nic vpio:ADDRESS,tap=NAME`)
    #[arg(long)]
    pub behind: Behind,
}

/// Backend of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Behind {
    /// A card of the host, guarded by its device model.
    Card,
    /// The card's emulation.
    Emulation,
    /// The card without its device model: the guest controls all of it, and it can access all of the guest's memory.
    Passthrough,
}

/// `causeway inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Name of the VM, not needed when only one runs; or host, for the host's daemon
    pub name: Option<String>,
    /// Which part of the tree, for instance disks/disk0
    pub path: Option<String>,
    /// The VM whose API is at this socket, instead of a name
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The host daemon at this socket, instead of a VM
    #[arg(long, value_name = "PATH", conflicts_with = "socket")]
    pub daemon: Option<PathBuf>,
    /// The daemon of a shared card whose sockets are in this folder, instead of a VM
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["socket", "daemon", "name"])]
    pub card: Option<PathBuf>,
}

/// `causeway host`.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Socket for monitors; the folder of the same name with .d, beside it, is used as well
    #[arg(long, value_name = "PATH", default_value = control_api::host::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// A user who may have NICs, besides root and the daemon's own; may be given several times
    #[arg(long, value_name = "UID")]
    pub allow_uid: Vec<u32>,
    /// A primary group whose users may have NICs; may be given several times
    #[arg(long, value_name = "GID")]
    pub allow_gid: Vec<u32>,
    /// Serve metrics at this address by HTTP, to every client that can connect  [default: the socket `metrics` in the folder only]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// RDMA to other hosts: a file with the hosts, their VMs and their addresses (docs/how-to/rdma-between-hosts.md)
    #[arg(long, value_name = "PATH", requires = "fabric_address", group = "places")]
    pub directory: Option<PathBuf>,
    /// RDMA to other hosts: the cluster service, in place of a file (docs/how-to/run-the-cluster-service.md); several instances separated
    /// by commas
    #[arg(long, value_name = "HOST:PORT", requires_all = ["fabric_address", "name"], group = "places")]
    pub cluster: Option<String>,
    /// This host's name in the cluster
    #[arg(long, value_name = "HOST", requires = "cluster")]
    pub name: Option<String>,
    /// Keys for the cluster service, where it has some.
    #[command(flatten)]
    pub keys: cluster::KeysArgs,
    /// This host's address for packets of other hosts by UDP and, with --cluster, for their migration messages by TCP; with --directory,
    /// one of its hosts
    #[arg(long, value_name = "ADDRESS:PORT", requires = "places")]
    pub fabric_address: Option<SocketAddr>,
    /// Exchange the messages of migrations with other hosts through the cluster service only, and listen on no TCP port for them: where
    /// hosts may not connect to each other by TCP. Switchovers take longer, and need the service
    #[arg(long, requires = "cluster")]
    pub no_direct_messages: bool,
    /// Encrypt and authenticate packets and messages between hosts with the key in this file, the same on all hosts (`causeway key` makes one)
    #[arg(long, value_name = "FILE", requires = "places")]
    pub cluster_key: Option<PathBuf>,
    /// Communicate with other hosts without a key: anyone who can reach --fabric-address can read and write memory that guests have
    /// registered
    #[arg(long, requires = "fabric_address")]
    pub insecure: bool,
    /// Offer transport verbs to VMs that the directory or the cluster service pins to it: their connections use this host's RDMA device
    /// with the address of --fabric-address (docs/how-to/rdma-between-hosts.md)
    #[arg(long, requires = "places")]
    pub verbs: bool,
    /// Run without seccomp, Landlock and dropped capabilities
    #[arg(long)]
    pub no_sandbox: bool,
    /// Settings of the neighbourhoods.
    #[command(flatten)]
    pub neighbourhoods: neighbourhood::NeighbourhoodArgs,
    /// A guest that writes 32 doorbells within this time is busy, and its doorbells become memory, milliseconds; more on hosts with slow
    /// exits, such as emulated ones
    #[arg(long, value_name = "MS", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub doorbell_window: u64,
    /// Bind the thread that does the RDMA work to this CPU
    #[arg(long, value_name = "CPU")]
    pub engine_cpu: Option<usize>,
}

/// `causeway card`.
#[derive(Debug, Args)]
pub struct CardArgs {
    /// PCI address of an RTL8139, e1000 or NE2000 that is bound to vfio-pci: 0000:03:00.0
    pub device: String,
    /// A guest: NAME[,mac=M][,uid=N]; its VM is run with --vfio-user FOLDER/NAME; may be given several times
    #[arg(long, value_name = "GUEST", required = true, value_parser = flags::card_guest)]
    pub guest: Vec<host::card::Guest>,
    /// Folder for the guests' sockets  [default: /run/causeway/card-DEVICE]
    #[arg(long, value_name = "PATH")]
    pub folder: Option<PathBuf>,
    /// Time slice: least time for which a guest has the card while others wait, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub slice: u64,
    /// Time limit for a quiescent point, after which a guest loses the card, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=3000))]
    pub limit: u64,
    /// Policy for violations: ignore, device-error or stop
    #[arg(long, value_name = "POLICY", default_value = "device-error", value_parser = flags::card_policy)]
    pub policy: host::card::FailurePolicy,
    /// Run without seccomp, Landlock and dropped capabilities
    #[arg(long)]
    pub no_sandbox: bool,
}

/// `causeway limits`.
#[derive(Debug, Args)]
pub struct LimitsArgs {
    /// Name of the VM, as given to `causeway run --name`
    pub vm: String,
    /// What changes; the rest stays.
    #[command(flatten)]
    pub change: LimitChange,
    /// The host daemon at this socket
    #[arg(long, value_name = "PATH", default_value = control_api::host::DEFAULT_SOCKET)]
    pub daemon: PathBuf,
}

/// What `causeway limits` changes.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct LimitChange {
    /// Queue pairs
    #[arg(long, value_name = "COUNT")]
    pub queue_pairs: Option<u32>,
    /// Completion queues
    #[arg(long, value_name = "COUNT")]
    pub completion_queues: Option<u32>,
    /// Shared receive queues
    #[arg(long, value_name = "COUNT")]
    pub shared_receive_queues: Option<u32>,
    /// Memory regions
    #[arg(long, value_name = "COUNT")]
    pub memory_regions: Option<u32>,
    /// Protection domains
    #[arg(long, value_name = "COUNT")]
    pub protection_domains: Option<u32>,
    /// Contexts of user processes
    #[arg(long, value_name = "COUNT")]
    pub contexts: Option<u32>,
    /// Memory in the regions of user processes: 512M, 1G
    #[arg(long, value_name = "SIZE")]
    pub registered_bytes: Option<ByteSize>,
    /// Messages that its queue pairs start per second; 0: as many as they can
    #[arg(long, value_name = "COUNT")]
    pub messages_per_second: Option<u64>,
    /// Bytes that its queue pairs move per second, 512M, 1G; 0B: as many as they can
    #[arg(long, value_name = "SIZE")]
    pub bytes_per_second: Option<ByteSize>,
}

/// `causeway key`.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// The new file; only its owner may read it
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// `causeway stop`.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// Which VM.
    #[command(flatten)]
    pub target: Target,
    /// Press the power button and wait until the guest has powered off (this is the default)
    #[arg(long, conflicts_with = "force")]
    pub power_button: bool,
    /// End the VM at once, like a power cut
    #[arg(long)]
    pub force: bool,
    /// How long to wait for the VM to end
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
}

/// `causeway dsm`.
#[derive(Debug, Subcommand)]
pub enum DsmCommand {
    /// Show the pages on which vCPUs stall most, with instructions, the mode of each page, and advice
    Top(DsmTopArgs),
}

/// `causeway dsm top`.
#[derive(Debug, Args)]
pub struct DsmTopArgs {
    /// Name of a VM that spans nodes; its node 0, on this host, answers
    pub name: String,
    /// Pages to show
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub count: usize,
}

/// Coherence protocol of a VM's nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Coherence {
    /// Write-invalidate: one node may write a page, or several may read it
    Invalidate,
    /// Write-update for pages that several nodes use all the time: their copies stay, and get updates
    Update,
}

impl Coherence {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Invalidate => "invalidate",
            Self::Update => "update",
        }
    }
}

/// `causeway run`.
#[derive(Debug, Args, Default)]
pub struct RunArgs {
    /// A VM description (TOML); with --payload, the program's arguments (after -- where they begin with a dash)
    #[arg(value_name = "VM.TOML | ARGUMENTS")]
    pub words: Vec<OsString>,
    /// Name of the VM  [default: the description's file name, or vm-PID]
    #[arg(long)]
    pub name: Option<String>,
    /// Linux kernel: bzImage or vmlinux
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initramfs archive; may be given several times
    #[arg(long, value_name = "FILE")]
    pub initrd: Vec<PathBuf>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    /// How the kernel is entered: auto, pvh or linux64
    #[arg(long, value_parser = flags::protocol)]
    pub protocol: Option<BootProtocol>,
    /// A static ELF program that is the whole guest, in ring 3 from its first instruction
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernel", "initrd", "cmdline", "protocol"])]
    pub payload: Option<PathBuf>,
    /// Monitors that the VM spans, all started here unless --peers is given; payload guests only
    #[arg(long, value_name = "N")]
    pub nodes: Option<u8>,
    /// Number of this node, from 0; with --peers
    #[arg(long, value_name = "NODE", requires = "peers")]
    pub node: Option<u8>,
    /// Addresses of all nodes of the VM, in order: unix:PATH, tcp:HOST:PORT or rdma:HOST:PORT, separated by commas
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',', requires = "node")]
    pub peers: Vec<NodeAddress>,
    /// With --peers: encrypt and authenticate links with the cluster key in this file, the same on all nodes (`causeway key FILE` makes one)
    #[arg(long, value_name = "FILE", requires = "peers")]
    pub cluster_key: Option<PathBuf>,
    /// Let --peers and --incoming communicate with other hosts without a key: anyone who can reach them can read and change the guest's
    /// memory
    #[arg(long)]
    pub insecure: bool,
    /// Coherence protocol of nodes: write-invalidate only, or also write-update for pages that many nodes use  [default: update]
    #[arg(long, value_name = "HOW")]
    pub coherence: Option<Coherence>,
    /// Folder for the last checkpoint of a VM of several nodes, on each node's host
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint: Option<PathBuf>,
    /// Interval of checkpoints, seconds  [default: 10]
    #[arg(long, value_name = "SECONDS", requires = "checkpoint")]
    pub checkpoint_every: Option<f64>,
    /// Restart from the last checkpoint in this folder, with the same program and settings on the same number of nodes
    #[arg(long, value_name = "FOLDER")]
    pub restart: Option<PathBuf>,
    /// vCPUs: a number, or sockets=S,cores=C; those of all nodes together
    #[arg(long, value_parser = flags::cpus)]
    pub cpus: Option<written::Cpus>,
    /// Host CPUs per vCPU, separated by commas: 2,3,4-7
    #[arg(long, value_name = "LIST,...", value_delimiter = ',')]
    pub pin: Option<Vec<CpuList>>,
    /// RAM: 512M, 1G
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Back RAM by reserved huge pages: 2M or 1G
    #[arg(long, value_name = "SIZE")]
    pub hugepages: Option<ByteSize>,
    /// Disk: FILE[,readonly][,serial=S][,queues=N][,direct][,logical_block_size=512|4096][,format=raw|qcow2|auto]; may be given several times
    #[arg(long, value_name = "DISK", value_parser = flags::disk)]
    pub disk: Vec<written::Disk>,
    /// Network: tap:NAME, fd:N, user or neighbours (of [neighbour]), then [,mac=M][,queues=N][,mtu=N]; may be given several times
    #[arg(long, value_name = "NET", value_parser = flags::net)]
    pub net: Vec<written::Net>,
    /// Commodity NIC with the guest's own driver: vpio:PCI-ADDRESS[,policy=ignore|device-error|machine-check|stop][,allow=promiscuous+loopback+any-address][,violations=FILE], passthrough:PCI-ADDRESS, or virtual:CARD,tap=NAME[,mac=M]; may be given several times
    #[arg(long, value_name = "NIC", value_parser = flags::nic)]
    pub nic: Vec<written::Nic>,
    /// RDMA NIC of `causeway host`: segment=NAME[,name=N][,mac=M][,tap=NAME][,host=SOCKET][,slot=N]; may be given several times
    #[arg(long, value_name = "NIC", value_parser = flags::rdma)]
    pub rdma: Vec<written::Rdma>,
    /// PCI device of another process: SOCKET[,name=N][,slot=N]; may be given several times
    #[arg(long, value_name = "DEVICE", value_parser = flags::vfio_user)]
    pub vfio_user: Vec<written::VfioUser>,
    /// Random-number device: on or off  [default: on]
    #[arg(long, value_name = "on|off", num_args = 0..=1, require_equals = true, default_missing_value = "on", value_parser = flags::on_off)]
    pub rng: Option<bool>,
    /// vsock device: cid=N,socket=PATH
    #[arg(long, value_name = "VSOCK", value_parser = flags::vsock)]
    pub vsock: Option<written::Vsock>,
    /// Serial console: stdio, pty, file:PATH, socket:PATH or null  [default: stdio]
    #[arg(long, value_name = "WHERE")]
    pub console: Option<String>,
    /// With --console file:PATH: size at which PATH becomes PATH.1 and restarts empty, 64K to 1T  [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub console_limit: Option<ByteSize>,
    /// API socket  [default: NAME.sock in $XDG_RUNTIME_DIR/causeway or /run/causeway]
    #[arg(long, value_name = "PATH")]
    pub api_socket: Option<PathBuf>,
    /// Don't boot: wait at this address for the migration of a VM with the same description (`causeway migrate`)
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "payload")]
    pub incoming: Option<SocketAddr>,
    /// With --incoming: accept encrypted streams only, with the cluster key in this file (`causeway key FILE` makes one; `causeway
    /// migrate --key`)
    #[arg(long, value_name = "FILE", requires = "incoming")]
    pub incoming_key: Option<PathBuf>,
    /// Interrupt controllers: in the kernel, or in the monitor (x2APIC only)  [default: kernel]
    #[arg(long, value_name = "WHERE", value_parser = flags::interrupts, conflicts_with = "payload")]
    pub interrupts: Option<IrqchipKind>,
    /// Confinement: on, log (show what would be refused) or off  [default: on]
    #[arg(long, value_parser = flags::sandbox)]
    pub sandbox: Option<SandboxMode>,
    /// What a guest's reboot does: restart or stop  [default: restart]
    #[arg(long, value_parser = flags::on_reboot)]
    pub on_reboot: Option<OnReboot>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    /// `--verbs` requires the VMs' places, from the file or from the service.
    #[test]
    fn verbs_are_offered_with_a_file_or_a_service() {
        use clap::Parser as _;
        let of = |line: &str| {
            let words = ["causeway", "host", "--verbs"]
                .into_iter()
                .chain(line.split(' ').filter(|word| !word.is_empty()));
            match super::Cli::try_parse_from(words).map(|cli| cli.command) {
                Ok(super::Command::Host(args)) => Some(args.verbs),
                _ => None,
            }
        };
        assert_eq!(of("--directory hosts.toml --fabric-address 10.0.0.1:4792"), Some(true));
        assert_eq!(of("--cluster 10.0.0.9:4793 --name h1 --fabric-address 10.0.0.1:4792"), Some(true));
        assert_eq!(of(""), None);
    }

    /// Daemons know each other by the cluster service, so only with one is there anything to switch off.
    #[test]
    fn direct_messages_are_switched_off_with_a_service_only() {
        use clap::Parser as _;
        let of = |line: &str| {
            let words = ["causeway", "host", "--no-direct-messages", "--fabric-address", "10.0.0.1:4792"];
            match super::Cli::try_parse_from(words.into_iter().chain(line.split(' '))).map(|cli| cli.command)
            {
                Ok(super::Command::Host(args)) => Some(args.no_direct_messages),
                _ => None,
            }
        };
        assert_eq!(of("--cluster 10.0.0.9:4793 --name h1"), Some(true));
        assert_eq!(of("--directory hosts.toml"), None);
    }

    /// `--mirror` takes names of disks, or none for all disks, in any position.
    #[test]
    fn disks_to_mirror_are_named_or_not() {
        use clap::Parser as _;
        let of = |line: &str| {
            let words = std::iter::once("causeway").chain(line.split(' '));
            match super::Cli::try_parse_from(words).unwrap().command {
                super::Command::Migrate(args) => args.transfer.mirror,
                _ => panic!("{line}"),
            }
        };
        assert_eq!(of("migrate a --to h:1"), None);
        assert_eq!(of("migrate a --to h:1 --mirror"), Some(vec![]));
        assert_eq!(of("migrate a --mirror --to h:1"), Some(vec![]));
        let two = Some(vec!["disk0".to_owned(), "disk2".to_owned()]);
        assert_eq!(of("migrate a --mirror disk0,disk2 --to h:1"), two);
        assert!(super::Cli::try_parse_from(["causeway", "migrate", "a", "--cancel", "--mirror"]).is_err());
    }
}
