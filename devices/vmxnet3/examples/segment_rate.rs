//! Throughput of frames between two devices of a segment, on one thread, over memory as the daemon maps it. The cost of the driver models
//! on both sides is measured separately and subtracted; the rest is the segment's.
//!
//! `cargo run --release -p vmxnet3 --example segment_rate`

use std::time::{Duration, Instant};

use dma::{Dma, MappedMemory, MemoryRegion};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vmxnet3::{MacAddress, PortId, PortRules, Segment, SegmentConfig, Vmxnet3, Vmxnet3Config};
use vmxnet3_testbed::{CountedInterrupts, Driver, DriverOptions, FrameSpec, TransmitRequest, ethernet};

const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
const B: [u8; 6] = [2, 0, 0, 0, 0, 2];
const BATCH: usize = 32;
const RUN: Duration = Duration::from_secs(1);

fn memory(size: usize) -> MappedMemory {
    let size = size.next_multiple_of(2 << 20) as u64;
    let fd = memfd_create("guest", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, size).expect("room");
    fcntl_add_seals(&fd, SealFlags::SHRINK).expect("a seal");
    let region = MemoryRegion::map(0, size, &fd, 0, true).expect("a mapping");
    let memory = MappedMemory::default().with(region).expect("the only range");
    memory.zero(0, size).expect("its own memory");
    memory
}

fn guest(
    segment: &mut Segment<MappedMemory>,
    mac: [u8; 6],
    options: &DriverOptions,
    rules: PortRules,
) -> (PortId, Driver<MappedMemory>) {
    let memory = memory(options.memory_needed());
    let config = Vmxnet3Config { name: "nic".to_owned(), mac: MacAddress(mac), link_mbps: 10_000 };
    let mut device = Vmxnet3::new(config, Box::new(CountedInterrupts::default()));
    device.set_memory(Some(memory.clone()));
    let mut driver = Driver::new(memory, 0, options.clone());
    assert_eq!(driver.open(&mut device), 0);
    (segment.attach_device(device, rules).expect("room"), driver)
}

fn measure(name: &str, options: &DriverOptions, rules: PortRules, frame: &[u8], request: &TransmitRequest) {
    let mut segment = Segment::new(SegmentConfig::new("rate"));
    let (a, mut sender) = guest(&mut segment, A, options, rules);
    let (b, mut receiver) = guest(&mut segment, B, options, rules);
    let (mut served, started) = (Duration::ZERO, Instant::now());
    let (mut packets, mut bytes, mut frames) = (0_u64, 0_u64, 0_u64);
    while started.elapsed() < RUN {
        for _ in 0..BATCH {
            let device = segment.device(a).expect("plugged in");
            packets += u64::from(sender.send(device, frame, request));
        }
        let before = Instant::now();
        while segment.serve(Duration::ZERO) {}
        served += before.elapsed();
        sender.reap();
        for received in receiver.receive(segment.device(b).expect("plugged in")) {
            bytes += received.bytes.len() as u64;
            frames += 1;
        }
        while segment.serve(Duration::ZERO) {}
    }
    let (seconds, direct) = (served.as_secs_f64(), segment.report()[1].counters.direct_bytes.get());
    #[allow(clippy::cast_precision_loss)]
    let rate = |count: u64| count as f64 / seconds;
    println!(
        "{name:32} {:7.0} ns/packet {:6.2} M packets/s {:6.2} M frames/s {:6.2} GB/s {:3} % direct",
        1e9 / rate(packets),
        rate(packets) / 1e6,
        rate(frames) / 1e6,
        rate(bytes) / 1e9,
        100 * direct / bytes.max(1)
    );
}

fn main() {
    let small = DriverOptions { tx_size: 512, rx_sizes: [2048, 512], ..DriverOptions::default() };
    let jumbo = DriverOptions { mtu: 9000, ..small.clone() };
    let (plain, end) = (PortRules::default(), PortRules { partial_checksums: true, ..PortRules::default() });
    let tcp = |len: usize| FrameSpec {
        to: B,
        from: A,
        v6: false,
        udp: false,
        vlan: None,
        options: 3,
        flags: 0x18,
        sequence: 1,
        id: 1,
        payload: vec![0x5A; len],
    };
    let none = TransmitRequest::default();
    measure("60 bytes", &small, plain, &ethernet(B, A, &[1; 46]), &none);
    measure("1514 bytes", &small, plain, &ethernet(B, A, &[1; 1500]), &none);
    measure("9014 bytes", &jumbo, plain, &ethernet(B, A, &vec![1; 9000]), &none);
    let spec = tcp(1448);
    let request = TransmitRequest { offload: spec.checksum_offload(), ..none.clone() };
    measure("1514 bytes, checksum made", &small, plain, &spec.partial(), &request);
    measure("1514 bytes, checksum left undone", &small, end, &spec.partial(), &request);
    let spec = tcp(8948);
    let request = TransmitRequest { offload: spec.checksum_offload(), ..none };
    measure("9014 bytes, checksum made", &jumbo, plain, &spec.partial(), &request);
    let spec = tcp(60_000);
    measure("60,000 bytes to cut at 1448", &small, plain, &spec.large(), &spec.large_request(1448));
    measure("60,000 bytes to cut at 8948", &jumbo, plain, &spec.large(), &spec.large_request(8948));
}
