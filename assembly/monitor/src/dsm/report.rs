//! What a node has counted, as JSON.

use serde_json::{Map, Value, json};

use super::engine::Core;
use super::vcpus::Pending;

/// Waits of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Waits {
    count: u64,
    total_ns: u64,
    most_ns: u64,
}

impl Waits {
    fn to_json(self) -> Value {
        json!({ "count": self.count, "total_ns": self.total_ns, "most_ns": self.most_ns })
    }
}

/// How often vCPUs waited for pages, and for how long: from the fault being read to the vCPU being woken.
#[derive(Debug, Clone, Default)]
pub(super) struct Stalls {
    read: Waits,
    write: Waits,
    upgrade: Waits,
    trapped: Waits,
}

impl Stalls {
    pub(super) fn count(&mut self, fault: &Pending, now: u64) {
        let waits = match (fault.write, fault.upgrade) {
            (false, _) => &mut self.read,
            (true, false) => &mut self.write,
            (true, true) => &mut self.upgrade,
        };
        add(waits, now.saturating_sub(fault.at));
    }

    /// A store or atomic that was carried out for the vCPU.
    pub(super) fn count_trapped(&mut self, waited: u64) {
        add(&mut self.trapped, waited);
    }

    fn to_json(&self) -> Value {
        json!({
            "read": self.read.to_json(),
            "write": self.write.to_json(),
            "upgrade": self.upgrade.to_json(),
            "trapped": self.trapped.to_json(),
        })
    }
}

fn add(waits: &mut Waits, waited: u64) {
    waits.count += 1;
    waits.total_ns = waits.total_ns.saturating_add(waited);
    waits.most_ns = waits.most_ns.max(waited);
}

impl Core {
    /// Counters of this node: the protocol's own, messages sent by kind, waits, and what it took to know that instructions retired.
    pub(super) fn report(&self, node: u8) -> Value {
        let counters: Map<_, _> =
            self.node.counters().list().map(|(name, value)| (name.to_owned(), value.into())).collect();
        let sent: Map<_, _> = self
            .counts
            .sent
            .iter()
            .map(|(kind, (count, bytes))| ((*kind).to_owned(), json!({ "count": count, "bytes": bytes })))
            .collect();
        let (messages, bytes) =
            self.counts.sent.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        json!({
            "node": node,
            "messages": messages,
            "bytes": bytes,
            "sent": sent,
            "stalls": self.counts.stalls.to_json(),
            "late_faults": self.counts.late,
            "kicks": self.counts.kicks,
            "unproven": self.counts.unproven,
            "emulated": self.counts.emulated,
            "not_emulated": self.counts.not_emulated,
            "protocol": counters,
        })
    }
}
