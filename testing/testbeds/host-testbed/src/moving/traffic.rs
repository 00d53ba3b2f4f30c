//! A program in each of two guests: it posts operations to its peer, and checks each result for exactly-once execution in order.
//!
//! Operation n of a direction is, by n mod 5:
//! - 0: fetch-and-add of 1 to a word of its own; the result must be the number of earlier ones.
//! - 1: compare and swap of a word from k to k+1; the result must be k.
//! - 2: a WRITE of a block whose bytes follow from n.
//! - 3: a SEND of n, whose receiver checks that it is the next and that the WRITE before it has arrived whole.
//! - 4: a READ of that block.

use dma::MappedMemory;
use pvrdma::abi::work::opcode;
use pvrdma_testbed::queues::{Post, sge};
use pvrdma_testbed::{Guest, Qp, Region};

/// Limit of outstanding operations.
pub const DEPTH: u64 = 16;
/// Limit of a block, bytes.
const BLOCK: u64 = 2048;
/// Offsets in the region.
const WRITTEN: u64 = 4096;
const RECEIVED: u64 = WRITTEN + DEPTH * BLOCK;
const SOURCE: u64 = RECEIVED + 2 * DEPTH * 64;
const RESULT: u64 = SOURCE + DEPTH * BLOCK;
/// Bytes of a region.
pub const REGION: u64 = RESULT + DEPTH * BLOCK;

/// Errors found; all 0 when there were none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Verdict {
    /// Operations complete.
    pub operations: u64,
    /// Complete operations by kind: fetch-and-add, compare-and-swap, WRITE, SEND, READ.
    pub by_kind: [u64; 5],
    /// Operations that were complete and not executed.
    pub lost: u64,
    /// Operations executed more than once.
    pub repeated: u64,
    /// Completions and messages out of order.
    pub reordered: u64,
    /// Wrong bytes.
    pub corrupt: u64,
    /// Completions with an error.
    pub errors: u64,
}

impl Verdict {
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        for (sum, count) in self.by_kind.iter_mut().zip(other.by_kind) {
            *sum += count;
        }
        self.lost += other.lost;
        self.repeated += other.repeated;
        self.reordered += other.reordered;
        self.corrupt += other.corrupt;
        self.errors += other.errors;
    }

    /// Whether there were no errors.
    pub fn is_clean(&self) -> bool {
        self.lost + self.repeated + self.reordered + self.corrupt + self.errors == 0
    }

    fn compare(&mut self, got: u64, expected: u64) {
        self.lost += u64::from(got < expected);
        self.repeated += u64::from(got > expected);
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct End {
    pub qp: Qp,
    pub region: Region,
    /// The peer's region: address and remote key.
    pub remote: (u64, u32),
    posted: u64,
    done: u64,
    /// Number of messages received.
    received: u64,
    receives_posted: u64,
    /// Sometimes a large block, so that messages have several packets.
    pub verdict: Verdict,
}

fn length(n: u64) -> u32 {
    let long = [8u32, 64, 512, 2048];
    long[usize::try_from(n / 5 % 4).unwrap()]
}

/// The block of operation n.
fn block(n: u64, length: u32) -> Vec<u8> {
    let words = (0..u64::from(length) / 8).map(|word| (n << 8 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    words.flat_map(u64::to_le_bytes).collect()
}

impl End {
    pub fn new(qp: Qp, region: Region) -> Self {
        let verdict = Verdict::default();
        Self { qp, region, remote: (0, 0), posted: 0, done: 0, received: 0, receives_posted: 0, verdict }
    }

    pub fn completed(&self) -> u64 {
        self.done
    }

    /// Posts receives and operations while there is room, up to `most` operations in all.
    pub fn post(&mut self, guest: &Guest<MappedMemory>, most: u64) {
        while self.receives_posted - self.received < 2 * DEPTH {
            let at = RECEIVED + self.receives_posted % (2 * DEPTH) * 64;
            if !guest.post_receive(&self.qp, self.receives_posted, &[sge(&self.region, at, 8)]) {
                break;
            }
            self.receives_posted += 1;
        }
        while self.posted < most && self.posted - self.done < DEPTH {
            let n = self.posted;
            let slot = n % DEPTH;
            let (base, key) = self.remote;
            let result = |length| [sge(&self.region, RESULT + slot * BLOCK, length)];
            let round = n / 5;
            let post = match n % 5 {
                0 => Post::atomic(n, opcode::FETCH_ADD, (base, key), (1, 0), &result(8)),
                1 => Post::atomic(n, opcode::COMPARE_SWAP, (base + 8, key), (round, round + 1), &result(8)),
                2 => {
                    let length = length(n);
                    self.region.write(&guest.memory, SOURCE + slot * BLOCK, &block(n, length));
                    let to = base + WRITTEN + round % DEPTH * BLOCK;
                    let from = [sge(&self.region, SOURCE + slot * BLOCK, length)];
                    Post::remote(n, opcode::WRITE, to, key, &from)
                }
                3 => {
                    self.region.write(&guest.memory, SOURCE + slot * BLOCK, &round.to_le_bytes());
                    Post::send(n, &[sge(&self.region, SOURCE + slot * BLOCK, 8)])
                }
                _ => {
                    let from = base + WRITTEN + round % DEPTH * BLOCK;
                    Post::remote(n, opcode::READ, from, key, &result(length(n - 2)))
                }
            };
            if !guest.post_send(&self.qp, &post) {
                break;
            }
            self.posted += 1;
        }
    }

    /// Processes a completion of this queue pair.
    pub fn complete(&mut self, guest: &Guest<MappedMemory>, wr_id: u64, code: u32, status: u32) {
        let verdict = &mut self.verdict;
        if status != 0 {
            if verdict.errors == 0 {
                tracing::error!(
                    qpn = self.qp.qpn,
                    wr_id,
                    code,
                    status,
                    "The first request of a queue pair that failed"
                );
            }
            verdict.errors += 1;
        }
        if code >= 128 {
            verdict.reordered += u64::from(wr_id != self.received);
            let at = RECEIVED + self.received % (2 * DEPTH) * 64;
            let bytes = self.region.read(&guest.memory, at, 8);
            let round = u64::from_le_bytes(bytes.try_into().unwrap());
            verdict.compare(self.received, round);
            let n = self.received * 5 + 2;
            let length = length(n);
            let written =
                self.region.read(&guest.memory, WRITTEN + self.received % DEPTH * BLOCK, u64::from(length));
            verdict.corrupt += u64::from(written != block(n, length));
            self.received += 1;
            return;
        }
        let n = self.done;
        verdict.reordered += u64::from(wr_id != n);
        let result =
            |length: u32| self.region.read(&guest.memory, RESULT + n % DEPTH * BLOCK, u64::from(length));
        match n % 5 {
            0 | 1 => verdict.compare(u64::from_le_bytes(result(8).try_into().unwrap()), n / 5),
            4 => {
                let length = length(n - 2);
                verdict.corrupt += u64::from(result(length) != block(n - 2, length));
            }
            _ => {}
        }
        verdict.operations += 1;
        verdict.by_kind[usize::try_from(n % 5).unwrap()] += 1;
        self.done += 1;
    }

    /// Checks the words on which the peer executes atomics, with nothing in flight: they count what was executed here.
    pub fn check_words(&mut self, guest: &Guest<MappedMemory>, asked: u64) {
        let word = |at| u64::from_le_bytes(self.region.read(&guest.memory, at, 8).try_into().unwrap());
        let (added, swapped) = (word(0), word(8));
        self.verdict.compare(added, asked.div_ceil(5));
        self.verdict.compare(swapped, (asked + 3) / 5);
        self.verdict.compare(self.received, (asked + 1) / 5);
    }
}
