//! Credit in both directions, many connections.

use super::*;
use crate::vsock::connection::BUFFER;
use crate::vsock::muxer::{CONNECTIONS_MAX, GREETERS_MAX};

#[test]
fn the_guest_is_never_sent_more_than_it_has_room_for() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    let words = pattern(50_000, 3);
    program.write_all(&words).unwrap();
    let room = |taken: u32| Header { buf_alloc: 3000, fwd_cnt: taken, ..from_guest(9, 1, Op::CREDIT_UPDATE) };
    bench.packet(room(0), &[]);
    let mut got = Vec::new();
    while got.len() < words.len() {
        let mut burst = 0;
        while let Some((header, payload)) = bench.next() {
            match header.op {
                Op::RW => {
                    burst += payload.len();
                    got.extend(payload);
                }
                op => assert_eq!(op, Op::CREDIT_REQUEST),
            }
        }
        assert!((1..=3000).contains(&burst), "{burst} bytes in one window");
        bench.packet(room(u32::try_from(got.len()).unwrap()), &[]);
    }
    assert!(got == words, "the bytes differ");
    // A guest that claims to have received more than was sent has no room.
    program.write_all(b"more").unwrap();
    bench.packet(room(u32::try_from(got.len()).unwrap() + 1), &[]);
    bench.expect(Op::CREDIT_REQUEST);
    bench.expect_nothing();
}

#[test]
fn a_program_that_leaves_while_the_guest_has_no_room_is_reported_and_nothing_spins() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    let full = |taken: u32| Header { buf_alloc: 10, fwd_cnt: taken, ..from_guest(9, 1, Op::CREDIT_UPDATE) };
    bench.packet(full(0), &[]);
    program.write_all(&pattern(100, 8)).unwrap();
    assert_eq!(bench.expect(Op::RW).1.len(), 10);
    bench.expect(Op::CREDIT_REQUEST);
    bench.expect_nothing();
    // The program exits; its data is still in the socket, and the guest still has no room.
    drop(program);
    bench.packet(from_guest_full(b"x"), b"x");
    assert_eq!(bench.expect(Op::SHUTDOWN).0.flags, crate::vsock::packet::shutdown::RECEIVE);
    bench.expect_nothing();
    let mut got = 10;
    while got < 100 {
        bench.packet(full(got), &[]);
        while let Some((header, _)) = bench.next() {
            got += header.len;
        }
    }
    bench.packet(full(got), &[]);
    assert_eq!(bench.expect(Op::SHUTDOWN).0.flags, crate::vsock::packet::shutdown::BOTH);
}

/// Data of a guest whose buffer of 10 bytes is full.
fn from_guest_full(payload: &[u8]) -> Header {
    assert!(!payload.is_empty());
    Header { buf_alloc: 10, fwd_cnt: 0, ..from_guest(9, 1, Op::RW) }
}

#[test]
fn the_guest_may_send_as_much_as_it_was_told_and_no_more() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let _program = bench.guest_connects(9, 1, &server);
    // The program reads nothing. Bytes that the socket accepts count as forwarded.
    let (mut sent, mut told) = (0u32, 0u32);
    let chunk = pattern(32_768, 4);
    for _ in 0..1000 {
        if sent - told + 32_768 > BUFFER {
            break;
        }
        bench.packet(from_guest(9, 1, Op::RW), &chunk);
        sent += 32_768;
        while let Some((header, _)) = bench.next() {
            assert_eq!(header.op, Op::CREDIT_UPDATE);
            told = header.fwd_cnt;
        }
    }
    assert_eq!(sent - told, BUFFER, "the window fills");
    bench.packet(from_guest(9, 1, Op::CREDIT_REQUEST), &[]);
    let (answer, _) = bench.expect(Op::CREDIT_UPDATE);
    assert_eq!((answer.fwd_cnt, answer.buf_alloc), (told, BUFFER));
    assert_eq!(bench.muxer.connections(), 1);
    bench.packet(from_guest(9, 1, Op::RW), b"x");
    bench.expect(Op::RST);
    assert_eq!(bench.muxer.connections(), 0);
}

#[test]
fn a_slow_program_gets_every_byte() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    let words = pattern(3_000_000, 5);
    let (mut sent, mut told, mut got) = (0usize, 0usize, Vec::<u8>::new());
    let mut buffer = vec![0; 7_001];
    while got.len() < words.len() {
        let room = BUFFER as usize - (sent - told);
        let now = room.min(words.len() - sent).min(65_536);
        if now > 0 {
            bench.packet(from_guest(9, 1, Op::RW), &words[sent..sent + now]);
            sent += now;
        }
        let count = program.read(&mut buffer).unwrap();
        got.extend(&buffer[..count]);
        while let Some((header, _)) = bench.next() {
            assert_eq!(header.op, Op::CREDIT_UPDATE);
            told = header.fwd_cnt as usize;
        }
    }
    assert!(got == words, "the bytes differ");
}

#[test]
fn as_many_connections_as_allowed_and_each_gets_its_turn() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut programs = Vec::new();
    for guest in 0..u32::try_from(CONNECTIONS_MAX).unwrap() {
        bench.packet(from_guest(guest, 1, Op::REQUEST), &[]);
        assert_eq!(bench.pop().unwrap().0.op, Op::RESPONSE);
        programs.push(server.accept().unwrap().0);
    }
    bench.packet(from_guest(70_000, 1, Op::REQUEST), &[]);
    bench.expect(Op::RST);
    let program = bench.connect("CONNECT 5\n");
    bench.expect_nothing();
    drop(program);
    let words = pattern(100_000 + CONNECTIONS_MAX, 6);
    for (number, program) in programs.iter_mut().enumerate() {
        program.write_all(&words[number..number + 100_000]).unwrap();
    }
    let mut got = vec![Vec::new(); CONNECTIONS_MAX];
    let mut rounds = 0;
    bench.turn();
    while let Some((header, payload)) = bench.pop() {
        if header.op == Op::RW {
            let list = &mut got[header.dst_port as usize];
            list.extend(payload);
            rounds += 1;
            if rounds == CONNECTIONS_MAX {
                assert!(got.iter().all(|bytes| !bytes.is_empty()), "somebody starves");
            }
        }
        if rounds >= 2 * CONNECTIONS_MAX {
            break;
        }
    }
    for (number, bytes) in got.iter().enumerate() {
        assert!(*bytes == words[number..number + bytes.len()], "connection {number}");
    }
    bench.muxer.clear();
    assert_eq!(bench.counters.connections(), 0);
    for program in &mut programs {
        program.set_nonblocking(true).unwrap();
        assert!(
            !matches!(program.read(&mut [0; 8]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
        );
    }
}

/// Programs of the host that are refused for lack of room get an error, and don't fill the log.
#[test]
fn what_refused_programs_make_the_muxer_log_has_a_limit() {
    const PROGRAMS: usize = 500;
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut programs = Vec::new();
    for guest in 0..u32::try_from(CONNECTIONS_MAX).unwrap() {
        bench.packet(from_guest(guest, 1, Op::REQUEST), &[]);
        assert_eq!(bench.pop().unwrap().0.op, Op::RESPONSE);
        programs.push(server.accept().unwrap().0);
    }
    let lines = log_capture::lines_of(|| {
        for _ in 0..PROGRAMS {
            let program = bench.connect("CONNECT 5\n");
            bench.expect_nothing();
            drop(program);
        }
    });
    let refused = lines.iter().filter(|line| line.contains("vsock port 5 was refused")).count();
    assert!((10..PROGRAMS / 2).contains(&refused), "{refused} lines");
}

#[test]
fn silent_programs_are_bounded_and_the_next_ones_wait() {
    let mut bench = Bench::new();
    let mut silent: Vec<_> = (0..GREETERS_MAX)
        .map(|_| {
            let program = bench.connect("");
            bench.turn();
            program
        })
        .collect();
    let late = bench.connect("CONNECT 8\n");
    bench.expect_nothing();
    silent.pop();
    assert_eq!(bench.expect(Op::REQUEST).0.dst_port, 8);
    drop(late);
}
