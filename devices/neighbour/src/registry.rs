//! A neighbourhood: its members, their slots and permissions, and the actions when one joins, hangs or leaves.
//!
//! A *view* is one member's access to another: the window of its RAM and the pair's segment, under one epoch. Both views of a pair begin
//! and end together. Each stays with its holder until the holder has released it or is gone. The pair is connected again only after that.
//!
//! ```text
//!  both joined, both permit, both alive, no old views,
//!  the pause since their last connection is over      ──▶ Connect (epoch + 1)
//!  one dies, hangs or leaves                          ──▶ Gone, to each that is still alive
//!  the holder releases its view                       ──▶ Connect again, if all conditions hold
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

/// A VM that wants to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applicant {
    /// Name of its VM.
    pub vm: String,
    /// User of its monitor, as the kernel reports.
    pub uid: u32,
    /// VMs that it permits. A member sees another only if each permits the other.
    pub permits: Vec<Permit>,
    /// The slot that it had in an earlier registry.
    pub slot: Option<u32>,
    /// The highest epoch that it knows. Its connections get later ones.
    pub epoch: u32,
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The peer's monitor has ended.
    Left,
    /// The peer's monitor doesn't report.
    Silent,
    /// The peer's guest hangs.
    Hung,
    /// This member itself was silent or hung, and its peers were notified of its death.
    Own,
    /// One of the two has ended the connection, because of a violation or because its driver was unloaded.
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

/// An action for the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Create a segment for two slots. Send each member the other's window and the segment.
    Connect {
        /// Slots, the lower first.
        slots: [u32; 2],
        /// Epoch of the connection.
        epoch: u32,
    },
    /// Notify member `to` that its connection with `peer` has ended.
    Gone {
        /// Slot of the member to notify.
        to: u32,
        /// Slot of its peer.
        peer: u32,
        /// Epoch of the connection.
        epoch: u32,
        /// Why it ended.
        reason: Reason,
    },
    /// Notify member `to` of the members that it and `peer` both may read: those that permit both, and that both permit. Each of the two
    /// may name their memory to the other (docs/design/neighbours.md). Sent for each connection, and again after changes.
    Common {
        /// Slot of the member to notify.
        to: u32,
        /// Slot of its peer.
        peer: u32,
        /// A bit per slot.
        slots: u64,
    },
}

/// Why a VM can't join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinError {
    /// A member has its name.
    Taken {
        /// Name of the VM.
        vm: String,
    },
    /// No slot is free.
    Full {
        /// Number of slots.
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
    /// Whether each of the two, the lower slot first, has a view.
    held: [bool; 2],
    /// The members that both may read, as last sent to them.
    common: Option<u64>,
}

/// A neighbourhood. Members are identified by their slots.
#[derive(Debug)]
pub struct Neighbourhood {
    geometry: Geometry,
    heartbeat: Heartbeat,
    members: BTreeMap<u32, Member>,
    /// Pairs by slots, the lower first. Kept while one of the two has a view.
    pairs: BTreeMap<(u32, u32), Pair>,
    /// The highest epoch so far.
    epoch: u32,
    /// The VM that last had each slot.
    last: BTreeMap<u32, String>,
    pauses: Pauses,
}

impl Neighbourhood {
    /// A neighbourhood without members.
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

    /// Geometry of the windows.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Slots of the members.
    pub fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.keys().copied()
    }

    /// Whether there are no members and no views.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty() && self.pairs.is_empty()
    }

    /// State of a member.
    #[must_use]
    pub fn verdict(&self, slot: u32) -> Option<Verdict> {
        self.members.get(&slot).map(|member| member.verdict)
    }

    /// The epoch of the connection of two members, if they are connected.
    #[must_use]
    pub fn connected(&self, a: u32, b: u32) -> Option<u32> {
        let pair = self.pairs.get(&(a.min(b), a.max(b)))?;
        pair.connected.then_some(pair.epoch)
    }

    /// Adds a member and returns its slot. Call [`Neighbourhood::settle`] afterwards, when the member knows its slot.
    ///
    /// # Errors
    /// If a member has its name, or no slot is free.
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

    /// The slot that the VM had, if free; else a free one that no VM had; else a free one without views.
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

    /// Removes a member whose monitor has ended, with all its views.
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

    /// Records a report of a member's monitor with its driver's count.
    pub fn report(&mut self, now: Duration, slot: u32, count: u64) {
        if let Some(member) = self.members.get_mut(&slot) {
            member.watch.report(now, count);
        }
    }

    /// A member releases its view of `peer` under `epoch`, or ends the connection.
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

    /// Checks which members are alive at `now`. To be called once per [`Heartbeat::interval`].
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

    /// Connects all pairs that can be connected at `now`. Both members must be alive and permit each other. No old views and no
    /// [pause](crate::pause) may be left. To be called once per [`Heartbeat::interval`], too, since pauses end without an event.
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
                // Epochs are never reused. After 2^32 - 1 of them no more connections are made.
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

    /// Notifies connected members of changes of the members that they both may read. When a member leaves, this happens before its slot is
    /// reused, since [`Neighbourhood::settle`] is called in between.
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

    /// Ends all connections of `slot`. Its peers get `reason`, and the member itself `own`.
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

    /// Slots, names and states of all members, for reports.
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
