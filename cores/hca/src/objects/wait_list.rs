//! Queue pairs that wait for the same thing.

use std::collections::BTreeMap;

use super::QpRef;

/// Waiting queue pairs in order of arrival, each at most once. A guest decides how many wait and in which order they leave, so removing any
/// of them takes logarithmic time.
#[derive(Debug, Default)]
pub(crate) struct WaitList {
    order: BTreeMap<u64, QpRef>,
    positions: BTreeMap<QpRef, u64>,
    next: u64,
}

impl WaitList {
    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Appends a queue pair; one that waits already keeps its position.
    pub fn push(&mut self, at: QpRef) {
        if let std::collections::btree_map::Entry::Vacant(entry) = self.positions.entry(at) {
            entry.insert(self.next);
            self.order.insert(self.next, at);
            self.next += 1;
        }
    }

    /// Removes a queue pair; `false` when it wasn't in the list.
    pub fn remove(&mut self, at: QpRef) -> bool {
        let Some(position) = self.positions.remove(&at) else { return false };
        self.order.remove(&position).is_some()
    }

    /// Removes and returns the first ones, at most `most`.
    pub fn take(&mut self, most: usize) -> Vec<QpRef> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((_, at)) = self.order.pop_first()
        {
            self.positions.remove(&at);
            taken.push(at);
        }
        taken
    }

    /// Removes and returns the queue pairs of a device.
    pub fn take_device(&mut self, device: u32) -> Vec<QpRef> {
        let first = QpRef { device, handle: 0, stamp: 0 };
        let last = QpRef { device, handle: u32::MAX, stamp: u64::MAX };
        let taken: Vec<QpRef> = self.positions.range(first..=last).map(|(at, _)| *at).collect();
        for at in &taken {
            self.remove(*at);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(device: u32, handle: u32) -> QpRef {
        QpRef { device, handle, stamp: u64::from(handle) }
    }

    #[test]
    fn the_first_goes_first_whoever_leaves_meanwhile() {
        let mut list = WaitList::default();
        (1..6).for_each(|handle| list.push(at(handle % 2, handle)));
        list.push(at(1, 1));
        assert!(list.remove(at(0, 2)) && !list.remove(at(0, 2)));
        assert_eq!(list.take(1), [at(1, 1)]);
        assert_eq!(list.take_device(1), [at(1, 3), at(1, 5)]);
        assert_eq!((list.len(), list.take(9)), (1, vec![at(0, 4)]));
        assert!(list.is_empty());
    }
}
