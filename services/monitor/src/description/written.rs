//! The written description: one type per TOML table, checked only for the type of each value.

use std::path::{Path, PathBuf};

use machine::interrupt::IrqchipKind;
use serde::Deserialize;

use super::{
    BootProtocol, ByteSize, CpuList, MacAddress, NicPermission, NicPolicy, OnReboot, OneOrMany, SandboxMode,
};

/// The whole file.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Name of the VM. Default: the file's name without extension.
    pub name: Option<String>,
    /// vCPUs: a number, or `{ sockets = 2, cores = 4 }`. Default 1, or as many as `numa` names.
    pub cpus: Option<Cpus>,
    /// By vCPU, the host CPUs that it may run on: `pin = ["2", "3", "4-7"]`.
    pub pin: Option<Vec<CpuList>>,
    /// RAM: `"1G"`. Default 512M, or the sum of `numa`.
    pub memory: Option<ByteSize>,
    /// `"2M"` or `"1G"`: use reserved huge pages of that size for RAM.
    pub hugepages: Option<ByteSize>,
    /// NUMA nodes.
    pub numa: Option<Vec<Numa>>,
    /// Linux kernel: bzImage or vmlinux.
    pub kernel: Option<PathBuf>,
    /// Initramfs archives: one, or a list.
    pub initrd: Option<OneOrMany<PathBuf>>,
    /// Kernel command line.
    pub cmdline: Option<String>,
    /// `auto`, `pvh` or `linux64`.
    pub protocol: Option<BootProtocol>,
    /// A program instead of a kernel.
    pub payload: Option<Payload>,
    /// Disks in the order of their names: `disk0`, `disk1`, ...
    pub disks: Option<Vec<Disk>>,
    /// Network devices.
    pub net: Option<Vec<Net>>,
    /// Commodity NICs.
    pub nic: Option<Vec<Nic>>,
    /// RDMA NICs.
    pub rdma: Option<Vec<Rdma>>,
    /// Devices of other processes.
    #[serde(rename = "vfio-user")]
    pub vfio_user: Option<Vec<VfioUser>>,
    /// Neighbourhood that the VM joins.
    pub neighbour: Option<Neighbour>,
    /// Whether there is a random-number device. Default true.
    pub rng: Option<bool>,
    /// vsock device.
    pub vsock: Option<Vsock>,
    /// `stdio`, `pty`, `file:PATH`, `socket:PATH` or `null`.
    pub console: Option<String>,
    /// Size at which a console's file is started again. Default 64M.
    pub console_limit: Option<ByteSize>,
    /// Path of the API socket.
    pub api_socket: Option<PathBuf>,
    /// Interrupt controllers: in the `kernel`, or in the `monitor`. Default `kernel`.
    pub interrupts: Option<IrqchipKind>,
    /// `on`, `log` or `off`.
    pub sandbox: Option<SandboxMode>,
    /// `restart` or `stop`.
    pub on_reboot: Option<OnReboot>,
}

/// The key `cpus`: a number, or a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// `cpus = 4`: one socket.
    Count(u64),
    /// `cpus = { sockets = 2, cores = 4 }`.
    Topology(Topology),
}

/// Sockets and cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets. Default 1.
    #[serde(default = "one")]
    pub sockets: u64,
    /// Cores per socket. Default 1.
    #[serde(default = "one")]
    pub cores: u64,
}

fn one() -> u64 {
    1
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Cpus;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number of vCPUs, or a table like { sockets = 1, cores = 2 }")
            }
            fn visit_i64<E: serde::de::Error>(self, count: i64) -> Result<Cpus, E> {
                u64::try_from(count)
                    .map(Cpus::Count)
                    .map_err(|_| E::invalid_value(serde::de::Unexpected::Signed(count), &self))
            }
            fn visit_u64<E: serde::de::Error>(self, count: u64) -> Result<Cpus, E> {
                Ok(Cpus::Count(count))
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<Cpus, A::Error> {
                Topology::deserialize(serde::de::value::MapAccessDeserializer::new(map)).map(Cpus::Topology)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// A `[[numa]]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numa {
    /// vCPUs of the node: `"0-3"` or `[0, 1]`.
    #[serde(default)]
    pub cpus: CpuList,
    /// RAM of the node.
    pub memory: ByteSize,
    /// Distances to all nodes, in order. Default 10 to itself, 20 to others.
    pub distances: Option<Vec<u64>>,
    /// Host node to which the RAM is bound.
    pub host_node: Option<u32>,
}

/// The `[payload]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Payload {
    /// Static ELF.
    pub program: PathBuf,
    /// Arguments of the program, after its name.
    #[serde(default)]
    pub arguments: Vec<String>,
}

/// A `[[disks]]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Image file or block device.
    pub path: PathBuf,
    /// Default false.
    #[serde(default)]
    pub readonly: bool,
    /// At most 20 characters.
    pub serial: Option<String>,
    /// Request queues. Default 1.
    pub queues: Option<u64>,
    /// Whether to bypass the page cache. Default false.
    #[serde(default)]
    pub direct: bool,
    /// Bytes: 512 or 4096. Default 512, or a block device's own.
    pub logical_block_size: Option<u64>,
    /// Default `auto`.
    #[serde(default)]
    pub format: DiskFormat,
}

/// Written format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// By the file's name: `.qcow2` is QCOW2, everything else raw. An image's first bytes never make it QCOW2, because a guest with a raw
    /// disk can write such a header. But an image that begins like one of another format is refused.
    #[default]
    Auto,
    /// The file's bytes are the disk's.
    Raw,
    /// QCOW2, for read-only disks.
    Qcow2,
}

/// A `[[net]]` table; exactly one of `tap`, `fd`, `user` and `neighbours`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// Name of a tap interface.
    pub tap: Option<String>,
    /// Inherited tap file descriptor.
    pub fd: Option<i64>,
    /// `true`: through passt.
    #[serde(default)]
    pub user: bool,
    /// `true`: to the VMs of `[neighbour]`.
    #[serde(default)]
    pub neighbours: bool,
    /// MAC address. Default: derived from the VM's name and the device's number.
    pub mac: Option<MacAddress>,
    /// Queue pairs. Default 1.
    pub queues: Option<u64>,
    /// Offered MTU.
    pub mtu: Option<u64>,
}

/// A `[[nic]]` table: exactly one of `vpio`, `passthrough` and `emulate`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// PCI address of a card of this host, guarded by its device model.
    pub vpio: Option<String>,
    /// PCI address of a card of this host, without a device model.
    pub passthrough: Option<String>,
    /// Name of the card to emulate, with `tap`.
    #[serde(rename = "virtual")]
    pub emulate: Option<String>,
    /// With `virtual`: name of a tap interface. With `vpio`: tap interface of the emulated card, to which the guest can be switched while
    /// it runs.
    pub tap: Option<String>,
    /// With `virtual`: address.
    pub mac: Option<MacAddress>,
    /// With `vpio`: policy for violations. Default `device-error`.
    pub policy: Option<NicPolicy>,
    /// With `vpio`: permissions beyond the guest's own traffic. Default none.
    pub allow: Option<Vec<NicPermission>>,
    /// With `vpio`: file for traces of violations. Default none.
    pub violations: Option<PathBuf>,
}

/// A `[[rdma]]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rdma {
    /// Default `rdma0`, `rdma1`, ...
    pub name: Option<String>,
    /// MAC address. Default: derived from the names of the VM and the NIC.
    pub mac: Option<MacAddress>,
    /// Ethernet segment of the host.
    pub segment: String,
    /// Tap interface to which the segment is connected.
    pub tap: Option<String>,
    /// The host daemon's socket. Default `/run/causeway/host.sock`.
    pub host: Option<PathBuf>,
    /// PCI slot.
    pub slot: Option<u64>,
}

/// A `[[vfio-user]]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfioUser {
    /// Default `vfio-user0`, `vfio-user1`, ...
    pub name: Option<String>,
    /// The server's socket.
    pub socket: PathBuf,
    /// PCI slot.
    pub slot: Option<u64>,
}

/// The `[neighbour]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    /// Name of the neighbourhood.
    pub group: String,
    /// `"VM"`, or `"VM@UID"` for another user's. Default: none.
    #[serde(default)]
    pub permit: Vec<String>,
    /// The host daemon's socket. Default `/run/causeway/host.sock`.
    pub host: Option<PathBuf>,
}

/// The `[vsock]` table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// Context id of the guest.
    pub cid: u64,
    /// Unix socket.
    pub socket: PathBuf,
}

impl Vm {
    /// Resolves every relative path against `base`.
    pub(super) fn resolve_paths(&mut self, base: &Path) {
        if base.as_os_str().is_empty() {
            return;
        }
        let resolve = |path: &mut PathBuf| {
            // An empty path stays empty, so that validation detects it.
            if !path.as_os_str().is_empty() {
                *path = base.join(&*path);
            }
        };
        self.kernel.iter_mut().for_each(resolve);
        self.initrd.iter_mut().flat_map(|list| list.0.iter_mut()).for_each(resolve);
        self.payload.iter_mut().map(|payload| &mut payload.program).for_each(resolve);
        self.disks.iter_mut().flatten().map(|disk| &mut disk.path).for_each(resolve);
        self.nic.iter_mut().flatten().flat_map(|nic| &mut nic.violations).for_each(resolve);
        self.rdma.iter_mut().flatten().flat_map(|nic| &mut nic.host).for_each(resolve);
        self.vfio_user.iter_mut().flatten().map(|device| &mut device.socket).for_each(resolve);
        self.neighbour.iter_mut().flat_map(|table| &mut table.host).for_each(resolve);
        self.vsock.iter_mut().map(|vsock| &mut vsock.socket).for_each(resolve);
        self.api_socket.iter_mut().for_each(resolve);
        if let Some(console) = &mut self.console {
            for prefix in ["file:", "socket:"] {
                if let Some(path) = console.strip_prefix(prefix).filter(|path| !path.is_empty()) {
                    *console = format!("{prefix}{}", base.join(path).display());
                    break;
                }
            }
        }
    }
}
