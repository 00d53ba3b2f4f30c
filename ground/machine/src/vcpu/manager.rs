//! The vCPUs of a VM as one thing to start, pause and stop.

use std::sync::Arc;

use super::{VcpuConfig, VcpuError, VcpuEvent, VcpuExitHandler, VcpuStart};
use crate::bus::AddressSpace;
use crate::exits::{ExitSnapshot, RangeNames};
use crate::state::SavedVcpu;
use crate::stats::KernelStats;
use crate::vm::Vm;

/// What vCPU threads work with.
pub struct VcpuOptions {
    /// I/O ports.
    pub ports: Arc<AddressSpace>,
    /// Memory-mapped I/O.
    pub memory: Arc<AddressSpace>,
    /// The names of both buses' ranges.
    pub names: Arc<RangeNames>,
    /// Told of events, on the thread of the vCPU. Must not wait for vCPUs; pass it on to another thread.
    pub on_event: Arc<dyn Fn(VcpuEvent) + Send + Sync>,
    /// Sees port accesses and HLT first.
    pub exit_handler: Option<Arc<dyn VcpuExitHandler>>,
}

/// All vCPUs of a VM, each with a thread called `vcpu<id>`. Thread-safe; calls that change the run state are serialised.
///
/// ```text
/// start -> paused <-- pause/resume --> running ;  either -> stopped (threads joined)
/// ```
pub struct VcpuManager {
    _private: (),
}

impl VcpuManager {
    /// Creates the vCPUs, paused, with their start state set.
    pub fn start(_vm: &Arc<Vm>, _configs: Vec<VcpuConfig>, _options: VcpuOptions) -> Result<Self, VcpuError> {
        todo!()
    }

    /// Lets all vCPUs run. Those that ended (an event was reported) stay so until [`VcpuManager::set_state`].
    pub fn resume(&self) -> Result<(), VcpuError> {
        todo!()
    }

    /// Brings all vCPUs out of the guest and out of device handlers; a port or memory access under way is complete.
    /// No interrupt is lost: they stay pending in the interrupt controllers.
    pub fn pause(&self) -> Result<(), VcpuError> {
        todo!()
    }

    /// Whether the vCPUs are paused.
    pub fn is_paused(&self) -> bool {
        todo!()
    }

    /// Makes one vCPU leave and re-enter the guest.
    pub fn kick(&self, _vcpu: u32) -> Result<(), VcpuError> {
        todo!()
    }

    /// Sets the state of one vCPU while paused: reset or restore.
    pub fn set_state(&self, _vcpu: u32, _start: VcpuStart) -> Result<(), VcpuError> {
        todo!()
    }

    /// Saves all vCPUs, in order of creation, while paused.
    pub fn save(&self) -> Result<Vec<SavedVcpu>, VcpuError> {
        todo!()
    }

    /// Ends all threads and waits for them. Later calls return [`VcpuError::Gone`].
    pub fn stop(&self) -> Result<(), VcpuError> {
        todo!()
    }

    /// Ids of the vCPUs, in order of creation.
    pub fn ids(&self) -> Vec<u32> {
        todo!()
    }

    /// Exits so far. May be called at any time.
    pub fn exits(&self) -> ExitSnapshot {
        todo!()
    }

    /// KVM's own statistics of each vCPU. May be called at any time.
    pub fn kernel_stats(&self) -> Vec<(u32, KernelStats)> {
        todo!()
    }
}
