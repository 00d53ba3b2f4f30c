//! A counter under a lock that all vCPUs contend for. The counter is read and written apart, so that whoever gets in unduly loses
//! counts; who is inside says so, and looks whether somebody else did.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use payload_spmd::{
    Figure, Heap, Outcome, OwnPage, QueueLock, QueuePlace, Refused, Settings, Team, TicketLock,
};

/// `kind`: ticket or queue; `times`: per vCPU (2000); `inside` and `outside`: pauses in and between (0, 0).
pub const NAMES: &[&str] = &["kind", "times", "inside", "outside"];

/// vCPUs that can queue.
const MOST: usize = 64;

static TICKET: OwnPage<TicketLock> = OwnPage(TicketLock::new());
static QUEUE: OwnPage<QueueLock> = OwnPage(QueueLock::new());
static PLACES: [OwnPage<QueuePlace>; MOST] = [const { OwnPage(QueuePlace::new()) }; MOST];

/// Runs it. The locks are the program's, so there is one run at a time.
///
/// # Errors
/// Arguments, memory or a number of vCPUs that don't do.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let queue = settings.word("kind", &["ticket", "queue"])? == 1;
    let times = settings.number("times", 2000, 1..=1 << 40)?;
    let inside = settings.number("inside", 0, 0..=1 << 32)?;
    let outside = settings.number("outside", 0, 0..=1 << 32)?;
    if team.count() > MOST {
        return Err(Refused::Vcpus { what: "The lock's queue", least: 1, most: MOST, count: team.count() });
    }
    // The counter, who is inside, and who was last, on a page that the lock isn't on.
    let counters = heap.array::<AtomicU64>(3)?;
    let intrusions = heap.array::<AtomicU32>(1)?;
    let [counter, owner, last] = counters.atomics() else { return Err(Refused::Other("No counters")) };
    let me = team.index() as u64 + 1;
    // How often the lock came from another vCPU; only the holder counts.
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
    let nanoseconds = team.measure(|| {
        for _ in 0..times {
            if queue {
                QUEUE.0.with(team.index(), |vcpu| &PLACES[vcpu].0, critical);
            } else {
                TICKET.0.with(critical);
            }
            crate::pause(outside);
        }
    });
    let count = counter.load(Ordering::Acquire);
    let intruders = intrusions.atomics()[0].load(Ordering::Acquire);
    Ok(Outcome::new("hand-off", handed.atomics()[0].load(Ordering::Acquire), nanoseconds)
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
    }
}
