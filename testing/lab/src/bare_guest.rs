//! Guests without a distribution's user space. Their programs come with the initramfs, so they boot in seconds. They
//! have busybox, the lab's own program with its libraries, and files of the scenario.

use crate::cpio::Archive;
use crate::{agent, guest_channel, paths};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Kernel command line words: skip the root disk and the usual modules.
pub const COMMAND_LINE: [&str; 2] = ["lab.root=no", "lab.modules=no"];

/// Returns the end of a script, which makes the guest accept commands. The modules for vsock must be loaded.
pub fn serve() -> String {
    format!("exec /lab/agent agent {}{}", agent::VSOCK, guest_channel::PORT)
}

/// Builds an archive to append to a guest's initramfs: the script, `/lab/agent`, and additional files. `work` is a
/// directory for temporary files.
///
/// # Errors
/// The lab's own program or one of its libraries can't be read, or `strip` can't be run.
pub fn archive(work: &Path, script: &str, files: &[(String, Vec<u8>)]) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    archive.file("lab/script", 0o755, format!("#!/bin/sh\n{script}\n").as_bytes());
    archive.file("lab/agent", 0o755, &stripped(work, &paths::agent()?)?);
    for library in libraries()? {
        let name = library.file_name().and_then(|n| n.to_str()).context("A library without a name")?;
        // The program's path of its loader, and the library path of Debian's loader.
        let folder = if name.starts_with("ld-") { "lib64" } else { "lib/x86_64-linux-gnu" };
        let bytes =
            fs::read(&library).with_context(|| format!("Can't read the library {}", library.display()))?;
        archive.file(&format!("{folder}/{name}"), 0o755, &bytes);
    }
    for (name, bytes) in files {
        archive.file(&format!("lab/{name}"), 0o755, bytes);
    }
    Ok(archive.finish())
}

/// Returns a program without symbols, which is a fifth of its size.
fn stripped(work: &Path, program: &Path) -> Result<Vec<u8>> {
    let to = tempfile::NamedTempFile::new_in(work)?;
    let status = Command::new("strip")
        .arg("-o")
        .args([to.path(), program])
        .status()
        .context("Can't run strip, of Debian's package binutils")?;
    if !status.success() {
        bail!("strip of {} ended with {status}", program.display());
    }
    fs::read(to.path()).with_context(|| format!("Can't read {} without its symbols", program.display()))
}

/// Returns the libraries that this program has loaded. A guest's agent is the same program.
fn libraries() -> Result<Vec<PathBuf>> {
    let maps = fs::read_to_string("/proc/self/maps").context("Can't read what this program has loaded")?;
    let found = loaded(&maps);
    if !found
        .iter()
        .any(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-")))
    {
        bail!(
            "This program has loaded no ld-linux; the lab's agent is expected to be linked to the C library"
        );
    }
    Ok(found)
}

fn loaded(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.contains(".so")))
        .map(PathBuf::from)
        .collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_is_found_once() {
        let maps = "1-2 r--p 0 fe:00 1 /usr/lib/x86_64-linux-gnu/libc.so.6\n2-3 r-xp 0 fe:00 1 /usr/lib/x86_64-linux-gnu/libc.so.6\n\
                    4-5 rw-p 0 00:00 0\n5-6 r--p 0 fe:00 2 /work/lab\n6-7 r--p 0 fe:00 3 /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n\
                    7-8 rw-p 0 00:00 0 [stack]\n";
        let names: Vec<PathBuf> = loaded(maps);
        assert_eq!(
            names,
            ["/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "/usr/lib/x86_64-linux-gnu/libc.so.6"]
                .map(PathBuf::from)
        );
    }
}
