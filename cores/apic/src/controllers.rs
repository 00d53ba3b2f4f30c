//! The interrupt controllers of one node: its local APICs, each with its own lock, the IOAPIC, and the bus between them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::io_apic::{IO_APIC_PINS, IoApic, PinEffect};
use crate::local::{Effect, GeneralProtection, LocalApic, LocalSource, VcpuEvent};
use crate::message::{Delivery, Destination, Message, MsiError, NodeMessage};
use crate::registers::{APIC_BASE, X2APIC_FIRST, X2APIC_LAST, XAPIC_DISABLE_STATUS};
use crate::saved::{RestoreError, SavedControllers, VERSION};
use crate::topology::{Config, ConfigError, IoApicLocation, NodeId, Topology};

/// An action for the caller. A call appends actions, and the caller executes them in order after the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Kick the vCPU: out of the guest, from HLT, or from its wait for a start-up IPI. It then calls [`VcpuPort::next_event`].
    Kick {
        /// The vCPU's APIC id.
        apic_id: u32,
    },
    /// Set the vCPU's timer, which kicks it when it expires; replaces the previous setting. Only calls of the vCPU's own [`VcpuPort`]
    /// append it.
    SetTimer {
        /// The vCPU's APIC id.
        apic_id: u32,
        /// Expiry in nanoseconds, on the clock of the calls' `now_ns`; `None` stops the timer.
        due_ns: Option<u64>,
    },
    /// A level-triggered interrupt of this pin has ended: devices that still need service assert the line again.
    Resample {
        /// The IOAPIC's pin.
        pin: u8,
    },
    /// Send a message to another node, which passes it to its [`Controllers::receive`].
    Send {
        /// The node.
        node: NodeId,
        /// The message.
        message: NodeMessage,
    },
}

/// An IOAPIC pin that this node can't drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The pin's number is above 23.
    #[error("IOAPIC pin {pin} doesn't exist: use 0 to 23")]
    Pin {
        /// The pin.
        pin: u32,
    },
    /// The IOAPIC is on another node.
    #[error("IOAPIC pin {pin} is on node {node}: drive it there")]
    Elsewhere {
        /// The pin.
        pin: u32,
        /// The IOAPIC's node.
        node: NodeId,
    },
}

/// An interrupt input of a local APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalInput {
    /// The thermal sensor's event.
    Thermal,
    /// A performance counter's overflow.
    Performance,
    /// The new level of LINT0; `true` is asserted.
    Lint0(bool),
    /// The new level of LINT1; `true` is asserted.
    Lint1(bool),
}

struct Slot {
    apic: LocalApic,
    /// `due_ns` of the last [`Action::SetTimer`].
    reported_due_ns: Option<u64>,
}

/// The interrupt controllers of one node. Thread-safe; the crate's documentation lists the threads that call them.
pub struct Controllers {
    config: Config,
    topology: Topology,
    local: Vec<Mutex<Slot>>,
    /// Locked before a local APIC, never after.
    io_apic: Option<Mutex<IoApic>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Controllers {
    /// Controllers in their power-on state.
    ///
    /// # Errors
    /// When the configuration has no local APIC, too many APICs, or an invalid id.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let topology = Topology::new(&config)?;
        let bootstrap = config.bootstrap_apic_id;
        let apics =
            topology.local().iter().map(|id| LocalApic::new(*id, *id == bootstrap, config.timer_tick_ns));
        let local = apics.map(Slot::new).collect();
        let io_apic = (config.io_apic == IoApicLocation::Here)
            .then(|| Mutex::new(IoApic::new(config.extended_destination_ids)));
        Ok(Self { config, topology, local, io_apic })
    }

    /// Controllers that continue from a saved state at `now_ns`. Each vCPU's first [`VcpuPort::next_event`] sets its timer.
    ///
    /// # Errors
    /// When the state has another version, belongs to another VM, or has a value that no controller can have.
    pub fn restore(config: Config, saved: &SavedControllers, now_ns: u64) -> Result<Self, RestoreError> {
        if saved.version != VERSION {
            return Err(RestoreError::Version { found: saved.version });
        }
        let mut controllers = Self::new(config).map_err(RestoreError::Config)?;
        let expected = controllers.topology.local();
        if !saved.local.iter().map(|apic| apic.id).eq(expected.iter().copied()) {
            let found = saved.local.iter().map(|apic| apic.id).take(expected.len() + 1).collect();
            return Err(RestoreError::ApicIds { found, expected: expected.to_vec() });
        }
        let (bootstrap, tick_ns) = (controllers.config.bootstrap_apic_id, controllers.config.timer_tick_ns);
        let apics =
            saved.local.iter().map(|apic| LocalApic::restore(apic, apic.id == bootstrap, tick_ns, now_ns));
        controllers.local = apics.map(|apic| Ok(Slot::new(apic?))).collect::<Result<_, _>>()?;
        controllers.io_apic = match (&saved.io_apic, &controllers.io_apic) {
            (Some(saved), Some(_)) => {
                Some(Mutex::new(IoApic::restore(saved, controllers.config.extended_destination_ids)?))
            }
            (None, None) => None,
            _ => return Err(RestoreError::IoApicLocation),
        };
        Ok(controllers)
    }

    /// Replaces the state by a saved one, which continues at `now_ns` with the present configuration. Requires that no vCPU runs and no
    /// device interrupts.
    ///
    /// # Errors
    /// As for [`Self::restore`]; then the state is unchanged.
    pub fn load(&self, saved: &SavedControllers, now_ns: u64) -> Result<(), RestoreError> {
        let restored = Self::restore(self.config.clone(), saved, now_ns)?;
        for (slot, restored) in self.local.iter().zip(restored.local) {
            *lock(slot) = restored.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        if let (Some(io_apic), Some(restored)) = (&self.io_apic, restored.io_apic) {
            *lock(io_apic) = restored.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Saves the state at `now_ns`. Requires that no vCPU runs and no device interrupts.
    pub fn save(&self, now_ns: u64) -> SavedControllers {
        SavedControllers {
            version: VERSION,
            local: self.local.iter().map(|slot| lock(slot).apic.save(now_ns)).collect(),
            io_apic: self.io_apic.as_ref().map(|io_apic| lock(io_apic).save()),
        }
    }

    /// Resets all controllers to their power-on state. Requires that no vCPU runs. Lines that devices assert stay asserted;
    /// [`Self::assert_until_end`] has no effect any more.
    pub fn reset(&self) {
        for slot in &self.local {
            lock(slot).apic.reset();
        }
        if let Some(io_apic) = &self.io_apic {
            lock(io_apic).reset();
        }
    }

    /// Ids of this node's APICs, ascending.
    pub fn apic_ids(&self) -> &[u32] {
        self.topology.local()
    }

    /// The port of the vCPU with this APIC id; `None` if the vCPU isn't on this node.
    pub fn vcpu(&self, apic_id: u32) -> Option<VcpuPort<'_>> {
        let index = self.topology.index_of(apic_id)?;
        Some(VcpuPort { controllers: self, apic_id, index })
    }

    /// Whether an MSR is a local APIC's, so that [`VcpuPort`] emulates its accesses.
    pub fn owns_msr(msr: u32) -> bool {
        matches!(msr, APIC_BASE | XAPIC_DISABLE_STATUS | X2APIC_FIRST..=X2APIC_LAST)
    }

    /// Sets the level of an IOAPIC pin's line, as its device drives it.
    ///
    /// # Errors
    /// When the pin doesn't exist, or the IOAPIC is on another node.
    pub fn set_line(&self, pin: u32, asserted: bool, actions: &mut Vec<Action>) -> Result<(), LineError> {
        self.drive(pin, |io_apic, pin| io_apic.set_line(pin, asserted), actions)
    }

    /// Asserts an IOAPIC pin's line until [`Action::Resample`] for the pin, like an irqfd with a resampling eventfd (KVM_IRQFD).
    ///
    /// # Errors
    /// When the pin doesn't exist, or the IOAPIC is on another node.
    pub fn assert_until_end(&self, pin: u32, actions: &mut Vec<Action>) -> Result<(), LineError> {
        self.drive(pin, IoApic::assert_until_end, actions)
    }

    fn drive(
        &self,
        pin: u32,
        change: impl FnOnce(&mut IoApic, u8) -> bool,
        actions: &mut Vec<Action>,
    ) -> Result<(), LineError> {
        let number = u8::try_from(pin).ok().filter(|number| *number < IO_APIC_PINS);
        let number = number.ok_or(LineError::Pin { pin })?;
        let Some(io_apic) = &self.io_apic else {
            let IoApicLocation::Node(node) = self.config.io_apic else { return Err(LineError::Pin { pin }) };
            return Err(LineError::Elsewhere { pin, node });
        };
        let mut io_apic = lock(io_apic);
        if change(&mut io_apic, number) {
            self.serve_pin(&mut io_apic, number, actions);
        }
        Ok(())
    }

    /// Sends the pin's pending interrupt, if any. If an APIC accepts a level-triggered one, remote IRR delays the next until its EOI.
    fn serve_pin(&self, io_apic: &mut IoApic, pin: u8, actions: &mut Vec<Action>) {
        let Some(message) = io_apic.pending(pin) else { return };
        let waits_for_end =
            matches!(message.delivery, Delivery::Fixed { .. } | Delivery::LowestPriority { .. });
        if self.deliver(message, None, actions) && io_apic.is_level(pin) && waits_for_end {
            io_apic.set_remote_irr(pin);
        }
    }

    /// Handles an EOI of level-triggered interrupts with this vector. A pin whose line is still asserted interrupts again, and so does a
    /// pin whose interrupt no APIC had accepted.
    fn end_of_level(&self, io_apic: &mut IoApic, vector: u8, actions: &mut Vec<Action>) {
        let ended = io_apic.end(vector);
        for pin in 0..IO_APIC_PINS {
            if ended >> pin & 1 != 0 {
                io_apic.release(pin);
                actions.push(Action::Resample { pin });
            }
            if io_apic.is_level(pin) && io_apic.vector(pin) == vector {
                self.serve_pin(io_apic, pin, actions);
            }
        }
    }

    fn broadcast_end(&self, vector: u8, actions: &mut Vec<Action>) {
        match (&self.io_apic, self.config.io_apic) {
            (Some(io_apic), _) => self.end_of_level(&mut lock(io_apic), vector, actions),
            (None, IoApicLocation::Node(node)) => {
                actions.push(Action::Send { node, message: NodeMessage::EndOfInterrupt { vector } });
            }
            (None, IoApicLocation::Here) => {}
        }
    }

    /// Reads the IOAPIC's page, 4 KiB at 0xFEC00000. Returns all ones if the IOAPIC is on another node.
    pub fn read_io_apic(&self, offset: u64, data: &mut [u8]) {
        match &self.io_apic {
            Some(io_apic) => lock(io_apic).read(offset, data),
            None => data.fill(0xFF),
        }
    }

    /// Writes to the IOAPIC's page. Has no effect if the IOAPIC is on another node.
    pub fn write_io_apic(&self, offset: u64, data: &[u8], actions: &mut Vec<Action>) {
        let Some(io_apic) = &self.io_apic else { return };
        let mut io_apic = lock(io_apic);
        match io_apic.write(offset, data) {
            PinEffect::None => {}
            PinEffect::Service(pin) => self.serve_pin(&mut io_apic, pin, actions),
            PinEffect::End(vector) => self.end_of_level(&mut io_apic, vector, actions),
        }
    }

    /// Sends a message-signalled interrupt, whose address and data are those of the device's write.
    ///
    /// # Errors
    /// When the address isn't the APICs', or the delivery mode is reserved.
    pub fn signal_msi(&self, address: u64, data: u32, actions: &mut Vec<Action>) -> Result<(), MsiError> {
        let message = Message::from_msi(address, data, self.config.extended_destination_ids)?;
        self.deliver(message, None, actions);
        Ok(())
    }

    /// Handles a message of another node. It is never forwarded; only an EOI may make a pin of the IOAPIC send a new interrupt.
    pub fn receive(&self, message: NodeMessage, actions: &mut Vec<Action>) {
        match message {
            NodeMessage::Interrupt(message) => {
                self.deliver_here(message, None, actions);
            }
            NodeMessage::EndOfInterrupt { vector } => {
                if let Some(io_apic) = &self.io_apic {
                    self.end_of_level(&mut lock(io_apic), vector, actions);
                }
            }
        }
    }

    /// Delivers a message to its destinations, and returns whether any accepts it. APICs of other nodes count as accepting.
    fn deliver(&self, message: Message, sender: Option<usize>, actions: &mut Vec<Action>) -> bool {
        let Some(message) = self.arbitrate(message) else { return false };
        let mut accepted = self.deliver_here(message, sender, actions);
        for node in self.topology.target_nodes(message.destination) {
            actions.push(Action::Send { node, message: NodeMessage::Interrupt(message) });
            accepted = true;
        }
        accepted
    }

    fn deliver_here(&self, message: Message, sender: Option<usize>, actions: &mut Vec<Action>) -> bool {
        let mut accepted = false;
        for index in self.topology.local_targets(message.destination) {
            let mut slot = lock(&self.local[index]);
            accepted |= slot.apic.accept(message.delivery);
            if slot.apic.take_attention() && sender != Some(index) {
                actions.push(Action::Kick { apic_id: self.topology.local()[index] });
            }
        }
        accepted
    }

    /// Chooses one destination of a lowest-priority message by its vector, as chipsets do: of n candidates in ascending order of ids, the
    /// one with index `vector` modulo n. APICs of this node that are disabled by software are no candidates.
    fn arbitrate(&self, message: Message) -> Option<Message> {
        let Delivery::LowestPriority { vector, trigger } = message.delivery else { return Some(message) };
        let destination = message.destination;
        let local = self.topology.local_targets(destination);
        let local = local.filter(|index| lock(&self.local[*index]).apic.is_enabled());
        let mut ids: Vec<u32> = local.map(|index| self.topology.local()[index]).collect();
        ids.extend(self.topology.remote_targets(destination).map(|apic| apic.apic_id));
        ids.sort_unstable();
        let chosen = usize::from(vector).checked_rem(ids.len())?;
        let destination = Destination::Physical(ids[chosen]);
        Some(Message { destination, delivery: Delivery::Fixed { vector, trigger } })
    }
}

impl Slot {
    fn new(apic: LocalApic) -> Mutex<Self> {
        Mutex::new(Self { apic, reported_due_ns: None })
    }
}

/// The controllers' interface to one vCPU, for the vCPU's own thread.
#[derive(Clone, Copy)]
pub struct VcpuPort<'a> {
    controllers: &'a Controllers,
    apic_id: u32,
    index: usize,
}

impl VcpuPort<'_> {
    /// Runs `work` on the APIC, and appends [`Action::SetTimer`] if it has changed the timer.
    fn with<R>(&self, actions: &mut Vec<Action>, work: impl FnOnce(&mut LocalApic) -> R) -> R {
        let mut slot = lock(&self.controllers.local[self.index]);
        let result = work(&mut slot.apic);
        let due_ns = slot.apic.timer_due_ns();
        if due_ns != slot.reported_due_ns {
            slot.reported_due_ns = due_ns;
            actions.push(Action::SetTimer { apic_id: self.apic_id, due_ns });
        }
        result
    }

    /// Emulates RDMSR of an MSR for which [`Controllers::owns_msr`] holds.
    ///
    /// # Errors
    /// When the register can't be read: the guest gets #GP(0).
    pub fn read_msr(
        &self,
        msr: u32,
        now_ns: u64,
        actions: &mut Vec<Action>,
    ) -> Result<u64, GeneralProtection> {
        self.with(actions, |apic| apic.read_msr(msr, now_ns))
    }

    /// Emulates WRMSR of an MSR for which [`Controllers::owns_msr`] holds.
    ///
    /// # Errors
    /// When the register doesn't accept the value: the guest gets #GP(0), and nothing has changed.
    pub fn write_msr(
        &self,
        msr: u32,
        value: u64,
        now_ns: u64,
        actions: &mut Vec<Action>,
    ) -> Result<(), GeneralProtection> {
        match self.with(actions, |apic| apic.write_msr(msr, value, now_ns))? {
            Effect::None => {}
            Effect::Send(message) => {
                self.controllers.deliver(message, Some(self.index), actions);
            }
            Effect::BroadcastEnd(vector) => self.controllers.broadcast_end(vector, actions),
        }
        Ok(())
    }

    /// Updates TPR from the vCPU's CR8, if that has changed. Call it after each exit, before other calls.
    pub fn set_cr8(&self, cr8: u8) {
        lock(&self.controllers.local[self.index]).apic.set_cr8(cr8);
    }

    /// CR8 to load before the vCPU enters the guest: bits 7:4 of TPR.
    pub fn cr8(&self) -> u8 {
        lock(&self.controllers.local[self.index]).apic.cr8()
    }

    /// The next event to handle before the vCPU enters the guest. Repeat the call until it returns [`VcpuEvent::None`],
    /// [`VcpuEvent::AwaitInterruptWindow`] or [`VcpuEvent::WaitForStartup`].
    ///
    /// `interruptible`: the vCPU can accept an interrupt now. RFLAGS.IF is set, no interrupt shadow blocks it, and no previous event waits
    /// for its injection.
    pub fn next_event(&self, interruptible: bool, now_ns: u64, actions: &mut Vec<Action>) -> VcpuEvent {
        self.with(actions, |apic| apic.next_event(interruptible, now_ns))
    }

    /// Whether an event must wake a vCPU that is halted or waits for a start-up IPI. `interruptible`: RFLAGS.IF is set.
    pub fn has_event(&self, interruptible: bool, now_ns: u64, actions: &mut Vec<Action>) -> bool {
        self.with(actions, |apic| apic.has_event(interruptible, now_ns))
    }

    /// Applies an event or a level to an input of the local APIC. Any thread may call it.
    pub fn set_input(&self, input: LocalInput, actions: &mut Vec<Action>) {
        let mut slot = lock(&self.controllers.local[self.index]);
        match input {
            LocalInput::Thermal => slot.apic.fire(LocalSource::Thermal),
            LocalInput::Performance => slot.apic.fire(LocalSource::Performance),
            LocalInput::Lint0(asserted) => slot.apic.set_lint(LocalSource::Lint0, asserted),
            LocalInput::Lint1(asserted) => slot.apic.set_lint(LocalSource::Lint1, asserted),
        }
        if slot.apic.take_attention() {
            actions.push(Action::Kick { apic_id: self.apic_id });
        }
    }
}
