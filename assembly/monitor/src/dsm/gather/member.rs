//! What a node does when a program is brought together.

use dsm::NodeId;
use dsm::wire::PAGE_SIZE;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use machine::state::SavedVcpu;
use machine::vcpu::{VcpuError, VcpuStart};
use machine::x86::kvm_cpuid_entry2;

use super::{Gathered, Gathering, Turns, none_taken, pages};
use crate::dsm::checkpoint::{Member, Refused, Step};
use crate::dsm::link::Control;
use crate::dsm::spanning::chain;

/// The time-stamp counter, as an MSR.
const TSC: u32 = 0x10;
/// Most bytes of a saved vCPU. CBOR writes bytes as numbers of up to two bytes, and a frame has 1 MiB.
const MAX_STATE: usize = 480 << 10;

/// A vCPU that another node has given.
pub(super) struct Arrival {
    /// In the whole VM.
    pub(super) index: u32,
    pub(super) state: SavedVcpu,
}

/// Host CPUs that this process may use.
pub(in crate::dsm) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What a saved vCPU's time-stamp counter showed.
fn time(state: &SavedVcpu) -> Option<u64> {
    state.msrs.iter().find(|msr| msr.index == TSC).map(|msr| msr.value)
}

/// Whether a vCPU of another host can go on here: same processor, and time doesn't go back. `made` are CPUID leaves of the vCPU that was made for it here, `here`
/// one of this node's own, saved later than it.
pub(super) fn fits(state: &SavedVcpu, made: &[kvm_cpuid_entry2], here: &SavedVcpu) -> Result<(), String> {
    if state.cpuid != made {
        return Err("its host's processor isn't the same as node 0's".to_owned());
    }
    match (time(state), time(here)) {
        (Some(there), Some(here)) if there <= here => Ok(()),
        (Some(there), Some(here)) => Err(format!(
            "its time-stamp counter showed {there} when node 0's showed {here}, so its time would go back"
        )),
        _ => Err("its time-stamp counter isn't known".to_owned()),
    }
}

impl Member {
    /// Sends what this node's living vCPUs are to node 0. How many.
    pub(in crate::dsm) fn give(&self, number: u64) -> Result<u32, Refused> {
        let mut given = 0;
        for (place, vcpu) in self.living()?.into_iter().enumerate() {
            let Some(vcpu) = vcpu else { continue };
            let mut state = Vec::new();
            ciborium::into_writer(&vcpu, &mut state).map_err(|error| Refused::Because(error.to_string()))?;
            let index = u32::try_from(place).ok().and_then(|place| self.first.checked_add(place));
            let Some(index) = index.filter(|_| state.len() <= MAX_STATE) else {
                return Err(Refused::Because(format!("a vCPU's state has {} bytes", state.len())));
            };
            let step = Step::Vcpu { number, index, state };
            if self.engine.link(0).is_some_and(|link| link.send_patiently(&Control::Checkpoint(step))) {
                self.engine.poke();
            }
            given += 1;
        }
        Ok(given)
    }

    /// Sends the pages that this node owns to node 0. How many.
    pub(in crate::dsm) fn hand_over(&self, token: u8) -> Result<u64, String> {
        let machine = self.machine()?;
        let saved = match &*self.engine.lock() {
            Some(core) => core.node.save(NodeId(token)).map_err(|error| error.to_string())?,
            None => return Err("its part of the VM isn't there".to_owned()),
        };
        let memory = machine.memory.memory();
        let mut content = vec![0; PAGE_SIZE];
        for some in saved.owned.chunks(pages::MOST) {
            let mut bytes = Vec::with_capacity(some.len() * (PAGE_SIZE + 16));
            for page in some {
                let address = GuestAddress(page.saturating_mul(PAGE_SIZE as u64));
                memory.read_slice(&mut content, address).map_err(|error| error.to_string())?;
                pages::append(&mut bytes, *page, &content);
            }
            if self.engine.link(0).is_some_and(|link| link.send_patiently(&Control::Pages(bytes))) {
                self.engine.poke();
            }
        }
        u64::try_from(saved.owned.len()).map_err(|error| error.to_string())
    }

    /// On another node than 0: all has been handed over. Its vCPUs end.
    pub(in crate::dsm) fn gathered(&self) -> Result<(), String> {
        let machine = self.machine()?;
        let mut left = Vec::new();
        if let Some(core) = &mut *self.engine.lock() {
            core.gathering = Gathering::Over(Gathered::default());
            for (slot, id) in core.vcpus.iter_mut().zip(&machine.ids) {
                if !std::mem::replace(&mut slot.ended, true) {
                    left.push(*id);
                }
            }
        }
        for id in left {
            match machine.manager.set_ended(id) {
                // Stopped, by who waits for the VM's end.
                Ok(()) | Err(VcpuError::Gone) => {}
                Err(error) => return Err(chain(&error)),
            }
            self.roster.left();
        }
        Ok(())
    }

    /// On node 0: one of its own vCPUs as it is now, to compare others with.
    pub(super) fn sample(&self) -> Result<SavedVcpu, Refused> {
        let found = self.living()?.into_iter().take(self.own).flatten().next();
        found.ok_or_else(|| Refused::Because("all vCPUs of node 0 have ended".to_owned()))
    }

    /// On node 0: from here on pages of others are taken.
    pub(super) fn begin_taking(&self) {
        if let Some(core) = &mut *self.engine.lock() {
            let taken = none_taken(core.node.config().pages);
            core.gathering = Gathering::Taking { taken, from: Default::default() };
        }
    }

    /// How many pages a node has handed over.
    pub(super) fn taken_from(&self, node: u8) -> u64 {
        match &*self.engine.lock() {
            Some(core) => match &core.gathering {
                Gathering::Taking { from, .. } => from.get(&node).copied().unwrap_or(0),
                _ => 0,
            },
            None => 0,
        }
    }

    /// On node 0, when all pages have come: memory becomes ordinary memory, and the vCPUs of others get their states.
    pub(super) fn take_over(&self, arrivals: Vec<Arrival>, gathered: Gathered) -> Result<(), String> {
        let machine = self.machine()?;
        if let Some(core) = &mut *self.engine.lock() {
            core.gathering = Gathering::Over(gathered);
            for slot in &mut core.vcpus {
                // What was asked of the protocol is answered by the memory that is here.
                *slot = crate::dsm::vcpus::Slot { ended: slot.ended, ..Default::default() };
            }
            core.rekick.clear();
            core.turns = Turns::new(processors(), core.vcpus.len());
            core.armed = None;
            core.pages.release();
        }
        let count = u32::try_from(arrivals.len()).unwrap_or(u32::MAX);
        for Arrival { index, mut state } in arrivals {
            let place = usize::try_from(index).unwrap_or(usize::MAX);
            let id = *machine.ids.get(place).ok_or_else(|| format!("there is no vCPU {index} here"))?;
            state.forget_time();
            state.id = id;
            machine
                .manager
                .set_state(id, VcpuStart::Restored(Box::new(state)))
                .map_err(|error| format!("vCPU {index} can't go on here: {}", chain(&error)))?;
            if let Some(core) = &mut *self.engine.lock()
                && let Some(slot) = core.vcpus.get_mut(place)
            {
                slot.ended = false;
            }
        }
        self.roster.came(count);
        Ok(())
    }

    /// On node 0, when all goes on there: what vCPUs will touch is mapped for them. Each would ask for page after page otherwise.
    pub(in crate::dsm) fn populate(&self) {
        let Ok(machine) = self.machine() else { return };
        match machine.ram.populate() {
            Ok(pages) => {
                tracing::debug!(pages, "All memory of the program that was brought together is mapped")
            }
            Err(error) => {
                tracing::debug!(%error, "Memory could not be mapped at once: it is as it is touched")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use machine::state::SavedMsr;

    use super::*;

    fn vcpu(tsc: Option<u64>, leaf: u32) -> SavedVcpu {
        SavedVcpu {
            version: machine::state::VCPU_STATE_VERSION,
            id: 0,
            cpuid: vec![kvm_cpuid_entry2 { function: leaf, ..Default::default() }],
            regs: Default::default(),
            sregs: Default::default(),
            xsave: Vec::new(),
            xcrs: None,
            debugregs: Default::default(),
            lapic: None,
            mp_state: Default::default(),
            events: Default::default(),
            msrs: tsc.map(|value| SavedMsr { index: TSC, value }).into_iter().collect(),
            tsc_khz: None,
        }
    }

    /// Another processor, a clock that is ahead of ours, and none at all are reasons to leave a vCPU where it is.
    #[test]
    fn a_vcpu_of_another_processor_or_time_stays() {
        let here = vcpu(Some(100), 1);
        let made = here.cpuid.clone();
        assert_eq!(fits(&vcpu(Some(100), 1), &made, &here), Ok(()));
        assert_eq!(fits(&vcpu(Some(5), 1), &made, &here), Ok(()));
        for (other, word) in
            [(vcpu(Some(101), 1), "go back"), (vcpu(None, 1), "known"), (vcpu(Some(5), 2), "processor")]
        {
            assert!(fits(&other, &made, &here).unwrap_err().contains(word));
        }
    }
}
