//! Frames in both directions.

use super::*;

const NEEDS_CSUM: u8 = 1;

#[test]
fn a_sent_frame_arrives_with_its_checked_header() {
    let (mut guest, others) = Guest::paired(1, OFFLOADS);
    guest.activate();
    let header = VnetHeader {
        flags: NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 9,
        ..Default::default()
    };
    let sent = frame(1, 1000);
    guest.send(header, &sent);
    let (got, bytes) = other_receive(&others[0]).unwrap();
    assert_eq!(got, VnetHeader { num_buffers: 0, ..header });
    assert_eq!(bytes, sent);
    assert_eq!((guest.counter("transmit_packets"), guest.counter("transmit_bytes")), (1, 1000));
}

#[test]
fn a_header_and_frame_in_one_or_many_descriptors_make_the_same_frame() {
    let (mut guest, others) = Guest::paired(1, OFFLOADS);
    guest.activate();
    let sent = frame(2, 500);
    let driver = &mut guest.transmit[0];
    driver.put(BUFFERS, &VnetHeader::default().to_bytes());
    driver.put(BUFFERS + 12, &sent);
    let layouts: [&[(u64, u32, bool)]; 3] = [
        &[(BUFFERS, 512, false)],
        &[(BUFFERS, 5, false), (BUFFERS + 5, 8, false), (BUFFERS + 13, 499, false)],
        &[(BUFFERS, 12, false), (BUFFERS + 12, 1, false), (BUFFERS + 13, 499, false)],
    ];
    for layout in layouts {
        driver.push(layout).unwrap();
        driver.kick();
        driver.wait_used();
        assert_eq!(other_receive(&others[0]).unwrap().1, sent);
    }
    driver.push_indirect(BUFFERS + 0x1000, layouts[2]).unwrap();
    driver.kick();
    driver.wait_used();
    assert_eq!(other_receive(&others[0]).unwrap().1, sent);
}

#[test]
fn a_received_frame_fills_one_buffer() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    guest.post(0, BUFFERS, 4, 2048);
    let sent = frame(3, 1514);
    let header = VnetHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Default::default() };
    other_send(&others[0], header, &sent);
    // Before the driver polls the ring: a buffer that it has seen by itself needs no interrupt.
    let start = Instant::now();
    while guest.interrupt.queues() == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "no interrupt");
        std::thread::sleep(Duration::from_micros(100));
    }
    let (_, written) = guest.receive[0].wait_used();
    assert_eq!(written, 12 + 1514);
    let bytes = guest.receive[0].get(BUFFERS, 12 + 1514);
    let got = VnetHeader::parse(bytes[..12].try_into().unwrap());
    assert_eq!(got, VnetHeader { num_buffers: 1, ..header });
    assert_eq!(bytes[12..], sent);
}

#[test]
fn a_long_frame_is_merged_over_buffers_that_come_in_two_steps() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    // 20 buffers of 1500 bytes hold 30,000 bytes; the frame has 60,000.
    guest.post(0, BUFFERS, 20, 1500);
    let sent = frame(4, 60_000);
    other_send(&others[0], VnetHeader::default(), &sent);
    guest.wait_counter("receive_no_buffers", 1);
    assert!(guest.receive[0].pop_used().is_none(), "the frame isn't whole yet");
    guest.post(0, BUFFERS + 30_000, 30, 1500);
    let mut got = Vec::new();
    let mut buffers = 0u16;
    while got.len() < 60_012 {
        let (_, written) = guest.receive[0].wait_used();
        let at = BUFFERS + u64::from(buffers) * 1500;
        got.extend(guest.receive[0].get(at, usize::try_from(written).unwrap()));
        buffers += 1;
    }
    let header = VnetHeader::parse(got[..12].try_into().unwrap());
    assert_eq!((header.num_buffers, buffers), (41, 41));
    assert!(got[12..] == sent, "the bytes differ");
    assert_eq!(guest.counter("receive_drop"), 0);
}

#[test]
fn without_merging_a_frame_that_does_not_fit_is_counted_and_the_buffer_kept() {
    let (mut guest, others) = Guest::paired(1, 0);
    guest.activate();
    guest.post(0, BUFFERS, 2, 1526);
    other_send(&others[0], VnetHeader::default(), &frame(5, 1515));
    guest.wait_counter("receive_drop", 1);
    let sent = frame(6, 1514);
    other_send(&others[0], VnetHeader::default(), &sent);
    assert_eq!(guest.receive[0].wait_used().1, 1526);
    assert_eq!(guest.receive[0].get(BUFFERS + 12, 1514), sent);
}

#[test]
fn without_buffers_the_thread_sleeps_until_a_kick() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    for number in 0..10 {
        other_send(&others[0], VnetHeader::default(), &frame(number, 100));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(guest.counter("receive_no_buffers") <= 3, "the thread spins");
    assert_eq!(guest.counter("receive_packets"), 0);
    guest.post(0, BUFFERS, 10, 1000);
    for number in 0..10u32 {
        guest.receive[0].wait_used();
        let at = BUFFERS + u64::from(number) * 1000 + 12;
        assert_eq!(guest.receive[0].get(at, 100), frame(number, 100));
    }
}

#[test]
fn a_back_end_that_takes_nothing_holds_the_guest_up_and_loses_nothing() {
    let (mut guest, others) = Guest::paired(1, OFFLOADS);
    rustix::net::sockopt::set_socket_send_buffer_size(&others[0], 4096).unwrap();
    guest.activate();
    const COUNT: u32 = 120;
    for number in 0..COUNT {
        let at = BUFFERS + u64::from(number) * 0x10000;
        guest.queue_frame(0, at, VnetHeader::default(), &frame(number, 30_000));
    }
    guest.transmit[0].kick();
    guest.wait_counter("transmit_waits", 1);
    for number in 0..COUNT {
        let (_, bytes) = other_receive(&others[0]).unwrap();
        assert!(bytes == frame(number, 30_000), "frame {number} differs or came out of turn");
    }
    for _ in 0..COUNT {
        guest.transmit[0].wait_used();
    }
    assert_eq!(guest.counter("transmit_packets"), u64::from(COUNT));
    assert_eq!(guest.counter("transmit_drop"), 0);
}

#[test]
fn both_directions_at_once_lose_and_mix_nothing() {
    let (mut guest, mut others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    const COUNT: u32 = 3000;
    let other = others.remove(0);
    let peer = std::thread::spawn(move || {
        for number in 0..COUNT {
            let (_, bytes) = other_receive(&other).expect("a frame");
            assert!(bytes == frame(number, 60 + number as usize % 1400), "frame {number}");
            let answer = frame(number + COUNT, 60 + number as usize % 9000);
            let mut message = VnetHeader::default().to_bytes().to_vec();
            message.extend_from_slice(&answer);
            while rustix::io::write(&other, &message).is_err() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    });
    guest.post(0, BUFFERS, 200, 2048);
    let (mut sent, mut acknowledged, mut received) = (0, 0, 0);
    let mut slots: std::collections::VecDeque<u64> = (0..200).map(|slot| BUFFERS + slot * 2048).collect();
    let start = Instant::now();
    while received < COUNT {
        assert!(start.elapsed() < Duration::from_secs(30), "{sent} sent, {received} received");
        while sent < COUNT && sent - acknowledged < 60 {
            let at = BUFFERS + 0x10_0000 + u64::from(sent % 64) * 2048;
            guest.queue_frame(0, at, VnetHeader::default(), &frame(sent, 60 + sent as usize % 1400));
            guest.transmit[0].kick();
            sent += 1;
        }
        while guest.transmit[0].pop_used().is_some() {
            acknowledged += 1;
        }
        while let Some((_, written)) = guest.receive[0].pop_used() {
            let first = slots.pop_front().unwrap();
            let bytes = guest.receive[0].get(first, written as usize);
            let buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
            let mut got = bytes[12..].to_vec();
            let mut again = vec![first];
            for _ in 1..buffers {
                let (_, written) = guest.receive[0].pop_used().expect("buffers of one frame come together");
                let at = slots.pop_front().unwrap();
                got.extend(guest.receive[0].get(at, written as usize));
                again.push(at);
            }
            assert!(got == frame(received + COUNT, 60 + received as usize % 9000), "answer {received}");
            for at in again {
                guest.receive[0].push(&[(at, 2048, true)]).unwrap();
                slots.push_back(at);
            }
            guest.receive[0].kick();
            received += 1;
        }
    }
    peer.join().unwrap();
    assert_eq!(guest.counter("receive_packets"), u64::from(COUNT));
    assert_eq!(guest.interrupt.failure(), None);
}

#[test]
fn a_merged_frame_raises_the_interrupt_that_the_driver_asked_for_at_its_first_buffer() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    for round in 0..20u32 {
        guest.post(0, BUFFERS, 50, 1500);
        let before = guest.interrupt.queues();
        // The used event is that of the next buffer; 44 appear at once.
        other_send(&others[0], VnetHeader::default(), &frame(round, 65_000));
        let start = Instant::now();
        while guest.interrupt.queues() == before {
            assert!(start.elapsed() < Duration::from_secs(5), "no interrupt in round {round}");
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut buffers = 0;
        while guest.receive[0].pop_used().is_some() {
            buffers += 1;
        }
        assert_eq!(buffers, 44, "all of them or none");
    }
}

/// Finds a thread by its name. The list skips threads while others end, so it is read more than once.
fn thread_status(name: &str) -> std::path::PathBuf {
    let wanted = format!("Name:\t{name}\n");
    let start = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        for status in tasks.map(|task| task.path().join("status")) {
            if std::fs::read_to_string(&status).is_ok_and(|text| text.starts_with(&wanted)) {
                return status;
            }
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no thread {name}");
    }
}

#[test]
fn a_device_whose_guest_posts_no_buffers_sleeps_while_frames_wait() {
    let (backend, others) = PairBackend::new(1, OFFLOADS).unwrap();
    let channels = backend.channels().unwrap();
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    // No other test has threads of this name.
    let net = Net::with_backend("sleeper".to_owned(), Box::new(backend), channels, mac, None);
    let mut guest = Guest::new(net, 1, testbed::RINGS | MERGEABLE | OFFLOADS);
    guest.activate();
    for _ in 0..20 {
        other_send(&others[0], VnetHeader::default(), &frame(1, 100));
    }
    let status = thread_status("sleeper/0");
    let switches = || -> u64 {
        let text = std::fs::read_to_string(&status).unwrap();
        let line = text.lines().find(|line| line.starts_with("voluntary_ctxt_switches:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    std::thread::sleep(Duration::from_millis(100));
    let before = switches();
    std::thread::sleep(Duration::from_millis(300));
    let woken = switches() - before;
    assert!(woken <= 2, "{woken} wake-ups");
}
