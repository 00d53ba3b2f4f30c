//! What things cost, and presets after published systems.

use crate::config::Policy;
use crate::message::Message;
use crate::wire::{self, PAGE_SIZE};

/// Costs of a host and its network, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From an access to the protocol hearing of its fault.
    pub fault_ns: u64,
    /// To stop at a store, decode it and carry it out.
    pub trap_ns: u64,
    /// From the protocol's word to the guest going on.
    pub resume_ns: u64,
    /// To make a virtual CPU leave the guest.
    pub kick_ns: u64,
    /// To handle one message, or one event, in the protocol's thread.
    pub handle_ns: u64,
    /// To copy or map a page.
    pub page_ns: u64,
    /// From one host to the next.
    pub latency_ns: u64,
    /// Of a host's link.
    pub bits_per_us: u64,
    /// Every message takes at least so many bytes.
    pub least_bytes: usize,
    /// One access by a guest that doesn't fault.
    pub access_ns: u64,
}

/// A policy with its costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// How nodes decide.
    pub policy: Policy,
    /// What things cost.
    pub costs: Costs,
}

/// A server of today with hardware virtualisation and a network of 25 Gbit/s: spec dsm, section 6.5.
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
    /// All that this crate has.
    pub const OURS: Self = Self { name: "ours", policy: Policy::OURS, costs: TODAY };
    /// Plain Ivy on the same hosts.
    pub const IVY: Self = Self { name: "ivy", policy: Policy::IVY, costs: TODAY };
    /// After the vNUMA paper: Itanium 2 hosts on gigabit Ethernet. Its faults cost little: a hypervisor on the bare machine.
    pub const VNUMA_2009: Self = Self {
        name: "vnuma-2009",
        policy: Policy::VNUMA_2009,
        costs: Costs { fault_ns: 1_000, trap_ns: 1_000, latency_ns: 10_000, bits_per_us: 1_000, ..TODAY },
    };
    /// After GiantVM's sources: every message is a frame of 4,110 bytes. Its chains of probable owners are not modelled: it gets
    /// fixed managers, which are faster.
    pub const GIANTVM_2026: Self = Self {
        name: "giantvm-2026",
        policy: Policy::GIANTVM_2026,
        costs: Costs { least_bytes: 4_110, ..TODAY },
    };

    /// The preset of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::OURS, Self::IVY, Self::VNUMA_2009, Self::GIANTVM_2026]
            .into_iter()
            .find(|preset| preset.name == name)
    }

    /// With another round trip of the network.
    #[must_use]
    pub const fn with_round_trip(mut self, nanoseconds: u64) -> Self {
        self.costs.latency_ns = nanoseconds / 2;
        self
    }
}

impl Costs {
    /// Bytes that a message takes.
    #[must_use]
    pub fn bytes(&self, message: &Message) -> usize {
        wire::encoded_len(message).max(self.least_bytes)
    }

    /// How long the link of a host is busy with it.
    #[must_use]
    pub fn sending_ns(&self, bytes: usize) -> u64 {
        (bytes as u64 * 8 * 1_000) / self.bits_per_us.max(1)
    }

    /// How long a host is busy with it when it arrives.
    #[must_use]
    pub fn handling_ns(&self, bytes: usize) -> u64 {
        self.handle_ns + if bytes >= PAGE_SIZE { self.page_ns } else { 0 }
    }
}
