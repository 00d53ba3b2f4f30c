//! Destruction of a context or a protection domain with everything that it owns. A guest may not know objects whose creation it gave up
//! waiting for, so the engine destroys them with their owner.
//!
//! A guest decides how many objects these are, and one thread serves the guests of a host. So the destruction runs in slices of a bounded
//! number of steps, between which the engine serves others. Each pass visits a table once, downwards. After each slice, the remaining
//! objects are consistent.

use crate::error::VerbsError;
use crate::memory::Region;
use crate::names::{ContextHandle, CqHandle, DeviceId, MrHandle, PdHandle, QpHandle, SrqHandle};
use crate::objects::Device;
use crate::provider::Provider;
use crate::saved::Kind;

use super::Engine;

/// Steps of the destruction of an object; a check of a table slot is one step.
const STEPS_PER_OBJECT: u32 = 32;
/// Runs of pages of a memory region that a step releases.
const RUNS_PER_STEP: usize = 64;

/// The owner that is destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Context(u32),
    Pd(u32),
}

/// Passes over tables, in order: objects that refer to others are destroyed before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    QueuePairs,
    SharedReceiveQueues,
    Regions,
    ProtectionDomains,
    CompletionQueues,
    Owner,
}

/// A destruction in progress. Objects that the guest creates there meanwhile may survive it, and make its last step fail: a guest waits for
/// its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Teardown {
    device: DeviceId,
    owner: Owner,
    pass: Pass,
    /// Handles from here on are processed; `None` before the pass.
    below: Option<u32>,
}

impl<P: Provider> Engine<P> {
    /// Begins to destroy a context. The kernel's can't be destroyed. A failure changes nothing.
    ///
    /// # Errors
    /// When the context doesn't exist.
    pub fn begin_destroy_context(
        &mut self,
        device: DeviceId,
        context: ContextHandle,
    ) -> Result<Teardown, VerbsError> {
        let found = self.of(device)?;
        if context.0 == 0 || found.contexts.get(context.0).is_none() {
            return Err(VerbsError::missing("context", context.0));
        }
        Ok(Teardown { device, owner: Owner::Context(context.0), pass: Pass::QueuePairs, below: None })
    }

    /// Begins to destroy a protection domain with its queue pairs, shared receive queues and memory regions. A failure changes nothing.
    ///
    /// # Errors
    /// When the protection domain doesn't exist.
    pub fn begin_destroy_pd(&mut self, device: DeviceId, pd: PdHandle) -> Result<Teardown, VerbsError> {
        let found = self.of(device)?;
        found.pds.get(pd.0).ok_or(VerbsError::missing("protection domain", pd.0))?;
        Ok(Teardown { device, owner: Owner::Pd(pd.0), pass: Pass::QueuePairs, below: None })
    }

    /// Continues a destruction for about `steps` steps: a check of a table slot is one, a destroyed object [`STEPS_PER_OBJECT`] or more.
    /// Calls `gone` for each destroyed queue pair. Returns whether the destruction is complete.
    ///
    /// # Errors
    /// When the device or the owner is gone.
    pub fn teardown(
        &mut self,
        under_way: &mut Teardown,
        mut steps: u32,
        gone: &mut impl FnMut(QpHandle),
    ) -> Result<bool, VerbsError> {
        let device = under_way.device;
        loop {
            if under_way.pass == Pass::Owner || self.of(device)?.owns_nothing(under_way.owner) {
                self.end_owner(device, under_way.owner)?;
                return Ok(true);
            }
            let end = self.of(device)?.table_end(under_way.pass);
            let mut handle = under_way.below.unwrap_or(end).min(end);
            while handle > 0 {
                let Some(left) = steps.checked_sub(1) else {
                    under_way.below = Some(handle);
                    return Ok(false);
                };
                steps = left;
                handle -= 1;
                if let Some(cost) = self.of(device)?.cost(under_way.owner, under_way.pass, handle) {
                    self.destroy_owned(device, under_way.pass, handle, gone)?;
                    steps = steps.saturating_sub(cost);
                }
            }
            (under_way.pass, under_way.below) = (under_way.pass.next(), None);
        }
    }

    fn destroy_owned(
        &mut self,
        device: DeviceId,
        pass: Pass,
        handle: u32,
        gone: &mut impl FnMut(QpHandle),
    ) -> Result<(), VerbsError> {
        match pass {
            Pass::QueuePairs => {
                self.destroy_qp(device, QpHandle(handle))?;
                gone(QpHandle(handle));
                Ok(())
            }
            Pass::SharedReceiveQueues => self.destroy_srq(device, SrqHandle(handle)),
            Pass::Regions => self.deregister_mr(device, MrHandle(handle)),
            Pass::ProtectionDomains => self.end_owner(device, Owner::Pd(handle)),
            Pass::CompletionQueues => self.destroy_cq(device, CqHandle(handle)),
            Pass::Owner => Ok(()),
        }
    }

    /// Destroys the owner itself, which owns nothing any more.
    fn end_owner(&mut self, device: DeviceId, owner: Owner) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        match owner {
            Owner::Context(context) => {
                found.contexts.remove(context).ok_or(VerbsError::missing("context", context))?;
                found.marks.touch(Kind::Context, context);
            }
            Owner::Pd(pd) => {
                let gone = found.pds.remove(pd).ok_or(VerbsError::missing("protection domain", pd))?;
                found.marks.touch(Kind::ProtectionDomain, pd);
                if let Some(context) = found.contexts.get_mut(gone.context) {
                    context.owned = context.owned.saturating_sub(1);
                }
            }
        }
        Ok(())
    }

    /// Destroys a context at once, whatever it owns: see [`Engine::begin_destroy_context`].
    ///
    /// # Errors
    /// When the context doesn't exist.
    pub fn destroy_context(&mut self, device: DeviceId, context: ContextHandle) -> Result<(), VerbsError> {
        let mut under_way = self.begin_destroy_context(device, context)?;
        while !self.teardown(&mut under_way, u32::MAX, &mut |_| {})? {}
        Ok(())
    }

    /// Destroys a protection domain at once, whatever it owns: see [`Engine::begin_destroy_pd`].
    ///
    /// # Errors
    /// When the protection domain doesn't exist.
    pub fn destroy_pd(&mut self, device: DeviceId, pd: PdHandle) -> Result<(), VerbsError> {
        let mut under_way = self.begin_destroy_pd(device, pd)?;
        while !self.teardown(&mut under_way, u32::MAX, &mut |_| {})? {}
        Ok(())
    }
}

impl Pass {
    fn next(self) -> Self {
        match self {
            Self::QueuePairs => Self::SharedReceiveQueues,
            Self::SharedReceiveQueues => Self::Regions,
            Self::Regions => Self::ProtectionDomains,
            Self::ProtectionDomains => Self::CompletionQueues,
            Self::CompletionQueues | Self::Owner => Self::Owner,
        }
    }
}

impl<P: Provider> Device<P> {
    fn owns_nothing(&self, owner: Owner) -> bool {
        match owner {
            Owner::Context(context) => self.contexts.get(context).is_none_or(|found| found.owned == 0),
            Owner::Pd(pd) => self.pds.get(pd).is_none_or(|found| found.owned == 0),
        }
    }

    /// Upper bound of the handles of a pass's table.
    fn table_end(&self, pass: Pass) -> u32 {
        match pass {
            Pass::QueuePairs => self.qps.end(),
            Pass::SharedReceiveQueues => self.srqs.end(),
            Pass::Regions => self.regions.table().end(),
            Pass::ProtectionDomains => self.pds.end(),
            Pass::CompletionQueues => self.cqs.end(),
            Pass::Owner => 0,
        }
    }

    /// Number of steps to destroy an object; `None` when the owner doesn't own it.
    fn cost(&self, owner: Owner, pass: Pass, handle: u32) -> Option<u32> {
        let owns = |pd: u32| match owner {
            Owner::Pd(own) => pd == own,
            Owner::Context(context) => self.pds.get(pd).is_some_and(|found| found.context == context),
        };
        let is_context = |of: u32| owner == Owner::Context(of);
        let mine = match pass {
            Pass::QueuePairs => self.qps.get(handle).is_some_and(|qp| owns(qp.pd)),
            Pass::SharedReceiveQueues => self.srqs.get(handle).is_some_and(|srq| owns(srq.pd)),
            Pass::Regions => {
                let region = self.regions.table().get(handle).filter(|region| owns(region.pd))?;
                return Some(region_cost(region));
            }
            Pass::ProtectionDomains => self.pds.get(handle).is_some_and(|pd| is_context(pd.context)),
            Pass::CompletionQueues => self.cqs.get(handle).is_some_and(|cq| is_context(cq.context)),
            Pass::Owner => false,
        };
        mine.then_some(STEPS_PER_OBJECT)
    }
}

fn region_cost(region: &Region) -> u32 {
    let runs = u32::try_from(region.extent.runs() / RUNS_PER_STEP).unwrap_or(u32::MAX);
    STEPS_PER_OBJECT.saturating_add(runs)
}
