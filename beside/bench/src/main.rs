//! `make bench`: runs groups of benchmarks, prints them, and leaves `target/bench/<group>.json`.

use anyhow::{Context, bail};
use bench::figures::table;
use bench::groups::{ALL, Group};
use bench::programs::results;
use clap::Parser;
use std::process::ExitCode;

/// Benchmarks against peers, natively. Leaves target/bench/<group>.json.
#[derive(Debug, Parser)]
struct Options {
    /// Groups to run; all when none is named.
    groups: Vec<String>,
    /// List the groups.
    #[arg(long)]
    list: bool,
    /// Few samples: to see that it works, not for figures. Writes no file.
    #[arg(long)]
    quick: bool,
    /// Fail when a figure misses its aim.
    #[arg(long)]
    check: bool,
    /// Be a node of a VM that group dsm runs.
    #[arg(long, hide = true)]
    dsm_node: Option<String>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<bool> {
    if let Some(task) = &options.dsm_node {
        return bench::groups::dsm::nodes::be(task).map(|()| true);
    }
    if options.list {
        for group in ALL {
            println!("{:8} {}", group.name, group.about);
        }
        return Ok(true);
    }
    let mut chosen: Vec<&Group> = Vec::new();
    for name in &options.groups {
        let Some(group) = ALL.iter().find(|group| group.name == name) else {
            let names: Vec<&str> = ALL.iter().map(|group| group.name).collect();
            bail!("There is no group '{name}'; there are: {}", names.join(", "));
        };
        chosen.push(group);
    }
    if chosen.is_empty() {
        chosen.extend(ALL);
    }
    let mut all_met = true;
    for group in chosen {
        eprintln!("bench: group {}: {}", group.name, group.about);
        let report = (group.run)(options.quick)?;
        if report.skipped.is_none() {
            println!("{}\n{}", report.conditions.line(), table(&report.figures));
        }
        all_met &= report.figures.iter().all(|figure| figure.aim_met != Some(false));
        if !options.quick {
            let folder = results();
            let path = folder.join(format!("{}.json", group.name));
            let text =
                serde_json::to_string_pretty(&report).context("The figures could not be turned into JSON")?;
            std::fs::create_dir_all(&folder)
                .and_then(|()| std::fs::write(&path, text + "\n"))
                .with_context(|| format!("{} could not be written", path.display()))?;
            println!("Written: {}", path.display());
        }
    }
    if !all_met {
        eprintln!("bench: a figure misses its aim (marked MISSED above)");
    }
    Ok(all_met || !options.check)
}
