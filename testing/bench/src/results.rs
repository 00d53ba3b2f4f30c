//! Output of a run: `target/bench/<group>.json`. For quotation, also `docs/results/<group>.json` with a table made from it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::figures::{Better, Figure, Report, short};

/// Writes the report as JSON to `folder`; returns the file.
///
/// # Errors
/// It can't be written.
pub fn write_json(report: &Report, folder: &Path) -> anyhow::Result<PathBuf> {
    let text = serde_json::to_string_pretty(report).context("The figures could not be turned into JSON")?;
    write(&folder.join(format!("{}.json", report.group)), &(text + "\n"))
}

/// Writes the report's table as Markdown to `folder`; returns the file.
///
/// # Errors
/// It can't be written.
pub fn write_table(report: &Report, folder: &Path) -> anyhow::Result<PathBuf> {
    write(&folder.join(format!("{}.md", report.group)), &markdown(report))
}

fn write(path: &Path, text: &str) -> anyhow::Result<PathBuf> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(path, text))
        .with_context(|| format!("{} could not be written", path.display()))?;
    Ok(path.to_owned())
}

/// Formats the figures as a table for documents.
#[must_use]
pub fn markdown(report: &Report) -> String {
    let group = report.group;
    let mut text = format!(
        "# Results of `bench {group}`\n\nWritten by `{}` together with [{group}.json]({group}.json), not by hand; commit {}.\n{}.\n\n",
        report.conditions.command,
        report.conditions.commit,
        report.conditions.line()
    );
    if let Some(reason) = &report.skipped {
        // Writing to a string can't fail.
        let _ = writeln!(text, "Nothing was measured: {reason}.");
        return text;
    }
    text += "| figure | what | unit | n | median | p5 | p95 | beside it | its median | ratio | aim |\n";
    text += "|---|---|---|---|---|---|---|---|---|---|---|\n";
    for figure in &report.figures {
        let Figure { name, what, unit, summary, peer, ratio, .. } = figure;
        let _ = writeln!(
            text,
            "| `{name}` | {what} | {unit} | {} | {} | {} | {} | {} | {} | {ratio:.3} | {} |",
            summary.samples,
            short(summary.median),
            short(summary.p5),
            short(summary.p95),
            peer.name,
            short(peer.summary.median),
            aim(figure)
        );
    }
    text
}

fn aim(figure: &Figure) -> String {
    let sign = if figure.better == Better::Higher { "at least" } else { "at most" };
    match (figure.aim, figure.aim_met) {
        (Some(aim), Some(true)) => format!("{sign} {aim}: met"),
        (Some(aim), _) => format!("{sign} {aim}: **missed**"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{markdown, write_json, write_table};
    use crate::conditions::Conditions;
    use crate::figures::{Better, Figure, Pairs, Report};

    fn report(skipped: Option<&str>) -> Report {
        let pairs = Pairs { pairs: vec![(9.0, 10.0), (8.0, 10.0), (7.0, 10.0)] };
        let figure = Figure::new("a_rate", "copies", "GB/s", Better::Higher, "memcpy", &pairs, Some(0.9));
        Report {
            group: "test",
            skipped: skipped.map(str::to_owned),
            conditions: Conditions::now(None, "4 KiB"),
            figures: figure.into_iter().collect(),
            details: serde_json::Value::Null,
        }
    }

    #[test]
    fn a_table_has_what_the_file_has() {
        let folder = tempfile::tempdir().unwrap();
        let report = report(None);
        let json = std::fs::read_to_string(write_json(&report, folder.path()).unwrap()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["figures"][0]["p5"], 7.0);
        assert_eq!(json["figures"][0]["p95"], 9.0);
        assert!(json["conditions"]["command"].is_string());
        let table = std::fs::read_to_string(write_table(&report, folder.path()).unwrap()).unwrap();
        let row = "| `a_rate` | copies | GB/s | 3 | 8.00 | 7.00 | 9.00 | memcpy | 10.0 | 0.800 | at least 0.9: **missed** |";
        assert!(table.lines().any(|line| line == row), "{table}");
    }

    #[test]
    fn a_skipped_group_says_why() {
        let text = markdown(&report(Some("no /dev/kvm")));
        assert!(text.contains("Nothing was measured: no /dev/kvm.") && !text.contains("a_rate"), "{text}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = format!("{:#}", write_json(&report(None), &file.join("below")).unwrap_err());
        assert!(error.contains("below/test.json could not be written"), "{error}");
    }
}
