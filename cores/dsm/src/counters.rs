//! What a node counts.

use crate::message::Body;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one node. They only grow.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values.
            pub fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

            /// Adds those of another node.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Faults to read.
    read_faults,
    /// Faults to write, atomic ones too.
    write_faults,
    /// Requests for a page of another node.
    misses,
    /// Virtual CPUs that went on.
    resumed,
    /// Instructions that had to be decoded.
    traps,
    /// Stores and atomics carried out as operations.
    operations,
    /// Operations that got a place in the order of updates here.
    sequenced,
    /// Operations that waited for a slow node.
    stalled,
    /// Updates that arrived.
    updated,
    /// Copies given up for a writer.
    invalidated,
    /// Pages sent as 'all zero'.
    zero,
    /// Pages not sent, since the receiver had them.
    same,
    /// Pages sent as a difference.
    differences,
    /// Pages sent whole.
    raw,
    /// Virtual CPUs told to finish an instruction.
    kicks,
    /// Pages taken from a younger instruction.
    wounded,
    /// Times that nodes were told of an older instruction.
    hurries,
    /// Requests sent back to the home.
    bounced,
    /// Questions for the last update.
    asked,
    /// Pages that became kept by updates here.
    conversions,
    /// Pages that ceased to be.
    reversions,
    /// Update modes ended by too many stores.
    storms,
    /// Copies given up because nobody read them.
    left,
    /// Times that the token left.
    tokens,
    /// Messages sent to other nodes.
    sent,
    /// Pages granted to other nodes.
    grants,
    /// Messages from other nodes.
    received,
    /// Messages and events that no correct node or owner makes.
    refused,
}

impl Counters {
    pub(crate) fn count_sent(&mut self, body: &Body) {
        self.sent += 1;
        self.grants += u64::from(matches!(body, Body::Grant(_)));
    }
}
