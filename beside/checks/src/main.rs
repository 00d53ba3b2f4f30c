//! Checks of `make lint` beyond rustfmt and clippy. Prints every violation, and exits with 1 if there is one.

mod duplicates;
mod layers;
mod licences;
mod metadata;

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
    if violations.is_empty() {
        println!(
            "checks: {} crates in the workspace keep the layers; {} packages: no rust-vmm crate twice, licences allowed",
            metadata.workspace_members.len(),
            metadata.packages.len()
        );
    }
    Ok(violations)
}
