//! Directory of VMs: the host of each VM's RDMA NICs, and their addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use hca::names::{DeviceId, Gid};
use serde::Deserialize;

use super::pin::TransportKind;
use crate::peer_messages::PeerMessagesReport;

/// A VM's number in the cluster; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, serde::Serialize)]
#[serde(transparent)]
pub struct VmId(pub u32);

/// A cluster's directory. Its contents may change at any time, so callers query it again.
pub trait Directory: Debug + Send + Sync {
    /// The VM that has an address in a segment.
    fn owner(&self, segment: &str, gid: Gid) -> Option<VmId>;
    /// The number of a VM.
    fn vm(&self, name: &str) -> Option<VmId>;
    /// Address of the daemon on a VM's host: the first of its sockets.
    fn host(&self, vm: VmId) -> Option<SocketAddr>;
    /// The hosts.
    fn hosts(&self) -> Vec<SocketAddr>;
    /// The transport that a VM's connections must use, if any.
    fn pin(&self, vm: VmId) -> Option<TransportKind>;
    /// Payload per packet between hosts, bytes.
    fn mtu(&self) -> roce::Mtu;
    /// Sockets per host, on consecutive ports.
    fn sockets(&self) -> u16;
    /// Records a local change. The engine's thread calls it: it must not block.
    fn tell(&self, news: News<'_>);
    /// How current the directory is, if known.
    fn report(&self) -> Option<DirectoryReport>;
}

/// A local change that the directory is notified of.
#[derive(Debug, Clone)]
pub enum News<'a> {
    /// A device was added, or its guest has bound other addresses.
    Nic {
        /// The device.
        device: DeviceId,
        /// Its VM, by the name of `causeway run --name`.
        vm: &'a str,
        /// Segment of the device.
        segment: &'a str,
        /// All addresses that its guest has bound.
        addresses: &'a BTreeSet<Gid>,
    },
    /// A device was removed.
    NicGone {
        /// The device.
        device: DeviceId,
    },
    /// All pairs of a VM of this host and a remote VM that are connected.
    Connected(BTreeSet<(VmId, VmId)>),
}

/// How current a directory is.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DirectoryReport {
    /// The cluster service.
    pub service: String,
    /// Whether the service is connected at present.
    pub connected: bool,
    /// Duration of the current outage, seconds.
    pub outage_seconds: u64,
    /// Connections to the service that failed, and failed attempts, since the daemon's start.
    pub failures: u64,
    /// The state's revision.
    pub revision: u64,
    /// Number of hosts.
    pub hosts: usize,
    /// Number of running VMs.
    pub vms: usize,
    /// Events with an older epoch than the known one, which were ignored.
    pub refused_old_epochs: u64,
    /// Messages of the migration protocol, and direct connections with other daemons.
    pub messages: PeerMessagesReport,
}

/// The directory of a host without one: it is empty.
#[derive(Debug)]
pub(super) struct NoDirectory;

impl Directory for NoDirectory {
    fn owner(&self, _: &str, _: Gid) -> Option<VmId> {
        None
    }

    fn vm(&self, _: &str) -> Option<VmId> {
        None
    }

    fn host(&self, _: VmId) -> Option<SocketAddr> {
        None
    }

    fn pin(&self, _: VmId) -> Option<TransportKind> {
        None
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    fn mtu(&self) -> roce::Mtu {
        roce::Mtu::B1024
    }

    fn sockets(&self) -> u16 {
        0
    }

    fn tell(&self, _: News<'_>) {}

    fn report(&self) -> Option<DirectoryReport> {
        None
    }
}

/// Why a directory can't be read.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The file can't be read.
    #[error("The directory {} can't be read", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        #[source]
        source: std::io::Error,
    },
    /// The file isn't valid TOML.
    #[error("The directory {} isn't valid TOML of a directory", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// The error, with its position.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// The file's contents are invalid.
    #[error("The directory {}: {what}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        what: String,
    },
}

/// A directory in a file, the same on all hosts.
///
/// ```toml
/// mtu = 1376                      # payload per packet: a multiple of 4 from 256 to 4096; 1376 fills links with an MTU of 1500, 4096 suits 9000
/// [[host]]
/// name = "h1"
/// address = "10.77.0.1:4792"
/// [[vm]]
/// name = "a"
/// id = 1
/// host = "h1"
/// transport = "fabric"            # what its connections must use; left out: what fits
/// [[vm.nic]]
/// segment = "s0"
/// addresses = ["192.168.1.1"]
/// mac = "52:54:00:00:00:01"       # its link-local address is known then, too
/// ```
#[derive(Debug)]
pub struct FileDirectory {
    mtu: roce::Mtu,
    sockets: u16,
    hosts: Vec<SocketAddr>,
    names: HashMap<String, VmId>,
    places: HashMap<VmId, SocketAddr>,
    owners: HashMap<(String, Gid), VmId>,
    pins: HashMap<VmId, TransportKind>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "default_mtu")]
    mtu: u32,
    #[serde(default = "default_sockets")]
    sockets: u16,
    #[serde(default)]
    host: Vec<Host>,
    #[serde(default)]
    vm: Vec<Vm>,
}

fn default_mtu() -> u32 {
    1376
}

fn default_sockets() -> u16 {
    2
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Host {
    name: String,
    address: SocketAddr,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vm {
    name: String,
    id: VmId,
    host: String,
    transport: Option<TransportKind>,
    #[serde(default)]
    nic: Vec<Nic>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nic {
    segment: String,
    #[serde(default)]
    addresses: Vec<IpAddr>,
    mac: Option<String>,
}

impl FileDirectory {
    /// Reads a file.
    ///
    /// # Errors
    /// When it can't be read, or is invalid.
    pub fn load(path: &Path) -> Result<Self, DirectoryError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| DirectoryError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Parses the contents of a file; `path` is for errors.
    ///
    /// # Errors
    /// When the contents are invalid.
    pub fn parse(text: &str, path: &Path) -> Result<Self, DirectoryError> {
        let file: File = toml::from_str(text)
            .map_err(|source| DirectoryError::Syntax { path: path.to_owned(), source: Box::new(source) })?;
        Self::make(file).map_err(|what| DirectoryError::Content { path: path.to_owned(), what })
    }

    fn make(file: File) -> Result<Self, String> {
        let mtu = roce::Mtu::from_bytes(file.mtu)
            .ok_or_else(|| format!("mtu is {}; it can be a multiple of 4 from 256 to 4096", file.mtu))?;
        if !(1..=16).contains(&file.sockets) {
            return Err(format!("sockets is {}; 1 to 16 are possible", file.sockets));
        }
        let mut hosts = BTreeMap::new();
        for host in &file.host {
            if host.address.port() > u16::MAX - file.sockets {
                return Err(format!(
                    "host {} needs {} ports from {} on",
                    host.name, file.sockets, host.address
                ));
            }
            if hosts.insert(host.name.clone(), host.address).is_some() {
                return Err(format!("host {} is there twice", host.name));
            }
        }
        let mut directory = Self {
            mtu,
            sockets: file.sockets,
            hosts: hosts.values().copied().collect(),
            names: HashMap::new(),
            places: HashMap::new(),
            owners: HashMap::new(),
            pins: HashMap::new(),
        };
        for vm in file.vm {
            let host = hosts
                .get(&vm.host)
                .ok_or_else(|| format!("VM {} is on host {}, which isn't listed", vm.name, vm.host))?;
            if vm.id.0 == 0 {
                return Err(format!("VM {} has id 0; ids begin at 1", vm.name));
            }
            if directory.places.insert(vm.id, *host).is_some() {
                return Err(format!("id {} is there twice", vm.id.0));
            }
            if directory.names.insert(vm.name.clone(), vm.id).is_some() {
                return Err(format!("VM {} is there twice", vm.name));
            }
            if let Some(pin) = vm.transport {
                directory.pins.insert(vm.id, pin);
            }
            for nic in vm.nic {
                let mut gids: Vec<Gid> = nic.addresses.iter().map(|address| gid(*address)).collect();
                if let Some(mac) = &nic.mac {
                    let mac = parse_mac(mac).ok_or_else(|| format!("{mac:?} of VM {} is no MAC", vm.name))?;
                    gids.push(link_local(mac));
                }
                for gid in gids {
                    if directory.owners.insert((nic.segment.clone(), gid), vm.id).is_some() {
                        return Err(format!("address {gid:?} of segment {} is there twice", nic.segment));
                    }
                }
            }
        }
        let mut tags = HashMap::new();
        for (segment, _) in directory.owners.keys() {
            if let Some(other) = tags.insert(super::header::tag(segment), segment)
                && other != segment
            {
                return Err(format!("segments {segment} and {other} can't be told apart; rename one"));
            }
        }
        Ok(directory)
    }
}

impl Directory for FileDirectory {
    fn owner(&self, segment: &str, gid: Gid) -> Option<VmId> {
        // A look-up per connection, not per packet.
        self.owners.get(&(segment.to_owned(), gid)).copied()
    }

    fn vm(&self, name: &str) -> Option<VmId> {
        self.names.get(name).copied()
    }

    fn host(&self, vm: VmId) -> Option<SocketAddr> {
        self.places.get(&vm).copied()
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        self.hosts.clone()
    }

    fn pin(&self, vm: VmId) -> Option<TransportKind> {
        self.pins.get(&vm).copied()
    }

    fn mtu(&self) -> roce::Mtu {
        self.mtu
    }

    fn sockets(&self) -> u16 {
        self.sockets
    }

    /// The file defines everything, so local changes have no effect.
    fn tell(&self, _: News<'_>) {}

    fn report(&self) -> Option<DirectoryReport> {
        None
    }
}

/// An address as a GID (IBTA annex A17): an IPv4 address is mapped to IPv6.
fn gid(address: IpAddr) -> Gid {
    Gid(match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    })
}

/// The link-local address that Linux derives from a MAC (RFC 4291, modified EUI-64).
fn link_local(mac: [u8; 6]) -> Gid {
    let [a, b, c, d, e, f] = mac;
    Gid([0xFE, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xFF, 0xFE, d, e, f])
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte =
            parts.next().filter(|part| part.len() == 2).and_then(|part| u8::from_str_radix(part, 16).ok())?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        mtu = 4096
        [[host]]
        name = "h1"
        address = "10.0.0.1:4792"
        [[host]]
        name = "h2"
        address = "10.0.0.2:4792"
        [[vm]]
        name = "a"
        id = 7
        host = "h2"
        transport = "fabric"
        [[vm.nic]]
        segment = "s0"
        addresses = ["192.168.1.1", "fd00::1"]
        mac = "52:54:00:00:00:01"
    "#;

    fn read(text: &str) -> Result<FileDirectory, String> {
        FileDirectory::make(toml::from_str(text).map_err(|error| error.to_string())?)
    }

    #[test]
    fn addresses_lead_to_a_host() {
        let directory = read(TEXT).unwrap_or_else(|error| panic!("{error}"));
        for address in ["192.168.1.1", "fd00::1", "fe80::5054:ff:fe00:1"] {
            let address: IpAddr = address.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(directory.owner("s0", gid(address)), Some(VmId(7)));
            assert_eq!(directory.owner("s1", gid(address)), None);
        }
        assert_eq!((directory.pin(VmId(7)), directory.pin(VmId(8))), (Some(TransportKind::Fabric), None));
        assert_eq!(directory.host(VmId(7)), "10.0.0.2:4792".parse().ok());
        assert_eq!(
            (directory.mtu().bytes(), directory.vm("a"), directory.vm("b")),
            (4096, Some(VmId(7)), None)
        );
    }

    #[test]
    fn contradictions_are_named() {
        for (from, to, said) in [
            ("4096", "1501", "mtu is 1501"),
            ("host = \"h2\"", "host = \"h3\"", "host h3"),
            ("id = 7", "id = 0", "id 0"),
            ("name = \"h2\"", "name = \"h1\"", "host h1 is there twice"),
            ("\"fd00::1\"", "\"192.168.1.1\"", "is there twice"),
            ("52:54:00:00:00:01", "52:54", "no MAC"),
            ("segment", "segmnt", "segmnt"),
            ("\"fabric\"", "\"pigeon\"", "pigeon"),
        ] {
            let error = read(&TEXT.replace(from, to)).err().unwrap_or_default();
            assert!(error.contains(said), "{error:?} should say {said:?}");
        }
    }
}
