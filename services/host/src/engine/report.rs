//! Reports of the engine's thread and its devices.

use serde::Serialize;

/// Counters of the loop since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LoopCounters {
    /// Passes of the loop.
    pub polls: u64,
    /// Passes that found nothing to do.
    pub empty_polls: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Calls of other threads.
    pub calls: u64,
    /// Trapped doorbells.
    pub trapped_doorbells: u64,
}

/// Report of a device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceView {
    /// Its number in the engine.
    pub id: u32,
    /// Doorbell mode, in words.
    pub doorbells: &'static str,
    /// Changes of the doorbell mode by the client.
    pub doorbell_mode_switches: u64,
    /// Changes that the client could not make.
    pub doorbell_mode_failures: u64,
    /// Interrupts sent, and interrupts without a listener.
    pub interrupts: (u64, u64),
    /// The PVRDMA function.
    pub function: pvrdma::device::DeviceReport,
    /// The HCA engine's report.
    pub hca: Option<hca::engine::DeviceReport>,
    /// Counters of its connections to other hosts, past ones included.
    pub roce: Option<roce::Counters>,
    /// Whether part of its guest's memory isn't present.
    pub late_memory: bool,
    /// How often a request has waited for not-present memory.
    pub memory_waits: u64,
    /// State and peer of each connected queue pair.
    pub peers: Vec<PeerView>,
}

/// The peer of a queue pair.
#[derive(Debug, Clone, Serialize)]
pub struct PeerView {
    /// Handle of the queue pair.
    pub handle: u32,
    /// The peer's address.
    pub gid: String,
    /// The peer's queue pair number.
    pub qpn: u32,
    /// Transport; `none` where no host has the address.
    pub transport: &'static str,
    /// The protocol's report of a connection to another host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<crate::transport::ConnectionReport>,
}

/// Report of the engine's thread.
#[derive(Debug, Clone, Serialize)]
pub struct EngineView {
    /// Counters of the loop.
    pub counters: LoopCounters,
    /// The sockets to other hosts, if any.
    pub fabric: Option<crate::transport::FabricReport>,
    /// The directory, if it comes from a cluster service.
    pub directory: Option<crate::transport::DirectoryReport>,
    /// The host's RDMA device, or why there is none.
    pub verbs: Option<crate::transport::VerbsReport>,
    /// Devices, by number.
    pub devices: Vec<DeviceView>,
}
