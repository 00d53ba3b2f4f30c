//! The part of `cargo metadata` that the checks read.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The whole dependency graph.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// All packages of the workspace and its dependencies.
    pub packages: Vec<Package>,
    /// Package ids of the workspace's crates.
    pub workspace_members: Vec<String>,
    /// Absolute path of the workspace.
    pub workspace_root: String,
}

/// One package.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// Opaque id.
    pub id: String,
    /// Name of the package.
    pub name: String,
    /// Version of the package (semantic versioning).
    pub version: String,
    /// SPDX expression, if the manifest has one.
    pub license: Option<String>,
    /// Absolute path of its manifest.
    pub manifest_path: String,
    /// Its dependencies.
    pub dependencies: Vec<Dependency>,
}

/// One edge of the graph.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// Package name.
    pub name: String,
    /// `dev`, `build`, or absent for a normal dependency.
    pub kind: Option<String>,
}

/// Runs `cargo metadata`.
pub fn load() -> Result<Metadata> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version", "1", "--locked"])
        .output()
        .context("Could not run 'cargo metadata'")?;
    if !output.status.success() {
        bail!("'cargo metadata --locked' failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("'cargo metadata' printed JSON of an unknown form")
}
