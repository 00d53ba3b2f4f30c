//! The root disk of guests with RDMA: Debian's RDMA user space, rdma-core's Python tests, the modules, `vmw_pvrdma`
//! built from Debian's own kernel source, and this repository's programs.
//!
//! The driver and the programs are built in a separate root (`unshare` and `chroot`, no privileges), with Debian's
//! compiler. The result depends on the package archive only, and not on this machine.

use crate::apt::{self, Apt};
use crate::command::output;
use crate::image::{Images, basics, depmod, ext4, fresh, write};
use crate::kernel::Modules;
use crate::module_build;
use crate::recipe;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The parts of this file that determine the image's content.
pub const RECIPE: &str = concat!(include_str!("../assets/rdma-build.sh"), "1");

/// Directory of rdma-core's tests in the guest.
const TESTS: &str = "usr/share/doc/rdma-core/tests";

impl Images {
    /// Builds the image.
    pub(crate) fn rdma(&self, apt: &Apt, work: &Path) -> Result<()> {
        let packages = apt.fetch(recipe::RDMA_PACKAGES, false)?;
        let root = fresh(&work.join("root"))?;
        apt::unpack(&packages, &root)?;
        // Documentation is usually omitted, but contains the tests.
        let pyverbs = packages
            .iter()
            .find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3-pyverbs_")))
            .context("apt resolved python3-pyverbs to nothing")?;
        apt::unpack_paths(pyverbs, &root, &[&format!("./{TESTS}")])?;
        for entry in fs::read_dir(root.join(TESTS))? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "gz") {
                output(Command::new("gzip").arg("-d").arg(&path))?;
            }
        }
        basics(&root, "guest")?;
        for dir in ["var/lib/nfs/v4recovery", "var/lib/nfs/rpc_pipefs", "srv", "data"] {
            fs::create_dir_all(root.join(dir))?;
        }

        let build = fresh(&work.join("build"))?;
        let release = self.release(recipe::RDMA_KERNEL)?;
        module_build::root(apt, &build, &release, recipe::RDMA_BUILD_PACKAGES, true)?;
        for (name, text) in recipe::RDMA_SOURCES {
            write(&build.join("build/programs").join(name), text, 0o644)?;
        }
        write(&build.join("build/build.sh"), include_str!("../assets/rdma-build.sh"), 0o755)?;
        module_build::run(&build, &release).context("Can't build vmw_pvrdma and the guest programs")?;
        for name in recipe::RDMA_SOURCES.iter().filter_map(|(name, _)| name.strip_suffix(".c")) {
            fs::copy(build.join("build/out").join(name), root.join("usr/bin").join(name))?;
        }

        let kernel = self.kernel(recipe::RDMA_KERNEL).join("modules");
        let target = root.join("usr/lib/modules").join(&release);
        for dir in ["kernel", "updates"] {
            fs::create_dir_all(target.join(dir))?;
        }
        for (name, path) in Modules::scan(&kernel)?.in_order(recipe::RDMA_MODULES)? {
            fs::copy(path, target.join("kernel").join(format!("{name}.ko")))?;
        }
        fs::copy(build.join("build/out/vmw_pvrdma.ko"), target.join("updates/vmw_pvrdma.ko"))?;
        depmod(&kernel, &target, &root, &root, &release)?;
        // The driver pairs with function 0 at probe time only.
        write(&root.join("etc/modprobe.d/pvrdma.conf"), "softdep vmw_pvrdma pre: vmxnet3\n", 0o644)?;
        ext4(&root, &self.rdma_root(), "labguest", 10)
    }
}
