//! A hostile guest.

use super::*;
use crate::vsock::muxer::{CONNECTIONS_MAX, RESETS_MAX};
use proptest::prelude::*;

#[test]
fn unknown_connections_types_and_sources() {
    let mut bench = Bench::new();
    for op in [Op::RESPONSE, Op::RW, Op::SHUTDOWN, Op::CREDIT_UPDATE, Op::CREDIT_REQUEST, Op(0), Op(999)] {
        bench.packet(from_guest(1, 2, op), &[]);
        let (reset, _) = bench.expect(Op::RST);
        assert_eq!((reset.src_port, reset.dst_port), (2, 1));
    }
    bench.packet(from_guest(1, 2, Op::RST), &[]);
    bench.expect_nothing();
    bench.packet(Header { src_cid: 99, ..from_guest(1, 2, Op::REQUEST) }, &[]);
    bench.expect_nothing();
    bench.packet(Header { kind: 2, ..from_guest(1, 2, Op::REQUEST) }, &[]);
    assert_eq!(bench.next().unwrap().0.kind, 2, "a reset of the type that isn't known");
    bench.packet(Header { dst_cid: 77, ..from_guest(1, 2, Op::REQUEST) }, &[]);
    assert_eq!(bench.next().unwrap().0.src_cid, 77);
}

#[test]
fn a_second_request_on_a_connection_ends_it() {
    let mut bench = Bench::new();
    let server = bench.serve(1);
    let mut program = bench.guest_connects(9, 1, &server);
    bench.packet(from_guest(9, 1, Op::REQUEST), &[]);
    bench.expect(Op::RST);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    bench.guest_connects(9, 1, &server);
}

#[test]
fn connecting_and_leaving_without_end_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let _server = bench.serve(1);
    for _ in 0..20 {
        for guest in 0..50 {
            bench.packet(from_guest(guest, 1, Op::REQUEST), &[]);
            bench.packet(from_guest(guest, 1, Op::RST), &[]);
        }
    }
    bench.expect_nothing();
    assert!(!bench.muxer.has_packets());
}

fn any_packet() -> impl Strategy<Value = (Header, usize)> {
    let op = prop_oneof![8 => 0u16..9, 1 => any::<u16>()];
    let cids =
        (prop_oneof![9 => Just(CID), 1 => any::<u64>()], prop_oneof![9 => Just(HOST_CID), 1 => any::<u64>()]);
    let kind = prop_oneof![9 => Just(TYPE_STREAM), 1 => any::<u16>()];
    let numbers = (any::<u32>(), prop_oneof![Just(1u32 << 20), any::<u32>()], any::<u32>());
    (op, cids, 0u32..6, 0u32..4, kind, numbers, prop_oneof![0usize..100, Just(65_536)]).prop_map(
        |(op, (src_cid, dst_cid), src_port, dst_port, kind, (flags, buf_alloc, fwd_cnt), length)| {
            let op = Op(op);
            let header =
                Header { src_cid, dst_cid, src_port, dst_port, len: 0, kind, op, flags, buf_alloc, fwd_cnt };
            (header, length)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_packets_keep_every_bound(
        packets in prop::collection::vec(any_packet(), 1..200),
        drain in prop::collection::vec(any::<bool>(), 200),
        chatty: bool,
    ) {
        let mut bench = Bench::new();
        let servers = [bench.serve(1), bench.serve(2)];
        for server in &servers {
            server.set_nonblocking(true).unwrap();
        }
        let zeros = vec![0; 65_536];
        let mut programs: Vec<UnixStream> = Vec::new();
        for ((header, length), drain) in packets.into_iter().zip(drain) {
            bench.packet(header, &zeros[..length]);
            programs.extend(servers.iter().filter_map(|server| server.accept().ok()).map(|(stream, _)| stream));
            if chatty {
                for program in &mut programs {
                    program.set_nonblocking(true).unwrap();
                    let _ = program.write(b"chat");
                }
            }
            bench.turn();
            if drain {
                while let Some((header, payload)) = bench.next() {
                    prop_assert_eq!(header.len as usize, payload.len());
                    if header.op == Op::RW {
                        prop_assert!(header.len > 0);
                    }
                }
            }
            prop_assert!(bench.muxer.connections() <= CONNECTIONS_MAX);
            if bench.muxer.is_congested() {
                // The thread processes no more packets then.
                while bench.next().is_some() {}
            }
        }
        bench.now += Duration::from_secs(100);
        bench.muxer.expire(&bench.watch, bench.now).unwrap();
        let mut left = 0;
        while bench.next().is_some() {
            left += 1;
            prop_assert!(left <= RESETS_MAX + 4 * CONNECTIONS_MAX);
        }
    }

    #[test]
    fn any_greeting_is_a_port_or_nothing(line in prop::collection::vec(any::<u8>(), 0..40)) {
        let _ = crate::vsock::muxer::parse_greeting(&line);
    }
}
