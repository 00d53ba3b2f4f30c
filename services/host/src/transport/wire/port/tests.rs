//! Frames for a port, and their processing: valid vectors, broken ones, and more than fit.

use std::net::IpAddr;

use super::super::BURST;
use super::{Address, Arc, Bell, Inbox, WirePort, wanted};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// An Ethernet frame around an IP packet.
fn framed(packet: &[u8]) -> Vec<u8> {
    let kind = if packet[0] >> 4 == 4 { [0x08, 0x00] } else { [0x86, 0xDD] };
    [&MAC[..], &[2, 0, 0, 0, 0, 1], &kind, packet].concat()
}

/// Known-good frames with their destinations; `wire/tests/frames.rs` describes them.
fn vectors() -> Vec<(Vec<u8>, IpAddr)> {
    let mut datagram = bytes(
        "4500013400014000401125b60a0000010a000002 c00012b701200000 6400ffff0000000100000000 8001000000000001",
    );
    datagram.extend(0..=255);
    datagram.extend(bytes("c3cdff26"));
    [
        (
            bytes(
                "4500003c123440004011df28c0a86401c0a86402 c00012b700280000 0400ffff0000001180000001 \
                 526f4345763220746573742076656321 a41ad16e",
            ),
            "192.168.100.2",
        ),
        (
            bytes(
                "456b003c12344000071117bec0a86401c0a86402 c00012b7002855aa 0400ffffc000001180000001 \
                 526f4345763220746573742076656321 a41ad16e",
            ),
            "192.168.100.2",
        ),
        (
            bytes(
                "6021234500301140 fd000000000000000000000000000001 fd000000000000000000000000000002 \
                 c12312b700300000 0a30ffff0012345680abcdef 00007f00123456780badcafe00000005 68656c6c6f000000 ade918fa",
            ),
            "fd00::2",
        ),
        (
            bytes(
                "45000030000040004011f168c0a86402c0a86401 c00012b7001c0000 1100ffff0000001200000001 1f000001 6552b3be",
            ),
            "192.168.100.1",
        ),
        (datagram, "10.0.0.2"),
        (
            bytes(
                "45c2003c718c4000401191610a0011010a001201 000012b700280000 8100ffff4000011800000000 \
                 00000000000000000000000000000000 82fd002a",
            ),
            "10.0.18.1",
        ),
    ]
    .into_iter()
    .map(|(packet, to)| (packet, to.parse().unwrap()))
    .collect()
}

fn open(ip: IpAddr) -> (Arc<WirePort>, Arc<Bell>) {
    let (port, bell) = (Arc::new(WirePort::default()), Arc::new(Bell::new().unwrap()));
    port.open(Arc::clone(&bell));
    port.set_addresses(std::iter::once(Address { ip, mac: MAC }));
    (port, bell)
}

fn offer(port: &Arc<WirePort>, frame: &[u8]) -> bool {
    let mut end = port.end();
    let wants = end.wants(&frame[..frame.len().min(256)]);
    if wants {
        end.take(frame);
    }
    wants
}

fn count(counter: u64) -> usize {
    usize::try_from(counter).unwrap()
}

fn drained(port: &WirePort) -> Vec<Vec<u8>> {
    let mut inbox = Inbox::default();
    port.drain(&mut inbox);
    inbox.packets().map(|(_, packet)| packet.to_vec()).collect()
}

#[test]
fn the_specification_s_packets_are_taken_and_their_icrc_is_checked() {
    for (packet, to) in vectors() {
        let (port, bell) = open(to);
        let network = if packet[0] >> 4 == 4 { 20 } else { 40 };
        assert!(offer(&port, &framed(&packet)));
        assert!(bell.take() && !bell.take());
        let mut inbox = Inbox::default();
        port.drain(&mut inbox);
        let (arrived, got) = inbox.packets().next().unwrap();
        assert_eq!(got, &packet[network + 8..packet.len() - 4], "BTH to pad");
        assert_eq!(arrived.header[40 - network..], packet[..network]);
        assert!(arrived.header[..40 - network].iter().all(|byte| *byte == 0));
        assert_eq!((arrived.destination, arrived.congested), (to, packet[1] & 3 == 3 && network == 20));

        // Padding of the link isn't part of it.
        assert!(offer(&port, &[&framed(&packet)[..], &[0; 9]].concat()));
        assert_eq!((port.counters.icrc_errors.get(), port.counters.malformed.get()), (0, 0));
        assert_eq!(drained(&port).len(), 1);

        // Any bit of the packet (except FECN, BECN and the reserved six beside them), and of the ICRC.
        for at in network + 8..packet.len() {
            let mut broken = packet.clone();
            broken[at] ^= 0x10;
            assert!(offer(&port, &framed(&broken)));
            let taken = !drained(&port).is_empty();
            assert_eq!(taken, at == network + 8 + 4, "byte {at}");
        }
        assert_eq!(count(port.counters.icrc_errors.get()), packet.len() - network - 8 - 1);
        assert!(bell.take());
    }
}

#[test]
fn what_is_none_of_its_frames_stays_the_ethernet_function_s() {
    let (packet, to) = vectors().swap_remove(0);
    let (port, _) = open(to);
    let frame = framed(&packet);
    let changed = |at: usize, value: u8| {
        let mut frame = frame.clone();
        frame[at] = value;
        frame
    };
    for (what, frame) in [
        ("another MAC", changed(5, 9)),
        ("another type", changed(13, 6)),
        ("another address", changed(33, 9)),
        ("TCP", changed(23, 6)),
        ("options", changed(14, 0x46)),
        ("a first fragment", changed(20, 0x20)),
        ("a later fragment", changed(21, 1)),
        ("another port", changed(37, 0xB8)),
        ("VLAN", [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()),
    ] {
        assert!(!offer(&port, &frame), "{what}");
    }
    for len in 0..38 {
        assert_eq!(wanted(&frame[..len]), None);
    }
    assert_eq!(port.counters.packets_received.get(), 0);
    // Frames that can only be for the RDMA function, and are invalid.
    for len in 38..frame.len() {
        assert!(offer(&port, &frame[..len]));
    }
    let wrong_checksum = changed(24, 0);
    assert!(offer(&port, &wrong_checksum));
    assert_eq!(count(port.counters.malformed.get()), frame.len() - 38 + 1);
    assert!(drained(&port).is_empty());
    // Without the RDMA function, or without that address, frames pass as if there were no port.
    port.set_addresses(std::iter::empty());
    assert!(!offer(&port, &frame));
    port.set_addresses(std::iter::once(Address { ip: to, mac: MAC }));
    assert!(offer(&port, &frame));
    port.close();
    assert!(!offer(&port, &frame) && drained(&port).is_empty());
}

#[test]
fn boxes_are_bounded() {
    let (packet, to) = vectors().swap_remove(4);
    let (port, bell) = open(to);
    let frame = framed(&packet);
    for _ in 0..20_000 {
        assert!(offer(&port, &frame));
    }
    let waiting = drained(&port);
    assert_eq!(count(port.counters.receive_overruns.get()), 20_000 - waiting.len());
    let bytes: usize = waiting.iter().map(Vec::len).sum();
    assert!(bytes > super::INBOX / 2 && bytes <= super::INBOX, "{bytes}");
    assert!(bell.take());
    // There is room again.
    assert!(offer(&port, &frame));
    assert_eq!(drained(&port).len(), 1);

    // In the other direction: without an Ethernet function nothing is kept, and with one that doesn't poll no more than fits.
    port.send(std::iter::repeat_n(frame.as_slice(), 10));
    assert_eq!((port.counters.send_drops.get(), port.counters.packets_sent.get()), (10, 0));
    port.connect(Box::new(|| {}));
    assert!(port.has_room(BURST));
    port.send(std::iter::repeat_n(frame.as_slice(), 20_000));
    assert!(!port.has_room(BURST));
    let sent = port.counters.packets_sent.get();
    assert_eq!(port.counters.send_drops.get(), 10 + 20_000 - sent);
    let mut end = port.end();
    let (mut out, mut frames, mut bytes) = (Vec::new(), 0, 0);
    while end.next(&mut out) {
        assert_eq!(out, frame);
        out.clear();
        frames += 1;
        bytes += frame.len();
    }
    assert_eq!(frames, sent);
    assert!(bytes > super::OUTBOX / 2 && bytes <= super::OUTBOX);
    assert!(port.has_room(BURST));
    port.send(std::iter::once(frame.as_slice()));
    port.disconnect();
    assert!(!port.end().next(&mut out), "what a segment that is gone didn't take");
}

#[test]
fn arbitrary_bytes_do_no_harm() {
    let (packet, to) = vectors().swap_remove(2);
    let (port, _) = open(to);
    let frame = framed(&packet);
    let mut state = 1_u64;
    let mut dice = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(state >> 33).unwrap()
    };
    for _ in 0..200_000 {
        let mut hostile = frame.clone();
        hostile.truncate(dice() % (frame.len() + 1));
        for _ in 0..dice() % 4 {
            if !hostile.is_empty() {
                let at = dice() % hostile.len();
                hostile[at] = u8::try_from(dice() % 256).unwrap();
            }
        }
        offer(&port, &hostile);
        drained(&port);
    }
    assert!(port.counters.malformed.get() > 0 && port.counters.icrc_errors.get() > 0);
}
