//! Counters of a VM's device under Linux's names: those of the engine and those of the protocol's connections together.
//!
//! The engine counts what it executes for local and remote peers alike. A connection to another host counts the protocol's handling of
//! packets. What both count is included once.

use roce::Counters;

/// Counters of a device with all its connections, past ones included: by name, each name once.
pub(crate) fn merged(device: Vec<(&'static str, u64)>, roce: Option<&Counters>) -> Vec<(&'static str, u64)> {
    let mut all = device;
    let Some(roce) = roce else { return all };
    for (name, value) in [
        // Packets of connections; the engine counts local ones and datagrams.
        ("port_xmit_packets", roce.sent_packets),
        ("port_xmit_data", roce.sent_bytes / 4),
        ("port_rcv_packets", roce.received_packets),
        ("port_rcv_data", roce.received_bytes / 4),
        // rxe's names.
        ("sent_pkts", roce.sent_packets),
        ("rcvd_pkts", roce.received_packets),
        // mlx5's names.
        ("out_of_sequence", roce.out_of_sequence),
        ("packet_seq_err", roce.packet_seq_err),
        ("implied_nak_seq_err", roce.implied_nak_seq_err),
        ("local_ack_timeout_err", roce.local_ack_timeout_err),
        ("duplicate_request", roce.duplicate_request),
        // The engine has counted the last one, if the retries were used up.
        ("rnr_nak_retry_err", roce.rnr_nak_retry_err.saturating_sub(roce.req_rnr_retries_exceeded)),
        ("req_rnr_retries_exceeded", roce.req_rnr_retries_exceeded),
        ("np_ecn_marked_roce_packets", roce.np_ecn_marked_roce_packets),
        ("np_cnp_sent", roce.np_cnp_sent),
        ("rp_cnp_handled", roce.rp_cnp_handled),
        // Linux has no names for these.
        ("seq_nak_sent", roce.seq_nak_sent),
        ("retransmitted_packets", roce.retransmitted_packets),
        ("dropped_packets", roce.dropped_packets),
    ] {
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum = sum.saturating_add(value),
            None => all.push((name, value)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_there_once_and_both_parts_are_in_it() {
        let engine = vec![("port_xmit_packets", 5), ("rnr_nak_retry_err", 1), ("rx_write_requests", 9)];
        let mut roce = Counters {
            sent_packets: 7,
            sent_bytes: 80,
            rnr_nak_retry_err: 8,
            req_rnr_retries_exceeded: 1,
            out_of_sequence: 3,
            rx_write_requests: 9,
            ..Counters::default()
        };
        let all = merged(engine.clone(), Some(&roce));
        let of = |name| {
            all.iter().filter(|(known, _)| *known == name).map(|(_, value)| *value).collect::<Vec<_>>()
        };
        assert_eq!(of("port_xmit_packets"), [12]);
        assert_eq!(of("port_xmit_data"), [20]);
        assert_eq!(of("sent_pkts"), [7]);
        // Seven for which the connection waited, and one at which the engine failed the request: eight NAKs.
        assert_eq!(of("rnr_nak_retry_err"), [8]);
        assert_eq!(of("out_of_sequence"), [3]);
        assert_eq!(of("rx_write_requests"), [9], "executed once, counted once");
        assert_eq!(merged(engine.clone(), None), engine);
        // The sums of past connections stay.
        roce.add(&Counters { out_of_sequence: 4, ..Counters::default() });
        assert_eq!(roce.out_of_sequence, 7);
    }
}
