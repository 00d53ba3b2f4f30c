//! A NIC whose guest's requests are vetted by the model of its card.

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
use super::behind::{Behind, HostCard};
use super::mapped::Mapped;
use super::page::RegisterPage;
use super::traces::Traces;

/// How long a pause waits for a card to finish what the guest handed over.
const SETTLE: Duration = Duration::from_millis(200);
/// How long a guest's handler may take before its page is taken from it.
const ENDLESS: Duration = Duration::from_millis(100);
/// So often in a row the page comes back, until the next reset. A guest that is slow for once loses it once.
const RETURNS: u32 = 4;
/// After which time late writes are looked at where nothing brings them: at first, and at last.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));
/// How long a change of what is behind the NIC waits for a point at which the card can be taken from its guest.
pub(super) const REUSABLE: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Guarded<C> {
    pub monitor: Box<Monitor<Behind<C>>>,
    pub guest: GuestId,
    /// Called once, when the policy stops the guest.
    pub stop: Option<StopSink>,
    /// Where traces of what was refused go.
    pub traces: Option<Traces>,
    /// The card's line was up while its causes couldn't be read: VFIO keeps it masked until they are.
    pub masked: bool,
    /// Card or emulation, whichever isn't in use.
    pub aside: Option<Aside<Behind<C>>>,
    /// Bus mastering as the guest's command register has it.
    pub guest_master: bool,
    /// Changes of what is behind it.
    pub changes: u64,
    /// Where the guest reads the registers without an exit.
    pub page: Option<RegisterPage>,
    /// How the page is watched over.
    pub watch: Watch,
    /// Pages of the card that the guest may read without its model.
    pub free_pages: Vec<Mapped>,
    /// What the guest has of the card's BARs while it drives it without its model.
    pub whole: Vec<Mapped>,
    /// The guest's line, where the card's goes then. It is open as long as this: KVM and VFIO hold the eventfds' counters, not their files, and let
    /// go of a file that is closed.
    pub line: Option<LevelLine>,
    /// Nothing is mapped, told or late for a moment: every access comes here.
    pub bare: bool,
    /// The machine is paused: nothing changes, or a card would run meanwhile.
    pub paused: bool,
}

/// A guest's page is taken away while an interrupt of its doesn't end: it may read until no cause is left, which only a read that is seen can
/// bring about.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Writes that were told, and that late writes may be older than.
    told: Vec<Access>,
    /// Since when the guest has an interrupt.
    since: Option<Instant>,
    /// Until when nothing is looked at, where nothing happens.
    look: Duration,
    /// The page is away.
    pub taken: bool,
    /// How often it was, and how often in a row.
    pub times: u32,
    in_a_row: u32,
}

/// What is behind a NIC can't be changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// There is nothing else.
    #[error("NIC {name} has one mode only: {reason}")]
    One {
        /// Which.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// The guest uses it without pause.
    #[error(
        "NIC {name} was not at a point where its card can be taken from its guest for {} s; try again with less traffic",
        REUSABLE.as_secs()
    )]
    Busy {
        /// Which.
        name: String,
    },
    /// The guest has no right to its card any more.
    #[error("NIC {name} was stopped before, by its policy; reset the VM")]
    Stopped {
        /// Which.
        name: String,
    },
    /// It does with its card what the model doesn't allow.
    #[error("NIC {name} stays passed through: {refusal}")]
    NotAllowed {
        /// Which.
        name: String,
        /// What.
        refusal: Refusal,
    },
    /// The card can't have all of the guest's memory.
    #[error("NIC {name} stays under its model: the guest's memory can't be mapped for its card")]
    NotMapped {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: DeviceError,
    },
    /// The card's interrupt can't be sent elsewhere.
    #[error("The interrupt of NIC {name} can't be connected")]
    Interrupt {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// Its thread.
    #[error("The thread of NIC {name} doesn't answer; see the monitor's log")]
    Silent {
        /// Which.
        name: String,
    },
    /// The card.
    #[error("NIC {name} failed")]
    Failed {
        /// Which.
        name: String,
        /// Why.
        #[source]
        source: MonitorError,
    },
}

impl<C: HostCard> Guarded<C> {
    /// The guest accesses a BAR. A read's value.
    pub fn access(&mut self, access: Access) -> Result<u32, MonitorError> {
        if self.monitor.is_open() {
            return self.monitor.watched(self.guest, access);
        }
        if !self.is_prompt() {
            self.take_told()?;
        }
        let result = self.make(access);
        self.show()?;
        result
    }

    fn is_prompt(&self) -> bool {
        self.page.as_ref().is_some_and(|page| !page.prompt().is_empty())
    }

    /// Writes that were only told of happen now, before what came after them. They change nothing that could be refused. Where they are prompt
    /// only those happen that were collected before late writes were taken: what they must not overtake waits there.
    fn take_told(&mut self) -> Result<(), MonitorError> {
        let Some(page) = self.page.as_ref().filter(|_| !self.monitor.is_open()) else { return Ok(()) };
        if page.prompt().is_empty() {
            for access in page.take_told() {
                self.monitor.access(self.guest, access)?;
            }
        }
        for access in std::mem::take(&mut self.watch.told) {
            self.monitor.access(self.guest, access)?;
        }
        Ok(())
    }

    /// Notes what was told of, where it is prompt. Late writes are taken next, and then [`Self::told`] is called. So a mask that is opened is
    /// never closed by what the guest wrote before; what it wrote right after, to close it, may count as before: an interrupt comes then that
    /// was on its way.
    pub fn collect_told(&mut self) {
        if let Some(page) = self.page.as_ref().filter(|page| !page.prompt().is_empty()) {
            for access in page.take_told() {
                if !self.watch.told.contains(&access) {
                    self.watch.told.push(access);
                }
            }
        }
    }

    /// The guest has told of something, or it is looked whether late writes wait.
    pub fn told(&mut self) -> Result<(), MonitorError> {
        self.take_told()?;
        self.show()
    }

    /// The guest's line was raised.
    pub fn raised(&mut self) {
        self.monitor.raised(self.guest);
        self.watch.since.get_or_insert_with(Instant::now);
    }

    /// Watches over the page, after anything that its thread does. Whether mappings have changed.
    pub fn watch(&mut self, now: Instant) -> bool {
        if self.monitor.is_open() {
            return false;
        }
        let watch = &mut self.watch;
        let endless = watch.since.is_some_and(|since| now.saturating_duration_since(since) >= ENDLESS);
        let take = self.page.is_some()
            && self.monitor.clears_by_reads()
            && (endless || watch.taken && (watch.since.is_some() || watch.in_a_row > RETURNS));
        if take && !watch.taken {
            watch.times += 1;
            watch.in_a_row += 1;
        }
        std::mem::replace(&mut watch.taken, take) != take
    }

    /// When late writes are looked at again, with nothing that brings them: while the guest has an interrupt, or causes that it doesn't want to
    /// hear of now. A driver that only polls fills its ring again by late writes.
    pub fn again(&mut self, idle: bool) -> Option<Duration> {
        if self.page.is_none() || self.monitor.is_open() || !self.monitor.clears_by_reads() {
            return None;
        }
        let (first, last) = LOOKS;
        self.watch.look = if idle { (self.watch.look * 2).clamp(first, last) } else { first };
        let waits = self.watch.since.is_some() && !self.watch.taken || self.monitor.has_causes(self.guest);
        waits.then_some(self.watch.look)
    }

    /// Brings the guest's page up to date.
    pub fn show(&mut self) -> Result<(), MonitorError> {
        match &self.page {
            _ if self.monitor.is_open() => Ok(()),
            Some(page) => self.monitor.show(self.guest, &mut |shown| page.put(shown)),
            None => Ok(()),
        }
    }

    /// The guest's registers read ones from now on.
    pub fn gone(&self) {
        if let Some(page) = &self.page {
            page.fill(u32::MAX);
        }
    }

    /// The guest's line was lowered: whoever raises it again has to know what the guest was told of.
    pub fn lowered(&mut self) -> Result<(), MonitorError> {
        if self.monitor.is_open() {
            return Ok(());
        }
        if self.watch.since.take().is_some() && !self.watch.taken {
            self.watch.in_a_row = 0;
        }
        self.take_told()?;
        self.monitor.lowered(self.guest);
        self.show()
    }

    /// Whether causes were taken that the guest may not have read: late writes are taken once more then, and [`Self::seen`] is called.
    pub fn has_unseen(&self) -> bool {
        !self.monitor.is_open() && self.monitor.has_unseen(self.guest)
    }

    /// See [`vpio::shown`].
    pub fn seen(&mut self) {
        self.monitor.seen(self.guest);
    }

    fn make(&mut self, access: Access) -> Result<u32, MonitorError> {
        let resets = self.monitor.resets(self.guest);
        let answer = self.monitor.access(self.guest, access)?;
        if let Some(traces) = &mut self.traces {
            // Before the VM ends for it.
            traces.keep(self.monitor.violations(self.guest));
        }
        if self.monitor.resets(self.guest) != resets {
            // What was told of before is over with the rest.
            self.collect_told();
            self.watch.told.clear();
        }
        if self.monitor.physical_ref().is_emulation() {
            // No eventfd tells of its line.
            self.monitor.interrupt()?;
        }
        match answer {
            Answer::Done(value) => return Ok(value),
            Answer::Stopped => {
                self.gone();
                if let Some(stop) = self.stop.take() {
                    // The last one of those that are kept is this one, or came before it: policy `stop` refuses once.
                    let why = self.monitor.violations(self.guest).last();
                    stop(why.map_or_else(String::new, |violation| violation.refusal.to_string()));
                }
            }
            // This is the thread of the vCPU that made the access, or the NIC's, which sees to it that a vCPU has it.
            Answer::MachineCheck => machine::machine_check::raise(),
            // Nobody else has the card.
            Answer::Wait => {}
        }
        // Until the VM has ended, as a device that is gone.
        Ok(u32::MAX)
    }

    /// What tells of a card's line, and of frames for its emulation.
    pub fn sources(&self) -> io::Result<Vec<OwnedFd>> {
        let (mut card, mut wire) = (None, None);
        let aside = self.aside.as_ref().map(Aside::physical_ref);
        for behind in [Some(self.monitor.physical_ref()), aside].into_iter().flatten() {
            match behind {
                Behind::Card(one) => card = Some(one.interrupt_fd()?),
                Behind::Emulation(one) => wire = Some(one.wire.queue.try_clone()?),
            }
        }
        Ok(card.into_iter().chain(wire).collect())
    }

    /// Opens the line again once its causes have been taken.
    pub fn unmask(&mut self) -> Result<(), MonitorError> {
        self.masked = self.monitor.causes_wait();
        if !self.masked {
            self.monitor.physical().unmask()?;
        }
        Ok(())
    }

    /// The card's line has been told of, or frames have come for the emulation.
    pub fn readable(&mut self) -> Result<(), MonitorError> {
        if self.monitor.is_open() {
            // Told before the line went to the guest: it is taken, or the thread would come again and again.
            if let Some(card) = self.monitor.physical().card() {
                card.signalled();
            }
            return Ok(());
        }
        match self.monitor.physical() {
            Behind::Card(card) => card.signalled(),
            Behind::Emulation(emulation) => emulation.feed(),
        }
        self.take_told()?;
        self.monitor.interrupt()?;
        self.show()?;
        self.unmask()
    }

    /// Bus mastering as the guest's command register has it.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), MonitorError> {
        self.guest_master = on;
        Ok(self.monitor.physical().set_guest_bus_master(on)?)
    }

    /// Takes the card from the guest, whose vCPUs stand.
    pub fn quiesce(&mut self) -> Result<(), MonitorError> {
        self.paused = true;
        if self.monitor.is_open() {
            return Ok(self.monitor.physical().set_bus_master(false)?);
        }
        self.settle(SETTLE)?;
        self.monitor.release()
    }

    /// Gives it back.
    pub fn unquiesce(&mut self) -> Result<(), MonitorError> {
        self.paused = false;
        if self.monitor.is_open() {
            return Ok(self.monitor.physical().set_bus_master(true)?);
        }
        self.monitor.switch(self.guest, false)?;
        // A handler that runs has its time from here on: in the pause its guest didn't run.
        self.watch.since = self.watch.since.map(|_| Instant::now());
        self.show()?;
        Ok(self.monitor.physical().unmask()?)
    }

    /// Power-on state.
    pub fn reset(&mut self) -> Result<(), MonitorError> {
        self.set_guest_bus_master(false)?;
        // What was told before is forgotten with the rest.
        self.collect_told();
        self.take_told()?;
        (self.watch.since, self.watch.in_a_row) = (None, 0);
        if let Some(page) = &self.page {
            page.fill(0);
        }
        self.monitor.power_on(self.guest)?;
        self.show()?;
        Ok(self.monitor.physical().unmask()?)
    }

    /// Whether the card can be taken from the guest, after some time at the most.
    fn settle(&mut self, patience: Duration) -> Result<bool, MonitorError> {
        let begin = Instant::now();
        while !self.monitor.settle()? {
            if begin.elapsed() >= patience {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    /// Gives the guest its card without the model, if it is at a point at which that can be: `false` otherwise.
    pub fn open(&mut self, name: &str) -> Result<bool, ChangeError> {
        if self.paused {
            return Ok(false);
        }
        let failed = |source: MonitorError| ChangeError::Failed { name: name.to_owned(), source };
        self.collect_told();
        self.take_told().map_err(failed)?;
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
        (self.watch, self.masked) = (Watch { times: self.watch.times, ..Watch::default() }, false);
        self.changes += 1;
        self.connect(name)?;
        Ok(true)
    }

    /// Takes the guest's card under its model again: `false` where that can't be now.
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

    /// Sends the card's interrupt to whom it concerns.
    pub fn connect(&mut self, name: &str) -> Result<(), ChangeError> {
        let open = self.monitor.is_open();
        let line = self.line.as_ref().filter(|_| open);
        let Some(card) = self.monitor.physical().card() else { return Ok(()) };
        let connected = match line {
            Some(line) => card.pass_interrupt(line),
            None => card.tell_interrupt(),
        };
        connected.map_err(|source| ChangeError::Interrupt { name: name.to_owned(), source })?;
        let failed = |source| ChangeError::Failed { name: name.to_owned(), source };
        self.monitor.connected().map_err(failed)
    }

    /// Takes the guest to the emulation, or to the card. It sees nothing of it but lost frames: those that are on their way. Nothing where it is
    /// there already.
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
        if !self.settle(REUSABLE).map_err(failed)? {
            return Err(ChangeError::Busy { name: name.to_owned() });
        }
        self.monitor.release().map_err(failed)?;
        if let Some(mut other) = self.aside.take() {
            let prepared = other.physical().set_guest_bus_master(self.guest_master);
            prepared.map_err(|error| failed(error.into()))?;
            // Nobody has it: it was released.
            let (Ok(one) | Err(one)) = self.monitor.exchange(other);
            self.aside = Some(one);
        }
        if let Some(left) = &mut self.aside {
            // What is left behind receives nothing more, and holds its line down.
            left.physical().set_guest_bus_master(false).map_err(|error| failed(error.into()))?;
            left.physical().reset().map_err(|error| failed(error.into()))?;
        }
        self.changes += 1;
        let switched = self.monitor.switch(self.guest, false).map_err(failed)?;
        if switched != Switched::Done {
            return Err(ChangeError::Stopped { name: name.to_owned() });
        }
        if let Some(card) = self.monitor.physical().card() {
            // A line that was up before may never be signalled.
            card.signalled();
        }
        self.monitor.interrupt().map_err(failed)?;
        self.show().map_err(failed)?;
        self.unmask().map_err(failed)
    }
}
