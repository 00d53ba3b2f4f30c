//! KVM VMs without vCPUs as neighbours with a real registry: their mapped memory, their registers, and the death of each of the three
//! processes. Requires /dev/kvm. Without it each test reports that, and passes.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{HANG_LIMIT, Machine, RAM, has_kvm, held, patient, registry, wait_until};
use control_api::host::NicRequest;
use host::{Daemon, DaemonConfig};
use machine::memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions, Readers, is_writable,
};
use monitor::description::{MacAddress, Neighbour, NeighbourPeer};
use monitor::neighbour::OpenedNeighbour;
use monitor::sandbox::{Sandbox, ThreadKind};
use monitor::vfio_user::{DmaRange, Nic, NicConnector, OpenedFunction, VfioUserError, VfioUserFunction};
use monitor::vm::ThreadHook;
use neighbour::heartbeat::Heartbeat;
use neighbour::registers as reg;
use pci::function::PciFunction;

/// Two members have each other's window, segment and doorbell. A doorbell raises an interrupt of that peer only. A store to a window is
/// counted and has no effect. A member without permission gets nothing.
#[test]
fn two_vms_see_each_other_and_a_third_sees_nothing() {
    if !has_kvm("two_vms_see_each_other") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let a = Machine::start(directory.path(), "a", &["b"]);
    let b = Machine::start(directory.path(), "b", &["a"]);
    let c = Machine::start(directory.path(), "c", &["a", "b"]);
    let (slot_a, slot_b) = (a.slot(), b.slot());
    let epoch = a.wait_for(slot_b, reg::PEER_OFFERED);
    assert_eq!(b.wait_for(slot_a, reg::PEER_OFFERED), epoch);
    assert!(a.sees(slot_b) && b.sees(slot_a) && !a.sees(slot_a));
    // The own status page, and the pair's segment.
    assert_eq!((a.function.mappings().len(), a.function.doorbells().len()), (2, 1));

    let signal = a.function.doorbells()[0].fd.clone();
    rustix::io::write(&signal, &1_u64.to_ne_bytes()).unwrap();
    for (vector, route) in (0..).zip(b.vectors.made.lock().unwrap().iter()).skip(1) {
        let mut count = [0; 8];
        let got = rustix::io::read(route.eventfd().unwrap(), &mut count);
        assert_eq!(got.is_ok(), vector == slot_a + 1, "vector {vector}");
    }

    // A device of `a` may read b's memory in the window, and may not write it.
    b.ram.memory().memory().write_obj(0x6e65_6967_6862_6f72_u64, GuestAddress(0x3000)).unwrap();
    let seen = a.ram.memory().memory();
    assert_eq!(
        seen.read_obj::<u64>(GuestAddress(Machine::window(slot_b) + 0x3000)).unwrap(),
        0x6e65_6967_6862_6f72
    );
    assert!(is_writable(&seen, 0x3000, 8) && !is_writable(&seen, Machine::window(slot_b) + 0x3000, 8));
    drop(seen);

    a.memory.write(Machine::window(slot_b) + 64, &[1, 2, 3, 4]);
    assert_eq!((a.function.discarded(), a.read(reg::DISCARDED)), (1, 1));

    assert!(!c.sees(slot_a) && !c.sees(slot_b) && !a.sees(c.slot()) && !b.sees(c.slot()));
    assert_eq!((c.function.mappings().len(), c.function.doorbells().len()), (1, 0));
}

/// Names that differ only in their last byte are complete in the registers of both. A device's address follows from group and names.
#[test]
fn registers_show_whole_names_and_addresses_made_of_them() {
    if !has_kvm("registers_show_whole_names") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let long = |last: &str| "n".repeat(reg::PEER_NAME_SIZE - 1) + last;
    let (name_b, name_c) = (long("b"), long("c"));
    let a = Machine::start(directory.path(), "a", &[&name_b, &name_c]);
    let b = Machine::start(directory.path(), &name_b, &["a"]);
    let c = Machine::start(directory.path(), &name_c, &["a"]);
    for (peer, name) in [(&b, &name_b), (&c, &name_c)] {
        let slot = peer.slot();
        a.wait_for(slot, reg::PEER_OFFERED);
        let bytes = |from: u64, size: u64| -> Vec<u8> {
            (0..size / 4).flat_map(|word| a.peer(slot, from + 4 * word).to_le_bytes()).collect()
        };
        assert_eq!(bytes(reg::PEER_NAME, reg::PEER_NAME_SIZE as u64), name.as_bytes());
        let mac = MacAddress::to_neighbour("nas", "a", name).octets();
        assert_eq!(bytes(reg::PEER_MAC, 8), [&mac[..], &[0, 0]].concat());
    }
}

/// A driver is replaced while pages of a window are in use. The window stays unchanged until its release is written, although the peer ends
/// meanwhile. Then the peer's next connection is offered.
#[test]
fn a_window_that_is_kept_outlives_driver_and_peer() {
    if !has_kvm("a_window_that_is_kept") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let a = Machine::start(directory.path(), "a", &["b"]);
    let b = Machine::start(directory.path(), "b", &["a"]);
    let slot = b.slot();
    a.write(reg::DRIVER, 1);
    let epoch = a.wait_for(slot, reg::PEER_OFFERED);
    b.ram.memory().memory().write_obj(0x1234_5678_u32, GuestAddress(0x3000)).unwrap();
    let read = || {
        let seen = a.ram.memory().memory();
        seen.read_obj::<u32>(GuestAddress(Machine::window(slot) + 0x3000)).ok()
    };
    a.write(reg::PEERS + u64::from(slot) * reg::PEER_STRIDE + reg::PEER_KEEP, epoch);
    a.write(reg::DRIVER, 0);
    a.write(reg::DRIVER, 1);
    drop(b);
    let b = Machine::start(directory.path(), "b", &["a"]);
    assert_eq!(b.slot(), slot);
    wait_until("a hears that b has gone", || a.function.inspect()["ends"] == 1);
    // The new b waits until the old window is released.
    assert!(a.sees(slot));
    assert_eq!((a.peer(slot, reg::PEER_STATE), read()), (reg::PEER_NONE, Some(0x1234_5678)));
    assert_eq!(b.peer(a.slot(), reg::PEER_STATE), reg::PEER_NONE);
    a.release(slot, epoch);
    assert!(a.wait_for(slot, reg::PEER_OFFERED) > epoch);
    assert_eq!(read(), Some(0));
}

/// The sandbox of a VM with neighbours.
fn sandbox(directory: &Path) -> Sandbox {
    std::fs::create_dir_all(directory.join("host.d")).unwrap();
    let text =
        "kernel = \"k\"\nname = \"a\"\n[neighbour]\ngroup = \"nas\"\npermit = [\"b\"]\nhost = \"host.sock\"";
    let (written, _) = monitor::description::parse(text, &directory.join("a.toml")).unwrap();
    Sandbox::prepare(&monitor::description::validate(&written).unwrap()).unwrap()
}

/// A confined monitor (Landlock, no capabilities, the process's seccomp filter) can allocate memory with a reader's descriptor, and can
/// later connect to the registry's socket and to no other.
#[test]
fn memory_and_registry_can_be_had_inside_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let sandbox = sandbox(directory.path());
    let (host, elsewhere) = (directory.path().join("host.sock"), directory.path().join("a.toml"));
    std::fs::write(&elsewhere, "").unwrap();
    // Only this thread is confined, and threads that it creates.
    let confined = std::thread::spawn(move || {
        sandbox.enter_process().unwrap();
        let options =
            RamOptions { name: "confined".to_owned(), readers: Readers::Anybody, ..RamOptions::default() };
        let ram = GuestRam::allocate(&RamLayout::new(&[RAM]).unwrap(), &options);
        let wish = Neighbour { group: "nas".to_owned(), permit: Vec::new(), host };
        let opened = OpenedNeighbour::open("a", &wish);
        (ram.map(drop), opened.map(drop), std::fs::File::open(elsewhere).map(drop))
    });
    let (ram, opened, file) = confined.join().unwrap();
    ram.unwrap();
    opened.unwrap();
    file.unwrap_err();
}

/// The daemon in its sandbox, and the functions' threads under the monitor's filter: joining, connecting, the daemon's end and return,
/// releasing. A refused system call would end this process.
#[test]
fn both_sides_work_in_their_sandboxes() {
    if !has_kvm("both_sides_work") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let daemon = || {
        let mut config = DaemonConfig::new(directory.path().join("host.sock"));
        config.sandbox = true;
        config.neighbours.heartbeat = patient();
        // Confines only the daemon's threads: the one that starts it ends.
        std::thread::spawn(move || Daemon::start(&config).unwrap()).join().unwrap()
    };
    let sandbox = sandbox(directory.path());
    let start = |name: &str, peer: &str| {
        let filter = sandbox.thread_filter(ThreadKind::VfioUser);
        let confine: ThreadHook = Arc::new(move || filter.apply_or_end());
        Machine::start_confined(directory.path(), name, &[peer], confine)
    };
    let first = daemon();
    let (a, b) = (start("a", "b"), start("b", "a"));
    let _drivers = [a.drive(), b.drive()];
    let (slot_a, slot_b) = (a.slot(), b.slot());
    let epoch = a.wait_for(slot_b, reg::PEER_OFFERED);
    b.wait_for(slot_a, reg::PEER_OFFERED);
    // `inspect` is updated at the end of the thread's iteration, after the members were notified.
    let begun = Instant::now();
    while first.neighbours().inspect()["nas"].as_array().is_none_or(|members| members.len() != 2) {
        assert!(begun.elapsed() < HANG_LIMIT, "{}", first.neighbours().inspect());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    let _second = daemon();
    for (machine, peer) in [(&a, slot_b), (&b, slot_a)] {
        assert_eq!(machine.wait_for(peer, reg::PEER_GONE), epoch);
        machine.release(peer, epoch);
    }
    assert!(a.wait_for(slot_b, reg::PEER_OFFERED) > epoch && a.sees(slot_b));
}

/// After a peer's death, its window stays until the guest has released it. Then the restarted peer is connected under a later epoch, and
/// nothing of the dead one is mapped.
#[test]
fn a_dead_peer_stays_mapped_until_it_is_released() {
    if !has_kvm("a_dead_peer_stays_mapped") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let a = Machine::start(directory.path(), "a", &["mortal"]);
    let _driver = a.drive();
    for _ in 0..3 {
        let b = Machine::start(directory.path(), "mortal", &["a"]);
        let slot = b.slot();
        let epoch = a.wait_for(slot, reg::PEER_OFFERED);
        drop(b);
        assert_eq!(a.wait_for(slot, reg::PEER_GONE), epoch);
        assert_eq!(a.peer(slot, reg::PEER_REASON), reg::reason::LEFT);
        let b = Machine::start(directory.path(), "mortal", &["a"]);
        assert_eq!(b.slot(), slot);
        std::thread::sleep(Duration::from_millis(200));
        assert!(a.sees(slot) && a.peer(slot, reg::PEER_STATE) == reg::PEER_GONE);
        a.release(slot, epoch);
        wait_until("a later connection", || {
            a.peer(slot, reg::PEER_STATE) == reg::PEER_OFFERED && a.peer(slot, reg::PEER_EPOCH) > epoch
        });
        assert!(a.sees(slot));
        drop(b);
        let later = a.wait_for(slot, reg::PEER_GONE);
        a.release(slot, later);
        a.wait_for(slot, reg::PEER_NONE);
        wait_until("nothing of the dead is held", || held("mortal") == (0, 0));
    }
}

/// Without a driver, the monitor releases a dead peer itself.
#[test]
fn without_a_driver_a_dead_peer_is_released_at_once() {
    if !has_kvm("without_a_driver") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let a = Machine::start(directory.path(), "a", &["guestless"]);
    let b = Machine::start(directory.path(), "guestless", &["a"]);
    let slot = b.slot();
    a.wait_for(slot, reg::PEER_OFFERED);
    drop(b);
    wait_until("the window goes", || !a.sees(slot));
    wait_until("nothing of the dead is held", || held("guestless") == (0, 0));
}

/// When a guest hangs, its peer is notified. Both are connected again once it runs and both have released.
#[test]
fn a_hung_guest_is_disconnected_and_reconnects() {
    if !has_kvm("a_frozen_guest") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let heartbeat = Heartbeat { patience: Duration::from_secs(3), ..Heartbeat::DEFAULT };
    let _registry = registry(directory.path(), heartbeat);
    let a = Machine::start(directory.path(), "a", &["b"]);
    let b = Machine::start(directory.path(), "b", &["a"]);
    let _driver = a.drive();
    let driver = b.drive();
    let (slot_a, slot_b) = (a.slot(), b.slot());
    let epoch = a.wait_for(slot_b, reg::PEER_OFFERED);
    drop(driver);
    assert_eq!(a.wait_for(slot_b, reg::PEER_GONE), epoch);
    assert_eq!(a.peer(slot_b, reg::PEER_REASON), reg::reason::HUNG);
    b.wait_for(slot_a, reg::PEER_GONE);
    assert_eq!(b.peer(slot_a, reg::PEER_REASON), reg::reason::OWN);
    let _driver = b.drive();
    a.release(slot_b, epoch);
    b.release(slot_a, epoch);
    wait_until("a later connection", || {
        a.peer(slot_b, reg::PEER_STATE) == reg::PEER_OFFERED && a.peer(slot_b, reg::PEER_EPOCH) > epoch
    });
}

/// After the daemon's death, neighbours stay connected. After its return, the old connections end, and new ones begin once they are
/// released.
#[test]
fn a_daemons_end_ends_no_connection_and_its_restart_renews_them() {
    if !has_kvm("the_daemons_death") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let first = registry(directory.path(), patient());
    let a = Machine::start(directory.path(), "a", &["b"]);
    let b = Machine::start(directory.path(), "b", &["a"]);
    let _drivers = [a.drive(), b.drive()];
    let (slot_a, slot_b) = (a.slot(), b.slot());
    let epoch = a.wait_for(slot_b, reg::PEER_OFFERED);
    b.wait_for(slot_a, reg::PEER_OFFERED);
    drop(first);
    std::thread::sleep(Duration::from_millis(300));
    for (machine, peer) in [(&a, slot_b), (&b, slot_a)] {
        assert_eq!(machine.peer(peer, reg::PEER_STATE), reg::PEER_OFFERED);
        assert!(machine.sees(peer) && machine.function.doorbells().len() == 1);
    }
    let _second = registry(directory.path(), patient());
    for (machine, peer) in [(&a, slot_b), (&b, slot_a)] {
        assert_eq!(machine.wait_for(peer, reg::PEER_GONE), epoch);
        assert_eq!(machine.peer(peer, reg::PEER_REASON), reg::reason::REGISTRY);
        machine.release(peer, epoch);
    }
    for (machine, peer) in [(&a, slot_b), (&b, slot_a)] {
        assert!(machine.wait_for(peer, reg::PEER_OFFERED) > epoch);
    }
    assert_eq!((a.slot(), b.slot()), (slot_a, slot_b));
}

/// The RDMA function of a NIC, which the daemon serves with the machine's RAM mapped for writing.
fn rdma(directory: &Path, vm: &str, machine: &Machine) -> Result<Arc<VfioUserFunction>, VfioUserError> {
    let request = NicRequest {
        vm: vm.to_owned(),
        name: "rdma0".to_owned(),
        mac: None,
        segment: "s".to_owned(),
        tap: None,
        incoming: false,
    };
    let nic = Nic::new(&directory.join("host.sock"), request);
    let opened = OpenedFunction::open("rdma0.1", Box::new(NicConnector { nic, function: 1 }))?;
    let regions = machine.ram.regions().iter();
    let ranges = regions.map(|region| DmaRange {
        file: Arc::clone(&region.file),
        offset: region.file_offset,
        address: region.range.start,
        size: region.range.size,
    });
    let function = VfioUserFunction::new(opened, ranges.collect(), &machine.vectors)?;
    function.start(Box::new(|| {}), Arc::new(|| {}))?;
    Ok(function)
}

/// A VM with an RDMA NIC and neighbours of other users: the daemon's HCA maps its RAM for writing while it is a member, and again after the
/// daemon's restart. Sealed RAM prevents that.
#[test]
fn an_rdma_nic_and_neighbours_reconnect_after_the_daemons_restart() {
    if !has_kvm("an_rdma_nic_and_neighbours") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let daemon = || {
        let mut config = DaemonConfig::new(directory.path().join("host.sock"));
        config.neighbours.heartbeat = patient();
        Daemon::start(&config).unwrap()
    };
    let first = daemon();
    let sealed = Machine::start(directory.path(), "sealed", &[]);
    assert!(rdma(directory.path(), "sealed", &sealed).is_err(), "the seal keeps the HCA out");
    let stranger = NeighbourPeer { vm: "b".to_owned(), uid: Some(65_534) };
    let start =
        |permit| Machine::start_with(directory.path(), "a", permit, Readers::OtherUsers, Arc::new(|| {}));
    let a = start(vec![stranger]);
    let function = rdma(directory.path(), "a", &a).unwrap();
    let member = |daemon: &Daemon| {
        let members = daemon.neighbours().inspect();
        members["nas"].as_array().is_some_and(|members| {
            members.iter().any(|member| member["vm"] == "a" && member["memory"] == "other users only")
        })
    };
    wait_until("a member with an HCA", || member(&first) && function.is_connected());
    drop(first);
    wait_until("the HCA is away", || !function.is_connected());
    let second = daemon();
    wait_until("both are back", || member(&second) && function.is_connected());
}
