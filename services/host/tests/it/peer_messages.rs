//! Messages of migrations by direct connections between daemons: they need no service, and nothing needs them; hostile peers are refused.

mod client;
mod slow_service;

use crate::common;
use crate::migrate_group::{finish, work};

use client::{Client, connect_from, hello, message_frame, read_until_closed};
use common::adding::{Adder, pair};
use common::cluster::{Cluster, known, wait_to_know};
use common::moving::Move;
use common::wait_until;
use control_api::cluster::proto::RegisterHostRequest;
use control_api::host::proto::move_vm_reply::State;
use host::{Daemon, DaemonConfig};
use nomad::{Body, HostId, Incarnation, Message, Node, VmId};

fn messages(daemon: &Daemon) -> serde_json::Value {
    known(daemon)["messages"].clone()
}

fn count(daemon: &Daemon, path: &str) -> u64 {
    messages(daemon).pointer(path).and_then(serde_json::Value::as_u64).unwrap_or_else(|| panic!("no {path}"))
}

/// Waits until messages of a daemon to these hosts go directly.
fn wait_for_direct(daemon: &Daemon, hosts: &[&str]) {
    for host in hosts {
        let path = format!("/peers/{host}/path");
        wait_until("a direct connection", || {
            messages(daemon).pointer(&path).is_some_and(|path| path == "direct")
        });
    }
}

/// A VM whose peer is on another host moves. Source, destination and the peer's host exchange their messages directly, by connections that
/// are established while memory is copied.
#[test]
fn hosts_of_a_migration_exchange_messages_directly() {
    let cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    work([&a, &b], &mut adders);
    let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[2].socket(), "h3");
    on_its_way.round();
    // Established while memory is copied: the migration has been reserved.
    wait_for_direct(&daemons[0], &["h2", "h3"]);
    wait_for_direct(&daemons[2], &["h1"]);
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    on_its_way.land();
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
    for daemon in &daemons {
        assert!(
            count(daemon, "/sent/direct") > 0 && count(daemon, "/received/direct") > 0,
            "{}",
            messages(daemon)
        );
        assert!(count(daemon, "/bytes_sent") > 0 && count(daemon, "/bytes_received") > 0);
    }
    let metrics = client::metrics(&daemons[0]);
    for line in [
        "causeway_host_migration_messages_sent_total{path=\"direct\"} ",
        "causeway_host_peer_connections_established_total ",
        "causeway_host_peer_connections_refused_total{reason=\"key\"} 0",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

/// The service is gone when the peers of a VM are suspended. The migration is aborted by its source, and the queue pairs of both ends open
/// while the service is away.
#[test]
fn peers_of_an_aborted_move_open_while_the_service_is_away() {
    let mut cluster = Cluster::new();
    let daemons = [cluster.daemon(1), cluster.daemon(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    work([&a, &b], &mut adders);
    let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[2].socket(), "h3");
    on_its_way.round();
    wait_for_direct(&daemons[0], &["h2", "h3"]);
    assert_eq!(on_its_way.converged(), State::Stop);
    cluster.stop();
    wait_until("the outage", || daemons.iter().all(|daemon| known(daemon)["connected"] == false));
    assert_eq!(on_its_way.give_up(), State::Stays);
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    assert!(daemons.iter().all(|daemon| known(daemon)["connected"] == false), "the service is still away");
    cluster.resume();
    wait_until("the end of the migration", || {
        cluster.service.state().is_ok_and(|state| state.migrations.is_empty())
    });
    assert_eq!((cluster.wait_for("a", 1).epoch, cluster.wait_for("b", 2).epoch), (1, 1));
    assert!(a.guest.events().is_empty() && b.guest.events().is_empty(), "no queue pair has failed");
}

/// The peer's daemon doesn't exchange messages directly, as one of an older build or behind a firewall: the service passes them on.
#[test]
fn a_host_that_cannot_be_connected_is_reached_through_the_service() {
    let cluster = Cluster::new();
    let without = |number| common::start(DaemonConfig { direct_messages: false, ..cluster.config(number) });
    let daemons = [cluster.daemon(1), without(2), cluster.daemon(3)];
    let (mut a, b) = pair(&cluster, &daemons[0], &daemons[1]);
    wait_to_know(&cluster, &[&daemons[2]]);
    let mut adders = [Adder::new(&b), Adder::new(&a)];
    work([&a, &b], &mut adders);
    let mut on_its_way = Move::begin(&mut a, daemons[0].socket(), daemons[2].socket(), "h3");
    on_its_way.round();
    wait_for_direct(&daemons[0], &["h3"]);
    wait_until("an attempt to connect", || count(&daemons[0], "/connection_attempts_failed") > 0);
    assert_eq!(on_its_way.converged(), State::Stop);
    on_its_way.stop();
    assert_eq!(on_its_way.arrived(), (State::Moved, State::Runs));
    on_its_way.land();
    work([&a, &b], &mut adders);
    finish([&a, &b], &mut adders);
    assert!(messages(&daemons[0]).pointer("/peers/h2/path").is_none_or(|path| path == "service"));
    assert!(count(&daemons[0], "/sent/service") > 0 && count(&daemons[1], "/received/service") > 0);
    assert_eq!(count(&daemons[1], "/received/direct"), 0);
    wait_until("the end of the migration", || cluster.state().migrations.is_empty());
}

/// A port that another program has is named at the start, before the service hears of the host.
#[test]
fn a_port_that_is_taken_is_a_sentence() {
    let cluster = Cluster::new();
    let taken = std::net::TcpListener::bind(("127.0.0.1", cluster.port)).unwrap();
    let text = Daemon::start(&cluster.config(1)).map(drop).unwrap_err().to_string();
    let expected = format!("TCP port 127.0.0.1:{} can't be used for messages of other hosts", cluster.port);
    assert!(text.contains(&expected) && text.contains("choose another --fabric-address"), "{text}");
    assert!(cluster.state().hosts.is_empty());
    drop(taken);
    drop(cluster.daemon(1));
}

/// A daemon with a cluster key, and host 2 at the service, in its second start, whose part the test plays.
fn beside_a_daemon(cluster: &Cluster) -> Daemon {
    let mut config = cluster.config(1);
    let path = cluster.folder.path().join("key");
    std::fs::write(&path, client::KEY).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    config.fabric.as_mut().unwrap().cluster_key = Some(path);
    let daemon = common::start(config);
    for _ in 0..2 {
        let request = RegisterHostRequest {
            name: "h2".to_owned(),
            fabric_address: format!("127.0.0.2:{}", cluster.port),
            incarnation: 0,
        };
        cluster
            .service
            .ask("RegisterHost", async |client| client.register_host(request.clone()).await)
            .unwrap();
    }
    wait_to_know(cluster, &[&daemon]);
    daemon
}

/// Whether a refusal is counted, and the connection closed without an answer.
fn is_refused(daemon: &Daemon, why: &str, connect: impl FnOnce() -> std::net::TcpStream) {
    let path = format!("/connections_refused/{why}");
    let before = count(daemon, &path);
    read_until_closed(connect());
    wait_until(why, || count(daemon, &path) > before);
    assert_eq!(count(daemon, "/connections"), 0);
}

#[test]
fn peers_without_the_key_or_of_an_earlier_start_are_refused() {
    let cluster = Cluster::new();
    let daemon = beside_a_daemon(&cluster);
    let at = format!("127.0.0.1:{}", cluster.port).parse().unwrap();
    let two = "127.0.0.2";
    let write = |from: &str, bytes: &[u8]| {
        let mut stream = connect_from(from, at);
        // A daemon that has refused already doesn't take it.
        let _ = std::io::Write::write_all(&mut stream, bytes);
        stream
    };
    is_refused(&daemon, "stranger", || connect_from("127.0.0.9", at));
    is_refused(&daemon, "malformed", || write(two, b"GET / HTTP/1.1\r\n\r\n"));
    // Plain, and with another key: not even an answer.
    is_refused(&daemon, "key", || write(two, b"CWpp\x01\x00\x00\x00"));
    is_refused(&daemon, "key", || write(two, &client::first_message(&[9; 32])));
    is_refused(&daemon, "version", || write(two, b"CWpm\x02\x00\x30\x00"));
    // With the key, as somebody else than the directory has at that address.
    let with = |payload: [u8; 32]| Client::shake(two, at).hello(&payload);
    is_refused(&daemon, "old_incarnation", || with(hello(2, 1, 1, 0)).into_stream());
    is_refused(&daemon, "old_incarnation", || with(hello(2, 1, 2, 7)).into_stream());
    is_refused(&daemon, "wrong_host", || with(hello(3, 1, 2, 0)).into_stream());
    is_refused(&daemon, "wrong_host", || with(hello(2, 3, 2, 0)).into_stream());
    is_refused(&daemon, "wrong_host", || with(hello(1, 1, 2, 0)).into_stream());
    let mut other_version = hello(2, 1, 2, 0);
    other_version[0] ^= 0x80;
    is_refused(&daemon, "version", || with(other_version).into_stream());
    // A sealed record that nobody has sealed.
    is_refused(&daemon, "malformed", || {
        let mut stream = Client::shake(two, at).into_stream();
        std::io::Write::write_all(&mut stream, &[40; 42 + 40 * 256]).unwrap();
        stream
    });
    // It leaves in the middle of its preamble.
    is_refused(&daemon, "closed", || {
        let mut stream = connect_from("127.0.0.2", at);
        std::io::Write::write_all(&mut stream, &[0; 3]).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream
    });
    // The host itself is welcome.
    let client = Client::shake(two, at).hello(&hello(2, 1, 2, 1)).join();
    assert_eq!((client.host, client.to, client.incarnation), (1, 2, 1));
}

/// A peer that holds connections open without a handshake keeps nobody else from theirs.
#[test]
fn handshakes_that_do_not_end_are_bounded() {
    let cluster = Cluster::new();
    let daemon = beside_a_daemon(&cluster);
    let at = format!("127.0.0.1:{}", cluster.port).parse().unwrap();
    let waiting: Vec<_> = (0..20).map(|_| connect_from("127.0.0.1", at)).collect();
    wait_until("refusals", || count(&daemon, "/connections_refused/busy") >= 16);
    let _two = Client::shake("127.0.0.2", at).hello(&hello(2, 1, 2, 1)).join();
    wait_until("the time-outs of the others", || count(&daemon, "/connections_refused/timeout") >= 4);
    drop(waiting);
}

fn message(from: u32, to: u32, incarnation: u64, body: Body) -> Message {
    let (from, to) = (Node::Host(HostId(from)), Node::Host(HostId(to)));
    Message { from, incarnation: Incarnation(incarnation), to, body }
}

/// What a peer sends in the name of others, or of an earlier start, is dropped; what is no message ends the connection.
#[test]
fn messages_that_a_peer_may_not_send_are_dropped() {
    let cluster = Cluster::new();
    let daemon = beside_a_daemon(&cluster);
    let at = format!("127.0.0.1:{}", cluster.port).parse().unwrap();
    let connect = || Client::shake("127.0.0.2", at).hello(&hello(2, 1, 2, 1)).join();
    let asks = |vm| Body::Where { vm: VmId(vm) };
    let client = connect();
    let mut coordinators = message(2, 1, 2, asks(1));
    coordinators.from = Node::Coordinator;
    for (sent, path) in [
        (message(3, 1, 2, asks(1)), "wrong_host"),
        (coordinators, "wrong_host"),
        (message(2, 3, 2, asks(1)), "wrong_host"),
        (message(2, 1, 1, asks(1)), "old_incarnation"),
    ] {
        let path = format!("/messages_dropped/{path}");
        let before = count(&daemon, &path);
        client.send(&message_frame(&sent));
        wait_until("a dropped message", || count(&daemon, &path) > before);
    }
    assert_eq!(count(&daemon, "/received/direct"), 0);
    // The connection lives: what it may send is taken, and all was acknowledged.
    client.send(&message_frame(&message(2, 1, 2, asks(1))));
    wait_until("a message", || count(&daemon, "/received/direct") == 1);
    client.wait_for_acknowledgement(5);
    // No message, an unknown frame, a second Hello, an acknowledgement of what wasn't sent, a length that can't be.
    let mut no_message = vec![2, 0, 0, 0, 24, 0, 0, 0];
    no_message.extend_from_slice(&[0xFF; 24]);
    let mut second_hello = vec![1, 0, 0, 0, 32, 0, 0, 0];
    second_hello.extend_from_slice(&hello(2, 1, 2, 1));
    let acknowledges = [&[4, 0, 0, 0, 8, 0, 0, 0][..], &u64::MAX.to_le_bytes()].concat();
    for frame in [
        no_message,
        vec![9, 0, 0, 0, 0, 0, 0, 0],
        second_hello,
        acknowledges,
        vec![2, 0, 0, 0, 255, 255, 255, 255],
    ] {
        let client = connect();
        client.send(&frame);
        client.wait_until_closed();
    }
    assert_eq!(count(&daemon, "/messages_dropped/malformed"), 1);
    wait_until("the end of these connections", || count(&daemon, "/connections") <= 1);
}

/// A peer that connects again and again, and one that sends without pause: connections and queues are bounded, and others are served.
#[test]
fn a_flood_is_bounded() {
    let cluster = Cluster::new();
    let daemon = beside_a_daemon(&cluster);
    let at = format!("127.0.0.1:{}", cluster.port).parse().unwrap();
    let mut clients = Vec::new();
    for _ in 0..50 {
        clients.push(Client::shake("127.0.0.2", at).hello(&hello(2, 1, 2, 1)).join());
    }
    wait_until("the last of the connections", || count(&daemon, "/connections") == 1);
    assert_eq!(count(&daemon, "/connections_established"), 50);
    let client = clients.pop().unwrap();
    clients.into_iter().for_each(client::Member::wait_until_closed);
    // Each is another message, so that none is taken for a repetition; the largest there are.
    let sent = 300;
    for number in 0..sent {
        let peers = vec![nomad::Place { vm: VmId(1), host: HostId(1), epoch: nomad::Epoch(number) }; 30_000];
        let body = Body::Handover { migration: nomad::MigrationId(number), vm: VmId(1), peers };
        client.send(&message_frame(&message(2, 1, 2, body)));
    }
    client.wait_for_acknowledgement(sent);
    let (taken, full) = (count(&daemon, "/received/direct"), count(&daemon, "/messages_dropped/queue_full"));
    assert_eq!(taken + full, sent, "each is taken or dropped");
    assert_eq!(count(&daemon, "/connections"), 1);
}
