//! Landlock: no file can be opened any more, no TCP port used. What the monitor works with is open by then; all
//! that is left is connecting to and removing its own sockets.

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

/// The newest set of rights that is known here. An older kernel gets what it has.
const KNOWN: ABI = ABI::V9;

/// Directories that stay usable, and for what.
#[derive(Debug)]
pub(super) struct Filesystem {
    /// The sockets in them are removed at the end.
    own: BTreeSet<PathBuf>,
    /// The guest's vsock connections go to sockets in them, and servers of devices listen there.
    connected: BTreeSet<PathBuf>,
    /// Opened while the VM is made.
    devices: BTreeSet<PathBuf>,
    /// A node's; empty for a VM of one node.
    node: NodePlaces,
    /// What doesn't reach processes outside the sandbox.
    scope: BitFlags<Scope>,
}

/// The Landlock ABI of this kernel, or why there is none. A thread is confined to find out, and ends.
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
                // It is ended by a signal when it doesn't end by itself.
                true => Scope::AbstractUnixSocket.into(),
                false => Scope::from_all(KNOWN),
            },
            own: own.map(|path| directory_of(path)).collect(),
            connected: vsock
                .into_iter()
                .chain(description.vfio_user.iter().map(|device| &device.socket))
                .chain(description.rdma.iter().map(|nic| &nic.host))
                .map(|path| directory_of(path))
                // The registry of neighbours is in the folder beside the daemon's socket.
                .chain(description.neighbour.iter().map(|member| member.host.with_extension("d")))
                .collect(),
            // The payload machine makes its threads as it opens KVM, so it is made inside. A device that isn't
            // there is the payload machine's to tell.
            devices: match description.guest {
                Guest::Payload(_) if Path::new("/dev/kvm").exists() => BTreeSet::from(["/dev/kvm".into()]),
                Guest::Payload(_) | Guest::Linux(_) => BTreeSet::new(),
            },
            node: NodePlaces::default(),
        }
    }

    /// For a node of a VM that spans several.
    pub(super) fn of_node(places: &NodePlaces) -> Self {
        let kvm = ["/dev/kvm"].map(PathBuf::from).into_iter().filter(|path| path.exists());
        let devices = kvm.chain(places.rdma.clone()).collect();
        Self {
            own: BTreeSet::new(),
            connected: BTreeSet::new(),
            devices,
            scope: match places.has_children {
                // They are ended by a signal when they don't end by themselves.
                true => Scope::AbstractUnixSocket.into(),
                false => Scope::from_all(KNOWN),
            },
            node: places.clone(),
        }
    }

    /// Confines the calling thread and those it makes. Returns what is in force.
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
