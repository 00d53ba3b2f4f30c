//! Connections: establishing, using and ending them.

use super::*;
use crate::vsock::connection::BUFFER;
use crate::vsock::muxer::{CLOSING_TIME, GREETING_TIME, REQUEST_TIME, parse_greeting};
use crate::vsock::packet::shutdown;

#[test]
fn a_program_of_the_host_connects_talks_and_leaves() {
    let mut bench = Bench::new();
    let mut program = bench.connect("CONNECT 52\nearly");
    let (request, _) = bench.expect(Op::REQUEST);
    assert_eq!((request.dst_port, request.buf_alloc), (52, BUFFER));
    let host = request.src_port;
    bench.expect_nothing();
    bench.packet(from_guest(52, host, Op::RESPONSE), &[]);
    read_exactly(&mut program, format!("OK {host}\n").as_bytes());
    assert_eq!(bench.expect(Op::RW).1, b"early", "what follows the greeting is data");
    bench.packet(from_guest(52, host, Op::RW), b"from the guest");
    read_exactly(&mut program, b"from the guest");
    program.write_all(b"from the host").unwrap();
    assert_eq!(bench.expect(Op::RW).1, b"from the host");
    drop(program);
    assert_eq!(bench.expect(Op::SHUTDOWN).0.flags, shutdown::BOTH);
    assert_eq!(bench.muxer.connections(), 1);
    bench.packet(from_guest(52, host, Op::RST), &[]);
    assert_eq!(bench.muxer.connections(), 0);
    bench.expect_nothing();
}

#[test]
fn a_guest_connects_to_a_program_talks_and_leaves() {
    let mut bench = Bench::new();
    let server = bench.serve(1234);
    let mut program = bench.guest_connects(9, 1234, &server);
    bench.packet(from_guest(9, 1234, Op::RW), b"hello");
    read_exactly(&mut program, b"hello");
    program.write_all(b"answer").unwrap();
    assert_eq!(bench.expect(Op::RW).1, b"answer");
    let close = Header { flags: shutdown::BOTH, ..from_guest(9, 1234, Op::SHUTDOWN) };
    bench.packet(close, &[]);
    bench.expect(Op::RST);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(bench.muxer.connections(), 0);
}

#[test]
fn a_port_that_nobody_serves_is_refused() {
    let mut bench = Bench::new();
    bench.packet(from_guest(9, 77, Op::REQUEST), &[]);
    let (reset, _) = bench.expect(Op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (77, 9));
    let stale = bench.serve(78);
    drop(stale);
    bench.packet(from_guest(9, 78, Op::REQUEST), &[]);
    bench.expect(Op::RST);
    assert_eq!(bench.counters.refused.get(), 2);
}

#[test]
fn a_guest_that_refuses_closes_the_programs_socket() {
    let mut bench = Bench::new();
    let mut program = bench.connect("connect 7\r\n");
    let (request, _) = bench.expect(Op::REQUEST);
    bench.packet(from_guest(7, request.src_port, Op::RST), &[]);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0, "closed without OK");
    assert_eq!(bench.muxer.connections(), 0);
}

#[test]
fn each_half_closes_alone() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    // The program closes first; the guest continues to send.
    let mut program = bench.guest_connects(9, 1, &server);
    program.write_all(b"last words").unwrap();
    program.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(bench.expect(Op::RW).1, b"last words");
    assert_eq!(bench.expect(Op::SHUTDOWN).0.flags, shutdown::SEND);
    bench.packet(from_guest(9, 1, Op::RW), b"still here");
    read_exactly(&mut program, b"still here");
    drop(program);
    assert_eq!(bench.expect(Op::SHUTDOWN).0.flags, shutdown::BOTH);
    bench.packet(from_guest(9, 1, Op::RST), &[]);
    // The guest closes first; the program continues to send.
    let mut program = bench.guest_connects(10, 1, &server);
    bench.packet(Header { flags: shutdown::SEND, ..from_guest(10, 1, Op::SHUTDOWN) }, &[]);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    program.write_all(b"an answer").unwrap();
    assert_eq!(bench.expect(Op::RW).1, b"an answer");
    bench.packet(from_guest(10, 1, Op::RW), b"against its word");
    bench.expect(Op::RST);
    assert_eq!(bench.muxer.connections(), 0);
}

#[test]
fn what_a_program_wrote_before_it_left_still_arrives() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    let words = pattern(100_000, 1);
    program.write_all(&words).unwrap();
    // It exits without reading this.
    bench.packet(from_guest(9, 1, Op::RW), b"unread");
    drop(program);
    let mut got = Vec::new();
    let flags = loop {
        let (header, payload) = bench.next().expect("data, then a shutdown");
        match header.op {
            Op::RW => got.extend(payload),
            Op::SHUTDOWN if header.flags == shutdown::BOTH => break header.flags,
            _ => {}
        }
    };
    assert!(got == words, "{} of {} bytes", got.len(), words.len());
    assert_eq!(flags, shutdown::BOTH);
}

#[test]
fn what_the_guest_wrote_before_it_closed_still_arrives() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    let words = pattern(BUFFER as usize, 2);
    for chunk in words.chunks(65_536) {
        bench.packet(from_guest(9, 1, Op::RW), chunk);
    }
    bench.packet(Header { flags: shutdown::BOTH, ..from_guest(9, 1, Op::SHUTDOWN) }, &[]);
    let mut got: Vec<u8> = Vec::new();
    let mut buffer = [0; 4096];
    while got.len() < words.len() {
        let count = program.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "{} of {} bytes", got.len(), words.len());
        got.extend(&buffer[..count]);
        bench.turn();
    }
    assert!(got == words, "the bytes differ");
    while let Some((header, _)) = bench.next() {
        assert!(matches!(header.op, Op::RST | Op::CREDIT_UPDATE));
    }
    assert_eq!(bench.muxer.connections(), 0);
}

#[test]
fn what_takes_too_long_is_given_up() {
    let mut bench = Bench::new();
    let mut silent = bench.connect("CONN");
    let mut asked = bench.connect("CONNECT 5\n");
    let (request, _) = bench.expect(Op::REQUEST);
    bench.now += GREETING_TIME.max(REQUEST_TIME) + Duration::from_millis(1);
    bench.muxer.expire(&bench.watch, bench.now).unwrap();
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(asked.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(bench.expect(Op::RST).0.src_port, request.src_port);
    // A closed connection that the guest never confirms.
    let server = bench.serve(1);
    drop(bench.guest_connects(9, 1, &server));
    bench.expect(Op::SHUTDOWN);
    assert_eq!(bench.muxer.deadline(), Some(bench.now + CLOSING_TIME));
    bench.now += CLOSING_TIME;
    bench.muxer.expire(&bench.watch, bench.now).unwrap();
    bench.expect(Op::RST);
    assert_eq!((bench.muxer.connections(), bench.muxer.deadline()), (0, None));
}

#[test]
fn greetings_are_taken_or_refused() {
    for (line, port) in [
        ("CONNECT 0\n", Some(0)),
        ("connect 4294967295\n", Some(u32::MAX)),
        ("CONNECT 12\r\n", Some(12)),
        ("CONNECT 4294967296\n", None),
        ("CONNECT -1\n", None),
        ("CONNECT +1\n", None),
        ("CONNECT\n", None),
        ("CONNECT 1 2\n", None),
        ("HELLO 1\n", None),
        ("CONNECT 1", None),
        ("\n", None),
    ] {
        assert_eq!(parse_greeting(line.as_bytes()), port, "{line:?}");
    }
    let mut bench = Bench::new();
    for bad in ["GET / HTTP/1.1\r\n", &"x".repeat(100), "CONNECT x\n"] {
        let mut program = bench.connect(bad);
        bench.turn();
        // Closed at once; a reset instead of an end if unread bytes are left.
        assert!(matches!(program.read(&mut [0; 8]), Ok(0) | Err(_)), "{bad:?}");
    }
    let mut slow = bench.connect("CONN");
    bench.turn();
    slow.write_all(b"ECT 3").unwrap();
    bench.turn();
    slow.write_all(b"3\n").unwrap();
    assert_eq!(bench.expect(Op::REQUEST).0.dst_port, 33);
}
