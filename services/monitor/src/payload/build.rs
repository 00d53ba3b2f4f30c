//! The builder of a payload VM.

use super::layout::{self, Layout, MAX_VCPUS};
use super::ports::{Console, Control, DoorbellPage, HostPortDevice, HostPorts, on_event};
use super::start::{Features, NodePart, Start};
use super::vm::PayloadVm;
use super::whole::Whole;
use super::{PayloadError, elf};
use machine::bus::{AddressSpace, BusDevice};
use machine::exits::RangeNames;
use machine::kvm::Host;
use machine::memory::shared::SharedRam;
use machine::memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestRam, PageSize, RamLayout, RamOptions, Userfault,
};
use machine::slots::HostMapping;
use machine::vcpu::{VcpuManager, VcpuOptions};
use machine::vm::{IoEvent, IoSpace, Vm};
use machine::x86::CpuTopology;
use payload_abi::{
    DOORBELL_ADDRESS, DOORBELL_SIZE, DOORBELL_STRIDE, HIGH_RAM_START, LOW_RAM_END, LOWEST_LOAD_ADDRESS,
    MAX_DOORBELLS, PORT_CONSOLE, PORT_HOST, PORT_HOST_COUNT, Region, VERSION,
};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

/// RAM is a multiple of this, bytes.
const MEMORY_UNIT_BYTES: u64 = 2 << 20;
/// Smallest RAM, bytes: the monitor's tables and as much again.
const MIN_MEMORY_BYTES: u64 = 4 << 20;

/// Settings of a payload VM. Each setter names its default.
pub struct PayloadBuilder {
    name: String,
    program: Vec<u8>,
    arguments: Vec<String>,
    vcpus: u32,
    pin: Vec<Vec<usize>>,
    memory: u64,
    pages: PageSize,
    transparent_huge: bool,
    prefault: bool,
    stack_size: u64,
    doorbells: u32,
    window: Option<Arc<HostMapping>>,
    room: u64,
    console: Box<dyn Write + Send>,
    host_ports: Option<Arc<dyn HostPorts>>,
    port_devices: Vec<(u16, u16, Arc<dyn BusDevice>)>,
    room_device: Option<(u64, Arc<dyn BusDevice>)>,
    on_thread_start: Option<Arc<dyn Fn() + Send + Sync>>,
    whole: Option<Arc<dyn Whole>>,
    userfault: Option<Userfault>,
}

/// The settings that must be equal for two builders to make the same VM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Definition<'a> {
    /// The program's bytes.
    pub(crate) program: &'a [u8],
    pub(crate) arguments: &'a [String],
    pub(crate) stack_bytes: u64,
    pub(crate) doorbells: u32,
    /// Version of the payload ABI.
    pub(crate) abi: u32,
    pub(crate) vcpus: u32,
    pub(crate) memory_bytes: u64,
}

impl PayloadBuilder {
    pub(super) fn new(name: &str, program: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            program,
            arguments: Vec::new(),
            vcpus: 1,
            pin: Vec::new(),
            memory: 64 << 20,
            pages: PageSize::Base,
            transparent_huge: false,
            prefault: false,
            stack_size: 64 << 10,
            doorbells: 1,
            window: None,
            room: 0,
            console: Box::new(std::io::stdout()),
            host_ports: None,
            port_devices: Vec::new(),
            room_device: None,
            on_thread_start: None,
            whole: None,
            userfault: None,
        }
    }

    pub(super) fn from_file(path: &Path) -> Result<Self, PayloadError> {
        let program =
            std::fs::read(path).map_err(|source| PayloadError::Read { path: path.to_owned(), source })?;
        Ok(Self::new(&path.to_string_lossy(), program))
    }

    /// Sets the program's arguments, without its name. Default: none.
    pub fn arguments<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.arguments = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of vCPUs, 1 to [`MAX_VCPUS`]. Default: 1.
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Sets the host CPUs of each vCPU. vCPUs beyond the list's end, and those with an empty entry, run on any CPU. Default: none pinned.
    pub fn pin(mut self, pin: Vec<Vec<usize>>) -> Self {
        self.pin = pin;
        self
    }

    /// Sets the RAM, bytes, a multiple of 2 MiB. Default: 64 MiB.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets the size of RAM's host pages. Default: 4 KiB.
    pub fn pages(mut self, pages: PageSize) -> Self {
        self.pages = pages;
        self
    }

    /// Advises the kernel to use transparent huge pages. Default: no.
    pub fn transparent_huge(mut self, on: bool) -> Self {
        self.transparent_huge = on;
        self
    }

    /// Allocates all RAM now rather than at first access. Default: no.
    pub fn prefault(mut self, on: bool) -> Self {
        self.prefault = on;
        self
    }

    /// Sets the size of each vCPU's stack, bytes, a multiple of 4 KiB. Default: 64 KiB.
    pub fn stack_size(mut self, bytes: u64) -> Self {
        self.stack_size = bytes;
        self
    }

    /// Sets the number of doorbells, up to [`MAX_DOORBELLS`]. Default: 1.
    pub fn doorbells(mut self, count: u32) -> Self {
        self.doorbells = count;
        self
    }

    /// Adds memory that the program can read and not write. Default: none.
    pub fn window(mut self, window: Arc<HostMapping>) -> Self {
        self.window = Some(window);
        self
    }

    /// Sets the size of the address space above RAM and window ([`PayloadVm::room`]) that the program's page tables map, bytes. Memslots
    /// can be added there while the program runs ([`PayloadVm::vm`]). An access without a memslot exits. Default: none.
    pub fn room(mut self, bytes: u64) -> Self {
        self.room = bytes;
        self
    }

    /// Sets the console's output. Default: standard output.
    pub fn console(mut self, output: impl Write + Send + 'static) -> Self {
        self.console = Box::new(output);
        self
    }

    /// Sets the handler of the host ports. Default: none; the ports read as all ones.
    pub fn host_ports(mut self, ports: Arc<dyn HostPorts>) -> Self {
        self.host_ports = Some(ports);
        self
    }

    /// Adds a device at `count` ports from `first` on. Default: none. Building fails if the ports are in use.
    pub fn port_device(mut self, first: u16, count: u16, device: Arc<dyn BusDevice>) -> Self {
        self.port_devices.push((first, count, device));
        self
    }

    /// Adds a device at the first `size` bytes of the room ([`Self::room`]), for accesses without a memslot. Default: none.
    pub fn room_device(mut self, size: u64, device: Arc<dyn BusDevice>) -> Self {
        self.room_device = Some((size, device));
        self
    }

    /// Sets a hook that each vCPU thread runs first, such as for its seccomp filter. Default: none.
    pub fn on_thread_start(mut self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_thread_start = Some(Arc::new(hook));
        self
    }

    /// Makes this one node of a VM that spans hosts. The node gets its vCPUs, and RAM from [`payload_abi::LOWEST_LOAD_ADDRESS`] on is
    /// shared ([`PayloadVm::shared_ram`]). Tables and exception stacks below are the node's own. All nodes must have the same settings.
    /// Default: this is the whole VM.
    pub fn part_of(mut self, whole: Arc<dyn Whole>) -> Self {
        self.whole = Some(whole);
        self
    }

    /// For a VM that spans hosts: passes a descriptor from [`SharedRam::userfault`] that was opened while the process had its privileges.
    /// Without it, [`Self::build`] opens one.
    #[must_use]
    pub fn userfault(mut self, userfault: Userfault) -> Self {
        self.userfault = Some(userfault);
        self
    }

    /// The end of the highest RAM.
    pub(crate) fn highest_address(&self) -> u64 {
        match self.memory.checked_sub(LOW_RAM_END) {
            Some(high) if high > 0 => HIGH_RAM_START.saturating_add(high),
            _ => self.memory,
        }
    }

    /// The settings that all nodes of a VM must have in common.
    pub(crate) fn definition(&self) -> Definition<'_> {
        Definition {
            program: &self.program,
            arguments: &self.arguments,
            stack_bytes: self.stack_size,
            doorbells: self.doorbells,
            abi: VERSION,
            vcpus: self.vcpus,
            memory_bytes: self.memory,
        }
    }

    /// Replaces the console, and returns the previous one.
    pub(crate) fn replace_console(
        mut self,
        console: impl Write + Send + 'static,
    ) -> (Self, Box<dyn Write + Send>) {
        let old = std::mem::replace(&mut self.console, Box::new(console));
        (self, old)
    }

    /// Loads the program and creates the VM. Its vCPUs don't run yet. All errors of settings and program are found before KVM is used.
    pub fn build(mut self) -> Result<PayloadVm, PayloadError> {
        let userfault = self.userfault.take();
        let layout = self.checked_layout()?;
        let stacks_start = layout.stacks_start().ok_or_else(|| PayloadError::TooSmall {
            memory: layout.low_end(),
            what: format!("{} stacks of {:#x} bytes", self.vcpus, self.stack_size),
        })?;
        let program = elf::Program::parse(&self.program, stacks_start)
            .map_err(|source| PayloadError::Program { name: self.name.clone(), source })?;
        let free_start = program.end.next_multiple_of(layout::PAGE).min(stacks_start);
        let free = Region { start: free_start, size: stacks_start - free_start };

        let host = Host::open()?;
        let vm = host.create_vm()?;
        let ram = self.allocate_ram()?;
        let shared = self.place_ram(&vm, &ram, userfault)?;
        self.add_window(&vm, &layout)?;
        self.load(&program, &layout, &ram)?;
        let (sender, messages) = mpsc::channel();
        let console = std::mem::replace(&mut self.console, Box::new(std::io::sink()));
        let console = Console::new(console, sender.clone());
        let names = RangeNames::new();
        let (ports, mmio) = self.buses(&names, &layout, &console)?;
        let doorbells = self.add_doorbells(&vm)?;

        let topology = CpuTopology::flat(self.vcpus)?;
        let start = Start {
            layout: &layout,
            part: NodePart::of(self.whole.as_deref(), self.vcpus),
            arguments: std::iter::once(&self.name).chain(&self.arguments).cloned().collect(),
            entry: program.entry,
            vcpus: self.vcpus,
            doorbells: self.doorbells,
            free,
        };
        let local = start.local(self.whole.take(), &topology);
        let configs = start.configs(&host, &topology, &self.pin)?;
        let features = Features::of_all(&configs);
        let options = VcpuOptions {
            local_apics: None,
            ports: Arc::clone(&ports),
            memory: Arc::clone(&mmio),
            names,
            on_event: on_event(sender.clone()),
            exit_handler: Some(Arc::new(Control {
                messages: Mutex::new(sender.clone()),
                local: local.clone(),
            })),
            on_thread_start: self.on_thread_start.take(),
        };
        let manager = Arc::new(VcpuManager::start(&vm, configs, options)?);
        let tsc_khz = start.complete_registers(&manager, &topology, &features)?;
        start.write_memory(&ram, tsc_khz)?;
        let parts = super::vm::Parts {
            vm,
            ports,
            mmio,
            ram,
            shared,
            manager,
            local,
            layout,
            free,
            doorbells,
            console,
            messages,
            sender,
        };
        Ok(PayloadVm::new(parts))
    }

    fn allocate_ram(&self) -> Result<GuestRam, PayloadError> {
        let options = RamOptions {
            name: "payload".to_owned(),
            pages: self.pages,
            transparent_huge: self.transparent_huge,
            prefault: self.prefault,
            ..RamOptions::default()
        };
        Ok(GuestRam::allocate(&RamLayout::new(&[self.memory])?, &options)?)
    }

    fn add_window(&self, vm: &Vm, layout: &Layout) -> Result<(), PayloadError> {
        if let Some(window) = &self.window {
            vm.slots().add("window", layout.window.start, window.clone(), true)?;
        }
        Ok(())
    }

    /// Writes the monitor's tables and the program's segments.
    fn load(&self, program: &elf::Program, layout: &Layout, ram: &GuestRam) -> Result<(), PayloadError> {
        let memory = ram.memory();
        let memory = memory.memory();
        layout.write(&memory)?;
        for segment in &program.segments {
            let bytes = self.program.get(segment.file.clone()).unwrap_or_default();
            memory.write_slice(bytes, GuestAddress(segment.start))?;
        }
        Ok(())
    }

    /// The buses of ports and of memory, with the monitor's devices and the caller's.
    fn buses(
        &mut self,
        names: &Arc<RangeNames>,
        layout: &Layout,
        console: &Arc<Console>,
    ) -> Result<(Arc<AddressSpace>, Arc<AddressSpace>), PayloadError> {
        let ports = Arc::new(AddressSpace::ports(Arc::clone(names)));
        let mmio = Arc::new(AddressSpace::memory(Arc::clone(names)));
        ports.insert(PORT_CONSOLE.into(), 1, "console", Arc::clone(console) as _)?;
        if let Some(host_ports) = self.host_ports.take() {
            let device = Arc::new(HostPortDevice(host_ports));
            ports.insert(PORT_HOST.into(), PORT_HOST_COUNT.into(), "host ports", device)?;
        }
        for (first, count, device) in std::mem::take(&mut self.port_devices) {
            ports.insert(first.into(), count.into(), "port device", device)?;
        }
        if let Some((size, device)) = self.room_device.take() {
            mmio.insert(layout.room.start, size, "room device", device)?;
        }
        mmio.insert(DOORBELL_ADDRESS, DOORBELL_SIZE, "doorbell page", Arc::new(DoorbellPage))?;
        Ok((ports, mmio))
    }

    /// Creates the doorbells, and makes KVM signal them.
    fn add_doorbells(&self, vm: &Vm) -> Result<Vec<Arc<OwnedFd>>, PayloadError> {
        let mut doorbells = Vec::new();
        for index in 0..self.doorbells {
            let fd = Arc::new(doorbell(index)?);
            vm.add_ioevent(&IoEvent {
                space: IoSpace::Memory,
                address: DOORBELL_ADDRESS + u64::from(index) * DOORBELL_STRIDE,
                width: 4,
                datamatch: None,
                fd: fd.clone(),
            })?;
            doorbells.push(fd);
        }
        Ok(doorbells)
    }

    /// Gives the guest its RAM. In a VM that spans hosts, that is this node's own part, and the shared part by a mapping of its own.
    fn place_ram(
        &self,
        vm: &Vm,
        ram: &GuestRam,
        userfault: Option<Userfault>,
    ) -> Result<Option<Arc<SharedRam>>, PayloadError> {
        if self.whole.is_none() {
            vm.slots().add_ram(ram)?;
            return Ok(None);
        }
        if let Some(low) = ram.regions().first() {
            let tables =
                HostMapping::new("tables", low.file.as_fd(), low.file_offset, LOWEST_LOAD_ADDRESS, true)?;
            vm.slots().add("tables", low.range.start, tables, false)?;
        }
        let shared = match userfault {
            Some(userfault) => SharedRam::with(userfault, ram, LOWEST_LOAD_ADDRESS)?,
            None => SharedRam::new(ram, LOWEST_LOAD_ADDRESS)?,
        };
        for (start, mapping) in shared.mappings() {
            vm.slots().add("shared RAM", start, Arc::clone(mapping), false)?;
        }
        Ok(Some(Arc::new(shared)))
    }

    fn checked_layout(&self) -> Result<Layout, PayloadError> {
        let setting = |what: String, reason: String| PayloadError::Setting { what, reason };
        if let Some(whole) = &self.whole {
            let (node, nodes) = (whole.node(), whole.nodes());
            if nodes == 0 || node >= nodes || self.vcpus < nodes {
                let what = format!("{} vCPUs on {nodes} nodes", self.vcpus);
                return Err(setting(what, "choose at least one for each node".to_owned()));
            }
            if self.pages != PageSize::Base || self.transparent_huge || self.prefault {
                let what = "huge or prefaulted pages on several nodes".to_owned();
                return Err(setting(what, "shared memory moves in pages of 4 KiB".to_owned()));
            }
            if self.window.is_some() || self.room > 0 {
                let what = "a window on several nodes".to_owned();
                return Err(setting(what, "windows are one host's memory".to_owned()));
            }
        }
        if !(1..=MAX_VCPUS).contains(&self.vcpus) {
            return Err(setting(format!("{} vCPUs", self.vcpus), format!("choose 1 to {MAX_VCPUS}")));
        }
        if self.memory < MIN_MEMORY_BYTES || !self.memory.is_multiple_of(MEMORY_UNIT_BYTES) {
            return Err(setting(
                format!("{:#x} bytes of memory", self.memory),
                format!("choose a multiple of 2 MiB, at least {} MiB", MIN_MEMORY_BYTES >> 20),
            ));
        }
        if self.stack_size < layout::PAGE || !self.stack_size.is_multiple_of(layout::PAGE) {
            let what = format!("stacks of {:#x} bytes", self.stack_size);
            return Err(setting(what, "choose a positive multiple of 4 KiB".to_owned()));
        }
        if self.doorbells > MAX_DOORBELLS {
            return Err(setting(
                format!("{} doorbells", self.doorbells),
                format!("choose 0 to {MAX_DOORBELLS}"),
            ));
        }
        if let Some(argument) = self.arguments.iter().chain([&self.name]).find(|text| text.contains('\0')) {
            let what = format!("the argument {argument:?}");
            return Err(setting(what, "leave out the null character".to_owned()));
        }
        let window = self.window.as_ref().map_or(0, |window| window.len());
        Ok(Layout::new(self.memory, window, self.vcpus, self.stack_size)?.with_room(self.room)?)
    }
}

fn doorbell(index: u32) -> Result<OwnedFd, PayloadError> {
    use rustix::event::{EventfdFlags, eventfd};
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| PayloadError::Doorbell { index, source: error.into() })
}
