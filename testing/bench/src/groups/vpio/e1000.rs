//! An e1000 that a guest drives like Linux's driver, in three modes. Under its model: its first page is a shadow register page
//! (`vpio::shown`), and writes of the receive tail are deferred. In passthrough. And with every access trapped, as a reference.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use device_models::devices::e1000::{E1000, EN};
use device_models::{Access, PhysicalDevice};
use machine::bus::BusDevice;
use machine::coalesced::CoalescedZone;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace};
use machine::slots::{HostMapping, PAGE, SharedPage};
use machine::vm::{IoEvent, IoSpace};
use payload_loops::job::Job;
use payload_loops::script::{STEP_SIZE, Step};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use vpio::plan::{Told, plan};
use vpio::{Answer, Counters, FailurePolicy, GuestConfig, GuestId, Monitor, Slot, Slots};

use super::bytes::{answer, written};
use super::card::sum;
use super::counts::Counts;
use super::gigabit::{
    AT_STATUS, BASE, DESCRIPTOR, DONE, Gigabit, HEAD, Host, ICR, IMC, IMS, LENGTH, PAGES, RCTL, RX,
    Registers, STATUS, TAIL, TCTL, TX,
};
use crate::figures::{Better, Figure, Figures, Pairs, nanoseconds};
use crate::measuring_vm::{MeasuringVm, Settings};
use crate::peers;
use crate::programs::Programs;

const MEMORY: u64 = 16 << 20;
const STATION: [u8; 6] = [0x02, 0, 0, 0, 0, 9];
/// Size of the BAR in bytes.
const BAR: u64 = 0x2_0000;
/// Descriptors of each ring.
const RING: u32 = 64;
/// The mask that Linux's driver writes.
const MASK: u32 = 0x9D;
/// EOP, IFCS, RS.
const SEND: u32 = 0x0B00_0000;
/// Offsets from the first free byte of memory. A buffer has 2 KiB.
const TX_RING: u64 = 0;
const RX_RING: u64 = 0x1000;
const STEPS: u64 = 0x2000;
const TX_BUFFERS: u64 = 0x2_0000;
const RX_BUFFERS: u64 = 0x4_0000;
const BUFFER: u64 = 2048;
/// Aims for all sizes (`SPECIFICATION.md`). The wire transports 81,000 long frames per second, which limits their gain over
/// trapping.
const AIM_OF_PASSTHROUGH: f64 = 0.95;
const AIM_OF_TRAPPED: f64 = 3.0;
/// Longest delay of deferred writes without another event (`monitor::nic::guarded`, its first poll).
const LOOK: Duration = Duration::from_millis(1);

/// Direction of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Send,
    Receive,
}

/// Frames of this size; frames per write of the tail and interrupt; rounds of the ring per sample.
#[derive(Debug, Clone, Copy)]
struct Traffic {
    way: Way,
    length: u32,
    group: u32,
    rounds: u64,
}

/// Single frames, and 16 per interrupt. In bulk, Linux's driver gets 4,000 interrupts per second, in which the wire moves 20 long
/// frames each. It writes the tail once per batch.
const TRAFFIC: [Traffic; 6] = [
    Traffic { way: Way::Send, length: 1514, group: 16, rounds: 25 },
    Traffic { way: Way::Send, length: 1514, group: 1, rounds: 5 },
    Traffic { way: Way::Send, length: 60, group: 16, rounds: 60 },
    Traffic { way: Way::Receive, length: 1514, group: 16, rounds: 25 },
    Traffic { way: Way::Receive, length: 1514, group: 1, rounds: 5 },
    Traffic { way: Way::Receive, length: 60, group: 16, rounds: 60 },
];

impl Traffic {
    fn name(&self) -> String {
        let way = if self.way == Way::Send { "send" } else { "receive" };
        let group = if self.group == 1 { "alone".to_owned() } else { format!("by_{}", self.group) };
        format!("e1000_{way}_{}_{group}", self.length)
    }

    fn what(&self) -> String {
        let way = if self.way == Way::Send { "sends" } else { "receives" };
        let group = if self.group == 1 { "alone".to_owned() } else { format!("in groups of {}", self.group) };
        format!("frames of {} bytes that an e1000 under its model {way} {group}", self.length)
    }

    fn frames(&self) -> u64 {
        self.rounds * u64::from(RING)
    }
}

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
    let start = |mode| Driven::start(programs, cpus, mode);
    let mut model = start(Mode::Model)?;
    let mut passthrough = start(Mode::Passthrough)?;
    let mut trapped = start(Mode::Trapped)?;
    for traffic in TRAFFIC {
        for (peer, of, name, aim) in [
            (&mut passthrough, "passthrough", "passed through", AIM_OF_PASSTHROUGH),
            (&mut trapped, "trapped", "with every access leaving the guest", AIM_OF_TRAPPED),
        ] {
            let pairs = Pairs::take(samples, || model.rate(traffic), || peer.rate(traffic))?;
            figures.add(Figure::new(
                &format!("{}_{of}", traffic.name()),
                &traffic.what(),
                "frames/s",
                Better::Higher,
                &format!("the same card {name}"),
                &pairs,
                Some(aim),
            ))?;
        }
        for (mode, driven) in
            [("passthrough", &mut passthrough), ("model", &mut model), ("trapped", &mut trapped)]
        {
            details.insert(format!("{}_{mode}", traffic.name()), driven.counted(traffic)?);
        }
    }
    for driven in [model, passthrough, trapped] {
        driven.vm.finish()?;
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
}

impl Guarded {
    fn new(registers: &Arc<Registers>) -> anyhow::Result<Self> {
        let mut monitor = Monitor::new(&E1000, Host(Arc::clone(registers)));
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
        let mut this = Self { monitor, guest, page: Arc::new(SharedPage::new("shown")?) };
        this.show()?;
        Ok(this)
    }

    fn show(&mut self) -> anyhow::Result<()> {
        let page = &self.page;
        Ok(self.monitor.show(self.guest, &mut |shown| page.store(shown.offset, shown.bytes, shown.value))?)
    }

    fn access(&mut self, access: Access) -> anyhow::Result<u32> {
        let Answer::Done(value) = self.monitor.access(self.guest, access)? else {
            bail!("{access:?} was refused")
        };
        self.show()?;
        Ok(value)
    }

    /// As `monitor::nic`'s thread after a drain of deferred writes: first masks that were reported before, then the card's causes.
    fn attend(&mut self, opened: Option<Access>, line: bool) -> anyhow::Result<()> {
        if let Some(opened) = opened {
            self.access(opened)?;
        }
        if line {
            self.monitor.interrupt()?;
        }
        self.show()
    }
}

/// The card as a device of the memory bus.
struct Bus {
    behind: Behind,
    /// Time in the monitor.
    nanoseconds: AtomicU64,
    failed: Mutex<Option<String>>,
}

enum Behind {
    Guarded(Box<Mutex<Guarded>>),
    Direct(Mutex<Host>),
}

impl Bus {
    fn access(&self, offset: u64, size: usize, write: Option<u32>) -> u32 {
        let (Ok(offset), Ok(size)) = (u32::try_from(offset), u8::try_from(size)) else { return u32::MAX };
        match (&self.behind, write) {
            (Behind::Direct(card), None) => lock(card).read(0, offset, size).unwrap_or(u32::MAX),
            (Behind::Direct(card), Some(value)) => {
                lock(card).write(0, offset, size, value).map_or(u32::MAX, |()| 0)
            }
            (Behind::Guarded(guarded), _) => {
                let access = Access { bar: 0, offset, size, write };
                self.in_monitor(guarded, |guarded| guarded.access(access)).unwrap_or(u32::MAX)
            }
        }
    }

    fn in_monitor<T>(
        &self,
        guarded: &Mutex<Guarded>,
        act: impl FnOnce(&mut Guarded) -> anyhow::Result<T>,
    ) -> Option<T> {
        let mut guarded = lock(guarded);
        let begin = Instant::now();
        let result = act(&mut guarded);
        let time = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(time, Ordering::Relaxed);
        result.map_err(|error| lock(&self.failed).get_or_insert_with(|| format!("{error:#}")).clone()).ok()
    }

    /// Returns the monitor's counters so far, and the nanoseconds in it.
    fn counters(&self) -> Option<(Counters, u64)> {
        let Behind::Guarded(guarded) = &self.behind else { return None };
        let guarded = lock(guarded);
        Some((*guarded.monitor.counters(guarded.guest), self.nanoseconds.load(Ordering::Relaxed)))
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

/// The work of the card's thread for the monitor, in `monitor::nic`'s order. It notes eventfd reports and drains deferred writes.
/// Then it applies the reports and harvests causes. Finally it drains deferred writes again, which may be older than what the page
/// shows by then.
struct Attendant {
    bus: Arc<Bus>,
    told: Told,
    rung: Arc<OwnedFd>,
    drain: Box<dyn Fn() + Send>,
    looked: Mutex<Instant>,
}

impl Attendant {
    fn attend(&self, line: bool) {
        let Behind::Guarded(guarded) = &self.bus.behind else { return };
        let mut looked = lock(&self.looked);
        let opened = rustix::io::read(&self.rung, &mut [0; 8]).is_ok();
        if !line && !opened && looked.elapsed() < LOOK {
            return;
        }
        *looked = Instant::now();
        (self.drain)();
        let Told { bar, offset, bytes, value } = self.told;
        let opened = opened.then_some(Access { bar, offset, size: bytes, write: Some(value) });
        self.bus.in_monitor(guarded, |guarded| guarded.attend(opened, line));
        let unseen = {
            let guarded = lock(guarded);
            guarded.monitor.has_unseen(guarded.guest)
        };
        if unseen {
            (self.drain)();
            let mut guarded = lock(guarded);
            let guest = guarded.guest;
            guarded.monitor.seen(guest);
        }
    }
}

/// A VM with a card that its guest drives.
struct Driven {
    /// Dropped before the VM, whose memory it reads.
    card: Gigabit,
    bus: Arc<Bus>,
    vm: MeasuringVm,
    khz: f64,
}

impl Driven {
    fn start(programs: &Programs, (cpu, other): (usize, usize), mode: Mode) -> anyhow::Result<Self> {
        let registers = Registers::new()?;
        let behind = match mode {
            Mode::Model => Behind::Guarded(Box::new(Mutex::new(Guarded::new(&registers)?))),
            Mode::Passthrough | Mode::Trapped => Behind::Direct(Mutex::new(Host(Arc::clone(&registers)))),
        };
        let bus = Arc::new(Bus { behind, nanoseconds: AtomicU64::new(0), failed: Mutex::default() });
        let vm = MeasuringVm::start(Settings {
            room: 1 << 30,
            room_device: Some((BAR, Arc::clone(&bus) as Arc<dyn BusDevice>)),
            ..MeasuringVm::plain(&programs.path("measure"), cpu, MEMORY)
        })?;
        let map = |page: &SharedPage, at: u32, read_only| {
            let mapping = HostMapping::new("registers", page.file().as_fd(), 0, PAGE, true)?;
            vm.map(&format!("registers {at:#x}"), vm.room() + u64::from(at), mapping, read_only)
        };
        let card = if let Behind::Guarded(guarded) = &bus.behind {
            map(&lock(guarded).page, 0, true)?;
            let attendant = Attendant::new(&vm, &bus)?;
            Gigabit::start(&registers, vm.memory(), other, move |line| attendant.attend(line))?
        } else {
            if mode == Mode::Passthrough {
                for (number, at) in (0..).zip(PAGES) {
                    map(registers.page(number).context("No page of registers")?, at, false)?;
                }
            }
            Gigabit::start(&registers, vm.memory(), other, |_| {})?
        };
        let mut driven = Self { card, bus, vm, khz: peers::tsc_khz() };
        driven.start_card().with_context(|| format!("The guest can't start its card ({mode:?})"))?;
        Ok(driven)
    }

    /// Starts the card in Linux's order, with Linux's ring sizes.
    fn start_card(&mut self) -> anyhow::Result<()> {
        let (free, base) = (self.vm.free().0, self.vm.room());
        for at in 0..u64::from(RING) {
            for (ring, buffers, status) in [(TX_RING, TX_BUFFERS, DONE), (RX_RING, RX_BUFFERS, 0)] {
                let mut descriptor = u128::from(free + buffers + at * BUFFER);
                descriptor |= u128::from(status) << (8 * AT_STATUS);
                self.vm.write(free + ring + at * DESCRIPTOR, &descriptor.to_le_bytes())?;
            }
        }
        let low = |at: u64| u32::try_from(at).context("Its memory lies too high");
        let bytes = RING * u32::try_from(DESCRIPTOR)?;
        let mut writes = vec![(IMC, u32::MAX), (RCTL, 0), (TCTL, 0)];
        for (ring, at) in [(TX, TX_RING), (RX, RX_RING)] {
            writes.extend([(ring + LENGTH, bytes), (ring + BASE + 4, 0), (ring + BASE, low(free + at)?)]);
            writes.extend([(ring + TAIL, 0), (ring + HEAD, 0)]);
        }
        // Padding; broadcasts.
        writes.extend([(TCTL, EN | 0x8), (RCTL, EN | 0x8000), (RX + TAIL, RING - 1), (IMS, MASK)]);
        let store = |(register, value)| store(base, register, value);
        let steps: Vec<Step> = writes.into_iter().map(store).chain([load(base, STATUS)]).collect();
        self.card.work(true);
        self.steps(&steps, 1)?;
        self.card.work(false);
        Ok(())
    }

    /// Lets the guest execute steps, and returns the ticks.
    fn steps(&mut self, steps: &[Step], times: u64) -> anyhow::Result<u64> {
        let at = self.vm.free().0 + STEPS;
        for (index, step) in (0u64..).zip(steps) {
            self.vm.write(at + index * STEP_SIZE as u64, &step.to_bytes())?;
        }
        let job = Job::Script { steps: at, count: steps.len() as u64, times };
        let ticks = self.vm.run(&[job]).with_context(|| self.card.registers.state())?;
        if let Some(failed) = lock(&self.bus.failed).take() {
            bail!("The model refused what its driver does: {failed}");
        }
        match ticks.first() {
            Some(&ticks) if ticks > 0 => Ok(ticks),
            _ => bail!("The card never said that it was done: {}", self.card.registers.state()),
        }
    }

    /// Measures frames per second. Every frame must arrive unchanged.
    fn rate(&mut self, traffic: Traffic) -> anyhow::Result<f64> {
        self.card.work(true);
        self.pass(Traffic { rounds: 1, ..traffic })?;
        let ticks = self.pass(traffic)?;
        self.card.work(false);
        Ok(1e9 / nanoseconds(self.khz, ticks, traffic.frames()))
    }

    /// The same with a running card, in ticks.
    fn pass(&mut self, traffic: Traffic) -> anyhow::Result<u64> {
        let Traffic { way, length, rounds, .. } = traffic;
        let frame: Vec<u8> =
            (0..length).map(|at| u8::try_from((at * 7 + length) % 251).unwrap_or(0)).collect();
        let (base, free) = (self.vm.room(), self.vm.free().0);
        let frames = traffic.frames();
        let registers = Arc::clone(&self.card.registers);
        let (before, ticks) = match way {
            Way::Send => {
                for at in 0..u64::from(RING) {
                    self.vm.write(free + TX_BUFFERS + at * BUFFER, &frame)?;
                }
                // The last frames' completion counts as well.
                let before = registers.sent().0;
                let ticks = self.steps(&send(base, free, traffic)?, rounds)?;
                (before, ticks + self.steps(&all_sent(free), 1)?)
            }
            Way::Receive => {
                let before = registers.received();
                registers.expect(&frame, frames);
                (before, self.steps(&receive(base, free, traffic), rounds)?)
            }
        };
        let (after, last) = match way {
            Way::Send => registers.sent(),
            Way::Receive => {
                let mut last = vec![0; frame.len()];
                let place = GuestAddress(free + RX_BUFFERS + u64::from(RING - 1) * BUFFER);
                self.vm.memory().memory().read_slice(&mut last, place)?;
                (registers.received(), sum(&last))
            }
        };
        if after - before != frames || last != sum(&frame) || registers.lost() > 0 {
            bail!(
                "{} of {frames} frames of {length} bytes came through, or not as they were: {}",
                after - before,
                registers.state()
            );
        }
        Ok(ticks)
    }

    /// Counts the costs of frames other than time.
    fn counted(&mut self, traffic: Traffic) -> anyhow::Result<Value> {
        self.card.work(true);
        self.pass(Traffic { rounds: 1, ..traffic })?;
        let before = self.counts();
        self.pass(traffic)?;
        let jobs = if traffic.way == Way::Send { 2 } else { 1 };
        let counted = self.counts().per_frame(&before, jobs, traffic.frames());
        self.card.work(false);
        Ok(counted)
    }

    fn counts(&self) -> Counts {
        Counts { exits: self.vm.exits(), monitor: self.bus.counters() }
    }
}

impl Attendant {
    fn new(vm: &MeasuringVm, bus: &Arc<Bus>) -> anyhow::Result<Self> {
        let plan = plan(&E1000);
        for zone in plan.late.iter().filter(|zone| zone.bar == 0) {
            let address = vm.room() + u64::from(zone.offset);
            vm.coalesce(&CoalescedZone { space: IoSpace::Memory, address, length: zone.length })?;
        }
        let told = *plan.told.first().context("No write of an e1000's is told of")?;
        let rung = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        vm.ring(&IoEvent {
            space: IoSpace::Memory,
            address: vm.room() + u64::from(told.offset),
            width: told.bytes,
            datamatch: Some(u64::from(told.value)),
            fd: Arc::clone(&rung),
        })?;
        let drain = Box::new(vm.drain(BAR, Arc::clone(bus) as Arc<dyn BusDevice>)?);
        Ok(Self { bus: Arc::clone(bus), told, rung, drain, looked: Mutex::new(Instant::now()) })
    }
}

fn store(base: u64, register: u32, value: u32) -> Step {
    Step::Store { address: base + u64::from(register), size: 4, value }
}

fn load(base: u64, register: u32) -> Step {
    Step::Load { address: base + u64::from(register), size: 4 }
}

fn is_done(ring: u64, at: u32) -> Step {
    let address = ring + u64::from(at % RING) * DESCRIPTOR + AT_STATUS;
    Step::UntilMemory { address, mask: DONE }
}

/// Start of the interrupt handler: reads causes, masks, and flushes the write.
fn begins(base: u64) -> [Step; 3] {
    [load(base, ICR), store(base, IMC, u32::MAX), load(base, STATUS)]
}

/// End of the interrupt handling, after the poll of the rings.
fn ends(base: u64) -> [Step; 2] {
    [store(base, IMS, MASK), load(base, STATUS)]
}

/// Linux's order of sending frames, one round of the ring. A batch is handed over with one write of the tail after the driver has
/// seen its descriptors completed. The descriptor after them must be complete, too: a full ring would look empty.
fn send(base: u64, free: u64, traffic: Traffic) -> anyhow::Result<Vec<Step>> {
    let (ring, mut steps) = (free + TX_RING, Vec::new());
    for first in (0..RING).step_by(traffic.group as usize) {
        let group = first..first + traffic.group;
        steps.extend((first..=group.end).map(|at| is_done(ring, at)));
        steps.extend(begins(base));
        steps.extend(ends(base));
        for at in group.clone() {
            let place = ring + u64::from(at) * DESCRIPTOR;
            let buffer = u32::try_from(free + TX_BUFFERS + u64::from(at) * BUFFER)?;
            for (word, value) in [(0, buffer), (8, traffic.length | SEND), (AT_STATUS, 0)] {
                steps.push(Step::Store { address: place + word, size: 4, value });
            }
        }
        steps.push(store(base, TX + TAIL, group.end % RING));
    }
    Ok(steps)
}

fn all_sent(free: u64) -> Vec<Step> {
    (0..RING).map(|at| is_done(free + TX_RING, at)).collect()
}

/// Linux's order of receiving frames, one round of the ring: the interrupt, the ring's frames, and new buffers with one write of the
/// tail, which stays one behind the next descriptor to read.
fn receive(base: u64, free: u64, traffic: Traffic) -> Vec<Step> {
    let (ring, mut steps) = (free + RX_RING, Vec::new());
    for first in (0..RING).step_by(traffic.group as usize) {
        let end = first + traffic.group;
        steps.push(is_done(ring, first));
        steps.extend(begins(base));
        for at in first..end {
            steps.push(is_done(ring, at));
            let address = ring + u64::from(at) * DESCRIPTOR + AT_STATUS;
            steps.push(Step::Store { address, size: 4, value: 0 });
        }
        steps.push(store(base, RX + TAIL, end - 1));
        steps.extend(ends(base));
    }
    steps
}
