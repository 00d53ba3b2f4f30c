//! A host without an emulator, for machines whose KVM runs ordinary kernels. It is this machine in separate namespaces,
//! with an emulated host's root file system. So scenarios don't depend on the difference.

use crate::image::Images;
use crate::topology::HostSpec;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = include_str!("../assets/native-host.sh");

/// Adds the command line of a host, whose files are in `dir`, to `command`. Needs root, and a topology without links
/// and devices.
pub fn arguments(command: &mut Command, images: &Images, host: &HostSpec, dir: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "A native host needs root for its mounts and its network namespace; use sudo, or leave 'native' out of LAB_EMULATOR"
        );
    }
    if !host.nics.is_empty() || !host.qemu.is_empty() {
        bail!(
            "Host {} has network cards or devices, which only an emulated host can have; leave 'native' out of LAB_EMULATOR",
            host.name
        );
    }
    let script = dir.join("native-host.sh");
    std::fs::write(&script, SCRIPT).with_context(|| format!("Can't write {}", script.display()))?;
    // The agent's port: a raw terminal behind the lab's socket. socat ends with the connection, and the host's
    // processes with `unshare`.
    command.args(["sh", "-c", PORT_AND_HOST, "native-host"]).arg(script);
    command.args([images.host_root(), images.guest_disk()]).arg(dir).arg(&host.name);
    Ok(())
}

const PORT_AND_HOST: &str = r#"
script=$1; home=$4; shift
socat "UNIX-LISTEN:$home/agent" "PTY,link=$home/port,raw,echo=0,b38400" &
exec unshare --mount --net --uts --ipc --pid --fork --kill-child sh "$script" "$@" > "$home/console" 2>&1
"#;
