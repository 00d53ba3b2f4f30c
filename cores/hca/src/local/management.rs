//! Work requests that change memory regions: local invalidate, fast registration, and the invalidation of a SEND with invalidate.

use crate::attributes::Access;
use crate::engine::Engine;
use crate::memory::{Extent, Forbidden, Kind};
use crate::objects::QpRef;
use crate::provider::Provider;
use crate::saved;
use crate::work::{FastRegister, Status};

use super::Step;

impl<P: Provider> Engine<P> {
    /// Ends a fast registration. No request uses its key at that time: requests execute one at a time.
    pub(crate) fn local_invalidate(&mut self, at: QpRef, rkey: u32) -> Step {
        let Some(pd) = self.qp(at).map(|qp| qp.pd) else { return Step::Failed(Status::General) };
        let Some(device) = self.device_mut(at.device) else { return Step::Failed(Status::General) };
        match device.regions.invalidate(rkey, pd) {
            Ok(()) => {
                device.marks.touch(saved::Kind::MemoryRegion, rkey >> 8);
                Step::DONE
            }
            Err(Forbidden) => Step::Failed(Status::MemoryBind),
        }
    }

    /// Makes a fast-register region valid. It must be invalid before.
    pub(crate) fn fast_register(&mut self, at: QpRef, request: &FastRegister) -> Step {
        match self.registered(at, request) {
            Some(()) => Step::DONE,
            None => Step::Failed(Status::MemoryBind),
        }
    }

    fn registered(&mut self, at: QpRef, request: &FastRegister) -> Option<()> {
        let pd = self.qp(at)?.pd;
        let device = self.device_mut(at.device)?;
        let most = device.capabilities.max_mr_size;
        let region = device.regions.of_key_mut(request.rkey).filter(|region| region.pd == pd)?;
        let Kind::Fast { max_pages } = region.kind else { return None };
        let first = request.iova % 4096;
        let bytes = first.checked_add(request.length)?;
        let fits = request.pages.len() <= max_pages as usize
            && request.length > 0
            && request.length <= most
            && bytes.div_ceil(4096) <= request.pages.len() as u64;
        if region.valid || !fits {
            return None;
        }
        let access = Access::from_bits_truncate(request.access);
        let start = if access.contains(Access::ZERO_BASED) { 0 } else { request.iova };
        start.checked_add(request.length)?;
        region.extent = Extent::from_pages(first, &request.pages)?;
        device.marks.touch(saved::Kind::MemoryRegion, request.rkey >> 8);
        region.start = start;
        region.length = request.length;
        region.access = access;
        region.key = request.rkey;
        region.valid = true;
        Some(())
    }

    /// Whether a peer's SEND may invalidate a key of this queue pair.
    pub(crate) fn may_invalidate(&self, peer: QpRef, key: u32) -> Result<(), Forbidden> {
        let pd = self.qp(peer).ok_or(Forbidden)?.pd;
        self.device(peer.device).ok_or(Forbidden)?.regions.may_invalidate(key, pd)
    }

    pub(crate) fn invalidate_remote(&mut self, peer: QpRef, key: u32) {
        let Some(pd) = self.qp(peer).map(|qp| qp.pd) else { return };
        if let Some(device) = self.device_mut(peer.device) {
            // `may_invalidate` checked it in the same step.
            let _ = device.regions.invalidate(key, pd);
            device.marks.touch(saved::Kind::MemoryRegion, key >> 8);
        }
    }
}
