//! A NIC under the device model of its card, which checks the guest's requests.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::model::Refusal;
use device_models::physical::{DeviceError, PhysicalDevice as _};
use machine::interrupt::LevelLine;
use vpio::exchange::Aside;
use vpio::vfio::OpenError;
use vpio::{Answer, GuestId, Monitor, MonitorError, Passed, Switched};

use super::StopSink;
use super::backend::{Backend, HostCard};
use super::mapped::Mapped;
use super::page::RegisterPage;
use super::traces::Traces;

/// Time that a pause waits for a card to finish the guest's requests.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(200);
/// Time in an interrupt after which the guest loses its shadow register page.
const MAX_INTERRUPT_DURATION: Duration = Duration::from_millis(100);
/// Times in a row that the page returns, until a reset. A guest that is slow once loses it once.
const MAX_PAGE_RETURNS: u32 = 4;
/// Interval between drains of deferred writes that no other event causes: the shortest and the longest.
const DRAIN_INTERVAL_RANGE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));
/// Time that a change of the backend waits for a quiescent point.
pub(super) const QUIESCENT_POINT_TIMEOUT: Duration = Duration::from_secs(1);

/// A NIC under its model.
pub(super) struct Guarded<C> {
    pub monitor: Box<Monitor<Backend<C>>>,
    pub guest: GuestId,
    /// Called once, when the policy stops the guest.
    pub stop: Option<StopSink>,
    /// The file that records what the guest is refused.
    pub traces: Option<Traces>,
    /// The card's line was up while its causes couldn't be read. VFIO keeps it masked until they are.
    pub masked: bool,
    /// The idle backend: card or emulation.
    pub aside: Option<Aside<Backend<C>>>,
    /// Bus mastering as the guest's command register has it.
    pub guest_master: bool,
    /// Number of changes of the backend.
    pub changes: u64,
    /// The shadow register page.
    pub page: Option<RegisterPage>,
    /// State of the supervision of the page.
    pub supervision: PageSupervision,
    /// Pages of the card that the guest may read without its model.
    pub free_pages: Vec<Mapped>,
    /// Parts of the card's BARs that the guest has while it is passed through.
    pub whole: Vec<Mapped>,
    /// The guest's line, to which the card's is routed while it is passed through. It must stay open: KVM and VFIO hold the eventfds'
    /// counters, not their files, and drop an eventfd whose file is closed.
    pub line: Option<LevelLine>,
    /// During a change: no mapping, eventfd write or deferred write, so that every access exits.
    pub trap_all: bool,
    /// The VM is paused: the backend must not change, or a card would run in the pause.
    pub paused: bool,
}

/// Supervision of the shadow register page. An interrupt that doesn't end makes it withdraw the page: the guest may read until no cause is
/// left, and only a read that exits clears causes.
#[derive(Debug, Default)]
pub(super) struct PageSupervision {
    /// Signaled writes. Deferred writes in the ring may be older.
    signaled: Vec<Access>,
    /// Since when the guest is in an interrupt.
    since: Option<Instant>,
    /// Interval until the next drain, while nothing happens.
    drain_interval: Duration,
    /// The page is withdrawn.
    pub withdrawn: bool,
    /// Times that it was withdrawn, in all and in a row.
    pub times: u32,
    in_a_row: u32,
}

/// Why a NIC's backend can't be changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The NIC has only one backend.
    #[error("NIC {name} has one mode only: {reason}")]
    One {
        /// Name of the NIC.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// The NIC reached no quiescent point.
    #[error(
        "NIC {name} was not at a point where its card can be taken from its guest for {} s; try again with less traffic",
        QUIESCENT_POINT_TIMEOUT.as_secs()
    )]
    Busy {
        /// Name of the NIC.
        name: String,
    },
    /// The policy has stopped the guest's use of the card.
    #[error("NIC {name} was stopped before, by its policy; reset the VM")]
    Stopped {
        /// Name of the NIC.
        name: String,
    },
    /// The model doesn't permit the card's present state.
    #[error("NIC {name} stays passed through: {refusal}")]
    NotAllowed {
        /// Name of the NIC.
        name: String,
        /// What it doesn't permit.
        refusal: Refusal,
    },
    /// The guest's memory can't be mapped for the card.
    #[error("NIC {name} stays under its model: the guest's memory can't be mapped for its card")]
    NotMapped {
        /// Name of the NIC.
        name: String,
        /// The cause.
        #[source]
        source: DeviceError,
    },
    /// The card's interrupt can't be rerouted.
    #[error("The interrupt of NIC {name} can't be connected")]
    Interrupt {
        /// Name of the NIC.
        name: String,
        /// The cause.
        #[source]
        source: OpenError,
    },
    /// The NIC's thread has ended, or doesn't respond.
    #[error("The thread of NIC {name} doesn't answer; see the monitor's log")]
    Silent {
        /// Name of the NIC.
        name: String,
    },
    /// The card or its model failed.
    #[error("NIC {name} failed")]
    Failed {
        /// Name of the NIC.
        name: String,
        /// The cause.
        #[source]
        source: MonitorError,
    },
}

impl<C: HostCard> Guarded<C> {
    /// An access of the guest to a BAR. Returns the value of a read.
    pub fn access(&mut self, access: Access) -> Result<u32, MonitorError> {
        if self.monitor.is_open() {
            return self.monitor.watched(self.guest, access);
        }
        if !self.is_prompt() {
            self.apply_signaled()?;
        }
        let result = self.forward(access);
        self.update_page()?;
        result
    }

    fn is_prompt(&self) -> bool {
        self.page.as_ref().is_some_and(|page| !page.prompt().is_empty())
    }

    /// Applies signaled writes, before accesses that came later. They change nothing that could be refused. If they are prompt, applies
    /// only those that were collected before the last drain of deferred writes: others wait, since they must not overtake deferred writes.
    fn apply_signaled(&mut self) -> Result<(), MonitorError> {
        let Some(page) = self.page.as_ref().filter(|_| !self.monitor.is_open()) else { return Ok(()) };
        if page.prompt().is_empty() {
            for access in page.take_signaled() {
                self.monitor.access(self.guest, access)?;
            }
        }
        for access in std::mem::take(&mut self.supervision.signaled) {
            self.monitor.access(self.guest, access)?;
        }
        Ok(())
    }

    /// Collects signaled writes, if they are prompt. The caller then drains deferred writes, and calls [`Self::told`]. So a mask that the
    /// guest opens is never closed by an older write. A write that closes it just after may count as older: an interrupt then arrives that
    /// was already on its way.
    pub fn collect_signaled(&mut self) {
        if let Some(page) = self.page.as_ref().filter(|page| !page.prompt().is_empty()) {
            for access in page.take_signaled() {
                if !self.supervision.signaled.contains(&access) {
                    self.supervision.signaled.push(access);
                }
            }
        }
    }

    /// Applies collected writes and updates the page, after a signal or a drain.
    pub fn process_signaled(&mut self) -> Result<(), MonitorError> {
        self.apply_signaled()?;
        self.update_page()
    }

    /// The guest's line was raised.
    pub fn raised(&mut self) {
        self.monitor.raised(self.guest);
        self.supervision.since.get_or_insert_with(Instant::now);
    }

    /// Supervises the page, after each action of the thread. Returns whether mappings have changed.
    pub fn supervise_page(&mut self, now: Instant) -> bool {
        if self.monitor.is_open() {
            return false;
        }
        let supervision = &mut self.supervision;
        let endless = supervision
            .since
            .is_some_and(|since| now.saturating_duration_since(since) >= MAX_INTERRUPT_DURATION);
        let take = self.page.is_some()
            && self.monitor.clears_by_reads()
            && (endless
                || supervision.withdrawn
                    && (supervision.since.is_some() || supervision.in_a_row > MAX_PAGE_RETURNS));
        if take && !supervision.withdrawn {
            supervision.times += 1;
            supervision.in_a_row += 1;
        }
        std::mem::replace(&mut supervision.withdrawn, take) != take
    }

    /// Interval until the next drain that no other event causes; none if none is needed. It is needed during an interrupt, and while masked
    /// causes are outstanding: a driver that only polls refills its ring by deferred writes.
    pub fn next_drain(&mut self, idle: bool) -> Option<Duration> {
        if self.page.is_none() || self.monitor.is_open() || !self.monitor.clears_by_reads() {
            return None;
        }
        let (first, last) = DRAIN_INTERVAL_RANGE;
        self.supervision.drain_interval =
            if idle { (self.supervision.drain_interval * 2).clamp(first, last) } else { first };
        let waits = self.supervision.since.is_some() && !self.supervision.withdrawn
            || self.monitor.has_causes(self.guest);
        waits.then_some(self.supervision.drain_interval)
    }

    /// Updates the guest's shadow register page.
    pub fn update_page(&mut self) -> Result<(), MonitorError> {
        match &self.page {
            _ if self.monitor.is_open() => Ok(()),
            Some(page) => self.monitor.show(self.guest, &mut |shown| page.put(shown)),
            None => Ok(()),
        }
    }

    /// Makes the guest's registers read ones from now on.
    pub fn fail_page(&self) {
        if let Some(page) = &self.page {
            page.fill(u32::MAX);
        }
    }

    /// The guest's line was lowered. Signaled writes are applied before the line can rise again.
    pub fn lowered(&mut self) -> Result<(), MonitorError> {
        if self.monitor.is_open() {
            return Ok(());
        }
        if self.supervision.since.take().is_some() && !self.supervision.withdrawn {
            self.supervision.in_a_row = 0;
        }
        self.apply_signaled()?;
        self.monitor.lowered(self.guest);
        self.update_page()
    }

    /// Whether causes were taken that the guest may not have read. The caller then drains deferred writes once more, and calls
    /// [`Self::seen`].
    pub fn has_unseen(&self) -> bool {
        !self.monitor.is_open() && self.monitor.has_unseen(self.guest)
    }

    /// See [`vpio::shown`].
    pub fn seen(&mut self) {
        self.monitor.seen(self.guest);
    }

    fn forward(&mut self, access: Access) -> Result<u32, MonitorError> {
        let resets = self.monitor.resets(self.guest);
        let answer = self.monitor.access(self.guest, access)?;
        if let Some(traces) = &mut self.traces {
            // Before the VM ends for it.
            traces.append(self.monitor.violations(self.guest));
        }
        if self.monitor.resets(self.guest) != resets {
            // Signaled writes from before the reset are void.
            self.collect_signaled();
            self.supervision.signaled.clear();
        }
        if self.monitor.physical_ref().is_emulation() {
            // No eventfd signals its line.
            self.monitor.interrupt()?;
        }
        match answer {
            Answer::Done(value) => return Ok(value),
            Answer::Stopped => {
                self.fail_page();
                if let Some(stop) = self.stop.take() {
                    // The last recorded violation is this one, or an earlier one: policy `stop` refuses once.
                    let why = self.monitor.violations(self.guest).last();
                    stop(why.map_or_else(String::new, |violation| violation.refusal.to_string()));
                }
            }
            // This is the thread of the vCPU that made the access, or the NIC's, which passes the check on to a vCPU.
            Answer::MachineCheck => machine::machine_check::raise(),
            // No other guest has the card.
            Answer::Wait => {}
        }
        // Until the VM has ended, like a device that is gone.
        Ok(u32::MAX)
    }

    /// Descriptors that signal a card's line, and frames for its emulation.
    pub fn sources(&self) -> io::Result<Vec<OwnedFd>> {
        let (mut card, mut wire) = (None, None);
        let aside = self.aside.as_ref().map(Aside::physical_ref);
        for backend in [Some(self.monitor.physical_ref()), aside].into_iter().flatten() {
            match backend {
                Backend::Card(one) => card = Some(one.interrupt_fd()?),
                Backend::Emulation(one) => wire = Some(one.wire.queue.try_clone()?),
            }
        }
        Ok(card.into_iter().chain(wire).collect())
    }

    /// Unmasks the line, once its causes were taken.
    pub fn unmask(&mut self) -> Result<(), MonitorError> {
        self.masked = self.monitor.causes_wait();
        if !self.masked {
            self.monitor.physical().unmask()?;
        }
        Ok(())
    }

    /// The card has signaled its line, or frames have arrived for the emulation.
    pub fn readable(&mut self) -> Result<(), MonitorError> {
        if self.monitor.is_open() {
            // Signaled before the line was routed to the guest. Consumed, or the thread would wake again and again.
            if let Some(card) = self.monitor.physical().card() {
                card.signalled();
            }
            return Ok(());
        }
        match self.monitor.physical() {
            Backend::Card(card) => card.signalled(),
            Backend::Emulation(emulation) => emulation.feed(),
        }
        self.apply_signaled()?;
        self.monitor.interrupt()?;
        self.update_page()?;
        self.unmask()
    }

    /// Sets bus mastering as the guest's command register has it.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), MonitorError> {
        self.guest_master = on;
        Ok(self.monitor.physical().set_guest_bus_master(on)?)
    }

    /// Saves the card's context and takes the card from the guest, whose vCPUs are suspended.
    pub fn quiesce(&mut self) -> Result<(), MonitorError> {
        self.paused = true;
        if self.monitor.is_open() {
            return Ok(self.monitor.physical().set_bus_master(false)?);
        }
        self.settle(SETTLE_TIMEOUT)?;
        self.monitor.release()
    }

    /// Gives the card back to the guest.
    pub fn unquiesce(&mut self) -> Result<(), MonitorError> {
        self.paused = false;
        if self.monitor.is_open() {
            return Ok(self.monitor.physical().set_bus_master(true)?);
        }
        self.monitor.switch(self.guest, false)?;
        // The guest didn't run during the pause, so the time of its handler starts again.
        self.supervision.since = self.supervision.since.map(|_| Instant::now());
        self.update_page()?;
        Ok(self.monitor.physical().unmask()?)
    }

    /// Resets to the power-on state.
    pub fn reset(&mut self) -> Result<(), MonitorError> {
        self.set_guest_bus_master(false)?;
        // Signaled writes from before the reset are void.
        self.collect_signaled();
        self.apply_signaled()?;
        (self.supervision.since, self.supervision.in_a_row) = (None, 0);
        if let Some(page) = &self.page {
            page.fill(0);
        }
        self.monitor.power_on(self.guest)?;
        self.update_page()?;
        Ok(self.monitor.physical().unmask()?)
    }

    /// Waits up to `timeout` for a quiescent point. Returns whether it was reached.
    fn settle(&mut self, timeout: Duration) -> Result<bool, MonitorError> {
        let begin = Instant::now();
        while !self.monitor.settle()? {
            if begin.elapsed() >= timeout {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    /// Passes the card through without the model, if it is at a quiescent point. Returns `false` otherwise.
    pub fn open(&mut self, name: &str) -> Result<bool, ChangeError> {
        if self.paused {
            return Ok(false);
        }
        let failed = |source: MonitorError| ChangeError::Failed { name: name.to_owned(), source };
        self.collect_signaled();
        self.apply_signaled().map_err(failed)?;
        match self.monitor.open().map_err(failed)? {
            Passed::Done => {}
            Passed::Busy => return Ok(false),
            Passed::NotMapped(source) => {
                self.connect(name)?;
                self.readable().map_err(failed)?;
                return Err(ChangeError::NotMapped { name: name.to_owned(), source });
            }
            Passed::Refused(_) | Passed::Stopped => {
                return Err(ChangeError::Stopped { name: name.to_owned() });
            }
        }
        (self.supervision, self.masked) =
            (PageSupervision { times: self.supervision.times, ..PageSupervision::default() }, false);
        self.changes += 1;
        self.connect(name)?;
        Ok(true)
    }

    /// Puts the card under its model again. Returns `false` if that isn't possible now.
    pub fn close(&mut self, name: &str) -> Result<bool, ChangeError> {
        if self.paused {
            return Ok(false);
        }
        let failed = |source: MonitorError| ChangeError::Failed { name: name.to_owned(), source };
        match self.monitor.close().map_err(failed)? {
            Passed::Done => {}
            Passed::Busy => return Ok(false),
            Passed::Refused(refusal) => {
                return Err(ChangeError::NotAllowed { name: name.to_owned(), refusal });
            }
            Passed::NotMapped(_) | Passed::Stopped => {
                return Err(ChangeError::Stopped { name: name.to_owned() });
            }
        }
        self.changes += 1;
        self.connect(name)?;
        self.readable().map_err(failed)?;
        Ok(true)
    }

    /// Routes the card's interrupt to the guest's line, or to this process.
    pub fn connect(&mut self, name: &str) -> Result<(), ChangeError> {
        let open = self.monitor.is_open();
        let line = self.line.as_ref().filter(|_| open);
        let Some(card) = self.monitor.physical().card() else { return Ok(()) };
        let connected = match line {
            Some(line) => card.connect_interrupt(line),
            None => card.enable_interrupt(),
        };
        connected.map_err(|source| ChangeError::Interrupt { name: name.to_owned(), source })?;
        let failed = |source| ChangeError::Failed { name: name.to_owned(), source };
        self.monitor.connected().map_err(failed)
    }

    /// Changes the backend to the emulation, or to the card. The guest notices only lost frames, those in flight. No effect if the backend
    /// is the same.
    pub fn change(&mut self, name: &str, emulation: bool) -> Result<(), ChangeError> {
        if self.monitor.physical_ref().is_emulation() == emulation {
            return Ok(());
        }
        let failed = |source: MonitorError| ChangeError::Failed { name: name.to_owned(), source };
        if self.paused {
            return Err(ChangeError::Busy { name: name.to_owned() });
        }
        if self.aside.is_none() {
            let reason = "it was started without a tap beside its card";
            return Err(ChangeError::One { name: name.to_owned(), reason });
        }
        if !self.settle(QUIESCENT_POINT_TIMEOUT).map_err(failed)? {
            return Err(ChangeError::Busy { name: name.to_owned() });
        }
        self.monitor.release().map_err(failed)?;
        if let Some(mut other) = self.aside.take() {
            let prepared = other.physical().set_guest_bus_master(self.guest_master);
            prepared.map_err(|error| failed(error.into()))?;
            // The pause has released it: no guest has it.
            let (Ok(one) | Err(one)) = self.monitor.exchange(other);
            self.aside = Some(one);
        }
        if let Some(left) = &mut self.aside {
            // The idle backend receives nothing more, and keeps its line down.
            left.physical().set_guest_bus_master(false).map_err(|error| failed(error.into()))?;
            left.physical().reset().map_err(|error| failed(error.into()))?;
        }
        self.changes += 1;
        let switched = self.monitor.switch(self.guest, false).map_err(failed)?;
        if switched != Switched::Done {
            return Err(ChangeError::Stopped { name: name.to_owned() });
        }
        if let Some(card) = self.monitor.physical().card() {
            // A line that was up before may never be signaled.
            card.signalled();
        }
        self.monitor.interrupt().map_err(failed)?;
        self.update_page().map_err(failed)?;
        self.unmask().map_err(failed)
    }
}
