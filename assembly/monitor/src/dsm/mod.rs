//! A payload VM that spans several monitors, each on a host of its own or all on one: one memory, kept by the protocol of the crate
//! [`::dsm`].
//!
//! ```text
//!   vCPU ──fault──▶ userfaultfd ──▶ faults thread ─┐
//!   vCPU ──kick, trap──▶ before_run ───────────────┤   ┌────────────┐ ──▶ SharedRam: rights and contents of pages
//!   link ──bytes──▶ link thread (one per peer) ────┼──▶│ dsm::Node  │ ──▶ links: messages
//!   clock ────────▶ faults thread ─────────────────┘   └────────────┘ ──▶ vCPUs: wake, kick, step over
//! ```
//!
//! One lock guards the node, its pages and the states of its vCPUs. Who holds it never waits: messages that a link doesn't take at
//! once are queued and sent by the faults thread. Nothing polls; a vCPU that waits for a page sleeps in the kernel (userfaultfd), or
//! in [`machine::vcpu::VcpuExitHandler::before_run`] after it was kicked out to have its registers read.
//!
//! | module | holds |
//! |---|---|
//! | `address`, `join`, `link` | where nodes are; the handshake; a connection, its frames and their counts |
//! | `identity` | what makes nodes and checkpoints parts of one VM |
//! | `rdma` | links by the host's RDMA device |
//! | `engine` | the lock, and who calls the protocol when |
//! | `pages` | the protocol's view of guest memory |
//! | `vcpus` | what a vCPU waits for; whether its instruction has retired |
//! | `ahead`, `streams`, `follow` | pages fetched before they are asked for; where a vCPU goes on from page to page; which fault comes soon after which |
//! | `instruction` | stores and atomics, decoded to be carried out for the vCPU |
//! | `compute`, `window` | instructions that compute and load; what follows a trapped store, up to the next one |
//! | `service` | the faults thread: faults, time, heartbeats; the link threads |
//! | `checkpoint` | all nodes saved at one cut, and restored |
//! | `report`, `hot`, `top` | counters of a node and its hottest pages, as JSON; and for whoever asks while it runs |
//! | `spanning` | a node from its settings to its end |
//!
//! A node that is dead, cut off or faulty ends the VM everywhere: half of its memory is gone. See docs/design/dsm.md.

mod address;
mod ahead;
mod checkpoint;
mod compute;
mod engine;
mod follow;
mod hot;
mod identity;
mod instruction;
mod join;
mod link;
mod pages;
mod rdma;
mod report;
mod service;
mod spanning;
mod streams;
mod top;
mod vcpus;
mod window;

use ::dsm::Policy;

pub use address::{AddressError, NodeAddress};
pub use checkpoint::{CheckpointError, Checkpoints};
pub use ibverbs::{Absent as NoRdma, Found as RdmaDevice, devices as rdma_devices};
pub use rdma::NoDevice;
pub use spanning::{Ended, NodeSettings, SpanningVm, Trouble};

/// A policy with the times that suit a monitor. Costs of this kind of machine decide: leaving the guest takes 25 µs, a trapped store some 100 (500 on a
/// busy machine; it was 300 when policies were first chosen), a page some 300. A page is kept by updates when it would spend a sixth of the time on
/// the way, which was reckoned with 800, and no more when its stores take half of it.
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

/// A VM that spans hosts could not be made, or ended.
#[derive(Debug, thiserror::Error)]
pub enum DsmError {
    /// The settings can't be.
    #[error("A VM can't span nodes like this: {0}")]
    Settings(String),
    /// The protocol refuses its configuration.
    #[error("The memory of the VM can't be shared like this")]
    Protocol(#[from] ::dsm::ConfigError),
    /// A node can't be reached, or isn't what it should be.
    #[error("Node {peer} at {address} could not be joined: {problem}")]
    Join {
        /// Which.
        peer: u8,
        /// Where.
        address: String,
        /// What went wrong, and what to do.
        problem: String,
    },
    /// This node's own address can't be listened on.
    #[error("Node {node} can't listen at {address}")]
    Listen {
        /// This node.
        node: u8,
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// This node's links are to go by RDMA, and can't.
    #[error("Node {node} can't have its links by RDMA, which {address} asks for")]
    Rdma {
        /// This node.
        node: u8,
        /// Its address.
        address: String,
        /// Why, and what to do.
        #[source]
        source: NoDevice,
    },
    /// The host refused a thread or descriptor.
    #[error("The host refused {what}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Another node has found why, or is gone.
    #[error("The VM ended before it ran: {0}")]
    Ended(String),
    /// There is no checkpoint to go on from, or none can be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The payload VM of this node.
    #[error(transparent)]
    Payload(#[from] crate::payload::PayloadError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::dsm::testing::sim::costs::{Costs, Preset};
    use ::dsm::testing::sim::programs::Pattern;
    use ::dsm::testing::sim::{Report, Run, run};

    /// A producer and a consumer of a word on a machine with PVM, under the policy of `causeway run`.
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

    /// Who stores three times a millisecond, and does something else for two thirds of it, goes on to do so by updates; a loop of stores ends the mode.
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
