//! Messages of the API.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Its vCPUs have not run yet.
    Starting,
    /// It waits for a VM from another monitor.
    Incoming,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs and devices are paused.
    Paused,
    /// It is paused while another monitor takes over.
    HandingOver,
    /// It is paused because the outcome of its migration is unknown: it may run on the other host, or have to resume
    /// here.
    InDoubt,
    /// The VM is ending.
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

/// Backend of a commodity NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NicBehind {
    /// A card of the host, guarded by its model.
    Card,
    /// An emulation of the card, connected to a tap device.
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

/// Summary of a VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmSummary {
    /// The VM's name.
    pub name: String,
    /// Process id of its monitor.
    pub pid: u32,
    /// The VM's state.
    pub state: VmState,
    /// The guest: the path of the kernel or payload.
    pub guest: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of guest RAM.
    pub memory_bytes: u64,
    /// Seconds since the monitor was started.
    pub uptime_seconds: f64,
    /// Version of the monitor.
    pub version: String,
    /// NICs that a host daemon serves. The cluster service knows a VM with such a NIC, which can move together with
    /// others.
    #[serde(default)]
    pub rdma_nics: u32,
    /// It is copied to another host, and this VM, its peer, has to move first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// Response to a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// The VM's state after the command.
    pub state: VmState,
}

/// VM exits since the start, by cause and by address range.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ExitTable {
    /// All exits to user space.
    pub total: u64,
    /// By cause, summed over vCPUs.
    pub causes: BTreeMap<String, u64>,
    /// I/O port and memory accesses, by the device that owns the address, summed over vCPUs.
    pub ranges: BTreeMap<String, u64>,
    /// The exits of each vCPU.
    pub vcpus: Vec<VcpuExits>,
    /// KVM's own counters, which include exits that never reach the monitor. Empty if the kernel provides none.
    #[serde(default)]
    pub kernel: BTreeMap<String, u64>,
}

/// Exits of one vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct VcpuExits {
    /// The vCPU's number.
    pub vcpu: u32,
    /// All exits to user space.
    pub total: u64,
    /// By cause.
    pub causes: BTreeMap<String, u64>,
    /// By address range.
    pub ranges: BTreeMap<String, u64>,
}

/// The reason why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// One sentence.
    pub error: String,
    /// The causes, outermost first.
    #[serde(default)]
    pub causes: Vec<String>,
}

impl Problem {
    /// Converts an error and its chain of sources.
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
