//! Messages as bytes: what is written is read again, and nothing else is.

use nomad::wire::{self, HEADER_BYTES, WireError};
use nomad::{AbortReason, Body, Epoch, HostId, Incarnation, Message, MigrationId, Move, Node, Place, VmId};
use proptest::collection::vec;
use proptest::prelude::*;

fn vm() -> impl Strategy<Value = VmId> {
    (1..=u32::MAX).prop_map(VmId)
}

fn host() -> impl Strategy<Value = HostId> {
    any::<u32>().prop_map(HostId)
}

fn migration() -> impl Strategy<Value = MigrationId> {
    any::<u64>().prop_map(MigrationId)
}

fn place() -> impl Strategy<Value = Place> {
    (vm(), host(), any::<u64>()).prop_map(|(vm, host, epoch)| Place { vm, host, epoch: Epoch(epoch) })
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = (vm(), host(), host(), any::<u64>());
    vec(one.prop_map(|(vm, from, to, epoch)| Move { vm, from, to, epoch: Epoch(epoch) }), 0..5)
}

fn reason() -> impl Strategy<Value = AbortReason> {
    prop_oneof![
        Just(AbortReason::Cancelled),
        Just(AbortReason::NoRoom),
        Just(AbortReason::NotHere),
        Just(AbortReason::Busy),
        Just(AbortReason::Stream),
        Just(AbortReason::Peers),
        Just(AbortReason::Timeout),
        Just(AbortReason::Restarted),
        Just(AbortReason::Epoch),
        Just(AbortReason::Queue),
    ]
}

fn body() -> impl Strategy<Value = Body> {
    let hosts = || vec(host(), 0..5);
    let vms = || vec(vm(), 0..5);
    let running = vec((vm(), any::<u64>().prop_map(Epoch)), 0..5);
    prop_oneof![
        Just(Body::Hello),
        Just(Body::Welcome),
        (migration(), moves()).prop_map(|(migration, moves)| Body::Reserve { migration, moves }),
        migration().prop_map(|migration| Body::Reserved { migration }),
        (migration(), moves()).prop_map(|(migration, moves)| Body::Begin { migration, moves }),
        migration().prop_map(|migration| Body::Converged { migration }),
        migration().prop_map(|migration| Body::Switch { migration }),
        (migration(), host(), vms(), hosts()).prop_map(|(migration, origin, vms, forward_to)| {
            Body::Suspend { migration, origin, vms, forward_to }
        }),
        (migration(), host(), hosts()).prop_map(|(migration, origin, hosts)| Body::Suspended {
            migration,
            origin,
            hosts
        }),
        (migration(), vm(), vec(place(), 0..5)).prop_map(|(migration, vm, peers)| Body::Handover {
            migration,
            vm,
            peers
        }),
        migration().prop_map(|migration| Body::Loaded { migration }),
        migration().prop_map(|migration| Body::Yield { migration }),
        (migration(), reason()).prop_map(|(migration, reason)| Body::Failed { migration, reason }),
        (migration(), vec(place(), 0..5)).prop_map(|(migration, places)| Body::Commit { migration, places }),
        (migration(), vec(place(), 0..5)).prop_map(|(migration, places)| Body::Abort { migration, places }),
        (migration(), vms()).prop_map(|(migration, lost)| Body::Settled { migration, lost }),
        migration().prop_map(|migration| Body::Outcome { migration }),
        (migration(), vm()).prop_map(|(migration, waits_for)| Body::Queued { migration, waits_for }),
        (migration(), host(), running, hosts()).prop_map(|(after, origin, vms, forward_to)| Body::Running {
            after,
            origin,
            vms,
            forward_to
        }),
        (migration(), host(), hosts()).prop_map(|(after, origin, hosts)| Body::Ready {
            after,
            origin,
            hosts
        }),
        vm().prop_map(|vm| Body::Where { vm }),
        place().prop_map(|place| Body::At { place }),
        (vm(), any::<u64>()).prop_map(|(vm, epoch)| Body::Lost { vm, epoch: Epoch(epoch) }),
    ]
}

fn node() -> impl Strategy<Value = Node> {
    prop_oneof![Just(Node::Coordinator), host().prop_map(Node::Host)]
}

fn message() -> impl Strategy<Value = Message> {
    (node(), any::<u64>(), node(), body()).prop_map(|(from, incarnation, to, body)| Message {
        from,
        incarnation: Incarnation(incarnation),
        to,
        body,
    })
}

fn bytes_of(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(message, &mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Every message is read as what was written, and as nothing when a byte is missing or too many.
    #[test]
    fn what_is_written_is_read(message in message(), cut in any::<prop::sample::Index>()) {
        let bytes = bytes_of(&message);
        prop_assert_eq!(wire::parse(&bytes), Ok(message));
        let shorter = &bytes[..cut.index(bytes.len())];
        prop_assert!(wire::parse(shorter).is_err());
        let longer = [&bytes[..], &[0]].concat();
        prop_assert_eq!(wire::parse(&longer), Err(WireError::Long(1)));
    }

    /// Bytes that are changed are refused, or are the one way to write what they are read as.
    #[test]
    fn changed_bytes_are_read_in_one_way(
        message in message(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
    ) {
        let mut bytes = bytes_of(&message);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(read) = wire::parse(&bytes) {
            prop_assert_eq!(bytes_of(&read), bytes);
        }
    }
}

/// A count of entries that aren't there is refused before anything is allocated for them.
#[test]
fn a_count_without_entries_is_refused() {
    let lost = vec![VmId(1)];
    let settled = Body::Settled { migration: MigrationId(1), lost };
    let (from, to) = (Node::Host(HostId(1)), Node::Coordinator);
    let mut bytes = bytes_of(&Message { from, incarnation: Incarnation(1), to, body: settled });
    bytes[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&200_u32.to_le_bytes());
    assert_eq!(wire::parse(&bytes), Err(WireError::Short { got: 4, needed: 800 }));
    bytes[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    let field = WireError::Field { field: "number of VMs", value: u64::from(u32::MAX) };
    assert_eq!(wire::parse(&bytes), Err(field));
}
