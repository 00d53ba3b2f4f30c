//! Scans: polling all queue pairs of a context, since one doorbell of the context may have overwritten another.
//!
//! Each doorbell found in memory requests a scan. With thousands of queue pairs a scan is therefore always in progress, and finds nothing
//! at nearly all of them. So checking an idle queue pair is two loads: its remembered state ([`Quiet`], in the order of handles, four to a
//! cache line), and the guest's index. A scan uses a small share of the engine's time. After it has found a queue pair that no doorbell
//! named, it runs at full speed: where one doorbell was lost, others may be lost too.

use dma::Dma;

use crate::attributes::QpState;
use crate::names::{ContextHandle, DeviceId, SrqHandle};
use crate::objects::{QpRef, Wait};
use crate::provider::{Provider, SendQueue};

use super::{Engine, Scan};

/// Checks that any poll may do in a context of at most [`FEW`] queue pairs: their cache lines stay in the cache.
const LEAST_LOOKS: u64 = 2;
/// See [`LEAST_LOOKS`].
const FEW: usize = 64;
/// Interval of further checks, nanoseconds.
const LOOK_EVERY_NS: u64 = 2000;
/// Number of such checks at once. Each loads from another page, whose address translation takes longer than the load. Only loads in flight
/// together share that time; one by one each takes 200 ns.
const BURST: u64 = 64;
/// Further checks of a poll after one that found nothing to execute.
const IDLE_LOOKS: u64 = 8;
/// How many queue pairs ahead guest memory is prefetched.
const AHEAD: usize = 8;
/// Number of passes of a context at full speed after a find: the one in progress and the next.
const HOT_PASSES: u8 = 2;

impl<P: Provider> Engine<P> {
    /// Scans all queue pairs and shared receive queues of a context, over the next polls, since one of its doorbells may have been
    /// overwritten.
    pub fn scan_context(&mut self, device: DeviceId, context: ContextHandle) {
        let Some(found) = self.device_mut(device.0) else { return };
        let Some(owner) = found.contexts.get_mut(context.0) else { return };
        if owner.scanning {
            owner.scan_again = true;
            return;
        }
        owner.scanning = true;
        let stamp = owner.stamp;
        self.scans.push_back(Scan { device: device.0, context: context.0, stamp, position: 0 });
    }

    /// Continues the scans, within a poll's share. `elapsed` is the time since the last poll in nanoseconds; `idle` is whether that poll
    /// found nothing to execute.
    pub(super) fn run_scans(&mut self, elapsed: u64, idle: bool) {
        if self.scans.is_empty() {
            return;
        }
        let mut left = u64::from(self.config.scans_per_poll);
        self.scan_time = self.scan_time.saturating_add(elapsed).min(BURST * LOOK_EVERY_NS);
        while left > 0 {
            let Some(mut scan) = self.scans.pop_front() else { return };
            // An empty context costs time too.
            left -= 1;
            let Some(device) = self.device(scan.device) else { continue };
            let Some(context) = device.contexts.get(scan.context).filter(|c| c.stamp == scan.stamp) else {
                continue;
            };
            let free =
                if context.qps.len() <= FEW { LEAST_LOOKS } else { 0 } + if idle { IDLE_LOOKS } else { 0 };
            let due = if self.scan_time >= BURST * LOOK_EVERY_NS { BURST } else { 0 };
            let share = if context.hot > 0 { left } else { (free + due).min(left) };
            let mut budget = share;
            if scan.position == 0 {
                for srq in context.srqs.clone() {
                    self.doorbell_srq(DeviceId(scan.device), SrqHandle(srq));
                }
            }
            loop {
                self.skip_quiet(&mut scan, &mut budget);
                if budget == 0 || !self.scan_one(&scan) {
                    break;
                }
                scan.position += 1;
                budget -= 1;
            }
            let looks = share - budget;
            self.scan_time -= (looks.saturating_sub(free) * LOOK_EVERY_NS).min(self.scan_time);
            if budget == 0 {
                self.scans.push_back(scan);
                return;
            }
            left -= looks;
            self.end_scan(&scan);
        }
    }

    /// Skips queue pairs that are active, or unchanged since they were found idle.
    #[inline]
    fn skip_quiet(&self, scan: &mut Scan, budget: &mut u64) {
        let Some(device) = self.device(scan.device).filter(|device| device.enabled) else { return };
        let Some(context) = device.contexts.get(scan.context) else { return };
        let ahead = |position: usize| device.quiet.of(*context.qps.get(position)?).to_load();
        while *budget > 0
            && let Some(&handle) = context.qps.get(scan.position)
        {
            if let Some(address) = ahead(scan.position + AHEAD) {
                device.memory.prefetch(address, 4);
            }
            let quiet = device.quiet.of(handle);
            let unchanged = quiet.is_active()
                || quiet.to_load().is_some_and(|at| device.memory.load_u32(at) == Ok(quiet.index));
            if !unchanged {
                return;
            }
            scan.position += 1;
            *budget -= 1;
        }
    }

    /// Checks the next queue pair of a scan; `false` when there is none.
    fn scan_one(&mut self, scan: &Scan) -> bool {
        let Some(device) = self.device(scan.device) else { return false };
        let Some(context) = device.contexts.get(scan.context) else { return false };
        let Some(&handle) = context.qps.get(scan.position) else { return false };
        let Some(qp) = device.qps.get(handle) else { return true };
        if !device.enabled || matches!(qp.state, QpState::Reset) {
            return true;
        }
        let at = QpRef { device: scan.device, handle, stamp: qp.stamp };
        let sends = qp.state != QpState::Init
            && qp.wait == Wait::None
            && (qp.current.is_some() || qp.send_queue.pending(&device.memory));
        let found = sends && !qp.active;
        // Only a new request, a turn, a waiting peer, or a verb can make work here. Each of the last three calls
        // `QuietTable::forget`.
        let quiet = !sends
            && !qp.active
            && qp.wait == Wait::None
            && qp.waiter.is_none()
            && matches!(qp.state, QpState::ReadyToReceive | QpState::ReadyToSend);
        let watch = if quiet { qp.send_queue.watch() } else { None };
        if sends {
            self.activate(at);
        }
        self.look_at_receives(at);
        let Some(device) = self.device_mut(scan.device) else { return false };
        if let Some((index_at, index)) = watch {
            device.quiet.remember(handle, index_at, index);
        }
        if found && let Some(context) = device.contexts.get_mut(scan.context) {
            context.hot = HOT_PASSES;
        }
        true
    }

    fn end_scan(&mut self, scan: &Scan) {
        let Some(device) = self.device_mut(scan.device) else { return };
        let Some(context) = device.contexts.get_mut(scan.context) else { return };
        context.scanning = false;
        context.hot = context.hot.saturating_sub(1);
        if std::mem::take(&mut context.scan_again) {
            self.scan_context(DeviceId(scan.device), ContextHandle(scan.context));
        }
    }
}
