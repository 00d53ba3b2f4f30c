//! The encoding: encoded messages parse to the same messages, anything else is refused, and nothing panics.

use dsm::message::{Body, Intent, Message, Request, Stamp, UNKNOWN_CHANGE};
use dsm::operation::Change;
use dsm::wire::{HEADER, MAX_MESSAGE, WireError, encode, encoded_len, message_len, parse};
use dsm::{NodeId, Priority};
use proptest::prelude::*;

use super::strategies::message;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// Every message survives encoding and parsing, and has the announced length.
    #[test]
    fn messages_come_back(message in message()) {
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        prop_assert_eq!(encoded_len(&message), bytes.len());
        prop_assert_eq!(message_len(&bytes[..HEADER]), Ok(bytes.len()));
        prop_assert!(bytes.len() <= MAX_MESSAGE);
        prop_assert_eq!(parse(&bytes), Ok(message));
    }

    /// A changed byte or a cut gives an error, or a message that encodes to exactly those bytes: no message has two encodings.
    #[test]
    fn changed_messages_are_refused_or_are_others(message in message(), at in any::<usize>(), mask in 1u8.., cut in any::<usize>()) {
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        prop_assert!(parse(&bytes[..cut % bytes.len()]).is_err());
        let at = at % bytes.len();
        bytes[at] ^= mask;
        if let Ok(other) = parse(&bytes) {
            let mut again = Vec::new();
            encode(&other, &mut again);
            prop_assert_eq!(again, bytes);
        }
    }

    /// Arbitrary bytes are refused, or parse to a message that encodes to the same bytes.
    #[test]
    fn any_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..21) {
        let mut framed = vec![1, kind, 0, 1];
        framed.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
        framed.extend_from_slice(&[0; 24]);
        framed.extend_from_slice(&bytes);
        for bytes in [bytes, framed] {
            if let Ok(message) = parse(&bytes) {
                let mut again = Vec::new();
                encode(&message, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}

/// The error names an unknown version, so that an operator knows what to do.
#[test]
fn another_version_is_named() {
    let message =
        Message { from: NodeId(0), to: NodeId(1), stamp: Stamp::default(), page: 0, body: Body::Tick };
    let mut bytes = Vec::new();
    encode(&message, &mut bytes);
    bytes[0] = 2;
    assert_eq!(parse(&bytes), Err(WireError::Version(2)));
    assert!(WireError::Version(2).to_string().contains("same release on all nodes"));
}

/// An age near the end of the range is refused: all later ages would be equal.
#[test]
fn ages_that_no_correct_node_gives_are_refused() {
    let message = |time| {
        let priority = Priority { time, node: NodeId(0), vcpu: 0 };
        let body = Body::Hurry { priority };
        let mut bytes = Vec::new();
        encode(
            &Message { from: NodeId(0), to: NodeId(1), stamp: Stamp::default(), page: 7, body },
            &mut bytes,
        );
        parse(&bytes)
    };
    for time in [0, 1, Priority::MAX_TIME, Priority::NO_INSTRUCTION] {
        assert!(message(time).is_ok());
    }
    for time in [Priority::MAX_TIME + 1, Priority::NO_INSTRUCTION - 1] {
        assert_eq!(message(time), Err(WireError::Field { field: "age", value: time }));
    }
}

/// Sizes that the design assumes: an update of eight bytes, a request, an invalidation and its answer.
#[test]
fn small_messages_are_small() {
    let len = |body| {
        encoded_len(&Message { from: NodeId(0), to: NodeId(1), stamp: Stamp::default(), page: 7, body })
    };
    let change = Change { offset: 8, bytes: vec![1; 8], mask: 255 };
    let priority = Priority { time: 1, node: NodeId(0), vcpu: 0 };
    assert_eq!(len(Body::Update { change: change.clone(), done: None }), 44);
    assert_eq!(len(Body::Update { change, done: Some((0, 0)) }), 54);
    assert_eq!(len(Body::InvalidateAck), 32);
    assert_eq!(len(Body::Invalidate { writer: NodeId(0), priority, updated: false }), 45);
    let request = Request {
        requester: NodeId(0),
        intent: Intent::Read,
        priority,
        held: None,
        as_update: false,
        convert: false,
        atomic: false,
        changed: UNKNOWN_CHANGE,
    };
    assert_eq!(len(Body::Request(request)), 47);
}
