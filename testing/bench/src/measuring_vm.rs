//! A VM that runs measurements one by one: the program `measure`, and the ports on which it requests jobs.

use anyhow::{Context, bail};
use machine::bus::{AddressSpace, BusDevice};
use machine::coalesced::CoalescedZone;
use machine::exits::RangeNames;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace, PageSize};
use machine::slots::HostMapping;
use machine::vm::IoEvent;
use monitor::payload::{HostPorts, PayloadVm};
use monitor::vfio_user::DmaRange;
use monitor::vm::MachinePlacer;
use payload_loops::job::{JOB_SIZE, Job};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time-out of a measurement, and of the guest's request for a job, on a loaded machine.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_secs(300);
/// Interval at which the program is checked meanwhile.
const GLANCE: Duration = Duration::from_millis(200);
const PAGE: u64 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Desk {
    /// The vCPU hasn't requested a job.
    Away,
    /// It waits for a job.
    Waiting,
    /// Its page has a job.
    Given,
}

/// State of the vCPUs' requests, shared with the driver.
struct Desks {
    desks: Mutex<(Vec<Desk>, bool)>,
    changed: Condvar,
}

impl Desks {
    fn new(vcpus: u32) -> Arc<Self> {
        let desks = (0..vcpus).map(|_| Desk::Away).collect();
        Arc::new(Self { desks: Mutex::new((desks, false)), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Desk>, bool)> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.lock().1 = true;
        self.changed.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.lock().1
    }

    /// Waits until vCPU `index` requests a job; returns false if it hasn't after [`GLANCE`].
    fn await_vcpu(&self, index: usize) -> bool {
        let (_state, waited) = self
            .changed
            .wait_timeout_while(self.lock(), GLANCE, |(desks, _)| {
                desks.get(index).is_some_and(|desk| *desk != Desk::Waiting)
            })
            .unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    fn give(&self, index: usize) {
        if let Some(desk) = self.lock().0.get_mut(index) {
            *desk = Desk::Given;
        }
        self.changed.notify_all();
    }
}

impl HostPorts for Desks {
    fn read(&self, index: u16) -> u32 {
        let index = usize::from(index);
        let mut state = self.lock();
        let Some(desk) = state.0.get_mut(index) else { return 0 };
        *desk = Desk::Waiting;
        self.changed.notify_all();
        let state = self
            .changed
            .wait_while(state, |(desks, closed)| {
                !*closed && desks.get(index).is_some_and(|desk| *desk == Desk::Waiting)
            })
            .unwrap_or_else(PoisonError::into_inner);
        u32::from(!state.1)
    }
}

/// Parameters of the VM.
pub struct Settings<'a> {
    /// Path of the program `measure`.
    pub program: &'a Path,
    /// CPU that each vCPU is pinned to; one vCPU per entry.
    pub cpus: Vec<usize>,
    /// RAM in bytes.
    pub memory: u64,
    /// Page size of the RAM.
    pub pages: PageSize,
    /// Whether to advise the kernel to use huge pages, as the monitor does for VMs with a description.
    pub transparent_huge: bool,
    /// Memory of the read-only window.
    pub window: Option<Arc<HostMapping>>,
    /// Bytes of address space for memslots that are added at run time.
    pub room: u64,
    /// A device on I/O ports: first port, number, device.
    pub device: Option<(u16, u16, Arc<dyn BusDevice>)>,
    /// A device at the start of the room: bytes, device.
    pub room_device: Option<(u64, Arc<dyn BusDevice>)>,
}

/// The VM. It uses no processor while it waits for a job.
pub struct MeasuringVm {
    vm: PayloadVm,
    desks: Arc<Desks>,
    memory: GuestMemorySpace,
    job_pages: u64,
    vcpus: u32,
}

impl MeasuringVm {
    /// Returns the settings for one vCPU on `cpu` and base pages, without a window.
    pub fn plain(program: &Path, cpu: usize, memory: u64) -> Settings<'_> {
        let (pages, transparent_huge) = (PageSize::Base, false);
        Settings {
            program,
            cpus: vec![cpu],
            memory,
            pages,
            transparent_huge,
            window: None,
            room: 0,
            device: None,
            room_device: None,
        }
    }

    /// Starts the VM.
    pub fn start(settings: Settings<'_>) -> anyhow::Result<Self> {
        let vcpus = u32::try_from(settings.cpus.len()).unwrap_or(u32::MAX);
        let desks = Desks::new(vcpus);
        let mut builder = PayloadVm::from_file(settings.program)?
            .vcpus(vcpus)
            .pin(settings.cpus.iter().map(|cpu| vec![*cpu]).collect())
            .memory(settings.memory)
            .pages(settings.pages)
            .transparent_huge(settings.transparent_huge)
            .prefault(true)
            .room(settings.room)
            .host_ports(desks.clone());
        if let Some(window) = settings.window {
            builder = builder.window(window);
        }
        if let Some((first, count, device)) = settings.device {
            builder = builder.port_device(first, count, device);
        }
        if let Some((size, device)) = settings.room_device {
            builder = builder.room_device(size, device);
        }
        let vm = builder.build()?;
        let memory = vm.memory();
        let job_pages = vm.free_memory().start.next_multiple_of(PAGE);
        let this = Self { vm, desks, memory, job_pages, vcpus };
        this.vm.start()?;
        Ok(this)
    }

    /// Returns RAM that is free for measurements, from a 2 MiB boundary on: first address and bytes.
    pub fn free(&self) -> (u64, u64) {
        let free = self.vm.free_memory();
        let start = (self.job_pages + u64::from(self.vcpus) * PAGE).next_multiple_of(2 << 20);
        (start, (free.start + free.size).saturating_sub(start))
    }

    /// Returns the address of guest memory in this process.
    pub fn host_address(&self, address: u64, length: u64) -> anyhow::Result<u64> {
        let found = self.vm.host_address(address, length);
        Ok(found
            .with_context(|| format!("{length} bytes at {address:#x} don't lie in the measuring VM's RAM"))?
            as u64)
    }

    /// Returns the memfd of a range of guest memory, and the range's offset in it.
    pub fn ram_file(&self, address: u64, length: u64) -> anyhow::Result<(&Arc<File>, u64)> {
        let found = self.vm.ram_file(address, length);
        found.with_context(|| format!("{length} bytes at {address:#x} don't lie in the measuring VM's RAM"))
    }

    /// Returns all RAM as device servers get it.
    pub fn ram(&self) -> Vec<DmaRange> {
        let range = |region: &machine::memory::RamRegion| DmaRange {
            file: Arc::clone(&region.file),
            offset: region.file_offset,
            address: region.range.start,
            size: region.range.size,
        };
        self.vm.ram_regions().iter().map(range).collect()
    }

    /// Returns the placer of PCI BARs in the VM's address space, for those that the program accesses in the room.
    pub fn placer(&self) -> MachinePlacer {
        let (ports, memory) = self.vm.buses();
        MachinePlacer::new(Arc::clone(self.vm.vm()), Arc::clone(ports), Arc::clone(memory))
    }

    /// Returns the guest address of the read-only window.
    pub fn window(&self) -> u64 {
        self.vm.window().start
    }

    /// Returns the start of the address space for additional memslots.
    pub fn room(&self) -> u64 {
        self.vm.room().start
    }

    /// Maps memory at an address of that space, while the program runs.
    pub fn map(
        &self,
        name: &str,
        address: u64,
        memory: Arc<HostMapping>,
        read_only: bool,
    ) -> anyhow::Result<()> {
        self.vm.vm().slots().add(name, address, memory, read_only)?;
        Ok(())
    }

    /// Lets KVM defer writes of these bytes.
    pub fn coalesce(&self, zone: &CoalescedZone) -> anyhow::Result<()> {
        Ok(self.vm.vm().add_coalesced_zone(zone)?)
    }

    /// Lets writes of a value signal an eventfd.
    pub fn ring(&self, event: &IoEvent) -> anyhow::Result<()> {
        Ok(self.vm.vm().add_ioevent(event)?)
    }

    /// Returns a function that passes deferred writes to the device at the start of the room, from any thread.
    pub fn drain(&self, bytes: u64, device: Arc<dyn BusDevice>) -> anyhow::Result<impl Fn() + Send + use<>> {
        let names = RangeNames::new();
        let (ports, memory) = (AddressSpace::ports(Arc::clone(&names)), AddressSpace::memory(names));
        memory.insert(self.room(), bytes, "room device", device)?;
        let vm = Arc::clone(self.vm.vm());
        Ok(move || vm.coalesced().drain(&ports, &memory))
    }

    /// Returns its memory, for a device that reads it.
    pub fn memory(&self) -> GuestMemorySpace {
        self.memory.clone()
    }

    /// Writes guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.memory.memory().write_slice(bytes, GuestAddress(address))?)
    }

    /// Returns the eventfd of the first doorbell.
    pub fn doorbell(&self) -> anyhow::Result<&Arc<OwnedFd>> {
        self.vm.doorbell(0).context("The measuring VM has no doorbell")
    }

    /// Returns the exits to the monitor so far.
    pub fn exits(&self) -> u64 {
        self.vm.exits().total()
    }

    /// Runs one job on each of the first vCPUs in parallel, and returns the ticks of each.
    pub fn run(&mut self, jobs: &[Job]) -> anyhow::Result<Vec<u64>> {
        self.run_while(jobs, || Ok(()))
    }

    /// Does the same while `check`, which is called at intervals, has no error. After an error the jobs may continue.
    pub fn run_while(
        &mut self,
        jobs: &[Job],
        mut check: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<u64>> {
        for index in 0..jobs.len() {
            self.await_vcpu(index, &mut check)?;
        }
        let pages: Vec<u64> =
            (0..).take(jobs.len()).map(|index: u64| self.job_pages + index * PAGE).collect();
        for (page, job) in pages.iter().zip(jobs) {
            self.memory.memory().write_slice(&job.to_bytes(), GuestAddress(*page))?;
        }
        for index in 0..jobs.len() {
            self.desks.give(index);
        }
        let mut ticks = Vec::with_capacity(jobs.len());
        for (index, page) in pages.iter().enumerate() {
            self.await_vcpu(index, &mut check)?;
            ticks.push(self.memory.memory().read_obj::<u64>(GuestAddress(page + JOB_SIZE as u64))?);
        }
        Ok(ticks)
    }

    fn await_vcpu(
        &mut self,
        index: usize,
        check: &mut impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + MEASUREMENT_TIMEOUT;
        while !self.desks.await_vcpu(index) {
            check()?;
            if let Some(code) = self.vm.wait_for(Duration::ZERO).context("The measuring VM ended early")? {
                bail!("The program 'measure' ended early with exit code {code}");
            }
            if Instant::now() > deadline {
                bail!("vCPU {index} of the measuring VM didn't finish within {MEASUREMENT_TIMEOUT:?}");
            }
        }
        Ok(())
    }

    /// Lets the program end, without waiting for it.
    pub fn close(&self) {
        self.desks.close();
    }

    /// Ends the program and waits for its exit code.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.desks.close();
        match self.vm.wait_for(MEASUREMENT_TIMEOUT)? {
            Some(0) => Ok(()),
            Some(code) => bail!("The program 'measure' ended with exit code {code}"),
            None => bail!("The program 'measure' didn't end within {MEASUREMENT_TIMEOUT:?}"),
        }
    }
}

impl Drop for MeasuringVm {
    fn drop(&mut self) {
        // No vCPU thread may wait for a job while the VM is stopped.
        if !self.desks.is_closed() {
            self.desks.close();
        }
    }
}
