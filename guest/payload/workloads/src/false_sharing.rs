//! Each vCPU counts in its own word. The words are on one page (or, for comparison, on several).

use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{Figure, Heap, Outcome, Refused, Settings, Team};

/// `times`: stores per vCPU (20000); `stride`: bytes between words, a multiple of 8 (8); `pace`: pauses between stores (0).
pub const NAMES: &[&str] = &["times", "stride", "pace"];

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let times = settings.number("times", 20_000, 1..=1 << 40)?;
    let stride = settings.size("stride", 8, 8..=1 << 20)?;
    let pace = settings.number("pace", 0, 0..=1 << 32)?;
    if !stride.is_multiple_of(8) {
        return Err(Refused::Other(
            "The stride has to be a multiple of 8, the size of a word; give 8, 64 or 4096",
        ));
    }
    let words = heap.array::<AtomicU64>(team.count() * stride / 8)?;
    let wrong = heap.array::<AtomicU64>(512 * team.count())?;
    let of = |vcpu: usize| &words.atomics()[vcpu * stride / 8];
    let mine = of(team.index());
    let nanoseconds = team.measure(|| {
        let mut lost = 0;
        for number in 1..=times {
            // A vCPU's own word contains its last store.
            lost += u64::from(mine.load(Ordering::Relaxed) != number - 1);
            mine.store(number, Ordering::Relaxed);
            crate::pause(pace);
        }
        wrong.atomics()[512 * team.index()].store(lost, Ordering::Release);
    });
    let complete = (0..team.count()).all(|vcpu| of(vcpu).load(Ordering::Acquire) == times);
    let lost: u64 = (0..team.count()).map(|vcpu| wrong.atomics()[512 * vcpu].load(Ordering::Acquire)).sum();
    Ok(Outcome::new("store", times * team.count() as u64, nanoseconds)
        .verified(complete && lost == 0)
        .figure("stride", Figure::Count(stride as u64))
        .figure("lost", Figure::Count(lost)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;

    #[test]
    fn no_store_is_lost() {
        right(run, NAMES, &["times=500"]);
        right(run, NAMES, &["times=50", "stride=4096"]);
        assert!(crate::testing::run(run, NAMES, 1, &["stride=12"]).is_err());
    }
}
