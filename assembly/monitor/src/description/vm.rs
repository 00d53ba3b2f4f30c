//! A validated VM description. Every value in it has been checked by [`super::validate`].

use std::path::PathBuf;

use machine::interrupt::IrqchipKind;
use serde::Serialize;

use super::{CpuList, MacAddress};

/// What a VM is to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmDescription {
    /// 1 to 64 of letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    pub name: String,
    /// Virtual CPUs.
    pub cpus: Cpus,
    /// Per vCPU, the host CPUs it may run on; empty: no pinning.
    pub pinning: Vec<CpuList>,
    /// RAM.
    pub memory: Memory,
    /// NUMA nodes, never empty: one node with everything when the description names none. Their memory adds up to
    /// [`Memory::size`], and every vCPU is in exactly one.
    pub numa: Vec<NumaNode>,
    /// What runs in it.
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
    /// The neighbourhood that it is a member of.
    pub neighbour: Option<Neighbour>,
    /// Whether there is a virtio-rng device.
    pub rng: bool,
    /// The virtio-vsock device.
    pub vsock: Option<Vsock>,
    /// Where the serial console goes.
    pub console: Console,
    /// Most bytes of a console's file, 64 KiB to 1 TiB.
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
    /// Sockets.
    pub sockets: u8,
    /// Cores per socket.
    pub cores: u8,
}

impl Cpus {
    /// How many vCPUs there are, 1 to 254.
    pub fn count(self) -> u8 {
        // Validation has bounded the product.
        self.sockets.saturating_mul(self.cores)
    }
}

/// RAM of the whole VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Bytes, a multiple of the page size in use.
    pub size: u64,
    /// Pages that back it.
    pub hugepages: HugePages,
}

/// Page size of guest RAM on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum HugePages {
    /// 4 KiB pages; transparent huge pages as the host decides.
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

/// One NUMA node that the guest sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// vCPU numbers.
    pub cpus: CpuList,
    /// Bytes of RAM; zero for a node with only CPUs.
    pub memory: u64,
    /// Distance to each node in order, as the ACPI SLIT has it: 10 to itself, else 11 to 254 (255: unreachable).
    pub distances: Vec<u8>,
    /// Host node that its RAM is bound to.
    pub host_node: Option<u32>,
}

/// What a VM runs.
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
    /// Initramfs archives, laid one after the other in this order.
    pub initrd: Vec<PathBuf>,
    /// Kernel command line, as written: at most 2047 bytes without NUL.
    pub cmdline: String,
    /// How the kernel is entered.
    pub protocol: BootProtocol,
}

/// How a kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootProtocol {
    /// PVH where the kernel has its note, else the Linux 64-bit protocol.
    Auto,
    /// PVH.
    Pvh,
    /// The Linux 64-bit protocol.
    Linux64,
}

/// A ring-3 program as the whole guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Payload {
    /// Static x86-64 ELF.
    pub program: PathBuf,
    /// Its arguments, without the program's name; none has a NUL byte.
    pub arguments: Vec<String>,
}

/// A virtio-block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Image file or block device.
    pub path: PathBuf,
    /// Whether the guest may only read.
    pub readonly: bool,
    /// Serial number that the guest sees, at most 20 printable ASCII bytes.
    pub serial: Option<String>,
    /// Request queues, 1 to 32.
    pub queues: u16,
    /// Whether to go around the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Bytes of the smallest block that the guest uses, 512 or 4096; `None`: 512, or a block device's own.
    pub logical_block_size: Option<u32>,
    /// Image format.
    pub format: DiskFormat,
}

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// Nobody said, and the file's name doesn't: raw, refused if it begins like an image of another format.
    Auto,
    /// The file's bytes are the disk's.
    Raw,
    /// QCOW2.
    Qcow2,
}

/// A virtio-net device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Net {
    /// What is behind it.
    pub backend: NetBackend,
    /// Its address: as written, or made from the VM's name and the device's number.
    pub mac: MacAddress,
    /// Queue pairs, 1 to 32.
    pub queues: u16,
    /// MTU offered to the guest, 68 to 65535.
    pub mtu: Option<u16>,
}

/// What is behind a virtio-net device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NetBackend {
    /// A tap interface of this name, 1 to 15 bytes.
    Tap(String),
    /// An open tap file descriptor that the monitor inherited, 3 or more.
    Fd(i32),
    /// Network without root, through passt.
    User,
    /// The VMs of its neighbourhood; `[neighbour]` says which. There is one such device at most, and no neighbour function then.
    Neighbours,
}

/// A commodity NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// `nic0`, `nic1`, ...
    pub name: String,
    /// What is behind it.
    pub mode: NicMode,
}

/// What is behind a commodity NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "mode")]
pub enum NicMode {
    /// An emulated card and a tap.
    Virtual {
        /// Short name of its description: `ne2000`, `rtl8139`, `e1000`.
        model: String,
        /// Tap interface, 1 to 15 bytes.
        tap: String,
        /// Its address: as written, or made from the VM's name and the device's number.
        mac: MacAddress,
    },
    /// A card of this host that is bound to vfio-pci, under its model. It has its own address.
    Vpio {
        /// PCI address: `0000:03:00.0`.
        device: String,
        /// What happens when a request is refused.
        policy: NicPolicy,
        /// What the guest may do beyond its own traffic.
        allow: Vec<NicPermission>,
        /// Tap interface of the card's emulation, which the guest can be taken to.
        #[serde(skip_serializing_if = "Option::is_none")]
        tap: Option<String>,
        /// Where traces of refused requests go, a line each.
        #[serde(skip_serializing_if = "Option::is_none")]
        violations: Option<PathBuf>,
    },
    /// A card of this host that is bound to vfio-pci, by itself.
    Passthrough {
        /// As above.
        device: String,
    },
}

/// What happens when a model refuses a request ([`vpio::FailurePolicy`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicPolicy {
    /// It is dropped and counted.
    Ignore,
    /// The device's own error status is raised.
    DeviceError,
    /// The vCPU that made the request gets a machine check.
    MachineCheck,
    /// The guest's use of the device is frozen.
    Stop,
}

/// What a guest may do beyond its own traffic.
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
    /// 1 to 32 of a-z, A-Z, 0-9, `_` and `-`; no other device of the VM has it. Functions are `NAME.0` and `NAME.1`.
    pub name: String,
    /// Ethernet address: as written, or made from the VM's name and the device's number.
    pub mac: MacAddress,
    /// Ethernet segment of the host that it is connected to: 1 to 64 of a-z, A-Z, 0-9, `.`, `_` and `-`.
    pub segment: String,
    /// Tap interface that the segment shall be connected to, 1 to 15 bytes.
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

/// Membership in a neighbourhood: VMs that read each other's memory. With devices of other processes, those VMs are other users'.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// The neighbourhood: 1 to 64 of a-z, A-Z, 0-9, `.`, `_` and `-`.
    pub group: String,
    /// VMs that may see this one's memory, and whose memory it wants to see: connected are those who permit each other.
    pub permit: Vec<NeighbourPeer>,
    /// Unix socket of the host daemon.
    pub host: PathBuf,
}

/// A VM that a neighbour permits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NeighbourPeer {
    /// Its name.
    pub vm: String,
    /// The user whose monitor runs it; `None`: the same as this VM's.
    pub uid: Option<u32>,
}

/// A virtio-vsock device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Vsock {
    /// The guest's context id, 3 to 2^32 - 2.
    pub cid: u32,
    /// Unix socket: the host connects to it, and the guest's connections to port P go to `socket_P`.
    pub socket: PathBuf,
}

/// Where the serial console goes.
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
    /// Nowhere.
    Null,
}

/// Confinement of the monitor process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    /// Enforced.
    On,
    /// Shows what would be refused and lets it pass.
    Log,
    /// None.
    Off,
}

/// What a guest's reboot does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReboot {
    /// The machine is reset and boots again.
    Restart,
    /// The monitor ends.
    Stop,
}
