//! Builds kernel modules in a separate root (`unshare` and `chroot`, no privileges), with Debian's compiler and
//! headers. The result depends on the package archive only, and not on this machine.

use crate::apt::{self, Apt};
use crate::command::output;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates a root with `packages`, the headers of the kernel `release`, and with `source` its source. Inputs belong
/// below `build/`, and the build writes to `build/out/`.
pub(crate) fn root(apt: &Apt, root: &Path, release: &str, packages: &[&str], source: bool) -> Result<()> {
    apt::unpack(&apt.fetch(packages, false)?, root)?;
    let gone = || {
        format!(
            "The package archive has no headers for the kernel {release} any more; remove kernels.stamp in the lab's cache, so that a newer kernel is taken"
        )
    };
    let headers = apt.download(&format!("linux-headers-{release}"), None).with_context(gone)?;
    let version = apt::version_of(&headers).context("A package file without a version")?;
    let abi = release.trim_end_matches("-amd64");
    let series: Vec<&str> = release.split(['.', '-']).take(2).collect();
    let [major, minor] = series[..] else { bail!("The kernel release {release:?} has no series") };
    let fetch = |name: &str| -> Result<PathBuf> { apt.download(name, Some(&version)).with_context(gone) };
    apt::unpack_one(&headers, root, &[])?;
    apt::unpack_one(&fetch(&format!("linux-headers-{abi}-common"))?, root, &[])?;
    // The headers name the package. A newer version works, too: the archive keeps only the newest of a series, which
    // appears before the signed kernel of its version.
    let kbuild = apt.dependency(&format!("linux-headers-{release}"), "linux-kbuild-").with_context(gone)?;
    apt::unpack_one(&apt.download(&kbuild, None).with_context(gone)?, root, &[])?;
    if source {
        apt::unpack_one(&fetch(&format!("linux-source-{major}.{minor}"))?, root, &[])?;
    }
    // objtool needs this library.
    apt::unpack_one(&apt.download("libelf1", None)?, root, &[])?;
    for dir in ["proc", "dev", "tmp", "build/programs", "build/out"] {
        fs::create_dir_all(root.join(dir))?;
    }
    for (link, to) in [("usr/bin/sh", "dash"), ("usr/bin/awk", "gawk"), ("usr/bin/gcc", "gcc-12")] {
        let path = root.join(link);
        if !path.exists() {
            if path.is_symlink() {
                fs::remove_file(&path)?;
            }
            std::os::unix::fs::symlink(to, path)?;
        }
    }
    output(Command::new("/sbin/ldconfig").arg("-r").arg(root)).map(drop)
}

/// Runs `/build/build.sh RELEASE` in the root.
pub(crate) fn run(root: &Path, release: &str) -> Result<()> {
    output(&mut command(root, release)).map(drop)
}

/// Returns the command that runs `/build/build.sh ARGUMENT` in the root.
pub(crate) fn command(root: &Path, argument: &str) -> Command {
    // Compiler and kbuild need only /dev/null and /proc from outside.
    let script = "mount --rbind /dev \"$1/dev\" && mount --rbind /proc \"$1/proc\" && exec chroot \"$1\" /bin/sh /build/build.sh \"$2\"";
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "nice", "sh", "-c", script, "sh"]);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    command.arg(root).arg(argument);
    command
}
