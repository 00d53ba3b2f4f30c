//! KVM's binary statistics: exits that the kernel handled itself, by kind.

use std::collections::BTreeMap;

/// Counters of one VM or vCPU by KVM's own names (`exits`, `halt_exits`, `io_exits`, ...).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelStats {
    /// Read.
    Counters(BTreeMap<String, u64>),
    /// This kernel doesn't offer them, and why.
    Absent(String),
}
