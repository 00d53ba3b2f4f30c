//! When a program doesn't pay on several nodes: a decision from numbers alone.
//!
//! Every node tells, some times per second, what its vCPUs have spent their time with: running ([`Told::ran`]), spinning ([`Told::spun`]: running, but only to see
//! whether somebody else has come), waiting for pages that they had had before, for trapped stores, or for a processor that serves memory instead ([`Told::waited`]), or for pages that they never had
//! ([`Told::first`]). Time in which the host had them do none of these doesn't count: that is no matter of the program's; an interval lasts the longer the less is known of it. Nor do waits for
//! first pages: they are over some day, and how the program does then is seen from the rest of the time.
//!
//! Of each interval, in vCPUs, with a node's shares of the time that counts times its vCPUs, summed over nodes:
//!
//! ```text
//! done = ran                                                    what gets done here
//! back = min(waited + spun, waited * vcpus)                     what would be done besides if nobody waited: one that waits keeps all others spinning, at the most
//! alone = min(vcpus of node 0, done + back)                     what would be done on node 0
//! ```
//!
//! What is lost to `0.9 * alone`, for as much of the interval as counts on each node, is added up, and what is gained over `0.9 * vcpus of node 0` taken off, to nothing at the least. A third of what
//! moving costs, which is some 50 ms of each of node 0's vCPUs (10 ms of standing still, page tables and caches), decides, or half of it where all of it comes from one interval: a wrong move costs about
//! four times what was needed, but programs that pay stay far from it (those of the benchmarks lose 3 ms at the most), while those that don't would lose the rest each time. One that loses nearly all is
//! brought together within 50 ms, one that loses little after as much longer. What a program has gained before, clearly more than
//! node 0 alone would do, it may lose again, up to 0.25 s: one that exchanges much at the end of each of its steps pays, though it loses for a moment. Where nobody waits for pages nothing is lost,
//! however much is spun: a move would change nothing.

/// Length of an interval, nanoseconds, at the least.
const INTERVAL: u64 = 20_000_000;
/// An interval lasts so long at the most, nanoseconds, and counts for as long at the most: nodes that stood still for a checkpoint have told nothing for as long.
const LONGEST: u64 = 200_000_000;
/// Until then it lasts until each node has accounted for one part in so many of its vCPUs' time: from a moment in which the host gave them next to nothing, nothing follows.
const KNOWN: u64 = 4;
/// Loss that decides, for each of node 0's vCPUs, in nanoseconds of a vCPU, when it comes from more than one interval.
const ENOUGH: i128 = 15_000_000;
/// The same for a single interval, of which what they were found to spin counts as work: a program may begin with one that is all exchange, and what is seen at one moment may stand for a tenth of a second.
const SUDDEN: i128 = 25_000_000;
/// Gain that later losses are set against, for each of node 0's vCPUs, in nanoseconds of a vCPU, at the most: a program that stops paying is still brought together.
const CREDIT: i128 = 250_000_000;
/// In thousandths: what of node 0's work alone has to be done for nothing to be lost. Moving isn't worth the rest.
const LOW: i128 = 900;
/// The same from which a gain is kept: not from parts in which one vCPU works and the others wait for it.
const HIGH: i128 = 1_100;
const WHOLE: i128 = 1_000;
const WHOLES: i128 = WHOLE * WHOLE * WHOLE;

/// What a node's vCPUs have spent their time with so far, all together. All but `vcpus` only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::dsm) struct Told {
    /// When, nanoseconds of the node's own clock.
    pub(in crate::dsm) at: u64,
    /// Nanoseconds that they have had a processor, without those of `spun`.
    pub(in crate::dsm) ran: u64,
    /// Nanoseconds that they have had a processor to spin.
    pub(in crate::dsm) spun: u64,
    /// Nanoseconds that they have waited for pages that they had had before, for trapped stores, and for a processor that served memory.
    pub(in crate::dsm) waited: u64,
    /// Nanoseconds that they have waited for pages that they had never had.
    pub(in crate::dsm) first: u64,
    /// vCPUs that haven't ended.
    pub(in crate::dsm) vcpus: u32,
}

impl Told {
    /// As it goes over a link: time, ran, spun, waited, first, vCPUs; 8 bytes each, little-endian.
    pub(in crate::dsm) fn to_bytes(self) -> [u8; 48] {
        let mut bytes = [0; 48];
        let words = [self.at, self.ran, self.spun, self.waited, self.first, self.vcpus.into()];
        for (into, word) in bytes.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` when it isn't that.
    pub(in crate::dsm) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let [at, ran, spun, waited, first, vcpus] =
            <[[u8; 8]; 6]>::try_from(words).ok()?.map(u64::from_le_bytes);
        Some(Self { at, ran, spun, waited, first, vcpus: u32::try_from(vcpus).ok()? })
    }

    /// Time of which it is known what it was spent with.
    pub(in crate::dsm) fn known(&self) -> u64 {
        [self.ran, self.spun, self.waited, self.first].into_iter().fold(0, u64::saturating_add)
    }

    /// Whether it is known what a good part of the time up to another moment was spent with.
    fn accounts_for(&self, after: &Self) -> bool {
        let all = |told: &Self| -> u128 {
            [told.ran, told.spun, told.waited, told.first].into_iter().map(u128::from).sum()
        };
        let whole = u128::from(after.at - self.at) * u128::from(after.vcpus);
        (all(after) - all(self)) * u128::from(KNOWN) >= whole
    }

    /// Whether this may be what a node tells some time after the other.
    fn follows(&self, before: &Self) -> bool {
        let pairs = [
            (self.at, before.at),
            (self.ran, before.ran),
            (self.spun, before.spun),
            (self.waited, before.waited),
            (self.first, before.first),
        ];
        self.vcpus == before.vcpus && pairs.iter().all(|(now, then)| now >= then)
    }
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::dsm) enum Decision {
    /// The program stays where it is.
    Stay,
    /// It is to be brought together on node 0.
    Gather,
}

/// Watches all nodes of a VM. On node 0.
#[derive(Debug, Clone)]
pub(in crate::dsm) struct Watch {
    /// Per node: at the beginning of the interval, and the latest.
    nodes: Vec<Option<(Told, Told)>>,
    /// What has been lost, nanoseconds of a vCPU in billionths. Below zero: what may be.
    lost: i128,
    /// What was found in the interval before, for people.
    last: Found,
}

/// What an interval has shown, in thousandths of a vCPU, of all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::dsm) struct Found {
    /// Of the time that isn't waited for first pages: what gets done,
    pub(in crate::dsm) done: u64,
    /// what waits for pages that were there before,
    pub(in crate::dsm) waited: u64,
    /// and what spins.
    pub(in crate::dsm) spun: u64,
    /// vCPUs, whole ones.
    pub(in crate::dsm) vcpus: u64,
    /// What gets done, of all time.
    gets: u64,
    /// How much of its time a node didn't wait for first pages: of the node that did so longest, in thousandths.
    counts: u64,
}

impl Default for Found {
    fn default() -> Self {
        Self { done: 0, waited: 0, spun: 0, vcpus: 0, gets: 0, counts: 1_000 }
    }
}

impl Found {
    /// A part as a share of all vCPUs, in thousandths.
    pub(in crate::dsm) fn permille(&self, part: u64) -> u64 {
        part.checked_div(self.vcpus).unwrap_or(0)
    }

    /// Adds what a node has spent its time with between two moments.
    fn add(&mut self, before: &Told, after: &Told) {
        // Differences of numbers of 64 bits, times a number of 32 bits and a thousand: 106 bits.
        let [ran, spun, waited, first] = [
            after.ran - before.ran,
            after.spun - before.spun,
            after.waited - before.waited,
            after.first - before.first,
        ]
        .map(u128::from);
        let vcpus = u128::from(after.vcpus);
        self.vcpus += u64::from(after.vcpus);
        let counts = ran + spun + waited;
        if counts == 0 {
            // Who had no processor, and waits for nothing, would work; so would who waits for first pages only.
            self.done += u64::from(after.vcpus) * 1_000;
            if first > 0 {
                self.counts = 0;
            } else {
                self.gets += u64::from(after.vcpus) * 1_000;
            }
            return;
        }
        let share = |part: u128, all: u128| u64::try_from(part * 1_000 / all).unwrap_or(u64::MAX);
        self.done += share(ran * vcpus, counts);
        self.waited += share(waited * vcpus, counts);
        self.spun += share(spun * vcpus, counts);
        self.gets += share(ran * vcpus, counts + first);
        self.counts = self.counts.min(share(counts, counts + first));
    }

    /// What is lost to what `own` vCPUs alone would do, in billionths of a vCPU.
    fn loss(&self, own: u32) -> i128 {
        let [done, waited, spun] = [self.done, self.waited, self.spun].map(i128::from);
        let back = (waited + spun).min(waited * i128::from(self.vcpus));
        let alone = (i128::from(own) * WHOLE).min(done + back);
        (alone * LOW - done * WHOLE).max(0) * i128::from(self.counts)
    }

    /// The same if who was found to spin had worked: how long they wait is known, what they do otherwise was seen at some moments.
    fn certain_loss(&self, own: u32) -> i128 {
        Self { done: self.done.saturating_add(self.spun), spun: 0, ..*self }.loss(own)
    }

    /// What is gained over so many thousandths of what `own` vCPUs alone can do, in billionths of a vCPU.
    fn gain(&self, own: u32, over: i128) -> i128 {
        (i128::from(self.gets) * WHOLE - i128::from(own) * WHOLE * over).max(0) * WHOLE
    }
}

impl Watch {
    pub(in crate::dsm) fn new(nodes: u8) -> Self {
        Self { nodes: vec![None; usize::from(nodes)], lost: 0, last: Found::default() }
    }

    /// What the last interval has shown.
    pub(in crate::dsm) fn last(&self) -> Found {
        self.last
    }

    /// A node has told what its vCPUs have spent their time with.
    pub(in crate::dsm) fn told(&mut self, node: u8, told: Told) -> Decision {
        let Some(known) = self.nodes.get_mut(usize::from(node)) else { return Decision::Stay };
        match known {
            Some((_, last)) if told.follows(last) => *last = told,
            // A clock that goes back, or waits that shrink, are nobody's; and who has other vCPUs begins anew.
            _ => *known = Some((told, told)),
        }
        let Some((found, time)) = self.found() else { return Decision::Stay };
        let own = self.nodes.first().and_then(|known| *known).map_or(0, |(_, last)| last.vcpus);
        for (first, last) in self.nodes.iter_mut().flatten() {
            *first = *last;
        }
        self.judge(found, own, time)
    }

    /// What has been found and how long the interval was, nanoseconds, when all nodes have told enough.
    fn found(&self) -> Option<(Found, u64)> {
        let mut found = Found::default();
        let mut time = LONGEST;
        for known in &self.nodes {
            let (first, last) = (*known)?;
            let its = last.at - first.at;
            if its < INTERVAL || (its < LONGEST && !first.accounts_for(&last)) {
                return None;
            }
            time = time.min(its);
            found.add(&first, &last);
        }
        Some((found, time))
    }

    fn judge(&mut self, found: Found, own: u32, time: u64) -> Decision {
        self.last = found;
        // Nobody to bring it to, or nothing to bring together.
        if own == 0 || u64::from(own) == found.vcpus {
            self.lost = 0;
            return Decision::Stay;
        }
        let (time, before) = (i128::from(time), self.lost);
        self.lost += found.loss(own) * time;
        if self.lost > 0 {
            self.lost = (self.lost - found.gain(own, LOW) * time).max(0);
        } else {
            self.lost = (self.lost - found.gain(own, HIGH) * time).max(-CREDIT * WHOLES * i128::from(own));
        }
        let (counts, enough) = match before {
            1.. => (self.lost, ENOUGH),
            // A moment at which all happened to spin decides nothing by itself: it has them looked at more often.
            _ => (self.lost.min(before + found.certain_loss(own) * time), SUDDEN),
        };
        if counts >= enough * WHOLES * i128::from(own) { Decision::Gather } else { Decision::Stay }
    }
}

#[cfg(test)]
mod tests;
