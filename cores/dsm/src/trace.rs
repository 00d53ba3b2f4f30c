//! Recording of a live node's local inputs, for the simulator to replay.

use std::collections::HashMap;

use crate::event::{Action, Event};
use crate::names::{NodeId, Page, Vcpu};

/// An event at a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A vCPU's event. Never [`Event::Message`] or [`Event::Timer`].
    Event {
        /// When, ns.
        at: u64,
        /// The event.
        event: Event,
    },
    /// The node resumed a vCPU, trapped its instruction, or completed its operation.
    Go {
        /// When, ns.
        at: u64,
        /// The vCPU.
        vcpu: Vcpu,
    },
    /// A message of another node arrived. Its content isn't recorded: the replayed sender generates the same one from the same inputs.
    Arrived {
        /// When, ns.
        at: u64,
        /// The sender.
        from: NodeId,
    },
    /// A timer expired.
    Timer {
        /// When, ns.
        at: u64,
    },
    /// The guest's changes to a page between the protocol's last access to it and a read.
    Content {
        /// The page.
        page: Page,
        /// Number of the read, among this node's reads of this page, from 1.
        reading: u64,
        /// Offsets and bytes.
        changes: Vec<(u16, Vec<u8>)>,
    },
}

/// Records one node. It keeps a copy of each page that the protocol reads or writes.
#[derive(Debug, Default)]
pub struct Recorder {
    entries: Vec<Entry>,
    /// Contents as the protocol knows them, and the number of reads.
    known: HashMap<Page, (Vec<u8>, u64)>,
}

impl Recorder {
    /// Records an event before the node processes it.
    pub fn event(&mut self, at: u64, event: &Event) {
        self.entries.push(match event {
            Event::Message(message) => Entry::Arrived { at, from: message.from },
            Event::Timer => Entry::Timer { at },
            _ => Entry::Event { at, event: event.clone() },
        });
    }

    /// Records an action of the node.
    pub fn action(&mut self, at: u64, action: &Action) {
        if let Action::Resume { vcpu } | Action::Trap { vcpu, .. } | Action::Completed { vcpu, .. } = action {
            self.entries.push(Entry::Go { at, vcpu: *vcpu });
        }
    }

    /// Records a read of a page by the protocol, with the content that it found.
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

    /// Records a write to a page by the protocol.
    pub fn write(&mut self, page: Page, size: usize, offset: usize, bytes: &[u8]) {
        let (known, _) = self.known.entry(page).or_insert_with(|| (vec![0; size], 0));
        if let Some(into) = known.get_mut(offset..offset + bytes.len()) {
            into.copy_from_slice(bytes);
        }
    }

    /// The recording, in order.
    #[must_use]
    pub fn finish(self) -> Vec<Entry> {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Body, Message, Stamp};

    /// Only the guest's changes are recorded, in runs, with the read that found them.
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

    /// All inputs of a node are recorded but the contents of messages.
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
