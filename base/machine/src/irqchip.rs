//! KVM's in-kernel interrupt controllers: two PICs, an IOAPIC with 24 pins, local APICs.
//!
//! GSI n drives IOAPIC pin n and, below 16, the PIC input of that number. This identity is KVM's default, so the MADT needs no interrupt
//! source overrides. GSIs from 24 up are MSI routes.

mod route;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQFD_FLAG_RESAMPLE,
    KVM_PIT_SPEAKER_DUMMY, kvm_irqchip, kvm_irqfd, kvm_msi, kvm_pit_config,
};

use self::route::{IrqfdRoute, RoutingTable};
use crate::interrupt::{InterruptController, IrqchipKind, LevelLine, MsiMessage, MsiRoute};
use crate::state::{IRQCHIP_STATE_VERSION, SavedInterruptController, SavedKernelIrqchip};
use crate::sys;
use crate::vm::{Vm, VmError, errno};

/// Pins of the in-kernel IOAPIC.
pub const IOAPIC_PINS: u32 = 24;

/// What to create besides PICs, IOAPIC and local APICs.
#[derive(Debug, Clone, Copy, Default)]
pub struct IrqchipOptions {
    /// The 8254 timer with the speaker port. Linux boots without it when it knows the frequency of the TSC or of the APIC timer.
    pub pit: bool,
}

/// The in-kernel interrupt controllers of one VM.
pub struct KernelIrqchip {
    shared: Arc<Shared>,
    pit: bool,
    power_on: SavedKernelIrqchip,
    edges: Mutex<BTreeMap<u32, Arc<OwnedFd>>>,
}

/// The part of the controller that routes need; a route may outlive the controller.
struct Shared {
    vm: Arc<Vm>,
    /// KVM replaces the whole table at once, so all changes hold this lock.
    routing: Mutex<RoutingTable>,
}

impl Shared {
    fn routing(&self) -> MutexGuard<'_, RoutingTable> {
        self.routing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets or removes the message of an MSI route in KVM's table. An error leaves the table as before, so that one bad message doesn't
    /// affect the other routes.
    fn route(&self, gsi: u32, message: Option<MsiMessage>) -> io::Result<()> {
        let mut routing = self.routing();
        let before = routing.set(gsi, message);
        if before == message {
            return Ok(());
        }
        let result =
            routing.entries().and_then(|entries| self.vm.fd().set_gsi_routing(&entries).map_err(errno));
        if result.is_err() {
            routing.set(gsi, before);
        }
        result
    }

    fn irqfd(&self, fd: &OwnedFd, gsi: u32, flags: u32, resample: Option<&OwnedFd>) -> io::Result<()> {
        let request = kvm_irqfd {
            fd: fd_number(fd),
            gsi,
            flags,
            resamplefd: resample.map_or(0, fd_number),
            ..Default::default()
        };
        sys::irqfd(self.vm.fd(), &request)
    }
}

fn fd_number(fd: &OwnedFd) -> u32 {
    // An owned descriptor is never negative.
    u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX)
}

impl KernelIrqchip {
    /// Creates the controllers. To be called before the first vCPU exists.
    pub fn create(vm: &Arc<Vm>, options: IrqchipOptions) -> Result<Arc<Self>, VmError> {
        vm.fd().create_irq_chip().map_err(|e| VmError::refused("create interrupt controllers", errno(e)))?;
        if options.pit {
            let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
            vm.fd().create_pit2(config).map_err(|e| VmError::refused("create an 8254 timer", errno(e)))?;
        }
        vm.set_kernel_irqchip();
        let shared =
            Arc::new(Shared { vm: Arc::clone(vm), routing: Mutex::new(RoutingTable::new(vm.irq_routes())) });
        let entries = shared.routing().entries();
        entries
            .and_then(|entries| vm.fd().set_gsi_routing(&entries).map_err(errno))
            .map_err(|e| VmError::refused(format!("route {IOAPIC_PINS} interrupt pins"), e))?;
        let power_on =
            save(vm, options.pit).map_err(|e| VmError::refused("read interrupt controller state", e))?;
        Ok(Arc::new(Self { shared, pit: options.pit, power_on, edges: Mutex::new(BTreeMap::new()) }))
    }

    fn load(&self, saved: &SavedKernelIrqchip) -> io::Result<()> {
        if saved.version > IRQCHIP_STATE_VERSION {
            let text = format!(
                "Saved interrupt controller state has version {}, but this program reads up to {IRQCHIP_STATE_VERSION}",
                saved.version
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if saved.pit.is_some() != self.pit {
            let text = "Saved interrupt controller state and this VM differ in having an 8254 timer";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let expected = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];
        let chips = [&saved.pic_master, &saved.pic_slave, &saved.ioapic];
        if !chips.iter().zip(expected).all(|(chip, id)| chip.chip_id == id) {
            let text = "Saved interrupt controller state has its controllers in the wrong places";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let fd = self.shared.vm.fd();
        // The slave PIC first: KVM recomputes the cascade after each chip. In the other order, a request that the slave still has from
        // before would be latched in the restored master, and the next boot would get a spurious interrupt at vector 7.
        for chip in [&saved.pic_slave, &saved.pic_master, &saved.ioapic] {
            fd.set_irqchip(chip).map_err(errno)?;
        }
        if let Some(pit) = &saved.pit {
            fd.set_pit2(pit).map_err(errno)?;
        }
        Ok(())
    }
}

fn save(vm: &Vm, pit: bool) -> io::Result<SavedKernelIrqchip> {
    let chip = |chip_id| {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.fd().get_irqchip(&mut chip).map(|()| chip).map_err(errno)
    };
    Ok(SavedKernelIrqchip {
        version: IRQCHIP_STATE_VERSION,
        pic_master: chip(KVM_IRQCHIP_PIC_MASTER)?,
        pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE)?,
        ioapic: chip(KVM_IRQCHIP_IOAPIC)?,
        pit: if pit { Some(vm.fd().get_pit2().map_err(errno)?) } else { None },
    })
}

fn check_pin(gsi: u32) -> io::Result<()> {
    if gsi < IOAPIC_PINS {
        return Ok(());
    }
    let text = format!("Interrupt pin {gsi} doesn't exist; the IOAPIC has pins 0 to {}", IOAPIC_PINS - 1);
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

impl InterruptController for KernelIrqchip {
    fn set_line(&self, gsi: u32, asserted: bool) -> io::Result<()> {
        check_pin(gsi)?;
        self.shared.vm.fd().set_irq_line(gsi, asserted).map_err(errno)
    }

    fn edge_eventfd(&self, gsi: u32) -> io::Result<Arc<OwnedFd>> {
        check_pin(gsi)?;
        let mut edges = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fd) = edges.get(&gsi) {
            return Ok(Arc::clone(fd));
        }
        let fd = Arc::new(sys::eventfd()?);
        self.shared.irqfd(&fd, gsi, 0, None)?;
        edges.insert(gsi, Arc::clone(&fd));
        Ok(fd)
    }

    fn level_eventfds(&self, gsi: u32) -> io::Result<LevelLine> {
        check_pin(gsi)?;
        let line = LevelLine { trigger: Arc::new(sys::eventfd()?), resample: Arc::new(sys::eventfd()?) };
        self.shared.irqfd(&line.trigger, gsi, KVM_IRQFD_FLAG_RESAMPLE, Some(&line.resample))?;
        Ok(line)
    }

    fn signal_msi(&self, message: MsiMessage) -> io::Result<()> {
        let MsiMessage { address, data } = message;
        let msi = kvm_msi {
            address_lo: route::low(address),
            address_hi: route::high(address),
            data,
            ..Default::default()
        };
        // A result of 0 means that the guest has disabled the target's APIC. As on hardware, the interrupt is lost without a report.
        self.shared.vm.fd().signal_msi(msi).map(drop).map_err(errno)
    }

    fn allocate_msi(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiRoute>>> {
        let gsis = self.shared.routing().allocate(usize::from(count)).ok_or_else(|| {
            let text = format!(
                "{count} more interrupt routes don't fit the {} that KVM has",
                self.shared.vm.irq_routes()
            );
            io::Error::new(io::ErrorKind::StorageFull, text)
        })?;
        let mut routes: Vec<Arc<dyn MsiRoute>> = Vec::with_capacity(gsis.len());
        let mut gsis = gsis.into_iter();
        while let Some(gsi) = gsis.next() {
            match sys::eventfd() {
                Ok(fd) => routes.push(Arc::new(IrqfdRoute::new(Arc::clone(&self.shared), gsi, fd))),
                Err(error) => {
                    let mut routing = self.shared.routing();
                    std::iter::once(gsi).chain(gsis).for_each(|gsi| routing.free(gsi));
                    // Unlock before `routes` is dropped: each route locks the table to free its own entry.
                    drop(routing);
                    return Err(error);
                }
            }
        }
        Ok(routes)
    }

    fn reset(&self) -> io::Result<()> {
        self.load(&self.power_on)
    }

    fn save(&self) -> io::Result<SavedInterruptController> {
        save(&self.shared.vm, self.pit).map(|saved| SavedInterruptController::KernelIrqchip(Box::new(saved)))
    }

    fn restore(&self, saved: &SavedInterruptController) -> io::Result<()> {
        match saved {
            SavedInterruptController::KernelIrqchip(saved) => self.load(saved),
            SavedInterruptController::Monitor(_) => Err(saved.elsewhere(IrqchipKind::Kernel)),
        }
    }
}
