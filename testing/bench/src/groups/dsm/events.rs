//! Cost of single events on live nodes, compared with the vNUMA paper's scheme and GiantVM by their design.

use serde_json::{Value, json};

use super::nodes::{Coherence, run};
use crate::programs::Programs;

/// An event, its program, and others' cost: messages and bytes.
struct Event {
    what: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// Number of nodes. Several may share a CPU, since counts don't depend on that.
    nodes: usize,
    /// Cost in the vNUMA paper's scheme.
    paper: &'static str,
    /// Cost in GiantVM.
    giantvm: &'static str,
}

const EVENTS: &[Event] = &[
    Event {
        what: "read miss, a page of 4 KiB",
        program: "pages",
        arguments: &["kind=read"],
        nodes: 2,
        paper: "2 / 4,144",
        giantvm: "2 / 8,220",
    },
    Event {
        what: "read miss, a page with 8 bytes of 4 KiB set",
        program: "pages",
        arguments: &["kind=read", "words=1"],
        nodes: 2,
        paper: "2 / 4,144",
        giantvm: "2 / 8,220",
    },
    Event {
        what: "write miss, a page of 4 KiB",
        program: "pages",
        arguments: &["kind=write"],
        nodes: 2,
        paper: "2 / 4,144",
        giantvm: "2 / 8,220",
    },
    Event {
        what: "upgrade, one sharer",
        program: "pages",
        arguments: &["kind=upgrade"],
        nodes: 2,
        paper: "2 / 48",
        giantvm: "2 / 8,220",
    },
    Event {
        what: "upgrade, two sharers",
        program: "pages",
        arguments: &["kind=upgrade"],
        nodes: 3,
        paper: "4 / 96",
        giantvm: "4 / 16,440",
    },
    Event {
        what: "upgrade, three sharers",
        program: "pages",
        arguments: &["kind=upgrade"],
        nodes: 4,
        paper: "6 / 144",
        giantvm: "6 / 24,660",
    },
    Event {
        what: "producer-consumer, a message of a word and its flag",
        program: "producer-consumer",
        arguments: &["messages=2000", "pace=20K"],
        nodes: 2,
        paper: "1 / 96 a store",
        giantvm: "4 / 16,440",
    },
    Event {
        what: "ticket lock, a hand-off of the lock alone",
        program: "locks",
        arguments: &["times=2000", "outside=2K", "data=none", "turns=yes"],
        nodes: 2,
        paper: "2 / 112 an atomic",
        giantvm: "2 to 4 / 8,220 to 16,440 and the page",
    },
    Event {
        what: "ticket lock, a hand-off with a page of data",
        program: "locks",
        arguments: &["times=2000", "outside=2K"],
        nodes: 2,
        paper: "2 / 112 an atomic",
        giantvm: "2 to 4 / 8,220 to 16,440 and the page",
    },
    Event {
        what: "false sharing, a store",
        program: "false-sharing",
        arguments: &["times=2000", "pace=20K"],
        nodes: 2,
        paper: "1 / 96",
        giantvm: "-",
    },
];

/// Measures each event, with page moves only and with the full protocol.
pub(super) fn all(programs: &Programs, cpus: &[usize], quick: bool) -> anyhow::Result<Vec<Value>> {
    let mut rows = Vec::new();
    for event in EVENTS.iter().take(if quick { 4 } else { EVENTS.len() }) {
        let places: Vec<usize> = cpus.iter().copied().cycle().take(event.nodes).collect();
        for coherence in [Coherence::Invalidate, Coherence::SingleWriter] {
            let ran = run(&places, coherence, &programs.path(event.program), event.arguments)?;
            let count = ran.number("events")?;
            let (loads, load_ns) = ran.stalls(&["read"]);
            let (stores, store_ns) = ran.stalls(&["write", "upgrade", "trapped"]);
            rows.push(json!({
                "event": event.what, "nodes": event.nodes, "coherence": coherence.name(), "count": count,
                "messages": ran.sum("/messages"), "bytes": ran.sum("/bytes"),
                "load_stalls": loads, "load_stalled_ns": load_ns, "store_stalls": stores, "store_stalled_ns": store_ns,
                "paper": event.paper, "giantvm": event.giantvm,
            }));
        }
    }
    Ok(rows)
}

/// Formats a Markdown table: messages, bytes and stalls per event.
pub(super) fn table(rows: &[Value]) -> String {
    let mut text = String::from(
        "| event | nodes | pages are kept by | messages / bytes | stalls of loads, of stores | paper's scheme | GiantVM |\n|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        #[expect(clippy::cast_precision_loss, reason = "figures for people")]
        let per = |name: &str| {
            row[name].as_u64().unwrap_or(0) as f64 / row["count"].as_u64().unwrap_or(0).max(1) as f64
        };
        let word = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        text.push_str(&format!(
            "| {} | {} | {} | {:.2} / {:.0} | {:.2}, {:.2} | {} | {} |\n",
            word("event"),
            row["nodes"],
            word("coherence"),
            per("messages"),
            per("bytes"),
            per("load_stalls"),
            per("store_stalls"),
            word("paper"),
            word("giantvm"),
        ));
    }
    text
}
