//! A node among hostile peers.

use std::collections::HashMap;

use dsm::config::Policy;
use dsm::event::{Action, Event, Fault};
use dsm::message::{Body, Message, Stamp};
use dsm::wire::PAGE_SIZE;
use dsm::{Access, Config, Mode, Node, NodeId, Operation, Page, Pages};
use proptest::prelude::*;

use super::strategies::{body, operation};

const PAGES: u64 = 3;

/// Memory that fails the test when it is used outside its bounds.
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

#[derive(Debug, Clone)]
enum Step {
    Message(u8, u64, u64, Page, Body),
    Fault(u16, Page, u8),
    Operate(u16, Page, Operation),
    Retired(u16),
    Timer,
    Discard(Page),
    Advise(Page, bool),
    MoveToken(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let page = || 0..PAGES + 1;
    // Numbers near those in use, and arbitrary ones.
    let seq = || prop_oneof![4 => 0u64..6, 1 => any::<u64>()];
    prop_oneof![
        8 => (0u8..5, seq(), seq(), page(), body()).prop_map(|(from, a, b, page, body)| Step::Message(from, a, b, page, body)),
        3 => (0u16..3, page(), 0u8..3).prop_map(|(vcpu, page, fault)| Step::Fault(vcpu, page, fault)),
        1 => (0u16..3, page(), operation()).prop_map(|(vcpu, page, operation)| Step::Operate(vcpu, page, operation)),
        1 => (0u16..3).prop_map(Step::Retired),
        1 => Just(Step::Timer),
        1 => page().prop_map(Step::Discard),
        1 => (page(), any::<bool>()).prop_map(|(page, update)| Step::Advise(page, update)),
        1 => (0u8..5).prop_map(Step::MoveToken),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// No message of peers makes a node panic, access memory outside the guest, or answer endlessly. All that the node sends is
    /// well-formed.
    #[test]
    fn a_node_survives_any_peers(me in 0u8..4, weak in any::<bool>(), steps in proptest::collection::vec(step(), 1..120)) {
        let policy = Policy { hold_ns: 100, update_window: 2, ..if weak { Policy::VNUMA_2009 } else { Policy::OURS } };
        let config = Config { vcpus: 2, pages: PAGES, ..Config::new(me, 4, policy) };
        let mut node = Node::new(config).unwrap();
        let mut memory = Memory::default();
        let mut now = 0;
        for step in steps {
            now += 30;
            let event = match step {
                Step::Message(from, a, b, page, body) => {
                    let stamp = Stamp { seq: a.max(b), need: a.min(b) };
                    Event::Message(Message { from: NodeId(from), to: NodeId(me), stamp, page, body })
                }
                Step::Fault(vcpu, page, fault) => {
                    let fault = [Fault::Read, Fault::Write, Fault::Atomic][usize::from(fault)];
                    Event::Fault { vcpu, page, fault }
                }
                Step::Operate(vcpu, page, operation) => Event::Operate { vcpu, page, operation },
                Step::Retired(vcpu) => Event::Retired { vcpu },
                Step::Timer => Event::Timer,
                Step::Discard(page) => Event::Discard { page },
                Step::Advise(page, update) => {
                    Event::Advise { page, mode: if update { Mode::Update } else { Mode::Invalidate } }
                }
                Step::MoveToken(to) => Event::MoveToken { to: NodeId(to) },
            };
            let mut actions = Vec::new();
            node.step(event, now, &mut memory, &mut actions);
            prop_assert!(actions.len() < 2_000, "{} actions at once", actions.len());
            for action in actions {
                if let Action::Send(message) = action {
                    prop_assert!(message.from == NodeId(me) && message.to != NodeId(me) && message.to.0 < 4);
                    prop_assert!(message.stamp.need <= message.stamp.seq);
                    let mut bytes = Vec::new();
                    dsm::wire::encode(&message, &mut bytes);
                    prop_assert_eq!(dsm::wire::parse(&bytes), Ok(message));
                }
            }
        }
    }
}
