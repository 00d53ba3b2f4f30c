//! The identity of a VM, shared by its nodes and its checkpoints: SHA-256 over a record in CBOR.
//!
//! Checkpoint files contain the identity, so every build of this program must compute the same one. The record is a type of its own: names
//! and types of run-time settings may change without changing it. Every change of the hashed content needs a new [`VERSION`] and new
//! versions
//! in [`super::checkpoint`].

use dsm::{Order, Policy};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::payload::Definition;

/// Version of [`Record`] and of how it is hashed.
const VERSION: u32 = 2;

/// Properties that all nodes of a VM share, and that a checkpoint shares with the VM that resumes from it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identified<'a> {
    pub(super) definition: Definition<'a>,
    pub(super) nodes: u8,
    pub(super) policy: Policy,
}

/// The hashed content, a CBOR map in this order.
#[derive(Serialize)]
struct Record<'a> {
    version: u32,
    program_sha256: [u8; 32],
    arguments: &'a [String],
    stack_bytes: u64,
    doorbells: u32,
    payload_abi: u32,
    nodes: u8,
    vcpus: u32,
    memory_bytes: u64,
    policy: PolicyRecord,
}

#[derive(Serialize)]
struct PolicyRecord {
    order: &'static str,
    adapt: bool,
    atomics: bool,
    migratory: bool,
    read_moves_ownership: bool,
    serial_invalidation: bool,
    transfers: u32,
    window_ns: u64,
    changed_bytes: u16,
    storm: u32,
    turn: u32,
    cooldown_ns: u64,
    token_votes: u32,
    probe_updates: u32,
    update_window: u64,
    hold_ns: u64,
    twins: u64,
    versions: bool,
}

impl PolicyRecord {
    fn new(policy: Policy) -> Self {
        // A new field of `Policy` doesn't compile until it is added to the record.
        let Policy {
            order,
            adapt,
            atomics,
            migratory,
            read_moves_ownership,
            serial_invalidation,
            transfers,
            window_ns,
            changed_bytes,
            storm,
            turn,
            cooldown_ns,
            token_votes,
            probe_updates,
            update_window,
            hold_ns,
            twins,
            versions,
        } = policy;
        let order = match order {
            Order::Sequenced => "sequenced",
            Order::PerWriter => "per-writer",
        };
        Self {
            order,
            adapt,
            atomics,
            migratory,
            read_moves_ownership,
            serial_invalidation,
            transfers,
            window_ns,
            changed_bytes,
            storm,
            turn,
            cooldown_ns,
            token_votes,
            probe_updates,
            update_window,
            hold_ns,
            twins: twins as u64,
            versions,
        }
    }
}

impl Identified<'_> {
    /// The identity of a VM and its checkpoints: the first 8 bytes of the hash, little-endian. It detects programs and settings that were
    /// mixed up by mistake. It doesn't resist an attacker, who can construct a second program with the same identity.
    pub(super) fn identity(&self) -> u64 {
        let Self { definition, nodes, policy } = self;
        let Definition { program, arguments, stack_bytes, doorbells, abi, vcpus, memory_bytes } = *definition;
        let record = Record {
            version: VERSION,
            program_sha256: Sha256::digest(program).into(),
            arguments,
            stack_bytes,
            doorbells,
            payload_abi: abi,
            nodes: *nodes,
            vcpus,
            memory_bytes,
            policy: PolicyRecord::new(*policy),
        };
        hash(&record)
    }
}

/// The value that nodes compare when they join: the VM's identity, and the options that all nodes must have or lack.
pub(super) fn compatibility(identity: u64, checkpoints: bool, restart: bool) -> u64 {
    #[derive(Serialize)]
    struct Options {
        version: u32,
        identity: u64,
        checkpoints: bool,
        restart: bool,
    }
    hash(&Options { version: VERSION, identity, checkpoints, restart })
}

fn hash(record: &impl Serialize) -> u64 {
    let mut bytes = Vec::new();
    // Serialization of numbers and texts into memory can't fail.
    let written = ciborium::into_writer(record, &mut bytes);
    debug_assert!(written.is_ok(), "{written:?}");
    let digest: [u8; 32] = Sha256::digest(&bytes).into();
    digest.first_chunk().copied().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(arguments: &[String]) -> Identified<'_> {
        let definition = Definition {
            program: b"program",
            arguments,
            stack_bytes: 64 << 10,
            doorbells: 1,
            abi: 1,
            vcpus: 4,
            memory_bytes: 64 << 20,
        };
        Identified { definition, nodes: 2, policy: Policy::IVY }
    }

    /// Checkpoint files contain these numbers. An independent CBOR encoder and SHA-256 compute the same ones. A change raises the versions
    /// of
    /// identity, list and node file.
    #[test]
    fn an_identity_is_the_same_from_every_build() {
        let arguments = ["a".to_owned(), "bc".to_owned()];
        let identity = vm(&arguments).identity();
        assert_eq!(identity, 0xe432_9886_eee3_0ad9, "{identity:#018x}");
        let ours = Identified { policy: Policy::OURS, ..vm(&arguments) }.identity();
        assert_eq!(ours, 0x633f_a6b9_8f3b_4c96, "{ours:#018x}");
        let joined = compatibility(identity, true, false);
        assert_eq!(joined, 0xe6f6_4920_9337_683a, "{joined:#018x}");
    }

    #[test]
    fn everything_that_must_be_the_same_counts() {
        let (plain, joined) = (["ab".to_owned(), "c".to_owned()], ["a".to_owned(), "bc".to_owned()]);
        let one = vm(&plain);
        let policy = |change: fn(&mut Policy)| {
            let mut policy = Policy::IVY;
            change(&mut policy);
            Identified { policy, ..one }
        };
        let own = one.definition;
        let defined = |definition| Identified { definition, ..one };
        let others = [
            defined(Definition { program: b"progran", ..own }),
            defined(Definition { arguments: &joined, ..own }),
            defined(Definition { stack_bytes: 128 << 10, ..own }),
            defined(Definition { doorbells: 2, ..own }),
            defined(Definition { abi: 2, ..own }),
            defined(Definition { vcpus: 5, ..own }),
            defined(Definition { memory_bytes: 128 << 20, ..own }),
            Identified { nodes: 3, ..one },
            policy(|policy| policy.order = Order::PerWriter),
            policy(|policy| policy.adapt = true),
            policy(|policy| policy.hold_ns += 1),
            policy(|policy| policy.versions = false),
        ];
        let mut all: Vec<u64> = others.iter().map(Identified::identity).collect();
        all.push(one.identity());
        for (checkpoints, restart) in [(false, false), (true, false), (false, true)] {
            all.push(compatibility(one.identity(), checkpoints, restart));
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
