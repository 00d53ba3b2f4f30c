//! Nodes that connect, connections of strangers, and nodes with different settings.

use std::io::Read as _;

use super::greeting::{LEN, MAGIC, MAGIC_RDMA, write};
use super::*;
use cluster_key::stream::{HANDSHAKE_BYTES, Handshake};

fn addresses(folder: &tempfile::TempDir, nodes: u8) -> Vec<NodeAddress> {
    (0..nodes).map(|node| NodeAddress::Unix(folder.path().join(node.to_string()))).collect()
}

#[test]
fn four_nodes_find_each_other_in_whatever_order_they_come() {
    let folder = tempfile::tempdir().unwrap();
    let all = addresses(&folder, 4);
    let threads: Vec<_> = [2, 0, 3, 1]
        .map(|node| {
            let all = all.clone();
            std::thread::spawn(move || {
                join(Hello { node, nodes: 4, digest: 5, rdma: false }, &all, None, None).unwrap()
            })
        })
        .into();
    for (thread, me) in threads.into_iter().zip([2, 0, 3, 1]) {
        let links = thread.join().unwrap();
        let peers: Vec<_> = links.iter().map(|link| link.as_ref().map(|link| link.peer)).collect();
        assert_eq!(peers, (0..4).map(|node| (node != me).then_some(node)).collect::<Vec<_>>());
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no sockets are left");
}

/// Either all links use RDMA, or none. Without a device the error names the address and gives advice. (The address is reserved for
/// documentation.)
#[test]
fn links_by_rdma_need_a_device_and_all_nodes() {
    let at =
        |texts: &[&str]| -> Vec<NodeAddress> { texts.iter().map(|text| text.parse().unwrap()).collect() };
    assert!(device_of(0, &at(&["tcp:a:1", "unix:/b"]), None).unwrap().is_none());
    for mixed in [&["rdma:203.0.113.1:7000", "tcp:203.0.113.2:7000"], &["unix:/a", "rdma:203.0.113.2:7000"]] {
        let error = device_of(0, &at(mixed), None).unwrap_err().to_string();
        assert!(error.contains("all nodes"), "{error}");
    }
    let absent = device_of(0, &at(&["rdma:203.0.113.1:7000", "rdma:203.0.113.2:7000"]), None).unwrap_err();
    let text = super::super::spanning::chain(&absent);
    assert!(text.contains("rdma:203.0.113.1:7000") && text.contains("Node 0"), "{text}");
    assert!(["install", "rdma link add", "Name one"].iter().any(|advice| text.contains(advice)), "{text}");
}

/// Connects to a node that is about to listen.
fn visit(place: &NodeAddress) -> Stream {
    loop {
        if let Ok(stream) = connect(place, Instant::now() + LAST_NODE_TIMEOUT) {
            return stream;
        }
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn strangers_at_a_nodes_address_are_dropped_and_hold_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let all = addresses(&folder, 2);
    let listening = all.clone();
    let first = std::thread::spawn(move || {
        join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None, None)
    });
    // Four connections: silent, closed at once, with another protocol, and stopped within the greeting.
    let silent = visit(&all[0]);
    drop(visit(&all[0]));
    let other = visit(&all[0]);
    write(&other, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let slow = visit(&all[0]);
    write(&slow, &MAGIC[..4]).unwrap();
    let second = join(Hello { node: 1, nodes: 2, digest: 5, rdma: false }, &all, None, None).unwrap();
    assert!(second[0].is_some());
    assert!(first.join().unwrap().unwrap()[1].is_some());
    drop((silent, slow));
}

fn key(seed: u8) -> ClusterKey {
    ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ seed)).unwrap()
}

/// A peer without the key is refused at any time, whatever its greeting says. The node that has the key connects.
#[test]
fn a_node_without_the_key_is_a_stranger() {
    let folder = tempfile::tempdir().unwrap();
    let all = addresses(&folder, 2);
    let listening = all.clone();
    let hello = |node| Hello { node, nodes: 2, digest: 5, rdma: false };
    let first = std::thread::spawn(move || join(hello(0), &listening, None, Some(&key(1))));
    // Before the node connects.
    let plain = visit(&all[0]);
    write(&plain, &hello(1).to_bytes()).unwrap();
    let other = greet(&visit(&all[0]), &hello(1), Some(&key(2))).map(drop).unwrap_err();
    assert!(other.contains("another key") && other.contains("--cluster-key"), "{other}");
    let second = join(hello(1), &all, None, Some(&key(1))).unwrap();
    assert!(second[0].is_some());
    let links = first.join().unwrap().unwrap();
    let sent = super::super::link::Control::Exit(7);
    second[0].as_ref().unwrap().send_control(&sent);
    let mut frames = Vec::new();
    links[1].as_ref().unwrap().receive(&mut Default::default(), &mut frames).unwrap();
    assert!(matches!(&frames[..], [super::super::link::Frame::Control(control)] if *control == sent));
    let mut heard = [0; 1];
    assert_eq!((&mut &plain).read(&mut heard).unwrap_or(0), 0, "it heard nothing");
}

/// If only one of two nodes has a key, the error says so.
#[test]
fn nodes_of_two_minds_about_a_key_say_what_to_do() {
    for (keys, expected) in
        [([Some(1), None], "does it have a key?"), ([None, Some(1)], "doesn't encrypt its links")]
    {
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 2);
        let listener = Listener::open(&all[0]).unwrap();
        let hello = |node| Hello { node, nodes: 2, digest: 5, rdma: false };
        let keys = keys.map(|seed| seed.map(key));
        let theirs = keys[0].clone();
        let first = std::thread::spawn(move || {
            let stream = loop {
                match listener.accept() {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(PAUSE),
                }
            };
            let mut greeting = Greeting::begin(stream, &hello(0), theirs.as_ref()).unwrap();
            loop {
                match greeting.look(&hello(0)) {
                    Ok(None) => std::thread::sleep(PAUSE),
                    Ok(Some(other)) => panic!("{other:?}"),
                    Err(problem) => break problem,
                }
            }
        });
        let problem = greet(&visit(&all[0]), &hello(1), keys[1].as_ref()).map(drop).unwrap_err();
        assert!(problem.contains(expected) && problem.contains("--cluster-key"), "{problem}");
        let theirs = first.join().unwrap();
        assert!(theirs.contains("encrypt") && theirs.contains("--cluster-key"), "{theirs}");
    }
}

#[test]
fn more_strangers_than_there_is_room_for_do_not_keep_a_node_out() {
    let folder = tempfile::tempdir().unwrap();
    let all = addresses(&folder, 2);
    let listening = all.clone();
    let first = std::thread::spawn(move || {
        join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None, None)
    });
    let strangers: Vec<_> = (0..2 * STRANGERS).map(|_| visit(&all[0])).collect();
    join(Hello { node: 1, nodes: 2, digest: 5, rdma: false }, &all, None, None).unwrap();
    assert!(first.join().unwrap().unwrap()[1].is_some());
    drop(strangers);
}

#[test]
fn a_node_of_another_program_or_another_number_of_nodes_is_refused_by_name() {
    for (other, expected) in [
        (Hello { node: 1, nodes: 2, digest: 6, rdma: false }, "another program"),
        (Hello { node: 1, nodes: 3, digest: 5, rdma: false }, "a VM of 3 nodes"),
        (Hello { node: 0, nodes: 2, digest: 5, rdma: false }, "says that it is node 0"),
        (Hello { node: 1, nodes: 2, digest: 5, rdma: true }, "go by rdma, this one's by tcp"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 2);
        let listening = all.clone();
        let first = std::thread::spawn(move || {
            join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None, None)
        });
        let stream = visit(&all[0]);
        write(&stream, &other.to_bytes()).unwrap();
        let error = first.join().unwrap().map(drop).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("Node 1"), "{error}");
    }
}

/// The first bytes of every link. A change of one raises the greeting's version.
#[test]
fn a_greeting_has_the_same_bytes_in_every_build() {
    let hello = Hello { node: 1, nodes: 3, digest: 0x0807_0605_0403_0201, rdma: false };
    assert_eq!(&hello.to_bytes(), b"CWNODES2\x01\x03\x01\x02\x03\x04\x05\x06\x07\x08");
    assert_eq!(&Hello { rdma: true, ..hello }.to_bytes()[..8], b"CWNODER2");
}

/// Either side refuses a node of another release by its version, regardless of all other fields, over plain and sealed links.
#[test]
fn a_node_of_another_release_is_refused_by_its_version() {
    let hello = |node| Hello { node, nodes: 2, digest: 5, rdma: false };
    for (kind, version, named) in
        [(MAGIC, b'1', "version 1 of"), (MAGIC_RDMA, b'3', "version 3 of"), (MAGIC, 0, r"version \x00 of")]
    {
        let mut other = hello(1).to_bytes();
        other[..7].copy_from_slice(kind);
        other[7] = version;
        let refused = |error: String| {
            assert!(error.contains(named) && error.contains("this one version 2"), "{error}");
            assert!(error.contains("the same release on all nodes"), "{error}");
        };
        for key in [None, Some(key(1))] {
            // The node that listens.
            let folder = tempfile::tempdir().unwrap();
            let all = addresses(&folder, 2);
            let (listening, theirs) = (all.clone(), key.clone());
            let first = std::thread::spawn(move || join(hello(0), &listening, None, theirs.as_ref()));
            let stream = visit(&all[0]);
            say(&stream, &other, key.as_ref());
            let error = first.join().unwrap().map(drop).unwrap_err().to_string();
            assert!(error.contains("Node 1"), "{error}");
            refused(error);
        }
        // The node that connects.
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 2);
        let listener = Listener::open(&all[0]).unwrap();
        let second = std::thread::spawn(move || join(hello(1), &all, None, None));
        let stream = loop {
            match listener.accept() {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        write(&stream, &other).unwrap();
        let error = second.join().unwrap().map(drop).unwrap_err().to_string();
        assert!(error.contains("Node 0"), "{error}");
        refused(error);
    }
}

/// Sends a greeting as a node with this key does.
fn say(stream: &Stream, hello: &[u8; LEN], key: Option<&ClusterKey>) {
    let Some(key) = key else { return write(stream, hello).unwrap() };
    let mut handshake = Handshake::initiator(NODES, key).unwrap();
    write(stream, &handshake.put().unwrap()).unwrap();
    let mut answer = [0; HANDSHAKE_BYTES];
    (&mut &*stream).read_exact(&mut answer).unwrap();
    handshake.take(&answer).unwrap();
    let mut bytes = Vec::new();
    handshake.finish().unwrap().0.write(hello, &mut bytes).unwrap();
    write(stream, &bytes).unwrap();
}
