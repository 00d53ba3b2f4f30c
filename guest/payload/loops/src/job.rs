//! A measurement as data. The host writes it into guest memory for the program `measure`, or runs it itself as the peer.

use crate::{access, copy, line, rings, script, verbs};

/// Size in bytes of a [`Job`] in memory.
pub const JOB_SIZE: usize = 56;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// Copies memory by [`copy::repeat`].
    Copy {
        /// The method.
        variant: copy::Variant,
        /// Address of the target.
        target: u64,
        /// Address of the source.
        source: u64,
        /// Bytes per copy.
        length: u64,
        /// Number of copies.
        repeats: u64,
    },
    /// Passes a cache line between two vCPUs by [`line::ping_pong`].
    PingPong {
        /// Address of the word.
        address: u64,
        /// This vCPU's side.
        side: line::Side,
        /// Number of rounds, of two transfers each.
        rounds: u64,
    },
    /// Writes to an I/O port by [`access::port_out`].
    PortOut {
        /// The port.
        port: u16,
        /// Number of writes.
        times: u64,
    },
    /// Stores to one address by [`access::store`].
    Store {
        /// Address of the 32-bit word, aligned to 4 bytes.
        address: u64,
        /// Number of stores.
        times: u64,
    },
    /// Follows a chain of loads by [`access::chase`].
    Chase {
        /// Address of the first word, and base of the offsets.
        base: u64,
        /// Number of loads.
        times: u64,
    },
    /// Posts RDMA requests and polls completions by [`verbs::run`].
    Verbs {
        /// Address of the array of [`verbs::SendQueue`]s.
        queues: u64,
        /// Number of queues.
        count: u64,
        /// Address of the [`verbs::CompletionQueue`].
        completions: u64,
        /// Number of requests to post.
        operations: u64,
        /// Limit of outstanding requests.
        window: u64,
    },
    /// Plays one side of a neighbour connection by [`rings::run`].
    Rings {
        /// Address of the [`rings::Bed`].
        bed: u64,
        /// This vCPU's role.
        role: rings::Role,
        /// Number of messages.
        messages: u64,
        /// Bytes per message.
        length: u64,
    },
    /// Executes steps by [`script::run`].
    Script {
        /// Address of the first [`script::Step`].
        steps: u64,
        /// Number of steps.
        count: u64,
        /// Number of repetitions.
        times: u64,
    },
    /// End the program.
    Stop,
}

impl Job {
    /// Returns the format in memory: seven 64-bit words.
    pub fn to_bytes(self) -> [u8; JOB_SIZE] {
        let words: [u64; 7] = match self {
            Self::Stop => [0; 7],
            Self::Copy { variant, target, source, length, repeats } => {
                [1, variant.number(), target, source, length, repeats, 0]
            }
            Self::PingPong { address, side, rounds } => {
                [2, address, u64::from(side == line::Side::Second), rounds, 0, 0, 0]
            }
            Self::PortOut { port, times } => [3, u64::from(port), times, 0, 0, 0, 0],
            Self::Store { address, times } => [4, address, times, 0, 0, 0, 0],
            Self::Chase { base, times } => [5, base, times, 0, 0, 0, 0],
            Self::Verbs { queues, count, completions, operations, window } => {
                [6, queues, count, completions, operations, window, 0]
            }
            Self::Rings { bed, role, messages, length } => [7, bed, role.number(), messages, length, 0, 0],
            Self::Script { steps, count, times } => [8, steps, count, times, 0, 0, 0],
        };
        let mut bytes = [0; JOB_SIZE];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a job.
    pub fn from_bytes(bytes: &[u8; JOB_SIZE]) -> Option<Self> {
        let mut words = [0_u64; 7];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().ok()?);
        }
        let [opcode, a, b, c, d, e, _] = words;
        Some(match opcode {
            0 => Self::Stop,
            1 => Self::Copy {
                variant: copy::Variant::from_number(a)?,
                target: b,
                source: c,
                length: d,
                repeats: e,
            },
            2 => Self::PingPong {
                address: a,
                side: if b == 0 { line::Side::First } else { line::Side::Second },
                rounds: c,
            },
            3 => Self::PortOut { port: u16::try_from(a).ok()?, times: b },
            4 => Self::Store { address: a, times: b },
            5 => Self::Chase { base: a, times: b },
            6 => Self::Verbs { queues: a, count: b, completions: c, operations: d, window: e },
            7 => Self::Rings { bed: a, role: rings::Role::from_number(b)?, messages: c, length: d },
            8 => Self::Script { steps: a, count: b, times: c },
            _ => return None,
        })
    }

    /// Runs the job; returns the ticks.
    ///
    /// # Safety
    /// As for the variant's function.
    pub unsafe fn run(self) -> u64 {
        // SAFETY: the caller vouches for each function's requirements.
        unsafe {
            match self {
                Self::Copy { variant, target, source, length, repeats } => {
                    copy::repeat(variant, target, source, length, repeats)
                }
                Self::PingPong { address, side, rounds } => line::ping_pong(address, side, rounds),
                Self::PortOut { port, times } => access::port_out(port, times),
                Self::Store { address, times } => access::store(address, times),
                Self::Chase { base, times } => access::chase(base, times),
                Self::Verbs { queues, count, completions, operations, window } => {
                    verbs::run(queues, count, completions, operations, window)
                }
                Self::Rings { bed, role, messages, length } => rings::run(bed, role, messages, length),
                Self::Script { steps, count, times } => script::run(steps, count, times),
                Self::Stop => 0,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Job;
    use crate::{copy::Variant, line::Side};

    #[test]
    fn jobs_come_back_from_bytes_and_unknown_ones_do_not() {
        for job in [
            Job::Stop,
            Job::Copy { variant: Variant::AvxStream, target: 1, source: 2, length: 3, repeats: 4 },
            Job::PingPong { address: 64, side: Side::Second, rounds: 9 },
            Job::PortOut { port: 0xe9, times: 5 },
            Job::Store { address: 6, times: 7 },
            Job::Chase { base: 8, times: 9 },
            Job::Rings { bed: 4096, role: crate::rings::Role::Pong, messages: 7, length: 64 },
            Job::Script { steps: 4096, count: 25, times: 3 },
            Job::Verbs { queues: 1, count: 2, completions: 3, operations: 4, window: 5 },
        ] {
            assert_eq!(Job::from_bytes(&job.to_bytes()), Some(job));
        }
        let mut unknown = Job::Stop.to_bytes();
        unknown[0] = 99;
        assert_eq!(Job::from_bytes(&unknown), None);
    }

    #[test]
    fn every_copy_variant_copies_exactly_its_length() {
        #[repr(align(64))]
        struct Buffer([u8; 4096]);
        let mut source = Buffer([0; 4096]);
        for (index, byte) in source.0.iter_mut().enumerate() {
            *byte = u8::try_from(index % 251).unwrap();
        }
        for variant in Variant::ALL {
            if variant.needs_avx() && !has_avx() {
                continue;
            }
            let mut target = Buffer([0xff; 4096]);
            // SAFETY: both buffers are 4096 bytes, 64-byte aligned and ours; AVX was checked.
            unsafe {
                super::copy::once(variant, target.0.as_mut_ptr() as u64, source.0.as_ptr() as u64, 2048);
            }
            assert_eq!(target.0[..2048], source.0[..2048], "{}", variant.name());
            assert!(target.0[2048..].iter().all(|byte| *byte == 0xff), "{}", variant.name());
        }
    }

    fn has_avx() -> bool {
        extern crate std;
        std::is_x86_feature_detected!("avx")
    }
}
