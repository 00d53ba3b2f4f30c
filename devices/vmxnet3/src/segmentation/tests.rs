//! Segmentation against the frames of the reference.

use proptest::prelude::*;
use vmxnet3_testbed::{FrameSpec, checksums_are_good};

use super::*;

fn spec() -> impl Strategy<Value = FrameSpec> {
    (
        any::<bool>(),
        any::<bool>(),
        prop::option::of(1..0xFFF_u16),
        0..=10_u8,
        any::<u8>(),
        any::<(u32, u16)>(),
    )
        .prop_map(|(v6, udp, vlan, options, flags, (sequence, id))| FrameSpec {
            to: [2, 0, 0, 0, 0, 2],
            from: [2, 0, 0, 0, 0, 1],
            v6,
            udp,
            vlan,
            options,
            flags,
            sequence,
            id,
            payload: Vec::new(),
        })
}

proptest! {
    #[test]
    fn segments_are_those_of_the_reference(
        spec in spec(),
        payload in prop::collection::vec(any::<u8>(), 0..6000),
        mss in 1..4000_u16,
    ) {
        let spec = FrameSpec { udp: false, payload, ..spec };
        let packet = spec.large();
        let expected = spec.segments(usize::from(mss));
        let plan = Plan::new(&packet[..packet.len().min(256)], packet.len(), mss);
        if expected.len() > SEGMENTS_MAX {
            prop_assert_eq!(plan, None);
            return Ok(());
        }
        let plan = plan.unwrap();
        prop_assert_eq!(plan.count, expected.len());
        let mut segment = Vec::new();
        for (index, expected) in expected.iter().enumerate() {
            plan.segment(&packet, index, &mut segment);
            prop_assert!(checksums_are_good(&segment));
            prop_assert_eq!(&segment, expected);
        }
    }

    #[test]
    fn uncut_packets_are_as_linux_expects_them(
        spec in spec(),
        payload in prop::collection::vec(any::<u8>(), 1..3000),
    ) {
        let spec = FrameSpec { udp: false, payload, ..spec };
        let mut packet = spec.large();
        Plan::new(&packet[..packet.len().min(256)], packet.len(), 100).unwrap().prepare_uncut(&mut packet);
        prop_assert_eq!(packet, spec.partial());
    }

    #[test]
    fn nonsense_is_refused_or_cut_without_a_panic(
        packet in prop::collection::vec(any::<u8>(), 14..400),
        ethertype in prop::sample::select(vec![[8, 0], [0x86, 0xDD], [0x81, 0]]),
        version in prop::sample::select(vec![0x45, 0x46, 0x4F, 0x60]),
        mss in any::<u16>(),
    ) {
        let mut packet = packet;
        packet[12..14].copy_from_slice(&ethertype);
        for at in [14, 18] {
            if let Some(byte) = packet.get_mut(at) {
                *byte = version;
            }
        }
        for at in [14 + 9, 14 + 6, 18 + 9, 18 + 6] {
            if let Some(byte) = packet.get_mut(at) {
                *byte = 6;
            }
        }
        if let Some(plan) = Plan::new(&packet[..packet.len().min(256)], packet.len(), mss) {
            let mut segment = Vec::new();
            let mut payload = 0;
            for index in 0..plan.count {
                plan.segment(&packet, index, &mut segment);
                payload += segment.len() - plan.headers;
            }
            prop_assert_eq!(payload, packet.len() - plan.headers);
            plan.prepare_uncut(&mut packet);
        }
    }
}

#[test]
fn udp_and_bad_header_lengths_are_not_segmented() {
    let spec = FrameSpec {
        to: [2, 0, 0, 0, 0, 2],
        from: [2, 0, 0, 0, 0, 1],
        v6: false,
        udp: true,
        vlan: None,
        options: 0,
        flags: 0x18,
        sequence: 1,
        id: 1,
        payload: vec![0; 3000],
    };
    let plan = |packet: &[u8], mss| Plan::new(&packet[..256], packet.len(), mss);
    assert_eq!(plan(&spec.large(), 1000), None, "UDP");
    let tcp = FrameSpec { udp: false, ..spec };
    assert_eq!(plan(&tcp.large(), 0), None, "no MSS");
    assert_eq!(plan(&tcp.large(), 1), None, "too many pieces");
    let mut short = tcp.large();
    short[tcp.l4() + 12] = 4 << 4;
    assert_eq!(plan(&short, 1000), None, "a TCP header of 16 bytes");
    assert_eq!(plan(&tcp.large(), 1000).map(|plan| plan.count), Some(3));
}
