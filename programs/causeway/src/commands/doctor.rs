//! `causeway doctor`: prints the findings of [`crate::doctor`].

use std::process::ExitCode;

use crate::doctor::{self, Finding, Status};
use crate::output;

/// Prints the findings. The exit status is 0 if at least payload guests can run.
pub fn doctor(json: bool) -> anyhow::Result<ExitCode> {
    let report = doctor::examine();
    if json {
        output::print_json(&report)?;
    } else {
        let mut text = String::new();
        for group in &report.groups {
            text.push_str(&format!("{}\n", group.name));
            group.findings.iter().for_each(|finding| push(finding, &mut text));
        }
        text.push_str(&format!("\n{}\n", report.verdict));
        output::print(&text)?;
    }
    Ok(if report.payloads { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn push(finding: &Finding, text: &mut String) {
    let status = match finding.status {
        Status::Ok => "ok",
        Status::Limited => "limited",
        Status::Missing => "missing",
    };
    text.push_str(&format!("  {status:8}{:24}{}\n", finding.name, finding.found));
    if let Some(remedy) = &finding.remedy {
        text.push_str(&format!("{:34}-> {remedy}\n", ""));
    }
}
