//! Counters, under the names that Linux uses below `/sys/class/infiniband/*/ports/1/{counters,hw_counters}`.

/// Declares a structure of `u64` counters, and a way to list them by name.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// All counters with their names.
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
        /// Packets sent: what the messages would be on a wire with their path MTU.
        port_xmit_packets,
        /// Packets received.
        port_rcv_packets,
        /// WRITE requests that peers made here.
        rx_write_requests,
        /// READ requests that peers made here.
        rx_read_requests,
        /// Atomics that peers made here.
        rx_atomic_requests,
        /// SENDs that arrived here, datagrams included.
        rx_send_requests,
        /// Datagrams and requests that found no receive posted.
        out_of_buffer,
        /// Datagrams dropped: no such queue pair, wrong Q_Key, too long.
        rx_dropped,
        /// RNR NAKs sent (as responder).
        rnr_nak_sent,
        /// Requests that failed since the RNR retries were used up.
        rnr_nak_retry_err,
        /// Requests that peers refused for lack of permission.
        req_remote_access_errors,
        /// Requests that peers refused as invalid.
        req_remote_invalid_request,
        /// Send completions with an error.
        req_cqe_error,
        /// Send completions flushed.
        req_cqe_flush_error,
        /// Datagrams that weren't sent since they are longer than the port's MTU. Not carried along when a VM moves.
        #[serde(skip)]
        req_local_length_error,
        /// Requests that asked for inline data, which their queue pair has no room for. Not carried along when a VM moves.
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
        /// Times that a peer did not answer within the timeout.
        local_ack_timeout_err,
        /// Requests that failed since the retries were used up.
        req_transport_retries_exceeded,
        /// Requests of a peer that were done already.
        duplicate_request,
        /// Requests executed (as initiator).
        requests,
        /// Completions pushed.
        completions,
        /// Completion events delivered.
        completion_events,
        /// Completions lost with their queue: it was full or broken.
        cq_overruns,
        /// Times a queue pair waited for the VM's rate limit.
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
        /// Bytes that peers moved here, received or read.
        served_bytes,
        /// Waits for a receive at the peer.
        rnr_waits,
        /// Completions with an error other than flushed.
        errors,
    }
}

/// Counters of one queue pair, and which one it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct QpReport {
    /// Handle.
    pub handle: crate::names::QpHandle,
    /// Number.
    pub qpn: crate::names::Qpn,
    /// Kind.
    pub kind: crate::attributes::QpKind,
    /// Present state.
    pub state: crate::attributes::QpState,
    /// Counters.
    pub counters: QpCounters,
}
