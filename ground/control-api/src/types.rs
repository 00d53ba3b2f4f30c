//! What travels over the API.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a VM is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Its vCPUs have not run yet.
    Starting,
    /// It waits for a VM to come from another monitor.
    Incoming,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs and devices stand still.
    Paused,
    /// It stands still, and another monitor takes it over.
    HandingOver,
    /// It stands still since it isn't known how its migration was decided: it may run at the other side, or be to run here.
    InDoubt,
    /// It is ending.
    Stopping,
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Starting => "starting",
            Self::Incoming => "incoming",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::HandingOver => "handing-over",
            Self::InDoubt => "in-doubt",
            Self::Stopping => "stopping",
        })
    }
}

/// What is behind a commodity NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NicBehind {
    /// A card of the host, under its model.
    Card,
    /// The card's emulation, with a tap.
    Emulation,
    /// The card without its model: mode `passthrough`.
    Passthrough,
}

impl fmt::Display for NicBehind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Card => "card",
            Self::Emulation => "emulation",
            Self::Passthrough => "passthrough",
        })
    }
}

/// A VM in a few words.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmSummary {
    /// Its name.
    pub name: String,
    /// Process id of its monitor.
    pub pid: u32,
    /// What it is doing.
    pub state: VmState,
    /// What runs in it: the path of the kernel or payload.
    pub guest: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of guest RAM.
    pub memory_bytes: u64,
    /// Seconds since the monitor was started.
    pub uptime_seconds: f64,
    /// Version of the monitor.
    pub version: String,
    /// NICs that a host daemon serves: a VM with one is known to the cluster service, and can move together with others.
    #[serde(default)]
    pub rdma_nics: u32,
}

/// A command was carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// What the VM is doing now.
    pub state: VmState,
}

/// VM exits since the start, counted by cause and by address range.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ExitTable {
    /// All exits to user space.
    pub total: u64,
    /// By cause, summed over vCPUs.
    pub causes: BTreeMap<String, u64>,
    /// I/O port and memory accesses by the device that owns the address, summed over vCPUs.
    pub ranges: BTreeMap<String, u64>,
    /// Each vCPU by itself.
    pub vcpus: Vec<VcpuExits>,
    /// What KVM counts itself, exits that never reach the monitor included; empty where this kernel doesn't tell.
    #[serde(default)]
    pub kernel: BTreeMap<String, u64>,
}

/// Exits of one vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct VcpuExits {
    /// Its number.
    pub vcpu: u32,
    /// All exits to user space.
    pub total: u64,
    /// By cause.
    pub causes: BTreeMap<String, u64>,
    /// By address range.
    pub ranges: BTreeMap<String, u64>,
}

/// Why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// One sentence.
    pub error: String,
    /// What it was caused by, outermost first.
    #[serde(default)]
    pub causes: Vec<String>,
}

impl Problem {
    /// An error and its chain of sources.
    pub fn of(error: &dyn std::error::Error) -> Self {
        let sources = std::iter::successors(error.source(), |error| error.source());
        Self { error: error.to_string(), causes: sources.map(ToString::to_string).collect() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)?;
        self.causes.iter().try_for_each(|cause| write!(f, "; {cause}"))
    }
}
