//! Exits of neighbours and virtio as a table of one run, from the figures of the scenario's parts.

use serde_json::{Value, json};

/// A row: the work, the unit, and exits over neighbours and over virtio through the bridge.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    what: &'static str,
    per: &'static str,
    neighbours: f64,
    virtio: f64,
}

/// The comparisons: name, unit, and the paths of both figures in the scenario's parts.
const COMPARED: [(&str, &str, &str, &str); 7] = [
    (
        "iperf3, a to b",
        "MiB",
        "/throughput/mmnet_a_to_b/exits_per_mib",
        "/throughput/virtio_a_to_b/exits_per_mib",
    ),
    (
        "iperf3, b to a",
        "MiB",
        "/throughput/mmnet_b_to_a/exits_per_mib",
        "/throughput/virtio_b_to_a/exits_per_mib",
    ),
    (
        "request and response of 64 bytes, TCP",
        "transaction",
        "/requests/mmnet/exits_per_transaction",
        "/requests/virtio/exits_per_transaction",
    ),
    (
        "fio, write 64 KiB, depth 8",
        "MiB",
        "/disk/mmblk/write_64k/exits_per_mib",
        "/disk/nbd_virtio/write_64k/exits_per_mib",
    ),
    (
        "fio, read 64 KiB, depth 8",
        "MiB",
        "/disk/mmblk/read_64k/exits_per_mib",
        "/disk/nbd_virtio/read_64k/exits_per_mib",
    ),
    (
        "fio, write 4 KiB, one at a time",
        "request",
        "/disk/mmblk/write_4k_one_at_a_time/exits_per_request",
        "/disk/nbd_virtio/write_4k_one_at_a_time/exits_per_request",
    ),
    (
        "fio, read 4 KiB, one at a time",
        "request",
        "/disk/mmblk/read_4k_one_at_a_time/exits_per_request",
        "/disk/nbd_virtio/read_4k_one_at_a_time/exits_per_request",
    ),
];

/// Returns the rows of the parts that ran.
pub(super) fn rows(parts: &Value) -> Vec<Row> {
    let number = |path: &str| parts.pointer(path).and_then(Value::as_f64);
    COMPARED
        .iter()
        .filter_map(|&(what, per, neighbours, virtio)| {
            Some(Row { what, per, neighbours: number(neighbours)?, virtio: number(virtio)? })
        })
        .collect()
}

/// Returns the rows for the figures.
pub(super) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| json!({"what": row.what, "exits_per": row.per, "neighbours": row.neighbours, "virtio_through_bridge": row.virtio, "ratio": row.neighbours / row.virtio});
    rows.iter().map(row).collect()
}

/// Returns the rows as text.
pub(super) fn text(rows: &[Row]) -> String {
    let mut text =
        "| what | exits per | neighbours | virtio through a bridge | ratio |\n|---|---|---|---|---|\n"
            .to_owned();
    for Row { what, per, neighbours, virtio } in rows {
        text.push_str(&format!(
            "| {what} | {per} | {neighbours:.1} | {virtio:.1} | {:.3} |\n",
            neighbours / virtio
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only parts that ran with both figures have rows.
    #[test]
    fn what_was_run_is_in_the_table() {
        let parts = json!({
            "requests": {"mmnet": {"exits_per_transaction": 20.0}, "virtio": {"exits_per_transaction": 40.0}},
            "throughput": {"mmnet_a_to_b": {"exits_per_mib": 1.0}},
        });
        let rows = rows(&parts);
        assert_eq!(rows.len(), 1);
        assert!(text(&rows).ends_with("| transaction | 20.0 | 40.0 | 0.500 |\n"));
        assert_eq!(json(&rows)[0]["ratio"], 0.5);
    }
}
