//! A guest with frames that are constructed by hand, with an independent ICRC; some are the known-good vectors below.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dma::{Dma, HeapMemory};
use hca::attributes::{Access, QpAttributeMask as Mask, QpAttributes, QpKind, QpState};
use hca::names::{GSI, Gid, SegmentId};
use hca::work::{Operation, SendRequest, Status};
use hca_testbed::{Connected, World, mac, requests};
use roce::frame::Frame;
use roce::{Packet, icrc};

use super::super::super::directory::VmId;
use super::super::super::fabric::Fabric;
use super::super::super::{Directory, DirectoryReport, News, TransportKind, Transports};
use super::super::Wire;
use super::Side;

/// The ICRC bit by bit, from its definition (IBTA annex A17): independent of the tested code.
fn reference_icrc(ip_packet: &[u8]) -> [u8; 4] {
    let v4 = ip_packet[0] >> 4 == 4;
    let mut masked = ip_packet.to_vec();
    if v4 {
        for at in [1, 8, 10, 11, 26, 27, 32] {
            masked[at] = 0xFF;
        }
    } else {
        masked[0] |= 0xF;
        for at in [1, 2, 3, 7, 46, 47, 52] {
            masked[at] = 0xFF;
        }
    }
    let mut crc = u32::MAX;
    for byte in [0xFF; 8].iter().chain(&masked) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 };
        }
    }
    (!crc).to_le_bytes()
}

/// A frame around BTH to pad, constructed by hand: IPv4, with its checksum computed here.
fn by_hand(from: ([u8; 6], [u8; 4]), to: ([u8; 6], [u8; 4]), packet: &[u8]) -> Vec<u8> {
    let total = u16::try_from(20 + 8 + packet.len() + 4).unwrap();
    let mut ip = vec![0x45, 0, 0, 0, 0, 7, 0x40, 0, 64, 17, 0, 0];
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip.extend(from.1.iter().chain(&to.1));
    let mut sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    ip[10..12].copy_from_slice(&(!u16::try_from(sum).unwrap()).to_be_bytes());
    ip.extend([0xC0, 0, 0x12, 0xB7]);
    ip.extend((total - 20).to_be_bytes());
    ip.extend([0, 0]);
    ip.extend(packet);
    let icrc = reference_icrc(&ip);
    ip.extend(icrc);
    [&to.0[..], &from.0, &[8, 0], &ip].concat()
}

fn ipv4(text: &str) -> Gid {
    let IpAddr::V4(ip) = text.parse().unwrap() else { panic!() };
    Gid(ip.to_ipv6_mapped().octets())
}

const PEER: [u8; 6] = [2, 0, 0, 0, 0, 0xAA];

/// A side with a connected queue pair of this address, whose peer isn't Causeway's; PSNs begin at 1.
fn one_sided(own: &str, peer: &str, peer_qpn: u32) -> (Side, Connected) {
    let mut side = Side::new(1);
    side.world.engine.bind_gid(side.guest.device, 1, ipv4(own), mac(1)).unwrap();
    let qp = side.world.queue_pair(&side.guest.clone(), QpKind::Rc, None);
    let mut attributes = World::<HeapMemory>::attributes(ipv4(peer), hca::names::Qpn(peer_qpn));
    (attributes.rq_psn, attributes.sq_psn, attributes.timeout) = (1, 1, 14);
    (attributes.address.sgid_index, attributes.address.dmac) = (1, PEER);
    side.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
    side.round();
    (side, qp)
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// V1: RC SEND ONLY, 192.168.100.1 to .2, queue pair 0x11, PSN 1, with an acknowledgement requested.
const V1: &str = "4500003c123440004011df28c0a86401c0a86402 c00012b700280000 0400ffff0000001180000001 \
                  526f4345763220746573742076656321 a41ad16e";
/// V2: the same with other values in all fields outside of the ICRC, and with a congestion mark.
const V2: &str = "456b003c12344000071117bec0a86401c0a86402 c00012b7002855aa 0400ffffc000001180000001 \
                  526f4345763220746573742076656321 a41ad16e";
/// V4: an acknowledgement, 192.168.100.2 to .1, queue pair 0x12, PSN 1, MSN 1.
const V4: &str =
    "45000030000040004011f168c0a86402c0a86401 c00012b7001c0000 1100ffff0000001200000001 1f000001 6552b3be";

/// A vector, to an existing queue pair: the engine assigns its numbers. The ICRC is then the reference's, which must equal the vector's for
/// the unchanged vector.
fn addressed(vector: &str, qp: &Connected) -> Vec<u8> {
    let mut packet = hex(vector);
    let end = packet.len() - 4;
    assert_eq!(packet[end..], reference_icrc(&packet[..end]));
    packet[33..36].copy_from_slice(&qp.qp.qpn.0.to_be_bytes()[1..]);
    let icrc = reference_icrc(&packet[..end]);
    packet[end..].copy_from_slice(&icrc);
    [&mac(1)[..], &PEER, &[8, 0], &packet].concat()
}

/// From BTH to pad: `SEND ONLY` of four bytes with PSN 1, with an acknowledgement requested.
fn send_to(qp: &Connected) -> Vec<u8> {
    [&hex("0400ffff 00")[..], &qp.qp.qpn.0.to_be_bytes()[1..], &hex("80000001 61626364")].concat()
}

#[test]
fn the_specification_s_send_is_received_and_acknowledged() {
    let (mut side, qp) = one_sided("192.168.100.2", "192.168.100.1", 0x77);
    let buffer = side.sge(0x1000, 64);
    side.world.receive(&qp, 5, &[buffer]);
    assert!(side.give(&addressed(V1, &qp)));
    side.round();
    let done = qp.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.byte_len, done.status), (5, 16, Status::Success));
    assert_eq!(side.bytes(0x1000, 16), b"RoCEv2 test vec!");
    let frames = side.sent();
    let [ack] = frames.as_slice() else { panic!("{} frames", frames.len()) };
    assert_eq!((&ack[..6], &ack[6..12]), (&PEER[..], &mac(1)[..]));
    let ip = &ack[14..];
    assert_eq!(ip[ip.len() - 4..], reference_icrc(&ip[..ip.len() - 4]));
    let packet = &ip[28..ip.len() - 4];
    let expected = hex("1100ffff 00000077 00000001 00000001");
    assert_eq!((&packet[..12], &packet[13..]), (&expected[..12], &expected[13..]), "PSN 1, MSN 1");
    assert_eq!(packet[12] >> 5, 0, "an ACK");

    // Repeated, and marked by the network: no second completion, an acknowledgement, and a congestion notification for the sender.
    assert!(side.give(&addressed(V2, &qp)));
    side.round();
    assert!(qp.completions.poll().is_none());
    let codes: Vec<u8> = side.sent().iter().map(|frame| frame[14 + 28]).collect();
    assert!(codes.contains(&0x11) && codes.contains(&0x81), "{codes:x?}");
}

#[test]
fn the_specification_s_acknowledgement_completes_a_send() {
    let (mut side, qp) = one_sided("192.168.100.1", "192.168.100.2", 0x11);
    side.guest.memory.write(0, b"RoCEv2 test vec!").unwrap();
    let request = requests::send(9, &[side.sge(0, 16)]);
    side.world.send(&qp, request);
    side.round();
    let frames = side.sent();
    let [frame] = frames.as_slice() else { panic!("{} frames", frames.len()) };
    // Equals V1, except for what may differ: identification, ports' entropy, marks.
    let (ip, v1) = (&frame[14..], hex(V1));
    assert_eq!((ip.len(), &ip[12..20], &ip[22..24]), (v1.len(), &v1[12..20], &v1[22..24]));
    assert_eq!(ip[28..56], v1[28..56], "BTH and payload");
    assert_eq!((ip[1], ip[8], ip[20] >> 6), (2, 64, 3), "ECN-capable, hop limit, a port of 0xC000 or above");
    assert_eq!(ip[ip.len() - 4..], reference_icrc(&ip[..ip.len() - 4]));
    assert!(qp.completions.poll().is_none());
    assert!(side.give(&addressed(V4, &qp)));
    side.round();
    let done = qp.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.status), (9, Status::Success));
}

#[test]
fn strangers_and_wrong_numbers_are_dropped() {
    let (mut side, qp) = one_sided("192.168.100.2", "192.168.100.1", 0x77);
    let buffer = side.sge(0x1000, 64);
    side.world.receive(&qp, 5, &[buffer]);
    let (own, peer) = ([192, 168, 100, 2], [192, 168, 100, 1]);
    let send = send_to(&qp);
    let to_nobody = hex("0400ffff 00000099 80000001 61626364");
    let mad = [hex("6400ffff 00000001 00000000 80010000 00000001"), vec![0; 256]].concat();
    let none = [&hex("1800ffff 00")[..], &qp.qp.qpn.0.to_be_bytes()[1..], &hex("80000001")].concat();
    for (what, from, to, packet, counter) in [
        ("a stranger", [192, 168, 100, 9], own, &send, "wrong_peer"),
        ("one that claims to be the guest itself", own, own, &send, "wrong_peer"),
        ("to another address of the guest", peer, [10, 0, 0, 1], &send, "wrong_peer"),
        ("no such queue pair", peer, own, &to_nobody, "no_queue_pair"),
        ("a MAD without a queue pair for it", peer, own, &mad, "no_queue_pair"),
        ("no operation", peer, own, &none, "malformed"),
    ] {
        let before = side.counter(counter);
        assert!(
            side.give(&by_hand((PEER, from), (mac(1), to), packet)),
            "{what}: never the Ethernet function's"
        );
        side.round();
        assert_eq!(side.counter(counter), before + 1, "{what}");
        assert!(qp.completions.poll().is_none() && side.sent().is_empty(), "{what}");
    }
    // A wrong ICRC with everything else right.
    let mut frame = by_hand((PEER, peer), (mac(1), own), &send);
    *frame.last_mut().unwrap() ^= 1;
    assert!(side.give(&frame));
    side.round();
    assert_eq!((side.counter("icrc_errors"), qp.completions.waiting()), (1, 0));
    *frame.last_mut().unwrap() ^= 1;
    assert!(side.give(&frame));
    side.round();
    assert_eq!(qp.completions.poll().map(|done| done.byte_len), Some(4));
    // The address is removed: its frames are the Ethernet function's again.
    side.world.engine.unbind_gid(side.guest.device, 1, ipv4("192.168.100.2")).unwrap();
    side.round();
    assert!(!side.give(&frame));
}

/// V5: a datagram of 256 bytes to queue pair 1, 10.0.0.1 to 10.0.0.2, with the Q_Key of management.
fn v5() -> Vec<u8> {
    let mut packet = hex(
        "4500013400014000401125b60a0000010a000002 c00012b701200000 6400ffff0000000100000000 8001000000000001",
    );
    packet.extend(0..=255);
    packet.extend(hex("c3cdff26"));
    packet
}

#[test]
fn messages_of_the_connection_manager_pass() {
    const QKEY: u32 = 0x8001_0000;
    let (mut left, mut right) = (Side::new(1), Side::new(2));
    let gsi = |side: &mut Side| {
        let qp = side.world.queue_pair(&side.guest.clone(), QpKind::Gsi, None);
        let mut attributes = World::<HeapMemory>::attributes(Gid([0; 16]), GSI);
        attributes.qkey = QKEY;
        side.world.raise(qp.device, qp.qp.handle, QpKind::Gsi, QpState::ReadyToSend, &attributes);
        qp
    };
    let (at_left, at_right) = (gsi(&mut left), gsi(&mut right));
    // The vector for 10.0.0.2 arrives there.
    let buffer = right.sge(0x1000, 40 + 256);
    right.world.receive(&at_right, 1, &[buffer]);
    let frame = [&mac(2)[..], &PEER, &[8, 0], &v5()].concat();
    assert!(right.give(&frame));
    right.round();
    let done = at_right.completions.poll().unwrap();
    assert_eq!((done.byte_len, done.source), (40 + 256, Some(GSI)));
    assert_eq!(right.bytes(0x1000 + 20, 20), v5()[..20]);
    assert_eq!(right.bytes(0x1000 + 40, 256), (0..=255).collect::<Vec<u8>>());
    // A guest of Causeway sends the same.
    left.guest.memory.write(0, &(0..=255).collect::<Vec<u8>>()).unwrap();
    let mut request: SendRequest =
        requests::datagram(2, left.guest.pd.0, right.guest.gid, GSI, QKEY, &[left.sge(0, 256)]);
    let Operation::Send { datagram: Some(to), .. } = &mut request.operation else { panic!() };
    to.dmac = mac(2);
    left.world.send(&at_left, request);
    left.round();
    let frames = left.sent();
    let [frame] = frames.as_slice() else { panic!("{} frames", frames.len()) };
    let parsed = Frame::parse(frame).unwrap();
    let (sent, expected) = (Packet::parse(parsed.packet).unwrap(), v5());
    let expected = Packet::parse(&expected[28..expected.len() - icrc::LEN]).unwrap();
    assert_eq!(
        (sent.header.destination, sent.header.deth, sent.header.pkey, sent.payload),
        (expected.header.destination, expected.header.deth, expected.header.pkey, expected.payload)
    );
    right.world.receive(&at_right, 2, &[buffer]);
    assert!(right.give(frame));
    right.round();
    assert_eq!(at_right.completions.poll().map(|done| done.wr_id), Some(2));
}

#[test]
fn a_peer_that_never_answers_ends_in_retries_exceeded() {
    let (mut side, qp) = one_sided("192.168.100.2", "192.168.100.1", 0x77);
    let request = requests::send(1, &[side.sge(0, 8)]);
    side.world.send(&qp, request);
    let (mut now, mut frames) = (side.now(), 0);
    let done = loop {
        now += 10_000_000;
        assert!(now < 60_000_000_000);
        side.round_at(now);
        frames += side.sent().len();
        if let Some(done) = qp.completions.poll() {
            break done;
        }
    };
    assert_eq!(done.status, Status::RetryExceeded);
    // retry_count is 2.
    assert_eq!(frames, 3);
}

#[test]
fn a_queue_pair_that_is_reset_takes_a_new_peer() {
    let (mut side, qp) = one_sided("192.168.100.2", "192.168.100.1", 0x77);
    side.world
        .modify(
            qp.device,
            qp.qp.handle,
            Mask::empty(),
            &QpAttributes { state: QpState::Reset, ..World::<HeapMemory>::attributes(Gid([0; 16]), GSI) },
        )
        .unwrap();
    side.round();
    let mut attributes = World::<HeapMemory>::attributes(ipv4("192.168.100.7"), hca::names::Qpn(0x78));
    (attributes.rq_psn, attributes.address.sgid_index, attributes.address.dmac) = (1, 1, PEER);
    side.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
    let buffer = side.sge(0x1000, 64);
    side.world.receive(&qp, 6, &[buffer]);
    let send = send_to(&qp);
    for (from, taken) in [([192, 168, 100, 1], false), ([192, 168, 100, 7], true)] {
        assert!(side.give(&by_hand((PEER, from), (mac(1), [192, 168, 100, 2]), &send)));
        side.round();
        assert_eq!(qp.completions.poll().is_some(), taken);
    }
}

/// Knows 10.0.0.8, on another host, and may pin the VM here.
#[derive(Debug)]
struct OneVm(Option<TransportKind>);

impl Directory for OneVm {
    fn owner(&self, _: &str, gid: Gid) -> Option<VmId> {
        (gid == ipv4("10.0.0.8")).then_some(VmId(8))
    }

    fn vm(&self, name: &str) -> Option<VmId> {
        (name == "vm").then_some(VmId(1))
    }

    fn host(&self, _: VmId) -> Option<SocketAddr> {
        Some(SocketAddr::from(([127, 0, 0, 2], 4792)))
    }

    fn pin(&self, vm: VmId) -> Option<TransportKind> {
        self.0.filter(|_| vm == VmId(1))
    }

    fn hosts(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    fn mtu(&self) -> roce::Mtu {
        roce::Mtu::B1024
    }

    fn sockets(&self) -> u16 {
        1
    }

    fn tell(&self, _: News<'_>) {}

    fn report(&self) -> Option<DirectoryReport> {
        None
    }
}

#[test]
fn a_vm_of_the_directory_is_not_reached_by_wire_nor_does_it_come_by_it() {
    let mut side = Side::new(1);
    let mut transports = Transports::with(Arc::new(OneVm(None)), Fabric::closed(), Wire::new().unwrap());
    let (device, segment) = (side.guest.device, SegmentId(1));
    transports.attach(&mut side.world.engine, device, "vm", "s0", segment);
    transports.attach_wire(&mut side.world.engine, device, segment, Arc::clone(&side.port));
    side.transports = transports;
    side.round();
    for (peer, transport) in [("10.0.0.8", "fabric"), ("10.0.0.9", "wire")] {
        assert_eq!(side.transports.reaches(device, ipv4(peer)), Some(transport));
        let qp = side.world.queue_pair(&side.guest.clone(), QpKind::Rc, None);
        let mut attributes = World::<HeapMemory>::attributes(ipv4(peer), hca::names::Qpn(0x77));
        (attributes.rq_psn, attributes.address.dmac, attributes.timeout) = (1, PEER, 14);
        side.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
        let buffer = side.sge(0x1000, 64);
        side.world.receive(&qp, 1, &[buffer]);
        let from: [u8; 4] = ipv4(peer).0[12..].try_into().unwrap();
        assert!(side.give(&by_hand((PEER, from), (mac(1), [10, 0, 0, 1]), &send_to(&qp))));
        side.round();
        assert_eq!(qp.completions.poll().is_some(), transport == "wire");
        let request = requests::write(2, 0, 0, &[side.sge(0, 8)]);
        side.world.send(&qp, request);
        side.round();
        let report = side.transports.report(device, qp.qp.qpn).unwrap();
        assert_eq!((report.transport, report.host.is_some()), (transport, transport == "fabric"));
        assert_eq!(side.sent().is_empty(), transport == "fabric");
    }
    assert_eq!(side.counter("wrong_peer"), 1);
}

/// A pin excludes every other transport, for a guest's requests and for received packets.
#[test]
fn a_pin_holds_for_strangers_and_for_vms_of_the_directory() {
    let (stranger, known) = ("10.0.0.9", "10.0.0.8");
    for (pin, ways) in [
        (None, ["wire", "fabric"]),
        (Some(TransportKind::Wire), ["wire", "refused"]),
        (Some(TransportKind::Fabric), ["refused", "fabric"]),
        (Some(TransportKind::Local), ["refused", "refused"]),
        (Some(TransportKind::Verbs), ["refused", "refused"]),
    ] {
        let mut side = Side::new(1);
        let mut transports = Transports::with(Arc::new(OneVm(pin)), Fabric::closed(), Wire::new().unwrap());
        let (device, segment) = (side.guest.device, SegmentId(1));
        transports.attach(&mut side.world.engine, device, "vm", "s0", segment);
        transports.attach_wire(&mut side.world.engine, device, segment, Arc::clone(&side.port));
        side.transports = transports;
        side.round();
        for (peer, way) in [stranger, known].into_iter().zip(ways) {
            assert_eq!(side.transports.reaches(device, ipv4(peer)), Some(way), "{pin:?} {peer}");
            let qp = side.world.queue_pair(&side.guest.clone(), QpKind::Rc, None);
            let mut attributes = World::<HeapMemory>::attributes(ipv4(peer), hca::names::Qpn(0x77));
            (attributes.rq_psn, attributes.address.dmac, attributes.timeout) = (1, PEER, 14);
            side.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
            let buffer = side.sge(0x1000, 64);
            side.world.receive(&qp, 1, &[buffer]);
            let from: [u8; 4] = ipv4(peer).0[12..].try_into().unwrap();
            assert!(side.give(&by_hand((PEER, from), (mac(1), [10, 0, 0, 1]), &send_to(&qp))));
            side.round();
            assert_eq!(qp.completions.poll().is_some(), way == "wire", "{pin:?} {peer}");
            side.sent();
            let request = requests::write(2, 0, 0, &[side.sge(0, 8)]);
            side.world.send(&qp, request);
            side.round();
            assert_eq!(side.sent().is_empty(), way != "wire", "{pin:?} {peer}");
            let status = qp.completions.poll().map(|done| done.status);
            assert_eq!(status, (way == "refused").then_some(Status::LocalQpOperation), "{pin:?} {peer}");
        }
    }
}

#[test]
fn what_was_local_does_not_go_out_when_its_peer_vanishes() {
    let mut side = Side::new(1);
    let (first, second) = (side.guest.clone(), side.world.guest(HeapMemory::new(1 << 20)));
    let mr = side.world.register(&second, 0, 1 << 20, Access::all() - Access::ZERO_BASED);
    let qp = side.world.queue_pair(&first, QpKind::Rc, None);
    let peer = side.world.queue_pair(&second, QpKind::Rc, None);
    for (at, gid, to, number) in [(&qp, second.gid, &peer, 2), (&peer, first.gid, &qp, 1)] {
        let mut attributes = World::<HeapMemory>::attributes(gid, to.qp.qpn);
        (attributes.address.dmac, attributes.rq_psn, attributes.sq_psn) = (mac(number), 1, 1);
        side.world.raise(at.device, at.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
    }
    let request = requests::write(1, 0, mr.rkey, &[side.sge(0, 8)]);
    side.world.send(&qp, request.clone());
    side.round();
    assert_eq!(qp.completions.poll().map(|done| done.status), Some(Status::Success));
    // The other VM ends; its address is free then.
    side.world.engine.remove_device(second.device);
    side.round();
    let buffer = side.sge(0x1000, 64);
    side.world.receive(&qp, 2, &[buffer]);
    let second_ip: [u8; 4] = second.gid.0[12..].try_into().unwrap();
    assert!(side.give(&by_hand((PEER, second_ip), (mac(1), [10, 0, 0, 1]), &send_to(&qp))));
    side.round();
    assert_eq!((side.counter("no_queue_pair"), qp.completions.waiting()), (1, 0));
    side.world.send(&qp, request);
    let mut now = side.now();
    let done = loop {
        now += 10_000_000;
        assert!(now < 60_000_000_000);
        side.round_at(now);
        assert!(side.sent().is_empty());
        if let Some(done) = qp.completions.poll() {
            break done;
        }
    };
    assert_eq!(done.status, Status::RetryExceeded);
    // Connected again, it may have any peer.
    side.world
        .modify(
            qp.device,
            qp.qp.handle,
            Mask::empty(),
            &QpAttributes { state: QpState::Reset, ..World::<HeapMemory>::attributes(Gid([0; 16]), GSI) },
        )
        .unwrap();
    let mut attributes = World::<HeapMemory>::attributes(second.gid, hca::names::Qpn(0x77));
    attributes.address.dmac = PEER;
    side.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
    let request = requests::send(3, &[side.sge(0, 8)]);
    side.world.send(&qp, request);
    side.round_at(now);
    assert_eq!(side.sent().len(), 1);
}
