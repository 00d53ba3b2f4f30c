//! A payload VM that spans several monitors, on one host or on several: one memory, kept coherent by the protocol of the crate [`::dsm`].
//!
//! ```text
//!   vCPU ──fault──▶ userfaultfd ──▶ faults thread ─┐
//!   vCPU ──kick, trap──▶ before_run ───────────────┤   ┌────────────┐ ──▶ SharedRam: rights and contents of pages
//!   link ──bytes──▶ link thread (one per peer) ────┼──▶│ dsm::Node  │ ──▶ links: messages
//!   clock ────────▶ faults thread ─────────────────┘   └────────────┘ ──▶ vCPUs: wake, kick, complete
//! ```
//!
//! One lock guards the node, its pages and the states of its vCPUs. A thread that holds it never blocks: bytes that a link doesn't accept
//! at once are queued, and the faults thread sends them. No thread polls. A vCPU that waits for a page sleeps in the kernel (userfaultfd),
//! or in [`machine::vcpu::VcpuExitHandler::before_run`] after a kick for a sample of its registers.
//!
//! | module | contents |
//! |---|---|
//! | `address`, `join`, `link` | addresses of nodes; the greeting; a connection, its frames and its send queue |
//! | `identity` | the hash that nodes and checkpoints of one VM share |
//! | `rdma` | links by the host's RDMA device |
//! | `engine` | the lock, and the execution of the protocol's actions |
//! | `pages` | the protocol's view of guest memory |
//! | `vcpus` | faults of vCPUs; whether an instruction has retired |
//! | `prefetch` | predicted pages ([`::prefetch`]) requested as faults of contexts |
//! | `instruction` | the decoder of stores and atomics for emulation |
//! | `compute`, `window` | emulation of instructions that compute and load; window emulation after a trapped store |
//! | `service` | the faults thread: faults, time, heartbeats; the link threads |
//! | `checkpoint` | saving all nodes at one cut, and restoring them |
//! | `report`, `hot`, `top` | counters of a node and its hottest pages, as JSON; a socket that serves them while the VM runs |
//! | `spanning` | a node from its settings to its end |
//!
//! The loss of a node ends the VM on all nodes, since a part of memory is gone. See docs/design/dsm.md.

mod address;
mod checkpoint;
mod compute;
mod engine;
mod hot;
mod identity;
mod instruction;
mod join;
mod link;
mod pages;
mod prefetch;
mod rdma;
mod report;
mod service;
mod spanning;
mod top;
mod vcpus;
mod window;

use ::dsm::Policy;

pub use address::{AddressError, NodeAddress};
pub use checkpoint::{CheckpointError, Checkpoints};
pub use ibverbs::{Absent as NoRdma, Found as RdmaDevice, devices as rdma_devices};
pub use rdma::NoDevice;
pub use spanning::{Ended, FaultInjection, NodeSettings, SpanningVm};

/// Sets the times and thresholds of `policy` for a monitor.
///
/// They follow from costs in a VM under nested virtualization (PVM). An exit from the guest costs 25 µs, a trapped store `trap` = 100 µs,
/// and a page's transfer `transfer` = 300 to 800 µs.
///
/// - `transfers` · 0.8 ms ≈ `window_ns` / 6: transfers that take a sixth of the time make a page write-update.
/// - `storm` · `trap` ≈ `window_ns` / 2: trapped stores that take about half of the time end the mode.
/// - `turn` ≈ `transfer` / `trap`: more stores per turn of a node than a transfer costs end it, too.
#[must_use]
pub fn tuned(policy: Policy) -> Policy {
    let window_ns = 50_000_000;
    Policy {
        hold_ns: 100_000,
        window_ns,
        transfers: 10,
        storm: 300,
        turn: 4,
        cooldown_ns: 4 * window_ns,
        ..policy
    }
}

/// Why a VM that spans nodes can't be made.
#[derive(Debug, thiserror::Error)]
pub enum DsmError {
    /// The settings are invalid.
    #[error("A VM can't span nodes like this: {0}")]
    Settings(String),
    /// The protocol refused its configuration.
    #[error("The memory of the VM can't be shared like this")]
    Protocol(#[from] ::dsm::ConfigError),
    /// Another node can't be reached, or isn't a node of this VM.
    #[error("Node {peer} at {address} could not be joined: {problem}")]
    Join {
        /// The other node's number.
        peer: u8,
        /// Its address.
        address: String,
        /// The problem, and what to do.
        problem: String,
    },
    /// This node can't listen on its address.
    #[error("Node {node} can't listen at {address}")]
    Listen {
        /// This node's number.
        node: u8,
        /// Its address.
        address: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// This node's links can't use RDMA.
    #[error("Node {node} can't have its links by RDMA, which {address} asks for")]
    Rdma {
        /// This node's number.
        node: u8,
        /// Its address.
        address: String,
        /// The cause, and what to do.
        #[source]
        source: NoDevice,
    },
    /// The host refused a thread or descriptor.
    #[error("The host refused {what}")]
    Host {
        /// What was requested.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Another node reported a failure, or is gone.
    #[error("The VM ended before it ran: {0}")]
    Ended(String),
    /// A checkpoint can't be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The payload VM of this node failed.
    #[error(transparent)]
    Payload(#[from] crate::payload::PayloadError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsm_testbed::sim::costs::{Costs, Preset};
    use dsm_testbed::sim::programs::Pattern;
    use dsm_testbed::sim::{Report, Run, run};

    /// A producer and a consumer of one word on hosts with PVM, under the policy of `causeway run`.
    fn produced(pace_ns: u64, rounds: u64, warm_up: u64) -> Report {
        let costs = Costs {
            fault_ns: 40_000,
            trap_ns: 20_000,
            resume_ns: 40_000,
            kick_ns: 25_000,
            handle_ns: 10_000,
            page_ns: 5_000,
            latency_ns: 20_000,
            ..Preset::OURS.costs
        };
        let preset = Preset { name: "pvm", policy: tuned(Policy::OURS), costs };
        let setup =
            Run { preset, pattern: Pattern::ProducerConsumer, nodes: 2, rounds, warm_up, pace_ns, seed: 1 };
        let report = run(&setup).unwrap();
        assert_eq!(report.fault, None);
        report
    }

    /// A producer that stores at intervals of 0.2 ms keeps its page write-update. A loop of stores ends the mode.
    #[test]
    fn a_producer_is_no_storm() {
        let report = produced(200_000, 4000, 500);
        let (messages, bytes) = (report.per_event(report.messages), report.per_event(report.bytes));
        assert!(messages <= 1.05 && bytes <= 96.0, "{messages} messages, {bytes} bytes");
        assert!(!report.kinds.contains_key("reverted"), "{:?}", report.kinds);
        let report = produced(100, 200_000, 0);
        assert!(report.kinds.contains_key("reverted"), "{:?}", report.kinds);
    }
}
