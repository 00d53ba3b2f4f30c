//! Packets and frames: parsing is the inverse of writing, and arbitrary bytes do no harm.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use roce::frame::{Addresses, Frame, NotTaken, Template};
use roce::packet::{Aeth, AtomicEth, Deth, Header, Invalid, Operation, Packet, Reth, Service};

/// Every opcode that exists.
fn opcodes() -> Vec<(Service, Operation)> {
    (0..=255).filter_map(Operation::decode).collect()
}

prop_compose! {
    fn headers()(
        index in 0..opcodes().len(),
        words in any::<[u64; 5]>(),
        short in any::<[u32; 6]>(),
        flags in any::<[bool; 4]>(),
        pkey in any::<u16>(),
        immediate in any::<[u8; 4]>(),
    ) -> Header {
        let (service, operation) = opcodes()[index];
        let mut header = Header::new(service, operation, short[0] >> 8, short[1] >> 8);
        header.solicited = flags[0];
        header.ack_request = flags[1];
        header.fecn = flags[2];
        header.becn = flags[3];
        header.pkey = pkey;
        header.reth = Reth { address: words[0], rkey: short[2], length: short[3] };
        header.atomic = AtomicEth { address: words[1], rkey: short[4], swap_add: words[2], compare: words[3] };
        header.aeth = Aeth { syndrome: immediate[0], msn: short[5] >> 8 };
        header.deth = Deth { qkey: short[2], source: short[3] >> 8 };
        header.original = words[4];
        header.immediate = immediate;
        header
    }
}

/// Whether packets of this kind carry a payload.
fn has_payload(operation: Operation) -> bool {
    use Operation::*;
    !matches!(
        operation,
        ReadRequest | Acknowledge | AtomicAcknowledge | CompareSwap | FetchAdd | Notification
    )
}

fn written(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xEE; header.packet_len(payload.len())];
    header.write(&mut bytes, payload.len()).copy_from_slice(payload);
    bytes
}

#[test]
fn the_table_of_opcodes_is_that_of_the_specification() {
    use Operation::*;
    use Service::{Congestion, Rc, Uc, Ud};
    // Opcode, bytes of headers.
    let rc = [
        (0x00, SendFirst, 12),
        (0x01, SendMiddle, 12),
        (0x02, SendLast, 12),
        (0x03, SendLastImmediate, 16),
        (0x04, SendOnly, 12),
        (0x05, SendOnlyImmediate, 16),
        (0x06, WriteFirst, 28),
        (0x07, WriteMiddle, 12),
        (0x08, WriteLast, 12),
        (0x09, WriteLastImmediate, 16),
        (0x0A, WriteOnly, 28),
        (0x0B, WriteOnlyImmediate, 32),
        (0x0C, ReadRequest, 28),
        (0x0D, ReadResponseFirst, 16),
        (0x0E, ReadResponseMiddle, 12),
        (0x0F, ReadResponseLast, 16),
        (0x10, ReadResponseOnly, 16),
        (0x11, Acknowledge, 16),
        (0x12, AtomicAcknowledge, 24),
        (0x13, CompareSwap, 40),
        (0x14, FetchAdd, 40),
        (0x16, SendLastInvalidate, 16),
        (0x17, SendOnlyInvalidate, 16),
    ];
    let mut expected = Vec::new();
    for (opcode, operation, headers) in rc {
        expected.push((opcode, Rc, operation, headers));
        if opcode < 0x0C {
            expected.push((opcode + 0x20, Uc, operation, headers));
        }
    }
    expected.push((0x64, Ud, SendOnly, 20));
    expected.push((0x65, Ud, SendOnlyImmediate, 24));
    expected.push((0x81, Congestion, Notification, 12));
    for opcode in 0..=255 {
        let found = expected.iter().find(|entry| entry.0 == opcode);
        assert_eq!(Operation::decode(opcode), found.map(|entry| (entry.1, entry.2)), "{opcode:#04x}");
        if let Some((_, service, operation, headers)) = found {
            assert_eq!(operation.encode(*service), opcode);
            assert_eq!(operation.headers(*service), *headers, "{opcode:#04x}");
        }
    }
    assert_eq!(opcodes().len(), expected.len());
}

#[test]
fn a_notification_is_that_of_hardware() {
    let mut header = Header::new(Service::Congestion, Operation::Notification, 0x118, 0);
    header.becn = true;
    let bytes = written(&header, &[]);
    let mut expected = vec![0x81, 0x00, 0xFF, 0xFF, 0x40, 0x00, 0x01, 0x18, 0, 0, 0, 0];
    expected.extend([0; 16]);
    assert_eq!(bytes, expected);
}

#[test]
fn malformed_packets_are_named() {
    let good = written(&Header::new(Service::Rc, Operation::SendOnly, 1, 2), &[1, 2, 3]);
    assert!(Packet::parse(&good).is_ok());
    assert_eq!(Packet::parse(&good[..11]), Err(Invalid::Short));
    assert_eq!(Packet::parse(&good[..15]), Err(Invalid::Length));
    let mut bytes = good.clone();
    bytes[0] = 0x15;
    assert_eq!(Packet::parse(&bytes), Err(Invalid::Opcode(0x15)));
    bytes = good.clone();
    bytes[1] |= 1;
    assert_eq!(Packet::parse(&bytes), Err(Invalid::Version(1)));
    bytes = good[..12].to_vec();
    assert_eq!(Packet::parse(&bytes), Err(Invalid::Short), "a pad of one byte, and no byte");
    let mut bytes = written(&Header::new(Service::Rc, Operation::Acknowledge, 1, 2), &[]);
    bytes.extend([0; 4]);
    assert_eq!(Packet::parse(&bytes), Err(Invalid::Length));
}

fn addresses(ipv6: bool, vlan: Option<u16>, seed: u8) -> Addresses {
    let (source, destination) = if ipv6 {
        (
            IpAddr::V6(Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, u16::from(seed))),
            IpAddr::V6(Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 1, 2)),
        )
    } else {
        (IpAddr::V4(Ipv4Addr::new(10, 0, 0, seed)), IpAddr::V4(Ipv4Addr::new(10, 0, 1, 2)))
    };
    Addresses {
        source_mac: [2, 0, 0, 0, 0, seed],
        destination_mac: [2, 0, 0, 0, 1, 2],
        vlan,
        source,
        destination,
        traffic_class: seed,
        flow_label: if ipv6 { u32::from(seed) << 12 } else { 0 },
        hop_limit: 64,
        source_port: 0xC000 | u16::from(seed),
    }
}

fn framed(addresses: &Addresses, packet: &[u8]) -> Vec<u8> {
    let template = Template::new(addresses).expect("one family");
    let mut frame = vec![0; template.before() + packet.len() + 4];
    frame[template.before()..template.before() + packet.len()].copy_from_slice(packet);
    assert!(template.finish(&mut frame, 0x1234));
    frame
}

/// Frames equal the vectors below, from their IP header on.
#[test]
fn frames_are_those_of_the_specification() {
    let hex = |text: &str| -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    };
    let v1 = hex("4500003c123440004011df28c0a86401c0a86402 c00012b700280000
         0400ffff0000001180000001 526f4345763220746573742076656321 a41ad16e");
    let mut header = Header::new(Service::Rc, Operation::SendOnly, 0x11, 1);
    header.ack_request = true;
    let v4_addresses = Addresses {
        source: IpAddr::V4(Ipv4Addr::new(192, 168, 100, 1)),
        destination: IpAddr::V4(Ipv4Addr::new(192, 168, 100, 2)),
        traffic_class: 0,
        source_port: 49152,
        ..addresses(false, None, 1)
    };
    assert_eq!(framed(&v4_addresses, &written(&header, b"RoCEv2 test vec!"))[14..], v1);

    let v3 = hex("6021234500301140 fd000000000000000000000000000001 fd000000000000000000000000000002
         c12312b700300000 0a30ffff0012345680abcdef
         00007f00123456780badcafe00000005 68656c6c6f000000 ade918fa");
    let mut header = Header::new(Service::Rc, Operation::WriteOnly, 0x12_3456, 0xAB_CDEF);
    header.ack_request = true;
    header.reth = Reth { address: 0x7F00_1234_5678, rkey: 0x0BAD_CAFE, length: 5 };
    let v6_addresses = Addresses {
        source: IpAddr::V6(Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, 1)),
        destination: IpAddr::V6(Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, 2)),
        traffic_class: 2,
        flow_label: 0x12345,
        source_port: 0xC123,
        ..addresses(true, None, 1)
    };
    let frame = framed(&v6_addresses, &written(&header, b"hello"));
    assert_eq!(frame[14..], v3);
    let parsed = Frame::parse(&frame).unwrap();
    assert_eq!(parsed.addresses, v6_addresses);
    assert_eq!(parsed.receive_header(), v3[..40]);
    assert!(!parsed.congested);

    // A congestion mark on the way changes no ICRC. IPv4's checksum must change, though.
    let mut marked = vec![0; 14];
    marked[12..14].copy_from_slice(&[0x86, 0xDD]);
    marked.extend(&v3);
    marked[15] |= 0x30;
    assert!(Frame::parse(&marked).unwrap().congested);
}

#[test]
fn a_path_between_two_families_is_refused() {
    let mixed = Addresses { source: IpAddr::from([10, 0, 0, 1]), ..addresses(true, None, 1) };
    assert!(Template::new(&mixed).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(header in headers(), payload in prop::collection::vec(any::<u8>(), 0..300)) {
        let payload = if has_payload(header.operation) { &payload[..] } else { &[] };
        let bytes = written(&header, payload);
        let packet = Packet::parse(&bytes).unwrap();
        prop_assert_eq!(packet.payload, payload);
        // Fields that the operation doesn't have are not written: writing again gives the same bytes.
        prop_assert_eq!(&written(&packet.header, payload), &bytes);
        prop_assert_eq!(packet.header.psn, header.psn);
        prop_assert_eq!(packet.header.operation, header.operation);
        prop_assert_eq!(Packet::destination(&written(&header, payload)), Some(header.destination));
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Packet::parse(&bytes);
        let _ = Frame::parse(&bytes);
    }

    #[test]
    fn a_frame_is_taken_apart_as_it_was_made(
        header in headers(),
        payload in prop::collection::vec(any::<u8>(), 0..300),
        ipv6: bool,
        vlan in proptest::option::of(any::<u16>()),
        seed in 1u8..255,
        padding in 0usize..20,
    ) {
        let payload = if has_payload(header.operation) { &payload[..] } else { &[] };
        let packet = written(&header, payload);
        let addresses = addresses(ipv6, vlan, seed);
        let mut frame = framed(&addresses, &packet);
        // Short frames are padded on the wire.
        frame.extend(vec![0; padding]);
        let parsed = Frame::parse(&frame).unwrap();
        prop_assert_eq!(parsed.packet, &packet[..]);
        prop_assert_eq!(parsed.addresses, addresses);
        prop_assert_eq!(parsed.congested, seed & 3 == 3);
    }

    #[test]
    fn a_broken_frame_is_not_taken(
        payload in prop::collection::vec(any::<u8>(), 1..100),
        ipv6: bool,
        position in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let packet = written(&Header::new(Service::Rc, Operation::SendOnly, 5, 6), &payload);
        let good = framed(&addresses(ipv6, None, 1), &packet);
        let mut frame = good.clone();
        let at = position.index(frame.len());
        frame[at] ^= 1 << bit;
        match Frame::parse(&frame) {
            // MACs and fields outside of the ICRC may change: the packet is unchanged then, but for byte 4 of the BTH.
            Ok(parsed) => {
                let mut same = parsed.packet.to_vec();
                same[4] = packet[4];
                prop_assert_eq!(same, packet);
            }
            Err(NotTaken::Other | NotTaken::Malformed | NotTaken::Checksum | NotTaken::Icrc) => {}
        }
        let truncated = &good[..at];
        prop_assert!(Frame::parse(truncated).is_err());
    }
}
