//! vCPU 0 writes messages, all others read each of them.
//!
//! `kind=watch`: a page with a number and data that depends on it. Consumers poll; they must never see data that is older than a
//! number read before, nor a decreasing number. `kind=ring`: a ring with a count of messages read per consumer; each message must
//! arrive intact.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{Figure, Heap, Outcome, Refused, Settings, Shared, Team};

/// `kind`: watch or ring; `messages` (2000); `words`: 8-byte words per message, without its number (1); `slots` of the ring (16);
/// `pace`: pauses between messages (0).
pub const NAMES: &[&str] = &["kind", "messages", "words", "slots", "pace"];

/// Words per page.
const PER_PAGE: usize = 512;

/// Returns word `word` of message `number`.
fn content(number: u64, word: usize) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ word as u64
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments, memory or number of vCPUs.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let ring = settings.word("kind", &["watch", "ring"])? == 1;
    let messages = settings.number("messages", 2000, 1..=1 << 40)?;
    let words = settings.size("words", 1, 1..=4096)?;
    let slots = settings.size("slots", 16, 1..=1 << 16)?;
    let pace = settings.number("pace", 0, 0..=1 << 32)?;
    if team.count() < 2 {
        let what = "A producer with consumers";
        return Err(Refused::Vcpus { what, least: 2, most: 254, count: team.count() });
    }
    // Number and content of the watched message, or of each slot.
    let stride = 1 + words;
    let slots = if ring { slots } else { 1 };
    let data = heap.array::<AtomicU64>(slots * stride)?;
    // Each consumer's progress and its number of errors, on a page of its own.
    let read = heap.array::<AtomicU64>(PER_PAGE * team.count())?;
    let wrong = heap.array::<AtomicU64>(PER_PAGE * team.count())?;

    let nanoseconds = team.measure(|| match (team.leads(), ring) {
        (true, true) => produce(team, &data, &read, messages, slots, words, pace),
        (true, false) => write(&data, messages, words, pace),
        (false, _) => {
            let mine = team.index() * PER_PAGE;
            let bad = if ring {
                consume(&data, &read.atomics()[mine], messages, slots, words)
            } else {
                watch(&data, &read.atomics()[mine], messages, words)
            };
            wrong.atomics()[mine].store(bad, Ordering::Release);
        }
    });
    let consumers = (1..team.count()).map(|vcpu| vcpu * PER_PAGE);
    let sum = |array: &Shared<AtomicU64>| -> u64 {
        consumers.clone().map(|at| array.atomics()[at].load(Ordering::Acquire)).sum()
    };
    let (seen, bad) = (sum(&read), sum(&wrong));
    let complete = !ring || seen == messages * (team.count() as u64 - 1);
    Ok(Outcome::new("message", messages, nanoseconds)
        .verified(bad == 0 && seen > 0 && complete)
        .figure("kind", Figure::Word(if ring { "ring" } else { "watch" }))
        .figure("bytes", Figure::Count(words as u64 * 8))
        .figure("seen", Figure::Count(seen))
        .figure("wrong", Figure::Count(bad)))
}

/// Writes the words from last to first, then the number.
fn write(data: &Shared<AtomicU64>, messages: u64, words: usize, pace: u64) {
    let data = data.atomics();
    for number in 1..=messages {
        for word in 0..words {
            // The content is the number itself, so that later messages are distinguishable from earlier ones.
            data[1 + word].store(number, Ordering::Release);
        }
        data[0].store(number, Ordering::Release);
        crate::pause(pace);
    }
}

/// Polls until the last number arrives. Counts the different messages it saw; returns the number of violations.
fn watch(data: &Shared<AtomicU64>, seen: &AtomicU64, messages: u64, words: usize) -> u64 {
    let data = data.atomics();
    let (mut last, mut wrong, mut different) = (0, 0, 0);
    while last < messages {
        let number = data[0].load(Ordering::Acquire);
        wrong += u64::from(number < last);
        if number == last {
            spin_loop();
            continue;
        }
        different += 1;
        last = number;
        for word in 0..words {
            wrong += u64::from(data[1 + word].load(Ordering::Acquire) < number);
        }
    }
    seen.store(different, Ordering::Release);
    wrong
}

/// Fills slots that all consumers have read.
fn produce(
    team: &Team<'_>,
    data: &Shared<AtomicU64>,
    read: &Shared<AtomicU64>,
    messages: u64,
    slots: usize,
    words: usize,
    pace: u64,
) {
    for number in 1..=messages {
        let slot = slot_of(number, slots, words);
        for vcpu in 1..team.count() {
            let reader = &read.atomics()[vcpu * PER_PAGE];
            while reader.load(Ordering::Acquire) + (slots as u64) < number {
                spin_loop();
            }
        }
        let slot = &data.atomics()[slot..=slot + words];
        for (word, place) in slot[1..].iter().enumerate() {
            place.store(content(number, word), Ordering::Relaxed);
        }
        slot[0].store(number, Ordering::Release);
        crate::pause(pace);
    }
}

/// Reads all messages in order; returns the number of wrong words.
fn consume(data: &Shared<AtomicU64>, read: &AtomicU64, messages: u64, slots: usize, words: usize) -> u64 {
    let mut wrong = 0;
    for number in 1..=messages {
        let slot = slot_of(number, slots, words);
        let slot = &data.atomics()[slot..=slot + words];
        while slot[0].load(Ordering::Acquire) != number {
            spin_loop();
        }
        for (word, place) in slot[1..].iter().enumerate() {
            wrong += u64::from(place.load(Ordering::Relaxed) != content(number, word));
        }
        read.store(number, Ordering::Release);
    }
    wrong
}

fn slot_of(number: u64, slots: usize, words: usize) -> usize {
    usize::try_from((number - 1) % slots as u64).unwrap_or(0) * (1 + words)
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use payload_spmd::{Figure, Refused};

    #[test]
    fn messages_arrive_whole_and_in_order() {
        for arguments in [["kind=ring", "messages=300", "words=3"], ["kind=watch", "messages=300", "words=3"]]
        {
            for count in [2, 3] {
                let outcome = crate::testing::run(run, NAMES, count, &arguments).unwrap();
                assert!(outcome.verified, "{outcome:?}");
                if arguments[0] == "kind=ring" {
                    assert_eq!(outcome.get("seen"), Some(Figure::Count(300 * (count as u64 - 1))));
                }
            }
        }
        let refused = crate::testing::run(run, NAMES, 1, &[]).unwrap_err();
        assert!(matches!(refused, Refused::Vcpus { least: 2, .. }));
    }
}
