//! Hostile messages of shared memory, to the parser and to a node.
//!
//! Checked: parsed bytes are encoded identically; a node touches its guest's memory only, and sends only messages that parse; no
//! panic and no endless loop.

#![no_main]

use std::collections::HashMap;

use arbitrary::Arbitrary;
use dsm::wire::{self, PAGE_SIZE};
use dsm::{Access, Action, Config, Event, Fault, Node, NodeId, Page, Pages, Policy};
use libfuzzer_sys::fuzz_target;

const PAGES: u64 = 3;
const STEPS: usize = 60;

#[derive(Debug, Arbitrary)]
enum Step {
    /// A message: kind, a header near values in use, trailing bytes.
    Message {
        kind: u8,
        from: u8,
        page: u8,
        seq: u8,
        need: u8,
        bytes: Vec<u8>,
    },
    /// Raw bytes.
    Raw(Vec<u8>),
    /// A fault of the node's own guest.
    Fault {
        vcpu: u8,
        page: u8,
        kind: u8,
    },
    Retired {
        vcpu: u8,
    },
    Timer,
    Discard {
        page: u8,
    },
    MoveToken {
        to: u8,
    },
}

#[derive(Default)]
struct Memory(HashMap<Page, Vec<u8>>);

impl Pages for Memory {
    fn size(&self) -> usize {
        PAGE_SIZE
    }
    fn read(&self, page: Page, into: &mut Vec<u8>) {
        assert!(page < PAGES);
        into.clear();
        into.extend_from_slice(self.0.get(&page).map_or(&[0; PAGE_SIZE], Vec::as_slice));
    }
    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        assert!(page < PAGES);
        let content = self.0.entry(page).or_insert_with(|| vec![0; PAGE_SIZE]);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    fn protect(&mut self, page: Page, _: Access) {
        assert!(page < PAGES);
    }
}

fn parse(bytes: &[u8]) -> Option<Event> {
    let message = wire::parse(bytes).ok()?;
    let mut again = Vec::new();
    wire::encode(&message, &mut again);
    assert_eq!(again, bytes, "read in one way only");
    Some(Event::Message(message))
}

fuzz_target!(|steps: Vec<Step>| {
    let policy = Policy { hold_ns: 100, update_window: 2, ..Policy::OURS };
    let config = Config { vcpus: 2, pages: PAGES, ..Config::new(0, 4, policy) };
    let mut node = Node::new(config).expect("a configuration");
    let mut memory = Memory::default();
    let mut now = 0;
    for step in steps.into_iter().take(STEPS) {
        now += 30;
        let event = match step {
            Step::Message { kind, from, page, seq, need, bytes } => {
                let mut message = vec![wire::VERSION, kind % 21, from % 5, 0];
                message.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                message.extend_from_slice(&u64::from(page % 4).to_le_bytes());
                message.extend_from_slice(&u64::from(seq).to_le_bytes());
                message.extend_from_slice(&u64::from(need.min(seq)).to_le_bytes());
                message.extend_from_slice(&bytes);
                parse(&message)
            }
            Step::Raw(bytes) => parse(&bytes),
            Step::Fault { vcpu, page, kind } => Some(Event::Fault {
                vcpu: u16::from(vcpu % 3),
                page: u64::from(page % 4),
                fault: [Fault::Read, Fault::Write, Fault::Atomic][usize::from(kind % 3)],
            }),
            Step::Retired { vcpu } => Some(Event::Retired { vcpu: u16::from(vcpu % 3) }),
            Step::Timer => Some(Event::Timer),
            Step::Discard { page } => Some(Event::Discard { page: u64::from(page % 4) }),
            Step::MoveToken { to } => Some(Event::MoveToken { to: NodeId(to % 5) }),
        };
        let Some(event) = event else { continue };
        let mut actions = Vec::new();
        node.step(event, now, &mut memory, &mut actions);
        for action in actions {
            if let Action::Send(message) = action {
                let mut bytes = Vec::new();
                wire::encode(&message, &mut bytes);
                assert_eq!(wire::parse(&bytes), Ok(message), "what leaves is a message");
            }
        }
    }
});
