//! What is behind a NIC: an emulated card with a tap, a card of the host under its model, or a card of the host by itself.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_models::describe::{Bar, Device};
use device_models::physical::DeviceError;
use device_models::{Access, PhysicalDevice, reference};
use machine::interrupt::{InterruptController, LevelLine};
use machine::memory::GuestRam;
use pci::function::{BarMapping, LateWrites};
use serde_json::{Value, json};
use telemetry::guest_log::GuestLog;
use vpio::plan::{Zone, plan};
use vpio::vfio::{Ram, Vfio};
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, MonitorError, Slot, Slots};

use super::bus::RamBus;
use super::{Back, NicError, StopSink, Wire};
use crate::description::{Nic, NicMode, NicPermission, NicPolicy};

/// Bytes of the header in front of each frame of a tap.
const HEADER: usize = virtio_devices::net::header::HEADER_LEN;
/// The longest frame with a VLAN tag, without CRC.
const LONGEST: usize = 1518;
/// Frames that are taken from a tap before the lock is given up.
const BATCH: usize = 16;
/// How long a pause waits for a card to finish what the guest handed over.
const SETTLE: Duration = Duration::from_millis(200);

/// What is behind a NIC.
pub(super) struct Engine {
    mode: Mode,
    /// What the NIC is.
    pub(super) device: &'static Device,
    counters: Counters,
    log: GuestLog,
    name: String,
    /// The card or its model failed: accesses read ones.
    failed: bool,
}

enum Mode {
    Virtual(Virtual),
    Guarded(Guarded<Vfio>),
    Passthrough(Passthrough),
}

struct Passthrough {
    card: Box<Vfio>,
    mapped: Vec<Mapped>,
    /// Ties the card's line to the guest's as long as it is open: KVM and VFIO hold the eventfds' counters, not their files, and let go
    /// of a file that is closed.
    line: Option<LevelLine>,
}

pub(super) struct Guarded<P> {
    pub(super) monitor: Box<Monitor<P>>,
    pub(super) guest: GuestId,
    /// Called once, when the policy stops the guest.
    pub(super) stop: Option<StopSink>,
    /// The card's line was up while its causes couldn't be read: VFIO keeps it masked until they are.
    pub(super) masked: bool,
}

/// A BAR of a card that is mapped into the guest.
struct Mapped {
    bar: u8,
    fd: Arc<OwnedFd>,
    offset: u64,
    length: u64,
}

struct Virtual {
    card: Box<dyn reference::Card + Send>,
    wire: Wire,
}

/// What happened. Frames are counted where this process sees them: in mode `virtual`.
#[derive(Debug, Default, Clone, Copy)]
struct Counters {
    accesses: u64,
    nanoseconds: u64,
    interrupts: u64,
    interrupt_nanoseconds: u64,
    sent: u64,
    sent_bytes: u64,
    received: u64,
    received_bytes: u64,
    send_drops: u64,
    receive_drops: u64,
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn pieces(ram: &GuestRam) -> Vec<Ram> {
    ram.regions()
        .iter()
        .map(|region| Ram {
            guest_base: region.range.start,
            length: region.range.size,
            host_address: region.host_address,
        })
        .collect()
}

impl Engine {
    pub(super) fn new(wish: &Nic, back: Back, ram: &GuestRam, stop: StopSink) -> Result<Self, NicError> {
        let (device, mode) = match (&wish.mode, back) {
            (NicMode::Virtual { model, mac, .. }, Back::Wire(wire)) => {
                let none = || NicError::machine("emulation", format!("there is none of {model}"));
                let device = device_models::devices::named(model).ok_or_else(none)?;
                let bus = RamBus::new(ram.memory());
                let card = reference::card(device, mac.octets(), bus).ok_or_else(none)?;
                (device, Mode::Virtual(Virtual { card, wire }))
            }
            (NicMode::Vpio { policy, allow, .. }, Back::Card(mut card)) => {
                card.set_ram(pieces(ram), Box::new(ram.memory()));
                (card.description(), guarded(wish, *card, *policy, allow, ram, stop)?)
            }
            (NicMode::Passthrough { .. }, Back::Card(mut card)) => {
                card.set_ram(pieces(ram), Box::new(ram.memory()));
                card.map_all()?;
                card.set_bus_master(true)?;
                let mapped = mapped(&card)?;
                (card.description(), Mode::Passthrough(Passthrough { card, mapped, line: None }))
            }
            (NicMode::Virtual { .. }, Back::Card(_)) | (_, Back::Wire(_)) => {
                return Err(NicError::machine("back end", "it is another mode's"));
            }
        };
        Ok(Self {
            mode,
            device,
            counters: Counters::default(),
            log: GuestLog::new(),
            name: wish.name.clone(),
            failed: false,
        })
    }

    /// What its thread waits for: frames of the tap, or the card's interrupt; `None` when interrupts go by themselves.
    pub(super) fn source(&self) -> Result<Option<OwnedFd>, NicError> {
        let made = match &self.mode {
            Mode::Virtual(card) => card.wire.queue.try_clone(),
            Mode::Guarded(Guarded { monitor, .. }) => monitor.physical_ref().interrupt_fd(),
            Mode::Passthrough(_) => return Ok(None),
        };
        made.map(Some).map_err(|error| NicError::machine("descriptor", error))
    }

    /// Has the card's interrupts delivered.
    pub(super) fn connect(&mut self, controller: &dyn InterruptController, gsi: u32) -> Result<(), NicError> {
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(guarded) => {
                guarded.monitor.physical().enable_interrupt()?;
                // A line that was up before (an e1000 reports its link) may never be signalled: its causes are taken now.
                guarded.monitor.physical().signalled();
                let taken = guarded.monitor.interrupt().and_then(|()| guarded.unmask());
                taken.map_err(|error| NicError::machine("pending interrupt", error))
            }
            Mode::Passthrough(passed) => {
                let line = controller
                    .level_eventfds(gsi)
                    .map_err(|error| NicError::machine("interrupt line", error))?;
                passed.card.connect_interrupt(line.trigger.as_fd(), line.resample.as_fd())?;
                passed.line = Some(line);
                Ok(())
            }
        }
    }

    /// The guest accesses a BAR. A read's value.
    pub(super) fn access(&mut self, access: Access) -> u32 {
        let begin = Instant::now();
        self.counters.accesses += 1;
        let ones = u32::MAX;
        let value = if self.failed {
            ones
        } else {
            match self.try_access(access) {
                Ok(value) => value,
                Err(error) => {
                    self.fail(&error);
                    ones
                }
            }
        };
        self.counters.nanoseconds += nanoseconds(begin);
        value
    }

    fn try_access(&mut self, access: Access) -> Result<u32, MonitorError> {
        match &mut self.mode {
            Mode::Virtual(card) => {
                let value = direct(card.card.as_mut(), access)?;
                card.card.tick();
                for frame in card.card.take_sent() {
                    match card.send(&frame) {
                        true => {
                            self.counters.sent += 1;
                            self.counters.sent_bytes += u64::try_from(frame.len()).unwrap_or(0);
                        }
                        false => self.counters.send_drops += 1,
                    }
                }
                Ok(value)
            }
            Mode::Guarded(guarded) => {
                let value = guarded.access(access)?;
                if guarded.masked {
                    guarded.unmask()?;
                }
                Ok(value)
            }
            Mode::Passthrough(Passthrough { card, .. }) => Ok(direct(card.as_mut(), access)?),
        }
    }

    /// The source that [`Self::source`] told is readable.
    pub(super) fn readable(&mut self) {
        if self.failed {
            return;
        }
        let begin = Instant::now();
        self.counters.interrupts += 1;
        match &mut self.mode {
            Mode::Virtual(card) => card.take_frames(&mut self.counters),
            Mode::Guarded(guarded) => {
                guarded.monitor.physical().signalled();
                let taken = guarded.monitor.interrupt();
                if let Err(error) = taken.and_then(|()| guarded.unmask()) {
                    self.fail(&error);
                }
            }
            Mode::Passthrough(_) => {}
        }
        self.counters.interrupt_nanoseconds += nanoseconds(begin);
    }

    fn fail(&mut self, error: &MonitorError) {
        self.failed = true;
        tracing::error!(device = %self.name, %error, "A NIC failed; the guest's accesses read ones from now on");
    }

    /// Level of the guest's line, as far as this process drives it.
    pub(super) fn line(&mut self) -> bool {
        if self.failed {
            return false;
        }
        match &mut self.mode {
            Mode::Virtual(card) => card.card.interrupt().unwrap_or(false),
            Mode::Guarded(Guarded { monitor, guest, .. }) => monitor.line(*guest),
            Mode::Passthrough(_) => false,
        }
    }

    /// Bus mastering as the guest's command register has it.
    pub(super) fn set_bus_master(&mut self, on: bool) {
        let result = match &mut self.mode {
            Mode::Virtual(card) => card.card.set_bus_master(on),
            Mode::Guarded(Guarded { monitor, .. }) => monitor.physical().set_guest_bus_master(on),
            Mode::Passthrough(Passthrough { card, .. }) => card.set_guest_bus_master(on),
        };
        if let Err(error) = result {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "Bus mastering can't be switched");
        }
    }

    /// Power-on state.
    pub(super) fn reset(&mut self) -> Result<(), MonitorError> {
        self.failed = false;
        match &mut self.mode {
            Mode::Virtual(card) => {
                card.card.set_bus_master(false)?;
                Ok(card.card.reset()?)
            }
            Mode::Guarded(Guarded { monitor, guest, .. }) => {
                monitor.physical().set_guest_bus_master(false)?;
                monitor.power_on(*guest)?;
                Ok(monitor.physical().unmask()?)
            }
            Mode::Passthrough(Passthrough { card, .. }) => {
                card.set_guest_bus_master(false)?;
                card.reset()?;
                Ok(card.set_bus_master(true)?)
            }
        }
    }

    /// Takes the card from the guest, whose vCPUs stand.
    pub(super) fn quiesce(&mut self) -> Result<(), MonitorError> {
        if self.failed {
            return Ok(());
        }
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(Guarded { monitor, .. }) => {
                let begin = Instant::now();
                while !monitor.settle()? && begin.elapsed() < SETTLE {
                    std::thread::sleep(Duration::from_millis(1));
                }
                monitor.release()
            }
            Mode::Passthrough(Passthrough { card, .. }) => Ok(card.set_bus_master(false)?),
        }
    }

    /// Gives it back.
    pub(super) fn unquiesce(&mut self) -> Result<(), MonitorError> {
        if self.failed {
            return Ok(());
        }
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(Guarded { monitor, guest, .. }) => {
                monitor.switch(*guest, false)?;
                Ok(monitor.physical().unmask()?)
            }
            Mode::Passthrough(Passthrough { card, .. }) => Ok(card.set_bus_master(true)?),
        }
    }

    /// Parts of BARs that the guest accesses without this process.
    pub(super) fn mappings(&self) -> Vec<BarMapping> {
        let Mode::Passthrough(Passthrough { mapped, .. }) = &self.mode else { return Vec::new() };
        let mapping = |mapped: &Mapped| BarMapping {
            bar: mapped.bar,
            offset: 0,
            len: mapped.length,
            fd: Arc::clone(&mapped.fd),
            fd_offset: mapped.offset,
            read_only: false,
        };
        mapped.iter().map(mapping).collect()
    }

    /// Writes that may wait, where accesses come to this process.
    pub(super) fn late_writes(&self) -> Vec<LateWrites> {
        let mapped = self.mappings();
        let late = |Zone { bar, offset, length }| LateWrites { bar, offset, len: length };
        let zones = plan(self.device).late.into_iter();
        zones.filter(|zone| mapped.iter().all(|mapping| mapping.bar != zone.bar)).map(late).collect()
    }

    pub(super) fn inspect(&self) -> Value {
        let counters = &self.counters;
        let mut tree = json!({
            "device": self.device.name,
            "failed": self.failed,
            "accesses": counters.accesses,
            "access_nanoseconds": counters.nanoseconds,
            "wakeups": counters.interrupts,
            "wakeup_nanoseconds": counters.interrupt_nanoseconds,
        });
        let Some(object) = tree.as_object_mut() else { return tree };
        let more = match &self.mode {
            Mode::Virtual(card) => json!({
                "mode": "virtual",
                "tap": card.wire.name,
                "counters": {
                    "transmit_packets": counters.sent,
                    "transmit_bytes": counters.sent_bytes,
                    "transmit_drop": counters.send_drops,
                    "receive_packets": counters.received,
                    "receive_bytes": counters.received_bytes,
                    "receive_drop": counters.receive_drops,
                },
            }),
            Mode::Guarded(Guarded { monitor, guest, .. }) => inspect_guarded(self.device, monitor, *guest),
            Mode::Passthrough(Passthrough { card, .. }) => {
                json!({ "mode": "passthrough", "card": card.address() })
            }
        };
        if let Value::Object(more) = more {
            object.extend(more);
        }
        tree
    }
}

fn guarded(
    wish: &Nic,
    mut card: Vfio,
    policy: NicPolicy,
    allow: &[NicPermission],
    ram: &GuestRam,
    stop: StopSink,
) -> Result<Mode, NicError> {
    let device = card.description();
    card.reset()?;
    let address = device_models::physical::station_address(device, &mut card)?;
    let slots = ram.regions().iter().map(|region| Slot {
        guest_base: region.range.start,
        length: region.range.size,
        device_base: region.range.start,
        writable: true,
    });
    let scratch = match device.context.pointers {
        Some(_) => Some(card.scratch()?),
        None => None,
    };
    let mut monitor = Monitor::new(device, card);
    if let Some(scratch) = scratch {
        monitor.set_scratch(Box::new(scratch));
    }
    let guest = monitor.add(GuestConfig {
        name: wish.name.clone(),
        address,
        permissions: allow.iter().map(|permission| (*permission).into()).collect(),
        policy: match policy {
            NicPolicy::Ignore => FailurePolicy::Ignore,
            NicPolicy::DeviceError => FailurePolicy::DeviceError,
            NicPolicy::Stop => FailurePolicy::Stop,
        },
        memory: Box::new(Slots(slots.collect())),
    });
    monitor.switch(guest, false)?;
    Ok(Mode::Guarded(Guarded { monitor: Box::new(monitor), guest, stop: Some(stop), masked: false }))
}

fn inspect_guarded(device: &'static Device, monitor: &Monitor<Vfio>, guest: GuestId) -> Value {
    let model = monitor.model(guest);
    let name = |reg: &device_models::describe::Reg| device.register(*reg).name;
    let windows: Vec<Value> = device
        .windows
        .iter()
        .zip(model.windows())
        .filter_map(|(window, granted)| {
            let granted = granted.as_ref()?;
            Some(json!({
                "window": window.name,
                "address": format!("{:#x}", granted.base),
                "length": granted.length,
            }))
        })
        .collect();
    let violations: Vec<String> =
        monitor.violations(guest).iter().map(|violation| violation.refusal.to_string()).collect();
    let (mapped, peak) = monitor.mapped();
    json!({
        "mode": "vpio",
        "card": monitor.physical_ref().address(),
        "states": device_models::model::states_text(device, model.graph().states()),
        "hooks": model.hooks().iter().map(name).collect::<Vec<_>>(),
        "windows": windows,
        "pinned_bytes": mapped,
        "pinned_bytes_peak": peak,
        "decisions": monitor.counters(guest),
        "violations": violations,
    })
}

/// Memory BARs that VFIO lets be mapped.
fn mapped(card: &Vfio) -> Result<Vec<Mapped>, NicError> {
    let mut found = Vec::new();
    for (bar, what) in (0u8..).zip(card.description().bars) {
        if matches!(what, Bar::Memory(_))
            && let Some((offset, length)) = card.mappable(bar)
        {
            let fd = card.as_fd().try_clone_to_owned();
            let fd = Arc::new(fd.map_err(|error| NicError::machine("descriptor", error))?);
            found.push(Mapped { bar, fd, offset, length });
        }
    }
    Ok(found)
}

impl<P: PhysicalDevice> Guarded<P> {
    /// The guest accesses a BAR. A read's value.
    pub(super) fn access(&mut self, access: Access) -> Result<u32, MonitorError> {
        match self.monitor.access(self.guest, access)? {
            Answer::Done(value) => return Ok(value),
            Answer::Stopped => {
                if let Some(stop) = self.stop.take() {
                    // The last one of those that are kept is this one, or came before it: policy `stop` refuses once.
                    let why = self.monitor.violations(self.guest).last();
                    stop(why.map_or_else(String::new, |violation| violation.refusal.to_string()));
                }
            }
            // No policy of ours asks for machine checks, and nobody else has the card.
            Answer::Wait | Answer::MachineCheck => {}
        }
        // Until the VM has ended, as a device that is gone.
        Ok(u32::MAX)
    }
}

impl Guarded<Vfio> {
    /// Opens the line again once its causes have been taken.
    fn unmask(&mut self) -> Result<(), MonitorError> {
        self.masked = self.monitor.causes_wait();
        if !self.masked {
            self.monitor.physical().unmask()?;
        }
        Ok(())
    }
}

/// An access that nobody vets.
fn direct(card: &mut (impl PhysicalDevice + ?Sized), access: Access) -> Result<u32, DeviceError> {
    match access.write {
        Some(value) => card.write(access.bar, access.offset, access.size, value).map(|()| 0),
        None => card.read(access.bar, access.offset, access.size),
    }
}

impl Virtual {
    /// Sends a frame; false when the tap takes none now.
    fn send(&self, frame: &[u8]) -> bool {
        if frame.len() > LONGEST {
            return false;
        }
        let mut whole = vec![0; HEADER];
        whole.extend_from_slice(frame);
        rustix::io::write(&self.wire.queue, &whole).is_ok()
    }

    fn take_frames(&mut self, counters: &mut Counters) {
        let mut buffer = vec![0; 65536];
        for _ in 0..BATCH {
            let Ok(length) = rustix::io::read(&self.wire.queue, &mut buffer) else { return };
            let Some(frame) = buffer.get(HEADER..length) else { return };
            let mut frame = frame.to_vec();
            if frame.len() < reference::SHORTEST {
                frame.resize(reference::SHORTEST, 0);
            }
            if frame.len() <= LONGEST && self.card.receive(&frame) {
                counters.received += 1;
                counters.received_bytes += u64::try_from(frame.len()).unwrap_or(0);
            } else {
                counters.receive_drops += 1;
            }
        }
    }
}
