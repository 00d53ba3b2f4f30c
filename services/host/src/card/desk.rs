//! Scheduling of the card: guests' accesses, the card's interrupts, hand-offs.
//!
//! One lock guards the device models, and so the card. When another guest has the card, a guest's access waits in its connection's thread
//! for its time slice. Any thread that finds a hand-off due executes it.

mod metrics;
mod recovery;

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::describe::Device;
use device_models::model::states_text;
use device_models::physical::{DeviceError, PhysicalDevice};
use dma::MappedMemory;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde_json::{Value, json};
use vpio::sharing::{OwnRing, SharedCard};
use vpio::{Answer, GuestConfig, GuestId, Monitor, MonitorError, Scheduler, Switched};

use super::memory::{GuestBus, Table};
use super::{Settings, Wish};
use crate::function::descriptors::signal;
use crate::function::interrupts::EventFds;

/// Interval at which a waiting access checks for its time slice.
const LOOK: Duration = Duration::from_millis(1);
/// Timeout of a waiting access, which then reads as ones. The guest's monitor would take this process for dead soon after.
const ACCESS_TIMEOUT: Duration = Duration::from_secs(4);

/// A card that can be shared.
pub trait Card: PhysicalDevice + Send + 'static {
    /// Maps `memory` for the card from now on, in place of the previous guest's. The previous mappings stay as far as they are the same.
    fn give(&mut self, memory: &MappedMemory);
    /// Records that its interrupt was signalled.
    fn signalled(&mut self);
    /// Unmasks its interrupt, after its causes were read.
    ///
    /// # Errors
    /// When the card can't be reached.
    fn unmask(&mut self) -> Result<(), DeviceError>;
}

/// State of one guest.
struct Place {
    name: String,
    table: Table,
    irq: EventFds,
    /// Its line was signalled, and its guest has not handled that yet.
    masked: bool,
    /// Its command register enables the card (bus mastering, or BARs).
    master: bool,
    connected: bool,
    /// An access waits for the card.
    asks: bool,
    /// A log line has reported that it is stopped.
    told: bool,
    waits: u64,
    longest_wait: Duration,
}

struct State<P, O> {
    monitor: Monitor<SharedCard<P, GuestBus, O>>,
    scheduler: Scheduler,
    places: Vec<Place>,
    /// The guest that got the card for an access that it has not executed yet, and since when, nanoseconds.
    owed: Option<(usize, u64)>,
    /// Since when the holder can't reach a quiescent point, nanoseconds.
    busy: Option<u64>,
    /// Why the card has failed, until a reset succeeds.
    failed: Option<String>,
    /// When it was last reset after a failure.
    reset_at: Option<Instant>,
    /// Number of failures.
    failures: u64,
    handoffs: u64,
    forced: u64,
    longest_handoff: u64,
    /// Time after which the card is taken from a guest that doesn't reach a quiescent point, nanoseconds.
    limit: u64,
}

/// The card, its guests, and their time slices.
pub(super) struct Desk<P, O> {
    device: &'static Device,
    state: Mutex<State<P, O>>,
    changed: Condvar,
    /// Eventfd that wakes the card's thread.
    wake: OwnedFd,
    begun: Instant,
}

impl<P: Card, O: OwnRing + Send + 'static> Desk<P, O> {
    /// The state of a card and its guests, none of which is connected.
    ///
    /// # Errors
    /// When the card can't be reached, or no descriptor is left.
    pub fn new(
        device: &'static Device,
        card: P,
        own: O,
        wishes: &[Wish],
        settings: Settings,
    ) -> Result<Self, MonitorError> {
        let mut shared = SharedCard::new(device, card, own)?;
        for wish in wishes {
            shared.add_seat(wish.address);
        }
        let pad = shared.pad();
        let mut monitor = Monitor::new(device, shared);
        monitor.set_scratch(Box::new(pad));
        let place = |wish: &Wish| {
            let table = Table::default();
            monitor.add(GuestConfig {
                name: wish.name.clone(),
                address: wish.address,
                permissions: Vec::new(),
                policy: settings.policy,
                memory: Box::new(table.clone()),
            });
            Place {
                name: wish.name.clone(),
                table,
                irq: EventFds::new(1),
                masked: false,
                master: false,
                connected: false,
                asks: false,
                told: false,
                waits: 0,
                longest_wait: Duration::ZERO,
            }
        };
        let places = wishes.iter().map(place).collect();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            DeviceError { bar: 0, offset: 0, why: format!("an eventfd can't be made: {error}") }
        })?;
        let state = State {
            monitor,
            scheduler: Scheduler::new(nanoseconds(settings.slice)),
            places,
            owed: None,
            busy: None,
            failed: None,
            reset_at: None,
            failures: 0,
            handoffs: 0,
            forced: 0,
            longest_handoff: 0,
            limit: nanoseconds(settings.limit),
        };
        Ok(Self { device, state: Mutex::new(state), changed: Condvar::new(), wake, begun: Instant::now() })
    }

    /// Description of the card.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    fn lock(&self) -> MutexGuard<'_, State<P, O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        nanoseconds(self.begun.elapsed())
    }

    /// Wakes the card's thread.
    pub fn wake(&self) {
        signal(self.wake.as_fd());
    }

    /// Connects the guest of a seat. False: one is connected already.
    pub fn connect(&self, seat: usize) -> bool {
        let mut state = self.lock();
        let Some(place) = state.places.get_mut(seat) else { return false };
        !std::mem::replace(&mut place.connected, true)
    }

    /// Disconnects a guest: the card drops its state and its memory.
    pub fn disconnect(&self, seat: usize) {
        let failed = self.change(seat, |state| {
            state.turn_out(seat)?;
            state.monitor.physical().forget_memory(seat)?;
            state.monitor.physical().vacate(seat);
            state.power_on(seat)
        });
        let mut state = self.lock();
        if failed {
            state.begin_anew(seat);
        }
        if let Some(place) = state.places.get_mut(seat) {
            place.table.set(MappedMemory::default());
            place.irq.disconnect();
            (place.masked, place.master, place.connected) = (false, false, false);
        }
    }

    /// Resets a guest's device.
    pub fn reset(&self, seat: usize) {
        let failed = self.change(seat, |state| {
            state.turn_out(seat)?;
            state.monitor.physical().vacate(seat);
            state.power_on(seat)
        });
        if failed {
            self.lock().begin_anew(seat);
        }
    }

    /// Replaces a guest's memory. The old one isn't used any more when this returns.
    pub fn set_memory(&self, seat: usize, memory: MappedMemory) {
        self.change(seat, |state| {
            let out = state.turn_out(seat);
            let forgotten = out.and_then(|()| Ok(state.monitor.physical().forget_memory(seat)?));
            // A failed card is reset before a guest gets it again, and nothing is mapped for it then.
            if let Some(place) = state.places.get_mut(seat) {
                place.table.set(memory);
            }
            forgotten
        });
    }

    /// Records whether a guest's command register enables the card: bus mastering, or the BARs of a card that never masters the bus.
    pub fn set_master(&self, seat: usize, on: bool) {
        self.change(seat, |state| {
            if let Some(place) = state.places.get_mut(seat) {
                place.master = on;
            }
            if state.monitor.resident() == Some(GuestId(seat)) {
                state.monitor.physical().set_guest_bus_master(on)?;
            }
            Ok(())
        });
    }

    /// Calls `act` with a guest's interrupt.
    pub fn interrupt(
        &self,
        seat: usize,
        act: impl FnOnce(&EventFds) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut state = self.lock();
        let Some(place) = state.places.get_mut(seat) else { return Ok(()) };
        act(&place.irq)?;
        place.masked = false;
        state.lines();
        Ok(())
    }

    /// Masks or unmasks a guest's line. A line that is up is signalled again when it is unmasked.
    pub fn mask(&self, seat: usize, masked: bool) {
        let mut state = self.lock();
        if let Some(place) = state.places.get_mut(seat) {
            place.masked = masked;
        }
        state.lines();
    }

    /// Changes a guest's state. Returns whether the card has failed, so that nothing was changed.
    fn change(&self, seat: usize, act: impl FnOnce(&mut State<P, O>) -> Result<(), MonitorError>) -> bool {
        let mut state = self.lock();
        let result = act(&mut state).and_then(|()| state.after());
        if let Err(error) = &result {
            state.fail(error);
        }
        if state.owed.is_some_and(|(owed, _)| owed == seat) {
            state.owed = None;
        }
        drop(state);
        self.changed.notify_all();
        self.wake();
        result.is_err()
    }

    /// Executes a guest's access to a BAR, within the device's registers. Returns a read's value; ones when its device is gone or stopped.
    pub fn access(&self, seat: usize, access: Access) -> u32 {
        let begin = Instant::now();
        let mut waited = false;
        let mut state = self.lock();
        let value = loop {
            if state.failed.is_some() {
                break u32::MAX;
            }
            match state.monitor.access(GuestId(seat), access) {
                Ok(Answer::Done(value)) => break value,
                Ok(Answer::Stopped | Answer::MachineCheck) => {
                    state.tell_stopped(seat);
                    break u32::MAX;
                }
                Ok(Answer::Wait) => {
                    waited = true;
                    if let Some(place) = state.places.get_mut(seat) {
                        place.asks = true;
                    }
                    state.scheduler.demand(GuestId(seat));
                    if let Err(error) = state.advance(self.now()) {
                        state.fail(&error);
                        break u32::MAX;
                    }
                    if state.monitor.resident() == Some(GuestId(seat)) {
                        continue;
                    }
                    if begin.elapsed() > ACCESS_TIMEOUT {
                        tracing::warn!(
                            guest = state.places[seat].name,
                            "A guest waited too long for the card"
                        );
                        break u32::MAX;
                    }
                    let woken = self.changed.wait_timeout(state, LOOK);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                Err(error) => {
                    // Not retried: the access may be the cause.
                    state.fail(&error);
                    break u32::MAX;
                }
            }
        };
        if state.owed.is_some_and(|(owed, _)| owed == seat) {
            state.owed = None;
        }
        if waited && let Some(place) = state.places.get_mut(seat) {
            place.waits += 1;
            place.asks = false;
            place.longest_wait = place.longest_wait.max(begin.elapsed());
        }
        if state.failed.is_none()
            && let Err(error) = state.after()
        {
            state.fail(&error);
        }
        if state.failed.is_some() {
            // The card's thread resets it.
            self.wake();
        }
        let others = state.scheduler.due().is_some();
        drop(state);
        if others {
            // A guest demands the card for which no connection's thread waits.
            self.wake();
        }
        value
    }

    /// The card's thread, until `stop` is readable. `interrupt` is readable when the card has signalled.
    pub fn run(&self, interrupt: &OwnedFd, stop: &OwnedFd) {
        // A line that was up before its interrupt was connected may never be signalled, so the first pass handles it as signalled.
        let (mut timeout, mut signalled, mut failed) = (Some(Duration::ZERO), true, false);
        loop {
            let wait = timeout.map(|wait: Duration| Timespec {
                tv_sec: i64::try_from(wait.as_secs()).unwrap_or(1),
                tv_nsec: wait.subsec_nanos().into(),
            });
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(interrupt, PollFlags::IN),
            ];
            // The interrupt of a failed card isn't handled.
            let count = if failed { 2 } else { 3 };
            match poll(&mut fds[..count], wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "The card's thread can't wait; it ends");
                    return;
                }
            }
            let ready = |at: usize| !fds[at].revents().is_empty();
            if ready(0) {
                return;
            }
            if ready(1) {
                // The count has no meaning.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            signalled |= ready(2);
            let mut state = self.lock();
            failed = state.failed.is_some();
            if failed {
                timeout = state.try_again();
                failed = state.failed.is_some();
                drop(state);
                self.changed.notify_all();
                continue;
            }
            let now = self.now();
            let result = state.look(signalled, now);
            signalled = false;
            timeout = match result {
                Ok(true) => Some(Duration::ZERO),
                Ok(false) => {
                    let due =
                        |due: u64| Duration::from_nanos(due.saturating_sub(now)).clamp(LOOK / 4, LOOK * 8);
                    state.scheduler.due().map(due)
                }
                Err(error) => {
                    state.fail(&error);
                    Some(Duration::ZERO)
                }
            };
            drop(state);
            self.changed.notify_all();
        }
    }

    /// State for `causeway inspect`.
    pub fn inspect(&self) -> Value {
        let mut state = self.lock();
        let totals = state.monitor.physical().totals();
        let (pinned, peak) = state.monitor.physical_ref().mapped();
        let state = &*state;
        let guests: serde_json::Map<String, Value> = (0..)
            .zip(&state.places)
            .map(|(seat, place)| (place.name.clone(), state.guest(seat, place)))
            .collect();
        json!({
            "device": self.device.name,
            "failed": state.failed,
            "failures": state.failures,
            "holder": state.monitor.resident().and_then(|id| state.places.get(id.0)).map(|place| place.name.clone()),
            "handoffs": state.handoffs,
            "forced": state.forced,
            "longest_handoff_microseconds": state.longest_handoff / 1000,
            "pinned_bytes": pinned,
            "pinned_bytes_peak": peak,
            "card": totals,
            "guests": guests,
        })
    }

    /// Calls `act` with the card: for tests, which simulate the wire.
    #[cfg(test)]
    pub fn with_card<R>(&self, act: impl FnOnce(&mut P) -> R) -> R {
        let result = act(self.lock().monitor.physical().card());
        self.wake();
        result
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl<P: Card, O: OwnRing> State<P, O> {
    fn guest(&self, seat: usize, place: &Place) -> Value {
        let model = self.monitor.model(GuestId(seat));
        let violations: Vec<String> = self
            .monitor
            .violations(GuestId(seat))
            .iter()
            .map(|violation| violation.refusal.to_string())
            .collect();
        json!({
            "connected": place.connected,
            "states": states_text(self.monitor.physical_ref().device(), model.graph().states()),
            "decisions": self.monitor.counters(GuestId(seat)),
            "frames": self.monitor.physical_ref().fed(seat),
            "waits": place.waits,
            "longest_wait_microseconds": u64::try_from(place.longest_wait.as_micros()).unwrap_or(u64::MAX),
            "violations": violations,
        })
    }

    fn tell_stopped(&mut self, seat: usize) {
        let why = self.monitor.violations(GuestId(seat)).last().map(|last| last.refusal.to_string());
        self.monitor.physical().vacate(seat);
        let Some(place) = self.places.get_mut(seat) else { return };
        if !std::mem::replace(&mut place.told, true) {
            tracing::warn!(
                guest = place.name,
                why = why.unwrap_or_default(),
                "A guest's use of the card is stopped until its machine is reset"
            );
        }
    }

    /// Polls the card, then executes a due hand-off. Returns whether more frames wait.
    fn look(&mut self, signalled: bool, now: u64) -> Result<bool, MonitorError> {
        if signalled {
            self.monitor.physical().card().signalled();
        }
        let more = self.monitor.physical().poll()?;
        if signalled {
            self.monitor.physical().card().unmask()?;
        }
        self.after()?;
        self.advance(now)?;
        Ok(more)
    }

    /// Passes on frames, interrupt causes and lines, after any change.
    fn after(&mut self) -> Result<(), MonitorError> {
        self.monitor.physical().feed();
        self.monitor.interrupt()?;
        for seat in self.monitor.physical_ref().waiting() {
            // A guest that is paused or stopped would not use it.
            if self.places.get(seat).is_some_and(|place| place.master && !place.told) {
                self.scheduler.demand(GuestId(seat));
            }
        }
        self.lines();
        Ok(())
    }

    /// Signals lines that came up.
    fn lines(&mut self) {
        if self.failed.is_some() {
            return;
        }
        for (seat, place) in (0..).zip(&mut self.places) {
            if !place.masked && place.irq.is_connected(0) && self.monitor.line(GuestId(seat)) {
                place.masked = true;
                place.irq.raise(0);
            }
        }
    }

    /// Executes a hand-off, if one is due.
    fn advance(&mut self, now: u64) -> Result<(), MonitorError> {
        if self.owed.is_some_and(|(_, since)| now.saturating_sub(since) < self.limit) {
            return Ok(());
        }
        let Some(next) = self.scheduler.next(now) else { return Ok(()) };
        if !self.places.get(next.0).is_some_and(|place| place.connected) {
            self.scheduler.forget(next);
            return Ok(());
        }
        let begin = Instant::now();
        // Received frames go to their guests before the receivers change.
        self.monitor.physical().poll()?;
        self.monitor.interrupt()?;
        if !self.monitor.settle()? {
            if now.saturating_sub(*self.busy.get_or_insert(now)) < self.limit {
                return Ok(());
            }
            self.forced += 1;
        }
        self.leave()?;
        let Some(place) = self.places.get(next.0) else { return Ok(()) };
        let (memory, master) = (place.table.get(), place.master);
        let shared = self.monitor.physical();
        shared.card().give(&memory);
        shared.seat(Some((next.0, GuestBus(memory), master)));
        let switched = self.monitor.switch(next, false)?;
        self.scheduler.switched(next, now);
        if switched == Switched::Done {
            self.handoffs += 1;
            self.owed = self.places.get(next.0).filter(|place| place.asks).map(|_| (next.0, now));
        } else {
            self.tell_stopped(next.0);
        }
        self.longest_handoff = self.longest_handoff.max(nanoseconds(begin.elapsed()));
        self.after()
    }

    /// Takes the card from the guest that has it.
    fn leave(&mut self) -> Result<(), MonitorError> {
        self.busy = None;
        self.owed = None;
        self.monitor.physical().park();
        self.monitor.release()?;
        let shared = self.monitor.physical();
        shared.seat(None);
        shared.card().give(&MappedMemory::default());
        Ok(())
    }

    /// Takes the card from this guest, if it has it.
    fn turn_out(&mut self, seat: usize) -> Result<(), MonitorError> {
        self.scheduler.forget(GuestId(seat));
        if self.monitor.resident() != Some(GuestId(seat)) {
            return Ok(());
        }
        self.monitor.physical().poll()?;
        self.monitor.interrupt()?;
        self.monitor.settle()?;
        self.leave()
    }

    fn power_on(&mut self, seat: usize) -> Result<(), MonitorError> {
        if let Some(place) = self.places.get_mut(seat) {
            place.told = false;
            place.masked = false;
        }
        self.monitor.power_on(GuestId(seat))
    }
}
