//! All vCPUs access the same words at once, for a time: the worst case of a memory protocol. Checks that every vCPU makes progress,
//! and that no update is lost.

#![allow(unsafe_code)] // Instructions with two memory operands, and accesses across pages.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{Figure, Heap, Outcome, PAGE, Refused, Settings, Team};

/// `kind`: store (all store to one word), add (`lock xadd` on one word), move (`movsq` between two contended pages), cross (`lock
/// add` and stores on words across two pages); `ms`: duration (200).
pub const NAMES: &[&str] = &["kind", "ms"];

/// Words per page.
const PER_PAGE: usize = 512;
const KINDS: &[&str] = &["store", "add", "move", "cross"];

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let kind = settings.word("kind", KINDS)?;
    let nanoseconds = settings.number("ms", 200, 1..=1 << 32)? * 1_000_000;
    let pages = heap.array::<AtomicU64>(2 * PER_PAGE)?;
    let done = heap.array::<AtomicU64>(PER_PAGE * team.count())?;
    let me = team.index() as u64 + 1;
    let (first, second) = (&pages.atomics()[0], &pages.atomics()[PER_PAGE]);
    // Half of the word is on each page.
    let across = pages.address().cast::<u8>().wrapping_add(PAGE - 4).cast::<u64>();
    if kind == 2 && team.leads() {
        first.store(1, Ordering::Relaxed);
        second.store(2, Ordering::Relaxed);
    }
    let measured = team.measure(|| {
        let begun = team.nanoseconds();
        let (mut count, mut turn) = (0_u64, team.index());
        while team.nanoseconds().saturating_sub(begun) < nanoseconds {
            for _ in 0..16 {
                match kind {
                    0 => first.store(me, Ordering::Relaxed),
                    1 => {
                        first.fetch_add(1, Ordering::Relaxed);
                    }
                    2 => {
                        // Both directions alternate, and adjacent vCPUs use opposite ones, so that each has the other's page.
                        let (from, to) = if turn & 1 == 0 { (first, second) } else { (second, first) };
                        // SAFETY: copies one word between two atomics, and changes nothing else; DF is clear.
                        unsafe {
                            asm!("movsq", inout("rsi") from.as_ptr() => _, inout("rdi") to.as_ptr() => _,
                                options(nostack, preserves_flags));
                        }
                    }
                    // SAFETY: the word is in the two pages, and is used here only; the only change is addition.
                    _ => unsafe {
                        asm!("lock add qword ptr [{word}], 1", word = in(reg) across, options(nostack));
                    },
                }
                turn += 1;
                count += 1;
            }
        }
        done.atomics()[team.index() * PER_PAGE].store(count, Ordering::Release);
    });
    let counts = (0..team.count()).map(|vcpu| done.atomics()[vcpu * PER_PAGE].load(Ordering::Acquire));
    let (least, most) =
        counts.clone().fold((u64::MAX, 0), |(least, most), count| (least.min(count), most.max(count)));
    let total: u64 = counts.sum();
    let value = first.load(Ordering::Acquire);
    // SAFETY: all have ended.
    let crossed = unsafe { across.read_unaligned() };
    let right = match kind {
        0 => (1..=team.count() as u64).contains(&value),
        1 => value == total,
        // Their initial values; moves create no others.
        2 => [value, second.load(Ordering::Acquire)].iter().all(|word| [1, 2].contains(word)),
        _ => crossed == total,
    };
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let fairness = least as f64 / most.max(1) as f64;
    Ok(Outcome::new("operation", total, measured)
        .verified(right && least > 0)
        .figure("kind", Figure::Word(KINDS.get(kind).copied().unwrap_or("")))
        .figure("slowest", Figure::Count(least))
        .figure("fastest", Figure::Count(most))
        .figure("fairness", Figure::Real(fairness)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;

    #[test]
    fn everybody_gets_on_and_nothing_is_lost() {
        for kind in ["kind=store", "kind=add", "kind=move", "kind=cross"] {
            right(run, NAMES, &[kind, "ms=3"]);
        }
    }
}
