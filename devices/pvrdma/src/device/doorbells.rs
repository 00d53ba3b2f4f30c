//! Doorbells. Where UAR pages are memory, a word is only a dirty flag with a hint in it. An exchange with 0 and a scan of all queues of the
//! context finds every request posted before. A later doorbell makes the word non-zero again.
//!
//! The guest's CPUs store to the cache line of these words with each post and each empty poll. Each load by the device transfers that line,
//! and an exchange transfers it for writing. So the device polls a busy device's words a million times a second instead of with each engine
//! poll, since its active queues are polled anyway. It omits an exchange that would yield nothing: of a poll word, which requires no
//! action, and of a post to an active queue pair. Such a word stays, keeps causing scans, and is exchanged once the queue pair is idle.

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

/// Interval at which the doorbells of a device with active queue pairs are polled, nanoseconds: the added latency of a queue that becomes
/// active.
const LOOK_INTERVAL: u64 = 1_000;
/// Interval at which words that only report an empty poll are exchanged, nanoseconds. These exchanges show that doorbells in memory are
/// still used; the choice of the mode takes milliseconds.
const POLL_INTERVAL: u64 = 50_000;

/// Number of words of a UAR page.
pub const WORDS: u32 = 3;

/// BAR2: UAR pages as memory that the guest writes without an exit.
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

/// Delivery of doorbells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum DoorbellMode {
    /// UAR pages are memory ([`Device::scan`]). No exits, but a value may be overwritten before the device reads it. So completion queues
    /// get conservative notifications.
    Shared,
    /// Each store traps ([`Device::doorbell_write`]): arms are exact.
    Trapped,
}

/// Whether a completion queue word arms nothing.
#[inline]
const fn is_poll(value: u32) -> bool {
    value & (CQ_ARM | CQ_ARM_SOLICITED) == 0
}

/// A UAR page of a live context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LivePage {
    pub page: u32,
    pub context: ContextHandle,
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Sets the delivery of doorbells. After a switch to [`DoorbellMode::Trapped`], call [`Device::scan`] once more after the pages stopped
    /// being memory, so that no earlier doorbell is lost.
    pub fn set_doorbells(&mut self, engine: &mut Engine<Pvrdma<M>>, mode: DoorbellMode) {
        self.mode = mode;
        engine.set_arm_exact(self.id, mode == DoorbellMode::Trapped);
        if mode == DoorbellMode::Trapped {
            self.scan_all(engine);
        }
    }

    /// The current delivery of doorbells.
    #[must_use]
    pub fn doorbells(&self) -> DoorbellMode {
        self.mode
    }

    /// As [`Device::scan`]. `None`, without a scan, if the last one was less than `LOOK_INTERVAL` ago and queue pairs are active.
    #[inline]
    pub fn look(&mut self, engine: &mut Engine<Pvrdma<M>>, uar: &impl Uar, now: u64) -> Option<bool> {
        if now < self.next_look && engine.has_active(self.id) {
            return None;
        }
        Some(self.scan(engine, uar, now))
    }

    /// Reads the doorbell words of all live pages, and passes their hints to the engine. `now` is the engine's clock, nanoseconds. Returns
    /// whether any word shows that the guest is active. Costs one cache line per live context.
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

    /// Whether a queue pair word only announces a send of a queue pair that gets turns anyway.
    #[inline]
    fn looked_at_anyway(&self, engine: &Engine<Pvrdma<M>>, context: ContextHandle, value: u32) -> bool {
        let qp = QpHandle(value & HANDLE);
        value & !HANDLE == QP_SEND
            && engine.is_active(self.id, qp)
            && engine.context_of_qp(self.id, qp) == Some(context)
    }

    /// Makes the engine scan the queues of all live contexts, in case requests were posted without a doorbell.
    pub fn scan_all(&mut self, engine: &mut Engine<Pvrdma<M>>) {
        for live in &self.pages {
            engine.scan_context(self.id, live.context);
        }
    }

    /// Handles a sampled word: its hint is valid, and it may have overwritten others.
    #[inline]
    fn hint(&mut self, engine: &mut Engine<Pvrdma<M>>, context: ContextHandle, word: u32, value: u32) {
        self.ring(engine, context, word, value);
        // Overwritten values belong to queues of this context. Completion queue words announce no work.
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
                    // An empty poll requires no action.
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

    /// Handles a trapped 32-bit write to BAR2 at `offset`. Handles of contexts other than the page's are ignored.
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
