//! Checks of `make lint` beyond rustfmt and clippy. Prints every violation, and exits with 1 if there is one.

mod commits;
mod duplicates;
mod git;
mod layers;
mod licences;
mod metadata;
mod prose;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

fn main() -> ExitCode {
    match run() {
        Ok(violations) if violations.is_empty() => ExitCode::SUCCESS,
        Ok(violations) => {
            for violation in &violations {
                eprintln!("checks: {violation}");
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("checks: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<Vec<String>> {
    let metadata = metadata::load()?;
    let mut violations = layers::violations(&metadata);
    violations.extend(duplicates::violations(&metadata));
    violations.extend(licences::violations(&metadata));
    let root = Path::new(&metadata.workspace_root);
    let text = if git::is_work_tree(root) {
        violations.extend(prose::violations(root, &git::tracked(root)?)?);
        violations.extend(commits::violations(root)?);
        "text and commit messages keep their rules"
    } else {
        "text and commit messages are NOT checked, since this is no Git work tree"
    };
    if violations.is_empty() {
        println!(
            "checks: {} crates in the workspace keep the layers; {} packages: no rust-vmm crate twice, licences allowed; {text}",
            metadata.workspace_members.len(),
            metadata.packages.len()
        );
    }
    Ok(violations)
}
