//! Integer sort. Each vCPU counts its part of the keys. From all counts, each vCPU gets a range of values with about as many keys.
//! Then each one reads all keys, and writes those in its range to their places.
//!
//! So no vCPU writes another one's places, except on pages at the border of two vCPUs' places. All vCPUs read the keys, and none
//! writes them. A round before the timed ones fetches them, as in the NAS benchmark.
//!
//! Source: Bailey and others, *The NAS Parallel Benchmarks* (RNR-94-007), kernel IS: the task, and the bell-shaped distribution of
//! the keys. Unlike there, the keys themselves are moved.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use payload_spmd::{Figure, Heap, Outcome, Random, Refused, Settings, Team};

/// `n`: keys (128K); `range`: limit of keys (2K); `rounds` (4); `seed` (1).
pub const NAMES: &[&str] = &["n", "range", "rounds", "seed"];

/// Keys drawn from one seed, so that they don't depend on the drawing vCPU.
const CHUNK: usize = 1024;
/// Keys per page.
const PER_PAGE: usize = 1024;

/// Draws the keys of a chunk: the mean of four random numbers each.
fn draw(seed: u64, chunk: usize, range: u32, keys: &mut [u32]) {
    let mut random = Random::new(seed ^ (chunk as u64) << 24);
    keys.fill_with(|| {
        let sum: u64 = (0..4).map(|_| random.below(range.into())).sum();
        u32::try_from(sum / 4).unwrap_or(0)
    });
}

/// For each value of vCPU `me`, computes the place of its first key. Its values are consecutive, and have an approximately equal part
/// of the `n` keys. `all` returns the counts of each of `count` vCPUs.
fn lay_out<'c>(
    places: &mut [u32],
    n: usize,
    me: usize,
    count: usize,
    all: impl Fn(usize) -> &'c [u32],
) -> core::ops::Range<usize> {
    let range = places.len();
    places.fill(0);
    for vcpu in 0..count {
        places.iter_mut().zip(all(vcpu)).for_each(|(place, keys)| *place += keys);
    }
    let (mut before, mut first, mut end) = (0, range, range);
    for (value, place) in places.iter_mut().enumerate() {
        // The owner of the value's first key if only keys were divided.
        let owner = (before as usize * count / n).min(count - 1);
        if owner >= me {
            first = first.min(value);
        }
        if owner > me {
            end = end.min(value);
        }
        before += core::mem::replace(place, before);
    }
    first..end.max(first)
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let n = settings.size("n", 128 << 10, CHUNK..=1 << 30)? / CHUNK * CHUNK;
    let range = settings.size("range", 2 << 10, 2..=1 << 24)?;
    let rounds = settings.number("rounds", 4, 1..=1 << 20)?;
    let seed = settings.number("seed", 1, 0..=u64::MAX)?;
    let limit = u32::try_from(range).unwrap_or(u32::MAX);
    let count = team.count();
    let keys = heap.array::<u32>(n)?;
    let sorted = heap.array::<u32>(n)?;
    // Counts and places of each vCPU, on separate pages.
    let stride = range.next_multiple_of(PER_PAGE);
    let counts = heap.array::<u32>(stride * count)?;
    let places = heap.array::<u32>(stride * count)?;

    let chunks = team.part(n / CHUNK);
    for chunk in chunks.clone() {
        // SAFETY: chunks of this vCPU, which no other uses.
        draw(seed, chunk, limit, unsafe { keys.write(chunk * CHUNK..(chunk + 1) * CHUNK) });
    }
    let mine = chunks.start * CHUNK..chunks.end * CHUNK;
    let me = team.index();
    let own = me * stride..me * stride + range;
    let round = || {
        {
            // SAFETY: own keys and own counts. Others read the counts only between the barriers below.
            let (keys, counts) = unsafe { (keys.read(mine.clone()), counts.write(own.clone())) };
            counts.fill(0);
            for key in keys {
                counts[*key as usize] += 1;
            }
        }
        team.wait();
        // SAFETY: own places.
        let places = unsafe { places.write(own.clone()) };
        // SAFETY: no vCPU writes counts before the next barrier.
        let all = |vcpu: usize| unsafe { counts.read(vcpu * stride..vcpu * stride + range) };
        let values = lay_out(places, n, me, count, all);
        let first = u32::try_from(values.start).unwrap_or(0);
        let width = u32::try_from(values.len()).unwrap_or(0);
        let mut own_keys = [0; CHUNK];
        // SAFETY: the keys are no longer written.
        for some in unsafe { keys.read(0..n) }.chunks(CHUNK) {
            let mut len = 0;
            for key in some {
                // Without a branch, as it would be unpredictable.
                own_keys[len] = *key;
                len += usize::from(key.wrapping_sub(first) < width);
            }
            for key in &own_keys[..len] {
                let place = &mut places[*key as usize];
                let at = *place as usize;
                // SAFETY: each place belongs to one key of one vCPU.
                let slot = unsafe { sorted.write(at..at + 1) };
                slot[0] = *key;
                *place += 1;
            }
        }
        team.wait();
    };
    let first_ns = team.time(round);
    let nanoseconds = team.measure(|| (0..rounds).for_each(|_| round()));
    let outcome = Outcome::new("key", rounds * n as u64, nanoseconds);
    if !team.leads() {
        return Ok(outcome);
    }
    // Serially: count the keys, drawn again, and compare with their sorted order.
    let counts = heap.array::<u32>(range)?;
    // SAFETY: only vCPU 0 uses it.
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
        .figure("first_ns", Figure::Count(first_ns))
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
