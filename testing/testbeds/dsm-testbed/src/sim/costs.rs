//! Costs of the simulated hosts and networks, and presets after published systems.

use dsm::config::Policy;
use dsm::message::Message;
use dsm::wire::{self, PAGE_SIZE};

/// Costs of a host and its network, ns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From an access to the start of the protocol's work on its fault.
    pub fault_ns: u64,
    /// To trap at a store, decode it and emulate it.
    pub trap_ns: u64,
    /// From the protocol's `Resume` to the guest's next instruction.
    pub resume_ns: u64,
    /// To force a vCPU's exit from the guest.
    pub kick_ns: u64,
    /// Of the protocol's thread, for one message or event.
    pub handle_ns: u64,
    /// To copy or map a page.
    pub page_ns: u64,
    /// From one host to another, without the time to send.
    pub latency_ns: u64,
    /// Bandwidth of a host's link, bits per µs.
    pub bits_per_us: u64,
    /// Smallest size of a message, bytes.
    pub least_bytes: usize,
    /// Of an access that doesn't fault.
    pub access_ns: u64,
}

/// A policy with costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// The policy of all nodes.
    pub policy: Policy,
    /// Costs of hosts and network.
    pub costs: Costs,
}

/// Assumed costs of a current server with hardware virtualization and a network of 25 Gbit/s.
const TODAY: Costs = Costs {
    fault_ns: 6_000,
    trap_ns: 4_000,
    resume_ns: 3_000,
    kick_ns: 2_000,
    handle_ns: 1_000,
    page_ns: 1_000,
    latency_ns: 5_000,
    bits_per_us: 25_000,
    least_bytes: 0,
    access_ns: 2,
};

impl Preset {
    /// All optimizations of this crate.
    pub const OURS: Self = Self { name: "ours", policy: Policy::OURS, costs: TODAY };
    /// Plain Ivy on the same hosts.
    pub const IVY: Self = Self { name: "ivy", policy: Policy::IVY, costs: TODAY };
    /// After the vNUMA paper: Itanium 2 hosts on gigabit Ethernet. Faults are cheap, since its hypervisor runs on bare hardware.
    pub const VNUMA_2009: Self = Self {
        name: "vnuma-2009",
        policy: Policy::VNUMA_2009,
        costs: Costs { fault_ns: 1_000, trap_ns: 1_000, latency_ns: 10_000, bits_per_us: 1_000, ..TODAY },
    };
    /// After GiantVM's sources: every message is a frame of 4,110 bytes. Chains of probable owners aren't modeled; fixed managers, which
    /// are
    /// faster, replace them.
    pub const GIANTVM_2026: Self = Self {
        name: "giantvm-2026",
        policy: Policy::GIANTVM_2026,
        costs: Costs { least_bytes: 4_110, ..TODAY },
    };

    /// The preset with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::OURS, Self::IVY, Self::VNUMA_2009, Self::GIANTVM_2026]
            .into_iter()
            .find(|preset| preset.name == name)
    }

    /// Sets the network's round trip, ns.
    #[must_use]
    pub const fn with_round_trip(mut self, nanoseconds: u64) -> Self {
        self.costs.latency_ns = nanoseconds / 2;
        self
    }
}

impl Costs {
    /// Size of a message on the network, bytes.
    #[must_use]
    pub fn bytes(&self, message: &Message) -> usize {
        wire::encoded_len(message).max(self.least_bytes)
    }

    /// Time that a host's link needs to send `bytes`, ns.
    #[must_use]
    pub fn sending_ns(&self, bytes: usize) -> u64 {
        (bytes as u64 * 8 * 1_000) / self.bits_per_us.max(1)
    }

    /// Time that a host's protocol thread needs for an arriving message of `bytes`, ns.
    #[must_use]
    pub fn handling_ns(&self, bytes: usize) -> u64 {
        self.handle_ns + if bytes >= PAGE_SIZE { self.page_ns } else { 0 }
    }
}
