//! Two daemons with a bad link between them: each operation is executed exactly once.
//!
//! The link is a relay in this process, or a Linux kernel with tc netem when `tools/netem/link` runs the test.

use crate::common;
use crate::common::relay;

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::driver::{Endpoint, Guest};
use common::monitor::Machine;
use control_api::host::HostClient;
use host::{Daemon, DaemonConfig};
use relay::{Relay, Troubles, Way};
use rustix::thread::LinkNameSpaceType;

/// Loss of 1 %, 1 % repeated, 5 % overtake others, and 10 ms of jitter.
const TROUBLES: Troubles = Troubles {
    lost: 10_000,
    repeated: 10_000,
    overtaking: 50_000,
    delay: Duration::from_millis(10),
    jitter: Duration::from_millis(10),
};
/// Number of queue pairs of each context, and of a queue pair's additions in flight: as many as a completion queue holds.
const QUEUE_PAIRS: usize = 60;
const DEPTH: u64 = 4;
/// Timeout without progress.
const HANG_LIMIT: Duration = Duration::from_secs(60);

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[15]) = (0xFF, 0xFF, 10, last);
    gid
}

/// A host: its own address and the other host's, in the order of their numbers, and its network namespace.
struct Place {
    addresses: [String; 2],
    namespace: Option<String>,
}

/// The link between the two daemons.
enum Link {
    Relay(Relay),
    /// Existing routers and namespaces.
    Outside,
}

impl Link {
    /// The link in `HOSTS_IN` (`NAMESPACE=ADDRESS,NAMESPACE=ADDRESS`), else a relay.
    fn start(port: u16) -> (Self, [Place; 2]) {
        if let Ok(hosts) = std::env::var("HOSTS_IN") {
            let hosts: Vec<_> = hosts.split(',').map(|host| host.split_once('=').unwrap()).collect();
            let [(_, one), (_, two)] = hosts[..] else { panic!("HOSTS_IN has two hosts: {hosts:?}") };
            let place = |(namespace, _): (&str, &str)| Place {
                addresses: [one, two].map(str::to_owned),
                namespace: Some(namespace.to_owned()),
            };
            return (Self::Outside, [place(hosts[0]), place(hosts[1])]);
        }
        let bind = |last: u8| UdpSocket::bind(format!("127.0.0.{last}:{port}")).unwrap();
        // The first daemon appears to the second at 11, the second to the first at 12.
        let (eleven, twelve) = (bind(11), bind(12));
        let to = |last: u8| format!("127.0.0.{last}:{port}").parse().unwrap();
        let there = Way { at: twelve.try_clone().unwrap(), from: eleven.try_clone().unwrap(), to: to(2) };
        let back = Way { at: eleven, from: twelve, to: to(1) };
        let place = |addresses: [u8; 2]| Place {
            addresses: addresses.map(|last| format!("127.0.0.{last}")),
            namespace: None,
        };
        (Self::Relay(Relay::start([there, back], TROUBLES, 7)), [place([1, 12]), place([11, 2])])
    }

    fn counts(&self) -> String {
        match self {
            Self::Relay(relay) => format!("{:?}", relay.counts),
            Self::Outside => "a link outside this process".to_owned(),
        }
    }
}

/// Moves this thread, and those that it starts, to a network namespace of `ip netns`.
fn enter(namespace: &str) {
    let path = format!("/run/netns/{namespace}");
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    rustix::thread::move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
}

/// The daemon of host `number`.
fn daemon(folder: &std::path::Path, number: usize, place: &Place, port: u16) -> Daemon {
    let mut text = String::from("sockets = 1\n");
    for (host, address) in (1..).zip(&place.addresses) {
        text += &format!(
            "[[host]]\nname = \"h{host}\"\naddress = \"{address}:{port}\"\n[[vm]]\nname = \"vm{host}\"\nid = {host}\n\
             host = \"h{host}\"\ntransport = \"fabric\"\n[[vm.nic]]\nsegment = \"blue\"\naddresses = [\"10.0.0.{host}\"]\n"
        );
    }
    let directory = folder.join(format!("directory{number}.toml"));
    std::fs::write(&directory, text).unwrap();
    let mut config = DaemonConfig::new(folder.join(format!("h{number}/host.sock")));
    config.fabric = Some(host::FabricConfig {
        directory: host::DirectorySource::File(directory),
        address: format!("{}:{port}", place.addresses[number - 1]).parse().unwrap(),
        cluster_key: None,
        verbs: false,
    });
    std::thread::scope(|scope| {
        let start = || {
            if let Some(namespace) = &place.namespace {
                enter(namespace);
            }
            common::start(config)
        };
        scope.spawn(start).join().unwrap()
    })
}

/// The test's queue pairs, contexts one after the other.
fn endpoints(guest: &mut Guest, monitor: &common::monitor::Monitor, contexts: u32) -> Vec<Vec<Endpoint>> {
    let of_context = |uar| {
        let first = guest.endpoint(monitor, uar, 1);
        let more: Vec<_> = (1..QUEUE_PAIRS).map(|_| guest.another(monitor, &first)).collect();
        std::iter::once(first).chain(more).collect()
    };
    (1..=contexts).map(of_context).collect()
}

fn counter(daemon: &Daemon, vm: &str, name: &str) -> u64 {
    let path = format!("vms/{vm}/nics/rdma0/rdma/counters");
    HostClient::new(daemon.socket()).inspect(Some(&path)).unwrap()[name].as_u64().unwrap()
}

/// 240 queue pairs add to four counters, or 960 to sixteen. Each old value is returned exactly once, and each counter ends at the number of
/// additions: together 20,000, or `OPERATIONS`.
#[test]
fn additions_over_a_bad_link_are_done_exactly_once() {
    let operations: u64 = match std::env::var("OPERATIONS") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 20_000,
    };
    let port = facilities::ports::free(1);
    let (link, places) = Link::start(port);
    // Each addition takes the link's time, so more run concurrently if the link has room.
    let contexts = if operations > 1_000_000 && matches!(link, Link::Relay(_)) { 16 } else { 4 };

    let folder = tempfile::tempdir().unwrap();
    let daemons = [1, 2].map(|number| daemon(folder.path(), number, &places[number - 1], port));
    let machines = [1, 2].map(|number| Machine::with_ram(&format!("vm{number}"), "blue", 64 << 20));
    let mut sides = Vec::new();
    for (number, (machine, daemon)) in (1..).zip(machines.iter().zip(&daemons)) {
        let monitor = machine.connect(daemon.socket(), true);
        let mut guest = Guest::new(machine);
        // 268 ms, and 537 if another process has to route; 7 is the largest retry count.
        (guest.timeout, guest.retries) = (if matches!(link, Link::Relay(_)) { 16 } else { 17 }, 7);
        guest.probe(&monitor, gid(number));
        let made = endpoints(&mut guest, &monitor, contexts);
        sides.push((monitor, guest, made));
    }
    let [(monitor, guest, adding), (other_monitor, other_guest, counting)] = sides.as_slice() else {
        panic!("two sides were made")
    };
    for (left, right) in adding.iter().flatten().zip(counting.iter().flatten()) {
        guest.connect(monitor, left, right.qp.1, gid(2));
        other_guest.connect(other_monitor, right, left.qp.1, gid(1));
    }
    // Each context has a protection domain of its own, so its queue pairs use the counter in its own first buffer.
    let mut totals = vec![0_u64; counting.len()];

    let began = Instant::now();
    let mut progress = Instant::now();
    let share = operations / u64::from(contexts);
    let mut seen: Vec<Vec<bool>> =
        counting.iter().map(|_| vec![false; usize::try_from(share).unwrap()]).collect();
    // By context and queue pair: number posted, number complete.
    let mut state = vec![vec![(0_u64, 0_u64); QUEUE_PAIRS]; adding.len()];
    let mut posted = vec![0_u64; adding.len()];
    let mut shown = 0;
    while totals.iter().sum::<u64>() < share * u64::from(contexts) {
        let mut worked = false;
        for (context, queue_pairs) in adding.iter().enumerate() {
            let target = &counting[context][0].buffer;
            for (index, endpoint) in queue_pairs.iter().enumerate() {
                let (sent, done) = &mut state[context][index];
                while *sent - *done < DEPTH && posted[context] < share {
                    let slot = u32::try_from(*sent % DEPTH).unwrap() * 8;
                    let wr_id = (index as u64) << 32 | (*sent & 0xFFFF_FFFF);
                    let to = (target.address, target.rkey);
                    assert!(guest.post_fetch_add(monitor, endpoint, wr_id, 64 + slot, to));
                    *sent += 1;
                    posted[context] += 1;
                }
            }
            while let Some(entry) = guest.poll(monitor, &queue_pairs[0]) {
                let index = usize::try_from(entry.wr_id.get() >> 32).unwrap();
                let (_, done) = &mut state[context][index];
                if entry.status.get() != 0 {
                    let counters = [
                        "local_ack_timeout_err",
                        "packet_seq_err",
                        "implied_nak_seq_err",
                        "retransmitted_packets",
                    ]
                    .map(|name| (name, counter(&daemons[0], "vm1", name)));
                    let answered = counter(&daemons[1], "vm2", "duplicate_request");
                    panic!(
                        "queue pair {index} of context {context}: addition {done} ended with status {} after {:?}, {:?} after the last \
                         completion of any; {counters:?}, {answered} answered again; {:?}",
                        entry.status.get(),
                        began.elapsed(),
                        progress.elapsed(),
                        link.counts()
                    );
                }
                assert_eq!(entry.wr_id.get() & 0xFFFF_FFFF, *done & 0xFFFF_FFFF, "in order");
                let slot = 64 + *done % DEPTH * 8;
                let buffer = &queue_pairs[index].buffer;
                let old = u64::from(guest.word(buffer, slot)) | u64::from(guest.word(buffer, slot + 4)) << 32;
                let place = &mut seen[context][usize::try_from(old).unwrap()];
                assert!(!std::mem::replace(place, true), "{old} came twice");
                *done += 1;
                totals[context] += 1;
                worked = true;
            }
        }
        if worked {
            progress = Instant::now();
        } else {
            assert!(progress.elapsed() < HANG_LIMIT, "nothing completes: {totals:?} of {share} each");
            std::thread::yield_now();
        }
        let total = totals.iter().sum::<u64>();
        if total / 1_000_000 > shown {
            shown = total / 1_000_000;
            eprintln!("{shown} million after {:.0} s", began.elapsed().as_secs_f64());
        }
    }
    for (context, queue_pairs) in counting.iter().enumerate() {
        let end = u64::from(other_guest.word(&queue_pairs[0].buffer, 0));
        assert_eq!(end, share, "counter of context {context}");
        assert!(seen[context].iter().all(|seen| *seen), "an old value is missing");
    }
    let again = counter(&daemons[0], "vm1", "retransmitted_packets");
    eprintln!(
        "{} additions in {:.1} s; {again} packets sent again; {}",
        share * u64::from(contexts),
        began.elapsed().as_secs_f64(),
        link.counts()
    );
    assert!(again > 0, "the link was too good to show anything");
    if let Link::Relay(relay) = &link {
        let counts = [&relay.counts.lost, &relay.counts.repeated, &relay.counts.overtaking];
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) > 0), "no trouble of some kind");
    }
}
