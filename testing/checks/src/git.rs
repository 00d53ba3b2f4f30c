//! Questions to Git about the work tree.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Returns what a command of Git prints.
///
/// # Errors
/// Git is missing, or fails.
pub fn output(root: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        // A clone may belong to another user than the one who tests it.
        .args(["-c", "safe.directory=*"])
        .args(arguments)
        .output()
        .context("Could not run git, which lists the files to check; install the package 'git'")?;
    if !output.status.success() {
        bail!("'git {}' failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("git printed text that isn't UTF-8")
}

/// Returns whether a directory is in a Git work tree. A source archive isn't.
pub fn is_work_tree(root: &Path) -> bool {
    root.join(".git").exists()
}

/// Returns the paths of all tracked files that exist, below the root.
///
/// # Errors
/// As [`output`].
pub fn tracked(root: &Path) -> Result<BTreeSet<String>> {
    let list = output(root, &["ls-files", "-z"])?;
    let exists = |path: &&str| !path.is_empty() && root.join(path).exists();
    Ok(list.split('\0').filter(exists).map(str::to_owned).collect())
}
