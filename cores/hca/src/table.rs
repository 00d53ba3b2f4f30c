//! Objects by handle.

use std::collections::VecDeque;

/// A freed handle is reused only after this many others were freed, so that a stale handle rarely finds a new object.
const QUARANTINE: usize = 64;

/// A table of objects. Handles start at 1 and stay below the limit; freed ones are reused as late as possible.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Option<T>>,
    free: VecDeque<u32>,
    /// Objects were placed: `free` is rebuilt when it is needed.
    placed: bool,
    limit: u32,
    live: u32,
}

impl<T> Table<T> {
    /// A table whose handles are below `limit`.
    pub fn new(limit: u32) -> Self {
        Self { slots: vec![None], free: VecDeque::new(), placed: false, limit, live: 0 }
    }

    /// Number of objects.
    pub fn len(&self) -> u32 {
        self.live
    }

    /// Adds the object that `make` returns for the new handle. `None` when all handles are in use.
    pub fn insert(&mut self, make: impl FnOnce(u32) -> T) -> Option<u32> {
        if self.placed {
            self.find_free();
        }
        let next = u32::try_from(self.slots.len()).ok().filter(|next| *next < self.limit);
        let handle = match next {
            Some(next) if self.free.len() <= QUARANTINE => {
                self.slots.push(None);
                next
            }
            _ => self.free.pop_front()?,
        };
        self.slots[handle as usize] = Some(make(handle));
        self.live += 1;
        Some(handle)
    }

    /// Puts a restored object at a handle, in place of an existing one. `None` when the handle is out of range.
    pub fn place(&mut self, handle: u32, object: T) -> Option<()> {
        if handle >= self.limit.max(1) {
            return None;
        }
        let at = handle as usize;
        if at >= self.slots.len() {
            self.slots.resize_with(at + 1, || None);
        }
        self.live += u32::from(self.slots[at].is_none());
        self.slots[at] = Some(object);
        self.placed = true;
        Some(())
    }

    fn find_free(&mut self) {
        self.placed = false;
        let empty = (0u32..).zip(&self.slots).skip(1).filter(|(_, slot)| slot.is_none());
        self.free = empty.map(|(handle, _)| handle).collect();
    }

    /// Puts an object at handle 0, which [`Table::insert`] never returns.
    pub fn set_zero(&mut self, object: T) {
        self.live += u32::from(self.slots[0].is_none());
        self.slots[0] = Some(object);
    }

    #[inline]
    pub fn get(&self, handle: u32) -> Option<&T> {
        self.slots.get(handle as usize)?.as_ref()
    }

    #[inline]
    pub fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        self.slots.get_mut(handle as usize)?.as_mut()
    }

    pub fn remove(&mut self, handle: u32) -> Option<T> {
        let object = self.slots.get_mut(handle as usize)?.take()?;
        self.live -= 1;
        if handle != 0 && !self.placed {
            self.free.push_back(handle);
        }
        Some(object)
    }

    /// Exclusive upper bound of the handles in use.
    pub fn end(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).zip(&self.slots).filter_map(|(handle, slot)| Some((handle, slot.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        (0u32..).zip(&mut self.slots).filter_map(|(handle, slot)| Some((handle, slot.as_mut()?)))
    }

    /// Handles of the objects that match `which`.
    pub fn handles(&self, which: impl Fn(&T) -> bool) -> Vec<u32> {
        self.iter().filter(|(_, object)| which(object)).map(|(handle, _)| handle).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_start_at_one_and_stay_below_the_limit() {
        let mut table = Table::new(4);
        assert_eq!(
            (0..5).map(|_| table.insert(|handle| handle)).collect::<Vec<_>>(),
            [Some(1), Some(2), Some(3), None, None]
        );
        assert_eq!(table.remove(2), Some(2));
        assert_eq!(table.remove(2), None);
        assert_eq!(table.insert(|handle| handle), Some(2));
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn a_freed_handle_is_reused_late() {
        let mut table = Table::new(1000);
        for _ in 0..QUARANTINE {
            let handle = table.insert(|_| ()).unwrap();
            table.remove(handle);
        }
        assert_ne!(table.insert(|_| ()), Some(1));
        for handle in 0..200 {
            table.remove(handle);
        }
        assert!((0..500).any(|_| table.insert(|_| ()) == Some(1)));
    }
}
