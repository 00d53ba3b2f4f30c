//! A node's controllers together: local APICs, each behind its own lock, the IOAPIC, and the bus between them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::io_apic::{IO_APIC_PINS, IoApic, PinEffect};
use crate::local::{Effect, GeneralProtection, LocalApic, LocalSource, VcpuEvent};
use crate::message::{Delivery, Destination, Message, MsiError, NodeMessage};
use crate::registers::{APIC_BASE, X2APIC_FIRST, X2APIC_LAST, XAPIC_DISABLE_STATUS};
use crate::saved::{RestoreError, SavedControllers, VERSION};
use crate::topology::{Config, ConfigError, IoApicLocation, NodeId, Topology};

/// What the caller has to do after a call, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make the vCPU leave the guest, or wake it from HLT or its wait for a start-up IPI, so that it asks [`VcpuPort::next_event`].
    Kick {
        /// The vCPU's APIC id.
        apic_id: u32,
    },
    /// Kick the vCPU at this time instead of the one given before. Only comes from calls of the vCPU's own [`VcpuPort`].
    SetTimer {
        /// The vCPU's APIC id.
        apic_id: u32,
        /// On the clock whose time is given to calls; `None` for never.
        due_ns: Option<u64>,
    },
    /// A level-triggered interrupt of this pin has ended: devices that still need service assert the line again.
    Resample {
        /// The IOAPIC's pin.
        pin: u8,
    },
    /// Send this to another node, which gives it to its [`Controllers::receive`].
    Send {
        /// The node.
        node: NodeId,
        /// What to send.
        message: NodeMessage,
    },
}

/// A pin or an interrupt input doesn't exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Out of range.
    #[error("IOAPIC pin {pin} doesn't exist: use 0 to 23")]
    Pin {
        /// The pin.
        pin: u32,
    },
    /// It is on another node.
    #[error("IOAPIC pin {pin} is on node {node}: drive it there")]
    Elsewhere {
        /// The pin.
        pin: u32,
        /// Where the IOAPIC is.
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
    /// LINT0 becomes asserted or not.
    Lint0(bool),
    /// LINT1 becomes asserted or not.
    Lint1(bool),
}

struct Slot {
    apic: LocalApic,
    /// What the last [`Action::SetTimer`] said.
    reported_due_ns: Option<u64>,
}

/// The interrupt controllers of one node. See the crate's documentation for the threads that call them.
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
    /// After power-on.
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

    /// Continues from a saved state at `now_ns`. Timers report when they are due with each vCPU's first [`VcpuPort::next_event`].
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

    /// Continues from a saved state at `now_ns`, with the config that these controllers were made from, while no vCPU runs and no device interrupts. After
    /// an error nothing has changed.
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

    /// State at `now_ns`, while no vCPU runs and no device interrupts.
    pub fn save(&self, now_ns: u64) -> SavedControllers {
        SavedControllers {
            version: VERSION,
            local: self.local.iter().map(|slot| lock(slot).apic.save(now_ns)).collect(),
            io_apic: self.io_apic.as_ref().map(|io_apic| lock(io_apic).save()),
        }
    }

    /// Power-on state, while no vCPU runs. Lines stay asserted.
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

    /// The part of a vCPU of this node.
    pub fn vcpu(&self, apic_id: u32) -> Option<VcpuPort<'_>> {
        let index = self.topology.index_of(apic_id)?;
        Some(VcpuPort { controllers: self, apic_id, index })
    }

    /// Whether accesses to this MSR belong to a [`VcpuPort`].
    pub fn owns_msr(msr: u32) -> bool {
        matches!(msr, APIC_BASE | XAPIC_DISABLE_STATUS | X2APIC_FIRST..=X2APIC_LAST)
    }

    /// A device asserts an IOAPIC pin's line, or doesn't any more.
    pub fn set_line(&self, pin: u32, asserted: bool, actions: &mut Vec<Action>) -> Result<(), LineError> {
        self.drive(pin, |io_apic, pin| io_apic.set_line(pin, asserted), actions)
    }

    /// Asserts an IOAPIC pin's line until [`Action::Resample`] for the pin: what an eventfd with a resampler does.
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

    /// Sends what the pin has to send. A level-triggered pin waits for the interrupt's end once an APIC has accepted it.
    fn serve_pin(&self, io_apic: &mut IoApic, pin: u8, actions: &mut Vec<Action>) {
        let Some(message) = io_apic.pending(pin) else { return };
        let waits_for_end =
            matches!(message.delivery, Delivery::Fixed { .. } | Delivery::LowestPriority { .. });
        if self.deliver(message, None, actions) && io_apic.is_level(pin) && waits_for_end {
            io_apic.set_remote_irr(pin);
        }
    }

    /// Level-triggered interrupts with this vector have ended. A pin whose line is still asserted interrupts again, and so does one whose interrupt
    /// no APIC had accepted.
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

    /// A read of the IOAPIC's page, which is 4 KiB at 0xFEC00000. All ones where the IOAPIC is on another node.
    pub fn read_io_apic(&self, offset: u64, data: &mut [u8]) {
        match &self.io_apic {
            Some(io_apic) => lock(io_apic).read(offset, data),
            None => data.fill(0xFF),
        }
    }

    /// A write to the IOAPIC's page. Without effect where the IOAPIC is on another node.
    pub fn write_io_apic(&self, offset: u64, data: &[u8], actions: &mut Vec<Action>) {
        let Some(io_apic) = &self.io_apic else { return };
        let mut io_apic = lock(io_apic);
        match io_apic.write(offset, data) {
            PinEffect::None => {}
            PinEffect::Service(pin) => self.serve_pin(&mut io_apic, pin, actions),
            PinEffect::End(vector) => self.end_of_level(&mut io_apic, vector, actions),
        }
    }

    /// A message-signalled interrupt as a device writes it.
    pub fn signal_msi(&self, address: u64, data: u32, actions: &mut Vec<Action>) -> Result<(), MsiError> {
        let message = Message::from_msi(address, data, self.config.extended_destination_ids)?;
        self.deliver(message, None, actions);
        Ok(())
    }

    /// What another node has sent to this one. Never makes a node send a message on, but for interrupts of the IOAPIC's pins.
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

    /// Gives a message to its destinations. Whether any accepts it; APICs of other nodes are taken to.
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

    /// Chooses one destination of a lowest-priority message by its vector, as chipsets do: among those in ascending order of ids, without the
    /// APICs of this node that are disabled by software.
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

/// One vCPU's part of its node's controllers: for the vCPU's own thread.
#[derive(Clone, Copy)]
pub struct VcpuPort<'a> {
    controllers: &'a Controllers,
    apic_id: u32,
    index: usize,
}

impl VcpuPort<'_> {
    /// Runs `work` on the APIC, and reports a timer that it has changed.
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

    /// RDMSR of an MSR for which [`Controllers::owns_msr`] holds.
    pub fn read_msr(
        &self,
        msr: u32,
        now_ns: u64,
        actions: &mut Vec<Action>,
    ) -> Result<u64, GeneralProtection> {
        self.with(actions, |apic| apic.read_msr(msr, now_ns))
    }

    /// WRMSR of an MSR for which [`Controllers::owns_msr`] holds. After an error nothing has changed.
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

    /// CR8 as the vCPU has it after it left the guest, before other calls. A change sets TPR.
    pub fn set_cr8(&self, cr8: u8) {
        lock(&self.controllers.local[self.index]).apic.set_cr8(cr8);
    }

    /// CR8 for the vCPU before it enters the guest.
    pub fn cr8(&self) -> u8 {
        lock(&self.controllers.local[self.index]).apic.cr8()
    }

    /// What to do before entering the guest, one thing per call: until [`VcpuEvent::None`], [`VcpuEvent::AwaitInterruptWindow`] or
    /// [`VcpuEvent::WaitForStartup`]. `interruptible` says that the vCPU can be given an interrupt now: RFLAGS.IF is set, nothing shadows it, and no
    /// event given before waits to be injected.
    pub fn next_event(&self, interruptible: bool, now_ns: u64, actions: &mut Vec<Action>) -> VcpuEvent {
        self.with(actions, |apic| apic.next_event(interruptible, now_ns))
    }

    /// Whether a halted vCPU, or one that waits for a start-up IPI, has something to do. `interruptible` says that RFLAGS.IF is set.
    pub fn has_event(&self, interruptible: bool, now_ns: u64, actions: &mut Vec<Action>) -> bool {
        self.with(actions, |apic| apic.has_event(interruptible, now_ns))
    }

    /// An input of the local APIC's own. May come from any thread.
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
