//! What a live node was told by its own side, recorded so that the simulator can be driven with it.

use std::collections::HashMap;

use crate::event::{Action, Event};
use crate::names::{NodeId, Page, Vcpu};

/// One thing that happened at a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A virtual CPU did this; never [`Event::Message`] or [`Event::Timer`].
    Event {
        /// When, nanoseconds.
        at: u64,
        /// What.
        event: Event,
    },
    /// The protocol let a virtual CPU go on, or had its instruction decoded.
    Go {
        /// When, nanoseconds.
        at: u64,
        /// Which.
        vcpu: Vcpu,
    },
    /// A message of another node came. What it said isn't kept: the other node, told the same, sends the same.
    Arrived {
        /// When, nanoseconds.
        at: u64,
        /// Whose.
        from: NodeId,
    },
    /// The time of a deadline had come.
    Timer {
        /// When, nanoseconds.
        at: u64,
    },
    /// When the protocol read a page, the guest had changed these bytes since it was last read or written.
    Content {
        /// The page.
        page: Page,
        /// Which reading of this page at this node it was, from 1.
        reading: u64,
        /// Offsets and what lies there.
        changes: Vec<(u16, Vec<u8>)>,
    },
}

/// Records one node. Costs a page of memory for each page that is ever sent or received.
#[derive(Debug, Default)]
pub struct Recorder {
    entries: Vec<Entry>,
    /// Contents as the protocol knows them, and how often each was read.
    known: HashMap<Page, (Vec<u8>, u64)>,
}

impl Recorder {
    /// An event that the node is about to be told.
    pub fn event(&mut self, at: u64, event: &Event) {
        self.entries.push(match event {
            Event::Message(message) => Entry::Arrived { at, from: message.from },
            Event::Timer => Entry::Timer { at },
            _ => Entry::Event { at, event: event.clone() },
        });
    }

    /// What the node wants done.
    pub fn action(&mut self, at: u64, action: &Action) {
        if let Action::Resume { vcpu } | Action::Trap { vcpu, .. } | Action::Completed { vcpu, .. } = action {
            self.entries.push(Entry::Go { at, vcpu: *vcpu });
        }
    }

    /// The protocol reads a page, and finds this.
    pub fn read(&mut self, page: Page, content: &[u8]) {
        let (known, reading) = self.known.entry(page).or_insert_with(|| (vec![0; content.len()], 0));
        *reading += 1;
        let mut changes: Vec<(u16, Vec<u8>)> = Vec::new();
        for ((offset, new), old) in (0_u16..).zip(content).zip(known.iter()) {
            if new == old {
                continue;
            }
            match changes.last_mut() {
                Some((start, bytes)) if usize::from(*start) + bytes.len() == usize::from(offset) => {
                    bytes.push(*new)
                }
                _ => changes.push((offset, vec![*new])),
            }
        }
        known.copy_from_slice(content);
        if !changes.is_empty() {
            self.entries.push(Entry::Content { page, reading: *reading, changes });
        }
    }

    /// The protocol writes into a page.
    pub fn write(&mut self, page: Page, size: usize, offset: usize, bytes: &[u8]) {
        let (known, _) = self.known.entry(page).or_insert_with(|| (vec![0; size], 0));
        if let Some(into) = known.get_mut(offset..offset + bytes.len()) {
            into.copy_from_slice(bytes);
        }
    }

    /// What was recorded, in order.
    #[must_use]
    pub fn finish(self) -> Vec<Entry> {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Body, Message, Stamp};

    /// Only what the guest has changed is recorded, in runs, with the reading that found it.
    #[test]
    fn changes_between_readings_are_recorded_and_the_protocols_own_are_not() {
        let mut recorder = Recorder::default();
        let mut content = vec![0; 16];
        recorder.read(3, &content);
        content[2..4].copy_from_slice(&[7, 8]);
        content[9] = 1;
        recorder.read(3, &content);
        recorder.write(3, 16, 0, &[5; 2]);
        content[..2].copy_from_slice(&[5; 2]);
        recorder.read(3, &content);
        let changes = vec![(2, vec![7, 8]), (9, vec![1])];
        assert_eq!(recorder.finish(), [Entry::Content { page: 3, reading: 2, changes }]);
    }

    /// Of what a node is told, only what others said isn't kept.
    #[test]
    fn all_that_a_node_is_told_is_recorded_and_no_message() {
        let mut recorder = Recorder::default();
        let (from, to) = (NodeId(1), NodeId(0));
        let message = Message { from, to, stamp: Stamp::default(), page: 3, body: Body::InvalidateAck };
        recorder.event(1, &Event::Retired { vcpu: 2 });
        recorder.event(2, &Event::Message(message));
        recorder.event(3, &Event::Timer);
        let event = Event::Retired { vcpu: 2 };
        let told = [Entry::Event { at: 1, event }, Entry::Arrived { at: 2, from }, Entry::Timer { at: 3 }];
        assert_eq!(recorder.finish(), told);
    }
}
