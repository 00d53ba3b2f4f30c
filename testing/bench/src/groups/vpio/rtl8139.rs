//! An RTL8139 that a guest drives like Linux's 8139too, by its memory BAR, in three modes. Under its model: reads use a shadow
//! register page (`vpio::shown`). In passthrough. And with every access trapped, as a reference.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::bail;
use device_models::devices::rtl8139::{OWN, RTL8139, TE, TOK};
use device_models::{Access, PhysicalDevice};
use machine::bus::BusDevice;
use machine::coalesced::CoalescedZone;
use machine::slots::{HostMapping, PAGE, SharedPage};
use machine::vm::IoSpace;
use payload_loops::job::Job;
use payload_loops::script::{STEP_SIZE, Step};
use serde_json::Value;
use std::os::fd::AsFd as _;
use vpio::plan::plan;
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, Slot, Slots};

use super::bytes::{answer, written};
use super::card::{CR, Card, DESCRIPTORS, Host, ISR, Registers, TSAD0, TSD0, sum};
use super::counts::Counts;
use crate::figures::{Better, Figure, Figures, Pairs, nanoseconds};
use crate::measuring_vm::{MeasuringVm, Settings};
use crate::peers;
use crate::programs::Programs;

const MEMORY: u64 = 16 << 20;
const STATION: [u8; 6] = [0x02, 0, 0, 0, 0, 9];
/// Number of the memory BAR.
const BAR: u8 = 1;
/// Bytes per frame, and rounds of [`DESCRIPTORS`] frames per sample.
const FRAMES: [(u32, u64); 2] = [(60, 200), (1514, 100)];
/// Aims for all sizes (`SPECIFICATION.md`). The wire transports 144,000 short frames per second and 8,100 long ones, which limits
/// the long ones' gain over trapping.
const AIM_OF_PASSTHROUGH: f64 = 0.95;
const AIM_OF_TRAPPED: f64 = 3.0;

/// The guest's mode of access to the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Passthrough,
    Model,
    Trapped,
}

/// Measures all modes. The card has the second processor.
pub fn measure(
    programs: &Programs,
    cpus: (usize, usize),
    samples: usize,
    figures: &mut Figures,
    details: &mut serde_json::Map<String, Value>,
) -> anyhow::Result<()> {
    for (length, rounds) in FRAMES {
        for (peer, name, aim) in [
            (Mode::Passthrough, "passed through", AIM_OF_PASSTHROUGH),
            (Mode::Trapped, "with every access leaving the guest", AIM_OF_TRAPPED),
        ] {
            // One card at a time, since each needs a processor.
            let rate = |mode| -> anyhow::Result<f64> {
                let mut driven = Driven::start(programs, cpus, mode)?;
                driven.rate(length, rounds)?;
                let rate = driven.rate(length, rounds)?;
                driven.vm.finish()?;
                Ok(rate)
            };
            let pairs = Pairs::take(samples, || rate(Mode::Model), || rate(peer))?;
            let of = if peer == Mode::Passthrough { "passthrough" } else { "trapped" };
            figures.add(Figure::new(
                &format!("rtl8139_send_{length}_{of}"),
                &format!("frames of {length} bytes that an RTL8139 under its model sends"),
                "frames/s",
                Better::Higher,
                &format!("the same card {name}"),
                &pairs,
                Some(aim),
            ))?;
        }
        for (name, mode) in
            [("passthrough", Mode::Passthrough), ("model", Mode::Model), ("trapped", Mode::Trapped)]
        {
            let mut driven = Driven::start(programs, cpus, mode)?;
            details.insert(format!("rtl8139_send_{length}_{name}"), driven.counted(length, rounds)?);
            driven.vm.finish()?;
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The model between guest and card.
struct Guarded {
    monitor: Monitor<Host>,
    guest: GuestId,
    page: Arc<SharedPage>,
    /// Time in the monitor.
    nanoseconds: u64,
}

impl Guarded {
    fn new(registers: &Arc<Registers>) -> anyhow::Result<Self> {
        let mut monitor = Monitor::new(&RTL8139, Host(Arc::clone(registers)));
        let slot = Slot { guest_base: 0, length: MEMORY, device_base: 0, writable: true };
        let guest = monitor.add(GuestConfig {
            name: "bench".to_owned(),
            address: STATION,
            permissions: Vec::new(),
            policy: FailurePolicy::Stop,
            memory: Box::new(Slots(vec![slot])),
        });
        monitor.switch(guest, false)?;
        monitor.show_from_now(guest);
        let mut this = Self { monitor, guest, page: Arc::new(SharedPage::new("shown")?), nanoseconds: 0 };
        this.show()?;
        Ok(this)
    }

    fn show(&mut self) -> anyhow::Result<()> {
        let page = &self.page;
        Ok(self.monitor.show(self.guest, &mut |shown| page.store(shown.offset, shown.bytes, shown.value))?)
    }

    /// Measures the time of an action in the monitor.
    fn timed<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let begin = Instant::now();
        let result = act(self);
        self.nanoseconds += u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        result
    }

    fn access(&mut self, access: Access) -> anyhow::Result<u32> {
        let Answer::Done(value) = self.monitor.access(self.guest, access)? else {
            bail!("{access:?} was refused")
        };
        self.show()?;
        Ok(value)
    }

    /// Harvests the card's causes. The guest uses no interrupts, so no further drain of deferred writes is needed.
    fn caused(&mut self) -> anyhow::Result<()> {
        self.monitor.interrupt()?;
        self.show()?;
        self.monitor.seen(self.guest);
        Ok(())
    }
}

/// The card as a device of the memory bus.
enum Bus {
    Guarded(Box<Mutex<Guarded>>, Mutex<Option<String>>),
    Direct(Mutex<Host>),
}

impl Bus {
    fn access(&self, offset: u64, size: usize, write: Option<u32>) -> u32 {
        let (Ok(offset), Ok(size)) = (u32::try_from(offset), u8::try_from(size)) else { return u32::MAX };
        match (self, write) {
            (Self::Direct(card), None) => lock(card).read(BAR, offset, size).unwrap_or(u32::MAX),
            (Self::Direct(card), Some(value)) => {
                lock(card).write(BAR, offset, size, value).map_or(u32::MAX, |()| 0)
            }
            (Self::Guarded(guarded, failed), _) => {
                let access = Access { bar: BAR, offset, size, write };
                lock(guarded).timed(|guarded| guarded.access(access)).unwrap_or_else(|error| {
                    lock(failed).get_or_insert(format!("{error:#}"));
                    u32::MAX
                })
            }
        }
    }
}

impl BusDevice for Bus {
    fn read(&self, offset: u64, data: &mut [u8]) {
        answer(data, self.access(offset, data.len(), None));
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (length, value) = written(data);
        self.access(offset, length, Some(value));
    }
}

/// A VM with a card that its guest drives.
struct Driven {
    /// Dropped before the VM, whose memory it reads.
    card: Card,
    bus: Arc<Bus>,
    vm: MeasuringVm,
    khz: f64,
}

impl Driven {
    fn start(programs: &Programs, (cpu, other): (usize, usize), mode: Mode) -> anyhow::Result<Self> {
        let registers = Card::registers()?;
        let bus = Arc::new(match mode {
            Mode::Model => Bus::Guarded(Box::new(Mutex::new(Guarded::new(&registers)?)), Mutex::default()),
            Mode::Passthrough | Mode::Trapped => Bus::Direct(Mutex::new(Host(Arc::clone(&registers)))),
        });
        let vm = MeasuringVm::start(Settings {
            room: 1 << 30,
            room_device: Some((PAGE, Arc::clone(&bus) as Arc<dyn BusDevice>)),
            ..MeasuringVm::plain(&programs.path("measure"), cpu, MEMORY)
        })?;
        let shown = match &*bus {
            Bus::Guarded(guarded, _) => Some((lock(guarded).page.file(), true)),
            Bus::Direct(_) => (mode == Mode::Passthrough).then(|| (registers.page.file(), false)),
        };
        if let Some((file, read_only)) = shown {
            let mapping = HostMapping::new("registers", file.as_fd(), 0, PAGE, true)?;
            vm.map("registers", vm.room(), mapping, read_only)?;
        }
        if mode == Mode::Model {
            for zone in plan(&RTL8139).late.iter().filter(|zone| zone.bar == BAR) {
                let address = vm.room() + u64::from(zone.offset);
                vm.coalesce(&CoalescedZone { space: IoSpace::Memory, address, length: zone.length })?;
            }
        }
        let its = Arc::clone(&bus);
        let caused = move || {
            if let Bus::Guarded(guarded, failed) = &*its
                && let Err(error) = lock(guarded).timed(Guarded::caused)
            {
                lock(failed).get_or_insert(format!("{error:#}"));
            }
        };
        let card = Card::start(&registers, vm.memory(), other, caused)?;
        let mut driven = Self { card, bus, vm, khz: peers::tsc_khz() };
        let (frames, base) = (driven.vm.free().0, driven.vm.room());
        let mut steps = vec![Step::Store { address: base + u64::from(CR), size: 1, value: TE }];
        for at in 0..DESCRIPTORS {
            steps.push(Step::Store {
                address: base + u64::from(TSAD0 + 4 * at),
                size: 4,
                value: u32::try_from(frames)? + at * 0x2000,
            });
        }
        driven.steps(&steps, 1)?;
        Ok(driven)
    }

    /// Lets the guest execute steps, and returns the ticks.
    fn steps(&mut self, steps: &[Step], times: u64) -> anyhow::Result<u64> {
        let at = self.vm.free().0 + 0x1_0000;
        for (index, step) in (0u64..).zip(steps) {
            self.vm.write(at + index * STEP_SIZE as u64, &step.to_bytes())?;
        }
        let job = Job::Script { steps: at, count: steps.len() as u64, times };
        let ticks = self.vm.run(&[job])?.first().copied().unwrap_or(0);
        if let Bus::Guarded(_, failed) = &*self.bus
            && let Some(failed) = lock(failed).take()
        {
            bail!("The model refused what its driver does: {failed}");
        }
        if ticks == 0 {
            bail!("The card never said that it was done");
        }
        Ok(ticks)
    }

    /// Measures frames per second. Every frame must be sent unchanged.
    fn rate(&mut self, length: u32, rounds: u64) -> anyhow::Result<f64> {
        let frame: Vec<u8> =
            (0..length).map(|at| u8::try_from((at * 7 + length) % 251).unwrap_or(0)).collect();
        for at in 0..u64::from(DESCRIPTORS) {
            self.vm.write(self.vm.free().0 + at * 0x2000, &frame)?;
        }
        let before = self.card.registers.sent().0;
        let base = self.vm.room();
        // The last frames' completion counts as well.
        let ticks = self.steps(&send(base, length), rounds)? + self.steps(&all_sent(base), 1)?;
        let frames = rounds * u64::from(DESCRIPTORS);
        let (sent, last) = self.card.registers.sent();
        if sent - before != frames || last != sum(&frame) || self.card.registers.lost() > 0 {
            bail!("{} of {frames} frames of {length} bytes were sent, or not as they were", sent - before);
        }
        Ok(1e9 / nanoseconds(self.khz, ticks, frames))
    }

    /// Counts the costs of frames other than time.
    fn counted(&mut self, length: u32, rounds: u64) -> anyhow::Result<Value> {
        let before = self.counts();
        self.rate(length, rounds)?;
        Ok(self.counts().per_frame(&before, 2, rounds * u64::from(DESCRIPTORS)))
    }

    fn counts(&self) -> Counts {
        let monitor = match &*self.bus {
            Bus::Direct(_) => None,
            Bus::Guarded(guarded, _) => {
                let guarded = lock(guarded);
                Some((*guarded.monitor.counters(guarded.guest), guarded.nanoseconds))
            }
        };
        Counts { exits: self.vm.exits(), monitor }
    }
}

/// Linux's order of sending frames and handling their completion, one round of the descriptors. A frame is handed over after its
/// descriptor was returned. The driver reads and acknowledges its cause, and reads its status.
fn send(base: u64, length: u32) -> Vec<Step> {
    let mut steps = Vec::new();
    for at in 0..DESCRIPTORS {
        let tsd = base + u64::from(TSD0 + 4 * at);
        let isr = base + u64::from(ISR);
        steps.extend([
            Step::UntilMemory { address: tsd, mask: OWN },
            Step::Load { address: isr, size: 2 },
            Step::Store { address: isr, size: 2, value: TOK },
            Step::Store { address: tsd, size: 4, value: 0x0008_0000 | length },
            Step::Load { address: tsd, size: 4 },
        ]);
    }
    steps
}

fn all_sent(base: u64) -> Vec<Step> {
    let of = |at| Step::UntilMemory { address: base + u64::from(TSD0 + 4 * at), mask: OWN };
    (0..DESCRIPTORS).map(of).collect()
}
