//! Kernels: the ELF file inside a bzImage, and the load order of modules.

use crate::command::filter;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    let four: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(four)).ok()
}

/// Returns the compressed kernel inside a bzImage, as its setup header places it.
fn payload(image: &[u8]) -> Option<&[u8]> {
    if image.get(0x202..0x206)? != b"HdrS" {
        // The magic is at 0x202. Without it, no other field is valid.
        return None;
    }
    let sectors = usize::from(*image.get(0x1f1)?);
    let start = (sectors + 1) * 512 + u32_at(image, 0x248)?;
    image.get(start..start.checked_add(u32_at(image, 0x24c)?)?)
}

/// Extracts the uncompressed `vmlinux` from a bzImage.
pub fn vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    let packed = payload(image).context("That is no bzImage with a compressed kernel inside")?;
    // All formats except xz are followed by the uncompressed size, which their programs would reject.
    let trimmed = &packed[..packed.len().saturating_sub(4)];
    let (program, args, data): (&str, &[&str], &[u8]) = match packed {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", &["-dc", "--single-stream"], packed),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", &["-dc"], trimmed),
        [0x02, 0x21, 0x4c, 0x18, ..] => ("lz4", &["-dc"], trimmed),
        [0x1f, 0x8b, ..] => ("gzip", &["-dc"], trimmed),
        _ => bail!("The kernel inside the bzImage is packed in a way the lab doesn't know"),
    };
    let elf = filter(Command::new(program).args(args), data.to_vec())?;
    if !elf.starts_with(b"\x7fELF") {
        bail!("What {program} unpacked from the bzImage is no ELF file");
    }
    Ok(elf)
}

/// A kernel's modules by name (`virtio_net`, with underscores), and their dependencies.
#[derive(Debug, Default)]
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
}

fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the value of `key=` in a module's `.modinfo`, a sequence of NUL-terminated strings.
fn modinfo<'a>(module: &'a [u8], key: &str) -> Option<&'a str> {
    let mut needle = vec![0];
    needle.extend(key.as_bytes());
    needle.push(b'=');
    let at = module.windows(needle.len()).position(|w| w == needle)? + needle.len();
    let end = module[at..].iter().position(|b| *b == 0)? + at;
    std::str::from_utf8(&module[at..end]).ok()
}

impl Modules {
    /// Finds the modules below a directory.
    pub fn scan(root: &Path) -> Result<Self> {
        let mut found = Modules::default();
        let mut todo = vec![root.to_path_buf()];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(&dir).with_context(|| format!("Can't list {}", dir.display()))? {
                let path = entry?.path();
                if path.is_dir() {
                    todo.push(path);
                } else if path.extension().is_some_and(|e| e == "ko")
                    && let Some(stem) = path.file_stem().and_then(|s| s.to_str())
                {
                    found.files.insert(canonical(stem), path.clone());
                }
            }
        }
        Ok(found)
    }

    /// Returns those of `wanted` that this kernel has as modules, with their dependencies first. Missing ones count as
    /// built in.
    pub fn in_order(&self, wanted: &[&str]) -> Result<Vec<(String, PathBuf)>> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in wanted {
            self.visit(&canonical(name), &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<(String, PathBuf)>,
    ) -> Result<()> {
        let Some(path) = self.files.get(name) else { return Ok(()) };
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let bytes = fs::read(path).with_context(|| format!("Can't read {}", path.display()))?;
        // `\0depends=` is found even as the first string: a section of zeros or `license=` precedes it.
        for need in modinfo(&bytes, "depends").unwrap_or_default().split(',').filter(|n| !n.is_empty()) {
            self.visit(&canonical(need), seen, order)?;
        }
        order.push((name.to_owned(), path.clone()));
        Ok(())
    }
}

/// Unpacks `.ko.xz` files below a directory, so that every tool can load them.
pub fn unpack_modules(root: &Path) -> Result<()> {
    let mut packed = Vec::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|e| e == "xz") {
                packed.push(path);
            }
        }
    }
    for some in packed.chunks(200) {
        crate::command::output(Command::new("xz").args(["-d", "-T1", "--"]).args(some))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF junk\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    #[test]
    fn modules_come_after_what_they_need() {
        let dir = tempfile::tempdir().unwrap();
        let put = |n: &str, d: &str| fs::write(dir.path().join(format!("{n}.ko")), module(d)).unwrap();
        put("virtio", "virtio_ring");
        put("virtio_ring", "");
        put("virtio-rng", "virtio");
        put("failover", "");
        let names: Vec<String> = Modules::scan(dir.path())
            .unwrap()
            .in_order(&["virtio-rng", "ext4", "failover"])
            .unwrap()
            .into_iter()
            .map(|m| m.0)
            .collect();
        assert_eq!(names, ["virtio_ring", "virtio", "virtio_rng", "failover"]);
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(vmlinux(b"").is_err());
        assert!(vmlinux(&vec![0; 4096]).is_err());
        let mut image = vec![0; 2048];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        assert!(vmlinux(&image).is_err());
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic(mut image in prop::collection::vec(any::<u8>(), 0..2048)) {
            if image.len() > 0x206 { image[0x202..0x206].copy_from_slice(b"HdrS"); }
            let _ = payload(&image);
        }
    }
}
