//! Completions and their events.

use crate::names::{CqHandle, DeviceId};
use crate::objects::{CqRef, NOT_NOTIFIED, ObjectRef, QpRef};
use crate::provider::{CompletionQueue, Provider, SendQueue, Sink};
use crate::saved::Kind;
use crate::work::{Arm, AsyncEvent, Completion, Status};

use super::Engine;

impl<P: Provider> Engine<P> {
    /// Appends a completion to a completion queue. During a turn it becomes visible with the next [`Engine::settle`], otherwise at once. A
    /// failure fails the completion queue, and its queue pairs after this turn.
    #[inline]
    pub(crate) fn push(&mut self, device: u32, cq: ObjectRef, completion: &Completion, solicited: bool) {
        let Some(found) = self.devices.get_mut(device as usize).and_then(|d| d.as_deref_mut()) else {
            return;
        };
        let Some(queue) = found.cqs.get_mut(cq.handle).filter(|queue| queue.stamp == cq.stamp) else {
            return;
        };
        if queue.failed || !found.enabled {
            found.counters.cq_overruns += 1;
            return;
        }
        found.marks.touch(Kind::CompletionQueue, cq.handle);
        let mut pushed = queue.ring.push(&found.memory, completion);
        if self.turn_of.is_none() {
            pushed = pushed.and_then(|()| queue.ring.publish(&found.memory));
        } else if pushed.is_ok() && !std::mem::replace(&mut queue.unpublished, true) {
            self.unpublished.push(CqRef { device, handle: cq.handle, stamp: cq.stamp });
        }
        if pushed.is_err() {
            self.fail_cq(CqRef { device, handle: cq.handle, stamp: cq.stamp });
            return;
        }
        found.counters.completions += 1;
        queue.pushed += 1;
        let solicited = solicited || completion.status != Status::Success;
        if solicited {
            queue.solicited = queue.pushed;
        }
        match queue.arm {
            Some(Arm::Next) => self.notify(device, cq.handle),
            Some(Arm::Solicited) if solicited => self.notify(device, cq.handle),
            _ if !queue.exact && !queue.watched => self.watch(device, cq.handle),
            _ => {}
        }
    }

    /// Fails a completion queue that overran or whose ring is broken.
    fn fail_cq(&mut self, cq: CqRef) {
        let Some(found) = self.device_mut(cq.device) else { return };
        let Some(queue) = found.cqs.get_mut(cq.handle).filter(|queue| queue.stamp == cq.stamp) else {
            return;
        };
        queue.failed = true;
        found.marks.touch(Kind::CompletionQueue, cq.handle);
        found.counters.cq_overruns += 1;
        self.failed_cqs.push(cq);
        self.event(cq.device, AsyncEvent::CqError(CqHandle(cq.handle)));
    }

    /// Counts an executed request of the queue pair whose turn it is; [`Engine::settle`] releases its slot. `false` for another queue pair.
    #[inline]
    pub(crate) fn retire_later(&mut self, at: QpRef) -> bool {
        if self.turn_of != Some(at) {
            return false;
        }
        match self.unretired.last_mut().filter(|(qp, _)| *qp == at) {
            Some((_, count)) => *count += 1,
            None => self.unretired.push((at, 1)),
        }
        true
    }

    /// Makes the work of the last turns visible to the guests. Releases slots of send queues, then publishes completions: a guest that sees
    /// a completion relies on its slot. One store per queue instead of one per request: guests poll both cache lines, and each store
    /// invalidates their copies.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.unsettled_turns = 0;
        let mut unretired = std::mem::take(&mut self.unretired);
        for (at, count) in unretired.drain(..) {
            if let Some(device) = self.devices.get_mut(at.device as usize).and_then(|d| d.as_deref_mut())
                && let Some(qp) = device.qps.get_mut(at.handle).filter(|qp| qp.stamp == at.stamp)
            {
                qp.send_queue.retire(&device.memory, count);
            }
        }
        self.unretired = unretired;
        while let Some(cq) = self.unpublished.pop() {
            let Some(found) = self.devices.get_mut(cq.device as usize).and_then(|d| d.as_deref_mut()) else {
                continue;
            };
            let Some(queue) = found.cqs.get_mut(cq.handle).filter(|queue| queue.stamp == cq.stamp) else {
                continue;
            };
            queue.unpublished = false;
            if found.enabled && queue.ring.publish(&found.memory).is_err() && !queue.failed {
                self.fail_cq(cq);
            }
        }
    }

    /// Arms a completion queue for an event with the next completion.
    ///
    /// Exact arms: a completion that is there already raises no event. The call returns before the consumer continues, and the consumer
    /// polls after arming, as IBTA 11.4.2.2 requires. Some consumers post again after every event.
    ///
    /// Sampled arms: the consumer may have polled before the completion came, and sleep since. So the engine watches the consumer.
    pub fn arm_cq(&mut self, device: DeviceId, cq: CqHandle, arm: Arm, sink: &mut impl Sink) {
        let Some(found) = self.device_mut(device.0) else { return };
        found.marks.touch(Kind::CompletionQueue, cq.0);
        let Some(queue) = found.cqs.get_mut(cq.0) else { return };
        queue.arm = match (queue.arm, arm) {
            // An arm for any completion is not weakened by a later one for solicited ones.
            (Some(Arm::Next), Arm::Solicited) => Some(Arm::Next),
            _ => Some(arm),
        };
        if !queue.exact {
            self.watch(device.0, cq.0);
        }
        self.deliver(sink);
    }

    /// Sends the armed event if a matching completion is unconsumed.
    pub(super) fn notify_if_awaited(&mut self, device: u32, cq: u32) {
        let Some(found) = self.device(device) else { return };
        let Some(queue) = found.cqs.get(cq) else { return };
        if !found.enabled || queue.failed {
            return;
        }
        let Some(consumer) = queue.ring.consumer(&found.memory) else { return };
        let consumed = queue.pushed.saturating_sub(u64::from(consumer.unconsumed));
        let due = match queue.arm {
            None => false,
            Some(Arm::Next) => consumer.unconsumed > 0,
            Some(Arm::Solicited) => queue.solicited > consumed,
        };
        if due {
            self.notify(device, cq);
        }
    }

    /// Schedules a check of the consumer's index, since the consumer may sleep with an arm that never reached the engine.
    pub(super) fn watch(&mut self, device: u32, cq: u32) {
        let due = self.now.saturating_add(self.config.notify_after_ns);
        let Some(found) = self.device_mut(device) else { return };
        if !found.enabled {
            return;
        }
        let Some(queue) = found.cqs.get_mut(cq).filter(|queue| !queue.watched) else { return };
        let Some(consumer) = queue.ring.consumer(&found.memory) else { return };
        queue.watched_at = queue.pushed.wrapping_sub(u64::from(consumer.unconsumed));
        queue.watched = true;
        let stamp = queue.stamp;
        self.watched.push_back((due, CqRef { device, handle: cq, stamp }));
    }

    /// Checks the consumers whose check is due.
    pub(super) fn run_watches(&mut self) {
        for _ in 0..self.config.timers_per_poll {
            let Some(&(due, cq)) = self.watched.front() else { break };
            if due > self.now {
                break;
            }
            self.watched.pop_front();
            let next = self.now.saturating_add(self.config.notify_after_ns);
            let Some(found) = self.device_mut(cq.device) else { continue };
            let Some(queue) = found.cqs.get_mut(cq.handle).filter(|queue| queue.stamp == cq.stamp) else {
                continue;
            };
            queue.watched = false;
            if queue.exact || queue.failed || !found.enabled {
                continue;
            }
            let Some(consumer) = queue.ring.consumer(&found.memory) else { continue };
            let consumed = queue.pushed.wrapping_sub(u64::from(consumer.unconsumed));
            if consumer.unconsumed == 0 || queue.notified_at == consumed {
                continue;
            }
            if queue.watched_at == consumed {
                self.notify(cq.device, cq.handle);
            } else {
                queue.watched_at = consumed;
                queue.watched = true;
                self.watched.push_back((next, cq));
            }
        }
    }

    /// Queues a completion event for the next [`Engine::deliver`].
    fn notify(&mut self, device: u32, cq: u32) {
        let Some(found) = self.device_mut(device) else { return };
        found.marks.touch(Kind::CompletionQueue, cq);
        let Some(queue) = found.cqs.get_mut(cq) else { return };
        queue.arm = None;
        if !queue.exact {
            let consumer = queue.ring.consumer(&found.memory);
            queue.notified_at = consumer
                .map_or(NOT_NOTIFIED, |consumer| queue.pushed.wrapping_sub(u64::from(consumer.unconsumed)));
        }
        if !queue.notifying {
            queue.notifying = true;
            let stamp = queue.stamp;
            self.notifications.push(CqRef { device, handle: cq, stamp });
        }
    }

    /// Passes events to the sink. Keeps completion events that the sink has no room for, until [`Engine::retry_events`].
    #[inline]
    pub(super) fn deliver(&mut self, sink: &mut impl Sink) {
        if !self.events.is_empty() || !self.notifications.is_empty() {
            self.deliver_all(sink);
        }
    }

    fn deliver_all(&mut self, sink: &mut impl Sink) {
        for (device, event) in self.events.drain(..) {
            sink.async_event(DeviceId(device), event);
        }
        let mut index = 0;
        while let Some(&cq) = self.notifications.get(index) {
            index += 1;
            let Some(found) = self.devices.get_mut(cq.device as usize).and_then(|d| d.as_deref_mut()) else {
                continue;
            };
            let Some(queue) = found.cqs.get_mut(cq.handle).filter(|queue| queue.stamp == cq.stamp) else {
                continue;
            };
            if sink.completion_event(DeviceId(cq.device), CqHandle(cq.handle)) {
                queue.notifying = false;
                found.counters.completion_events += 1;
            } else {
                if self.undelivered.is_empty() {
                    self.retry_at = self.now.saturating_add(self.config.retry_events_ns);
                }
                self.undelivered.push(cq);
            }
        }
        self.notifications.clear();
    }

    /// Retries events that the sink had no room for, at intervals.
    pub(super) fn retry_events(&mut self) {
        if !self.undelivered.is_empty() && self.retry_at <= self.now {
            self.notifications.append(&mut self.undelivered);
        }
    }
}
