//! Frames through a segment, with driver models at both ends.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dma::{Dma, HeapMemory};
use proptest::prelude::*;
use vmxnet3::registers::command;
use vmxnet3::segment::AttachError;
use vmxnet3::{
    Companion, FramePort, MacAddress, Offload, PortId, PortRules, Segment, SegmentConfig, Vmxnet3,
    Vmxnet3Config,
};
use vmxnet3_testbed::{
    CountedInterrupts, Driver, DriverOptions, FrameSpec, ReceivedFrame, TransmitRequest, checksums_are_good,
    ethernet,
};

/// Packets that a port may send in a turn.
const TURN_PACKETS: usize = 64;

const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
const B: [u8; 6] = [2, 0, 0, 0, 0, 2];

struct Guest {
    id: PortId,
    memory: HeapMemory,
    driver: Driver<HeapMemory>,
    interrupts: CountedInterrupts,
}

struct Net {
    segment: Segment<HeapMemory>,
    guests: Vec<Guest>,
}

impl Net {
    fn new(options: &[(DriverOptions, PortRules)]) -> Self {
        let mut segment = Segment::new(SegmentConfig { waiting_frames: 8, ..SegmentConfig::new("test") });
        let guests = (1..)
            .zip(options)
            .map(|(last, (options, rules))| {
                let memory = HeapMemory::new(options.memory_needed());
                let interrupts = CountedInterrupts::default();
                let config = Vmxnet3Config {
                    name: format!("nic{last}"),
                    mac: MacAddress([2, 0, 0, 0, 0, last]),
                    link_mbps: 10_000,
                };
                let mut device = Vmxnet3::new(config, Box::new(interrupts.clone()));
                device.set_memory(Some(memory.clone()));
                let mut driver = Driver::new(memory.clone(), 0, options.clone());
                assert_eq!(driver.open(&mut device), 0);
                Guest { id: segment.attach_device(device, *rules).unwrap(), memory, driver, interrupts }
            })
            .collect();
        Self { segment, guests }
    }

    fn two() -> Self {
        Self::new(&[(DriverOptions::default(), PortRules::default()), Default::default()])
    }

    fn send(&mut self, from: usize, frame: &[u8], request: &TransmitRequest) -> bool {
        let guest = &mut self.guests[from];
        guest.driver.send(self.segment.device(guest.id).unwrap(), frame, request)
    }

    fn serve(&mut self) {
        while self.segment.serve(Duration::ZERO) {}
    }

    fn receive(&mut self, at: usize) -> Vec<ReceivedFrame> {
        let guest = &mut self.guests[at];
        let frames = guest.driver.receive(self.segment.device(guest.id).unwrap());
        guest.driver.unmask(self.segment.device(guest.id).unwrap());
        frames
    }

    fn counter(&mut self, at: usize, name: &str) -> u64 {
        self.segment.device(self.guests[at].id).unwrap().counters().value(name).unwrap()
    }
}

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

fn tcp(payload: usize) -> FrameSpec {
    FrameSpec {
        to: B,
        from: A,
        v6: false,
        udp: false,
        vlan: None,
        options: 3,
        flags: 0x98,
        sequence: 1000,
        id: 7,
        payload: (0..=255).cycle().take(payload).collect(),
    }
}

/// Frames in flight.
type Frames = Arc<Mutex<VecDeque<(Vec<u8>, Offload)>>>;

/// A port that keeps received frames, and sends frames from the test.
#[derive(Clone, Default)]
struct Wire {
    out: Frames,
    coming: Frames,
    finishes: bool,
}

impl FramePort for Wire {
    fn receive(&mut self, frame: &mut Vec<u8>) -> io::Result<Option<Offload>> {
        Ok(self.coming.lock().unwrap().pop_front().map(|(bytes, offload)| {
            frame.extend(bytes);
            offload
        }))
    }

    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<()> {
        self.out.lock().unwrap().push_back((frame.to_vec(), offload));
        Ok(())
    }

    fn finishes(&self) -> bool {
        self.finishes
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_plain_frame_goes_straight_from_guest_to_guest() {
    let mut net = Net::two();
    let frame = ethernet(B, A, &[0x5A; 1400]);
    assert!(net.send(0, &frame, &TransmitRequest { cuts: vec![14, 100, 700], ..Default::default() }));
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 1);
    let received = net.receive(1);
    assert_eq!(received, [ReceivedFrame { bytes: frame, vlan: None, good: false, pieces: 1 }]);
    assert_eq!(net.counter(1, "direct_bytes"), 1414 - 256);
    assert_eq!(net.counter(1, "rx_bytes"), 1414);
    assert_eq!(net.counter(0, "tx_packets"), 1);
    assert_eq!(net.guests[1].interrupts.count(0), 1);
    assert_eq!(net.guests[0].interrupts.count(0), 1);
}

#[test]
fn a_checksum_is_made_on_the_way_and_called_good() {
    for (v6, udp) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut net = Net::two();
        let spec = FrameSpec { v6, udp, ..tcp(1000) };
        let request = TransmitRequest { offload: spec.checksum_offload(), ..Default::default() };
        assert!(net.send(0, &spec.partial(), &request));
        net.serve();
        let received = net.receive(1);
        assert_eq!(received.len(), 1);
        assert_eq!(received[0].bytes, spec.complete());
        assert!(received[0].good);
    }
}

#[test]
fn an_end_station_may_be_given_a_frame_with_its_checksum_undone() {
    let rules = PortRules { partial_checksums: true, ..PortRules::default() };
    let mut net = Net::new(&[Default::default(), (DriverOptions::default(), rules)]);
    let spec = tcp(1000);
    let request = TransmitRequest { offload: spec.checksum_offload(), ..Default::default() };
    assert!(net.send(0, &spec.partial(), &request));
    net.serve();
    let received = net.receive(1);
    assert_eq!(received[0].bytes, spec.partial());
    assert!(received[0].good);
    assert!(net.counter(1, "direct_bytes") > 0);
    // A checksum of another protocol isn't TCP's, and is computed.
    let offload = Offload::Checksum { start: 40, at: 42 };
    assert!(net.send(0, &spec.complete(), &TransmitRequest { offload, ..Default::default() }));
    net.serve();
    let received = net.receive(1);
    assert!(!received[0].good);
    assert_ne!(received[0].bytes, spec.complete());
    // A guest that verifies checksums itself gets complete ones.
    let guest = &mut net.guests[1];
    guest.driver.options.features = 0;
    guest.driver.write_features();
    guest.driver.command(net.segment.device(guest.id).unwrap(), command::UPDATE_FEATURE);
    assert!(net.send(0, &spec.partial(), &request));
    net.serve();
    assert_eq!(net.receive(1)[0].bytes, spec.complete());
}

#[test]
fn a_vlan_tag_is_inserted_and_taken_out_or_left_in() {
    let vlans = DriverOptions { vlans: vec![100], ..DriverOptions::default() };
    let mut net = Net::new(&[Default::default(), (vlans.clone(), PortRules::default())]);
    let spec = tcp(600);
    let request =
        TransmitRequest { offload: spec.checksum_offload(), vlan: Some(0x2000 | 100), ..Default::default() };
    assert!(net.send(0, &spec.partial(), &request));
    net.serve();
    let received = net.receive(1);
    assert_eq!(received[0].vlan, Some(0x2000 | 100));
    assert_eq!(received[0].bytes, spec.complete());
    assert!(received[0].good);
    let keep = DriverOptions { features: 0, ..vlans };
    let mut net = Net::new(&[Default::default(), (keep, PortRules::default())]);
    let plain = ethernet(B, A, &[3; 400]);
    assert!(net.send(0, &plain, &TransmitRequest { vlan: Some(100), ..Default::default() }));
    net.serve();
    let received = net.receive(1);
    assert_eq!(received[0].vlan, None);
    assert_eq!(received[0].bytes, [&plain[..12], &[0x81, 0, 0, 100], &plain[12..]].concat());
    // A VLAN that the guest has not joined doesn't reach it.
    assert!(net.send(0, &plain, &TransmitRequest { vlan: Some(101), ..Default::default() }));
    net.serve();
    assert_eq!(net.receive(1), []);
}

#[test]
fn large_packets_are_cut_for_guests_and_left_whole_for_taps() {
    let mut net = Net::two();
    let wire = Wire { finishes: true, ..Wire::default() };
    let any = PortRules { any_source: true, ..PortRules::default() };
    net.segment.attach_port("tap", Box::new(wire.clone()), any).unwrap();
    let spec = tcp(20_000);
    assert!(net.send(0, &spec.large(), &spec.large_request(1400)));
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 1);
    let received = net.receive(1);
    let bytes: Vec<_> = received.iter().map(|frame| frame.bytes.clone()).collect();
    assert_eq!(bytes, spec.segments(1400));
    assert!(received.iter().all(|frame| frame.good));
    // To an unknown station: the guest's filter drops it, the tap gets it whole.
    let spec = FrameSpec { to: [2, 9, 9, 9, 9, 9], ..spec };
    assert!(net.send(0, &spec.large(), &spec.large_request(1400)));
    net.serve();
    assert_eq!(net.receive(1), []);
    let out = std::mem::take(&mut *wire.out.lock().unwrap());
    assert_eq!(out, [(spec.partial(), Offload::Tso { mss: 1400 })]);
    assert_eq!(net.counter(0, "tx_tso_packets"), 2);
}

#[test]
fn what_a_tap_leaves_undone_is_done_for_the_guest() {
    let mut net = Net::two();
    let wire = Wire { finishes: true, ..Wire::default() };
    let any = PortRules { any_source: true, ..PortRules::default() };
    let tap = net.segment.attach_port("tap", Box::new(wire.clone()), any).unwrap();
    let spec = FrameSpec { from: [2, 9, 9, 9, 9, 9], ..tcp(5000) };
    let small = FrameSpec { payload: vec![5; 99], ..spec.clone() };
    wire.coming.lock().unwrap().extend([
        (spec.partial(), Offload::Tso { mss: 1000 }),
        (small.partial(), small.checksum_offload()),
        (small.complete(), Offload::Verified),
        (small.complete(), Offload::None),
    ]);
    net.segment.readable(tap);
    net.serve();
    let received = net.receive(1);
    let (cut, rest) = received.split_at(5);
    assert_eq!(cut.iter().map(|frame| frame.bytes.clone()).collect::<Vec<_>>(), spec.segments(1000));
    assert_eq!(rest.iter().map(|frame| frame.good).collect::<Vec<_>>(), [true, true, false]);
    assert!(rest.iter().all(|frame| frame.bytes == small.complete()));
    // The tap's station is learnt now, and the response goes to it alone.
    assert!(net.send(1, &ethernet([2, 9, 9, 9, 9, 9], B, &[1; 50]), &TransmitRequest::default()));
    net.serve();
    assert_eq!(wire.out.lock().unwrap().len(), 1);
    assert_eq!(net.receive(0), []);
}

#[test]
fn jumbo_frames_lie_in_several_buffers() {
    for old_ring_layout in [false, true] {
        let options = DriverOptions { mtu: 9000, old_ring_layout, ..DriverOptions::default() };
        let rules = PortRules::default();
        let mut net = Net::new(&[(options.clone(), rules), (options, rules)]);
        for len in [9000, 3000, 3080, 7000, 100, 8999].into_iter().cycle().take(100) {
            let payload: Vec<u8> = (0..=250).cycle().take(len).collect();
            let frame = ethernet(B, A, &payload);
            assert!(net.send(0, &frame, &TransmitRequest::default()));
            net.serve();
            net.guests[0].driver.reap();
            let received = net.receive(1);
            assert_eq!(received.len(), 1, "{len} bytes");
            assert_eq!(received[0].bytes, frame);
            assert_eq!(received[0].pieces, (len + 14).saturating_sub(3072).div_ceil(4096) + 1);
        }
    }
}

#[test]
fn frames_wait_for_buffers_up_to_a_limit_and_keep_their_order() {
    let options = DriverOptions { rx_sizes: [4, 4], ..DriverOptions::default() };
    let mut net = Net::new(&[Default::default(), (options, PortRules::default())]);
    let frame = |number: u8| ethernet(B, A, &[number; 60]);
    for number in 0..20 {
        assert!(net.send(0, &frame(number), &TransmitRequest::default()));
    }
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 20);
    assert!(net.segment.has_waiting());
    // 3 buffers and 8 places in the queue; the rest is dropped.
    assert_eq!(net.counter(1, "rx_dropped"), 9);
    let mut numbers = Vec::new();
    while numbers.len() < 11 {
        // The driver's doorbell delivers more.
        let received = net.receive(1);
        assert!(!received.is_empty());
        numbers.extend(received.iter().map(|frame| frame.bytes[20]));
        net.serve();
    }
    assert_eq!(numbers, (0..11).collect::<Vec<_>>());
    assert!(!net.segment.has_waiting());
    assert!(net.counter(1, "kicks") > 0);
}

#[test]
fn a_guest_can_not_send_as_another_unless_it_is_allowed_to() {
    let mut net = Net::new(&[Default::default(), Default::default(), Default::default()]);
    let spoofed = ethernet([0xFF; 6], B, &[1; 60]);
    assert!(net.send(0, &spoofed, &TransmitRequest::default()));
    let stranger = ethernet([0xFF; 6], [2, 8, 8, 8, 8, 8], &[2; 60]);
    assert!(net.send(0, &stranger, &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 2);
    assert_eq!(net.counter(0, "tx_spoofed"), 2);
    assert_eq!(net.receive(2), []);
    // B's frames still go to B.
    assert!(net.send(2, &ethernet(B, [2, 0, 0, 0, 0, 3], &[3; 60]), &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.receive(1).len(), 1);
    let any = PortRules { any_source: true, ..PortRules::default() };
    net.segment.set_rules(net.guests[0].id, any);
    assert!(net.send(0, &spoofed, &TransmitRequest::default()), "still another port's own");
    assert!(net.send(0, &stranger, &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.counter(0, "tx_spoofed"), 3);
    assert_eq!(net.receive(1).len(), 1);
    assert_eq!(net.receive(2).len(), 1);
    let report = net.segment.report();
    assert_eq!(report[0].learnt, [MacAddress([2, 8, 8, 8, 8, 8])]);
    assert_eq!(report[1].mac, Some(MacAddress(B)));
}

#[test]
fn a_packet_at_a_bad_address_stops_its_senders_queue_and_nothing_else() {
    let mut net = Net::two();
    let frame = ethernet(B, A, &[0x5A; 1400]);
    assert!(net.send(0, &frame, &TransmitRequest { cuts: vec![700], ..Default::default() }));
    let [tx, ..] = net.guests[0].driver.rings();
    net.guests[0].memory.write(tx + 16, &u64::MAX.to_le_bytes()).unwrap();
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 0);
    assert!(net.guests[0].driver.status()[0].0);
    assert_eq!(net.receive(1), []);
    assert!(net.send(1, &ethernet(A, B, &[1; 60]), &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.receive(0).len(), 1, "it still receives");
}

#[test]
fn statistics_are_those_of_the_traffic() {
    let mut net = Net::two();
    for (to, len) in [(B, 100), ([0xFF; 6], 200), ([1, 0, 0x5E, 0, 0, 1], 300)] {
        assert!(net.send(0, &ethernet(to, A, &vec![0; len]), &TransmitRequest::default()));
    }
    let spec = tcp(3000);
    assert!(net.send(0, &spec.large(), &spec.large_request(1000)));
    assert!(net.send(0, &[0; 10], &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.guests[0].driver.reap(), 5);
    for guest in &net.guests {
        let device = net.segment.device(guest.id).unwrap();
        guest.driver.command(device, command::GET_STATS);
    }
    let [tx, _] = net.guests[0].driver.statistics();
    let large = 3066;
    assert_eq!(tx, [1, large, 2, 114 + large, 1, 314, 1, 214, 1, 0]);
    let [_, rx] = net.guests[1].driver.statistics();
    assert_eq!(rx, [0, 0, 4, 114 + 3000 + 3 * 66, 0, 0, 1, 214, 0, 0]);
}

#[test]
fn an_address_is_plugged_in_once() {
    let mut net = Net::two();
    let config = Vmxnet3Config { name: "twin".to_owned(), mac: MacAddress(A), link_mbps: 1000 };
    let twin = Vmxnet3::new(config, Box::new(CountedInterrupts::default()));
    let error = net.segment.attach_device(twin, PortRules::default()).unwrap_err();
    assert!(matches!(error, AttachError::Address { .. }), "{error}");
    let id = net.guests[0].id;
    assert!(net.segment.detach(id).is_some());
    assert!(net.segment.device(id).is_none());
}

/// A companion that wants frames of one Ethernet type.
#[derive(Clone, Default)]
struct Beside {
    taken: Arc<Mutex<Vec<Vec<u8>>>>,
    to_send: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl Companion for Beside {
    fn wants(&mut self, head: &[u8]) -> bool {
        head.get(12..14) == Some(&[0x88, 0xB5])
    }

    fn take(&mut self, frame: &[u8]) {
        self.taken.lock().unwrap().push(frame.to_vec());
    }

    fn next(&mut self, frame: &mut Vec<u8>) -> bool {
        let next = self.to_send.lock().unwrap().pop_front();
        next.map(|bytes| frame.extend(bytes)).is_some()
    }
}

#[test]
fn a_companion_takes_its_frames_and_sends_in_the_device_s_name() {
    let mut net = Net::two();
    let (wire, beside) = (Wire::default(), Beside::default());
    let rules = PortRules { any_source: true, partial_checksums: true };
    let tap = net.segment.attach_port("wire", Box::new(wire.clone()), rules).unwrap();
    let id = net.guests[1].id;
    net.segment.set_companion(id, Some(Box::new(beside.clone())));
    // A port that isn't a device can't have a companion.
    net.segment.set_companion(tap, Some(Box::new(beside.clone())));

    let kind = |mut frame: Vec<u8>, kind: [u8; 2]| {
        frame[12..14].copy_from_slice(&kind);
        frame
    };
    let others = [2, 0, 0, 0, 0, 9];
    let far = ethernet(B, others, &[1; 1000]);
    // From outside, and from a neighbouring device, whose frames are otherwise copied from guest to guest.
    let (its, not) = (kind(far.clone(), [0x88, 0xB5]), kind(far, [0x88, 0xB6]));
    let near = kind(ethernet(B, A, &[2; 1000]), [0x88, 0xB5]);
    wire.coming.lock().unwrap().extend([(its.clone(), Offload::None), (not.clone(), Offload::None)]);
    net.segment.readable(tap);
    net.serve();
    assert!(net.send(0, &near, &TransmitRequest::default()));
    net.serve();
    assert_eq!(*beside.taken.lock().unwrap(), [its, near]);
    let received: Vec<Vec<u8>> = net.receive(1).into_iter().map(|frame| frame.bytes).collect();
    assert_eq!(received, [not]);

    // Frames that it sends: to another device, to outside. One with a foreign source address and a malformed one are dropped.
    let (to_a, out) = (ethernet(A, B, &[3; 100]), ethernet(others, B, &[4; 100]));
    let forged = ethernet(A, others, &[5; 100]);
    beside.to_send.lock().unwrap().extend([to_a.clone(), out.clone(), forged, vec![1, 2, 3]]);
    net.segment.readable(id);
    net.serve();
    let received: Vec<Vec<u8>> = net.receive(0).into_iter().map(|frame| frame.bytes).collect();
    assert_eq!(received, [to_a]);
    assert_eq!(wire.out.lock().unwrap().drain(..).map(|(bytes, _)| bytes).collect::<Vec<_>>(), [out]);
    assert_eq!((net.counter(1, "tx_spoofed"), net.counter(1, "tx_errors")), (1, 1));
    // Without a companion the device gets all frames.
    net.segment.set_companion(id, None);
    let plain = kind(ethernet(B, A, &[6; 64]), [0x88, 0xB5]);
    assert!(net.send(0, &plain, &TransmitRequest::default()));
    net.serve();
    assert_eq!(net.receive(1).len(), 1);
}

#[test]
fn neither_a_device_nor_its_companion_keeps_the_other_from_sending() {
    let mut net = Net::two();
    let beside = Beside::default();
    net.segment.set_companion(net.guests[0].id, Some(Box::new(beside.clone())));
    let (frame, other) = (ethernet(B, A, &[1; 60]), ethernet(B, A, &[2; 60]));
    for _ in 0..4 {
        assert!(net.send(0, &frame, &TransmitRequest::default()));
    }
    beside.to_send.lock().unwrap().extend(vec![other.clone(); 2 * TURN_PACKETS]);
    net.segment.serve(Duration::ZERO);
    let received = net.receive(1);
    let first: Vec<bool> = received.iter().take(8).map(|got| got.bytes == other).collect();
    assert_eq!(first, [true, false, true, false, true, false, true, false]);
    assert_eq!(
        beside.to_send.lock().unwrap().len(),
        2 * TURN_PACKETS - (TURN_PACKETS - 4),
        "one turn's worth"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Random frames with random offloads, tags and cuts, over small rings that wrap: the receiver gets exactly the reference's frames, in
    /// order.
    #[test]
    fn frames_arrive_as_a_reference_makes_them(
        packets in prop::collection::vec(
            (spec(), 1..1400_usize, 0..4_u8, prop::collection::vec(1..400_usize, 0..4)), 1..60),
        partial in any::<bool>(),
    ) {
        let options = DriverOptions {
            tx_size: 16,
            rx_sizes: [32, 8],
            vlans: (1..0xFFF).collect(),
            ..DriverOptions::default()
        };
        let rules = PortRules { partial_checksums: partial, ..PortRules::default() };
        let mut net = Net::new(&[(options.clone(), rules), (options, rules)]);
        for (spec, len, kind, cuts) in packets {
            // The driver inserts tags by descriptor, so the frame is built without.
            let inner = FrameSpec { vlan: None, to: B, from: A, payload: (0..=255).cycle().take(len).collect(), ..spec.clone() };
            let (frame, offload, expected) = match kind {
                0 => (inner.complete(), Offload::None, vec![inner.complete()]),
                1 => {
                    let end = if partial { inner.partial() } else { inner.complete() };
                    (inner.partial(), inner.checksum_offload(), vec![end])
                }
                _ => {
                    let inner = FrameSpec { udp: false, ..inner.clone() };
                    (inner.large(), Offload::Tso { mss: 500 }, inner.segments(500))
                }
            };
            let header_len = u16::try_from(inner.headers()).unwrap();
            let request = TransmitRequest { offload, header_len, vlan: spec.vlan, cuts };
            prop_assert!(net.send(0, &frame, &request));
            net.serve();
            prop_assert_eq!(net.guests[0].driver.reap(), 1);
            let received = net.receive(1);
            let bytes: Vec<_> = received.iter().map(|frame| frame.bytes.clone()).collect();
            prop_assert_eq!(bytes, expected);
            for frame in received {
                prop_assert_eq!(frame.vlan, spec.vlan);
                prop_assert_eq!(frame.good, kind != 0);
                prop_assert!(partial && kind == 1 || checksums_are_good(&frame.bytes));
            }
        }
    }

    /// Random descriptors: nothing panics or stalls, and the other guest's traffic continues.
    #[test]
    fn hostile_descriptors_do_not_reach_the_neighbour(
        descriptors in prop::collection::vec(any::<([u32; 4], bool)>(), 1..32),
        seed in any::<u8>(),
    ) {
        let options = DriverOptions { tx_size: 32, rx_sizes: [16, 8], ..DriverOptions::default() };
        let mut net = Net::new(&[0; 3].map(|_| (options.clone(), PortRules::default())));
        let [tx, ..] = net.guests[0].driver.rings();
        let memory = net.guests[0].memory.clone();
        memory.write(0x1000, &[&B[..], &A, &[8, 0, 0x45, 0, 0, 100, 0, 0, 0, 0, 64, 6]].concat()).unwrap();
        for (index, (words, tame)) in (0_u64..).zip(&descriptors) {
            let [a, b, c, d] = *words;
            // Valid ones point into memory and belong to the device.
            let address = if *tame { 0x1000 } else { u64::from(a) | u64::from(b) << 32 };
            let word2 = if *tame { c & !(1 << 16) | 1 << 14 } else { c };
            memory.write(tx + 16 * index, &address.to_le_bytes()).unwrap();
            memory.store_u32(tx + 16 * index + 8, word2).unwrap();
            memory.store_u32(tx + 16 * index + 12, d).unwrap();
        }
        net.segment.device(net.guests[0].id).unwrap().kick();
        let mut rounds = 0;
        while net.segment.serve(Duration::ZERO) {
            rounds += 1;
            prop_assert!(rounds < 1000);
        }
        net.receive(1);
        let frame = ethernet(B, [2, 0, 0, 0, 0, 3], &[seed; 900]);
        prop_assert!(net.send(2, &frame, &TransmitRequest::default()));
        net.serve();
        // Frames that the hostile guest left in the queue come first.
        let mut received = net.receive(1);
        net.serve();
        received.extend(net.receive(1));
        prop_assert_eq!(&received.last().unwrap().bytes, &frame);
    }
}
