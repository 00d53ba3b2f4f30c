//! A node's part in a checkpoint: quiesce, save, resume. And how a saved node is restored.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsm::{Config, Event, Node, NodeId, SavedNode, Vcpu, wire};
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use machine::state::SavedVcpu;
use machine::vcpu::VcpuError;
use payload_abi::LOWEST_LOAD_ADDRESS;
use serde::{Deserialize, Serialize};

use super::file::{self, Head, Listed};
use super::{CheckpointError, Refused};
use crate::dsm::engine::{Core, Engine, Machine};
use crate::dsm::spanning::chain;
use crate::payload::PayloadVm;

const PAGE: u64 = wire::PAGE_SIZE as u64;
/// Private pages of every node, below the shared ones.
const OWN_PAGES: u64 = LOWEST_LOAD_ADDRESS / PAGE;

/// A node's counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::dsm) struct Counted {
    /// Protocol messages sent, and received.
    pub(in crate::dsm) sent: u64,
    pub(in crate::dsm) received: u64,
    /// Nothing waits at this node ([`Node::is_idle`]).
    pub(in crate::dsm) idle: bool,
    /// This node is the sequencer.
    pub(in crate::dsm) token: bool,
}

/// One node, as its checkpoint thread uses it.
pub(in crate::dsm) struct Member {
    pub(in crate::dsm) engine: Arc<Engine>,
    /// Folder of the checkpoints.
    pub(in crate::dsm) folder: PathBuf,
    /// Hash of the VM's program and settings.
    pub(in crate::dsm) identity: u64,
}

impl Member {
    fn machine(&self) -> Result<&Machine, String> {
        self.engine.machine.get().ok_or_else(|| "its part of the VM isn't there yet".to_owned())
    }

    /// Ends all holds and forces the vCPUs' exits from the guest.
    pub(in crate::dsm) fn hold(&self) -> Result<(), String> {
        let machine = self.machine()?;
        if let Some(core) = &mut *self.engine.lock() {
            core.suspending = true;
            self.engine.end_holds(core);
        }
        match machine.manager.pause() {
            Ok(()) => {}
            // All vCPUs have parked, and their threads have ended; or the VM ends, which `save` detects.
            Err(VcpuError::Gone) => {}
            Err(error) => return Err(chain(&error)),
        }
        if let Some(core) = &mut *self.engine.lock() {
            core.suspended = true;
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

    /// States of this node's vCPUs; `None` for each that has ended.
    fn living(&self) -> Result<Vec<Option<SavedVcpu>>, Refused> {
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

    /// The owners of pages, as this node knows them.
    fn protocol(&self, token: u8) -> Result<SavedNode, Refused> {
        let locked = self.engine.lock();
        let Some(core) = &*locked else { return Err(Refused::Ending) };
        core.node.save(NodeId(token)).map_err(|error| Refused::Because(error.to_string()))
    }

    /// Writes this node's file.
    pub(in crate::dsm) fn save(&self, number: u64, token: u8) -> Result<Listed, Refused> {
        let because = Refused::Because;
        let machine = self.machine().map_err(because)?;
        let vcpus = self.living()?;
        let saved = self.protocol(token)?;
        let pages: Vec<u64> = (0..OWN_PAGES).chain(saved.owned.iter().copied()).collect();
        let head = Head {
            identity: self.identity,
            node: self.engine.me,
            number,
            protocol: saved,
            vcpus,
            pages: u64::try_from(pages.len()).unwrap_or(u64::MAX),
        };
        let memory = machine.memory.memory();
        let read = |page: u64, into: &mut Vec<u8>| {
            into.resize(wire::PAGE_SIZE, 0);
            memory.read_slice(into, GuestAddress(page.saturating_mul(PAGE))).map_err(std::io::Error::other)
        };
        let listed = file::make_folder(&self.folder)
            .and_then(|()| file::write(&self.folder, &head, pages.into_iter(), read));
        listed.map_err(|error| because(chain(&error)))
    }

    /// Resumes the vCPUs. `complete` is the number of the checkpoint that has become the last one, if any: older files are removed.
    pub(in crate::dsm) fn go(&self, complete: Option<u64>) -> Result<(), String> {
        if let Some(number) = complete {
            file::remove_others(&self.folder, self.engine.me, number);
        }
        if let Some(core) = &mut *self.engine.lock() {
            (core.suspending, core.suspended) = (false, false);
            for slot in &mut core.vcpus {
                // Holds from before the checkpoint have ended.
                slot.snapshot = None;
                slot.samples = 0;
            }
        }
        match self.machine()?.manager.resume() {
            Ok(()) => Ok(()),
            // Stopped by a thread that waits for the VM's end, or for the end of all its vCPUs.
            Err(VcpuError::Gone) => Ok(()),
            Err(error) => Err(chain(&error)),
        }
    }
}

impl Engine {
    /// Ends all holds of this node's vCPUs. An instruction that still needs a page faults again.
    fn end_holds(&self, core: &mut Core) {
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

/// A restored node.
pub(in crate::dsm) struct Restored {
    /// The protocol.
    pub(in crate::dsm) node: Node,
    /// For each vCPU of this node, whether it has ended.
    pub(in crate::dsm) ended: Vec<bool>,
}

/// Restores a saved node into a VM that hasn't run: memory, vCPUs and protocol.
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
    let vcpus = vm.vcpus().1.len();
    if head.vcpus.len() != vcpus {
        let reason = format!("it has {} vCPUs of a node with {vcpus}", head.vcpus.len());
        return Err(CheckpointError::Damaged { path, reason });
    }
    let node = Node::restore(config, &head.protocol).map_err(|error| state(Box::new(error)))?;
    let ended = head.vcpus.iter().map(Option::is_none).collect();
    vm.restore(head.vcpus).map_err(|error| state(Box::new(error)))?;
    Ok(Restored { node, ended })
}

/// Text of the error for a checkpoint with another identity.
pub(in crate::dsm) fn another_program() -> String {
    "it ran another program or with other settings; give the same program, arguments, --nodes, --cpus, --memory and --coherence"
        .to_owned()
}
