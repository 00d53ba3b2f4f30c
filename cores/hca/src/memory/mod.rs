//! Memory regions: keys, protection, and translation to guest addresses.
//!
//! Every access goes through [`Regions::gather`] or [`Regions::remote`]. They alone check key, protection domain, validity, range and
//! rights, at each access.

mod region;

use std::ops::Range;

pub(crate) use region::{Extent, Kind, Region};
pub use region::{MrPages, NotAPage};

use crate::attributes::Access;
use crate::table::Table;
use crate::work::{Remote, Sge};

/// A piece of guest memory, contiguous in guest addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub address: u64,
    pub len: u64,
}

/// An access that protection forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forbidden;

/// The memory regions of a device.
#[derive(Debug)]
pub(crate) struct Regions {
    table: Table<Region>,
}

impl Regions {
    pub fn new(limit: u32) -> Self {
        Self { table: Table::new(limit.min(1 << 24)) }
    }

    pub fn table(&self) -> &Table<Region> {
        &self.table
    }

    /// Adds a region; the variant of its key derives from `seed`.
    pub fn insert(&mut self, mut region: Region, seed: u64) -> Option<(u32, u32)> {
        let mut key = 0;
        let handle = self.table.insert(|handle| {
            region.key = (handle << 8) | variant(seed);
            key = region.key;
            region
        })?;
        Some((handle, key))
    }

    /// Puts a restored region at its handle.
    pub fn place(&mut self, handle: u32, region: Region) -> Option<()> {
        self.table.place(handle, region)
    }

    pub fn remove(&mut self, handle: u32) -> Option<Region> {
        self.table.remove(handle)
    }

    pub fn of_key_mut(&mut self, key: u32) -> Option<&mut Region> {
        self.table.get_mut(key >> 8)
    }

    #[inline]
    fn lookup(&self, key: u32, pd: u32, need: Access) -> Result<&Region, Forbidden> {
        match self.table.get(key >> 8) {
            Some(region)
                if region.key == key && region.pd == pd && region.valid && region.access.contains(need) =>
            {
                Ok(region)
            }
            _ => Err(Forbidden),
        }
    }

    /// Checks the elements for the first `total` bytes of a scatter-gather list, and translates bytes `part` of them. So an invalid message
    /// fails before its first byte is moved, however many parts it has. Elements of length 0 need no key. All of an element has to lie in
    /// its region, not only the used part.
    #[inline]
    pub fn gather(
        &self,
        pd: u32,
        sges: &[Sge],
        total: u64,
        part: Range<u64>,
        need: Access,
        into: &mut Vec<Piece>,
    ) -> Result<(), Forbidden> {
        into.clear();
        let mut start = 0;
        for sge in sges {
            if start >= total {
                return Ok(());
            }
            if sge.length == 0 {
                continue;
            }
            let length = u64::from(sge.length);
            let region = self.lookup(sge.lkey, pd, need)?;
            let offset = region.offset_of(sge.address, length).ok_or(Forbidden)?;
            let (from, to) = (part.start.max(start), part.end.min(start + length));
            if from < to {
                region.pieces(offset + (from - start), to - from, into);
            }
            start += length;
        }
        if start >= total { Ok(()) } else { Err(Forbidden) }
    }

    /// Checks a peer's access to `total` bytes, and translates bytes `part` of them. With `total` 0 nothing is checked (IBTA: requests of
    /// length 0 may have any key).
    #[inline]
    pub fn remote(
        &self,
        pd: u32,
        remote: Remote,
        total: u64,
        part: Range<u64>,
        need: Access,
        into: &mut Vec<Piece>,
    ) -> Result<(), Forbidden> {
        into.clear();
        if total == 0 {
            return Ok(());
        }
        let region = self.lookup(remote.rkey, pd, need)?;
        let offset = region.offset_of(remote.address, total).ok_or(Forbidden)?;
        region.pieces(offset + part.start, part.end - part.start, into);
        Ok(())
    }

    /// Makes a fast-register region invalid. An invalid one may be invalidated again.
    pub fn invalidate(&mut self, key: u32, pd: u32) -> Result<(), Forbidden> {
        self.may_invalidate(key, pd)?;
        if let Some(region) = self.of_key_mut(key) {
            region.valid = false;
        }
        Ok(())
    }

    /// Whether [`Regions::invalidate`] would succeed.
    pub fn may_invalidate(&self, key: u32, pd: u32) -> Result<(), Forbidden> {
        match self.table.get(key >> 8) {
            Some(region)
                if region.key == key && region.pd == pd && matches!(region.kind, Kind::Fast { .. }) =>
            {
                Ok(())
            }
            _ => Err(Forbidden),
        }
    }
}

/// The low byte of a key: differs from region to region, so that a guessed or stale key rarely matches.
fn variant(seed: u64) -> u32 {
    let mixed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    u32::from(mixed.to_be_bytes()[0])
}

#[cfg(test)]
mod tests;
