//! Devices: IOMMU and VFIO, RDMA, tap interfaces, passt.

use std::os::unix::fs::PermissionsExt as _;

use rustix::thread::CapabilitySet;

use super::Finding;
use super::files::Files;

/// Examines the host's devices.
pub fn examine(files: &Files) -> Vec<Finding> {
    vec![
        iommu(files),
        vfio(files),
        rdma(files),
        verbs(host::transport::devices()),
        tap(files),
        passt(std::env::var_os("PATH")),
    ]
}

fn iommu(files: &Files) -> Finding {
    const NAME: &str = "IOMMU";
    let groups = files.names("/sys/kernel/iommu_groups").len();
    if groups > 0 {
        return Finding::ok(NAME, format!("on, {groups} groups"));
    }
    Finding::missing(
        NAME,
        "none: no physical device can be given to a guest",
        "turn on VT-d or AMD-Vi in the firmware; on Intel boot with intel_iommu=on",
    )
}

fn vfio(files: &Files) -> Finding {
    const NAME: &str = "VFIO";
    let nodes: Vec<_> =
        ["/dev/vfio/vfio", "/dev/iommu"].into_iter().filter(|path| files.exists(path)).collect();
    if nodes.is_empty() {
        return Finding::missing(NAME, "neither /dev/vfio/vfio nor /dev/iommu is there", "modprobe vfio-pci");
    }
    Finding::ok(NAME, nodes.join(", "))
}

fn rdma(files: &Files) -> Finding {
    const NAME: &str = "RDMA devices";
    let devices = files.names("/sys/class/infiniband");
    if !devices.is_empty() {
        return Finding::ok(NAME, devices.join(", "));
    }
    Finding::limited(
        NAME,
        "none",
        "any network interface can become one: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME",
    )
}

/// Checks whether `causeway host --verbs` could work. The daemon alone knows which address a device needs.
fn verbs(devices: Result<Vec<String>, host::transport::Absent>) -> Finding {
    const NAME: &str = "transport verbs";
    match devices {
        Ok(devices) => Finding::ok(
            NAME,
            format!("possible with {} where it has the host's address in the directory", devices.join(", ")),
        ),
        Err(absent) => Finding::limited(
            NAME,
            format!("not possible: {absent}"),
            "it is needed only where guests' connections are to use the host's own RDMA device",
        ),
    }
}

fn tap(files: &Files) -> Finding {
    const NAME: &str = "tap interfaces";
    let path = files.path("/dev/net/tun");
    if !path.exists() {
        return Finding::missing(NAME, "/dev/net/tun is not there", "modprobe tun");
    }
    if let Err(error) = std::fs::OpenOptions::new().read(true).write(true).open(&path) {
        return Finding::limited(
            NAME,
            format!("/dev/net/tun can't be opened: {error}"),
            "chmod 666 /dev/net/tun",
        );
    }
    let admin = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN));
    if admin {
        return Finding::ok(NAME, "can be made and used");
    }
    Finding::limited(
        NAME,
        "only those made for this user can be used",
        "as root: ip tuntap add NAME mode tap user USER multi_queue vnet_hdr; or use --net user",
    )
}

/// Checks for passt, which `--net user` needs.
fn passt(path: Option<std::ffi::OsString>) -> Finding {
    const NAME: &str = "passt";
    let path = path.unwrap_or_default();
    let program = std::env::split_paths(&path).map(|directory| directory.join("passt")).find(|program| {
        std::fs::metadata(program)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    });
    match program {
        Some(program) => Finding::ok(NAME, program.display().to_string()),
        None => Finding::missing(NAME, "not in PATH: --net user can't be used", "apt install passt"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn what_is_there_is_listed_and_what_is_not_has_a_remedy() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::below(root.path());
        for finding in [iommu(&files), vfio(&files), rdma(&files), tap(&files), passt(None)] {
            assert!(finding.status != Status::Ok && finding.remedy.is_some(), "{finding:?}");
        }
        for path in ["sys/kernel/iommu_groups/0", "sys/class/infiniband/rxe0", "dev/vfio/vfio"] {
            std::fs::create_dir_all(root.path().join(path)).unwrap();
        }
        assert_eq!(iommu(&files).found, "on, 1 groups");
        assert_eq!(rdma(&files).found, "rxe0");
        assert_eq!(vfio(&files).found, "/dev/vfio/vfio");
    }

    #[test]
    fn only_an_executable_passt_counts() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("passt");
        std::fs::write(&program, "").unwrap();
        let path = Some(directory.path().as_os_str().to_owned());
        assert_eq!(passt(path.clone()).status, Status::Missing);
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(passt(path).status, Status::Ok);
    }
}
