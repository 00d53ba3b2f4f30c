//! Saving and restoring the function (types in [`crate::saved`]). The engine's objects are saved separately, one by one.

use dma::Dma;
use hca::Engine;
use hca::names::ContextHandle;
use hca::saved::{InvalidState, Kind, Name};

use super::attributes::{active_mtu, mtu_bytes};
use super::doorbells::{DoorbellMode, LivePage};
use super::events::{EventRing, MAX_WAITING};
use super::shared_region::SharedRegion;
use super::{Config, ConfigError, Device, Interrupts, Phase, QpRecord};
use crate::abi::PAGE;
use crate::abi::commands::{COMMAND_SIZE, RESPONSE_SIZE};
use crate::abi::rings::{ASYNC_ELEMENT, ASYNC_SLOTS, COMPLETION_ELEMENT, COMPLETION_SLOTS};
use crate::provider::Pvrdma;
use crate::saved;

fn wrong(what: &'static str) -> InvalidState {
    InvalidState::Field { kind: "PVRDMA function", handle: 0, what }
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Creates a function to be restored, and its dormant device in the engine.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn dormant(config: Config, memory: M, engine: &mut Engine<Pvrdma<M>>) -> Result<Self, ConfigError> {
        config.check()?;
        let id = engine.add_dormant(config.for_engine(), memory.clone())?;
        Ok(Self::powered_on(id, config, memory))
    }

    /// Publishes collected events before the function is saved. Its device in the engine is stopped, and so are the vCPUs.
    pub fn settle(&mut self, now: u64, interrupts: &impl Interrupts) {
        self.flush_events(now, interrupts);
    }

    /// Saves the function; call [`Device::settle`] before.
    #[must_use]
    pub fn save(&self) -> saved::Device {
        saved::Device {
            phase: self.phase,
            bus_master: self.bus_master,
            mtu: self.mtu,
            link_up: true,
            region_low: self.region_low,
            region_address: self.region_address,
            region: self.region.map(|region| saved::SharedRegion {
                driver_version: region.driver_version,
                command_slot: region.command_slot,
                response_slot: region.response_slot,
                uar_pfn: region.uar_pfn,
            }),
            error: self.error,
            cause: self.cause,
            masked: self.masked,
            suppressed: self.suppressed,
            rings: self.events.save(),
            waiting: self.events.save_waiting(),
            dropped: self.events.dropped,
            pages: self.pages.iter().map(|live| (live.page, live.context.0)).collect(),
            trapped: self.mode == DoorbellMode::Trapped,
            counters: self.counters,
        }
    }

    /// Passes `each` the guest memory that must be present for the function: addresses and lengths of its shared region and event rings.
    /// [`Engine::control_memory`] does the same for the engine's objects.
    pub fn control_memory(&self, each: &mut dyn FnMut(u64, u64)) {
        if let (Some(region), Some(address)) = (self.region, self.region_address) {
            each(address, PAGE);
            each(region.command_slot, COMMAND_SIZE as u64);
            each(region.response_slot, RESPONSE_SIZE as u64);
        }
        for ring in self.events.save().into_iter().flat_map(|(one, other)| [one, other]) {
            each(ring.state, PAGE);
            each(ring.elements, PAGE);
        }
    }

    /// Saves the function's state of a queue pair; `None` when it doesn't exist.
    #[must_use]
    pub fn save_qp(&self, handle: u32) -> Option<saved::QpRecord> {
        let QpRecord { pd, context, kind, max_send_wr, max_receive_wr, max_send_sge, max_receive_sge } =
            *self.qps.get(&handle)?;
        let context = context.0;
        Some(saved::QpRecord {
            pd,
            context,
            kind,
            max_send_wr,
            max_receive_wr,
            max_send_sge,
            max_receive_sge,
        })
    }

    /// Restores the function's state of a queue pair.
    pub fn restore_qp(&mut self, handle: u32, saved: saved::QpRecord) {
        let saved::QpRecord { pd, context, kind, max_send_wr, max_receive_wr, max_send_sge, max_receive_sge } =
            saved;
        let context = ContextHandle(context);
        let record =
            QpRecord { pd, context, kind, max_send_wr, max_receive_wr, max_send_sge, max_receive_sge };
        self.qps.insert(handle, record);
    }

    /// Restores a protection domain, with its context.
    pub fn restore_pd(&mut self, handle: u32, context: u32) {
        self.pds.insert(handle, ContextHandle(context));
    }

    /// Removes an object that the source has destroyed.
    pub fn restore_gone(&mut self, name: Name) {
        match name.kind {
            Kind::ProtectionDomain => drop(self.pds.remove(&name.handle)),
            Kind::QueuePair => drop(self.qps.remove(&name.handle)),
            _ => {}
        }
    }

    /// Restores the function's state.
    ///
    /// # Errors
    /// When a value is invalid.
    pub fn restore(&mut self, saved: &saved::Device) -> Result<(), InvalidState> {
        let region = match saved.region {
            None => None,
            Some(region) => {
                for (slot, size) in
                    [(region.command_slot, COMMAND_SIZE), (region.response_slot, RESPONSE_SIZE)]
                {
                    let there = slot.is_multiple_of(8) && self.memory.check(slot, size as u64).is_ok();
                    if !there {
                        return Err(wrong("address of a command slot"));
                    }
                }
                Some(SharedRegion {
                    driver_version: region.driver_version,
                    command_slot: region.command_slot,
                    response_slot: region.response_slot,
                    uar_pfn: region.uar_pfn,
                })
            }
        };
        let rings = match saved.rings {
            None => None,
            Some((asynchronous, completion)) => {
                let asynchronous = EventRing::restore(asynchronous, ASYNC_SLOTS, ASYNC_ELEMENT);
                let completion = EventRing::restore(completion, COMPLETION_SLOTS, COMPLETION_ELEMENT);
                Some(asynchronous.zip(completion).ok_or(wrong("event ring"))?)
            }
        };
        let works = matches!(saved.phase, Phase::Described | Phase::Active);
        if works != region.is_some() || works != rings.is_some() {
            return Err(wrong("phase"));
        }
        if !saved.link_up {
            return Err(wrong("link"));
        }
        if saved.waiting.len() > MAX_WAITING {
            return Err(wrong("number of waiting events"));
        }
        let most = self.config.max_uar as usize;
        if saved.pages.len() > most || saved.pages.iter().any(|(page, _)| *page as usize >= most) {
            return Err(wrong("UAR page"));
        }
        self.phase = saved.phase;
        self.bus_master = saved.bus_master;
        self.mtu = saved.mtu;
        self.region_low = saved.region_low;
        self.region_address = saved.region_address;
        self.region = region;
        self.error = saved.error;
        self.cause = saved.cause;
        self.masked = saved.masked;
        self.suppressed = saved.suppressed;
        self.events.restore(rings, &saved.waiting, saved.dropped);
        let page = |&(page, context): &(u32, u32)| LivePage { page, context: ContextHandle(context) };
        self.pages = saved.pages.iter().map(page).collect();
        self.mode = if saved.trapped { DoorbellMode::Trapped } else { DoorbellMode::Shared };
        self.counters = saved.counters;
        Ok(())
    }

    /// Starts the stopped or restored function.
    ///
    /// # Errors
    /// When another device has one of its addresses.
    pub fn start(&mut self, engine: &mut Engine<Pvrdma<M>>) -> Result<(), InvalidState> {
        engine.start(self.id)?;
        if !self.bus_master {
            engine.set_enabled(self.id, false);
        }
        self.events.enabled = self.bus_master;
        engine.set_port_mtu(self.id, mtu_bytes(active_mtu(self.mtu)));
        self.next_look = 0;
        self.next_polls = 0;
        Ok(())
    }
}
