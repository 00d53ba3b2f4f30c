//! A segment on its own thread, with drivers in others.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dma::HeapMemory;
use vmxnet3::runner::PlugError;
use vmxnet3::segment::AttachError;
use vmxnet3::{MacAddress, NicHandle, PortRules, SegmentConfig, SegmentThread, Vmxnet3Config};
use vmxnet3_testbed::{CountedInterrupts, Driver, DriverOptions, TransmitRequest, ethernet};

fn config(last: u8) -> Vmxnet3Config {
    Vmxnet3Config { name: format!("nic{last}"), mac: MacAddress([2, 0, 0, 0, 0, last]), link_mbps: 10_000 }
}

fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
}

fn guest(
    segment: &SegmentThread<HeapMemory>,
    last: u8,
) -> (NicHandle<HeapMemory>, Driver<HeapMemory>, CountedInterrupts) {
    let interrupts = CountedInterrupts::default();
    let mut nic = segment.attach(config(last), PortRules::default(), Box::new(interrupts.clone())).unwrap();
    let memory = HeapMemory::new(2 << 20);
    nic.set_memory(Some(memory.clone()));
    let mut driver = Driver::new(memory, 0, DriverOptions::default());
    assert_eq!(driver.open(&mut nic), 0);
    (nic, driver, interrupts)
}

#[test]
fn frames_pass_between_two_devices_while_their_drivers_run() {
    let segment = SegmentThread::start(SegmentConfig::new("test")).unwrap();
    let (mut a, mut sender, _) = guest(&segment, 1);
    let (mut b, mut receiver, interrupts) = guest(&segment, 2);
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut sent, mut got) = (0_u32, 0_u32);
    while got < 500 {
        assert!(Instant::now() < deadline, "{sent} sent, {got} came");
        // Fewer than the receiver's ring and queue hold.
        if sent < 500 && sent - got < 200 {
            let frame = ethernet([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1], &sent.to_le_bytes().repeat(100));
            if sender.send(&mut a, &frame, &TransmitRequest::default()) {
                sent += 1;
            }
        }
        sender.reap();
        for frame in receiver.receive(&mut b) {
            assert_eq!(frame.bytes[14..18], got.to_le_bytes());
            got += 1;
        }
        receiver.unmask(&mut b);
    }
    assert!(interrupts.count(0) > 0);
    assert_eq!(b.counters().value("rx_packets"), Some(500));
    let report = segment.report().unwrap();
    assert_eq!(report.iter().map(|port| port.name.as_str()).collect::<Vec<_>>(), ["nic1", "nic2"]);
}

#[test]
fn a_dropped_handle_frees_the_address_and_a_stopped_segment_looks_like_an_absent_device() {
    let segment = SegmentThread::start(SegmentConfig::new("test")).unwrap();
    let (nic, ..) = guest(&segment, 1);
    let twin = segment.attach(config(1), PortRules::default(), Box::new(CountedInterrupts::default()));
    assert!(matches!(twin, Err(PlugError::Attach(AttachError::Address { .. }))));
    let state = nic.save().unwrap();
    drop(nic);
    let nic = segment
        .attach_restored(
            config(1),
            PortRules::default(),
            Box::new(CountedInterrupts::default()),
            state.clone(),
        )
        .unwrap();
    assert_eq!(nic.save().unwrap(), state);
    drop(segment);
    let mut word = [0; 4];
    nic.bar_read(1, 0, &mut word);
    assert_eq!(word, [0xFF; 4]);
    nic.bar_write(1, 0x20, &[0; 4]);
    assert!(nic.save().is_err());
}

#[test]
fn an_eventfd_unmasks_as_a_register_write_does_and_keeps_its_place_in_the_order() {
    let segment = SegmentThread::start(SegmentConfig::new("test")).unwrap();
    let (nic, _, interrupts) = guest(&segment, 1);
    let events = nic.io_events();
    assert_eq!(events.iter().filter(|event| event.value == Some(0)).count(), 3);
    let unmask = events.iter().find(|event| event.offset == 8).unwrap();
    let masked = || {
        let mut word = [0; 4];
        nic.bar_read(0, 8, &mut word);
        word[0]
    };
    nic.set_link(false);
    assert_eq!((interrupts.count(1), masked()), (1, 1));
    nic.set_link(true);
    assert_eq!(interrupts.count(1), 1, "masked itself");
    ring(&unmask.fd);
    let deadline = Instant::now() + Duration::from_secs(20);
    while interrupts.count(1) < 2 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..200 {
        // Unmasked by an eventfd, then masked by a write: it stays masked.
        ring(&unmask.fd);
        nic.bar_write(0, 8, &1_u32.to_le_bytes());
        assert_eq!(masked(), 1);
        nic.bar_write(0, 8, &1_u32.to_le_bytes());
        ring(&unmask.fd);
        assert_eq!(masked(), 0);
    }
    // More than the limit of posted writes.
    for turn in 0..1000_u32 {
        nic.bar_write(0, 8, &(turn % 2).to_le_bytes());
    }
    assert_eq!(masked(), 1);
}
