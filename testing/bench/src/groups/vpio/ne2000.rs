//! An NE2000 that a guest drives like Linux's ne2k-pci, by real port instructions in a VM. The card is the reference emulation in
//! this process, under its model or bare. Deferrable writes stay in KVM's ring, or exit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::bail;
use device_models::devices::ne2000::NE2000;
use device_models::reference::ne2000::Ne2000;
use device_models::{Access, PhysicalDevice};
use machine::bus::BusDevice;
use machine::coalesced::CoalescedZone;
use machine::vm::IoSpace;
use payload_loops::job::Job;
use payload_loops::script::{STEP_SIZE, Step};
use serde_json::Value;
use vpio::plan::plan;
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, Slots};

use super::bytes::{answer, written};
use super::counts::Counts;
use crate::figures::{Better, Figure, Figures, Pairs, nanoseconds};
use crate::measuring_vm::{MeasuringVm, Settings};
use crate::peers;
use crate::programs::Programs;

const MEMORY: u64 = 16 << 20;
/// Base port of the card.
const PORTS: u16 = 0x300;
const COUNT: u16 = 0x20;
const STATION: [u8; 6] = [0x02, 0, 0, 0, 0, 9];
/// Bytes per frame, and frames per sample.
const FRAMES: [(usize, u64); 2] = [(60, 20), (1514, 10)];
/// Required ratio for the longest frames on transmission, by fewer exits (`SPECIFICATION.md`).
const AIM: f64 = 15.0;

// Register offsets.
const CR: u16 = 0x00;
const ISR: u16 = 0x07;
const DATA: u16 = 0x10;

/// Measures all modes.
pub fn measure(
    programs: &Programs,
    cpu: usize,
    samples: usize,
    figures: &mut Figures,
    details: &mut serde_json::Map<String, Value>,
) -> anyhow::Result<()> {
    let place = |model, late| Driven::start(programs, cpu, model, late);
    let (mut guarded, mut trapped, mut bare) = (place(true, true)?, place(true, false)?, place(false, true)?);
    for (length, frames) in FRAMES {
        let aim = (length == 1514).then_some(AIM);
        let pairs = Pairs::take(samples, || guarded.rate(length, frames), || trapped.rate(length, frames))?;
        figures.add(Figure::new(
            &format!("ne2000_send_{length}"),
            &format!("frames of {length} bytes that an NE2000 under its model sends"),
            "frames/s",
            Better::Higher,
            "the same with every access leaving the guest",
            &pairs,
            aim,
        ))?;
        let pairs = Pairs::take(samples, || guarded.rate(length, frames), || bare.rate(length, frames))?;
        figures.add(Figure::new(
            &format!("ne2000_send_{length}_model"),
            &format!("frames of {length} bytes that an NE2000 under its model sends"),
            "frames/s",
            Better::Higher,
            "the same card without its model",
            &pairs,
            None,
        ))?;
        for (name, driven) in [("model", &mut guarded), ("model_trapped", &mut trapped), ("bare", &mut bare)]
        {
            details.insert(format!("ne2000_send_{length}_{name}"), driven.counted(length, frames)?);
        }
    }
    for driven in [guarded, trapped, bare] {
        driven.vm.finish()?;
    }
    Ok(())
}

/// The device behind the ports.
enum Behind {
    Bare(Ne2000),
    Guarded(Box<Monitor<Ne2000>>, GuestId),
}

/// The card, its sent frames, and the time in it.
struct Card {
    behind: Behind,
    sent: u64,
    last: Vec<u8>,
    nanoseconds: u64,
    /// The first failure.
    failed: Option<String>,
}

impl Card {
    fn new(model: bool) -> anyhow::Result<Self> {
        let behind = if model {
            let mut monitor = Monitor::new(&NE2000, Ne2000::new(STATION));
            let guest = monitor.add(GuestConfig {
                name: "bench".to_owned(),
                address: STATION,
                permissions: Vec::new(),
                policy: FailurePolicy::Stop,
                memory: Box::new(Slots(Vec::new())),
            });
            monitor.switch(guest, false)?;
            Behind::Guarded(Box::new(monitor), guest)
        } else {
            Behind::Bare(Ne2000::new(STATION))
        };
        Ok(Self { behind, sent: 0, last: Vec::new(), nanoseconds: 0, failed: None })
    }

    fn access(&mut self, offset: u64, size: usize, write: Option<u32>) -> u32 {
        let begin = Instant::now();
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let access = Access { bar: 0, offset, size: u8::try_from(size).unwrap_or(1), write };
        let value = self.try_access(access).unwrap_or_else(|error| {
            self.failed.get_or_insert(format!("{access:?}: {error:#}"));
            u32::MAX
        });
        self.nanoseconds += u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        value
    }

    fn try_access(&mut self, access: Access) -> anyhow::Result<u32> {
        let (value, card) = match &mut self.behind {
            Behind::Bare(card) => (direct(card, access)?, card),
            Behind::Guarded(monitor, guest) => {
                let Answer::Done(value) = monitor.access(*guest, access)? else { bail!("it was refused") };
                monitor.physical().tick();
                if monitor.physical().interrupt()? {
                    monitor.interrupt()?;
                }
                (value, monitor.physical())
            }
        };
        card.tick();
        for frame in card.take_sent() {
            self.sent += 1;
            self.last = frame;
        }
        Ok(value)
    }
}

fn direct(card: &mut Ne2000, access: Access) -> anyhow::Result<u32> {
    Ok(match access.write {
        Some(value) => card.write(access.bar, access.offset, access.size, value).map(|()| 0)?,
        None => card.read(access.bar, access.offset, access.size)?,
    })
}

/// The card as a device of the port bus.
struct Shared(Arc<Mutex<Card>>);

impl BusDevice for Shared {
    fn read(&self, offset: u64, data: &mut [u8]) {
        answer(data, lock(&self.0).access(offset, data.len(), None));
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (length, value) = written(data);
        lock(&self.0).access(offset, length, Some(value));
    }
}

fn lock(card: &Mutex<Card>) -> std::sync::MutexGuard<'_, Card> {
    card.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A VM with a card that its guest drives.
struct Driven {
    vm: MeasuringVm,
    card: Arc<Mutex<Card>>,
    khz: f64,
}

impl Driven {
    fn start(programs: &Programs, cpu: usize, model: bool, late: bool) -> anyhow::Result<Self> {
        let card = Arc::new(Mutex::new(Card::new(model)?));
        let device = Arc::new(Shared(Arc::clone(&card)));
        let vm = MeasuringVm::start(Settings {
            device: Some((PORTS, COUNT, device)),
            ..MeasuringVm::plain(&programs.path("measure"), cpu, MEMORY)
        })?;
        if late {
            for zone in plan(&NE2000).late {
                let address = u64::from(PORTS) + u64::from(zone.offset);
                vm.coalesce(&CoalescedZone { space: IoSpace::Port, address, length: zone.length })?;
            }
        }
        let mut driven = Self { vm, card, khz: peers::tsc_khz() };
        driven.steps(&start(), 1)?;
        Ok(driven)
    }

    /// Returns the addresses of the frame and the steps.
    fn places(&self) -> (u64, u64) {
        let (free, _) = self.vm.free();
        (free, free + 0x1_0000)
    }

    /// Lets the guest execute steps, and returns the ticks.
    fn steps(&mut self, steps: &[Step], times: u64) -> anyhow::Result<u64> {
        let (_, at) = self.places();
        for (index, step) in (0u64..).zip(steps) {
            self.vm.write(at + index * STEP_SIZE as u64, &step.to_bytes())?;
        }
        let job = Job::Script { steps: at, count: steps.len() as u64, times };
        let ticks = self.vm.run(&[job])?.first().copied().unwrap_or(0);
        if let Some(failed) = lock(&self.card).failed.take() {
            bail!("The card refused what its driver does: {failed}");
        }
        if ticks == 0 {
            bail!("The card never said that it was done");
        }
        Ok(ticks)
    }

    /// Measures frames per second. Every frame must be sent unchanged.
    fn rate(&mut self, length: usize, frames: u64) -> anyhow::Result<f64> {
        let (frame_at, _) = self.places();
        let mut frame = vec![0; length];
        for (at, byte) in frame.iter_mut().enumerate() {
            *byte = u8::try_from((at * 7 + length) % 251).unwrap_or(0);
        }
        self.vm.write(frame_at, &frame)?;
        let before = lock(&self.card).sent;
        let ticks = self.steps(&send(frame_at, &frame), frames)?;
        let card = lock(&self.card);
        if card.sent - before != frames || card.last != frame {
            bail!(
                "{} of {frames} frames of {length} bytes were sent, or not as they were",
                card.sent - before
            );
        }
        Ok(1e9 / nanoseconds(self.khz, ticks, frames))
    }

    /// Counts the costs of frames other than time.
    fn counted(&mut self, length: usize, frames: u64) -> anyhow::Result<Value> {
        let before = self.counts();
        self.rate(length, frames)?;
        Ok(self.counts().per_frame(&before, 1, frames))
    }

    fn counts(&self) -> Counts {
        let card = lock(&self.card);
        let monitor = match &card.behind {
            Behind::Bare(_) => None,
            Behind::Guarded(monitor, guest) => Some((*monitor.counters(*guest), card.nanoseconds)),
        };
        Counts { exits: self.vm.exits(), monitor }
    }
}

fn out(offset: u16, value: u8) -> Step {
    Step::Out { port: PORTS + offset, value }
}

/// Linux's order of starting the card.
fn start() -> Vec<Step> {
    let writes: [(u16, u8); 20] = [
        (CR, 0x21),
        (0x0E, 0x49),
        (0x0A, 0),
        (0x0B, 0),
        (0x0C, 0x20),
        (0x0D, 0x02),
        (0x04, 0x40),
        (0x01, 0x4C),
        (0x03, 0x7F),
        (0x02, 0x80),
        (ISR, 0xFF),
        (0x0F, 0),
        (CR, 0x61),
        (0x07, 0x4C),
        (CR, 0x21),
        (ISR, 0xFF),
        (0x0F, 0x3F),
        (CR, 0x22),
        (0x0D, 0),
        (0x0C, 0x04),
    ];
    writes.into_iter().map(|(offset, value)| out(offset, value)).collect()
}

/// Linux's order of sending a frame and handling its completion.
fn send(frame_at: u64, frame: &[u8]) -> Vec<Step> {
    let length = frame.len();
    let [low, high, ..] = length.to_le_bytes();
    let words = u32::try_from(length / 4).unwrap_or(0);
    let mut steps = vec![
        out(0x0F, 0),
        out(CR, 0x22),
        out(ISR, 0x40),
        out(0x0A, low),
        out(0x0B, high),
        out(0x08, 0),
        out(0x09, 0x40),
        out(CR, 0x12),
        Step::Outs { port: PORTS + DATA, address: frame_at, words },
    ];
    if let &[low, high] = frame.get(length / 4 * 4..).unwrap_or_default() {
        steps.push(Step::OutWord { port: PORTS + DATA, value: u16::from_le_bytes([low, high]) });
    }
    let read = |offset: u16| Step::In { port: PORTS + offset };
    steps.extend([Step::Until { port: PORTS + ISR, mask: 0x40 }, out(ISR, 0x40), out(CR, 0x20), read(CR)]);
    steps.extend([out(0x05, low), out(0x06, high), out(0x04, 0x40), out(CR, 0x26), out(0x0F, 0x3F)]);
    // The interrupt handler.
    steps.extend([out(CR, 0x20), Step::Until { port: PORTS + ISR, mask: 0x02 }, read(0x04)]);
    steps.extend([out(ISR, 0x02), out(CR, 0x22), read(ISR)]);
    steps
}
