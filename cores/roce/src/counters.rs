//! Counters of a connection. Names are Linux's, from `/sys/class/infiniband/*/ports/1/hw_counters`; the comments mark those that Linux
//! doesn't have.

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// All counters, by name.
            pub fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field)),*].into_iter()
            }

            /// Adds another connection's counters.
            pub fn add(&mut self, other: &Self) {
                $(self.$field = self.$field.wrapping_add(other.$field);)*
            }
        }
    };
}

counters! {
    /// Counters of a connection, since it was created.
    Counters {
        /// Packets that came ahead of a missing one (responder).
        out_of_sequence,
        /// Sequence-error NAKs received (requester).
        packet_seq_err,
        /// Responses that arrived while that of an earlier READ or atomic is missing (requester).
        implied_nak_seq_err,
        /// ACK timeouts that expired (requester).
        local_ack_timeout_err,
        /// RNR NAKs received (requester), whether or not retries were left.
        rnr_nak_retry_err,
        /// Repeated requests (responder).
        duplicate_request,
        /// SENDs, and WRITEs with immediate, for which no receive was posted (responder).
        out_of_buffer,
        /// RNR NAKs sent (responder); mlx5 has no such counter, rxe calls it `send_rnr_err`.
        rnr_nak_sent,
        /// Sequence-error NAKs sent (responder); not in Linux.
        seq_nak_sent,
        /// WRITE requests (responder).
        rx_write_requests,
        /// READ requests, repeated ones included (responder).
        rx_read_requests,
        /// Atomics (responder).
        rx_atomic_requests,
        /// SEND messages completed (responder); as in `hca`.
        rx_send_requests,
        /// Requests that the peer refused as invalid (requester).
        req_remote_invalid_request,
        /// Requests that the peer refused for lack of permission (requester).
        req_remote_access_errors,
        /// Requests that failed with the transport retries used up (requester).
        req_transport_retries_exceeded,
        /// Requests that failed with the RNR retries used up (requester).
        req_rnr_retries_exceeded,
        /// Requests refused for lack of permission (responder).
        resp_remote_access_errors,
        /// Receives too short for the message (responder).
        resp_local_length_error,
        /// Packets received with the congestion mark.
        np_ecn_marked_roce_packets,
        /// Congestion notifications sent.
        np_cnp_sent,
        /// Congestion notifications that lowered the rate.
        rp_cnp_handled,
        /// Request packets retransmitted; not in Linux.
        retransmitted_packets,
        /// Packets sent, of any kind; not in Linux under this name.
        sent_packets,
        /// Bytes of these, from the BTH to the pad; not in Linux under this name.
        sent_bytes,
        /// Packets received that parsed; not in Linux under this name.
        received_packets,
        /// Bytes of these; not in Linux under this name.
        received_bytes,
        /// Packets dropped: malformed, of another partition or service, ghosts, or received when the connection couldn't process them; not
        /// in Linux under this name.
        dropped_packets,
    }
}
