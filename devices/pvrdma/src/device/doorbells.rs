//! Doorbells (sections 10 and 14). Where UAR pages are memory, a word is only a dirty flag with a hint in it: an exchange with 0,
//! then a look at all queues of the context, finds every request that was posted before, and a later doorbell leaves the word
//! non-zero again.
//!
//! The guest's CPUs store to the line of these words with each post and each empty poll, and each look takes it away from them, an
//! exchange even to be written. So a busy device is looked at a million times a second, not with each poll, since its active queues
//! are looked at anyway; and an exchange is left out where it would tell nothing: of a poll, which obliges to nothing, and of a
//! post to a queue pair that is active. That word stays, keeps asking for scans, and is exchanged when the queue pair has become idle.

use dma::Dma;
use hca::Engine;
use hca::names::{ContextHandle, CqHandle, QpHandle, SrqHandle};
use hca::work::Arm;

use super::{Device, Phase};
use crate::abi::PAGE;
use crate::abi::doorbells::{
    CQ, CQ_ARM, CQ_ARM_SOLICITED, HANDLE, QP, QP_RECEIVE, QP_SEND, SRQ, SRQ_RECEIVE,
};
use crate::provider::Pvrdma;

/// Between two looks at the doorbells of a device with active queue pairs, nanoseconds: what a queue that becomes active waits longer.
const LOOK_INTERVAL: u64 = 1_000;
/// Between two exchanges of words that only say that the guest polls, nanoseconds. They keep doorbells in memory, which is decided
/// over milliseconds.
const POLL_INTERVAL: u64 = 50_000;

/// The words of a UAR page that the guest writes.
pub const WORDS: u32 = 3;

/// UAR pages as memory that the guest writes without an exit: BAR2.
pub trait Uar {
    /// Loads word 0 (queue pairs), 1 (completion queues) or 2 (shared receive queues) of a page, with acquire order.
    fn load(&self, page: u32, word: u32) -> u32;
    /// Exchanges the word with 0, sequentially consistent: later loads of ring indices must not pass it.
    fn swap(&self, page: u32, word: u32) -> u32;
}

/// BAR2 as memory that begins at address 0.
impl<M: Dma> Uar for M {
    #[inline]
    fn load(&self, page: u32, word: u32) -> u32 {
        self.load_u32(u64::from(page) * PAGE + u64::from(word) * 4).unwrap_or(0)
    }

    #[inline]
    fn swap(&self, page: u32, word: u32) -> u32 {
        self.swap_u32(u64::from(page) * PAGE + u64::from(word) * 4, 0).unwrap_or(0)
    }
}

/// How doorbells reach the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum DoorbellMode {
    /// UAR pages are memory ([`Device::scan`]): no exits, but a value may be overwritten before it is seen, so completion queues
    /// are served by conservative notification.
    Shared,
    /// Every write is delivered ([`Device::doorbell_write`]): arming is exact.
    Trapped,
}

/// Whether a completion queues' word arms nothing.
#[inline]
const fn is_poll(value: u32) -> bool {
    value & (CQ_ARM | CQ_ARM_SOLICITED) == 0
}

/// A UAR page whose context is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LivePage {
    pub page: u32,
    pub context: ContextHandle,
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// How doorbells reach the device from now on. Switching to [`DoorbellMode::Trapped`] must be followed by one more
    /// [`Device::scan`] after the pages stopped being memory, so that nothing written meanwhile is lost.
    pub fn set_doorbells(&mut self, engine: &mut Engine<Pvrdma<M>>, mode: DoorbellMode) {
        self.mode = mode;
        engine.set_arm_exact(self.id, mode == DoorbellMode::Trapped);
        if mode == DoorbellMode::Trapped {
            self.scan_all(engine);
        }
    }

    /// How doorbells reach the device.
    #[must_use]
    pub fn doorbells(&self) -> DoorbellMode {
        self.mode
    }

    /// As [`Device::scan`], unless that was done a moment ago and queue pairs are active: then `None`.
    #[inline]
    pub fn look(&mut self, engine: &mut Engine<Pvrdma<M>>, uar: &impl Uar, now: u64) -> Option<bool> {
        if now < self.next_look && engine.has_active(self.id) {
            return None;
        }
        Some(self.scan(engine, uar, now))
    }

    /// Looks at the words of all live pages and gives the engine what they hint at. `now` is the engine's clock, nanoseconds. Whether
    /// any word says that the guest is at work. Costs one cache line per live context.
    pub fn scan(&mut self, engine: &mut Engine<Pvrdma<M>>, uar: &impl Uar, now: u64) -> bool {
        if self.phase != Phase::Active || !self.bus_master {
            return false;
        }
        self.next_look = now.saturating_add(LOOK_INTERVAL);
        let polls = now >= self.next_polls;
        if polls {
            self.next_polls = now.saturating_add(POLL_INTERVAL);
        }
        let mut any = false;
        for at in 0..self.pages.len() {
            let live = self.pages[at];
            for word in 0..WORDS {
                let seen = uar.load(live.page, word);
                if seen == 0 || (word == 1 && !polls && is_poll(seen)) {
                    continue;
                }
                if word == 0 && self.looked_at_anyway(engine, live.context, seen) {
                    any = true;
                    engine.scan_context(self.id, live.context);
                    continue;
                }
                let value = uar.swap(live.page, word);
                if value != 0 {
                    any = true;
                    self.counters.doorbells += 1;
                    self.hint(engine, live.context, word, value);
                }
            }
        }
        if now.saturating_sub(self.last_full_scan) >= self.config.full_scan_interval {
            self.last_full_scan = now;
            self.scan_all(engine);
        }
        any
    }

    /// Whether a queue pairs' word only says that something was sent from one that gets turns anyway.
    #[inline]
    fn looked_at_anyway(&self, engine: &Engine<Pvrdma<M>>, context: ContextHandle, value: u32) -> bool {
        let qp = QpHandle(value & HANDLE);
        value & !HANDLE == QP_SEND
            && engine.is_active(self.id, qp)
            && engine.context_of_qp(self.id, qp) == Some(context)
    }

    /// Has the engine look at the queues of all live contexts, in case requests were posted without a doorbell.
    pub fn scan_all(&mut self, engine: &mut Engine<Pvrdma<M>>) {
        for live in &self.pages {
            engine.scan_context(self.id, live.context);
        }
    }

    /// A sampled word: what it says is true, and others may have been there before it.
    #[inline]
    fn hint(&mut self, engine: &mut Engine<Pvrdma<M>>, context: ContextHandle, word: u32, value: u32) {
        self.ring(engine, context, word, value);
        // Overwritten values named queues of this context. Completion queue words carry no work.
        if word != 1 {
            engine.scan_context(self.id, context);
        }
    }

    #[inline]
    fn ring(&mut self, engine: &mut Engine<Pvrdma<M>>, context: ContextHandle, word: u32, value: u32) {
        let handle = value & HANDLE;
        let id = self.id;
        match word {
            0 => {
                let qp = QpHandle(handle);
                if engine.context_of_qp(id, qp) != Some(context) {
                    return;
                }
                if value & QP_SEND != 0 {
                    engine.doorbell_send(id, qp);
                }
                if value & QP_RECEIVE != 0 {
                    engine.doorbell_receive(id, qp);
                }
            }
            1 => {
                let cq = CqHandle(handle);
                let arm = if value & CQ_ARM != 0 {
                    Arm::Next
                } else if value & CQ_ARM_SOLICITED != 0 {
                    Arm::Solicited
                } else {
                    // An empty poll obliges to nothing.
                    return;
                };
                if engine.context_of_cq(id, cq) == Some(context) {
                    engine.arm_cq(id, cq, arm, &mut self.events);
                }
            }
            _ => {
                let srq = SrqHandle(handle);
                if value & SRQ_RECEIVE != 0 && engine.context_of_srq(id, srq) == Some(context) {
                    engine.doorbell_srq(id, srq);
                }
            }
        }
    }

    /// A trapped 32-bit write to BAR2 at `offset`. Handles of other contexts than the page's are ignored.
    pub fn doorbell_write(&mut self, engine: &mut Engine<Pvrdma<M>>, offset: u64, value: u32) {
        if self.phase != Phase::Active || !self.bus_master {
            return;
        }
        let Some(live) = self.pages.iter().find(|live| u64::from(live.page) == offset / PAGE).copied() else {
            return;
        };
        let word = match offset % PAGE {
            QP => 0,
            CQ => 1,
            SRQ => 2,
            _ => return,
        };
        self.counters.doorbells += 1;
        self.ring(engine, live.context, word, value);
    }
}
