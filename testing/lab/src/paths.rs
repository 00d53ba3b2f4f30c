//! Paths of the lab's files.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Returns the work tree from which this crate was built.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().and_then(Path::parent).unwrap_or(here).to_path_buf()
}

/// Returns Cargo's target directory.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// Returns the cache of images: `LAB_CACHE`, or `target/lab-cache`.
pub fn cache() -> PathBuf {
    std::env::var_os("LAB_CACHE").map_or_else(|| target().join("lab-cache"), PathBuf::from)
}

/// Returns the cache of the built QEMU and its source, shared by all work trees of a user: `LAB_QEMU_CACHE`, or
/// `causeway/qemu` in the user's cache directory.
pub fn qemu_cache() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("LAB_QEMU_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("causeway/qemu")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/causeway/qemu")))
        .unwrap_or_else(|| cache().join("qemu-built"))
}

/// Returns the directory whose files every host gets in `/share/bin`: `target/lab-bin`.
pub fn binaries() -> PathBuf {
    target().join("lab-bin")
}

/// Returns the monitor under test: `CAUSEWAY_BIN`, or the newest of the profiles `ci` and `release`.
pub fn causeway() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("CAUSEWAY_BIN") {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("CAUSEWAY_BIN names {}, which is not a file", path.display());
        }
        return Ok(path);
    }
    ["ci", "release"]
        .iter()
        .map(|profile| target().join(profile).join("causeway"))
        .filter(|p| p.is_file())
        .max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok())
        .context("There is no causeway binary yet: build it with `cargo build --profile ci -p causeway`, or name one in CAUSEWAY_BIN")
}

/// Returns whether a program was built with the profile `ci`, mostly without optimization.
pub fn is_built_for_ci(program: &Path) -> bool {
    program.parent().and_then(Path::file_name).is_some_and(|folder| folder == "ci")
}

/// Builds the payload programs; returns their directory.
pub fn payload_programs() -> Result<PathBuf> {
    let root = workspace();
    let output = std::process::Command::new("make")
        .args(["-s", "-C"])
        .arg(root.join("guest/payload"))
        // The outer build's flags aren't for programs without a standard library.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .output()
        .context("make could not be started to build the payload programs")?;
    if !output.status.success() {
        bail!(
            "The payload programs could not be built:\n{}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(root.join("target/payload/release"))
}

/// Returns the lab's own program, which is also the agent inside hosts.
pub fn agent() -> Result<PathBuf> {
    let me = std::env::current_exe().context("Can't tell which program is running")?;
    if me.file_name().is_some_and(|n| n == "lab") {
        return Ok(me);
    }
    if let Some(path) = std::env::var_os("LAB_AGENT") {
        return Ok(path.into());
    }
    ["ci", "release", "debug"]
        .iter()
        .map(|profile| target().join(profile).join("lab"))
        .find(|p| p.is_file())
        .context("Lab tests need the lab's program inside the hosts: build it with `cargo build --profile ci -p lab`")
}
