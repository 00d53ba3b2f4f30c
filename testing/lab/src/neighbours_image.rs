//! The kernel modules of guests with neighbours, built from this work tree's `guest/mmnet` for each of their kernels.

use crate::apt::Apt;
use crate::image::{Images, fresh, write};
use crate::recipe::Artifact;
use crate::{module_build, paths, progress, recipe};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The script in the build root.
const BUILD: &str = include_str!("../assets/neighbours-build.sh");

/// The kernel whose source has checkpatch, and for which sparse checks the modules.
const CHECKED: &str = recipe::NEIGHBOUR_KERNELS[0];
/// Reports of sparse and checkpatch, beside the modules of [`CHECKED`].
const FINDINGS: [&str; 2] = ["sparse.txt", "checkpatch.txt"];

/// Returns the sources, with their paths below the work tree.
fn sources() -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("devices/neighbour/include/causeway_neighbour.h")];
    for folder in ["guest/mmnet", "guest/mmnet/test"] {
        let folder = Path::new(folder);
        let full = paths::workspace().join(folder);
        for entry in fs::read_dir(&full).with_context(|| format!("Can't list {}", full.display()))? {
            let name = PathBuf::from(entry?.file_name());
            let source = name.extension().is_some_and(|e| e == "c" || e == "h");
            let made = name.to_string_lossy().ends_with(".mod.c");
            if source && !made || name == Path::new("Kbuild") || name == Path::new("Makefile") {
                found.push(folder.join(name));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the hash of all sources. If they can't be read, the build reports the error.
pub(crate) fn fingerprint() -> String {
    let sources = sources().unwrap_or_default();
    let texts: Vec<String> = sources
        .iter()
        .map(|path| fs::read_to_string(paths::workspace().join(path)).unwrap_or_default())
        .collect();
    recipe::hash(texts.iter().map(String::as_str).chain([BUILD]))
}

/// Returns a kernel's module, for use in a guest.
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

/// Fails if sparse or checkpatch has findings in the modules' sources, and prints them.
///
/// # Errors
/// The findings, or the images can't be built.
pub fn lint() -> Result<()> {
    Images::ready(&[Artifact::Kernels, Artifact::Neighbours])?;
    let mut found = String::new();
    for name in FINDINGS {
        let path = paths::cache().join("neighbours").join(CHECKED).join(name);
        // A missing report would mean that the check didn't run.
        let text = fs::read_to_string(&path)
            .with_context(|| format!("There is no report of a check of the modules: {}", path.display()))?;
        let (last, findings) = report(&text)
            .with_context(|| format!("{} does not say that its check came to its end", path.display()))?;
        progress!("{name}: {last}");
        found.push_str(findings);
    }
    if !found.trim().is_empty() {
        bail!("The sources of guest/mmnet have findings:\n{}", found.trim());
    }
    Ok(())
}

/// Returns the last line of a report, which names the checked files, and the text before it: the findings.
fn report(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_end();
    let (findings, last) = text.rsplit_once('\n').unwrap_or(("", text));
    last.starts_with("checked ").then_some((last, findings))
}

impl Images {
    /// Builds the modules.
    pub(crate) fn neighbours(&self, apt: &Apt, work: &Path) -> Result<()> {
        let all = fresh(&paths::cache().join("neighbours"))?;
        for kernel in recipe::NEIGHBOUR_KERNELS {
            let root = fresh(&work.join(kernel))?;
            let release = self.release(kernel)?;
            let checked = *kernel == CHECKED;
            let more: &[&str] = if checked { recipe::MODULE_CHECK_PACKAGES } else { &[] };
            let packages = [recipe::MODULE_BUILD_PACKAGES, more].concat();
            module_build::root(apt, &root, &release, &packages, checked)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A truncated report doesn't count as one without findings.
    #[test]
    fn a_report_says_that_it_is_whole() {
        assert_eq!(report("checked 3 files\n"), Some(("checked 3 files", "")));
        assert_eq!(report("a.c:1: bad\nchecked 3 files\n"), Some(("checked 3 files", "a.c:1: bad")));
        assert_eq!(report("a.c:1: bad\n"), None);
        assert_eq!(report(""), None);
    }
}
