//! Integer sort: each vCPU counts its keys, all counts become places, each puts its keys there.
//!
//! Source: Bailey and others, *The NAS Parallel Benchmarks* (RNR-94-007), kernel IS: what is done and the bell shape of the keys. Unlike there, the
//! keys themselves are moved.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use core::sync::atomic::{AtomicU32, Ordering};
use payload_spmd::{Figure, Heap, Outcome, Random, Refused, Settings, Team};

/// `n`: keys (128K); `range`: they are below it (2K); `rounds` (4); `seed` (1).
pub const NAMES: &[&str] = &["n", "range", "rounds", "seed"];

/// Keys drawn from one seed, so that the same keys come whoever draws them.
const CHUNK: usize = 1024;

/// Draws the keys of a chunk: the mean of four random numbers each.
fn draw(seed: u64, chunk: usize, range: u32, keys: &mut [u32]) {
    let mut random = Random::new(seed ^ (chunk as u64) << 24);
    keys.fill_with(|| {
        let sum: u64 = (0..4).map(|_| random.below(range.into())).sum();
        u32::try_from(sum / 4).unwrap_or(0)
    });
}

/// Runs it.
///
/// # Errors
/// Arguments or memory that don't do.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let n = settings.size("n", 128 << 10, CHUNK..=1 << 30)? / CHUNK * CHUNK;
    let range = settings.size("range", 2 << 10, 2..=1 << 24)?;
    let rounds = settings.number("rounds", 4, 1..=1 << 20)?;
    let seed = settings.number("seed", 1, 0..=u64::MAX)?;
    let limit = u32::try_from(range).unwrap_or(u32::MAX);
    let count = team.count();
    let keys = heap.array::<u32>(n)?;
    let sorted = heap.array::<u32>(n)?;
    // Counts of each vCPU, then first places; on pages of their own.
    let stride = range.next_multiple_of(1024);
    let counts = heap.array::<u32>(stride * count)?;
    // Keys that each vCPU's part of the range has, per vCPU on its own page.
    let totals = heap.array::<AtomicU32>(1024 * count)?;

    let chunks = team.part(n / CHUNK);
    for chunk in chunks.clone() {
        // SAFETY: chunks of this vCPU, which only it uses.
        draw(seed, chunk, limit, unsafe { keys.write(chunk * CHUNK..(chunk + 1) * CHUNK) });
    }
    let mine = chunks.start * CHUNK..chunks.end * CHUNK;
    let values = team.part(range);
    let own_counts = team.index() * stride..team.index() * stride + range;
    let nanoseconds = team.measure(|| {
        for _ in 0..rounds {
            {
                // SAFETY: own keys, and own counts, which others use between the barriers below only.
                let (keys, counts) = unsafe { (keys.read(mine.clone()), counts.write(own_counts.clone())) };
                counts.fill(0);
                for key in keys {
                    counts[*key as usize] += 1;
                }
            }
            team.wait();
            // For its part of the values, in all counts: how many keys there are.
            let column = |vcpu: usize| vcpu * stride + values.start..vcpu * stride + values.end;
            let total = (0..count).fold(0, |total: u32, vcpu| {
                // SAFETY: counts are written again after the next barriers only, and then each column by one vCPU.
                total + unsafe { counts.read(column(vcpu)) }.iter().sum::<u32>()
            });
            totals.atomics()[team.index() * 1024].store(total, Ordering::Release);
            team.wait();
            let before = (0..team.index()).map(|vcpu| totals.atomics()[vcpu * 1024].load(Ordering::Acquire));
            let mut place: u32 = before.sum();
            for value in values.clone() {
                for vcpu in 0..count {
                    let at = vcpu * stride + value;
                    // SAFETY: columns of this vCPU's values are its own between these barriers.
                    let entry = unsafe { counts.write(at..at + 1) };
                    let keys = core::mem::replace(&mut entry[0], place);
                    place += keys;
                }
            }
            team.wait();
            // SAFETY: own keys, and own places again.
            let (keys, places) = unsafe { (keys.read(mine.clone()), counts.write(own_counts.clone())) };
            for key in keys {
                let at = places[*key as usize] as usize;
                places[*key as usize] += 1;
                // SAFETY: each place belongs to one key of one vCPU.
                let place = unsafe { sorted.write(at..at + 1) };
                place[0] = *key;
            }
            team.wait();
        }
    });
    let outcome = Outcome::new("key", rounds * n as u64, nanoseconds);
    if !team.leads() {
        return Ok(outcome);
    }
    // Serially: count the keys, drawn anew, and compare with what they make in order.
    let counts = heap.array::<u32>(range)?;
    // SAFETY: only vCPU 0 knows it.
    let counts = unsafe { counts.write(0..range) };
    let mut chunk_keys = [0; CHUNK];
    let serial_ns = team.time(|| {
        for chunk in 0..n / CHUNK {
            draw(seed, chunk, limit, &mut chunk_keys);
            chunk_keys.iter().for_each(|key| counts[*key as usize] += 1);
        }
    });
    // SAFETY: all have ended.
    let sorted = unsafe { sorted.read(0..n) };
    let expected = (0_u32..).zip(&*counts).flat_map(|(key, count)| (0..*count).map(move |_| key));
    let same = sorted.iter().copied().eq(expected);
    Ok(outcome
        .verified(same)
        .figure("serial_count_ns", Figure::Count(serial_ns))
        .figure("n", Figure::Count(n as u64))
        .figure("rounds", Figure::Count(rounds))
        .figure("checksum", Figure::Count(checksum(sorted.iter().map(|key| u64::from(*key))) >> 12)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;

    #[test]
    fn keys_come_out_in_order() {
        let outcomes = right(run, NAMES, &["n=10K", "range=300", "rounds=2"]);
        assert!(outcomes.windows(2).all(|two| two[0].get("checksum") == two[1].get("checksum")));
        // Fewer values and fewer chunks than vCPUs.
        right(run, NAMES, &["n=1K", "range=2", "rounds=1"]);
    }
}
