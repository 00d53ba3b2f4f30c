//! Two guests with the behaviour of Linux's driver and provider, through the engine: the bytes that arrive are those that were sent.

use crate::support;

use dma::Dma;
use pvrdma::abi::commands::{mr_kind, number, qp_kind};
use pvrdma::abi::work::opcode;
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::queues::sge;
use pvrdma_testbed::{Host, Post};
use support::{ALL, Memory, Side, connected, pattern, run, side};

/// Sends, writes, reads and atomics between processes, with buffers at any offsets, in scattered pages.
#[test]
fn reliable_connection_all_operations() {
    let (mut host, mut a, mut b, qa, qb) = connected(true, QpOptions::default());
    let source = a.region(&mut host, 0x7F00_0000_0123, 20_000);
    let target = b.region(&mut host, 0x7E00_0000_0FF8, 20_000);
    let data = pattern(20_000, 1);
    source.write(&a.guest.memory, 0, &data);

    // SEND with immediate data, two elements on either side.
    assert!(b.guest.post_receive(&qb, 90, &[sge(&target, 8, 3000), sge(&target, 5000, 9000)]));
    let sges = [sge(&source, 100, 4000), sge(&source, 7000, 5000)];
    let post = Post::send(1, &sges).immediate(opcode::SEND_IMMEDIATE, [1, 2, 3, 4]);
    assert!(a.guest.post_send(&qa, &post));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(1, 0, 0)]);
    let entry = b.guest.poll(&b.cq).unwrap();
    assert_eq!((entry.wr_id.get(), entry.opcode.get(), entry.status.get()), (90, 128, 0));
    assert_eq!((entry.byte_len.get(), entry.immediate, entry.flags.get()), (9000, [1, 2, 3, 4], 2));
    assert_eq!(entry.qp.get(), u64::from(qb.handle));
    let sent = [&data[100..4100], &data[7000..12_000]].concat();
    assert_eq!(target.read(&b.guest.memory, 8, 3000), sent[..3000]);
    assert_eq!(target.read(&b.guest.memory, 5000, 6000), sent[3000..]);

    // WRITE, then WRITE with immediate data.
    let write = Post::remote(2, opcode::WRITE, target.address + 1, target.rkey, &[sge(&source, 0, 9999)]);
    assert!(a.guest.post_send(&qa, &write));
    assert!(b.guest.post_receive(&qb, 91, &[]));
    let remote = Post::remote(
        3,
        opcode::WRITE_IMMEDIATE,
        target.address + 12_000,
        target.rkey,
        &[sge(&source, 5, 50)],
    );
    assert!(a.guest.post_send(&qa, &remote.immediate(opcode::WRITE_IMMEDIATE, [9; 4])));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(2, 1, 0), (3, 1, 0)]);
    let entry = b.guest.poll(&b.cq).unwrap();
    assert_eq!((entry.wr_id.get(), entry.opcode.get(), entry.byte_len.get()), (91, 129, 50));
    assert_eq!(entry.immediate, [9; 4]);
    assert_eq!(target.read(&b.guest.memory, 1, 9999), data[..9999]);
    assert_eq!(target.read(&b.guest.memory, 12_000, 50), data[5..55]);

    // READ back to another place.
    let read = Post::remote(4, opcode::READ, target.address + 1, target.rkey, &[sge(&source, 10_000, 9000)]);
    assert!(a.guest.post_send(&qa, &read));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(4, 2, 0)]);
    assert_eq!(source.read(&a.guest.memory, 10_000, 9000), data[..9000]);

    // Atomics.
    target.write(&b.guest.memory, 16, &5u64.to_le_bytes());
    let word = (target.address + 16, target.rkey);
    let result = [sge(&source, 13, 8)];
    assert!(a.guest.post_send(&qa, &Post::atomic(5, opcode::FETCH_ADD, word, (37, 0), &result)));
    assert!(
        a.guest
            .post_send(&qa, &Post::atomic(6, opcode::COMPARE_SWAP, word, (42, 77), &[sge(&source, 21, 8)]))
    );
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(5, 4, 0), (6, 3, 0)]);
    assert_eq!(source.read(&a.guest.memory, 13, 16), [5u64.to_le_bytes(), 42u64.to_le_bytes()].concat());
    assert_eq!(target.read(&b.guest.memory, 16, 8), 77u64.to_le_bytes());
}

/// Requests that a user process must not post complete with an error, and the queue pair fails without executing them.
#[test]
fn kernel_opcodes_are_refused_for_processes() {
    for code in [7, 8, 9, 10, 11, 12, 15, 200] {
        let (mut host, mut a, b, qa, _) = connected(true, QpOptions::default());
        let region = a.region(&mut host, 0x10_0000, 4096);
        let post = Post { opcode: code, ..Post::send(u64::from(code), &[sge(&region, 0, 8)]) };
        assert!(a.guest.post_send(&qa, &post));
        assert!(a.guest.post_send(&qa, &Post::send(500, &[])));
        run(&mut host, &[&a, &b]);
        let done: Vec<_> = a.completions().into_iter().map(|(id, _, status)| (id, status)).collect();
        assert_eq!(done, [(u64::from(code), 2), (500, 5)], "opcode {code}");
        assert_eq!(a.guest.query(&mut host, qa.handle).unwrap().state.get(), 6);
    }
}

/// More elements than the queue was created with give status 2, whatever lies behind the slot.
#[test]
fn too_many_elements_are_refused() {
    let (mut host, mut a, b, qa, _) = connected(true, QpOptions::default());
    let region = a.region(&mut host, 0x10_0000, 4096);
    assert!(a.guest.post_send(&qa, &Post::send(1, &[sge(&region, 0, 1); 3])));
    run(&mut host, &[&a, &b]);
    let done: Vec<_> = a.completions().into_iter().map(|(id, _, status)| (id, status)).collect();
    assert_eq!(done, [(1, 2)]);
}

/// All sizes of slots, with as many elements as the queue permits.
#[test]
fn element_counts_up_to_the_limit() {
    for count in [1u32, 3, 4, 7, 8, 11, 12, 16] {
        let options = QpOptions { max_send_sge: count, max_receive_sge: count, ..QpOptions::default() };
        let (mut host, mut a, mut b, qa, qb) = connected(true, options);
        let source = a.region(&mut host, 0x10_0003, 16_384);
        let target = b.region(&mut host, 0x20_0005, 16_384);
        let data = pattern(16_384, u64::from(count));
        source.write(&a.guest.memory, 0, &data);
        for round in 0..70u64 {
            let from: Vec<_> = (0..count).map(|i| sge(&source, u64::from(i) * 1000, 100 + i)).collect();
            let to: Vec<_> = (0..count).map(|i| sge(&target, u64::from(i) * 1000, 100 + i)).collect();
            assert!(b.guest.post_receive(&qb, round, &to));
            assert!(a.guest.post_send(&qa, &Post::send(round, &from)));
            run_until(&mut host, &a, &b);
            assert_eq!(a.completions(), [(round, 0, 0)], "{count} elements");
            assert_eq!(b.completions(), [(round, 128, 0)], "{count} elements");
        }
        for i in 0..u64::from(count) {
            let expected = &data[usize::try_from(i * 1000).unwrap()..][..usize::try_from(100 + i).unwrap()];
            assert_eq!(target.read(&b.guest.memory, i * 1000, 100 + i), expected);
        }
    }
}

fn run_until(host: &mut Host<Memory>, a: &Side, b: &Side) {
    for _ in 0..4 {
        host.turn([(a.guest.id, &a.guest.uar), (b.guest.id, &b.guest.uar)]);
    }
}

/// Datagrams between processes: the 40 bytes before the data are the network header, and `byte_len` includes them.
#[test]
fn datagrams() {
    for user in [true, false] {
        let mut host = Host::default();
        let (mut a, mut b) = (side(&mut host, 1, user), side(&mut host, 2, user));
        let options = QpOptions { kind: qp_kind::UD, ..QpOptions::default() };
        let (qa, qb) = (a.qp(&mut host, options), b.qp(&mut host, options));
        a.guest.start_datagrams(&mut host, &qa, 0x1111).unwrap();
        b.guest.start_datagrams(&mut host, &qb, 0x2222).unwrap();
        let source = a.region(&mut host, 0x1000, 4096);
        let target = b.region(&mut host, 0x2000, 4096);
        source.write(&a.guest.memory, 0, b"a datagram");
        assert!(b.guest.post_receive(&qb, 8, &[sge(&target, 0, 2000)]));
        let post = Post::datagram(7, a.pd, qb.qpn, 0x2222, b.gid, &[sge(&source, 0, 10)]);
        assert!(a.guest.post_send(&qa, &post.immediate(opcode::SEND_IMMEDIATE, [4, 3, 2, 1])));
        run(&mut host, &[&a, &b]);
        assert_eq!(a.completions(), [(7, 0, 0)]);
        let entry = b.guest.poll(&b.cq).unwrap();
        assert_eq!(
            (entry.byte_len.get(), entry.source_qp.get(), entry.immediate),
            (50, qa.qpn, [4, 3, 2, 1])
        );
        // User processes get only the flags that verbs number alike.
        assert_eq!(entry.flags.get(), if user { 3 } else { 3 | 64 });
        assert_eq!(entry.network_header, 1);
        let header = target.read(&b.guest.memory, 20, 20);
        assert_eq!(
            (header[0], &header[12..16], &header[16..20]),
            (0x45, &[10, 0, 0, 1][..], &[10, 0, 0, 2][..])
        );
        let sum: u32 = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
        assert_eq!((sum & 0xFFFF) + (sum >> 16), 0xFFFF, "the IPv4 header checksum");
        assert_eq!(target.read(&b.guest.memory, 40, 10), b"a datagram");

        // A datagram with a wrong Q_Key is dropped silently; one-sided operations don't exist.
        assert!(b.guest.post_receive(&qb, 9, &[sge(&target, 0, 2000)]));
        assert!(
            a.guest.post_send(&qa, &Post::datagram(8, a.pd, qb.qpn, 0x3333, b.gid, &[sge(&source, 0, 10)]))
        );
        run(&mut host, &[&a, &b]);
        assert_eq!((a.completions(), b.completions()), (vec![(8, 0, 0)], vec![]));
        assert!(
            a.guest
                .post_send(&qa, &Post::remote(9, opcode::WRITE, 0x2000, target.rkey, &[sge(&source, 0, 10)]))
        );
        run(&mut host, &[&a, &b]);
        assert_eq!(a.completions().into_iter().map(|c| (c.0, c.2)).collect::<Vec<_>>(), [(9, 2)]);
    }
}

/// The steps of Linux's `ib_mad`: the GSI queue pair in the kernel's domain, addressed by a DMA region, with 512 receives.
#[test]
fn general_services() {
    let mut host = Host::default();
    let mut sides = [side(&mut host, 1, false), side(&mut host, 2, false)];
    let mut made = Vec::new();
    for side in &mut sides {
        let cq = side.guest.cq(&mut host, (0, 0), 1024);
        side.cq = cq;
        let options = QpOptions {
            kind: qp_kind::GSI,
            max_send_wr: 128,
            max_receive_wr: 512,
            max_send_sge: 2,
            max_receive_sge: 1,
            signal_all: true,
        };
        let dma = side.guest.kernel_mr(&mut host, side.pd, mr_kind::DMA, 1, 0).unwrap();
        let qp = side.qp(&mut host, options);
        assert_eq!(qp.qpn, 1);
        side.guest.start_datagrams(&mut host, &qp, 0x8001_0000).unwrap();
        let buffer = side.guest.page();
        for wr_id in 0..512 {
            let element = pvrdma::abi::work::Sge {
                address: (buffer + wr_id % 10 * 296).into(),
                length: 296.into(),
                lkey: dma.lkey,
            };
            assert!(side.guest.post_receive(&qp, wr_id, &[element]));
        }
        assert!(!side.guest.post_receive(&qp, 0, &[]), "the queue holds 512");
        made.push((qp, dma, buffer));
    }
    let [a, b] = &mut sides;
    let ((qa, dma, _), (_, _, target)) = (&made[0], &made[1]);
    let from = a.guest.page();
    a.guest.memory.write(from, &pattern(256, 3)).unwrap();
    let elements = [(from, 24u32), (from + 24, 232)].map(|(address, length)| pvrdma::abi::work::Sge {
        address: address.into(),
        length: length.into(),
        lkey: dma.lkey,
    });
    assert!(a.guest.post_send(qa, &Post::datagram(77, a.pd, 1, 0x8001_0000, b.gid, &elements)));
    let (a, b) = (&sides[0], &sides[1]);
    run(&mut host, &[a, b]);
    assert_eq!(a.completions(), [(77, 0, 0)]);
    let entry = b.guest.poll(&b.cq).unwrap();
    assert_eq!((entry.wr_id.get(), entry.byte_len.get(), entry.source_qp.get()), (0, 296, 1));
    assert_eq!(entry.flags.get() & 1, 1, "the core refuses management datagrams without a GRH");
    let mut got = vec![0; 256];
    b.guest.memory.read(target + 40, &mut got).unwrap();
    assert_eq!(got, pattern(256, 3));
}

/// A shared receive queue serves two connections, and sends the limit event.
#[test]
fn shared_receive_queue() {
    let mut host = Host::default();
    let (mut a, mut b) = (side(&mut host, 1, true), side(&mut host, 2, true));
    let srq = b.guest.srq(&mut host, b.context.0, b.pd, 16, 2, 0);
    let cq = b.cq.clone();
    let mut pairs = Vec::new();
    for _ in 0..2 {
        let qa = a.qp(&mut host, QpOptions::default());
        let qb =
            b.guest.qp(&mut host, b.context.0, b.pd, (&cq, &cq), Some(&srq), QpOptions::default()).unwrap();
        a.guest.to_init(&mut host, &qa, ALL).unwrap();
        b.guest.to_init(&mut host, &qb, ALL).unwrap();
        a.guest.connect(&mut host, &qa, qb.qpn, b.gid).unwrap();
        b.guest.connect(&mut host, &qb, qa.qpn, a.gid).unwrap();
        pairs.push((qa, qb));
    }
    let source = a.region(&mut host, 0x1000, 4096);
    let target = b.region(&mut host, 0x2000, 4096);
    for wr_id in 0..4u64 {
        assert!(b.guest.post_shared(&srq, wr_id, &[sge(&target, wr_id * 64, 64)]));
    }
    // The limit is armed once receives are posted.
    let limit: [[u8; 4]; 5] = [srq.handle, 2, 0, 0, 3].map(u32::to_le_bytes);
    b.guest.fire(&mut host, number::MODIFY_SRQ, &limit).unwrap();
    for (at, (qa, _)) in pairs.iter().enumerate() {
        source.write(&a.guest.memory, 0, &[u8::try_from(at + 1).unwrap(); 8]);
        assert!(a.guest.post_send(qa, &Post::send(at as u64, &[sge(&source, 0, 8)])));
        run(&mut host, &[&a, &b]);
    }
    assert_eq!(a.completions(), [(0, 0, 0), (1, 0, 0)]);
    let first = b.guest.poll(&b.cq).unwrap();
    let second = b.guest.poll(&b.cq).unwrap();
    assert_eq!([first.wr_id.get(), second.wr_id.get()], [0, 1]);
    assert_eq!([first.qp.get(), second.qp.get()], [0, 1].map(|at: usize| u64::from(pairs[at].1.handle)));
    assert_eq!(target.read(&b.guest.memory, 64, 8), [2; 8]);
    let events = b.guest.events();
    assert!(events.contains(&(15, srq.handle)), "SRQ_LIMIT_REACHED: {events:?}");
    assert_eq!(events.iter().filter(|event| **event == (15, srq.handle)).count(), 1);
}

/// A kernel consumer registers memory by work request, and the peer invalidates the key.
#[test]
fn fast_registration_and_invalidation() {
    let (mut host, mut a, mut b, qa, qb) = connected(false, QpOptions::default());
    let source = a.region(&mut host, 0x1000, 4096);
    let made = b.guest.kernel_mr(&mut host, b.pd, mr_kind::FAST, 0, 16).unwrap();
    let key = made.rkey.get() & !0xFF | 0x5A;
    let pages = b.guest.pages(3);
    let directory = b.guest.directory(&pages);
    let iova = 0xAAAA_0000_0080;
    let post = Post::fast_register(1, directory, 3, iova, 10_000, ALL, key);
    assert!(b.guest.post_send(&qb, &post));
    run(&mut host, &[&a, &b]);
    assert_eq!(b.completions(), [(1, 8, 0)]);
    // The list may be reused at once.
    b.guest.memory.write(directory, &[0xFF; 8]).unwrap();

    source.write(&a.guest.memory, 0, &pattern(4096, 9));
    let write = Post::remote(2, opcode::WRITE, iova + 4000, key, &[sge(&source, 0, 4096)]);
    assert!(a.guest.post_send(&qa, &write));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(2, 1, 0)]);
    let mut got = vec![0; 4096];
    b.guest.memory.read(pages[1] + 32, &mut got[..4064]).unwrap();
    b.guest.memory.read(pages[2], &mut got[4064..]).unwrap();
    assert_eq!(got, pattern(4096, 9));

    // SEND with invalidate: the receiver's completion contains the key, which is invalid then.
    assert!(b.guest.post_receive(&qb, 50, &[]));
    let mut send = Post::send(3, &[]).immediate(opcode::SEND_INVALIDATE, key.to_le_bytes());
    send.flags = 2 | 4;
    assert!(a.guest.post_send(&qa, &send));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(3, 0, 0)]);
    let entry = b.guest.poll(&b.cq).unwrap();
    assert_eq!((entry.flags.get(), entry.immediate), (4, key.to_le_bytes()));
    assert!(a.guest.post_send(&qa, &Post { wr_id: 4, ..write }));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(4, 1, 10)], "remote access error");
}

/// Sleeping consumers are woken: at once where doorbells trap, after a while where an arm may have been lost.
#[test]
fn notifications() {
    let (mut host, mut a, mut b, qa, qb) = connected(true, QpOptions::default());
    let source = a.region(&mut host, 0x1000, 64);
    let target = b.region(&mut host, 0x2000, 64);
    let send =
        |side: &Side, wr_id| assert!(side.guest.post_send(&qa, &Post::send(wr_id, &[sge(&source, 0, 8)])));

    // The doorbell of the empty poll that follows the arm overwrites it before the device reads it.
    assert!(b.guest.post_receive(&qb, 1, &[sge(&target, 0, 8)]));
    b.guest.arm(&b.cq, false);
    assert!(b.guest.poll(&b.cq).is_none());
    send(&a, 1);
    run(&mut host, &[&a, &b]);
    assert_eq!(b.guest.notifications(), [b.cq.handle]);
    assert_eq!(b.completions(), [(1, 128, 0)]);

    // Exact arms: no event without an arm, and exactly one with an arm.
    for side in [&a, &b] {
        let device = host.devices.get_mut(side.guest.id).unwrap();
        device.set_doorbells(&mut host.engine, pvrdma::DoorbellMode::Trapped);
    }
    run(&mut host, &[&a, &b]);
    let _ = b.guest.notifications();
    let trap = |host: &mut Host<Memory>, side: &Side, page: u32, word: u64, value: u32| {
        let device = host.devices.get_mut(side.guest.id).unwrap();
        device.doorbell_write(&mut host.engine, u64::from(page) * 4096 + word, value);
    };
    // One completion consumes any arm.
    for (wr_id, armed) in [(2u64, false), (3, false), (4, true), (5, false)] {
        if armed {
            // Another context's page doesn't arm it.
            trap(&mut host, &b, 0, 4, 0x4000_0000 | b.cq.handle);
            trap(&mut host, &b, b.context.0, 4, 0x4000_0000 | b.cq.handle);
        }
        assert!(b.guest.post_receive(&qb, wr_id, &[sge(&target, 0, 8)]));
        trap(&mut host, &b, qb.uar, 0, 0x8000_0000 | qb.handle);
        send(&a, wr_id);
        trap(&mut host, &a, qa.uar, 0, 0x4000_0000 | qa.handle);
        run(&mut host, &[&a, &b]);
        let expected = usize::from(armed);
        let notified = b.guest.notifications().len();
        assert!(wr_id == 2 || notified == expected, "{wr_id}: {notified}");
        assert_eq!(b.completions(), [(wr_id, 128, 0)]);
    }
}

/// RESET and reuse: the guest's driver zeroes the indices only after the response.
#[test]
fn a_queue_pair_is_reset_and_used_again() {
    let (mut host, mut a, mut b, qa, qb) = connected(true, QpOptions::default());
    let source = a.region(&mut host, 0x1000, 4096);
    let target = b.region(&mut host, 0x2000, 4096);
    for round in 0..3u64 {
        for wr_id in 0..20 {
            assert!(b.guest.post_receive(&qb, wr_id, &[sge(&target, 0, 64)]));
            assert!(a.guest.post_send(&qa, &Post::send(wr_id, &[sge(&source, 0, 64)])));
        }
        run(&mut host, &[&a, &b]);
        assert_eq!((a.completions().len(), b.completions().len()), (20, 20), "round {round}");
        for (side, qp) in [(&mut a, &qa), (&mut b, &qb)] {
            side.guest.modify(&mut host, qp.handle, 1, |to| to.state = 0.into()).unwrap();
        }
        // Stale indices are visible now, and must have no effect.
        run(&mut host, &[&a, &b]);
        for (side, qp) in [(&mut a, &qa), (&mut b, &qb)] {
            side.guest.memory.zero(qp.pages[0], 16).unwrap();
            side.guest.to_init(&mut host, qp, ALL).unwrap();
        }
        a.guest.connect(&mut host, &qa, qb.qpn, b.gid).unwrap();
        b.guest.connect(&mut host, &qb, qa.qpn, a.gid).unwrap();
    }
}

/// Requests posted without a doorbell are found by the periodic scan.
#[test]
fn a_request_without_a_doorbell() {
    let (mut host, a, b, qa, _) = connected(true, QpOptions::default());
    run(&mut host, &[&a, &b]);
    assert!(a.guest.enqueue_send(&qa, &Post::remote(1, opcode::WRITE, 0, 0, &[])));
    host.now += 600_000_000;
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions().len(), 1);
}

/// Doorbells overwritten before the device read them: all but the last of a burst. Also when scans had found every queue pair idle, and
/// after one of them was created again.
#[test]
fn requests_behind_an_overwritten_doorbell() {
    let (mut host, mut a, mut b, ..) = connected(true, QpOptions::default());
    let pair = |host: &mut Host<Memory>, a: &mut Side, b: &mut Side| {
        let (qa, qb) = (a.qp(host, QpOptions::default()), b.qp(host, QpOptions::default()));
        a.guest.to_init(host, &qa, ALL).unwrap();
        b.guest.to_init(host, &qb, ALL).unwrap();
        a.guest.connect(host, &qa, qb.qpn, b.gid).unwrap();
        b.guest.connect(host, &qb, qa.qpn, a.gid).unwrap();
        qa
    };
    let mut qps: Vec<_> = (0..40).map(|_| pair(&mut host, &mut a, &mut b)).collect();
    for burst in 0..6u64 {
        run(&mut host, &[&a, &b]);
        // All are idle, and a scan has recorded it.
        host.devices.get_mut(a.guest.id).unwrap().scan_all(&mut host.engine);
        run(&mut host, &[&a, &b]);
        if burst == 3 {
            let gone = qps.remove(7);
            a.guest.destroy(&mut host, number::DESTROY_QP, gone.handle).unwrap();
            qps.push(pair(&mut host, &mut a, &mut b));
        }
        for (index, qp) in (0..).zip(&qps) {
            let write = Post::remote(burst * 100 + index, opcode::WRITE, 0, 0, &[]);
            assert!(a.guest.post_send(qp, &write));
        }
        run(&mut host, &[&a, &b]);
        let mut done: Vec<_> =
            a.completions().into_iter().map(|(wr_id, _, status)| (wr_id, status)).collect();
        done.sort_unstable();
        assert_eq!(done, (0..40).map(|index| (burst * 100 + index, 0)).collect::<Vec<_>>());
    }
}

/// 30,000 queue pairs in one process: handles stay within the driver's table, and idle ones cost a scan almost nothing.
#[test]
fn thirty_thousand_queue_pairs() {
    let mut host = Host::default();
    let mut a = side(&mut host, 1, true);
    let options = QpOptions { max_send_wr: 1, max_receive_wr: 1, ..QpOptions::default() };
    let first = a.qp(&mut host, options);
    let mut handles = std::collections::BTreeSet::from([first.handle]);
    // The command is still in the slot: the same rings, 30,000 times.
    for _ in 1..30_000 {
        host.write(a.guest.id, pvrdma::abi::registers::REQUEST, 0);
        assert_eq!(host.read(a.guest.id, pvrdma::abi::registers::ERROR), 0);
        let response = a.guest.response();
        let handle = u32::from_le_bytes(response[4..8].try_into().unwrap());
        assert!(handle < a.guest.capabilities.max_qp.get());
        assert!(handles.insert(handle), "handle {handle} given twice");
    }
    // Up to the limit, which includes the GSI queue pair and the unused handle 0.
    let mut more = 0;
    while more < 5000 && {
        host.write(a.guest.id, pvrdma::abi::registers::REQUEST, 0);
        host.read(a.guest.id, pvrdma::abi::registers::ERROR) == 0
    } {
        more += 1;
    }
    assert_eq!(30_000 + more, 32_767);
    host.write(a.guest.id, pvrdma::abi::registers::CONTROL, 2);
    assert_eq!(host.devices.get(a.guest.id).unwrap().report().queue_pairs, 0);
}
