//! The assembled machine: created once from a description, then run, paused, reset and ended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use control_api::types::VmState;
use firmware::MachineMap;
use firmware::image::{Image, ImageFile};
use machine::bus::AddressSpace;
use machine::exits::RangeNames;
use machine::interrupt::InterruptController;
use machine::kvm::Host;
use machine::memory::{
    GuestAddressSpace, GuestRam, HostNuma, NumaMode, PageSize, RamLayout, RamOptions, Readers,
};
use machine::state::SavedInterruptController;
use machine::vcpu::{VcpuConfig, VcpuManager, VcpuOptions, VcpuStart};
use machine::vm::Vm;
use machine::x86::{CpuTopology, guest_cpuid};
use pci::function::PciFunction as _;
use pci::root::PciRoot;
use virtio_devices::block::DiskContent;

use super::devices::{Devices, MachineParts, OpenedDevices};
use super::error::Error;
use super::event::{Event, Events};
use super::irqchip::Irqchip;
use super::threads;
use super::{boot, clock};
use crate::description::{BootProtocol, Guest, HugePages, LinuxBoot, VmDescription};
use crate::migration::destination::Blackout;
use crate::migration::shape::Shape;
use crate::migration::state::{SavedDevices, SavedMachine};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::vfio_user::IncomingFunction;

/// Files of the guest's kernel, kept open for resets: a monitor in its sandbox can't open files.
struct BootFiles {
    kernel: ImageFile,
    initrds: Vec<ImageFile>,
}

/// Everything that was opened for a VM before the sandbox was entered.
pub struct Opened {
    host: Host,
    vm: Arc<Vm>,
    boot: BootFiles,
    devices: OpenedDevices,
}

impl Opened {
    /// Opens KVM and every file, socket and interface that the description names. Without `claim`, disks are locked later: the VM that
    /// uses them still runs at the source.
    pub fn new(description: &VmDescription, events: &Events, claim: bool) -> Result<Self, Error> {
        let linux = linux(description)?;
        let kernel = ImageFile::open(&linux.kernel, "kernel")?;
        let initrds =
            linux.initrd.iter().map(|path| ImageFile::open(path, "initrd")).collect::<Result<Vec<_>, _>>()?;
        let host = Host::open()?;
        let vm = host.create_vm()?;
        let devices = OpenedDevices::new(description, events, claim)?;
        Ok(Self { host, vm, boot: BootFiles { kernel, initrds }, devices })
    }
}

/// A machine without its guest: memory, interrupt controllers and empty buses. It then gets a kernel, or a guest from a source.
pub struct Chassis {
    description: VmDescription,
    events: Events,
    started: Instant,
    host: Host,
    vm: Arc<Vm>,
    boot: BootFiles,
    devices: OpenedDevices,
    ram: GuestRam,
    irqchip: Irqchip,
    names: Arc<RangeNames>,
    ports: Arc<AddressSpace>,
    memory: Arc<AddressSpace>,
    topology: CpuTopology,
    map: MachineMap,
    shape: Shape,
}

impl Chassis {
    /// Assembles the machine.
    pub fn assemble(
        description: VmDescription,
        opened: Opened,
        events: Events,
        started: Instant,
        sandbox: &Sandbox,
    ) -> Result<Self, Error> {
        let Opened { host, vm, boot, devices } = opened;
        let ram = allocate_ram(&description)?;
        vm.slots().add_ram(&ram)?;

        let names = RangeNames::new();
        let ports = Arc::new(AddressSpace::ports(Arc::clone(&names)));
        let memory = Arc::new(AddressSpace::memory(Arc::clone(&names)));

        let topology = CpuTopology::packages(&vec![
            u32::from(description.cpus.cores);
            usize::from(description.cpus.sockets)
        ])?;
        let kind = description.interrupts;
        let irqchip = Irqchip::create(kind, &vm, &topology, &memory, sandbox)?;
        let boot_cpuid = guest_cpuid(&host, &topology, 0, kind)?;
        let physical_bits = boot::physical_bits(&boot_cpuid);
        let mut map =
            boot::machine_map(&description, ram.layout(), &topology, physical_bits, devices.has_console());
        if let Some(neighbour) = devices.neighbour() {
            neighbour.check(ram.layout(), physical_bits)?;
            boot::end_pci_below(&mut map, neighbour.geometry().base());
        }
        if let Some(network) = devices.network() {
            network.check(ram.layout())?;
        }
        let node = |node| u32::try_from(node).unwrap_or(u32::MAX);
        let windows = std::iter::once(map.pci.memory32).chain(map.pci.memory64);
        let shape = Shape {
            version: Shape::VERSION,
            name: description.name.clone(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            vcpus: (0..topology.vcpus()).map(|index| topology.apic_id(index)).collect(),
            memory: ram
                .layout()
                .ranges()
                .iter()
                .map(|range| (range.start, range.size, node(range.node)))
                .collect(),
            windows: windows.map(|window| (window.start, window.len)).collect(),
            console: devices.has_console(),
            devices: devices.shapes(),
            interrupts: kind,
            cpuid: boot_cpuid.as_slice().to_vec(),
        };
        Ok(Self {
            description,
            events,
            started,
            host,
            vm,
            boot,
            devices,
            ram,
            irqchip,
            names,
            ports,
            memory,
            topology,
            map,
            shape,
        })
    }

    /// The VM's description.
    pub fn description(&self) -> &VmDescription {
        &self.description
    }

    /// Guest RAM, as mapped into this process.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// The guest-visible shape of the machine.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Contents of its disks.
    pub fn disks(&self) -> Vec<DiskContent> {
        self.devices.disks()
    }

    /// Passes the guest's memory to the servers of served devices. Returns the receivers for the devices' state.
    pub fn connect_incoming(&mut self) -> Result<Vec<IncomingFunction>, Error> {
        self.devices.connect_incoming(&self.ram)
    }

    /// Creates the machine with vCPUs, paused before their first instruction, and devices at power-on state.
    pub fn boot(self, sandbox: &Sandbox) -> Result<Machine, Error> {
        self.finish(sandbox, None, |chassis| {
            let Self { ram, map, boot, description, .. } = chassis;
            let registers = load(ram, map, boot, description, firmware::prepare_fresh)?;
            let start = |index| if index == 0 { registers.clone() } else { VcpuStart::WaitForSipi };
            Ok((0..chassis.topology.vcpus()).map(start).collect())
        })
    }

    /// Restores the saved machine, paused; its RAM has been filled already. Afterwards it owns the disks. `blackout` is the time since when
    /// the guest is stopped, if known.
    pub fn restore(
        self,
        sandbox: &Sandbox,
        saved: SavedMachine,
        blackout: Option<Blackout>,
    ) -> Result<Machine, Error> {
        let ids: Vec<u32> = saved.vcpus.iter().map(|vcpu| vcpu.id).collect();
        if ids != self.shape.vcpus {
            let text = format!("its saved state has vCPUs {ids:?}, this machine has {:?}", self.shape.vcpus);
            return Err(Error::BadSavedMachine(text));
        }
        if saved.devices.functions.len() != self.shape.devices.len()
            || saved.devices.serial.is_some() != self.shape.console
        {
            let text = "its saved state has other devices than were offered".to_owned();
            return Err(Error::BadSavedMachine(text));
        }
        let SavedMachine { vcpus, controller, clock: saved_clock, devices, asked, .. } = saved;
        let mut machine = self.finish(sandbox, Some((&controller, &devices)), move |_| {
            Ok(vcpus.into_iter().map(|vcpu| VcpuStart::Restored(Box::new(vcpu))).collect())
        })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let (clock, difference) =
            clock::bounded(&saved_clock, blackout.as_ref().map(Blackout::elapsed), now_ns);
        machine.vm.restore_clock(&clock)?;
        if let Some(nanoseconds) = difference {
            tracing::warn!(
                difference_ms = nanoseconds / 1_000_000,
                "The hosts' wall clocks differ: the guest's clock advances by the measured blackout. Synchronize both by NTP"
            );
            machine.clock_differed = true;
        }
        machine.lock_disks()?;
        machine.events.remember(asked);
        *machine.state() = VmState::Paused;
        Ok(machine)
    }

    fn vcpu_configs(&self, starts: Vec<VcpuStart>) -> Result<Vec<VcpuConfig>, Error> {
        let configure = |(index, start): (u32, VcpuStart)| {
            let pin_to = self
                .description
                .pinning
                .get(usize::try_from(index).unwrap_or(usize::MAX))
                .map(|list| list.iter().map(usize::from).collect())
                .unwrap_or_default();
            Ok(VcpuConfig {
                id: self.topology.apic_id(index),
                cpuid: guest_cpuid(&self.host, &self.topology, index, self.description.interrupts)?,
                tells_tsc_frequency: true,
                start,
                pin_to,
            })
        };
        (0..self.topology.vcpus()).zip(starts).map(configure).collect()
    }

    fn finish(
        self,
        sandbox: &Sandbox,
        saved: Option<(&SavedInterruptController, &SavedDevices)>,
        starts: impl FnOnce(&Self) -> Result<Vec<VcpuStart>, Error>,
    ) -> Result<Machine, Error> {
        let configs = self.vcpu_configs(starts(&self)?)?;
        let vcpu_events = self.events.clone();
        let vcpus = VcpuManager::start(
            &self.vm,
            configs,
            VcpuOptions {
                ports: Arc::clone(&self.ports),
                memory: Arc::clone(&self.memory),
                names: self.names,
                on_event: Arc::new(move |event| vcpu_events.send(Event::Vcpu(event))),
                local_apics: self.irqchip.local_apics(),
                exit_handler: None,
                on_thread_start: Some(threads::hook(sandbox, ThreadKind::Vcpu)),
            },
        )?;
        // Local APICs first, so that they receive the IOAPIC's pending interrupts; then devices, which assert their lines.
        let controller = self.irqchip.controller();
        if let Some((saved, _)) = saved {
            controller
                .restore(saved)
                .map_err(|source| Error::Monitor { what: "restore the interrupt controllers", source })?;
        }
        let (devices, root) = self.devices.plug(&MachineParts {
            vm: &self.vm,
            ram: &self.ram,
            controller: &controller,
            ports: &self.ports,
            memory: &self.memory,
            map: &self.map,
            sandbox,
            saved: saved.map(|(_, devices)| devices),
        })?;
        Ok(Machine {
            description: self.description,
            vm: self.vm,
            vcpus,
            ports: self.ports,
            memory: self.memory,
            root,
            devices,
            events: self.events,
            started: self.started,
            ram: self.ram,
            topology: self.topology,
            controller,
            irqchip: self.irqchip,
            map: self.map,
            boot: self.boot,
            shape: self.shape,
            clock_differed: false,
            state: Mutex::new(VmState::Starting),
        })
    }
}

/// Origin of a reset request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetBy {
    /// The guest.
    Guest,
    /// The user.
    User,
    /// The user, with the assertion that the VM doesn't run at its destination.
    UserWithForce,
}

/// A machine with its guest. Thread-safe: the main thread and the API thread use it.
pub struct Machine {
    /// The VM's description.
    pub description: VmDescription,
    /// KVM's VM.
    pub vm: Arc<Vm>,
    /// vCPUs with their threads.
    pub vcpus: VcpuManager,
    /// I/O ports.
    pub ports: Arc<AddressSpace>,
    /// Memory-mapped I/O.
    pub memory: Arc<AddressSpace>,
    /// PCI bus.
    pub root: Arc<PciRoot>,
    /// Devices other than vCPUs and interrupt controllers.
    pub devices: Devices,
    /// Sender of events.
    pub events: Events,
    /// When the monitor started.
    pub started: Instant,
    /// Interrupt controllers.
    pub controller: Arc<dyn InterruptController>,
    /// The controllers by their type.
    pub irqchip: Irqchip,
    /// The guest-visible shape of the machine.
    pub shape: Shape,
    /// The VM arrived from a host whose wall clock differed too much.
    pub clock_differed: bool,
    ram: GuestRam,
    topology: CpuTopology,
    map: MachineMap,
    boot: BootFiles,
    state: Mutex<VmState>,
}

impl Machine {
    /// Locks the machine's state. A change holds the lock from begin to end, so that two changes never overlap.
    pub fn state(&self) -> MutexGuard<'_, VmState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// RAM, for the device tree.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Starts the vCPUs.
    pub fn start(&self) -> Result<(), Error> {
        let mut state = self.state();
        self.vcpus.resume()?;
        *state = VmState::Running;
        Ok(())
    }

    /// Pauses vCPUs first, then devices: nothing is in flight afterwards.
    pub fn pause(&self) -> Result<(), Error> {
        let mut state = self.state();
        if *state == VmState::Running {
            self.vcpus.pause()?;
            for (_, function) in self.root.functions() {
                function.quiesce()?;
            }
            *state = VmState::Paused;
        }
        Ok(())
    }

    /// Resumes devices first, then vCPUs. The caller must ensure that a VM in doubt may run here. A guest with a pending reset or
    /// power-off executes no instruction before that.
    pub fn resume(&self) -> Result<(), Error> {
        let mut state = self.state();
        if matches!(*state, VmState::Paused | VmState::InDoubt) {
            // After a migration the destination may have the disks locked, or have released them.
            self.lock_disks()?;
            for (_, function) in self.root.functions() {
                function.unquiesce()?;
            }
            if !self.events.resend_request() {
                self.vcpus.resume()?;
            }
            *state = VmState::Running;
        }
        Ok(())
    }

    /// Whether a migration has stopped the guest, decided or not: its pending requests migrate with it.
    pub fn is_stopped_by_migration(&self) -> bool {
        matches!(*self.state(), VmState::HandingOver | VmState::InDoubt)
    }

    /// Locks the disks, which only one host may use. Disks that are locked already stay so.
    pub fn lock_disks(&self) -> Result<(), Error> {
        for function in &self.devices.virtio {
            function.take_over().map_err(|error| Error::device(function.name(), error))?;
        }
        Ok(())
    }

    /// Pauses the vCPUs until [`Machine::reset`], which must follow soon.
    pub fn pause_vcpus_for_reset(&self) -> Result<(), Error> {
        let state = self.state();
        if *state == VmState::Running {
            self.vcpus.pause()?;
        }
        Ok(())
    }

    /// Resets everything to power-on state, loads the kernel again and runs it. A VM that is being handed over isn't reset. One in doubt
    /// is reset only by its user's `force`, and a paused one only by its user. The guest's request then stays recorded until the VM is
    /// resumed, here or at the destination.
    ///
    /// The function calls `before_start` with all vCPUs paused in their new state. Earlier requests are those of the old guest, later
    /// ones those of the new one. If `before_start` returns a value, the machine stays paused, and `reset` returns that value.
    pub fn reset<T>(
        &self,
        by: ResetBy,
        before_start: impl FnOnce() -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        let mut state = self.state();
        let waits = match *state {
            VmState::HandingOver => true,
            VmState::InDoubt => by != ResetBy::UserWithForce,
            VmState::Paused => by == ResetBy::Guest,
            _ => false,
        };
        if waits {
            tracing::info!(state = ?*state, "A reset waits until the VM is resumed, here or at its destination");
            return Ok(None);
        }
        self.vcpus.pause()?;
        if matches!(*state, VmState::Paused | VmState::InDoubt) {
            self.lock_disks()?;
            for (_, function) in self.root.functions() {
                function.unquiesce()?;
            }
        }
        self.root.reset()?;
        self.devices.reset();
        self.controller
            .reset()
            .map_err(|source| Error::Monitor { what: "reset the interrupt controllers", source })?;
        let registers = load(&self.ram, &self.map, &self.boot, &self.description, firmware::prepare)?;
        for index in (0..self.topology.vcpus()).rev() {
            let start = if index == 0 { registers.clone() } else { VcpuStart::WaitForSipi };
            self.vcpus.set_state(self.topology.apic_id(index), start)?;
        }
        *state = VmState::Running;
        if let Some(answer) = before_start()? {
            return Ok(Some(answer));
        }
        self.events.clear_request();
        self.vcpus.resume()?;
        Ok(None)
    }

    /// Ends vCPUs and devices. Before this returns, the disks' files have all data that devices have acknowledged.
    pub fn end(&self) -> Result<(), Error> {
        let mut state = self.state();
        let devices_stand = matches!(*state, VmState::Paused | VmState::HandingOver | VmState::InDoubt);
        *state = VmState::Stopping;
        self.vcpus.stop()?;
        if !devices_stand {
            for (_, function) in self.root.functions() {
                function.quiesce()?;
            }
        }
        // Breaks a cycle of references: the buses own the PCI root, which owns the placer of BARs on the buses. Otherwise nothing would
        // be dropped, and no socket file removed.
        self.ports.clear();
        self.memory.clear();
        Ok(())
    }
}

/// The description's kernel.
pub fn linux(description: &VmDescription) -> Result<&LinuxBoot, Error> {
    match &description.guest {
        Guest::Linux(linux) => Ok(linux),
        Guest::Payload(_) => Err(Error::NotLinux(description.name.clone())),
    }
}

/// How kernel and tables are written to RAM: into fresh RAM, or over a former guest's.
type Prepare = fn(
    &machine::memory::GuestMemory,
    &MachineMap,
    &firmware::BootFiles<'_>,
) -> Result<firmware::LoadedKernel, firmware::FirmwareError>;

fn load(
    ram: &GuestRam,
    map: &MachineMap,
    files: &BootFiles,
    description: &VmDescription,
    prepare: Prepare,
) -> Result<VcpuStart, Error> {
    let linux = linux(description)?;
    let initrds: Vec<&dyn Image> = files.initrds.iter().map(|file| file as &dyn Image).collect();
    let boot_files = firmware::BootFiles {
        kernel: &files.kernel,
        initrds: &initrds,
        command_line: &linux.cmdline,
        protocol: match linux.protocol {
            BootProtocol::Auto => firmware::BootProtocol::Auto,
            BootProtocol::Pvh => firmware::BootProtocol::Pvh,
            BootProtocol::Linux64 => firmware::BootProtocol::Linux64,
        },
    };
    let space = ram.memory();
    let loaded = prepare(&space.memory(), map, &boot_files)?;
    tracing::debug!(?loaded, "kernel loaded");
    Ok(VcpuStart::Registers(Box::new(boot::start_registers(&loaded.registers))))
}

/// Processes that may read RAM: the strongest protection that the VM's devices permit.
fn readers(description: &VmDescription) -> Readers {
    let written_elsewhere = !description.rdma.is_empty() || !description.vfio_user.is_empty();
    match (&description.neighbour, written_elsewhere) {
        (None, _) => Readers::Nobody,
        (Some(_), false) => Readers::Anybody,
        // The devices' servers map RAM for writing when they start, and again after a restart.
        (Some(_), true) => Readers::OtherUsers,
    }
}

fn allocate_ram(description: &VmDescription) -> Result<GuestRam, Error> {
    let sizes: Vec<u64> = description.numa.iter().map(|node| node.memory).collect();
    let layout = RamLayout::new(&sizes)?;
    let options = RamOptions {
        name: description.name.clone(),
        pages: match description.memory.hugepages {
            HugePages::None => PageSize::Base,
            HugePages::Size2M => PageSize::Huge2M,
            HugePages::Size1G => PageSize::Huge1G,
        },
        transparent_huge: description.memory.hugepages == HugePages::None,
        numa: description
            .numa
            .iter()
            .map(|node| node.host_node.map(|host| HostNuma { mode: NumaMode::Bind, nodes: vec![host] }))
            .collect(),
        prefault: false,
        readers: readers(description),
    };
    Ok(GuestRam::allocate(&layout, &options)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description;

    /// RAM is sealed where all devices still work with that. It has mode 0600 where devices of other processes write it, and no readers
    /// without a neighbourhood.
    #[test]
    fn readers_follow_from_the_devices() {
        let readers_of = |text: &str| {
            let (written, _) =
                description::parse(&format!("kernel = \"k\"\n{text}"), "/x/a.toml".as_ref()).unwrap();
            readers(&description::validate(&written).unwrap())
        };
        let group = "[neighbour]\ngroup = \"g\"\npermit = [\"b@7\"]\n";
        assert_eq!(readers_of(""), Readers::Nobody);
        assert_eq!(readers_of("[[rdma]]\nsegment = \"s\""), Readers::Nobody);
        assert_eq!(readers_of(group), Readers::Anybody);
        assert_eq!(readers_of(&format!("{group}[[rdma]]\nsegment = \"s\"")), Readers::OtherUsers);
        assert_eq!(readers_of(&format!("{group}[[vfio-user]]\nsocket = \"s\"")), Readers::OtherUsers);
    }
}
