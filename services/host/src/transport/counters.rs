//! Counters of the sockets between daemons.

use super::secure::{Dropped, PeerReport};

macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $(#[doc = $text] pub $field: u64,)*
        }

        impl $name {
            /// All counters: name, description, value.
            pub fn list(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($field), $text, self.$field)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Counters of the sockets between daemons.
    FabricCounters {
        packets_sent: "Packets handed to the kernel.",
        bytes_sent: "Bytes of these, without UDP and IP.",
        sends: "System calls for them.",
        packets_received: "Packets received.",
        bytes_received: "Bytes of these, without UDP and IP.",
        receives: "System calls for them that had some.",
        full: "Times that a socket's buffer was full.",
        send_errors: "Packets that the kernel refused to send.",
        dropped: "Packets received and dropped, for any of the causes below.",
        dropped_malformed: "Packets dropped: too short, or of an unknown kind.",
        dropped_no_vm: "Packets dropped: for a VM that isn't here.",
        dropped_no_queue_pair: "Packets dropped: for a queue pair that isn't there, or isn't connected.",
        dropped_not_its_host: "Packets dropped: not from the host that the directory has for their VM.",
        dropped_plain: "Packets dropped: not encrypted, and this daemon encrypts.",
        dropped_encrypted: "Packets dropped: encrypted, and this daemon has no key.",
        dropped_no_session: "Packets dropped: of an unknown session.",
        dropped_replayed: "Packets dropped: seen before, or too old to tell.",
        dropped_forged: "Packets dropped: not authentic; damaged, or made by somebody else.",
        dropped_handshake: "Handshakes dropped: not authentic; another cluster key, or damaged.",
        dropped_old_handshake: "Handshakes dropped: not newer than an earlier one of their host.",
        dropped_pinned: "Packets dropped: of VMs that the directory pins to another transport.",
        dropped_stranger: "Handshakes dropped: from an address that no host of the directory has.",
    }
}

counters! {
    /// Counters of handshakes between daemons.
    SessionCounters {
        handshakes_started: "Handshakes that this daemon began.",
        handshakes_answered: "Handshakes of other hosts that it answered.",
        sessions_established: "Sessions with other hosts that came into use.",
        packets_held: "Packets that waited for a session.",
        packets_unsent: "Packets given up since no session came in time, or too many waited.",
    }
}

/// [`FabricReport::encryption`] with a cluster key.
pub const ENCRYPTED: &str = "encrypted";
/// [`FabricReport::encryption`] without a cluster key.
pub(super) const UNENCRYPTED: &str = "plain";

impl FabricCounters {
    pub(super) fn drop_one(&mut self, cause: Dropped) {
        self.dropped += 1;
        let counter = match cause {
            Dropped::Malformed => &mut self.dropped_malformed,
            Dropped::NoVm => &mut self.dropped_no_vm,
            Dropped::NoQueuePair => &mut self.dropped_no_queue_pair,
            Dropped::NotItsHost => &mut self.dropped_not_its_host,
            Dropped::Plain => &mut self.dropped_plain,
            Dropped::Encrypted => &mut self.dropped_encrypted,
            Dropped::NoSession => &mut self.dropped_no_session,
            Dropped::Replayed => &mut self.dropped_replayed,
            Dropped::Forged => &mut self.dropped_forged,
            Dropped::Handshake => &mut self.dropped_handshake,
            Dropped::OldHandshake => &mut self.dropped_old_handshake,
            Dropped::Stranger => &mut self.dropped_stranger,
            Dropped::Pinned => &mut self.dropped_pinned,
        };
        *counter += 1;
    }
}

/// Report of the fabric.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FabricReport {
    /// `encrypted` or `plain`.
    pub encryption: &'static str,
    /// Counters of the sockets.
    #[serde(flatten)]
    pub counters: FabricCounters,
    /// Counters of the handshakes, with encryption.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<SessionCounters>,
    /// Hosts with a session, or with an attempt at one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerReport>,
}
