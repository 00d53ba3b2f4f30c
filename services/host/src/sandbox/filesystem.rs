//! Landlock. The daemon keeps access to its own folder, taps and the kernel's information about them. It can't bind a TCP port that it
//! chooses, nor connect to others than those of the cluster service and of other hosts' daemons, if it has a cluster service.

use std::collections::BTreeSet;
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, Scope,
};

use super::SandboxError;

/// The newest known set of rights. An older kernel applies the subset that it has.
const KNOWN: ABI = ABI::V9;
/// Path of the tun driver.
const TUN: &str = "/dev/net/tun";
/// Folder where the kernel reports taps' owners.
const TAPS: &str = "/sys/devices/virtual/net";

/// What a daemon may do by TCP.
#[derive(Debug, Default)]
pub(crate) struct TcpUse {
    /// Ports to which it may connect.
    pub connect: BTreeSet<u16>,
    /// Whether it may bind a connection to an address of its own, with a port that the kernel chooses.
    pub own_address: bool,
}

/// Confines the calling thread and threads that it creates. Returns a description of what is in force.
pub(super) fn enforce(
    socket: &Path,
    folder: &Path,
    rdma: Option<&Path>,
    tcp: Option<&TcpUse>,
) -> Result<String, SandboxError> {
    let failed = |source: landlock::RulesetError| SandboxError::Landlock(source.into());
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))
        .map_err(failed)?
        .handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp)
        .map_err(failed)?
        .scope(Scope::from_all(KNOWN))
        .map_err(failed)?
        .create()
        .map_err(failed)?;
    let beside = socket.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let own = AccessFs::ReadFile
        | AccessFs::WriteFile
        | AccessFs::ReadDir
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
        | AccessFs::Refer
        | AccessFs::Truncate
        | AccessFs::ResolveUnix;
    let rules: [(&Path, BitFlags<AccessFs>); 4] = [
        (folder, own),
        // The service's socket is created there, and removed at the end.
        (beside, AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ResolveUnix),
        (Path::new(TUN), AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev),
        (Path::new(TAPS), AccessFs::ReadFile.into()),
    ];
    let rdma = rdma.map(|device| (device, AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev));
    for (path, access) in rules.into_iter().chain(rdma) {
        // A host without the tun driver has no taps.
        if !path.exists() && (path == Path::new(TUN) || path == Path::new(TAPS)) {
            continue;
        }
        let fd = PathFd::new(path)
            .map_err(|source| SandboxError::Path { path: path.to_owned(), source: source.into() })?;
        ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(failed)?;
    }
    for port in tcp.into_iter().flat_map(|tcp| &tcp.connect) {
        ruleset = ruleset.add_rule(NetPort::new(*port, AccessNet::ConnectTcp)).map_err(failed)?;
    }
    if tcp.is_some_and(|tcp| tcp.own_address) {
        // Port 0: one that the kernel chooses.
        ruleset = ruleset.add_rule(NetPort::new(0, AccessNet::BindTcp)).map_err(failed)?;
    }
    let status = ruleset.restrict_self().map_err(failed)?;
    Ok(confinement::landlock_state(&status))
}
