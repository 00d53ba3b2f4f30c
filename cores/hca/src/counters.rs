//! Counters, under Linux's names from `/sys/class/infiniband/*/ports/1/{counters,hw_counters}`.

/// Declares a structure of `u64` counters, with a list by name.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// All counters, by name.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),*]
            }
        }
    };
}

counters! {
    /// Counters of a device.
    DeviceCounters {
        /// Words of four bytes sent.
        port_xmit_data,
        /// Words of four bytes received.
        port_rcv_data,
        /// Packets sent: what the messages would be on a wire with their path MTU. A local message has no packets.
        port_xmit_packets,
        /// Packets received.
        port_rcv_packets,
        /// WRITE requests received from peers.
        rx_write_requests,
        /// READ requests received from peers.
        rx_read_requests,
        /// Atomics received from peers.
        rx_atomic_requests,
        /// SENDs received, datagrams included.
        rx_send_requests,
        /// Datagrams and requests for which no receive was posted.
        out_of_buffer,
        /// Datagrams dropped: no such queue pair, wrong Q_Key, too long.
        rx_dropped,
        /// RNR NAKs sent (as responder).
        rnr_nak_sent,
        /// Requests that failed with the RNR retries used up.
        rnr_nak_retry_err,
        /// Requests that peers refused for lack of permission.
        req_remote_access_errors,
        /// Requests that peers refused as invalid.
        req_remote_invalid_request,
        /// Send completions with an error.
        req_cqe_error,
        /// Send completions flushed.
        req_cqe_flush_error,
        /// Datagrams longer than the port's MTU, which were not sent. A migration doesn't transfer this counter.
        #[serde(skip)]
        req_local_length_error,
        /// Requests for inline data, which their queue pair has no room for. A migration doesn't transfer this counter.
        #[serde(skip)]
        req_inline_refused,
        /// Receive completions with an error.
        resp_cqe_error,
        /// Receive completions flushed.
        resp_cqe_flush_error,
        /// Receives too short for the message.
        resp_local_length_error,
        /// Peers' requests that lacked permission.
        resp_remote_access_errors,
        /// ACK timeouts: a peer did not respond in time.
        local_ack_timeout_err,
        /// Requests that failed with the transport retries used up.
        req_transport_retries_exceeded,
        /// Repeated requests of a peer.
        duplicate_request,
        /// Requests executed (as initiator).
        requests,
        /// Completions pushed.
        completions,
        /// Completion events delivered.
        completion_events,
        /// Completions lost with their queue: it was full or broken.
        cq_overruns,
        /// Times that a queue pair waited for its VM's rate limit, or for the limit on writes to its peer's memory.
        throttled,
    }
}

counters! {
    /// Counters of a queue pair.
    QpCounters {
        /// Requests executed (as initiator).
        requests,
        /// Bytes moved as initiator.
        bytes,
        /// Receives completed.
        receives,
        /// Bytes that peers moved here: received or read.
        served_bytes,
        /// RNR waits at the peer.
        rnr_waits,
        /// Completions with an error other than flushed.
        errors,
    }
}

/// Counters of one queue pair, with its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct QpReport {
    /// Handle in the guest's ABI.
    pub handle: crate::names::QpHandle,
    /// Number in packets, 24 bits.
    pub qpn: crate::names::Qpn,
    /// Transport service (`enum ib_qp_type`).
    pub kind: crate::attributes::QpKind,
    /// Current state.
    pub state: crate::attributes::QpState,
    /// Counts since the queue pair was created; a migration keeps them.
    pub counters: QpCounters,
}
