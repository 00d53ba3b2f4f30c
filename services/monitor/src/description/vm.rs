//! A validated VM description. [`super::validate`] has checked every value in it.

use std::path::PathBuf;

use machine::interrupt::IrqchipKind;
use serde::Serialize;

use super::{CpuList, MacAddress};

/// The description of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmDescription {
    /// 1 to 64 of letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    pub name: String,
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// By vCPU, the host CPUs that it may run on; empty for no pinning.
    pub pinning: Vec<CpuList>,
    /// RAM: its size, and the host's pages for it.
    pub memory: Memory,
    /// NUMA nodes, never empty: without nodes in the description, one node has everything. Their memory adds up to [`Memory::size`], and
    /// every vCPU is in exactly one.
    pub numa: Vec<NumaNode>,
    /// Kernel or payload.
    pub guest: Guest,
    /// virtio-block devices `disk0`, `disk1`, ...
    pub disks: Vec<Disk>,
    /// virtio-net devices `net0`, `net1`, ...
    pub net: Vec<Net>,
    /// Commodity NICs, driven by the guest's own drivers.
    pub nics: Vec<Nic>,
    /// RDMA NICs of the host daemon.
    pub rdma: Vec<Rdma>,
    /// Devices of other processes.
    pub vfio_user: Vec<VfioUser>,
    /// Membership in a neighbourhood.
    pub neighbour: Option<Neighbour>,
    /// Whether there is a virtio-rng device.
    pub rng: bool,
    /// The virtio-vsock device.
    pub vsock: Option<Vsock>,
    /// Destination of the serial console.
    pub console: Console,
    /// Limit for the bytes of a console's file, 64 KiB to 1 TiB.
    pub console_limit_bytes: u64,
    /// Path of the API socket; `None`: the program chooses (`NAME.sock` in the runtime directory).
    pub api_socket: Option<PathBuf>,
    /// Where its interrupt controllers are; a payload has none.
    pub interrupts: IrqchipKind,
    /// Confinement of the monitor process.
    pub sandbox: SandboxMode,
    /// What a guest's reboot does.
    pub on_reboot: OnReboot,
}

/// Virtual CPUs: `sockets * cores`, 1 to 254.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cpus {
    /// Number of sockets.
    pub sockets: u8,
    /// Cores per socket.
    pub cores: u8,
}

impl Cpus {
    /// Number of vCPUs, 1 to 254.
    pub fn count(self) -> u8 {
        // Validation has limited the product.
        self.sockets.saturating_mul(self.cores)
    }
}

/// RAM of the whole VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Bytes, a multiple of the page size in use.
    pub size: u64,
    /// Host pages for it.
    pub hugepages: HugePages,
}

/// Page size of guest RAM on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum HugePages {
    /// 4 KiB pages; the host's settings determine transparent huge pages.
    #[serde(rename = "none")]
    None,
    /// Reserved 2 MiB pages (hugetlbfs).
    #[serde(rename = "2M")]
    Size2M,
    /// Reserved 1 GiB pages (hugetlbfs).
    #[serde(rename = "1G")]
    Size1G,
}

impl HugePages {
    /// Page size in bytes.
    pub fn page_size(self) -> u64 {
        match self {
            Self::None => 4 << 10,
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

/// A guest-visible NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// vCPU numbers.
    pub cpus: CpuList,
    /// Bytes of RAM; zero for a node with only CPUs.
    pub memory: u64,
    /// Distance to each node in order, as in the ACPI SLIT: 10 to itself, else 11 to 254 (255: unreachable).
    pub distances: Vec<u8>,
    /// Host node that its RAM is bound to.
    pub host_node: Option<u32>,
}

/// What a VM runs: kernel or payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guest {
    /// A Linux kernel.
    Linux(LinuxBoot),
    /// A static program that runs in ring 3 from its first instruction.
    Payload(Payload),
}

/// Boot of a Linux kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinuxBoot {
    /// bzImage or vmlinux.
    pub kernel: PathBuf,
    /// Initramfs archives, concatenated in this order.
    pub initrd: Vec<PathBuf>,
    /// Kernel command line, as written: at most 2047 bytes without NUL.
    pub cmdline: String,
    /// Boot protocol.
    pub protocol: BootProtocol,
}

/// Protocol that starts the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootProtocol {
    /// PVH if the kernel has a PVH note, else the Linux 64-bit protocol.
    Auto,
    /// PVH: the kernel's PVH note names the entry point.
    Pvh,
    /// The Linux 64-bit protocol.
    Linux64,
}

/// A ring-3 program without a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Payload {
    /// Static x86-64 ELF.
    pub program: PathBuf,
    /// Its arguments, without the program's name and without NUL bytes.
    pub arguments: Vec<String>,
}

/// A virtio-block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Image file or block device.
    pub path: PathBuf,
    /// Whether the guest may only read.
    pub readonly: bool,
    /// Guest-visible serial number, at most 20 printable ASCII bytes.
    pub serial: Option<String>,
    /// Request queues, 1 to 32.
    pub queues: u16,
    /// Whether to bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Bytes of the smallest block that the guest uses, 512 or 4096; `None`: 512, or the size of the host's block device.
    pub logical_block_size: Option<u32>,
    /// Image format.
    pub format: DiskFormat,
}

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// Neither the description nor the file's name determines it: raw, refused if it begins like an image of another format.
    Auto,
    /// The file's bytes are the disk's.
    Raw,
    /// QCOW2, for read-only disks.
    Qcow2,
}

/// A virtio-net device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Net {
    /// Backend that sends and receives its frames.
    pub backend: NetBackend,
    /// Address: as written, or derived from the VM's name and the device's number.
    pub mac: MacAddress,
    /// Queue pairs, 1 to 32.
    pub queues: u16,
    /// MTU offered to the guest, 68 to 65535.
    pub mtu: Option<u16>,
}

/// Backend of a virtio-net device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NetBackend {
    /// A tap interface of this name, 1 to 15 bytes.
    Tap(String),
    /// An open tap file descriptor that the monitor inherited, 3 or more.
    Fd(i32),
    /// Network without root privileges, through passt.
    User,
    /// The VMs of the neighbourhood in `[neighbour]`. A VM has at most one such device, and then no neighbour function.
    Neighbours,
}

/// A commodity NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// `nic0`, `nic1`, ...
    pub name: String,
    /// How the NIC is given to the VM.
    pub mode: NicMode,
}

/// How a commodity NIC is given to the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "mode")]
pub enum NicMode {
    /// An emulated card with a tap.
    Virtual {
        /// Short name of its description: `ne2000`, `rtl8139`, `e1000`.
        model: String,
        /// Tap interface, 1 to 15 bytes.
        tap: String,
        /// Address: as written, or derived from the VM's name and the device's number.
        mac: MacAddress,
    },
    /// A card of this host that is bound to vfio-pci, guarded by its device model. It has its own address.
    Vpio {
        /// PCI address: `0000:03:00.0`.
        device: String,
        /// Policy for violations.
        policy: NicPolicy,
        /// Accesses beyond the guest's own traffic that are allowed.
        allow: Vec<NicPermission>,
        /// Tap interface of the emulated card, to which the guest can be switched.
        #[serde(skip_serializing_if = "Option::is_none")]
        tap: Option<String>,
        /// File for traces of violations, a line each.
        #[serde(skip_serializing_if = "Option::is_none")]
        violations: Option<PathBuf>,
    },
    /// A card of this host that is bound to vfio-pci, without a device model.
    Passthrough {
        /// PCI address, as in [`Self::Vpio`].
        device: String,
    },
}

/// Policy for violations ([`vpio::FailurePolicy`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicPolicy {
    /// The request is dropped and counted.
    Ignore,
    /// The device reports its own error status.
    DeviceError,
    /// The vCPU that made the request raises a machine check.
    MachineCheck,
    /// The device refuses all further requests, and the VM ends.
    Stop,
}

/// A permission beyond the guest's own traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicPermission {
    /// Receive frames that are not addressed to it.
    Promiscuous,
    /// Send frames back to itself inside the device.
    Loopback,
    /// Receive frames for another address than its own.
    AnyAddress,
}

impl From<NicPermission> for device_models::describe::Permission {
    fn from(permission: NicPermission) -> Self {
        match permission {
            NicPermission::Promiscuous => Self::Promiscuous,
            NicPermission::Loopback => Self::Loopback,
            NicPermission::AnyAddress => Self::AnyAddress,
        }
    }
}

/// An RDMA NIC that the host daemon serves: a slot with an Ethernet function (0) and an RDMA function (1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rdma {
    /// 1 to 32 of a-z, A-Z, 0-9, `_` and `-`, unique among the VM's devices. Functions are `NAME.0` and `NAME.1`.
    pub name: String,
    /// Ethernet address: as written, or derived from the VM's name and the device's number.
    pub mac: MacAddress,
    /// Ethernet segment of the host to which it is connected: 1 to 64 of a-z, A-Z, 0-9, `.`, `_` and `-`.
    pub segment: String,
    /// Tap interface to which the segment is connected, 1 to 15 bytes.
    pub tap: Option<String>,
    /// Unix socket of the host daemon.
    pub host: PathBuf,
    /// PCI slot, 1 to 31; `None`: the first free one.
    pub slot: Option<u8>,
}

/// A PCI device that another process serves over vfio-user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VfioUser {
    /// As for [`Rdma::name`].
    pub name: String,
    /// Unix socket of its server.
    pub socket: PathBuf,
    /// PCI slot, 1 to 31; `None`: the first free one.
    pub slot: Option<u8>,
}

/// Membership in a neighbourhood: VMs that read each other's memory. If the VM has devices of other processes, the other VMs must run as
/// other users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// The neighbourhood: 1 to 64 of a-z, A-Z, 0-9, `.`, `_` and `-`.
    pub group: String,
    /// VMs that may read this one's memory, and whose memory it requests: two VMs are connected if each permits the other.
    pub permit: Vec<NeighbourPeer>,
    /// Unix socket of the host daemon.
    pub host: PathBuf,
}

/// A VM that a member permits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NeighbourPeer {
    /// Its name.
    pub vm: String,
    /// User id of its monitor; `None`: the same as this VM's.
    pub uid: Option<u32>,
}

/// A virtio-vsock device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Vsock {
    /// The guest's context id, 3 to 2^32 - 2.
    pub cid: u32,
    /// Path of the Unix socket that the host connects to. The guest's connections to port P go to `socket_P`.
    pub socket: PathBuf,
}

/// Destination of the serial console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// Standard input and output.
    Stdio,
    /// A new pseudo-terminal, whose path is logged and shown by `causeway inspect`.
    Pty,
    /// Output is appended to a file.
    File(PathBuf),
    /// A Unix socket that one client at a time connects to.
    Socket(PathBuf),
    /// Output is discarded.
    Null,
}

/// Confinement of the monitor process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    /// Enforces seccomp, Landlock and dropped capabilities.
    On,
    /// Logs what would be refused, and allows it.
    Log,
    /// No confinement of the process.
    Off,
}

/// Effect of a guest's reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReboot {
    /// The machine is reset and boots again.
    Restart,
    /// The monitor ends.
    Stop,
}
