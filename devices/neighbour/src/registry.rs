//! A neighbourhood: its members, their slots, who may see whom, and what is to happen when one comes, hangs or goes.
//!
//! A *view* is what one member has of another: the window of its RAM and the segment of their pair, under one epoch. Views of
//! a pair begin together and end together; but each stays with its holder until the holder has let go of it or is gone itself, and
//! the pair is connected anew only after that.
//!
//! ```text
//!  both joined, both permit, both alive, no old views,
//!  the pause since their last connection is over      ──▶ Connect (epoch + 1)
//!  one dies, hangs or leaves                          ──▶ Gone, to each that still lives
//!  the holder has let go                              ──▶ Released, and if all conditions hold: Connect again
//! ```

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::heartbeat::{Heartbeat, Verdict, Watch};
use crate::pause::Pauses;
pub use crate::permit::Permit;
use crate::window::Geometry;

/// Somebody who wants to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applicant {
    /// Its VM.
    pub vm: String,
    /// Whose monitor it is, as the kernel says.
    pub uid: u32,
    /// Those whom it permits. Others don't see it, and it doesn't see others who don't permit it.
    pub permits: Vec<Permit>,
    /// The slot that it had when it was connected to an earlier registry.
    pub slot: Option<u32>,
    /// The highest epoch that it knows of; later ones only are given to it.
    pub epoch: u32,
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The peer's monitor has gone.
    Left,
    /// The peer's monitor doesn't report.
    Silent,
    /// The peer's guest doesn't run.
    Hung,
    /// This member itself was found silent or hung: its peers were told that it is dead.
    Own,
    /// One of the two has given the connection up, because the other broke the rules or its driver has gone.
    GivenUp,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "its monitor has gone",
            Self::Silent => "its monitor doesn't report",
            Self::Hung => "its guest doesn't run",
            Self::Own => "this VM itself didn't run",
            Self::GivenUp => "one of the two has given it up",
        })
    }
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make a segment for these two slots, give each the other's window and the segment.
    Connect {
        /// Slots, the lower first.
        slots: [u32; 2],
        /// Under this epoch.
        epoch: u32,
    },
    /// Tell member `to` that its connection with `peer` is over.
    Gone {
        /// Whom to tell.
        to: u32,
        /// Its peer.
        peer: u32,
        /// Under which epoch.
        epoch: u32,
        /// Why.
        reason: Reason,
    },
    /// Tell member `to` whom it and `peer` have in common: others who permit both, and are permitted by both. Either of the two
    /// may name their memory to the other (docs/design/neighbours.md). Told for each connection, and again when it changes.
    Common {
        /// Whom to tell.
        to: u32,
        /// Its peer.
        peer: u32,
        /// A bit per slot.
        slots: u64,
    },
}

/// Somebody can't join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinError {
    /// Its name is taken.
    Taken {
        /// The VM.
        vm: String,
    },
    /// No slot is left.
    Full {
        /// How many there are.
        slots: u32,
    },
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { vm } => write!(f, "VM {vm} is in this neighbourhood already; end it first"),
            Self::Full { slots } => write!(
                f,
                "All {slots} slots of the neighbourhood are taken, or dead members' memory is still in use; end a VM, or use \
                 another group"
            ),
        }
    }
}

impl core::error::Error for JoinError {}

#[derive(Debug)]
struct Member {
    vm: String,
    uid: u32,
    permits: Vec<Permit>,
    watch: Watch,
    verdict: Verdict,
}

impl Member {
    fn name(&self) -> Permit {
        Permit { vm: self.vm.clone(), uid: self.uid }
    }

    fn permits(&self, other: &Self) -> bool {
        self.permits.iter().any(|permit| permit.vm == other.vm && permit.uid == other.uid)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    epoch: u32,
    connected: bool,
    /// Which of the two, the lower slot first, still has a view.
    held: [bool; 2],
    /// Whom they have in common, as they were told.
    common: Option<u64>,
}

/// See the module. Slots are the names of members.
#[derive(Debug)]
pub struct Neighbourhood {
    geometry: Geometry,
    heartbeat: Heartbeat,
    members: BTreeMap<u32, Member>,
    /// By slots, the lower first. Kept while somebody has a view.
    pairs: BTreeMap<(u32, u32), Pair>,
    /// No connection has had a higher one.
    epoch: u32,
    /// Which VM had a slot last.
    last: BTreeMap<u32, String>,
    pauses: Pauses,
}

impl Neighbourhood {
    /// Nobody in it.
    #[must_use]
    pub const fn new(geometry: Geometry, heartbeat: Heartbeat) -> Self {
        Self {
            geometry,
            heartbeat,
            members: BTreeMap::new(),
            pairs: BTreeMap::new(),
            epoch: 0,
            last: BTreeMap::new(),
            pauses: Pauses::new(),
        }
    }

    /// Where windows lie.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Slots of the members.
    pub fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.keys().copied()
    }

    /// Whether nobody is in it and no view of it is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty() && self.pairs.is_empty()
    }

    /// What is known of a member.
    #[must_use]
    pub fn verdict(&self, slot: u32) -> Option<Verdict> {
        self.members.get(&slot).map(|member| member.verdict)
    }

    /// The epoch under which two are connected.
    #[must_use]
    pub fn connected(&self, a: u32, b: u32) -> Option<u32> {
        let pair = self.pairs.get(&(a.min(b), a.max(b)))?;
        pair.connected.then_some(pair.epoch)
    }

    /// Somebody joins; gets a slot. Call [`Neighbourhood::settle`] afterwards, when it has been told.
    ///
    /// # Errors
    /// When its VM is there already, or no slot is free.
    pub fn join(&mut self, now: Duration, applicant: Applicant) -> Result<u32, JoinError> {
        if self.members.values().any(|member| member.vm == applicant.vm) {
            return Err(JoinError::Taken { vm: applicant.vm });
        }
        let slot = self.choose_slot(&applicant).ok_or(JoinError::Full { slots: self.geometry.slots() })?;
        self.epoch = self.epoch.max(applicant.epoch);
        self.last.insert(slot, applicant.vm.clone());
        let member = Member {
            vm: applicant.vm,
            uid: applicant.uid,
            permits: applicant.permits,
            watch: Watch::new(self.heartbeat, now),
            verdict: Verdict::Alive,
        };
        self.members.insert(slot, member);
        Ok(slot)
    }

    /// The slot it had, if it is free; else one that nobody has a view of and nobody had before; else one that nobody has.
    fn choose_slot(&self, applicant: &Applicant) -> Option<u32> {
        let free = |slot: &u32| *slot < self.geometry.slots() && !self.members.contains_key(slot);
        let own = |slot: &u32| self.last.get(slot).is_none_or(|vm| *vm == applicant.vm);
        let unseen = |slot: &u32| !self.pairs.keys().any(|(a, b)| a == slot || b == slot);
        let had = self.last.iter().find(|(_, vm)| **vm == applicant.vm).map(|(slot, _)| *slot);
        let wanted = [applicant.slot.filter(own), had].into_iter().flatten();
        let mut all = 0..self.geometry.slots();
        wanted
            .into_iter()
            .find(free)
            .or_else(|| all.clone().find(|slot| free(slot) && !self.last.contains_key(slot)))
            .or_else(|| all.find(|slot| free(slot) && unseen(slot)))
    }

    /// A member's monitor has gone, and with it all views that it had.
    pub fn leave(&mut self, slot: u32) -> Vec<Action> {
        if self.members.remove(&slot).is_none() {
            return Vec::new();
        }
        let actions = self.part(slot, Reason::Left, None);
        for (&(a, b), pair) in &mut self.pairs {
            if a == slot {
                pair.held[0] = false;
            }
            if b == slot {
                pair.held[1] = false;
            }
        }
        self.forget();
        actions
    }

    /// A member's monitor reports its driver's number.
    pub fn report(&mut self, now: Duration, slot: u32, count: u64) {
        if let Some(member) = self.members.get_mut(&slot) {
            member.watch.report(now, count);
        }
    }

    /// A member has let go of its view of `peer` under `epoch`, or gives the connection up.
    pub fn release(&mut self, slot: u32, peer: u32, epoch: u32) -> Vec<Action> {
        let key = (slot.min(peer), slot.max(peer));
        let Some(pair) = self.pairs.get_mut(&key).filter(|pair| pair.epoch == epoch && slot != peer) else {
            return Vec::new();
        };
        let mut actions = Vec::new();
        pair.held[usize::from(slot > peer)] = false;
        if core::mem::take(&mut pair.connected) {
            actions.push(Action::Gone { to: peer, peer: slot, epoch, reason: Reason::GivenUp });
        }
        self.forget();
        actions
    }

    /// Looks who is alive at `now`; call it each [`Heartbeat::interval`].
    pub fn tick(&mut self, now: Duration) -> Vec<Action> {
        let mut changed = Vec::new();
        for (&slot, member) in &mut self.members {
            let verdict = member.watch.verdict(now);
            if verdict != member.verdict {
                member.verdict = verdict;
                changed.push((slot, verdict));
            }
        }
        let mut actions = Vec::new();
        for (slot, verdict) in changed {
            match verdict {
                Verdict::Alive => {}
                Verdict::Silent => actions.extend(self.part(slot, Reason::Silent, Some(Reason::Own))),
                Verdict::Hung => actions.extend(self.part(slot, Reason::Hung, Some(Reason::Own))),
            }
        }
        actions
    }

    /// Connects all who can be at `now`: both members alive, each permits the other, no views left from before, and the
    /// [pause](crate::pause) since they were connected last is over. Call it each [`Heartbeat::interval`] too: pauses end by
    /// themselves.
    pub fn settle(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        let members: Vec<u32> = self.members.keys().copied().collect();
        for (index, &a) in members.iter().enumerate() {
            for &b in members.iter().skip(index + 1) {
                let (Some(first), Some(second)) = (self.members.get(&a), self.members.get(&b)) else {
                    continue;
                };
                let alive = first.verdict == Verdict::Alive && second.verdict == Verdict::Alive;
                let permitted = first.permits(second) && second.permits(first);
                if !alive || !permitted || self.pairs.contains_key(&(a, b)) {
                    continue;
                }
                // Epochs are never used twice; after 2^32 - 1 of them no connection is made any more.
                let Some(epoch) = self.epoch.checked_add(1) else { continue };
                if !self.pauses.admit(now, first.name(), second.name()) {
                    continue;
                }
                self.epoch = epoch;
                self.pairs.insert((a, b), Pair { epoch, connected: true, held: [true; 2], common: None });
                actions.push(Action::Connect { slots: [a, b], epoch });
            }
        }
        self.tell_common(&mut actions);
        actions
    }

    /// Tells all who are connected whom they have in common, where that is news. When a member leaves, this says so before its slot
    /// is anybody else's: [`Neighbourhood::settle`] is called in between.
    fn tell_common(&mut self, actions: &mut Vec<Action>) {
        let members = &self.members;
        let agree = |a: &Member, b: &Member| a.permits(b) && b.permits(a);
        for (&(a, b), pair) in self.pairs.iter_mut().filter(|(_, pair)| pair.connected) {
            let (Some(first), Some(second)) = (members.get(&a), members.get(&b)) else { continue };
            let third = |(slot, member): (&u32, &Member)| {
                let both = *slot != a && *slot != b && agree(member, first) && agree(member, second);
                if both { 1_u64.checked_shl(*slot).unwrap_or(0) } else { 0 }
            };
            let slots = members.iter().map(third).fold(0, |all, one| all | one);
            if pair.common != Some(slots) {
                pair.common = Some(slots);
                actions.push(Action::Common { to: a, peer: b, slots });
                actions.push(Action::Common { to: b, peer: a, slots });
            }
        }
    }

    /// Ends all connections of `slot`: its peers are told `reason`, itself `own`.
    fn part(&mut self, slot: u32, reason: Reason, own: Option<Reason>) -> Vec<Action> {
        let mut actions = Vec::new();
        for (&(a, b), pair) in &mut self.pairs {
            if (a != slot && b != slot) || !core::mem::take(&mut pair.connected) {
                continue;
            }
            let peer = if a == slot { b } else { a };
            actions.push(Action::Gone { to: peer, peer: slot, epoch: pair.epoch, reason });
            if let Some(reason) = own {
                actions.push(Action::Gone { to: slot, peer, epoch: pair.epoch, reason });
            }
        }
        actions
    }

    fn forget(&mut self) {
        self.pairs.retain(|_, pair| pair.connected || pair.held != [false; 2]);
    }

    /// Those who have joined and why they see each other or not, for people.
    #[must_use]
    pub fn describe(&self) -> Vec<(u32, String, &'static str)> {
        let word = |verdict| match verdict {
            Verdict::Alive => "alive",
            Verdict::Silent => "silent",
            Verdict::Hung => "hung",
        };
        self.members
            .iter()
            .map(|(slot, member)| (*slot, member.vm.to_string(), word(member.verdict)))
            .collect()
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
