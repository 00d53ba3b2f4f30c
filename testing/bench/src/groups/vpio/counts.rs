//! Costs of frames other than time: exits, the monitor's requests, those that ran a check, time in the monitor.

use serde_json::{Map, Value, json};
use vpio::Counters;

/// Counts so far, or between two samples.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Exits to user space.
    pub exits: u64,
    /// The monitor's counters and nanoseconds in it, if there is a monitor.
    pub monitor: Option<(Counters, u64)>,
}

impl Counts {
    /// Returns counts per frame since another sample. Each of `jobs` jobs has an exit of its own.
    pub fn per_frame(&self, before: &Self, jobs: u64, frames: u64) -> Value {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let exits = (self.exits - before.exits).saturating_sub(jobs);
        let mut counted = Map::from_iter([("exits_per_frame".to_owned(), json!(ratio(exits, frames)))]);
        if let (Some((before, began)), Some((after, ended))) = (before.monitor, self.monitor) {
            let requests = after.requests - before.requests;
            let checks = after.decisions - before.decisions;
            for (name, value) in [
                ("requests_per_frame", ratio(requests, frames)),
                ("share_of_requests_checked", ratio(checks, requests)),
                ("nanoseconds_in_monitor_per_frame", ratio(ended - began, frames)),
            ] {
                counted.insert(name.to_owned(), json!(value));
            }
        }
        Value::Object(counted)
    }
}

/// Formats a table: a row per card, direction, frames and mode.
pub fn table(details: &Map<String, Value>) -> String {
    let columns = [
        ("exits_per_frame", "exits per frame"),
        ("requests_per_frame", "requests per frame"),
        ("share_of_requests_checked", "share that ran a check"),
        ("nanoseconds_in_monitor_per_frame", "ns in the monitor per frame"),
    ];
    let width = details.keys().map(String::len).max().unwrap_or(0);
    let mut text = format!("{:<width$}", "counted");
    columns.iter().for_each(|(_, title)| text.push_str(&format!("  {title}")));
    for (name, counted) in details {
        text.push_str(&format!("\n{name:<width$}"));
        for (column, title) in columns {
            let value = counted.get(column).and_then(Value::as_f64);
            let value = value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
            text.push_str(&format!("  {value:>length$}", length = title.len()));
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_per_frame_and_jobs_are_no_exits() {
        let counters = |requests, decisions| Counters { requests, decisions, ..Counters::default() };
        let before = Counts { exits: 10, monitor: Some((counters(100, 1), 1000)) };
        let after = Counts { exits: 32, monitor: Some((counters(140, 11), 5000)) };
        let counted = after.per_frame(&before, 2, 10);
        assert_eq!(
            counted,
            json!({
                "exits_per_frame": 2.0,
                "requests_per_frame": 4.0,
                "share_of_requests_checked": 0.25,
                "nanoseconds_in_monitor_per_frame": 400.0,
            })
        );
        let bare = Counts { exits: 12, monitor: None }.per_frame(&Counts::default(), 2, 10);
        assert_eq!(bare, json!({ "exits_per_frame": 1.0 }));
        let table = table(&Map::from_iter([("card_a".to_owned(), counted), ("b".to_owned(), bare)]));
        assert_eq!(table.lines().count(), 3);
        assert!(table.contains("0.250") && table.contains('-'));
    }
}
