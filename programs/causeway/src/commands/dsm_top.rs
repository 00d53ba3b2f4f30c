//! `causeway dsm top`: prints the pages on which the vCPUs of a VM stall most.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

use crate::cli::DsmTopArgs;
use crate::output;
use crate::run::spanning::top_socket;

/// Time-out of a VM's response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// A page on which vCPUs stall, over all nodes.
#[derive(Debug, Default, Serialize)]
struct Row {
    /// Guest-physical address.
    address: String,
    mode: String,
    owner: Option<u64>,
    reads: u64,
    writes: u64,
    trapped: u64,
    waited_ms: f64,
    /// Nodes that faulted on it, and the offsets of these faults.
    nodes: BTreeMap<u64, BTreeSet<u64>>,
    instructions: BTreeSet<String>,
    advice: &'static str,
}

/// Prints the hottest pages of a VM.
pub fn top(args: &DsmTopArgs, json: bool) -> anyhow::Result<()> {
    let socket = top_socket(&args.name);
    let mut stream = UnixStream::connect(&socket).with_context(|| {
        format!("The VM {} has no node 0 here that answers at {}", args.name, socket.display())
    })?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).with_context(|| format!("The VM {} doesn't answer", args.name))?;
    let reports: Vec<Value> = serde_json::from_str(&text).with_context(|| {
        format!("The answer of VM {} can't be decoded; is it of another release?", args.name)
    })?;
    let rows = rows(&reports, args.count);
    if json {
        return output::print_json(&serde_json::json!({ "pages": rows, "nodes": reports }));
    }
    let mut lines = vec![format!(
        "{:>12}  {:13} {:>5} {:>8} {:>8} {:>8} {:>10}  {}",
        "ADDRESS",
        "KEPT BY",
        "OWNER",
        "READS",
        "WRITES",
        "TRAPPED",
        "WAITED ms",
        "NODE:OFFSETS, INSTRUCTIONS, ADVICE"
    )];
    for row in &rows {
        let owner = row.owner.map_or_else(|| "-".to_owned(), |owner| owner.to_string());
        lines.push(format!(
            "{:>12}  {:13} {:>5} {:>8} {:>8} {:>8} {:>10.1}  {}",
            row.address,
            row.mode,
            owner,
            row.reads,
            row.writes,
            row.trapped,
            row.waited_ms,
            places(row)
        ));
        if !row.advice.is_empty() {
            lines.push(format!("{:>12}  {}", "", row.advice));
        }
    }
    output::print(&lines.join("\n"))
}

fn places(row: &Row) -> String {
    let nodes = row.nodes.iter().map(|(node, offsets)| {
        let offsets: Vec<_> = offsets.iter().map(|offset| format!("{offset:#x}")).collect();
        format!("{node}:{}", offsets.join("+"))
    });
    let instructions = row.instructions.iter().take(4).cloned();
    nodes.chain(instructions).collect::<Vec<_>>().join(" ")
}

fn rows(reports: &[Value], count: usize) -> Vec<Row> {
    let mut pages: BTreeMap<u64, Row> = BTreeMap::new();
    for report in reports {
        let Some(node) = report["node"].as_u64() else { continue };
        for hot in report["hot"].as_array().into_iter().flatten() {
            let Some(page) = hot["page"].as_u64() else { continue };
            let row = pages.entry(page).or_default();
            let number = |key: &str| hot[key].as_u64().unwrap_or(0);
            row.address = format!("{:#x}", page.saturating_mul(4096));
            let mode = hot["mode"].as_str().unwrap_or("invalidate");
            // A node without a copy doesn't know about updates.
            if row.mode.is_empty() || mode != "invalidate" {
                mode.clone_into(&mut row.mode);
            }
            if hot["owner"] == true {
                row.owner = Some(node);
            }
            row.reads += number("reads");
            row.writes += number("writes");
            row.trapped += number("trapped");
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            let waited = number("waited_ns") as f64 / 1e6;
            row.waited_ms += waited;
            let first = |key: &str| -> Vec<u64> {
                let places = hot[key].as_array().into_iter().flatten();
                places.filter_map(|place| place.get(0)?.as_u64()).collect()
            };
            row.nodes.entry(node).or_default().extend(first("offsets"));
            row.instructions.extend(first("instructions").iter().map(|rip| format!("{rip:#x}")));
        }
    }
    let mut rows: Vec<Row> = pages.into_values().collect();
    for row in &mut rows {
        row.advice = advice(row);
    }
    rows.sort_by(|a, b| b.waited_ms.total_cmp(&a.waited_ms));
    rows.truncate(count);
    rows
}

/// Returns advice if the counts suggest it.
fn advice(row: &Row) -> &'static str {
    let shared = row.nodes.len() > 1;
    let apart = {
        let mut all = row.nodes.values();
        let first = all.next().cloned().unwrap_or_default();
        shared && all.all(|other| first.is_disjoint(other))
    };
    if apart && row.writes > row.reads / 8 {
        "nodes use different words of it: put them on pages of their own"
    } else if row.trapped > 4 * (row.reads + 1) {
        "many stores, few reads: batch stores, or write where no node reads yet"
    } else if shared && row.writes > 0 && row.mode == "invalidate" {
        "nodes write it alternately: let one node do the work that needs it, or do more work at a time"
    } else if shared && row.writes == 0 {
        "read only: each node fetches it once"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hot(page: u64, writes: u64, offset: u64, owner: bool) -> Value {
        serde_json::json!({
            "page": page, "mode": "invalidate", "owner": owner, "reads": 10, "writes": writes, "trapped": 0,
            "waited_ns": writes * 1_000_000, "offsets": [[offset, 3]], "instructions": [[0x20_0000 + offset, 3]],
        })
    }

    /// The counts of all nodes are summed per page, the costliest page first. False sharing is distinguished from
    /// alternating writers.
    #[test]
    fn pages_of_all_nodes_come_together() {
        let report = |node: u64, hot: Vec<Value>| serde_json::json!({ "node": node, "hot": hot });
        let reports = [
            report(0, vec![hot(1, 5, 0, true), hot(2, 20, 8, false), hot(3, 0, 0, false)]),
            report(1, vec![hot(1, 6, 0, false), hot(2, 30, 16, true)]),
        ];
        let rows = rows(&reports, 2);
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].address.as_str(), rows[0].writes, rows[0].owner), ("0x2000", 50, Some(1)));
        assert!(rows[0].advice.contains("different words"));
        assert_eq!((rows[1].address.as_str(), rows[1].reads, rows[1].owner), ("0x1000", 20, Some(0)));
        assert!(rows[1].advice.contains("alternately"));
    }
}
