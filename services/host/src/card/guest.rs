//! One guest's side of a shared card: a PCI function over vfio-user.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_models::Access;
use device_models::describe::{Bar, BusMaster, Device as Description};
use pci::config::{ConfigSpace, Identity, InterruptPin};
use pci::function::{BarKind, BarLayout};
use rustix::io::Errno;
use vfio_user_protocol::device::{
    Device, DmaMapping, INTERRUPT_INTX, InterruptFlags, Interrupts, Peer, REGION_CONFIG, Region,
    SetInterrupts,
};
use vfio_user_protocol::migration::Migration;
use vpio::sharing::OwnRing;
use vpio::vfio::RESERVED;

use super::desk::{Card, Desk};
use crate::access::may_use;
use crate::function::header::class_code;
use crate::function::memory::ClientMemory;

/// Bytes of configuration space.
const CONFIG: u64 = 256;
/// Offset of the command register, and its bits for I/O ports and memory.
const COMMAND: u16 = 4;
const DECODES: u16 = 0x3;
/// Lower bound of a memory BAR's size, bytes.
const PAGE: u64 = 4096;

/// A guest's PCI function; see the module.
pub(super) struct GuestSide<P, O> {
    desk: Arc<Desk<P, O>>,
    seat: usize,
    /// User that may connect, besides root.
    uid: u32,
    config: Mutex<ConfigSpace>,
    memory: ClientMemory,
}

fn layout(index: u8, bar: &Bar) -> Option<BarLayout> {
    let (kind, size) = match *bar {
        Bar::Ports(size) => (BarKind::Io, u64::from(size)),
        Bar::Memory(size) => (BarKind::Memory32, u64::from(size).max(PAGE)),
        Bar::Hidden => return None,
    };
    Some(BarLayout { index, kind, prefetchable: false, size })
}

fn config_space(device: &Description) -> Result<ConfigSpace, pci::config::ConfigError> {
    let mut builder = ConfigSpace::builder(Identity {
        vendor_id: device.pci.vendor,
        device_id: device.pci.device,
        revision: device.pci.revision,
        class: class_code(device.pci.class),
        subsystem_vendor_id: device.pci.vendor,
        subsystem_id: device.pci.device,
    });
    for (index, bar) in (0u8..).zip(device.bars) {
        if let Some(layout) = layout(index, bar) {
            builder.bar(layout)?;
        }
    }
    builder.interrupt_pin(InterruptPin::A);
    Ok(builder.build())
}

impl<P: Card, O: OwnRing + Send + 'static> GuestSide<P, O> {
    /// The function of a seat, whose client may be `uid` or root.
    ///
    /// # Errors
    /// When configuration space can't be built, which is a bug.
    pub fn new(desk: Arc<Desk<P, O>>, seat: usize, uid: u32) -> Result<Self, pci::config::ConfigError> {
        let config = Mutex::new(config_space(desk.device())?);
        Ok(Self { desk, seat, uid, config, memory: ClientMemory::default() })
    }

    fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Splits an access into pieces of 1, 2 or 4 bytes, within the device's registers.
    fn each(&self, region: u32, offset: u64, length: usize, mut act: impl FnMut(Access, usize)) {
        let Ok(bar) = u8::try_from(region) else { return };
        let size = match self.desk.device().bars.get(usize::from(bar)) {
            Some(Bar::Ports(size) | Bar::Memory(size)) => u64::from(*size),
            Some(Bar::Hidden) | None => 0,
        };
        let mut done = 0;
        while done < length {
            let piece: u8 = match length - done {
                4.. => 4,
                2 | 3 => 2,
                _ => 1,
            };
            let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
            if at.saturating_add(piece.into()) > size {
                return;
            }
            let Ok(at) = u32::try_from(at) else { return };
            act(Access { bar, offset: at, size: piece, write: None }, done);
            done += usize::from(piece);
        }
    }
}

impl<P: Card, O: OwnRing + Send + 'static> Device for GuestSide<P, O> {
    fn authorize(&self, peer: &Peer) -> bool {
        may_use(peer.uid, self.uid) && self.desk.connect(self.seat)
    }

    fn regions(&self) -> Vec<Region> {
        let bars = (0u8..).zip(self.desk.device().bars).filter_map(|(index, bar)| layout(index, bar));
        let all = bars.map(|bar| (u32::from(bar.index), bar.size)).chain([(REGION_CONFIG, CONFIG)]);
        all.map(|(index, size)| Region {
            index,
            size,
            readable: true,
            writable: true,
            mappings: Vec::new(),
            io_fds: Vec::new(),
        })
        .collect()
    }

    fn interrupts(&self) -> Vec<Interrupts> {
        let flags = InterruptFlags { eventfd: true, maskable: true, automasked: true, no_resize: false };
        vec![Interrupts { index: INTERRUPT_INTX, count: 1, flags }]
    }

    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(0xFF);
        if region == REGION_CONFIG {
            if let Ok(offset) = u16::try_from(offset) {
                self.config().read(offset, data);
            }
            return Ok(());
        }
        let length = data.len();
        self.each(region, offset, length, |access, done| {
            let value = self.desk.access(self.seat, access).to_le_bytes();
            let size = usize::from(access.size);
            data[done..done + size].copy_from_slice(&value[..size]);
        });
        Ok(())
    }

    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if region == REGION_CONFIG {
            let Ok(offset) = u16::try_from(offset) else { return Ok(()) };
            let mut config = self.config();
            let works = |config: &ConfigSpace| {
                // A card that never masters the bus is enabled by its BARs' decoding.
                let never = self.desk.device().pci.bus_master == BusMaster::Never;
                if never { config.u16(COMMAND) & DECODES != 0 } else { config.bus_master() }
            };
            let before = works(&config);
            // The client handles BAR addresses.
            let _ = config.write(offset, data);
            let after = works(&config);
            drop(config);
            if before != after {
                self.desk.set_master(self.seat, after);
            }
            return Ok(());
        }
        self.each(region, offset, data.len(), |access, done| {
            let mut value = [0; 4];
            let size = usize::from(access.size);
            value[..size].copy_from_slice(&data[done..done + size]);
            self.desk.access(self.seat, Access { write: Some(u32::from_le_bytes(value)), ..access });
        });
        Ok(())
    }

    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()> {
        let end = mapping.address.saturating_add(mapping.size);
        if mapping.address < RESERVED.end && RESERVED.start < end {
            tracing::warn!(
                "A guest has memory at {:#x} with {:#x} bytes, and {:#x} to {:#x} is the card's owner's",
                mapping.address,
                mapping.size,
                RESERVED.start,
                RESERVED.end
            );
            return Err(Errno::ADDRINUSE.into());
        }
        self.memory.map(&mapping, |table| {
            self.desk.set_memory(self.seat, table);
            Ok(())
        })
    }

    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()> {
        self.memory.unmap(address, size, |table| {
            self.desk.set_memory(self.seat, table);
            Ok(())
        })
    }

    fn set_interrupts(&self, index: u32, start: u32, _: u32, change: SetInterrupts) -> io::Result<()> {
        if index != INTERRUPT_INTX {
            return Err(Errno::INVAL.into());
        }
        match change {
            SetInterrupts::Mask(which) if which.first() == Some(&true) => self.desk.mask(self.seat, true),
            SetInterrupts::Unmask(which) if which.first() == Some(&true) => self.desk.mask(self.seat, false),
            SetInterrupts::Mask(_) | SetInterrupts::Unmask(_) => {}
            change => self.desk.interrupt(self.seat, |irq| irq.change(start, change))?,
        }
        Ok(())
    }

    /// None: the card can't leave this host.
    fn migration(&self) -> Option<&dyn Migration> {
        None
    }

    fn reset(&self) -> io::Result<()> {
        // The client handles BAR addresses.
        let _ = self.config().reset();
        self.desk.set_master(self.seat, false);
        self.desk.reset(self.seat);
        Ok(())
    }

    fn disconnected(&self) {
        let _ = self.config().reset();
        self.desk.disconnect(self.seat);
        self.memory.clear();
    }
}
