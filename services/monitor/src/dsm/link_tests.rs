//! Frames over a pair of sockets.

use cluster_key::ClusterKey;

use super::super::join::NODES;
use super::*;
use cluster_key::stream::Handshake;

fn pair() -> (Link, Link) {
    linked(None)
}

/// The same, sealed with a key.
fn sealed_pair() -> (Link, Link) {
    let key = ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap())).unwrap();
    let mut initiator = Handshake::initiator(NODES, &key).unwrap();
    let mut responder = Handshake::responder(NODES, &key).unwrap();
    responder.take(&initiator.put().unwrap()).unwrap();
    initiator.take(&responder.put().unwrap()).unwrap();
    linked(Some((initiator.finish().unwrap(), responder.finish().unwrap())))
}

type Sealed = (Sealing, Opening);

fn linked(sealed: Option<(Sealed, Sealed)>) -> (Link, Link) {
    let (a, b) = UnixStream::pair().unwrap();
    let link =
        |peer, stream, sealed| Link::new(peer, "there".into(), Way::Socket(Stream::Unix(stream)), sealed);
    let (one, other) = sealed.unzip();
    (link(1, a, one), link(0, b, other))
}

/// Sealed frames arrive like plain ones, however much the socket accepts at once. No plain byte is visible in transit.
#[test]
fn sealed_frames_arrive_whole_and_in_order() {
    let (a, b) = sealed_pair();
    let text = |n: u32| Control::Console(n.to_le_bytes().repeat(1000));
    let mut queued = false;
    for n in 0..1000 {
        queued |= a.send_control(&text(n));
    }
    assert!(queued, "the socket takes all");
    a.put_off(&Control::Exit(7).encode());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while a.flush() {
                std::thread::yield_now();
            }
        });
        let mut b = reader(&b);
        for n in 0..1000 {
            assert_eq!(b.control(), text(n));
        }
        assert_eq!(b.control(), Control::Exit(7));
    });
    let (a, b) = sealed_pair();
    a.send_control(&Control::Console(b"to be read by nobody else".to_vec()));
    let mut wire = [0; 1000];
    let count = b.read_way(&mut wire).unwrap();
    assert!(!wire[..count].windows(8).any(|some| some == b"to be re"));
}

/// Bytes that weren't sealed by the peer end the link.
#[test]
fn bytes_that_nobody_has_sealed_are_refused() {
    let (a, b) = sealed_pair();
    // As long as the record that the first bytes announce.
    a.offer(&Control::Console(vec![0; 4000]).encode());
    let error = reader(&b).frame().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
}

/// If a peer doesn't receive, the link ends when its send queue is full, and the queue is dropped.
#[test]
fn what_waits_for_a_peer_is_bounded() {
    for (mut a, b) in [pair(), sealed_pair()] {
        a.capacity = 1 << 20;
        let text = Control::Console(vec![7; 1 << 16]);
        for _ in 0..1000 {
            a.send_control(&text);
            assert!(a.queue().bytes.len() <= a.capacity + (1 << 17));
        }
        assert_eq!(a.overflow(), Some(1 << 20));
        assert!(!a.has_queue());
        let mut b = reader(&b);
        let end = loop {
            if let Err(error) = b.frame() {
                break error;
            }
        };
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof, "{end}");
    }
}

/// Reads a link frame by frame.
struct Reader<'a> {
    link: &'a Link,
    incoming: Incoming,
    frames: std::collections::VecDeque<Frame>,
}

fn reader(link: &Link) -> Reader<'_> {
    Reader { link, incoming: Incoming::default(), frames: Default::default() }
}

impl Reader<'_> {
    fn frame(&mut self) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Ok(frame);
            }
            let mut frames = Vec::new();
            self.link.receive(&mut self.incoming, &mut frames)?;
            self.frames.extend(frames);
        }
    }

    fn control(&mut self) -> Control {
        match self.frame().unwrap() {
            Frame::Control(control) => control,
            Frame::Message(message) => panic!("{message:?}"),
        }
    }
}

#[test]
fn control_frames_arrive_as_they_were_sent_and_in_order() {
    let (a, b) = pair();
    let all = [
        Control::Heartbeat,
        Control::Console(b"text".to_vec()),
        Control::Exit(0x1_0203),
        Control::Failed("why".into()),
        Control::Parked,
        Control::Report(b"{}".to_vec()),
        Control::Start,
        Control::Phase(true),
        Control::Phase(false),
        Control::Ask,
        Control::Answer(b"[]".to_vec()),
        Control::Checkpoint(Step::Hold(7)),
        Control::Checkpoint(Step::Still(7, Err("why".into()))),
        Control::Checkpoint(Step::Save { number: 7, token: 1 }),
        Control::Checkpoint(Step::Go(Some(7))),
    ];
    for one in &all {
        assert!(!a.send_control(one));
    }
    let mut b = reader(&b);
    for one in &all {
        assert_eq!(&b.control(), one);
    }
}

/// Bytes that the socket doesn't accept are queued. `send` doesn't block, and nothing is lost or reordered.
#[test]
fn a_slow_reader_does_not_hold_up_the_sender() {
    let (a, b) = pair();
    let text = |n: u32| Control::Console(n.to_le_bytes().repeat(1000));
    let mut queued = false;
    for n in 0..2000 {
        queued = a.send_control(&text(n));
    }
    assert!(queued && a.has_queue());
    let reads = std::thread::spawn(move || {
        let mut b = reader(&b);
        for n in 0..2000 {
            assert_eq!(b.control(), text(n));
        }
    });
    while a.flush() {
        std::thread::yield_now();
    }
    reads.join().unwrap();
}

/// `close` waits for a thread that has seen an open link with a full queue and is about to wait: nothing else would wake it.
#[test]
fn a_link_is_not_closed_between_a_look_and_a_wait() {
    let (a, _b) = pair();
    std::thread::scope(|scope| {
        let looked = a.queue();
        let closes = scope.spawn(|| a.close());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!a.closed.load(Ordering::Relaxed));
        drop(looked);
        closes.join().unwrap();
    });
    assert!(a.closed.load(Ordering::Relaxed));
}

#[test]
fn bytes_that_no_node_sends_are_refused_and_a_closed_link_is_the_end() {
    for bytes in [
        vec![MARK, 99, 0, 0, 0, 0, 0, 0],
        vec![MARK, 3, 0, 0, 1, 0, 0, 0, 7],
        vec![MARK, 2, 0, 0, 0xff, 0xff, 0xff, 0xff],
        vec![9; 64],
        vec![MARK, 11, 0, 0, 1, 0, 0, 0, 0xff],
        // Control frames of older nodes.
        vec![MARK, 12, 0, 0, 1, 0, 0, 0, 1],
        vec![MARK, 13, 0, 0, 0, 0, 0, 0],
        // `Look`, which is local to a node, in CBOR.
        [&[MARK, 11, 0, 0, 5, 0, 0, 0, 0x64][..], b"Look"].concat(),
    ] {
        let (a, b) = pair();
        a.send(&bytes);
        let error = reader(&b).frame().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }
    let (a, b) = pair();
    // `{"Hold": 7}`.
    a.send(&[&[MARK, 11, 0, 0, 7, 0, 0, 0, 0xa1, 0x64][..], b"Hold", &[7]].concat());
    assert!(reader(&b).frame().is_ok(), "one of those that others say");
    let (a, b) = pair();
    a.close();
    assert_eq!(reader(&b).frame().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(!a.send(b"into the void"));
}

/// Queued bytes leave with the next flush, complete and in order. Frames parse the same however the stream is cut.
#[test]
fn frames_come_whole_however_they_are_cut() {
    let (a, b) = pair();
    // The longest is more than one read.
    for (piece, len) in
        [(1, 40), (7, 40), (8, 40), (9, 40), (4096, 100_000), (70_000, 100_000), (1 << 20, 100_000)]
    {
        let all = [Control::Exit(7), Control::Console(vec![3; len]), Control::Heartbeat, Control::Ask];
        let bytes: Vec<u8> = all.iter().flat_map(Control::encode).collect();
        let mut b = reader(&b);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for some in bytes.chunks(piece) {
                    a.put_off(some);
                    while a.flush() {
                        std::thread::yield_now();
                    }
                    if piece < HEADER + 2 {
                        // So that the reader gets it alone.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            for one in &all {
                assert_eq!(&b.control(), one, "pieces of {piece}");
            }
        });
    }
    a.put_off(&Control::Ask.encode());
    assert!(a.has_queue());
    // Later frames don't overtake it.
    a.send_control(&Control::Heartbeat);
    assert!(!a.flush());
    let mut b = reader(&b);
    assert_eq!([b.control(), b.control()], [Control::Ask, Control::Heartbeat]);
}

/// Frames before an invalid one are accepted.
#[test]
fn what_came_before_a_wrong_frame_counts() {
    let (a, b) = pair();
    a.put_off(&Control::Ask.encode());
    a.put_off(&[9; 64]);
    a.flush();
    let mut b = reader(&b);
    assert_eq!(b.control(), Control::Ask);
    assert_eq!(b.frame().unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn a_node_can_not_speak_for_another() {
    let (a, b) = pair();
    let mut bytes = Vec::new();
    let message = dsm::Message {
        from: dsm::NodeId(2),
        to: dsm::NodeId(1),
        stamp: dsm::message::Stamp::default(),
        page: 7,
        body: dsm::Body::InvalidateAck,
    };
    wire::encode(&message, &mut bytes);
    a.send(&bytes);
    assert!(reader(&b).frame().unwrap_err().to_string().contains("in the name of node 2"));
}
