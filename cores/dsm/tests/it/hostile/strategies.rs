//! Strategies for arbitrary messages.

use dsm::message::{Body, Grant, Intent, Message, Request, Stamp, Token};
use dsm::operation::{Atomic, Change, Operation, full_mask};
use dsm::wire::PAGE_SIZE;
use dsm::{Mode, NodeId, NodeSet, Payload, Priority};
use proptest::prelude::*;

fn node() -> impl Strategy<Value = NodeId> {
    (0u8..64).prop_map(NodeId)
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Invalidate), Just(Mode::Update), Just(Mode::SingleWriter)]
}

fn intent() -> impl Strategy<Value = Intent> {
    prop_oneof![Just(Intent::Read), Just(Intent::ReadOwn), Just(Intent::Write)]
}

fn priority() -> impl Strategy<Value = Priority> {
    let time = prop_oneof![0..=Priority::MAX_TIME, Just(Priority::NO_INSTRUCTION)];
    (time, node(), 0u16..1024).prop_map(|(time, node, vcpu)| Priority { time, node, vcpu })
}

fn change() -> impl Strategy<Value = Change> {
    (0u16..4032, proptest::collection::vec(any::<u8>(), 1..=64), any::<u64>()).prop_map(
        |(offset, bytes, mask)| {
            let mask = mask & full_mask(bytes.len());
            Change { offset, bytes, mask }
        },
    )
}

/// Any operation that is valid for a page.
pub fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        change().prop_map(|change| Operation::Store {
            offset: change.offset,
            bytes: change.bytes,
            mask: change.mask
        }),
        (
            0u16..4088,
            prop_oneof![Just(1u8), Just(2), Just(4), Just(8)],
            0usize..6,
            any::<u64>(),
            any::<u64>()
        )
            .prop_map(|(offset, width, kind, operand, expected)| Operation::Atomic {
                offset,
                width,
                kind: Atomic::ALL[kind],
                operand,
                expected
            }),
    ]
}

fn payload() -> impl Strategy<Value = Payload> {
    let run = (0u16..4000, proptest::collection::vec(any::<u8>(), 1..40));
    prop_oneof![
        Just(Payload::Zero),
        Just(Payload::Same),
        proptest::collection::vec(run, 0..9).prop_map(Payload::Difference),
        any::<u8>().prop_map(|byte| Payload::Raw(vec![byte; PAGE_SIZE])),
    ]
}

fn request() -> impl Strategy<Value = Body> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let rest = (node(), intent(), priority(), any::<Option<u64>>(), flags, any::<u16>());
    rest.prop_map(|(requester, intent, priority, held, (as_update, convert, atomic), changed)| {
        Body::Request(Request { requester, intent, priority, held, as_update, convert, atomic, changed })
    })
}

fn token() -> impl Strategy<Value = Body> {
    let seqs = || proptest::collection::vec(any::<u64>(), 0..=64);
    let page = (any::<u64>(), mode(), any::<u64>().prop_map(NodeSet));
    (seqs(), seqs(), proptest::collection::vec(page, 0..40))
        .prop_map(|(last, unacked, pages)| Body::Token(Token { last, unacked, pages }))
}

/// Any body of a message.
pub fn body() -> impl Strategy<Value = Body> {
    let grant = (
        intent(),
        mode(),
        any::<u64>(),
        any::<u64>(),
        payload(),
        proptest::collection::vec(any::<u64>(), 0..5),
    );
    prop_oneof![
        request(),
        grant.prop_map(|(intent, mode, version, copies, payload, counters)| {
            Body::Grant(Grant { intent, mode, version, copies: NodeSet(copies), payload, counters })
        }),
        (node(), priority(), any::<bool>()).prop_map(|(writer, priority, updated)| Body::Invalidate {
            writer,
            priority,
            updated
        }),
        Just(Body::InvalidateAck),
        priority().prop_map(|priority| Body::Hurry { priority }),
        (node(), 0u16..1024, operation()).prop_map(|(requester, vcpu, operation)| Body::Operate {
            requester,
            vcpu,
            operation
        }),
        (change(), proptest::option::of((0u16..1024, any::<u64>())))
            .prop_map(|(change, done)| Body::Update { change, done }),
        (0u16..1024, any::<u64>()).prop_map(|(vcpu, old)| Body::Done { vcpu, old }),
        (0u16..1024).prop_map(|vcpu| Body::Refuse { vcpu }),
        node().prop_map(|requester| Body::Sync { requester }),
        Just(Body::Tick),
        (node(), any::<u64>()).prop_map(|(node, count)| Body::Applied { node, count }),
        (node(), any::<u64>()).prop_map(|(node, seq)| Body::Leave { node, seq }),
        (any::<u64>(), any::<bool>()).prop_map(|(seq, stays)| Body::Left { seq, stays }),
        mode().prop_map(|mode| Body::Advise { mode }),
        Just(Body::Reverted),
        Just(Body::RevertedAck),
        token(),
        (any::<u64>(), change()).prop_map(|(counter, change)| Body::Weak { counter, change }),
    ]
}

/// Any message that can be encoded.
pub fn message() -> impl Strategy<Value = Message> {
    (node(), node(), any::<u64>(), any::<u64>(), any::<u64>(), body()).prop_map(
        |(from, to, a, b, page, body)| Message {
            from,
            to,
            stamp: Stamp { seq: a.max(b), need: a.min(b) },
            page,
            body,
        },
    )
}
