//! What the engine's thread tells of itself and its devices.

use serde::Serialize;

/// What the loop did since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LoopCounters {
    /// Rounds of the loop.
    pub polls: u64,
    /// Rounds that found nothing to do.
    pub empty_polls: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Calls of other threads.
    pub calls: u64,
    /// Trapped doorbells.
    pub trapped_doorbells: u64,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceView {
    /// Its number in the engine.
    pub id: u32,
    /// Doorbell mode in words.
    pub doorbells: &'static str,
    /// Changes of the doorbell mode that the client made.
    pub doorbell_mode_switches: u64,
    /// Changes that the client couldn't make.
    pub doorbell_mode_failures: u64,
    /// Interrupts sent, and interrupts that nobody listened to.
    pub interrupts: (u64, u64),
    /// What the guest sees.
    pub function: pvrdma::device::DeviceReport,
    /// What the engine has.
    pub hca: Option<hca::engine::DeviceReport>,
    /// What its connections to other hosts have counted; past ones included.
    pub roce: Option<roce::Counters>,
    /// Part of its guest's memory is still to come.
    pub late_memory: bool,
    /// How often something has waited for it.
    pub memory_waits: u64,
    /// State and peer of each connected queue pair.
    pub peers: Vec<PeerView>,
}

/// Whom a queue pair talks to.
#[derive(Debug, Clone, Serialize)]
pub struct PeerView {
    /// Handle of the queue pair.
    pub handle: u32,
    /// The peer's address.
    pub gid: String,
    /// The peer's queue pair number.
    pub qpn: u32,
    /// How it is reached; `none` where nobody on this host has the address.
    pub transport: &'static str,
    /// What the protocol says of a connection to another host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<crate::transport::ConnectionReport>,
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub struct EngineView {
    /// The loop.
    pub counters: LoopCounters,
    /// The sockets to other hosts, where there are some.
    pub fabric: Option<crate::transport::FabricReport>,
    /// The directory, where it comes from a cluster service.
    pub directory: Option<crate::transport::DirectoryReport>,
    /// The host's RDMA device, or why there is none.
    pub verbs: Option<crate::transport::VerbsReport>,
    /// By number.
    pub devices: Vec<DeviceView>,
}
