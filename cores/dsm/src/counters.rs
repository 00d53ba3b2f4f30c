//! Counters of a node.

use crate::message::Body;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one node since its start. They only grow.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values, in the order of the fields.
            pub fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

            /// Adds the counters of another node.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Read faults.
    read_faults,
    /// Write faults, atomic instructions included.
    write_faults,
    /// Requests that this node sent for a page.
    misses,
    /// vCPUs that this node resumed.
    resumed,
    /// Instructions that the monitor had to decode.
    traps,
    /// Trapped stores and atomics that this node executed as operations.
    operations,
    /// Operations that this node, as the sequencer, gave a place in the total order.
    sequenced,
    /// Operations that the sequencer stalled because a node was `update_window` updates behind.
    stalled,
    /// Updates that arrived.
    updated,
    /// Copies that this node invalidated for a writer.
    invalidated,
    /// Pages granted as all zero.
    zero,
    /// Pages granted without data, since the receiver had the version.
    same,
    /// Pages granted as a difference.
    differences,
    /// Pages granted with their whole content.
    raw,
    /// vCPUs that this node kicked to make them finish an instruction.
    kicks,
    /// Pages that an older instruction took from a younger one (wound-wait).
    wounded,
    /// `Hurry` messages that this node sent about an older instruction.
    hurries,
    /// Requests that this node returned to the home.
    bounced,
    /// `Sync` requests for the last update.
    asked,
    /// Pages that became write-update at this node, the sequencer.
    conversions,
    /// Pages whose write-update mode ended at this node.
    reversions,
    /// Write-update modes that ended because of too many stores.
    storms,
    /// Copies of write-update pages that this node left because the guest didn't read them.
    left,
    /// Times that this node sent the sequencer's role to another node.
    tokens,
    /// Messages that this node sent.
    sent,
    /// Pages that this node granted to others.
    grants,
    /// Messages that arrived.
    received,
    /// Messages and events that no correct node or monitor sends.
    refused,
}

impl Counters {
    pub(crate) fn count_sent(&mut self, body: &Body) {
        self.sent += 1;
        self.grants += u64::from(matches!(body, Body::Grant(_)));
    }
}
