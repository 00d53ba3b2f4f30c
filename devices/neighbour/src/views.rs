//! Whose addresses a message may name, and how long their memory is kept: what a pipeline of VMs needs.
//!
//! ```text
//!  origin (slot 1) ── {address in window 1} ──▶ middle (slot 2) ── the same address ──▶ end (slot 3)
//!     ▲                                           │ holds window 1                       │ holds window 1
//!     └────────── completion ─────────────────────┘◀─────────── completion ──────────────┘
//! ```
//!
//! **The rule: a VM may name what it may read itself.** A part of a message lies
//! 1. in its sender's own window, or
//! 2. in the window of a third member that both the sender and the receiver are connected with by permission: the registry
//!    tells each of a pair whom they have in *common*, so that nobody reaches through a neighbour what he may not read
//!    himself (a storage VM told to write out memory of a VM that the sender can't see would give it to the sender).
//!
//! Whether the receiver has the third's window mapped at this moment is another question: the third may have died a moment ago,
//! and the sender need not know yet. Such a message breaks no rule. It is received, its parts can't be used
//! ([`Owner::Unreachable`]), and its receiver completes it with [`STATUS_UNREACHABLE`]; the sender may send a copy then.
//!
//! **Lifetime.** A message holds every window that its parts lie in, from [`Views::receive`] to [`Views::complete`]. A window
//! whose owner has gone is not released before ([`Views::releasable`]), so that what a pipeline still reads never faults,
//! and the owner's new connection begins only after it. A VM in the middle completes what it has received only when what it sent on
//! has come back: each hop holds for itself, and a buffer is free when the completion has travelled all the way back.

use crate::channel::{Message, Part, Receiver, Violation};
use crate::window::{MAX_SLOTS, Window};
use crate::words::Words;

const SLOTS: usize = MAX_SLOTS as usize;

/// Completion status of a message whose parts lie in a window that its receiver doesn't have: the one status that isn't the
/// users' own.
pub const STATUS_UNREACHABLE: u32 = 0xffff_0003;

/// Where a part of a message lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// RAM of the member in this slot, which may be read.
    Slot(u32),
    /// In the window of a third member which isn't mapped here, or which the two don't have in common.
    Unreachable,
    /// Nobody's memory, or not the RAM of whom it seems to belong to.
    Nobody,
}

/// Who may name what.
pub trait Names {
    /// Where `part` lies, and whether it may be named.
    fn owner(&self, part: Part) -> Owner;
}

/// Without a pipeline: only this window may be named.
impl Names for Window {
    #[inline]
    fn owner(&self, part: Part) -> Owner {
        match self.local(part.address, part.length) {
            Some(_) => Owner::Slot(self.slot()),
            None => Owner::Nobody,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct View {
    window: Window,
    epoch: u32,
    gone: bool,
    /// Messages that hold it.
    holds: u32,
}

/// The windows that one VM has, and the messages that hold them.
#[derive(Debug)]
pub struct Views {
    views: [Option<View>; SLOTS],
    /// By peer: the slots that it and this VM have in common.
    common: [u64; SLOTS],
}

impl Default for Views {
    fn default() -> Self {
        Self::new()
    }
}

impl Views {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self { views: [None; SLOTS], common: [0; SLOTS] }
    }

    fn view(&self, slot: u32) -> Option<&View> {
        self.views.get(slot as usize)?.as_ref()
    }

    /// A window is mapped. False, and nothing changes, when the slot's last one has not been released.
    #[must_use]
    pub fn mapped(&mut self, window: Window, epoch: u32) -> bool {
        let Some(place @ None) = self.views.get_mut(window.slot() as usize) else { return false };
        *place = Some(View { window, epoch, gone: false, holds: 0 });
        true
    }

    /// The registry says whom this VM and `peer` have in common: a bit per slot.
    pub fn common(&mut self, peer: u32, slots: u64) {
        if let Some(place) = self.common.get_mut(peer as usize) {
            *place = slots;
        }
    }

    /// The connection of `slot` is over: from now on nobody names its memory. What is held stays.
    pub fn gone(&mut self, slot: u32, epoch: u32) {
        if let Some(Some(view)) = self.views.get_mut(slot as usize)
            && view.epoch == epoch
        {
            view.gone = true;
        }
    }

    /// The epoch of `slot`'s window, if its connection is over and nothing holds it.
    #[must_use]
    pub fn releasable(&self, slot: u32) -> Option<u32> {
        self.view(slot).filter(|view| view.gone && view.holds == 0).map(|view| view.epoch)
    }

    /// The window is taken away. False, and nothing changes, when it isn't [`Views::releasable`].
    #[must_use]
    pub fn released(&mut self, slot: u32) -> bool {
        let free = self.releasable(slot).is_some();
        if free && let Some(place) = self.views.get_mut(slot as usize) {
            *place = None;
        }
        free
    }

    /// How many messages hold the window of `slot`.
    #[must_use]
    pub fn holds(&self, slot: u32) -> u32 {
        self.view(slot).map_or(0, |view| view.holds)
    }

    /// What may be named in messages from `sender`.
    #[must_use]
    pub const fn from(&self, sender: u32) -> Incoming<'_> {
        Incoming { views: self, sender }
    }

    /// What this VM, whose window is `own`, may name in messages to `peer`. Memory of others is named only while a received message
    /// holds it; a window whose owner has gone may still be named then, and the peer decides.
    #[must_use]
    pub const fn to(&self, peer: u32, own: Window) -> Outgoing<'_> {
        Outgoing { views: self, peer, own }
    }

    fn third(&self, peer: u32, part: Part) -> Option<(u32, &View)> {
        let mut all = (0..).zip(&self.views);
        let (slot, view) = all.find_map(|(slot, view): (u32, _)| {
            let view = view.as_ref()?;
            view.window.local(part.address, part.length).map(|_| (slot, view))
        })?;
        let common = self.common.get(peer as usize)?;
        (common.checked_shr(slot).unwrap_or(0) & 1 == 1).then_some((slot, view))
    }

    /// Takes the next message from `sender` into `message`, and holds what it names; false when there is none. Each that is
    /// received is given to [`Views::complete`] once; one that is [`Message::unreachable`] at once, with [`STATUS_UNREACHABLE`].
    ///
    /// # Errors
    /// When the peer broke the rules; the same is found again then.
    pub fn receive(
        &mut self,
        receiver: &mut Receiver,
        sender: u32,
        words: &(impl Words + ?Sized),
        message: &mut Message,
    ) -> Result<bool, Violation> {
        let got = receiver.receive_by(words, &self.from(sender), message)?;
        if got {
            self.each(message.owners(), |view| view.holds = view.holds.saturating_add(1));
        }
        Ok(got)
    }

    /// Gives a message's buffers back, and lets go of what it held.
    pub fn complete(
        &mut self,
        receiver: &mut Receiver,
        words: &(impl Words + ?Sized),
        message: &Message,
        status: u32,
    ) {
        receiver.complete(words, message.id, status);
        self.let_go(message);
    }

    /// Lets go of what a message held whose connection is over: nobody waits for its completion.
    pub fn let_go(&mut self, message: &Message) {
        self.each(message.owners(), |view| view.holds = view.holds.saturating_sub(1));
    }

    fn each(&mut self, slots: u64, act: impl Fn(&mut View)) {
        for (slot, view) in (0..).zip(&mut self.views) {
            if slots.checked_shr(slot).unwrap_or(0) & 1 == 1
                && let Some(view) = view
            {
                act(view);
            }
        }
    }
}

/// See [`Views::from`].
#[derive(Debug, Clone, Copy)]
pub struct Incoming<'a> {
    views: &'a Views,
    sender: u32,
}

impl Names for Incoming<'_> {
    #[inline]
    fn owner(&self, part: Part) -> Owner {
        // Nearly always the sender's own.
        let Some(direct) = self.views.view(self.sender) else { return Owner::Nobody };
        if direct.window.local(part.address, part.length).is_some() {
            return Owner::Slot(self.sender);
        }
        match self.views.third(self.sender, part) {
            Some((slot, view)) if !view.gone => Owner::Slot(slot),
            _ if direct.window.could_be_of_another(part.address, part.length) => Owner::Unreachable,
            _ => Owner::Nobody,
        }
    }
}

/// See [`Views::to`].
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    views: &'a Views,
    peer: u32,
    own: Window,
}

impl Names for Outgoing<'_> {
    #[inline]
    fn owner(&self, part: Part) -> Owner {
        if self.own.local(part.address, part.length).is_some() {
            return Owner::Slot(self.own.slot());
        }
        match self.views.third(self.peer, part) {
            Some((slot, view)) if view.holds > 0 => Owner::Slot(slot),
            _ if self.own.could_be_of_another(part.address, part.length) => Owner::Unreachable,
            _ => Owner::Nobody,
        }
    }
}

#[cfg(test)]
#[path = "views_tests.rs"]
mod tests;
