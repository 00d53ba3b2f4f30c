//! The report of a node: its counters as JSON.

use serde_json::{Map, Value, json};

use dsm::Counters;

use super::engine::{Core, Counts};
use super::vcpus::Pending;

/// Stalls of one kind, ns.
#[derive(Debug, Clone, Copy, Default)]
struct Waits {
    count: u64,
    total_ns: u64,
    most_ns: u64,
}

impl Waits {
    /// Returns the counts since `before`, and the longest stall of the whole run.
    fn to_json(self, before: Self) -> Value {
        json!({
            "count": self.count - before.count,
            "total_ns": self.total_ns - before.total_ns,
            "most_ns": self.most_ns,
        })
    }
}

/// Stalls of vCPUs by kind: from the time when the fault was read to the vCPU's wakeup.
#[derive(Debug, Clone, Default)]
pub(super) struct Stalls {
    read: Waits,
    write: Waits,
    upgrade: Waits,
    trapped: Waits,
}

impl Stalls {
    /// Counts a stall that has ended, and returns its length, ns.
    pub(super) fn count(&mut self, fault: &Pending, now: u64) -> u64 {
        let waits = match (fault.write, fault.upgrade) {
            (false, _) => &mut self.read,
            (true, false) => &mut self.write,
            (true, true) => &mut self.upgrade,
        };
        let waited = now.saturating_sub(fault.at);
        add(waits, waited);
        waited
    }

    /// Counts the stall of a trapped store or atomic, ns.
    pub(super) fn count_trapped(&mut self, waited: u64) {
        add(&mut self.trapped, waited);
    }

    fn to_json(&self, before: &Self) -> Value {
        json!({
            "read": self.read.to_json(before.read),
            "write": self.write.to_json(before.write),
            "upgrade": self.upgrade.to_json(before.upgrade),
            "trapped": self.trapped.to_json(before.trapped),
        })
    }
}

fn add(waits: &mut Waits, waited: u64) {
    waits.count += 1;
    waits.total_ns = waits.total_ns.saturating_add(waited);
    waits.most_ns = waits.most_ns.max(waited);
}

impl Counts {
    /// Adds the stall of a fault to the time for first or later fetches.
    pub(super) fn count_wait(&mut self, fault: &Pending, now: u64) {
        let waited = now.saturating_sub(fault.at);
        let counted = if fault.again { &mut self.waited_again_ns } else { &mut self.waited_first_ns };
        *counted = counted.saturating_add(waited);
    }
}

/// Counters at the start and the end of the guest's measurement.
#[derive(Debug, Default)]
pub(super) struct Phase {
    begin: Option<(Counters, Counts)>,
    end: Option<(Counters, Counts)>,
}

/// Counters as JSON, without those of `before`.
fn counted(now: &(Counters, Counts), before: Option<&(Counters, Counts)>) -> Value {
    let old: Map<_, _> = before.map_or_else(Map::new, |(counters, _)| protocol(counters));
    let less = |name: &str, value: u64| value - old.get(name).and_then(Value::as_u64).unwrap_or(0).min(value);
    let counters: Map<_, _> =
        now.0.list().map(|(name, value)| (name.to_owned(), less(name, value).into())).collect();
    let sent_before =
        |kind: &str| before.and_then(|(_, counts)| counts.sent.get(kind)).copied().unwrap_or((0, 0));
    let mut all = (0, 0);
    let mut sent = Map::new();
    for (kind, (count, bytes)) in &now.1.sent {
        let old = sent_before(kind);
        let (count, bytes) = (count - old.0, bytes - old.1);
        all = (all.0 + count, all.1 + bytes);
        sent.insert((*kind).to_owned(), json!({ "count": count, "bytes": bytes }));
    }
    let zero = Counts::default();
    let old = before.map_or(&zero, |(_, counts)| counts);
    let counts = &now.1;
    json!({
        "messages": all.0,
        "bytes": all.1,
        "sent": sent,
        "stalls": counts.stalls.to_json(&old.stalls),
        "late_faults": counts.late - old.late,
        "kicks": counts.kicks - old.kicks,
        "unproven": counts.unproven - old.unproven,
        "stepped": counts.stepped - old.stepped,
        "emulated": counts.emulated - old.emulated,
        "fetched_ahead": counts.prefetched - old.prefetched,
        "fetched_in_vain": counts.prefetched_in_vain - old.prefetched_in_vain,
        "not_emulated": counts.not_emulated - old.not_emulated,
        "waited_again_ns": counts.waited_again_ns - old.waited_again_ns,
        "waited_first_ns": counts.waited_first_ns - old.waited_first_ns,
        "protocol": counters,
    })
}

fn protocol(counters: &Counters) -> Map<String, Value> {
    counters.list().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

impl Core {
    /// The guest's measurement begins, or has ended. The last measurement counts.
    pub(super) fn mark(&mut self, begins: bool) {
        let counted = Some((*self.node.counters(), self.counts.clone()));
        if begins {
            self.phase = Phase { begin: counted, end: None };
        } else {
            self.phase.end = counted;
        }
    }

    /// The node's report: messages sent by kind, stalls, samples of registers, the protocol's counters, and the pages with the longest
    /// stalls. Also the counters during the guest's measurement, if there was one.
    pub(super) fn report(&self, node: u8) -> Value {
        let now = (*self.node.counters(), self.counts.clone());
        let mut report = counted(&now, None);
        if let Some(fields) = report.as_object_mut() {
            fields.insert("node".to_owned(), node.into());
            if let (Some(begin), Some(end)) = (&self.phase.begin, &self.phase.end) {
                fields.insert("measured".to_owned(), counted(end, Some(begin)));
            }
            fields.insert("hot".to_owned(), self.hot.to_json(&self.node));
        }
        report
    }
}
