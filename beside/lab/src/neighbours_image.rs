//! The modules of guests with neighbours, built from this work tree's `guest/mmnet` for each kernel that has them.

use crate::apt::Apt;
use crate::image::{Images, fresh, write};
use crate::{module_build, paths, recipe};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// What runs in the build root. Debian's headers have the kernel's type information, and the program that would copy it isn't there.
const BUILD: &str = "#!/bin/sh\nset -e\ncd /build/guest/mmnet\n\
    make KDIR=/usr/lib/modules/$1/build CONFIG_DEBUG_INFO_BTF_MODULES= modules\n\
    for m in *.ko; do strip --strip-debug $m; cp $m /build/out/; done\n";

/// The sources, with their paths below the work tree.
fn sources() -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("devices/neighbour/include/causeway_neighbour.h")];
    let folder = Path::new("guest/mmnet");
    let full = paths::workspace().join(folder);
    for entry in fs::read_dir(&full).with_context(|| format!("Can't list {}", full.display()))? {
        let name = PathBuf::from(entry?.file_name());
        let source = name.extension().is_some_and(|e| e == "c" || e == "h");
        let made = name.to_string_lossy().ends_with(".mod.c");
        if source && !made || name == Path::new("Kbuild") || name == Path::new("Makefile") {
            found.push(folder.join(name));
        }
    }
    found.sort();
    Ok(found)
}

/// The hash of all sources; when they can't be read, building says why.
pub(crate) fn fingerprint() -> String {
    let sources = sources().unwrap_or_default();
    let texts: Vec<String> = sources
        .iter()
        .map(|path| fs::read_to_string(paths::workspace().join(path)).unwrap_or_default())
        .collect();
    recipe::hash(texts.iter().map(String::as_str).chain([BUILD]))
}

/// A module of a kernel, to be put into a guest.
pub(crate) fn module(kernel: &str, name: &str) -> Result<Vec<u8>> {
    if !recipe::NEIGHBOUR_KERNELS.contains(&kernel) {
        bail!(
            "There are no modules for neighbours for the kernel {kernel:?}; there are for {}",
            recipe::NEIGHBOUR_KERNELS.join(", ")
        );
    }
    let path = paths::cache().join("neighbours").join(kernel).join(format!("{name}.ko"));
    fs::read(&path).with_context(|| format!("Can't read the module {}", path.display()))
}

impl Images {
    /// Builds them.
    pub(crate) fn neighbours(&self, apt: &Apt, work: &Path) -> Result<()> {
        let all = fresh(&paths::cache().join("neighbours"))?;
        for kernel in recipe::NEIGHBOUR_KERNELS {
            let root = fresh(&work.join(kernel))?;
            let release = self.release(kernel)?;
            module_build::root(apt, &root, &release, recipe::MODULE_BUILD_PACKAGES, false)?;
            for path in sources()? {
                let from = paths::workspace().join(&path);
                let text = fs::read_to_string(&from)
                    .with_context(|| format!("Can't read the source {}", from.display()))?;
                write(&root.join("build").join(&path), &text, 0o644)?;
            }
            write(&root.join("build/build.sh"), BUILD, 0o755)?;
            module_build::run(&root, &release)
                .with_context(|| format!("Can't build guest/mmnet for the kernel {release}"))?;
            let to = fresh(&all.join(kernel))?;
            for entry in fs::read_dir(root.join("build/out"))? {
                let entry = entry?;
                fs::copy(entry.path(), to.join(entry.file_name()))?;
            }
        }
        Ok(())
    }
}
