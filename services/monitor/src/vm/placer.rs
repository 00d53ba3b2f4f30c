//! Places BARs at the guest's addresses: on the I/O or memory bus, with doorbells as ioeventfds and mapped ranges as memslots.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use machine::bus::{AddressSpace, BusDevice};
use machine::coalesced::CoalescedZone;
use machine::slots::{HostMapping, SlotId};
use machine::vm::{IoEvent, IoSpace, Vm};
use pci::function::{BarKind, BarLayout, BarMapping, BarPlacer, LateWrites, PciFunction, PlaceError};

/// Places BARs of one machine.
pub struct MachinePlacer {
    vm: Arc<Vm>,
    ports: Arc<AddressSpace>,
    memory: Arc<AddressSpace>,
    placed: Mutex<HashMap<(String, u8), Placed>>,
}

/// Resources of a placed BAR.
#[derive(Default)]
struct Placed {
    slots: Vec<(BarMapping, SlotId)>,
    events: Vec<IoEvent>,
    coalesced: Vec<CoalescedZone>,
    on_bus: bool,
}

impl MachinePlacer {
    /// For one machine.
    pub fn new(vm: Arc<Vm>, ports: Arc<AddressSpace>, memory: Arc<AddressSpace>) -> Self {
        Self { vm, ports, memory, placed: Mutex::new(HashMap::new()) }
    }

    fn bus(&self, kind: BarKind) -> (&AddressSpace, IoSpace) {
        match kind {
            BarKind::Io => (&self.ports, IoSpace::Port),
            BarKind::Memory32 | BarKind::Memory64 => (&self.memory, IoSpace::Memory),
        }
    }

    fn attach(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
        placed: &mut Placed,
    ) -> Result<(), String> {
        let name = range_name(function, bar);
        let device = Arc::new(BarRange { function: Arc::clone(function), bar: bar.index });
        self.bus(bar.kind).0.insert(address, bar.size, &name, device).map_err(|error| describe(&error))?;
        placed.on_bus = true;
        self.update(function, bar, address, placed)
    }

    /// Updates doorbells and mapped ranges to the function's current ones. The BAR stays on its bus throughout, and unchanged ranges
    /// aren't touched. At any moment, a guest's store reaches memory, a doorbell or the function.
    fn update(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
        placed: &mut Placed,
    ) -> Result<(), String> {
        let name = range_name(function, bar);
        let (_, space) = self.bus(bar.kind);
        let mut events = Vec::new();
        for doorbell in function.doorbells().into_iter().filter(|doorbell| doorbell.bar == bar.index) {
            events.push(IoEvent {
                space,
                address: address
                    .checked_add(doorbell.offset)
                    .ok_or("a doorbell lies beyond the address space")?,
                width: doorbell.width,
                datamatch: doorbell.datamatch,
                fd: doorbell.fd,
            });
        }
        let zones = coalesced_zones(function, bar, address, space)?;
        let mappings = function.mappings().into_iter().filter(|mapping| mapping.bar == bar.index);
        let mappings: Vec<BarMapping> = mappings.collect();

        let mut first = Ok(());
        placed.slots.retain(|(mapping, slot)| {
            let keep = mappings.iter().any(|wanted| same_mapping(wanted, mapping));
            keep || note(&mut first, self.vm.slots().remove(*slot).map_err(|error| describe(&error)))
        });
        placed.events.retain(|event| {
            let keep = events.iter().any(|wanted| same_event(wanted, event));
            keep || note(&mut first, self.vm.remove_ioevent(event).map_err(|error| describe(&error)))
        });
        self.remove_coalesced_zones(|zone| zones.contains(zone), placed, &mut first);
        first?;
        for zone in zones {
            if !placed.coalesced.contains(&zone) {
                self.vm.add_coalesced_zone(&zone).map_err(|error| describe(&error))?;
                placed.coalesced.push(zone);
            }
        }
        for event in events {
            if !placed.events.iter().any(|there| same_event(there, &event)) {
                self.vm.add_ioevent(&event).map_err(|error| describe(&error))?;
                placed.events.push(event);
            }
        }
        for mapping in mappings {
            if placed.slots.iter().any(|(there, _)| same_mapping(there, &mapping)) {
                continue;
            }
            let at =
                address.checked_add(mapping.offset).ok_or("a mapped range lies beyond the address space")?;
            let host = HostMapping::new(&name, mapping.fd.as_fd(), mapping.fd_offset, mapping.len, true)
                .map_err(|error| describe(&error))?;
            let slot =
                self.vm.slots().add(&name, at, host, mapping.read_only).map_err(|error| describe(&error))?;
            placed.slots.push((mapping, slot));
        }
        Ok(())
    }

    /// Removes zones of deferred writes except those that `keep` selects; deferred writes still reach the function.
    fn remove_coalesced_zones(
        &self,
        keep: impl Fn(&CoalescedZone) -> bool,
        placed: &mut Placed,
        first: &mut Result<(), String>,
    ) {
        let before = placed.coalesced.len();
        placed.coalesced.retain(|zone| {
            keep(zone) || note(first, self.vm.remove_coalesced_zone(zone).map_err(|error| describe(&error)))
        });
        if placed.coalesced.len() < before {
            self.vm.coalesced().drain(&self.ports, &self.memory);
        }
    }

    /// Undoes `attach`, as far as it came. Resources that can't be removed stay in `placed`. Returns the first failure, after the rest is
    /// undone.
    fn detach(&self, bar: BarLayout, address: u64, placed: &mut Placed) -> Result<(), String> {
        let mut first = Ok(());
        placed.slots.retain(|(_, slot)| {
            note(&mut first, self.vm.slots().remove(*slot).map_err(|error| describe(&error)))
        });
        placed.events.retain(|event| {
            note(&mut first, self.vm.remove_ioevent(event).map_err(|error| describe(&error)))
        });
        self.remove_coalesced_zones(|_| false, placed, &mut first);
        if placed.on_bus {
            let removed = self.bus(bar.kind).0.remove(address, bar.size);
            placed.on_bus = note(&mut first, removed.map_err(|error| describe(&error)));
        }
        first
    }
}

impl BarPlacer for MachinePlacer {
    fn place(&self, function: &Arc<dyn PciFunction>, bar: BarLayout, address: u64) -> Result<(), PlaceError> {
        let mut table = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut placed = Placed::default();
        if let Err(reason) = self.attach(function, bar, address, &mut placed) {
            let reason = match self.detach(bar, address, &mut placed) {
                Ok(()) => reason,
                Err(also) => format!("{reason}; taking it back failed as well: {also}"),
            };
            return Err(place_error(function, bar, address, reason));
        }
        table.insert((function.name().to_owned(), bar.index), placed);
        Ok(())
    }

    fn unplace(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError> {
        let mut table = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (function.name().to_owned(), bar.index);
        let Some(mut placed) = table.remove(&key) else { return Ok(()) };
        self.detach(bar, address, &mut placed).map_err(|reason| {
            // Kept, so that a retry removes the rest.
            table.insert(key, placed);
            place_error(function, bar, address, reason)
        })
    }

    fn refresh(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError> {
        let mut table = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        match table.get_mut(&(function.name().to_owned(), bar.index)) {
            Some(placed) => self
                .update(function, bar, address, placed)
                .map_err(|reason| place_error(function, bar, address, reason)),
            None => Err(place_error(function, bar, address, "it isn't placed".to_owned())),
        }
    }
}

/// The zones of deferred writes of a BAR at an address.
fn coalesced_zones(
    function: &Arc<dyn PciFunction>,
    bar: BarLayout,
    address: u64,
    space: IoSpace,
) -> Result<Vec<CoalescedZone>, String> {
    let here = function.late_writes().into_iter().filter(|writes| writes.bar == bar.index);
    let zone = |writes: LateWrites| {
        let at = address
            .checked_add(u64::from(writes.offset))
            .ok_or("deferred writes lie beyond the address space")?;
        Ok(CoalescedZone { space, address: at, length: writes.len })
    };
    here.map(zone).collect()
}

/// The BAR's name in exit tables, for instance `rdma0.1 bar2`.
fn range_name(function: &Arc<dyn PciFunction>, bar: BarLayout) -> String {
    format!("{} bar{}", function.name(), bar.index)
}

/// Stores the first failure; returns whether `result` is one.
fn note(first: &mut Result<(), String>, result: Result<(), String>) -> bool {
    let failed = result.is_err();
    if first.is_ok() {
        *first = result;
    }
    failed
}

fn same_mapping(a: &BarMapping, b: &BarMapping) -> bool {
    let place = |mapping: &BarMapping| (mapping.offset, mapping.len, mapping.fd_offset, mapping.read_only);
    place(a) == place(b) && Arc::ptr_eq(&a.fd, &b.fd)
}

fn same_event(a: &IoEvent, b: &IoEvent) -> bool {
    let place = |event: &IoEvent| (event.address, event.width, event.datamatch);
    place(a) == place(b) && Arc::ptr_eq(&a.fd, &b.fd)
}

fn place_error(function: &Arc<dyn PciFunction>, bar: BarLayout, address: u64, reason: String) -> PlaceError {
    PlaceError { name: function.name().to_owned(), bar: bar.index, address, reason }
}

/// An error and its causes in one line: [`PlaceError`] holds text, not a source.
fn describe(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    std::iter::once(error.to_string()).chain(sources.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}

/// A BAR as a device on a bus.
struct BarRange {
    function: Arc<dyn PciFunction>,
    bar: u8,
}

impl BusDevice for BarRange {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.function.bar_read(self.bar, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.bar_write(self.bar, offset, data);
    }
}

#[cfg(test)]
#[path = "placer_tests.rs"]
mod tests;
