//! Landlock: no file can be opened and no TCP port used any more. All files that the monitor uses are open by then. It may still connect to
//! sockets of its devices, and remove its own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, LandlockStatus, NetPort,
    PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, Scope,
};

use super::SandboxError;
use super::device_syscalls::has_passt;
use super::node::NodePlaces;
use crate::description::{Console, Guest, VmDescription};

/// The newest set of rights that this program knows. An older kernel enforces what it supports.
const KNOWN: ABI = ABI::V9;

/// Directories that stay accessible, by purpose.
#[derive(Debug)]
pub(super) struct Filesystem {
    /// Directories of the monitor's sockets, which are removed at the end.
    own: BTreeSet<PathBuf>,
    /// Directories of sockets to connect to: the guest's vsock connections, and servers of devices.
    connected: BTreeSet<PathBuf>,
    /// Files that are opened while the VM is built.
    devices: BTreeSet<PathBuf>,
    /// Directories of a node; empty for a VM of one node.
    node: NodePlaces,
    /// Means by which the sandbox can't reach outside processes.
    scope: BitFlags<Scope>,
}

/// The Landlock ABI of this kernel, or why there is none. Starts a thread that is confined as a probe, and ends.
pub fn landlock_abi() -> Result<i32, String> {
    let probe = || -> Result<LandlockStatus, landlock::RulesetError> {
        let ruleset = Ruleset::default().handle_access(AccessFs::Execute)?.create()?;
        Ok(ruleset.restrict_self()?.landlock)
    };
    match std::thread::spawn(probe).join() {
        Ok(Ok(LandlockStatus::Available { effective_abi, kernel_abi })) => {
            Ok(kernel_abi.unwrap_or(effective_abi as i32))
        }
        Ok(Ok(LandlockStatus::NotEnabled)) => Err("the kernel has it turned off".to_owned()),
        Ok(Ok(LandlockStatus::NotImplemented)) => Err("the kernel lacks it".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the probe panicked".to_owned()),
    }
}

fn directory_of(socket: &Path) -> PathBuf {
    match socket.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Filesystem {
    pub(super) fn prepare(description: &VmDescription) -> Self {
        let console = match &description.console {
            Console::Socket(path) => Some(path),
            _ => None,
        };
        let vsock = description.vsock.as_ref().map(|vsock| &vsock.socket);
        let own = [description.api_socket.as_ref(), console, vsock].into_iter().flatten();
        Self {
            scope: match has_passt(description) {
                // passt is outside: the monitor ends it by a signal if it doesn't end by itself.
                true => Scope::AbstractUnixSocket.into(),
                false => Scope::from_all(KNOWN),
            },
            own: own.map(|path| directory_of(path)).collect(),
            connected: vsock
                .into_iter()
                .chain(description.vfio_user.iter().map(|device| &device.socket))
                .chain(description.rdma.iter().map(|nic| &nic.host))
                .map(|path| directory_of(path))
                // The registry's socket is in the directory beside the daemon's socket.
                .chain(description.neighbour.iter().map(|member| member.host.with_extension("d")))
                .collect(),
            // The payload machine opens KVM and makes its threads inside the sandbox. If the device is missing, it reports that itself.
            devices: match description.guest {
                Guest::Payload(_) if Path::new("/dev/kvm").exists() => BTreeSet::from(["/dev/kvm".into()]),
                Guest::Payload(_) | Guest::Linux(_) => BTreeSet::new(),
            },
            node: NodePlaces::default(),
        }
    }

    /// Rules for a node of a VM that spans several.
    pub(super) fn of_node(places: &NodePlaces) -> Self {
        let kvm = ["/dev/kvm"].map(PathBuf::from).into_iter().filter(|path| path.exists());
        let devices = kvm.chain(places.rdma.clone()).collect();
        Self {
            own: BTreeSet::new(),
            connected: BTreeSet::new(),
            devices,
            scope: match places.has_children {
                // The nodes that it started: it ends them by a signal if they don't end by themselves.
                true => Scope::AbstractUnixSocket.into(),
                false => Scope::from_all(KNOWN),
            },
            node: places.clone(),
        }
    }

    /// Confines the calling thread and threads that it creates. Returns a text that says what is in force.
    pub(super) fn enforce(&self) -> Result<String, SandboxError> {
        let failed = |source: landlock::RulesetError| SandboxError::Landlock { source: source.into() };
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(KNOWN))
            .map_err(failed)?
            .handle_access(AccessNet::from_all(KNOWN))
            .map_err(failed)?
            .scope(self.scope)
            .map_err(failed)?
            .create()
            .map_err(failed)?;
        let reading = AccessFs::ReadFile | AccessFs::ReadDir;
        let kept = reading
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::RemoveFile
            | AccessFs::Refer;
        let sockets = AccessFs::MakeSock
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir
            | AccessFs::ReadDir
            | AccessFs::ResolveUnix;
        for (paths, access) in [
            (&self.node.sockets, sockets),
            (&self.node.checkpoints, kept),
            (&self.node.restarts, reading),
            (&self.own, BitFlags::from(AccessFs::RemoveFile)),
            (&self.connected, AccessFs::ResolveUnix.into()),
            (&self.devices, AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev),
        ] {
            for path in paths {
                let fd = PathFd::new(path)
                    .map_err(|source| SandboxError::Path { path: path.clone(), source: source.into() })?;
                ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(failed)?;
            }
        }
        for (ports, access) in
            [(&self.node.listens, AccessNet::BindTcp), (&self.node.connects, AccessNet::ConnectTcp)]
        {
            for port in ports {
                ruleset = ruleset.add_rule(NetPort::new(*port, access)).map_err(failed)?;
            }
        }
        let status = ruleset.restrict_self().map_err(failed)?;
        Ok(confinement::landlock_state(&status))
    }
}
