//! Real traffic through a real tap in a network namespace of the test's own, with the mock driver as the
//! guest. Needs root.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use super::*;
use crate::net::{Backend, NetConfig};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// Runs `test` on a thread in a new network namespace, or reports why not.
fn in_own_namespace(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        use rustix::thread::{UnshareFlags, unshare_unsafe};
        // Only this thread moves: the namespace lives as long as it.
        #[allow(unsafe_code)]
        // SAFETY: a network namespace of the thread's own shares no memory or descriptors differently.
        let moved = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
        if let Err(error) = moved {
            facilities::missing(
                facilities::Facility::Root,
                format!("a network namespace needs root: {error}"),
            );
            return;
        }
        if !std::path::Path::new("/dev/net/tun").exists() {
            facilities::missing(facilities::Facility::Tun, "there is no /dev/net/tun");
            return;
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn ip(arguments: &str) {
    let output = std::process::Command::new("ip").args(arguments.split(' ')).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A guest over tap `cwtest`, with an address on the host's side.
fn tap_guest(pairs: u16, features: u64) -> (Guest, [u8; 6]) {
    let config = NetConfig {
        name: "net0".to_owned(),
        backend: Backend::Tap { ifname: "cwtest".to_owned() },
        mac: Some(MacAddress(GUEST_MAC)),
        queue_pairs: pairs,
        mtu: None,
    };
    let net = Net::open(config).expect("the tap opens");
    ip("addr add 10.77.0.1/24 dev cwtest");
    ip("neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev cwtest");
    let features = testbed::RINGS | (features & net.features());
    let mut guest = Guest::new(net, pairs, features);
    guest.activate();
    (guest, host_mac())
}

fn host_mac() -> [u8; 6] {
    let output =
        std::process::Command::new("ip").args(["-o", "link", "show", "cwtest"]).output().expect("ip runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mac = text.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next()).expect("an address");
    mac.parse::<MacAddress>().unwrap().0
}

/// One's complement sum.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let mut total = start;
    for pair in bytes.chunks(2) {
        total += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        total = (total & 0xffff) + (total >> 16);
    }
    u16::try_from((total & 0xffff) + (total >> 16)).unwrap()
}

fn pseudo(protocol: u8, source: Ipv4Addr, destination: Ipv4Addr, length: usize) -> u32 {
    let mut bytes = [source.octets(), destination.octets()].concat();
    bytes.extend([0, protocol]);
    bytes.extend(u16::try_from(length).unwrap().to_be_bytes());
    u32::from(sum(&bytes, 0))
}

/// An IPv4 frame from the guest around `segment`, whose checksum field is unchanged.
fn ipv4(to: [u8; 6], protocol: u8, segment: &[u8]) -> Vec<u8> {
    let mut bytes = to.to_vec();
    bytes.extend(GUEST_MAC);
    bytes.extend([8, 0]);
    let mut header = vec![0x45, 0];
    header.extend(u16::try_from(20 + segment.len()).unwrap().to_be_bytes());
    header.extend([0, 1, 0x40, 0, 64, protocol, 0, 0]);
    header.extend(GUEST.octets());
    header.extend(HOST.octets());
    let check = !sum(&header, 0);
    header[10..12].copy_from_slice(&check.to_be_bytes());
    bytes.extend(header);
    bytes.extend(segment);
    bytes
}

fn udp(payload: &[u8], source: u16, destination: u16) -> Vec<u8> {
    let length = 8 + payload.len();
    let mut segment = Vec::new();
    segment.extend(source.to_be_bytes());
    segment.extend(destination.to_be_bytes());
    segment.extend(u16::try_from(length).unwrap().to_be_bytes());
    // A partial checksum: the field holds the sum of the pseudo-header (NEEDS_CSUM).
    let partial = sum(&[], pseudo(17, GUEST, HOST, length));
    segment.extend(partial.to_be_bytes());
    segment.extend(payload);
    segment
}

/// Receives the next frame for the guest, over one or more buffers, and posts them again.
fn next_frame(
    guest: &mut Guest,
    slots: &mut std::collections::VecDeque<u64>,
) -> Option<(VnetHeader, Vec<u8>)> {
    let start = Instant::now();
    let driver = &mut guest.receive[0];
    let (_, written) = loop {
        if let Some(used) = driver.pop_used() {
            break used;
        }
        if start.elapsed() > Duration::from_secs(5) {
            return None;
        }
        std::thread::sleep(Duration::from_micros(20));
    };
    let at = slots.pop_front().unwrap();
    let mut bytes = driver.get(at, written as usize);
    let header = VnetHeader::parse(bytes[..12].try_into().unwrap());
    let mut again = vec![at];
    for _ in 1..header.num_buffers {
        let (_, written) = driver.pop_used().expect("the buffers of one frame come together");
        let at = slots.pop_front().unwrap();
        bytes.extend(driver.get(at, written as usize));
        again.push(at);
    }
    for at in again {
        driver.push(&[(at, 2048, true)]).unwrap();
        slots.push_back(at);
    }
    driver.kick();
    Some((header, bytes.split_off(12)))
}

fn post_all(guest: &mut Guest) -> std::collections::VecDeque<u64> {
    guest.post(0, BUFFERS, 256, 2048);
    (0..256).map(|slot| BUFFERS + slot * 2048).collect()
}

#[test]
fn udp_with_checksum_offload_arrives_at_a_host_socket_and_answers_come_back() {
    in_own_namespace(|| {
        let (mut guest, host) = tap_guest(1, OFFLOADS | MERGEABLE);
        let mut slots = post_all(&mut guest);
        let socket = UdpSocket::bind((HOST, 4000)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut bytes = [0; 2000];
        for number in 0..200u32 {
            let payload = frame(number, 1 + number as usize * 7);
            let header = VnetHeader { flags: 1, csum_start: 34, csum_offset: 6, ..Default::default() };
            let at = BUFFERS + 0x20_0000;
            guest.queue_frame(0, at, header, &ipv4(host, 17, &udp(&payload, 5000, 4000)));
            guest.transmit[0].kick();
            guest.transmit[0].wait_used();
            let (length, from) = socket.recv_from(&mut bytes).expect("the kernel found the checksum right");
            assert_eq!(from, SocketAddr::from((GUEST, 5000)));
            assert!(bytes[..length] == payload, "datagram {number} differs");
            socket.send_to(&payload, from).unwrap();
            let got = loop {
                let (_, frame) = next_frame(&mut guest, &mut slots).expect("an answer");
                if frame.len() >= 42 && frame[12..14] == [8, 0] && frame[23] == 17 {
                    break frame;
                }
            };
            assert!(got[42..] == payload, "answer {number} differs");
        }
        assert_eq!(guest.counter("transmit_drop") + guest.counter("transmit_errs"), 0);
    });
}

/// The part of TCP that the guest's side of a test needs.
struct Tcp {
    host: [u8; 6],
    port: u16,
    sequence: u32,
    acknowledge: u32,
}

impl Tcp {
    fn segment(&self, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut segment = Vec::new();
        segment.extend(6000u16.to_be_bytes());
        segment.extend(self.port.to_be_bytes());
        segment.extend(self.sequence.to_be_bytes());
        segment.extend(self.acknowledge.to_be_bytes());
        segment.extend([0x50, flags]);
        segment.extend(0xffffu16.to_be_bytes());
        let partial = sum(&[], pseudo(6, GUEST, HOST, 20 + payload.len()));
        segment.extend(partial.to_be_bytes());
        segment.extend([0, 0]);
        segment.extend(payload);
        segment
    }

    fn send(&self, guest: &mut Guest, flags: u8, payload: &[u8]) {
        let mut header = VnetHeader { flags: 1, csum_start: 34, csum_offset: 16, ..Default::default() };
        if payload.len() > 1460 {
            header.gso_type = 1;
            header.gso_size = 1460;
            header.hdr_len = 54;
        }
        let bytes = ipv4(self.host, 6, &self.segment(flags, payload));
        guest.queue_frame(0, BUFFERS + 0x20_0000, header, &bytes);
        guest.transmit[0].kick();
        guest.transmit[0].wait_used();
    }
}

const SYN: u8 = 2;
const ACK: u8 = 16;
const PSH_ACK: u8 = 24;

/// The next TCP segment to the guest: header, flags, sequence, acknowledgement, payload.
fn next_tcp(
    guest: &mut Guest,
    slots: &mut std::collections::VecDeque<u64>,
) -> Option<(VnetHeader, u8, u32, u32, Vec<u8>)> {
    loop {
        let (header, bytes) = next_frame(guest, slots)?;
        if bytes.len() < 54 || bytes[12..14] != [8, 0] || bytes[23] != 6 {
            continue;
        }
        let total = usize::from(u16::from_be_bytes([bytes[16], bytes[17]]));
        let tcp = &bytes[34..14 + total];
        if header.flags & 1 == 0 && header.gso_type == 0 {
            let check = sum(tcp, pseudo(6, HOST, GUEST, tcp.len()));
            assert_eq!(check, 0xffff, "a finished frame has a right checksum");
        }
        let word = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
        let offset = usize::from(tcp[12] >> 4) * 4;
        return Some((header, tcp[13], word(4), word(8), tcp[offset..].to_vec()));
    }
}

/// Connects, sends `bulk` bytes to the host in segmentation-offloaded frames, and receives as many.
fn tcp_both_ways(features: u64, bulk: usize) -> (Guest, u64) {
    let (mut guest, host) = tap_guest(1, features);
    let mut slots = post_all(&mut guest);
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut received = vec![0; bulk];
        stream.read_exact(&mut received).unwrap();
        assert!(received == frame(7, bulk), "the bytes that the host received differ");
        stream.write_all(&frame(8, bulk)).unwrap();
        received.len()
    });
    let mut tcp = Tcp { host, port, sequence: 1000, acknowledge: 0 };
    tcp.send(&mut guest, SYN, &[]);
    let (_, flags, sequence, acknowledged, _) = next_tcp(&mut guest, &mut slots).expect("SYN and ACK");
    assert_eq!((flags, acknowledged), (SYN | ACK, 1001));
    tcp.sequence = 1001;
    tcp.acknowledge = sequence.wrapping_add(1);
    tcp.send(&mut guest, ACK, &[]);
    let offload = features & 1 << b::VIRTIO_NET_F_HOST_TSO4 != 0;
    let step = if offload { 14_600 } else { 1460 };
    let data = frame(7, bulk);
    let base = tcp.sequence;
    for chunk in data.chunks(step) {
        tcp.send(&mut guest, PSH_ACK, chunk);
        tcp.sequence = tcp.sequence.wrapping_add(u32::try_from(chunk.len()).unwrap());
        let mut acknowledged = base;
        while acknowledged != tcp.sequence {
            (_, _, _, acknowledged, _) = next_tcp(&mut guest, &mut slots).expect("an acknowledgement");
        }
    }
    let (mut got, mut merged) = (Vec::new(), 0);
    while got.len() < bulk {
        let (header, _, sequence, _, payload) = next_tcp(&mut guest, &mut slots).expect("bulk data");
        if payload.is_empty() || sequence != tcp.acknowledge {
            continue;
        }
        merged = merged.max(u64::from(header.num_buffers));
        tcp.acknowledge = tcp.acknowledge.wrapping_add(u32::try_from(payload.len()).unwrap());
        got.extend(payload);
        tcp.send(&mut guest, ACK, &[]);
    }
    assert!(got == frame(8, bulk), "the bytes that the guest received differ");
    assert_eq!(server.join().unwrap(), bulk);
    (guest, merged)
}

#[test]
fn tcp_with_segmentation_offload_carries_bulk_data_both_ways() {
    in_own_namespace(|| {
        let (guest, merged) = tcp_both_ways(OFFLOADS | MERGEABLE, 400_000);
        assert!(merged > 1, "frames from the host were segmentation-offloaded");
        assert_eq!(guest.counter("transmit_drop") + guest.counter("transmit_errs"), 0);
        assert!(guest.counter("transmit_bytes") > 400_000);
    });
}

#[test]
fn tcp_without_receive_offloads_has_checksums_filled_in_by_the_host() {
    in_own_namespace(|| {
        let features = 1 << b::VIRTIO_NET_F_CSUM;
        let (guest, merged) = tcp_both_ways(features, 100_000);
        assert_eq!(merged, 1);
        assert_eq!(guest.counter("receive_drop"), 0);
    });
}

#[test]
fn a_tap_with_several_queues_attaches_and_detaches_them() {
    in_own_namespace(|| {
        let control = 1 << b::VIRTIO_NET_F_CTRL_VQ | 1 << b::VIRTIO_NET_F_MQ;
        let (mut guest, host) = tap_guest(4, OFFLOADS | MERGEABLE | control);
        let socket = UdpSocket::bind((HOST, 4000)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let at = BUFFERS + 0x80_0000;
        for pairs in [4u8, 1, 3, 2, 4] {
            guest.control.put(at, &[4, 0, pairs, 0]);
            guest.control.push(&[(at, 4, false), (at + 64, 1, true)]).unwrap();
            guest.control.kick();
            guest.control.wait_used();
            assert_eq!(guest.control.get(at + 64, 1), [0]);
            for pair in 0..usize::from(pairs) {
                let header = VnetHeader { flags: 1, csum_start: 34, csum_offset: 6, ..Default::default() };
                let payload = frame(u32::from(pairs), 300);
                guest.queue_frame(pair, BUFFERS, header, &ipv4(host, 17, &udp(&payload, 5000, 4000)));
                guest.transmit[pair].kick();
                guest.transmit[pair].wait_used();
                let mut bytes = [0; 400];
                let (length, _) = socket.recv_from(&mut bytes).expect("a datagram over every queue");
                assert!(bytes[..length] == payload);
            }
        }
        assert_eq!(guest.interrupt.failure(), None);
        assert_eq!(guest.net.inspect()["link_up"], true);
    });
}

#[test]
fn a_deleted_tap_takes_the_link_down() {
    in_own_namespace(|| {
        let (mut guest, _) = tap_guest(1, OFFLOADS | MERGEABLE);
        post_all(&mut guest);
        ip("link del cwtest");
        let start = Instant::now();
        while guest.net.inspect()["link_up"] == true {
            assert!(start.elapsed() < Duration::from_secs(5), "the loss goes unnoticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(guest.interrupt.failure(), None);
    });
}

#[test]
fn taps_that_can_not_be_used_are_explained() {
    in_own_namespace(|| {
        let open = |pairs| {
            let config = NetConfig {
                name: "net0".to_owned(),
                backend: Backend::Tap { ifname: "cwtest".to_owned() },
                mac: None,
                queue_pairs: pairs,
                mtu: Some(9000),
            };
            Net::open(config)
        };
        ip("tuntap add cwtest mode tap");
        let text = open(1).err().expect("the MTU is too large").to_string();
        assert_eq!(
            text,
            "Tap cwtest has an MTU of 1500, less than the 9000 asked for; raise it with: ip link set cwtest mtu 9000"
        );
        ip("link set cwtest mtu 9000");
        let text = open(2).err().expect("it has one queue").to_string();
        assert!(text.contains("it was created for one queue"), "{text}");
        let tuned = Net::open(NetConfig {
            name: "net0".to_owned(),
            backend: Backend::Tap { ifname: "lo".to_owned() },
            mac: None,
            queue_pairs: 2,
            mtu: None,
        });
        assert!(matches!(tuned, Err(crate::net::NetError::NotATap { .. })));
        let first = open(1).expect("the tap opens");
        let text = open(1).err().expect("it is in use").to_string();
        assert_eq!(text, "Tap cwtest can't be used: another process has it open");
        drop(first);
        ip("link del cwtest");
        ip("tuntap add cwtest mode tap multi_queue");
        ip("link set cwtest mtu 9000");
        open(1).expect("one queue of a tap that may have several");
        open(4).expect("several queues");
    });
}
