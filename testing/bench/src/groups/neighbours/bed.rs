//! Two VMs with windows onto each other, a segment, and memory for the copying ring.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, bail};
use machine::slots::HostMapping;
use neighbour::layout::Layout;
use payload_loops::job::Job;
use payload_loops::rings::{self, FAILED, Role, STUCK};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::measuring_vm::{MeasuringVm, Settings};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const RAM: u64 = 64 * MIB;
const ENTRIES: u32 = 1024;
/// Buffers of 64 KiB: 2 MiB are read in turn.
const LARGE_BUFFERS: u64 = 32;
/// Buffers of 64 bytes, all of them outstanding.
const SMALL_BUFFERS: u64 = 256;
/// Shared bytes of the copying ring.
const COPIED: u64 = 4 * MIB;
const LARGE_SLOTS: u64 = 16;
const SMALL_SLOTS: u64 = 1024;

/// The test bed. See the module.
pub struct Bed {
    vms: [MeasuringVm; 2],
    copied: File,
    free: u64,
    base: u64,
    segment: u64,
    epoch: u64,
}

impl Bed {
    /// Starts the VMs, and maps each one's RAM in the other.
    pub fn start(program: &Path, cpus: [usize; 2]) -> anyhow::Result<Self> {
        let start = |cpu| {
            let plain = MeasuringVm::plain(program, cpu, RAM);
            MeasuringVm::start(Settings { room: 3 * GIB, ..plain })
        };
        let vms = [start(cpus[0])?, start(cpus[1])?];
        let base = vms[0].room();
        let segment = base + 2 * GIB;
        let layout = Layout::new(ENTRIES)?;
        let shared = |name: &str, size: u64| -> anyhow::Result<File> {
            let file = File::from(
                memfd_create(name, MemfdFlags::CLOEXEC).context("Shared memory could not be had")?,
            );
            file.set_len(size)?;
            Ok(file)
        };
        let segment_size = layout.size() as u64;
        let segment_file = shared("causeway:bench:segment", segment_size)?;
        let copied = shared("causeway:bench:copied", COPIED)?;
        let [first, second] = &vms;
        for (reader, owner, slot) in [(first, second, 1), (second, first, 0)] {
            let (file, offset) = owner.ram_file(0, RAM)?;
            let window = HostMapping::new("window", file.as_fd(), offset, RAM, false)?;
            reader.map("window", base + slot * GIB, window, true)?;
            let map = |file: &File, size| HostMapping::new("shared", file.as_fd(), 0, size, true);
            reader.map("segment", segment, map(&segment_file, segment_size)?, false)?;
            reader.map("copied", segment + 16 * MIB, map(&copied, COPIED)?, false)?;
        }
        let free = first.free().0;
        if second.free().0 != free || free + 16 * MIB > RAM {
            bail!("The measuring VMs' free memory lies elsewhere than expected: {free:#x}");
        }
        Ok(Self { vms, copied, free, base, segment, epoch: 0 })
    }

    /// Runs the first role in the first VM and the second in the second; returns the ticks of the later one.
    pub fn play(&mut self, roles: [Role; 2], messages: u64, length: u64) -> anyhow::Result<u64> {
        self.prepare(length)?;
        let job = |role| Job::Rings { bed: self.free, role, messages, length };
        let jobs = roles.map(job);
        self.run(jobs)
    }

    /// Lets the second VM read the first one's buffers, without messages.
    pub fn read(&mut self, messages: u64, length: u64) -> anyhow::Result<u64> {
        self.prepare(length)?;
        let job = Job::Rings { bed: self.free, role: Role::Read, messages, length };
        let ticks = self.vms[1].run(&[job])?;
        check(&ticks)
    }

    /// Returns a shared word, set to 0.
    pub fn word(&self) -> anyhow::Result<u64> {
        self.copied.write_all_at(&[0; 64], 0)?;
        Ok(self.segment + 16 * MIB)
    }

    /// Runs a job in each VM in parallel.
    pub fn run(&mut self, jobs: [Job; 2]) -> anyhow::Result<u64> {
        let [first, second] = &mut self.vms;
        let ticks = std::thread::scope(|scope| -> anyhow::Result<Vec<u64>> {
            let other = scope.spawn(|| second.run(&[jobs[1]]));
            let mine = first.run(&[jobs[0]]);
            let other = match other.join() {
                Ok(ticks) => ticks,
                Err(_) => bail!("A thread that waited for a VM panicked"),
            };
            Ok([mine?, other?].concat())
        })?;
        check(&ticks)
    }

    /// Starts a new epoch, and zeros the memory of the copying ring.
    fn prepare(&mut self, length: u64) -> anyhow::Result<()> {
        self.epoch += 1;
        let zeros = vec![0; usize::try_from(COPIED)?];
        self.copied.write_all_at(&zeros, 0)?;
        let small = length <= 64;
        for (slot, vm) in (0..).zip(&self.vms) {
            let bed = rings::Bed {
                segment: self.segment,
                entries: ENTRIES.into(),
                epoch: self.epoch,
                base: self.base,
                stride: GIB,
                ram: RAM,
                slot,
                ids: self.free + 0x1_0000,
                buffers: self.free + 2 * MIB,
                count: if small { SMALL_BUFFERS } else { LARGE_BUFFERS },
                copied: self.segment + 16 * MIB,
                slots: if small { SMALL_SLOTS } else { LARGE_SLOTS },
            };
            let bytes: Vec<u8> = bed.words().iter().flat_map(|word| word.to_le_bytes()).collect();
            vm.write(self.free, &bytes)?;
        }
        Ok(())
    }

    /// Returns the exits of both VMs to the monitor so far.
    pub fn exits(&self) -> u64 {
        self.vms.iter().map(MeasuringVm::exits).sum()
    }

    /// Ends the VMs.
    pub fn finish(self) -> anyhow::Result<()> {
        let [first, second] = self.vms;
        first.finish()?;
        second.finish()
    }
}

/// Returns the shorter time: the later side didn't wait for the other.
fn check(ticks: &[u64]) -> anyhow::Result<u64> {
    if ticks.contains(&FAILED) {
        bail!("A message between the VMs was broken, or out of order");
    }
    if ticks.contains(&STUCK) {
        bail!("A VM's answer did not come for a minute");
    }
    ticks.iter().min().copied().context("No VM ran the job")
}
