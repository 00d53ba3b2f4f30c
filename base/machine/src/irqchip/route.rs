//! MSI routes: this process's copy of KVM's routing table, and the eventfds that KVM polls.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_IRQFD_FLAG_DEASSIGN, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};

use super::{IOAPIC_PINS, Shared};
use crate::interrupt::{MsiMessage, MsiRoute};

/// ISA interrupts also reach the PICs.
const PIC_INPUTS: u32 = 16;

/// The lower half of an address.
pub(super) fn low(address: u64) -> u32 {
    u32::try_from(address & 0xffff_ffff).unwrap_or(0)
}

/// The upper half of an address.
pub(super) fn high(address: u64) -> u32 {
    u32::try_from(address >> 32).unwrap_or(0)
}

/// Which GSIs exist and which are unmasked.
#[derive(Debug)]
pub(super) struct RoutingTable {
    /// One past the largest GSI.
    end: u32,
    /// Every MSI GSI below it is in use or in `freed`.
    fresh: u32,
    freed: Vec<u32>,
    messages: BTreeMap<u32, MsiMessage>,
}

impl RoutingTable {
    /// `limit` is KVM's limit, for the number of entries and for GSIs alike.
    pub(super) fn new(limit: usize) -> Self {
        // Each pin needs an entry, and each of the PICs' pins a second one.
        let end = u32::try_from(limit).unwrap_or(u32::MAX).saturating_sub(PIC_INPUTS);
        Self { end, fresh: IOAPIC_PINS, freed: Vec::new(), messages: BTreeMap::new() }
    }

    /// Allocates `count` GSIs; `None` when fewer are free.
    pub(super) fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        let left = (self.end.saturating_sub(self.fresh) as usize).saturating_add(self.freed.len());
        if left < count {
            return None;
        }
        let mut gsis = self.freed.split_off(self.freed.len() - count.min(self.freed.len()));
        while gsis.len() < count {
            gsis.push(self.fresh);
            self.fresh += 1;
        }
        Some(gsis)
    }

    pub(super) fn free(&mut self, gsi: u32) {
        self.freed.push(gsi);
    }

    /// Sets or removes a message; returns the previous one.
    pub(super) fn set(&mut self, gsi: u32, message: Option<MsiMessage>) -> Option<MsiMessage> {
        match message {
            Some(message) => self.messages.insert(gsi, message),
            None => self.messages.remove(&gsi),
        }
    }

    /// The table in KVM's format.
    pub(super) fn entries(&self) -> io::Result<KvmIrqRouting> {
        let pins = (0..IOAPIC_PINS).map(|pin| pin_entry(pin, KVM_IRQCHIP_IOAPIC, pin));
        let isa = (0..PIC_INPUTS).map(|irq| match irq {
            0..8 => pin_entry(irq, KVM_IRQCHIP_PIC_MASTER, irq),
            _ => pin_entry(irq, KVM_IRQCHIP_PIC_SLAVE, irq - 8),
        });
        let messages = self.messages.iter().map(|(gsi, message)| msi_entry(*gsi, message));
        let entries: Vec<_> = pins.chain(isa).chain(messages).collect();
        KvmIrqRouting::from_entries(&entries).map_err(|error| {
            let text = format!("A routing table with {} entries can't be built: {error:?}", entries.len());
            io::Error::new(io::ErrorKind::StorageFull, text)
        })
    }
}

fn pin_entry(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let u = kvm_irq_routing_entry__bindgen_ty_1 { irqchip: kvm_irq_routing_irqchip { irqchip, pin } };
    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, u, ..Default::default() }
}

fn msi_entry(gsi: u32, message: &MsiMessage) -> kvm_irq_routing_entry {
    let msi = kvm_irq_routing_msi {
        address_lo: low(message.address),
        address_hi: high(message.address),
        data: message.data,
        ..Default::default()
    };
    let u = kvm_irq_routing_entry__bindgen_ty_1 { msi };
    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, u, ..Default::default() }
}

/// An MSI route through KVM's irqfd. While the route is masked, KVM doesn't poll the eventfd. A write by another process stays in the
/// eventfd's counter, and KVM delivers it at the unmasking, so no interrupt is lost.
pub(super) struct IrqfdRoute {
    shared: Arc<Shared>,
    gsi: u32,
    /// Created with the route, not at the first unmasking: the sandbox may forbid it by then.
    fd: OwnedFd,
    message: Mutex<Option<MsiMessage>>,
}

impl IrqfdRoute {
    pub(super) fn new(shared: Arc<Shared>, gsi: u32, fd: OwnedFd) -> Self {
        Self { shared, gsi, fd, message: Mutex::new(None) }
    }

    fn mask(&self) -> io::Result<()> {
        self.shared.irqfd(&self.fd, self.gsi, KVM_IRQFD_FLAG_DEASSIGN, None)?;
        self.shared.route(self.gsi, None)
    }
}

impl MsiRoute for IrqfdRoute {
    fn set(&self, message: Option<MsiMessage>) -> io::Result<()> {
        let mut now = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        match (*now, message) {
            (None, None) => return Ok(()),
            (Some(_), None) => {
                *now = None;
                return self.mask();
            }
            (_, Some(new)) => self.shared.route(self.gsi, Some(new))?,
        }
        if now.is_none()
            && let Err(error) = self.shared.irqfd(&self.fd, self.gsi, 0, None)
        {
            self.shared.route(self.gsi, None)?;
            return Err(error);
        }
        *now = message;
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        // The lock stays held during the write, so that nothing is written after `set(None)` has returned.
        let message = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        if message.is_none() {
            return Ok(());
        }
        match rustix::io::write(&self.fd, &1u64.to_ne_bytes()) {
            // The counter is full: KVM reads it at each write, so 2^64 - 2 unread signals don't occur. One signal is pending in any case.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

impl Drop for IrqfdRoute {
    fn drop(&mut self) {
        let unmasked = self.message.get_mut().unwrap_or_else(PoisonError::into_inner).is_some();
        if unmasked && let Err(error) = self.mask() {
            // The number isn't reused: KVM may still poll the eventfd.
            tracing::error!(%error, gsi = self.gsi, "An interrupt route could not be released");
            return;
        }
        self.shared.routing().free(self.gsi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_thousand_routes_fit_and_freed_ones_come_back() {
        let mut table = RoutingTable::new(4096);
        let mut gsis = table.allocate(4000).unwrap();
        assert!(table.allocate(1000).is_none());
        gsis.extend(table.allocate(4096 - 40 - 4000).unwrap());
        assert!(table.allocate(1).is_none());
        gsis.sort_unstable();
        gsis.dedup();
        assert_eq!(gsis.len(), 4056);
        assert!(gsis.iter().all(|gsi| (IOAPIC_PINS..4096).contains(gsi)));
        for gsi in &gsis {
            table.set(*gsi, Some(MsiMessage { address: 0xfee0_0000, data: *gsi }));
        }
        assert_eq!(table.entries().unwrap().as_slice().len(), 4096);
        table.free(77);
        assert_eq!(table.allocate(1), Some(vec![77]));
    }

    #[test]
    fn masked_routes_are_not_in_the_table() {
        let mut table = RoutingTable::new(4096);
        let gsi = table.allocate(1).unwrap()[0];
        assert_eq!(table.entries().unwrap().as_slice().len(), 40);
        let message = MsiMessage { address: 0xfee0_1000, data: 0x41 };
        assert_eq!(table.set(gsi, Some(message)), None);
        assert_eq!(table.entries().unwrap().as_slice().len(), 41);
        assert_eq!(table.set(gsi, None), Some(message));
        assert_eq!(table.entries().unwrap().as_slice().len(), 40);
    }
}
