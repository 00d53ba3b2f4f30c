//! Builds the measured programs: payload programs, which are a separate workspace, and `causeway`.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the root of the work tree.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// Returns the directory of results.
pub fn results() -> PathBuf {
    target().join("bench")
}

/// Returns the directory of the results that documents quote.
pub fn documents() -> PathBuf {
    repository().join("docs/results")
}

fn target() -> PathBuf {
    repository().join("target")
}

/// Builds the program `causeway` with this program's profile.
pub fn causeway() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("Where this program lies can't be found out")?;
    let folder = own.parent().context("This program lies in no folder")?;
    // Tests are one directory deeper.
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(&cargo)
        .args(["build", "--quiet", "--locked", "-p", "causeway", "--profile", profile])
        .current_dir(repository())
        .output()
        .with_context(|| format!("{} could not be started to build causeway", cargo.display()))?;
    if !output.status.success() {
        bail!("causeway could not be built:\n{}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(folder.join("causeway"))
}

/// Returns the program beside this one, which may be a test. Builds it if it is missing.
pub fn causeway_beside() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("Where this program lies can't be found out")?;
    let mut beside = own.ancestors().skip(1).take(2).map(|folder| folder.join("causeway"));
    beside.find(|path| path.is_file()).map_or_else(causeway, Ok)
}

/// The built payload programs.
#[derive(Debug, Clone)]
pub struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Builds them, and the guest `rdma-echo`, with the calling cargo into `target/payload`, if they are outdated.
    pub fn build() -> anyhow::Result<Self> {
        let root = repository();
        let target = target().join("payload");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(&cargo)
            .args([
                "build",
                "--quiet",
                "--release",
                "--locked",
                "-p",
                "payload-programs",
                "-p",
                "rdma-echo",
                "--manifest-path",
            ])
            .arg(root.join("guest/payload/Cargo.toml"))
            .arg("--target-dir")
            .arg(&target)
            // The outer build's flags aren't for programs without a standard library.
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env_remove("CARGO_BUILD_TARGET")
            .output()
            .with_context(|| {
                format!("{} could not be started to build the payload programs", cargo.display())
            })?;
        if !output.status.success() {
            bail!(
                "The payload programs could not be built:\n{}",
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        Ok(Self { folder: target.join("release") })
    }

    /// Returns the path of a program.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
