//! Requests that a guest may not post, by the rules of hardware.

use crate::support;

use pvrdma::abi::commands::qp_kind;
use pvrdma::abi::work::{opcode, send_flags};
use pvrdma_testbed::Post;
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::queues::sge;
use support::{connected, pattern, run, side};

/// Completion statuses.
const SUCCESS: u32 = 0;
const LOCAL_LENGTH: u32 = 1;
const OPERATION: u32 = 2;
const FLUSHED: u32 = 5;

/// A program may overwrite inline data right after posting. Queue pairs have no room for inline data, so such requests fail, and nothing is
/// sent.
#[test]
fn inline_data_is_refused_and_counted() {
    for code in [opcode::SEND, opcode::SEND_IMMEDIATE, opcode::WRITE, opcode::WRITE_IMMEDIATE] {
        let (mut host, mut a, mut b, qa, qb) = connected(true, QpOptions::default());
        let (source, target) = (a.region(&mut host, 0x10_0000, 4096), b.region(&mut host, 0x20_0000, 4096));
        source.write(&a.guest.memory, 0, &pattern(64, 3));
        assert!(b.guest.post_receive(&qb, 9, &[sge(&target, 0, 64)]));
        let post = Post::remote(1, code, target.address, target.rkey, &[sge(&source, 0, 64)]);
        assert!(a.guest.post_send(&qa, &post.flags(send_flags::INLINE | send_flags::SIGNALED)));
        // Overwritten at once, as ibv_post_send(3) permits.
        source.write(&a.guest.memory, 0, &pattern(64, 4));
        assert!(a.guest.post_send(&qa, &Post::send(2, &[])));
        run(&mut host, &[&a, &b]);
        let done: Vec<_> = a.completions().into_iter().map(|(id, _, status)| (id, status)).collect();
        assert_eq!(done, [(1, OPERATION), (2, FLUSHED)], "opcode {code}");
        assert_eq!(target.read(&b.guest.memory, 0, 64), [0; 64]);
        assert!(b.completions().is_empty());
        assert_eq!(host.engine.counters(a.guest.id).req_inline_refused, 1);
    }
}

/// No bytes fit a capacity of 0, and READs have no inline data: there the flag has no effect.
#[test]
fn the_inline_flag_without_data_to_copy_is_no_error() {
    let (mut host, mut a, mut b, qa, qb) = connected(true, QpOptions::default());
    let (source, target) = (a.region(&mut host, 0x10_0000, 4096), b.region(&mut host, 0x20_0000, 4096));
    assert!(b.guest.post_receive(&qb, 9, &[]));
    let flags = send_flags::INLINE | send_flags::SIGNALED;
    assert!(a.guest.post_send(&qa, &Post::send(1, &[]).flags(flags)));
    let read = Post::remote(2, opcode::READ, target.address, target.rkey, &[sge(&source, 0, 8)]);
    assert!(a.guest.post_send(&qa, &read.flags(flags)));
    run(&mut host, &[&a, &b]);
    assert_eq!(a.completions(), [(1, 0, SUCCESS), (2, 2, SUCCESS)]);
    assert_eq!(host.engine.counters(a.guest.id).req_inline_refused, 0);
}

/// The port's MTU is the reported one: 1,024 bytes with an Ethernet MTU of 1,500.
#[test]
fn a_datagram_above_the_ports_mtu_is_not_sent() {
    for (length, status) in
        [(1024, SUCCESS), (1025, LOCAL_LENGTH), (1034, LOCAL_LENGTH), (4096, LOCAL_LENGTH)]
    {
        let mut host = pvrdma_testbed::Host::default();
        let (mut a, mut b) = (side(&mut host, 1, true), side(&mut host, 2, true));
        let options = QpOptions { kind: qp_kind::UD, ..QpOptions::default() };
        let (qa, qb) = (a.qp(&mut host, options), b.qp(&mut host, options));
        a.guest.start_datagrams(&mut host, &qa, 0x77).unwrap();
        b.guest.start_datagrams(&mut host, &qb, 0x77).unwrap();
        let (source, target) = (a.region(&mut host, 0x10_0000, 8192), b.region(&mut host, 0x20_0000, 8192));
        assert!(b.guest.post_receive(&qb, 9, &[sge(&target, 0, 8000)]));
        let post = Post::datagram(1, a.pd, qb.qpn, 0x77, b.gid, &[sge(&source, 0, length)]);
        assert!(a.guest.post_send(&qa, &post));
        run(&mut host, &[&a, &b]);
        assert_eq!(a.completions(), [(1, 0, status)], "{length} bytes");
        assert_eq!(b.completions().len(), usize::from(status == SUCCESS));
        // A queue pair number has 24 bits: the bits above are dropped. No queue pair has the remaining number, so the datagram is lost.
        if status == SUCCESS {
            let qpn = 0xAB00_0000 | (qb.qpn ^ 0x00FF_0000);
            assert!(b.guest.post_receive(&qb, 10, &[sge(&target, 0, 8000)]));
            for (id, qpn) in [(2, qpn), (3, qb.qpn)] {
                let post = Post::datagram(id, a.pd, qpn, 0x77, b.gid, &[sge(&source, 0, 8)]);
                assert!(a.guest.post_send(&qa, &post));
            }
            run(&mut host, &[&a, &b]);
            assert_eq!(a.completions(), [(2, 0, SUCCESS), (3, 0, SUCCESS)]);
            assert_eq!(b.completions().len(), 1);
        }
    }
}
