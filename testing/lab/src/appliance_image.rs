//! The root disk of guests that form a storage appliance or its client: Debian's NFS, RAID and network block devices,
//! with kernel modules. It also has an archive of a part of Debian's kernel source, which guests unpack over the
//! network.

use crate::apt::{self, Apt};
use crate::command::output;
use crate::image::{Images, basics, depmod, ext4, fresh};
use crate::kernel::Modules;
use crate::recipe;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Path of the archive in the guest.
pub(crate) const TREE: &str = "/usr/share/lab/linux.tar";

/// Packs some directories of a kernel source.
fn pack_tree(apt: &Apt, work: &Path, to: &Path) -> Result<()> {
    let package = apt.download(recipe::APPLIANCE_SOURCE, None)?;
    let source = fresh(&work.join("source"))?;
    let name = recipe::APPLIANCE_SOURCE;
    let archive = format!("./usr/src/{name}.tar.xz");
    apt::unpack_paths(&package, &source, &[&archive])?;
    let folders = recipe::APPLIANCE_TREE.iter().map(|folder| format!("{name}/{folder}"));
    let mut unpack = Command::new("tar");
    unpack.arg("-C").arg(&source).arg("-xJf").arg(source.join(&archive)).args(folders);
    output(&mut unpack)?;
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--owner=0", "--group=0", "-C"]).arg(source.join(name));
    output(pack.arg("-cf").arg(to).args(recipe::APPLIANCE_TREE)).map(drop)
}

impl Images {
    /// Builds the image.
    pub(crate) fn appliance(&self, apt: &Apt, work: &Path) -> Result<()> {
        let packages = apt.fetch(recipe::APPLIANCE_PACKAGES, false)?;
        let root = fresh(&work.join("root"))?;
        apt::unpack(&packages, &root)?;
        basics(&root, "guest")?;
        for dir in ["var/lib/nfs/v4recovery", "var/lib/nfs/rpc_pipefs", "srv", "usr/share/lab"] {
            fs::create_dir_all(root.join(dir))?;
        }
        let tree = root.join(TREE.trim_start_matches('/'));
        pack_tree(apt, work, &tree).with_context(|| {
            format!("Can't pack {} of {}", recipe::APPLIANCE_TREE.join(", "), recipe::APPLIANCE_SOURCE)
        })?;
        for kernel in recipe::NEIGHBOUR_KERNELS {
            let (release, from) = (self.release(kernel)?, self.kernel(kernel).join("modules"));
            let target = root.join("usr/lib/modules").join(&release);
            fs::create_dir_all(target.join("kernel"))?;
            for (name, path) in Modules::scan(&from)?.in_order(recipe::APPLIANCE_MODULES)? {
                fs::copy(path, target.join("kernel").join(format!("{name}.ko")))?;
            }
            depmod(&from, &target, &root, &root, &release)?;
        }
        ext4(&root, &self.appliance_root(), "labguest", 10)
    }
}
