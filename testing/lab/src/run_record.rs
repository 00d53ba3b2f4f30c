//! Records the last run of each scenario: a file per command line, and a table of them. `LAB_RUNS` names the directory;
//! without it nothing is recorded.

use crate::paths;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Run {
    /// The scenario and its options.
    command: String,
    /// Commit of the work tree, with `-dirty` if it had changes.
    commit: String,
    passed: bool,
    seconds: u64,
    /// Number of excused emulator faults.
    excused: u64,
    /// The scenario's figures.
    figures: Value,
}

/// Records this process' run with `figures`, if `LAB_RUNS` is set.
///
/// # Errors
/// The directory can't be written.
pub fn keep(figures: &Value, took: Duration) -> Result<()> {
    let Some(dir) = std::env::var_os("LAB_RUNS").map(PathBuf::from) else { return Ok(()) };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let run = Run {
        command: words.join(" "),
        commit: commit(),
        passed: figures["ok"] == true,
        seconds: took.as_secs(),
        excused: figures["excused_faults"].as_u64().unwrap_or(0),
        figures: figures.clone(),
    };
    keep_in(&dir, &run).with_context(|| format!("Can't keep the record of this run in {}", dir.display()))
}

fn commit() -> String {
    let mut command = Command::new("git");
    command.current_dir(paths::workspace()).args([
        "describe",
        "--always",
        "--dirty",
        "--abbrev=9",
        "--exclude=*",
    ]);
    match command.output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

fn keep_in(dir: &Path, run: &Run) -> Result<()> {
    fs::create_dir_all(dir)?;
    // Scenarios that run in parallel write the same table.
    let lock = fs::File::open(dir)?;
    lock.lock()?;
    fs::write(dir.join(file_name(&run.command)), serde_json::to_string_pretty(run)? + "\n")?;
    let mut runs = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            let text = fs::read_to_string(&path)?;
            runs.push(
                serde_json::from_str(&text).with_context(|| format!("{} is no record", path.display()))?,
            );
        }
    }
    fs::write(dir.join("README.md"), table(runs))?;
    Ok(())
}

fn file_name(command: &str) -> String {
    let mut name = String::new();
    for c in command.chars() {
        match c {
            _ if c.is_ascii_alphanumeric() || c == '_' || c == '.' => name.push(c),
            _ if name.ends_with('-') => {}
            _ => name.push('-'),
        }
    }
    format!("{}.json", name.trim_end_matches('-'))
}

fn table(mut runs: Vec<Run>) -> String {
    runs.sort_by(|a, b| a.command.cmp(&b.command));
    let mut text = "# Last runs of lab scenarios\n\n\
        This table shows when each scenario of the lab ran last and how it ended; the file of a row has its figures. `LAB_RUNS=docs/results/lab make test` writes\n\
        both.\n\n\
        | scenario | ended | seconds | excused faults | commit |\n|---|---|---|---|---|\n"
        .to_owned();
    for run in &runs {
        let ended = if run.passed { "passed" } else { "**failed**" };
        text.push_str(&format!(
            "| [`{}`]({}) | {ended} | {} | {} | {} |\n",
            run.command,
            file_name(&run.command),
            run.seconds,
            run.excused,
            run.commit
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(command: &str, passed: bool) -> Run {
        Run {
            command: command.to_owned(),
            commit: "abc".to_owned(),
            passed,
            seconds: 5,
            excused: 0,
            figures: json!({"ok": passed}),
        }
    }

    #[test]
    fn a_later_run_replaces_the_former_and_the_table_has_all() {
        let dir = tempfile::tempdir().unwrap();
        keep_in(dir.path(), &run("net", true)).unwrap();
        keep_in(dir.path(), &run("boot --cpus 2", true)).unwrap();
        keep_in(dir.path(), &run("net", false)).unwrap();
        let text = fs::read_to_string(dir.path().join("README.md")).unwrap();
        let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| [")).collect();
        assert_eq!(
            rows,
            [
                "| [`boot --cpus 2`](boot-cpus-2.json) | passed | 5 | 0 | abc |",
                "| [`net`](net.json) | **failed** | 5 | 0 | abc |"
            ]
        );
        let kept: Run =
            serde_json::from_str(&fs::read_to_string(dir.path().join("net.json")).unwrap()).unwrap();
        assert_eq!(kept, run("net", false));
    }

    #[test]
    fn other_options_are_other_files() {
        assert_eq!(file_name("rdma-tools --only ibv_ --only rping"), "rdma-tools-only-ibv_-only-rping.json");
        assert_ne!(file_name("boot --cpus 1"), file_name("boot --cpus 2"));
    }
}
