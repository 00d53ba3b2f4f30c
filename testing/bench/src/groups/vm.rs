//! Group `vm`: the cost of a VM. A payload program in a VM and host threads execute the same instructions on the same physical memory
//! and CPUs, in turns.

#![allow(unsafe_code)] // Jobs carry addresses; the window is written through its mapping.

use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, nanoseconds};
use crate::measuring_vm::{MeasuringVm, Settings};
use crate::peers;
use crate::programs::Programs;
use anyhow::{Context, bail};
use machine::slots::HostMapping;
use payload_abi::{DOORBELL_ADDRESS, DOORBELL_SIZE, PORT_HOST, PORT_HOST_COUNT};
use payload_loops::copy::Variant;
use payload_loops::job::Job;
use payload_loops::line::Side;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// RAM in bytes: two copies of 256 MiB, and the program's needs.
const MEMORY: u64 = 560 * MIB;
/// Sizes of copies, and copies per sample of some ten milliseconds.
const COPIES: [(u64, u64, &str); 3] =
    [(64 * KIB, 3000, "64KiB"), (MIB, 160, "1MiB"), (256 * MIB, 1, "256MiB")];
const COPY_AIM: f64 = 0.95;
const ROUNDS: u64 = 10_000;
const EXITS: u64 = 100;
/// Bytes read through the window, and loads per sample.
const WINDOWS: [(u64, u64, &str); 2] = [(64 * KIB, 200_000, "64KiB"), (16 * MIB, 10_000, "16MiB")];
const WINDOW_SIZE: u64 = 32 * MIB;
const LINE: u64 = 64;

/// Measures; see [`super::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let host = match super::kvm("vm")? {
        Ok(host) => host,
        Err(report) => return Ok(report),
    };
    let programs = Programs::build()?;
    let mut conditions = Conditions::now(Some(&host), "4 KiB, one memfd for both sides");
    conditions.scheduling = peers::prefer_this_process();
    let mut session = Session::start(&programs, if quick { 3 } else { 101 })?;
    session.copies()?;
    session.cache_line()?;
    session.exits()?;
    session.windows()?;
    let figures = session.figures.all;
    session.vm.finish()?;
    conditions.finish();
    Ok(Report { group: "vm", skipped: None, conditions, figures, details: serde_json::Value::Null })
}

struct Session {
    vm: MeasuringVm,
    window: Arc<HostMapping>,
    window_writable: Arc<HostMapping>,
    cpus: Vec<usize>,
    khz: f64,
    samples: usize,
    figures: Figures,
}

impl Session {
    fn start(programs: &Programs, samples: usize) -> anyhow::Result<Self> {
        let cpus: Vec<usize> =
            core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).take(2).collect();
        let Some(first) = cpus.first() else { bail!("This process may run on no CPU that can be named") };
        let memfd = memfd_create("causeway:bench:window", MemfdFlags::CLOEXEC)
            .context("Memory for the read-only window could not be had")?;
        ftruncate(&memfd, WINDOW_SIZE).context("Memory for the read-only window could not be sized")?;
        let map = |writable| HostMapping::new("window", memfd.as_fd(), 0, WINDOW_SIZE, writable);
        let (window, window_writable) = (map(false)?, map(true)?);
        peers::pin(*first)?;
        let vm = MeasuringVm::start(Settings {
            cpus: cpus.clone(),
            window: Some(window.clone()),
            ..MeasuringVm::plain(&programs.path("measure"), *first, MEMORY)
        })?;
        let khz = peers::tsc_khz();
        Ok(Self { vm, window, window_writable, cpus, khz, samples, figures: Figures::of("vm") })
    }

    fn copies(&mut self) -> anyhow::Result<()> {
        let (free, room) = self.vm.free();
        let (source, target) = (free, free + 257 * MIB);
        if room < 514 * MIB {
            bail!("The measuring VM has {room} bytes free, and 514 MiB are needed");
        }
        let host_source = self.vm.host_address(source, 256 * MIB)?;
        let host_target = self.vm.host_address(target, 256 * MIB)?;
        for variant in Variant::ALL {
            if variant.needs_avx() && !std::is_x86_feature_detected!("avx") {
                continue;
            }
            for (length, repeats, label) in COPIES {
                let job = |target, source| Job::Copy { variant, target, source, length, repeats };
                let khz = self.khz;
                #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
                let rate = |ticks: u64| length as f64 / nanoseconds(khz, ticks, repeats);
                let vm = &mut self.vm;
                let pairs = Pairs::take(
                    self.samples,
                    || Ok(rate(first(&vm.run(&[job(target, source)])?)?)),
                    // SAFETY: both ranges are in the VM's RAM, which only this program uses, and its vCPU waits meanwhile. Sizes are
                    // multiples of the block, and addresses of 2 MiB.
                    || Ok(rate(unsafe { job(host_target, host_source).run() })),
                )?;
                let figure = Figure::new(
                    &format!("memcpy_{}_{label}", variant.name()),
                    &format!("memory copy, {}, {label}", variant.name()),
                    "GB/s",
                    Better::Higher,
                    "the same code in a host process",
                    &pairs,
                    Some(COPY_AIM),
                );
                self.figures.add(figure)?;
            }
        }
        Ok(())
    }

    fn cache_line(&mut self) -> anyhow::Result<()> {
        let &[first_cpu, second_cpu] = self.cpus.as_slice() else {
            eprintln!(
                "bench: vm: cache_line SKIPPED: two CPUs are needed, and this process may use {}",
                self.cpus.len()
            );
            return Ok(());
        };
        let (address, _) = self.vm.free();
        let host_address = self.vm.host_address(address, LINE)?;
        let khz = self.khz;
        let jobs =
            |address| [Side::First, Side::Second].map(|side| Job::PingPong { address, side, rounds: ROUNDS });
        // The later side didn't wait for the other.
        let one_way = |ticks: Vec<u64>| {
            let ticks = ticks.into_iter().min().context("Nobody played ping-pong")?;
            Ok(nanoseconds(khz, ticks, ROUNDS * 2))
        };
        let reset = || {
            // SAFETY: an aligned word in RAM that only this program uses, while neither side plays.
            unsafe { std::ptr::with_exposed_provenance_mut::<u64>(to_usize(host_address)).write_volatile(0) };
        };
        let vm = &mut self.vm;
        let pairs = Pairs::take(
            self.samples,
            || {
                reset();
                one_way(vm.run(&jobs(address))?)
            },
            || {
                reset();
                let [first, second] = jobs(host_address);
                // SAFETY: the two sides use a word that no other code uses.
                one_way(unsafe { peers::run(&[(first_cpu, first), (second_cpu, second)]) }?)
            },
        )?;
        let figure = Figure::new(
            "cache_line_one_way",
            "cache line between two vCPUs, one way",
            "ns",
            Better::Lower,
            "two host threads on the same CPUs",
            &pairs,
            None,
        );
        self.figures.add(figure)
    }

    fn exits(&mut self) -> anyhow::Result<()> {
        let doorbell = self.vm.doorbell()?.clone();
        let plain = Job::Store { address: DOORBELL_ADDRESS + DOORBELL_SIZE - 4, times: EXITS };
        let port = Job::PortOut { port: PORT_HOST + PORT_HOST_COUNT - 1, times: EXITS };
        let ring = Job::Store { address: DOORBELL_ADDRESS, times: EXITS };
        let null = |_: &OwnedFd| Ok(peers::null_system_calls(EXITS));
        let write = |fd: &OwnedFd| peers::eventfd_writes(fd.as_fd(), EXITS);
        self.exit(
            "exit_port",
            "port write to the monitor",
            port,
            true,
            "a null system call",
            &doorbell,
            null,
        )?;
        self.exit(
            "exit_mmio",
            "device memory write to the monitor",
            plain,
            true,
            "a null system call",
            &doorbell,
            null,
        )?;
        self.exit(
            "exit_ioeventfd",
            "doorbell, in the kernel",
            ring,
            false,
            "an eventfd write",
            &doorbell,
            write,
        )
    }

    #[expect(clippy::too_many_arguments, reason = "one line per figure above")]
    fn exit(
        &mut self,
        name: &str,
        what: &str,
        job: Job,
        to_monitor: bool,
        peer: &str,
        doorbell: &OwnedFd,
        system_call: impl Fn(&OwnedFd) -> anyhow::Result<u64>,
    ) -> anyhow::Result<()> {
        let khz = self.khz;
        let vm = &mut self.vm;
        let before = vm.exits();
        let pairs = Pairs::take(
            self.samples,
            || Ok(nanoseconds(khz, first(&vm.run(&[job])?)?, EXITS)),
            || Ok(nanoseconds(khz, system_call(doorbell)?, EXITS)),
        )?;
        // One more than the samples: the uncounted run. Each also requested a job once.
        let runs = self.samples as u64 + 1;
        let expected = if to_monitor { runs * EXITS } else { 0 };
        let counted = self.vm.exits() - before;
        if counted < expected || counted > expected + 2 * runs {
            bail!(
                "{name}: the measured instructions should have left the kernel {expected} times, and exits counted are {counted}"
            );
        }
        self.figures.add(Figure::new(name, what, "ns", Better::Lower, peer, &pairs, None))
    }

    fn windows(&mut self) -> anyhow::Result<()> {
        for (size, times, label) in WINDOWS {
            chain(&self.window_writable, size)?;
            let job = |base| Job::Chase { base, times };
            let (guest, host) = (self.vm.window(), self.window.as_ptr() as u64);
            let khz = self.khz;
            let vm = &mut self.vm;
            let pairs = Pairs::take(
                self.samples,
                || Ok(nanoseconds(khz, first(&vm.run(&[job(guest)])?)?, times)),
                // SAFETY: the chain stays within the mapping, which lives as long as this.
                || Ok(nanoseconds(khz, unsafe { job(host).run() }, times)),
            )?;
            let figure = Figure::new(
                &format!("window_read_{label}"),
                &format!("dependent read through a read-only memslot, {label}"),
                "ns",
                Better::Lower,
                "the same code over a read-only mapping",
                &pairs,
                None,
            );
            self.figures.add(figure)?;
        }
        Ok(())
    }
}

/// Writes a chain of offsets that visits each cache line of the first `size` bytes once, in an order that no prefetcher predicts, and
/// returns to the start.
fn chain(mapping: &HostMapping, size: u64) -> anyhow::Result<()> {
    let lines = size / LINE;
    if size > mapping.len() || !mapping.is_writable() || !lines.is_power_of_two() {
        bail!("No chain of {size} bytes can be written into a mapping of {}", mapping.len());
    }
    // A linear congruential generator with full period modulo a power of two (Hull and Dobell: increment odd,
    // multiplier 1 modulo 4) visits every line once.
    let mut line = 0_u64;
    for _ in 0..lines {
        let next = (line.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)) & (lines - 1);
        let at = mapping.as_ptr().wrapping_add(to_usize(line * LINE)).cast::<u64>();
        // SAFETY: inside the mapping, as `line` is less than `lines`, and aligned; nobody reads meanwhile.
        unsafe { at.write_volatile(next * LINE) };
        line = next;
    }
    Ok(())
}

fn first(ticks: &[u64]) -> anyhow::Result<u64> {
    ticks.first().copied().context("No vCPU ran the job")
}

fn to_usize(number: u64) -> usize {
    // x86-64 has 64-bit pointers.
    usize::try_from(number).unwrap_or(usize::MAX)
}
