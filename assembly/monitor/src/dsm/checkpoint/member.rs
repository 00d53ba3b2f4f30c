//! What a node does when it is told to stand still, to be saved, and to go on; and how one is restored.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsm::node::saved::NODE_STATE_VERSION;
use dsm::{Config, Event, Node, NodeId, SavedNode, Vcpu, wire};
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use machine::state::SavedVcpu;
use machine::vcpu::VcpuError;
use machine::x86::kvm_cpuid_entry2;
use payload_abi::LOWEST_LOAD_ADDRESS;
use serde::{Deserialize, Serialize};

use super::file::{self, Head, Listed};
use super::{CheckpointError, Refused};
use crate::dsm::engine::{Core, Engine, Machine};
use crate::dsm::spanning::chain;
use crate::payload::{PayloadVm, Roster};

const PAGE: u64 = wire::PAGE_SIZE as u64;
/// Pages that every node has for itself, below those that are shared.
pub(in crate::dsm) const OWN_PAGES: u64 = LOWEST_LOAD_ADDRESS / PAGE;

/// What a node has sent and received at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::dsm) struct Counted {
    /// Messages of the protocol.
    pub(in crate::dsm) sent: u64,
    pub(in crate::dsm) received: u64,
    /// Nothing waits here.
    pub(in crate::dsm) idle: bool,
    /// It has the token.
    pub(in crate::dsm) token: bool,
}

/// One node, as those who make checkpoints and move vCPUs see it.
pub(in crate::dsm) struct Member {
    pub(in crate::dsm) engine: Arc<Engine>,
    /// Where checkpoints go, if any are made.
    pub(in crate::dsm) folder: Option<PathBuf>,
    /// Of the VM's program and settings.
    pub(in crate::dsm) identity: u64,
    /// vCPUs of the whole VM.
    pub(in crate::dsm) vcpus: u32,
    /// The first of this node's own vCPUs, in the whole VM.
    pub(in crate::dsm) first: u32,
    /// How many of its vCPUs, the first ones, are its own.
    pub(in crate::dsm) own: usize,
    /// CPUID leaves of those that were made for other nodes.
    pub(in crate::dsm) spare: Vec<Vec<kvm_cpuid_entry2>>,
    /// Who waits for the VM's end is told of vCPUs that move.
    pub(in crate::dsm) roster: Roster,
}

impl Member {
    pub(in crate::dsm) fn machine(&self) -> Result<&Machine, String> {
        self.engine.machine.get().ok_or_else(|| "its part of the VM isn't there yet".to_owned())
    }

    /// Brings the vCPUs out of the guest. They keep nothing that other nodes wait for.
    pub(in crate::dsm) fn hold(&self) -> Result<(), String> {
        let machine = self.machine()?;
        if let Some(core) = &mut *self.engine.lock() {
            core.holding = true;
            self.engine.give_up_holds(core);
            // Those that wait for their turn.
            (0..core.vcpus.len()).for_each(|index| self.engine.notify(index));
        }
        match machine.manager.pause() {
            Ok(()) => {}
            // All have parked, and their threads have ended; or the VM ends, which `save` will say.
            Err(VcpuError::Gone) => {}
            Err(error) => return Err(chain(&error)),
        }
        if let Some(core) = &mut *self.engine.lock() {
            core.standing = true;
        }
        Ok(())
    }

    fn all_ended(&self) -> bool {
        self.engine.lock().as_ref().is_some_and(|core| core.vcpus.iter().all(|slot| slot.ended))
    }

    pub(in crate::dsm) fn count(&self) -> Counted {
        match &*self.engine.lock() {
            Some(core) => {
                let counters = core.node.counters();
                Counted {
                    sent: counters.sent,
                    received: counters.received,
                    idle: core.node.is_idle(),
                    token: core.node.has_token(),
                }
            }
            None => Counted { sent: 0, received: 0, idle: false, token: false },
        }
    }

    /// States of the vCPUs that this process has made, `None` for each that has ended or is another node's.
    pub(in crate::dsm) fn living(&self) -> Result<Vec<Option<SavedVcpu>>, Refused> {
        let because = Refused::Because;
        let machine = self.machine().map_err(because)?;
        let vcpus = match machine.manager.save_living() {
            Ok(vcpus) => vcpus,
            Err(VcpuError::Gone) if self.all_ended() => vec![None; machine.ids.len()],
            Err(VcpuError::Gone) => return Err(Refused::Ending),
            Err(error) => return Err(because(chain(&error))),
        };
        let locked = self.engine.lock();
        let Some(core) = &*locked else { return Err(Refused::Ending) };
        let parked = |(slot, vcpu): (&crate::dsm::vcpus::Slot, &Option<_>)| slot.ended == vcpu.is_none();
        if core.ending || !core.vcpus.iter().zip(&vcpus).all(parked) {
            return Err(Refused::Ending);
        }
        Ok(vcpus)
    }

    /// Who owns what, as far as this node is concerned, and whether that is: all is on node 0.
    fn protocol(&self, token: u8) -> Result<(SavedNode, bool), Refused> {
        let because = Refused::Because;
        let machine = self.machine().map_err(because)?;
        {
            let locked = self.engine.lock();
            let Some(core) = &*locked else { return Err(Refused::Ending) };
            if !core.gathering.is_over() {
                let saved = core.node.save(NodeId(token)).map_err(|error| because(error.to_string()))?;
                return Ok((saved, false));
            }
        }
        let mut owned = Vec::new();
        if self.engine.me == 0 {
            // The guest uses it without telling, so what there is counts.
            for some in machine.present().map_err(|error| because(error.to_string()))? {
                owned.extend(some.pages().map(|address| address / PAGE).filter(|page| *page >= OWN_PAGES));
            }
        }
        Ok((SavedNode { version: NODE_STATE_VERSION, owned, elsewhere: Vec::new() }, true))
    }

    /// Writes this node's file.
    pub(in crate::dsm) fn save(&self, number: u64, token: u8) -> Result<Listed, Refused> {
        let because = Refused::Because;
        let machine = self.machine().map_err(because)?;
        let folder =
            self.folder.as_deref().ok_or_else(|| because("it has no folder for checkpoints".to_owned()))?;
        let mut vcpus = self.living()?;
        let (saved, gathered) = self.protocol(token)?;
        if !gathered {
            vcpus.truncate(self.own);
        }
        let pages: Vec<u64> = (0..OWN_PAGES).chain(saved.owned.iter().copied()).collect();
        let head = Head {
            identity: self.identity,
            node: self.engine.me,
            number,
            protocol: saved,
            gathered,
            vcpus,
            pages: u64::try_from(pages.len()).unwrap_or(u64::MAX),
        };
        let memory = machine.memory.memory();
        let read = |page: u64, into: &mut Vec<u8>| {
            into.resize(wire::PAGE_SIZE, 0);
            memory.read_slice(into, GuestAddress(page.saturating_mul(PAGE))).map_err(std::io::Error::other)
        };
        let listed =
            file::make_folder(folder).and_then(|()| file::write(folder, &head, pages.into_iter(), read));
        listed.map_err(|error| because(chain(&error)))
    }

    /// Lets the vCPUs run again. `complete` is the number of the checkpoint that is the last one now.
    pub(in crate::dsm) fn go(&self, complete: Option<u64>) -> Result<(), String> {
        if let (Some(number), Some(folder)) = (complete, &self.folder) {
            file::remove_others(folder, self.engine.me, number);
        }
        if let Some(core) = &mut *self.engine.lock() {
            (core.holding, core.standing) = (false, false);
            for slot in &mut core.vcpus {
                // What was granted before is given up.
                slot.snapshot = None;
                slot.looks = 0;
            }
        }
        match self.machine()?.manager.resume() {
            Ok(()) => Ok(()),
            // Stopped by who waits for the VM's end, or for that of all its vCPUs.
            Err(VcpuError::Gone) => Ok(()),
            Err(error) => Err(chain(&error)),
        }
    }
}

impl Engine {
    /// No instruction of this node's vCPUs keeps a page from others. Whoever needs it faults again.
    fn give_up_holds(&self, core: &mut Core) {
        for index in 0..core.vcpus.len() {
            if let Some(slot) = core.vcpus.get_mut(index) {
                slot.granted.clear();
            }
            if let Ok(vcpu) = Vcpu::try_from(index) {
                self.step(core, Event::Retired { vcpu });
            }
        }
    }
}

/// A node where a saved one was.
pub(in crate::dsm) struct Restored {
    /// The protocol.
    pub(in crate::dsm) node: Node,
    /// Which of the vCPUs that this process has made have ended, or are another node's.
    pub(in crate::dsm) ended: Vec<bool>,
    /// All is on node 0, and the protocol has nothing to do.
    pub(in crate::dsm) gathered: bool,
}

/// Brings a node that hasn't run to where a saved one was: memory, vCPUs and protocol.
pub(in crate::dsm) fn restore(
    vm: &PayloadVm,
    config: Config,
    identity: u64,
    folder: &Path,
    listed: &Listed,
) -> Result<Restored, CheckpointError> {
    let path = file::path_of(folder, listed);
    let memory = vm.memory();
    let memory = memory.memory();
    let write = |page: u64, content: &[u8]| {
        let address = page.checked_mul(PAGE).ok_or("a page of it lies beyond all memory")?;
        memory
            .write_slice(content, GuestAddress(address))
            .map_err(|error| format!("page {page:#x} of it doesn't fit into the VM's memory: {error}"))
    };
    let head = file::read(folder, listed, write)?;
    if head.identity != identity {
        return Err(CheckpointError::Other { path, reason: another_program() });
    }
    let state = |source: Box<dyn std::error::Error + Send + Sync>| CheckpointError::State {
        path: path.clone(),
        source,
    };
    let made = vm.vcpus().1.len();
    let vcpus = if head.gathered { made } else { vm.own_vcpus() };
    if head.vcpus.len() != vcpus {
        let reason = format!("it has {} vCPUs of a node with {vcpus}", head.vcpus.len());
        return Err(CheckpointError::Damaged { path, reason });
    }
    let gathered = head.gathered;
    // Of a program that was brought together nobody asks who owns what.
    let known = if gathered { SavedNode { owned: Vec::new(), ..head.protocol } } else { head.protocol };
    let node = node(config, &known).map_err(state)?;
    let mut ended: Vec<bool> = head.vcpus.iter().map(Option::is_none).collect();
    ended.resize(made, true);
    vm.restore(head.vcpus).map_err(|error| state(Box::new(error)))?;
    Ok(Restored { node, ended, gathered })
}

fn node(config: Config, saved: &SavedNode) -> Result<Node, Box<dyn std::error::Error + Send + Sync>> {
    Ok(Node::restore(config, saved)?)
}

/// In what a VM differs from that of a checkpoint.
pub(in crate::dsm) fn another_program() -> String {
    "it ran another program or with other settings; give the same program, arguments, --nodes, --cpus, --memory and --coherence"
        .to_owned()
}
