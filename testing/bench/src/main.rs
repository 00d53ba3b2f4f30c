//! `make bench`: runs groups of benchmarks, prints them, and writes `target/bench/<group>.json`. With `--record`, also writes the
//! results that documents quote.

use anyhow::bail;
use bench::figures::table;
use bench::groups::{ALL, Group};
use bench::programs::{documents, results};
use bench::results::{write_json, write_table};
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
    /// Also write docs/results/<group>.json and, made from it, <group>.md: what documents quote.
    #[arg(long, conflicts_with = "quick")]
    record: bool,
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
            println!("Written: {}", write_json(&report, &results())?.display());
        }
        if options.record {
            write_json(&report, &documents())?;
            println!("Written: {}", write_table(&report, &documents())?.display());
        }
    }
    if !all_met {
        eprintln!("bench: a figure misses its aim (marked MISSED above)");
    }
    Ok(all_met || !options.check)
}
