//! A daemon, two monitors and two guests' drivers in one process: everything except KVM.

use crate::common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::driver::Guest;
use common::monitor::Machine;
use common::vm::{Vm, connect, gid, vm};
use common::{daemon, wait_until};
use control_api::host::{HostClient, HostError, NicRequest, proto};
use host::DaemonConfig;

#[test]
fn a_write_arrives_in_both_doorbell_modes_and_the_engine_sleeps_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine the guest's thread may not run for 50 ms, while the engine polls doorbells.
    let mut config = DaemonConfig::new(folder.path().join("host.sock"));
    config.engine.idle = Duration::from_millis(500);
    let daemon = common::start(config);
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    // Trapped at first: each doorbell is an exit.
    a.guest.fill(&a.endpoint.buffer, 0x5A);
    assert!(a.write(&b, 1, 4096));
    assert_eq!(a.poll(1), 0);
    assert_eq!(b.guest.bytes(&b.endpoint.buffer)[..4096], [0x5A; 4096]);
    // Busy: doorbells become memory, without exits.
    let mut wr_id = 2;
    wait_until("doorbells in memory", || {
        assert!(a.write(&b, wr_id, 64));
        assert_eq!(a.poll(wr_id), 0);
        wr_id += 1;
        a.monitor.doorbells.is_mapped()
    });
    let exits = a.monitor.doorbells.exits.load(Ordering::SeqCst);
    for wr_id in wr_id..wr_id + 1000 {
        assert!(a.write(&b, wr_id, 64));
        assert_eq!(a.poll(wr_id), 0);
    }
    assert_eq!(a.monitor.doorbells.exits.load(Ordering::SeqCst), exits, "exits while doorbells are memory");
    // Idle: trapped again, and the engine's thread sleeps without a timer.
    wait_until("trapped doorbells", || !a.monitor.doorbells.is_mapped() && !b.monitor.doorbells.is_mapped());
    let client = HostClient::new(daemon.socket());
    let polls = || client.inspect(Some("daemon/engine/polls")).unwrap().as_u64().unwrap();
    wait_until("sleep", || {
        let before = polls();
        std::thread::sleep(Duration::from_millis(200));
        // The query costs two passes.
        polls() - before <= 4
    });
    // A doorbell wakes it.
    a.guest.fill(&a.endpoint.buffer, 0xA5);
    assert!(a.write(&b, 77_777, 4096));
    assert_eq!(a.poll(77_777), 0);
    assert_eq!(b.guest.bytes(&b.endpoint.buffer)[..4096], [0xA5; 4096]);
    let tree = client.inspect(None).unwrap();
    let shown = &tree["vms"]["a"]["nics"]["rdma0"]["rdma"];
    assert!(shown["doorbell_mode_switches"].as_u64().unwrap() >= 2, "{shown:#}");
    let qp = &shown["queue_pairs"][a.endpoint.qp.0.to_string()];
    assert_eq!((qp["state"].as_str(), qp["transport"].as_str()), (Some("ReadyToSend"), Some("local")));
    assert_eq!(qp["peer"]["qpn"], b.endpoint.qp.1);
    assert_eq!(shown["limits"]["registered_bytes"], 64_u64 << 30);
}

#[test]
fn nothing_is_lost_while_doorbell_modes_change() {
    // Bursts and pauses around the idle time: each post completes, whatever the mode is meanwhile.
    let folder = tempfile::tempdir().unwrap();
    // The idle time adapts, up to 16 times this: still within the pauses.
    let mut config = DaemonConfig::new(folder.path().join("host.sock"));
    config.engine.idle = Duration::from_micros(500);
    let daemon = common::start(config);
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    let (mut wr_id, mut random) = (0, 12345_u32);
    // As long as it takes on a busy machine, and at most half a minute.
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline && a.monitor.doorbells.switches.load(Ordering::SeqCst) < 24 {
        for _ in 0..60 {
            wr_id += 1;
            assert!(a.write(&b, wr_id, 8));
            // Without a doorbell per empty poll: the post must be found by its own doorbell alone.
            let waited = Instant::now();
            let entry = loop {
                if let Some(entry) = a.guest.take(&a.endpoint) {
                    break entry;
                }
                assert!(waited.elapsed() < Duration::from_secs(5), "request {wr_id} was lost");
                std::thread::yield_now();
            };
            assert_eq!((entry.wr_id.get(), entry.status.get()), (wr_id, 0));
        }
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        std::thread::sleep(Duration::from_micros(u64::from(random % 24_000)));
    }
    assert!(a.monitor.doorbells.switches.load(Ordering::SeqCst) >= 8, "modes didn't change");
}

#[test]
fn an_armed_consumer_is_woken_in_both_modes() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    for round in 0..200_u64 {
        a.guest.arm(&a.monitor, &a.endpoint);
        // As applications do between arming and sleeping; in memory this overwrites the arm.
        assert!(a.guest.poll(&a.monitor, &a.endpoint).is_none());
        a.monitor.take(2);
        assert!(a.write(&b, round, 16));
        assert!(a.monitor.await_interrupt(2), "round {round}: the consumer sleeps for ever");
        assert_eq!(a.poll(round), 0);
        assert!(a.guest.notifications().iter().all(|cq| *cq != 0));
    }
}

#[test]
fn a_client_that_cannot_map_or_has_no_doorbell_mode_is_served_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, false));
    a.monitor.doorbells.broken.store(true, Ordering::SeqCst);
    connect(&a, &b);
    for wr_id in 0..200 {
        assert!(a.write(&b, wr_id, 64) && b.write(&a, wr_id, 64));
        assert_eq!((a.poll(wr_id), b.poll(wr_id)), (0, 0));
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(b.write(&a, 7, 64));
    assert_eq!(b.poll(7), 0);
    let client = HostClient::new(daemon.socket());
    let words = client.inspect(Some("vms/b/nics/rdma0/rdma/doorbells")).unwrap();
    assert!(words.as_str().unwrap().contains("no doorbell mode"), "{words}");
    // How many requests make a device busy depends on the machine's other load.
    let failures = || client.inspect(Some("vms/a/nics/rdma0/rdma/doorbell_mode_failures")).unwrap();
    let mut wr_id = 1000;
    wait_until("a refused doorbell mode", || {
        wr_id += 1;
        assert!(a.write(&b, wr_id, 64));
        assert_eq!(a.poll(wr_id), 0);
        failures().as_u64().unwrap() > 0
    });
}

#[test]
fn a_crash_in_the_middle_of_traffic_releases_a_vm_and_leaves_the_others_alone() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let client = HostClient::new(daemon.socket());
    let (mut a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    let c = vm(daemon.socket(), "c", 3, true);
    let mut d = vm(daemon.socket(), "d", 4, true);
    connect(&c, &d);
    let mut wr_id = 0;
    for _ in 0..3 {
        // Traffic both ways, then the monitor of b dies with requests in flight.
        for _ in 0..32 {
            wr_id += 1;
            assert!(d.write(&c, wr_id, 16_384) && c.write(&d, wr_id, 16_384));
        }
        let Vm { machine, monitor, .. } = d;
        drop(monitor);
        wait_until("the NIC's end", || client.list_nics().unwrap().iter().all(|nic| nic.vm != "d"));
        wait_until("its socket's end", || !folder.path().join("host.d/d:rdma0.0").exists());
        // Others continue.
        wr_id += 1;
        assert!(a.write(&b, wr_id, 4096));
        assert_eq!(a.poll(wr_id), 0);
        // Its address is free, and the same VM returns.
        drop(machine);
        d = vm(daemon.socket(), "d", 4, true);
    }
    // The survivor's requests end with an error (retry exceeded, or flushed); every one completes.
    let mut last = 0;
    let deadline = Instant::now() + Duration::from_secs(10);
    while last != 12 && last != 5 {
        assert!(Instant::now() < deadline, "the peer's death isn't seen");
        match c.guest.poll(&c.monitor, &c.endpoint) {
            Some(entry) => last = entry.status.get(),
            None => std::thread::yield_now(),
        }
    }
    // A new pair works, with the same machines' addresses.
    a.endpoint = a.guest.endpoint(&a.monitor, 2, 4);
    a.guest.connect(&a.monitor, &a.endpoint, d.endpoint.qp.1, d.gid);
    d.guest.connect(&d.monitor, &d.endpoint, a.endpoint.qp.1, a.gid);
    assert!(a.write(&d, 1, 64));
    assert_eq!(a.poll(1), 0);
}

#[test]
fn after_a_restart_of_the_daemon_the_driver_is_told_and_the_device_works_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = daemon(folder.path());
    let mut a = vm(first.socket(), "a", 1, true);
    let socket = first.socket().to_owned();
    wait_until("the daemon's memory", || folder.path().join("host.d/nics.json").exists());
    drop(first);
    assert!(!socket.exists(), "an orderly end removes the socket");
    let second = daemon(folder.path());
    let Vm { machine, .. } = &a;
    // A monitor's steps: it attaches again, and provides memory, interrupts and bus mastering.
    a.monitor = machine.connect(second.socket(), true);
    assert!(a.monitor.await_interrupt(1), "the driver isn't told");
    assert_eq!(a.guest.events(), [8], "DEVICE_FATAL");
    // The driver is reloaded: a new shared region.
    a.guest.probe(&a.monitor, a.gid);
    a.endpoint = a.guest.endpoint(&a.monitor, 1, 4);
    let b = vm(second.socket(), "b", 2, true);
    connect(&a, &b);
    assert!(a.write(&b, 1, 64));
    assert_eq!(a.poll(1), 0);
}

#[test]
fn a_guest_that_boots_afresh_is_not_told_of_its_predecessors_failure() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let a = vm(daemon.socket(), "a", 1, true);
    drop(a);
    let client = HostClient::new(daemon.socket());
    wait_until("the NIC's end", || client.list_nics().unwrap().is_empty());
    let machine = Machine::new("a", "blue");
    let monitor = machine.connect(daemon.socket(), true);
    let mut guest = Guest::new(&machine);
    guest.probe(&monitor, gid(1));
    assert!(guest.events().is_empty());
}

#[test]
fn memory_is_taken_back_only_when_nobody_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    for wr_id in 0..32 {
        assert!(a.write(&b, wr_id, 16_384));
    }
    b.monitor.rdma.dma_unmap(0, common::monitor::RAM).unwrap();
    b.guest.fill(&b.endpoint.buffer, 0xEE);
    a.guest.fill(&a.endpoint.buffer, 0x11);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(b.guest.bytes(&b.endpoint.buffer), vec![0xEE; 16_384], "written after DMA_UNMAP was answered");
}

/// Two daemons, each with its VM, sandbox and sockets of the loopback interface.
fn two_daemons(folder: &std::path::Path, key: bool) -> [host::Daemon; 2] {
    let port = facilities::ports::free(1);
    let mut text = String::from("sockets = 1\n");
    for (number, vm) in [(1, "a"), (2, "b")] {
        text += &format!(
            "[[host]]\nname = \"h{number}\"\naddress = \"127.0.0.{number}:{port}\"\n\
             [[vm]]\nname = \"{vm}\"\nid = {number}\nhost = \"h{number}\"\n\
             [[vm.nic]]\nsegment = \"blue\"\naddresses = [\"10.0.0.{number}\"]\n"
        );
    }
    let (directory, file) = (folder.join("directory.toml"), folder.join("key"));
    std::fs::write(&directory, text).unwrap();
    host::transport::ClusterKey::create(&file).unwrap();
    [1, 2].map(|number| {
        let mut config = DaemonConfig::new(folder.join(format!("h{number}/host.sock")));
        config.fabric = Some(host::FabricConfig {
            directory: host::DirectorySource::File(directory.clone()),
            address: format!("127.0.0.{number}:{port}").parse().unwrap(),
            cluster_key: key.then(|| file.clone()),
            verbs: false,
        });
        common::start(config)
    })
}

fn metrics(daemon: &host::Daemon) -> String {
    use std::io::{Read as _, Write as _};
    let path = daemon.socket().with_extension("d").join("metrics");
    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn vms_of_two_daemons_talk_and_both_say_how() {
    for key in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let daemons = two_daemons(folder.path(), key);
        let (mut a, mut b) = (vm(daemons[0].socket(), "a", 1, true), vm(daemons[1].socket(), "b", 2, true));
        // A quarter of a second: a busy machine may take longer than a millisecond.
        (a.guest.timeout, b.guest.timeout) = (16, 16);
        connect(&a, &b);
        for wr_id in 1..=50 {
            assert!(a.write(&b, wr_id, 4096));
            assert_eq!(a.poll(wr_id), 0);
        }
        let said = if key { "encrypted" } else { "plain" };
        for (daemon, vm) in daemons.iter().zip(["a", "b"]) {
            let client = HostClient::new(daemon.socket());
            let fabric = client.inspect(Some("daemon/fabric")).unwrap();
            assert_eq!(fabric["encryption"], said);
            // On a busy machine a response may arrive after the next Hello was sent.
            let late = fabric["dropped_old_handshake"].as_u64().unwrap();
            assert_eq!(fabric["dropped"], late, "{fabric}");
            let counters = client.inspect(Some(&format!("vms/{vm}/nics/rdma0/rdma/counters"))).unwrap();
            // 50 messages of 4096 bytes in packets of 1376, or their acknowledgements.
            let of = |name: &str| counters[name].as_u64().unwrap();
            let (sent, received) = (of("sent_pkts"), of("rcvd_pkts"));
            assert!(
                if vm == "a" { sent >= 150 && received > 0 } else { received >= 150 && sent > 0 },
                "{counters}"
            );
            assert_eq!((of("out_of_sequence"), of("port_xmit_packets")), (0, sent));
            let text = metrics(daemon);
            let value = |name: String| {
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix(&name))
                    .unwrap_or_else(|| panic!("{name}: {text}"));
                line.trim().parse::<u64>().unwrap()
            };
            assert_eq!(value("causeway_host_fabric_encrypted ".into()), u64::from(key));
            assert!(value("causeway_host_fabric_packets_received_total ".into()) > 0);
            let sent_of_vm =
                format!("node_infiniband_sent_pkts_total{{vm=\"{vm}\",device=\"rdma0\",port=\"1\"}} ");
            assert_eq!(value(sent_of_vm), sent);
        }
    }
}

#[test]
fn limits_hold_from_the_moment_they_are_set() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let mut a = vm(daemon.socket(), "a", 1, true);
    let client = HostClient::new(daemon.socket());
    let limits = proto::Limits { contexts: Some(1), messages_per_second: Some(1000), ..Default::default() };
    assert_eq!(client.set_limits("a", limits).unwrap(), 1);
    let error = client.set_limits("nobody", proto::Limits::default()).unwrap_err();
    assert_eq!(error.to_string(), "VM nobody has no NIC here");
    let body = pvrdma::abi::commands::CreateContext { pfn: (0xF_E000 + 9).into() };
    let code = pvrdma::abi::commands::number::CREATE_UC;
    let refused = a.guest.command::<pvrdma::abi::commands::Handle>(&a.monitor, code, &body);
    assert_eq!(refused.err(), Some(12), "ENOMEM");
    client.set_limits("a", proto::Limits { contexts: Some(8), ..Default::default() }).unwrap();
    a.guest.endpoint(&a.monitor, 2, 1);
    let shown = client.inspect(Some("vms/a/nics/rdma0/rdma/limits")).unwrap();
    assert_eq!((&shown["contexts"], &shown["messages_per_second"]), (&8.into(), &1000.into()));
}

/// A tap of the host's owner, removed at the end.
struct OwnTap(String);

impl OwnTap {
    fn ip(&self, verb: &str) -> bool {
        let ip = std::process::Command::new("ip").args(["tuntap", verb, &self.0, "mode", "tap"]).output();
        ip.is_ok_and(|output| output.status.success())
    }
}

impl Drop for OwnTap {
    fn drop(&mut self) {
        self.ip("del");
    }
}

/// In its sandbox, like `daemon`: it permits what a tap needs.
#[test]
fn a_sandboxed_daemon_connects_a_segment_with_a_tap() {
    let tap = OwnTap(format!("cwt{}", std::process::id()));
    if !tap.ip("add") {
        facilities::missing(
            facilities::Facility::Tun,
            "making a tap needs root, /dev/net/tun and the program ip",
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let client = HostClient::new(daemon.socket());
    let nic = NicRequest {
        vm: "a".into(),
        name: "n".into(),
        segment: "s".into(),
        tap: Some(tap.0.clone()),
        ..Default::default()
    };
    client.attach_nic(&nic).unwrap();
    let [shown] = &client.list_nics().unwrap()[..] else { panic!("one NIC") };
    assert_eq!(shown.name, "n");
}

#[test]
fn what_cannot_be_attached_is_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let client = HostClient::new(daemon.socket());
    let fine = || NicRequest { vm: "a".into(), name: "n".into(), segment: "s".into(), ..Default::default() };
    let text = |request: &NicRequest| match client.attach_nic(request).unwrap_err() {
        HostError::Refused { reason } => reason,
        other => panic!("{other:?}"),
    };
    assert!(text(&NicRequest { vm: "../x".into(), ..fine() }).contains("is not a VM's name"));
    assert!(text(&NicRequest { mac: Some([1; 6]), ..fine() }).contains("group address"));
    assert!(text(&NicRequest { tap: Some("lo".into()), ..fine() }).contains("ip tuntap add"));
    client.attach_nic(&fine()).unwrap();
    // Without clients, a NIC can be replaced any number of times.
    client.attach_nic(&fine()).unwrap();
    let [nic] = &client.list_nics().unwrap()[..] else { panic!("one NIC") };
    let mac: [u8; 6] = nic.mac.clone().try_into().unwrap();
    let other = NicRequest { vm: "b".into(), mac: Some(mac), ..fine() };
    assert!(text(&other).contains("NIC n of VM a"));
    let machine = Machine::new("c", "s");
    let _monitor = machine.connect(daemon.socket(), true);
    assert!(text(&machine.request()).contains("in use"));
    client.detach_nic("c", "rdma0").unwrap();
    assert!(
        client.detach_nic("c", "rdma0").unwrap_err().to_string().contains("There is no NIC rdma0 of VM c")
    );
}

#[test]
fn metrics_are_served_with_the_names_of_linux() {
    use std::io::{Read as _, Write as _};
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path());
    let (a, b) = (vm(daemon.socket(), "a", 1, true), vm(daemon.socket(), "b", 2, true));
    connect(&a, &b);
    assert!(a.write(&b, 1, 4096));
    assert_eq!(a.poll(1), 0);
    let mut stream = std::os::unix::net::UnixStream::connect(folder.path().join("host.d/metrics")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let expected = "node_infiniband_port_data_transmitted_bytes_total{vm=\"a\",device=\"rdma0\",port=\"1\"} ";
    let line = text.lines().find_map(|line| line.strip_prefix(expected)).expect(&text);
    assert!(line.parse::<u64>().unwrap() >= 4096, "{line}");
    assert!(text.contains("causeway_host_engine_sleeps_total"), "{text}");
    assert!(text.contains("causeway_host_wire_packets_sent_total{vm=\"a\",device=\"rdma0\"} 0\n"), "{text}");
    assert!(text.contains(&format!("qpn=\"{}\"", a.endpoint.qp.1)), "{text}");
}
