//! A counter under a contended lock. The counter is read and written separately, so a violation of mutual exclusion loses counts. The
//! lock's holder also stores its index, and checks that no other vCPU overwrites it. Without data, only the lock is shared, which
//! shows its own cost: tickets show whether it came from another vCPU.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use payload_spmd::{
    Figure, Heap, Outcome, OwnPage, QueueLock, QueuePlace, Refused, Settings, Team, TicketLock,
};

/// Arguments, with defaults in parentheses:
/// - `kind` of lock: ticket or queue (ticket).
/// - `times`: acquisitions per vCPU (2000).
/// - `inside`, `outside`: pauses while the lock is held, and between two acquisitions (0, 0).
/// - `data`: shared, or none, which needs ticket locks (shared).
/// - `turns`: with data=none, whether the last holder requests the lock again only after another vCPU has (no).
pub const NAMES: &[&str] = &["kind", "times", "inside", "outside", "data", "turns"];
/// Words per page.
const PER_PAGE: usize = 512;

/// Limit of vCPUs with a queue lock.
const MAX_QUEUED_VCPUS: usize = 64;

static TICKET: OwnPage<TicketLock> = OwnPage(TicketLock::new());
static QUEUE: OwnPage<QueueLock> = OwnPage(QueueLock::new());
static PLACES: [OwnPage<QueuePlace>; MAX_QUEUED_VCPUS] =
    [const { OwnPage(QueuePlace::new()) }; MAX_QUEUED_VCPUS];

/// Runs the workload. The locks are static, so there is one run at a time.
///
/// # Errors
/// Unsuitable arguments, memory or number of vCPUs.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let queue = settings.word("kind", &["ticket", "queue"])? == 1;
    let times = settings.number("times", 2000, 1..=1 << 40)?;
    let bare = settings.word("data", &["shared", "none"])? == 1;
    if bare && queue {
        return Err(Refused::Other("data=none: only tickets show who had the lock; leave kind=queue out"));
    }
    let turns = settings.word("turns", &["no", "yes"])? == 1;
    if turns && !bare {
        return Err(Refused::Other(
            "turns=yes: only where nothing but the lock is shared; give data=none, too",
        ));
    }
    let inside = settings.number("inside", 0, 0..=1 << 32)?;
    let outside = settings.number("outside", 0, 0..=1 << 32)?;
    if team.count() > MAX_QUEUED_VCPUS {
        return Err(Refused::Vcpus {
            what: "The lock's queue",
            least: 1,
            most: MAX_QUEUED_VCPUS,
            count: team.count(),
        });
    }
    // The counter, the current holder, and the last holder, on a page without the lock.
    let counters = heap.array::<AtomicU64>(3)?;
    let intrusions = heap.array::<AtomicU32>(1)?;
    let [counter, owner, last] = counters.atomics() else { return Err(Refused::Other("No counters")) };
    let me = team.index() as u64 + 1;
    // Number of hand-offs from another vCPU; only the holder counts.
    let handed = heap.array::<AtomicU64>(1)?;
    let critical = || {
        if owner.swap(me, Ordering::Relaxed) != 0 {
            intrusions.atomics()[0].fetch_add(1, Ordering::Relaxed);
        }
        let old = counter.load(Ordering::Relaxed);
        crate::pause(inside);
        counter.store(old + 1, Ordering::Relaxed);
        if last.load(Ordering::Relaxed) != me {
            last.store(me, Ordering::Relaxed);
            let hand_offs = &handed.atomics()[0];
            hand_offs.store(hand_offs.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        owner.store(0, Ordering::Relaxed);
    };
    // Without data: number of hand-offs to each vCPU, and of its acquisitions, on a page of its own.
    let alone = heap.array::<AtomicU64>(PER_PAGE * team.count())?;
    // A vCPU has finished, and requests the lock no more.
    let ended = heap.array::<AtomicU32>(1)?;
    let nanoseconds = team.measure(|| {
        let (mut after_others, mut mine, mut next) = (0, 0, None);
        for _ in 0..times {
            if bare {
                TICKET.0.with_ticket(|ticket| {
                    after_others += u64::from(next != Some(ticket));
                    next = Some(ticket.wrapping_add(1));
                    mine += 1;
                    crate::pause(inside);
                });
            } else if queue {
                QUEUE.0.with(team.index(), |vcpu| &PLACES[vcpu].0, critical);
            } else {
                TICKET.0.with(critical);
            }
            crate::pause(outside);
            // Its ticket.
            let had = next.unwrap_or(0_u32).wrapping_sub(1);
            while turns
                && team.count() > 1
                && !TICKET.0.asked_after(had)
                && ended.atomics()[0].load(Ordering::Relaxed) == 0
            {
                core::hint::spin_loop();
            }
        }
        if turns {
            ended.atomics()[0].store(1, Ordering::Relaxed);
        }
        if bare {
            let place = team.index() * PER_PAGE;
            alone.atomics()[place].store(after_others, Ordering::Release);
            alone.atomics()[place + 1].store(mine, Ordering::Release);
        }
    });
    let sum = |what: usize| -> u64 {
        (0..team.count()).map(|vcpu| alone.atomics()[vcpu * PER_PAGE + what].load(Ordering::Acquire)).sum()
    };
    let count = if bare { sum(1) } else { counter.load(Ordering::Acquire) };
    let hand_offs = if bare { sum(0) } else { handed.atomics()[0].load(Ordering::Acquire) };
    let intruders = intrusions.atomics()[0].load(Ordering::Acquire);
    Ok(Outcome::new("hand-off", hand_offs, nanoseconds)
        .verified(count == times * team.count() as u64 && intruders == 0)
        .figure("kind", Figure::Word(if queue { "queue" } else { "ticket" }))
        .figure("count", Figure::Count(count))
        .figure("intrusions", Figure::Count(intruders.into())))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;

    #[test]
    fn no_count_is_lost() {
        right(run, NAMES, &["kind=ticket", "times=100"]);
        right(run, NAMES, &["kind=queue", "times=100", "inside=3", "outside=5"]);
        right(run, NAMES, &["data=none", "times=100", "outside=5"]);
        right(run, NAMES, &["data=none", "turns=yes", "times=100"]);
    }
}
