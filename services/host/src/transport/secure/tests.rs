use super::super::directory::VmId;
use super::super::header::Kind;
use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

fn cluster_key(seed: u8) -> ClusterKey {
    ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap().wrapping_mul(7) ^ seed)).unwrap()
}

fn address(host: u8) -> SocketAddr {
    format!("10.0.0.{host}:4792").parse().unwrap()
}

/// Two hosts and the network between them: the test delivers each packet.
struct Pair {
    hosts: [Secure; 2],
    now: u64,
}

fn knows(from: SocketAddr) -> Option<SocketAddr> {
    host_of(&[address(1), address(2)], from)
}

impl Pair {
    fn new() -> Self {
        Self::with(cluster_key(1), cluster_key(1))
    }

    fn with(left: ClusterKey, right: ClusterKey) -> Self {
        let host = |key, number| Secure::new(key, address(number)).unwrap();
        Self { hosts: [host(left, 1), host(right, 2)], now: 10 * SECOND }
    }

    fn at(side: usize) -> SocketAddr {
        address(u8::try_from(side).unwrap() + 1)
    }

    fn sent(&mut self, side: usize) -> Vec<Vec<u8>> {
        self.hosts[side].take_outbox().into_iter().map(|(_, message)| message).collect()
    }

    /// Delivers a packet of the other side to `side`.
    fn deliver(&mut self, side: usize, packet: &[u8]) -> Result<Option<(Header, Vec<u8>)>, Dropped> {
        let mut packet = packet.to_vec();
        match self.hosts[side].arrive(Self::at(1 - side), &mut packet, self.now, &knows)? {
            Arrived::Handshake => Ok(None),
            Arrived::Data { host, header, packet } => {
                assert_eq!(host, Self::at(1 - side));
                Ok(Some((header, packet.to_vec())))
            }
        }
    }

    /// Seals a body on `side`; `None`: there is no session.
    fn seal(&mut self, side: usize, lane: usize, body: &[u8]) -> Option<Vec<u8>> {
        let mut packet = plain(body);
        let len = packet.len();
        let done = self.hosts[side].seal(Self::at(1 - side), lane, &mut packet, len, self.now);
        (done == Sealing::Done).then_some(packet)
    }

    /// Delivers messages until both sides are silent.
    fn talk(&mut self) {
        for _ in 0..10 {
            for side in 0..2 {
                for message in self.sent(side) {
                    let _ = self.deliver(1 - side, &message);
                }
            }
        }
        assert!(self.sent(0).is_empty() && self.sent(1).is_empty());
        for host in &self.hosts {
            assert_eq!(host.next(), host.find_next(), "what is remembered is what is found");
        }
    }

    fn connect(&mut self) {
        assert!(self.seal(0, 0, b"first").is_none(), "nothing leaves without a session");
        self.talk();
    }
}

fn header() -> Header {
    Header { kind: Kind::Connected, source: VmId(1), destination: VmId(2), segment: 77 }
}

fn plain(body: &[u8]) -> Vec<u8> {
    let mut packet = header().encode(SEALED).to_vec();
    packet.resize(DATA_HEADER, 0);
    packet.extend_from_slice(body);
    packet.resize(packet.len() + TAG, 0);
    packet
}

#[test]
fn what_is_sealed_here_opens_there_both_ways_and_reads_otherwise_on_the_way() {
    let mut pair = Pair::new();
    pair.connect();
    let body: Vec<u8> = (0..1000u32).map(|at| at.to_le_bytes()[0]).collect();
    for side in [0, 1, 0] {
        let packet = pair.seal(side, 3, &body).unwrap();
        assert_eq!(packet.len(), body.len() + DATA_HEADER + TAG);
        assert!(!packet.windows(16).any(|bytes| body.windows(16).any(|other| other == bytes)));
        assert_eq!(&packet[..HEADER], &header().encode(SEALED), "routing stays readable");
        assert_eq!(pair.deliver(1 - side, &packet), Ok(Some((header(), body.clone()))));
    }
    for side in 0..2 {
        assert_eq!(pair.hosts[side].report()[0].session, "established");
        assert_eq!(pair.hosts[side].counters().sessions_established, 1);
    }
}

#[test]
fn a_packet_opens_once() {
    let mut pair = Pair::new();
    pair.connect();
    let packets: Vec<_> = (0..300u16).map(|at| pair.seal(0, 0, &at.to_le_bytes()).unwrap()).collect();
    // In any order.
    for packet in packets.iter().rev() {
        assert!(pair.deliver(1, packet).is_ok());
    }
    for packet in &packets {
        assert_eq!(pair.deliver(1, packet), Err(Dropped::Replayed));
    }
    // Nor does it open at its sender.
    let back = pair.seal(0, 0, b"back").unwrap();
    assert!(pair.deliver(0, &back).is_err());
}

#[test]
fn lanes_count_by_themselves() {
    let mut pair = Pair::new();
    pair.connect();
    let early = pair.seal(0, 1, b"early").unwrap();
    for _ in 0..3 * replay::REACH {
        let packet = pair.seal(0, 0, b"many").unwrap();
        assert!(pair.deliver(1, &packet).is_ok());
    }
    assert!(pair.deliver(1, &early).is_ok(), "other sockets' packets don't age it");
    assert!(pair.seal(0, LANES, b"no such lane").is_none());
}

#[test]
fn another_key_or_another_address_makes_no_session() {
    let mut pair = Pair::with(cluster_key(1), cluster_key(2));
    assert!(pair.seal(0, 0, b"first").is_none());
    let hello = pair.sent(0).remove(0);
    assert_eq!(pair.deliver(1, &hello), Err(Dropped::Handshake));
    assert!(pair.sent(1).is_empty() && pair.hosts[1].sessions.is_empty());

    let mut pair = Pair::new();
    assert!(pair.seal(0, 0, b"first").is_none());
    let hello = pair.sent(0).remove(0);
    // Replayed to its sender, as if from the other.
    assert_eq!(pair.deliver(0, &hello), Err(Dropped::Handshake));
    let mut copy = hello.clone();
    let stranger = "10.0.0.3:4792".parse().unwrap();
    assert_eq!(pair.hosts[1].arrive(stranger, &mut copy, 0, &knows), Err(Dropped::Stranger));
    let second_socket = "10.0.0.1:4793".parse().unwrap();
    assert_eq!(pair.hosts[1].arrive(second_socket, &mut copy, 0, &knows), Err(Dropped::Stranger));
    assert!(pair.deliver(1, &hello).is_ok());
}

#[test]
fn an_old_hello_changes_nothing() {
    let mut pair = Pair::new();
    assert!(pair.seal(0, 0, b"first").is_none());
    let hello = pair.sent(0).remove(0);
    assert!(pair.deliver(1, &hello).is_ok());
    for answer in pair.sent(1) {
        assert!(pair.deliver(0, &answer).is_ok());
    }
    for _ in 0..100 {
        assert_eq!(pair.deliver(1, &hello), Err(Dropped::OldHandshake));
    }
    assert_eq!(pair.hosts[1].sessions.len(), 1);
    pair.talk();
    let packet = pair.seal(0, 0, b"goes on").unwrap();
    assert!(pair.deliver(1, &packet).is_ok());
}

#[test]
fn a_forged_answer_does_not_spoil_the_right_one() {
    let mut pair = Pair::new();
    assert!(pair.seal(0, 0, b"first").is_none());
    let hello = pair.sent(0).remove(0);
    assert!(pair.deliver(1, &hello).is_ok());
    let answer = pair.sent(1).remove(0);
    for at in 8..answer.len() {
        let mut forged = answer.clone();
        forged[at] ^= 0x10;
        assert_eq!(pair.deliver(0, &forged), Err(Dropped::Handshake), "byte {at}");
    }
    assert!(pair.deliver(0, &answer).is_ok());
    assert_eq!(pair.deliver(0, &answer), Err(Dropped::OldHandshake), "once");
    pair.talk();
    let packet = pair.seal(1, 0, b"works").unwrap();
    assert!(pair.deliver(0, &packet).is_ok());
}

#[test]
fn both_may_begin_at_once() {
    let mut pair = Pair::new();
    assert!(pair.seal(0, 0, b"from here").is_none() && pair.seal(1, 0, b"from there").is_none());
    pair.talk();
    for round in 0..20u8 {
        let side = usize::from(round % 2);
        let packet = pair.seal(side, 0, &[round]).unwrap();
        assert_eq!(pair.deliver(1 - side, &packet), Ok(Some((header(), vec![round]))));
    }
}

#[test]
fn messages_may_be_lost_at_any_step() {
    for lost in 0..4 {
        let mut pair = Pair::new();
        let mut number = 0;
        let mut through = false;
        for _ in 0..200 {
            pair.now += 50 * MS;
            for side in 0..2 {
                if let Some(packet) = pair.seal(side, 0, b"data") {
                    let delivered = pair.deliver(1 - side, &packet);
                    through |= side == 0 && delivered.is_ok();
                }
                for message in pair.sent(side) {
                    number += 1;
                    if number - 1 != lost {
                        let _ = pair.deliver(1 - side, &message);
                    }
                }
            }
        }
        assert!(through, "message {lost}");
    }
}

#[test]
fn a_host_that_was_restarted_has_a_session_again_at_once() {
    let mut pair = Pair::new();
    pair.connect();
    pair.hosts[1] = Secure::new(cluster_key(1), address(2)).unwrap();
    pair.now += SECOND;
    let packet = pair.seal(0, 0, b"to the old one").unwrap();
    assert_eq!(pair.deliver(1, &packet), Err(Dropped::NoSession));
    pair.talk();
    let packet = pair.seal(0, 0, b"to the new one").unwrap();
    assert_eq!(pair.deliver(1, &packet), Ok(Some((header(), b"to the new one".to_vec()))));
    let packet = pair.seal(1, 0, b"and back").unwrap();
    assert!(pair.deliver(0, &packet).is_ok());
}

#[test]
fn strangers_packets_of_no_session_cause_a_hello_a_second_at_most() {
    let mut pair = Pair::new();
    let mut forged = plain(b"x");
    forged[16..20].copy_from_slice(&[1, 2, 3, 4]);
    let mut hellos = 0;
    for _ in 0..10_000 {
        pair.now += MS;
        assert_eq!(pair.deliver(1, &forged), Err(Dropped::NoSession));
        hellos += pair.sent(1).len();
    }
    assert!((1..=10).contains(&hellos), "{hellos}");
}

#[test]
fn a_host_whose_clock_went_back_is_reached_by_the_other_side() {
    let mut pair = Pair::new();
    pair.connect();
    pair.hosts[0] = Secure::new(cluster_key(1), address(1)).unwrap();
    pair.hosts[0].clock = || 1;
    pair.now += SECOND;
    assert!(pair.seal(0, 0, b"first").is_none());
    let hello = pair.sent(0).remove(0);
    assert_eq!(pair.deliver(1, &hello), Err(Dropped::OldHandshake));
    // The other one sends without a response, until it begins a handshake.
    let mut through = false;
    for _ in 0..100 {
        pair.now += 50 * MS;
        if let Some(packet) = pair.seal(1, 0, b"are you there") {
            through |= pair.deliver(0, &packet).is_ok();
        }
        pair.talk();
    }
    assert!(through);
}

#[test]
fn sessions_are_replaced_and_then_gone_without_a_packet_lost() {
    let mut pair = Pair::new();
    pair.connect();
    let start = pair.now;
    let first: Vec<u32> = pair.hosts[0].sessions.keys().copied().collect();
    let mut late = None;
    while pair.now < start + 2 * OPEN_UNTIL {
        pair.now += SECOND;
        for side in 0..2 {
            let packet = pair.seal(side, 0, b"steady").unwrap();
            // One packet of the first session is delayed until the second one is in use.
            if side == 1 && pair.now - start == REKEY_AFTER {
                late = Some(packet);
            } else {
                assert!(pair.deliver(1 - side, &packet).is_ok(), "{} s", (pair.now - start) / SECOND);
            }
            pair.hosts[side].expire(pair.now);
        }
        pair.talk();
        if pair.now - start == REKEY_AFTER + 2 * SECOND {
            assert!(pair.deliver(0, &late.take().unwrap()).is_ok());
        }
        assert!(pair.hosts.iter().all(|host| host.sessions.len() <= 3));
    }
    assert!(first.iter().all(|number| !pair.hosts[0].sessions.contains_key(number)), "its keys are gone");
    let established = pair.hosts[0].counters().sessions_established;
    assert!((3..=5).contains(&established), "{established}");
    // Silent hosts remove all sessions.
    pair.now += OPEN_UNTIL;
    for host in &mut pair.hosts {
        host.expire(pair.now);
        assert!(host.sessions.is_empty() && host.next().is_none());
    }
    assert!(pair.seal(0, 0, b"again").is_none());
    pair.talk();
    assert!(pair.seal(0, 0, b"again").is_some());
}

#[test]
fn packets_wait_for_a_session_in_bounds() {
    let mut pair = Pair::new();
    let to = address(2);
    let packet = plain(&[7; 1000]);
    for _ in 0..1000 {
        let (mut copy, len) = (packet.clone(), packet.len());
        assert_eq!(pair.hosts[0].seal(to, 0, &mut copy, len, pair.now), Sealing::NoSession);
        pair.hosts[0].hold(to, 0, &packet, len, false, pair.now);
    }
    let peer = &pair.hosts[0].peers[0];
    assert!(peer.held_bytes <= MOST_HELD && peer.held.len() == MOST_HELD / packet.len());
    let counters = pair.hosts[0].counters();
    assert_eq!(counters.packets_held + counters.packets_unsent, 1000);
    assert!(pair.hosts[0].take_held().is_none());
    pair.talk();
    let mut count = 0;
    while let Some(mut held) = pair.hosts[0].take_held() {
        assert_eq!(pair.hosts[0].seal(to, 0, &mut held.packets, held.stride, pair.now), Sealing::Done);
        assert!(pair.deliver(1, &held.packets).is_ok());
        count += 1;
    }
    assert_eq!((count, pair.hosts[0].peers[0].held_bytes), (counters.packets_held, 0));
    // Without a response, attempts end.
    let mut alone = Pair::new();
    let _ = alone.seal(0, 0, b"x");
    alone.hosts[0].hold(to, 0, &packet, packet.len(), false, alone.now);
    let mut asked = 0;
    while let Some(next) = alone.hosts[0].next() {
        assert!(next > alone.now, "time goes on");
        alone.now = next;
        alone.hosts[0].expire(next);
        asked += alone.sent(0).len();
    }
    assert_eq!(alone.hosts[0].counters().packets_unsent, 1);
    assert!((3..=6).contains(&asked), "{asked}");
}

#[test]
fn a_key_seals_only_so_much() {
    let mut session = Session::new(1, 0, true, &[1; 32], &[2; 32]).unwrap();
    let mut other = Session::new(1, 0, false, &[2; 32], &[1; 32]).unwrap();
    let mut packet = plain(b"x");
    assert!(session.seal(0, &mut packet).is_some() && other.open(&mut packet).is_ok());
    session.use_up();
    assert!(session.seal(0, &mut plain(b"x")).is_none());
    assert!(session.seal(0, &mut [0; DATA_HEADER]).is_none());
}

#[test]
fn hosts_are_told_apart_by_their_ports() {
    let hosts = [address(1), "10.0.0.1:4796".parse().unwrap(), address(2)];
    for (from, host) in [
        ("10.0.0.1:4792", Some(hosts[0])),
        ("10.0.0.1:4793", Some(hosts[0])),
        ("10.0.0.1:4797", Some(hosts[1])),
        ("10.0.0.2:4791", None),
        ("10.0.0.2:4808", None),
        ("10.0.0.4:4792", None),
    ] {
        assert_eq!(host_of(&hosts, from.parse().unwrap()), host, "{from}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// After any change on the way, a packet doesn't open and changes nothing; the unchanged packet opens afterwards.
    #[test]
    fn nothing_that_was_changed_opens(
        body in prop::collection::vec(any::<u8>(), 0..200),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut pair = Pair::new();
        pair.connect();
        let packet = pair.seal(0, 2, &body).unwrap();
        let mut changed = packet.clone();
        for (at, mask) in flips {
            let at = at.index(changed.len());
            changed[at] ^= mask;
        }
        if changed != packet {
            prop_assert!(pair.deliver(1, &changed).is_err());
        }
        let short = &packet[..cut.index(packet.len())];
        prop_assert!(pair.deliver(1, short).is_err());
        let mut long = packet.clone();
        long.push(0);
        prop_assert!(pair.deliver(1, &long).is_err());
        prop_assert_eq!(pair.deliver(1, &packet), Ok(Some((header(), body))));
    }

    /// Hostile bytes at any moment do no harm: two hosts still establish a session.
    #[test]
    fn noise_does_not_keep_hosts_apart(
        noise in prop::collection::vec((0usize..2, prop::collection::vec(any::<u8>(), 0..120), 0u8..7), 0..60),
    ) {
        let mut pair = Pair::new();
        let mut through = [false; 2];
        for (side, bytes, kind) in noise.into_iter().chain((0..40).map(|_| (0, Vec::new(), 0))) {
            pair.now += 200 * MS;
            let mut packet = vec![SEALED, kind, 0, 0];
            packet.extend(bytes);
            prop_assert!(!matches!(pair.deliver(side, &packet), Ok(Some(_))));
            for side in 0..2 {
                if let Some(packet) = pair.seal(side, 0, b"data") {
                    through[1 - side] |= pair.deliver(1 - side, &packet).is_ok();
                }
            }
            pair.talk();
        }
        prop_assert_eq!(through, [true; 2]);
        prop_assert!(pair.hosts.iter().all(|host| host.sessions.len() <= 3));
    }
}

/// Prints the cost of sealing and opening on one core; measures, and asserts nothing. Needs an optimised build: `cargo test --release -p
/// host --lib cost_of_sealing -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures"]
fn cost_of_sealing() {
    for size in [64, 1024, 4096] {
        let mut session = Session::new(1, 0, true, &[1; 32], &[2; 32]).unwrap();
        let mut other = Session::new(1, 0, false, &[2; 32], &[1; 32]).unwrap();
        let body = vec![0x5A; size];
        let run: Vec<u8> = plain(&body).repeat(32);
        let stride = run.len() / 32;
        let (mut sealing, mut opening, mut bytes, mut copying) = (0f64, 0f64, 0u64, 0f64);
        let count = if size < 1024 { 20_000 } else { 5_000 };
        for _ in 0..count {
            let start = std::time::Instant::now();
            let mut packets = run.clone();
            copying += start.elapsed().as_secs_f64();
            let start = std::time::Instant::now();
            for packet in packets.chunks_mut(stride) {
                assert!(session.seal(0, packet).is_some());
            }
            sealing += start.elapsed().as_secs_f64();
            let start = std::time::Instant::now();
            for packet in packets.chunks_mut(stride) {
                assert_eq!(other.open(packet).unwrap().len(), size);
            }
            opening += start.elapsed().as_secs_f64();
            bytes += 32 * size as u64;
        }
        #[allow(clippy::cast_precision_loss)]
        let rate = |seconds: f64| bytes as f64 / seconds / 1e6;
        println!(
            "{size} bytes a packet: seal {:.0} MB/s, open {:.0} MB/s, both {:.0} MB/s on one core; a copy {:.0} MB/s",
            rate(sealing),
            rate(opening),
            rate(sealing + opening),
            rate(copying)
        );
    }
    let start = std::time::Instant::now();
    let count = 200;
    for _ in 0..count {
        Pair::new().connect();
    }
    println!(
        "a handshake, both sides together: {:.0} us",
        start.elapsed().as_secs_f64() / f64::from(count) * 1e6
    );
}
