//! Memslots, dirty logging and ioeventfds on real KVM.

use crate::common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::{Guest, Recorder, STOP, WINDOW, host, program};
use machine::bus::BusDevice;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace};
use machine::slots::{HostMapping, SlotError};
use machine::vm::{IoEvent, IoSpace};
use machine::x86::kvm_regs;
use rustix::event::{EventfdFlags, eventfd};

const PAGE: u64 = 4096;

fn window_file(pages: u64) -> std::fs::File {
    let fd = rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(fd);
    file.set_len(pages * PAGE).unwrap();
    file
}

/// mov bl, [rdi]
const READ: [u8; 2] = [0x8a, 0x1f];
/// mov [rdi], al
const WRITE: [u8; 2] = [0x88, 0x07];

fn read(guest: &Guest, address: u64) -> u64 {
    guest.run_to_stop(&program(&[&READ, &STOP]), kvm_regs { rdi: address, ..Default::default() }).rbx & 0xff
}

fn write(guest: &Guest, address: u64, value: u8) {
    let regs = kvm_regs { rdi: address, rax: u64::from(value), ..Default::default() };
    guest.run_to_stop(&program(&[&WRITE, &STOP]), regs);
}

#[test]
fn a_window_comes_goes_and_can_be_read_only() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let device = Arc::new(Recorder::default());
    guest.memory.insert(WINDOW, 2 * PAGE, "trap", Arc::clone(&device) as Arc<dyn BusDevice>).unwrap();
    let file = window_file(3);
    file.write_all_at(&[0x5a], PAGE + 7).unwrap();
    let map = |writable| HostMapping::new("window", file.as_fd(), PAGE, 2 * PAGE, writable).unwrap();

    let slot = guest.vm.slots().add("window", WINDOW, map(true), false).unwrap();
    assert_eq!(read(&guest, WINDOW + 7), 0x5a);
    write(&guest, WINDOW + PAGE, 0x11);
    let mut seen = [0];
    file.read_exact_at(&mut seen, 2 * PAGE).unwrap();
    assert_eq!(seen, [0x11], "the guest's store lands in the file");
    assert_eq!(guest.exits("memory:trap"), 0, "without an exit");
    assert_eq!(guest.vm.slots().lookup(WINDOW + 5).unwrap().name, "window");

    guest.vm.slots().set_read_only(slot, true).unwrap();
    assert_eq!(read(&guest, WINDOW + 7), 0x5a);
    write(&guest, WINDOW + 7, 0x22);
    assert_eq!(*device.writes.lock().unwrap(), vec![(7, vec![0x22])], "the store exits");
    assert_eq!(read(&guest, WINDOW + 7), 0x5a, "and changes nothing");
    guest.vm.slots().set_read_only(slot, false).unwrap();
    write(&guest, WINDOW + 7, 0x33);
    assert_eq!(read(&guest, WINDOW + 7), 0x33);

    guest.vm.slots().remove(slot).unwrap();
    assert!(matches!(guest.vm.slots().remove(slot), Err(SlotError::Absent(_))));
    let before = guest.exits("memory:trap");
    read(&guest, WINDOW + 7);
    assert_eq!(guest.exits("memory:trap"), before + 1, "nothing but the bus answers now");

    let read_only = guest.vm.slots().add("view", WINDOW, map(false), true).unwrap();
    assert_eq!(read(&guest, WINDOW + 7), 0x33);
    assert!(guest.vm.slots().set_read_only(read_only, false).is_err());
    assert!(matches!(
        guest.vm.slots().add("again", WINDOW, map(true), false),
        Err(SlotError::Overlap { .. })
    ));
}

#[test]
fn the_dirty_log_has_the_writes_of_guest_and_devices_once() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let slot = guest.ram_slots[0];
    assert!(matches!(guest.vm.slots().take_dirty(slot), Err(SlotError::NotLogging { .. })));
    guest.vm.slots().set_dirty_logging_all(true).unwrap();
    let memory = guest.ram.memory().memory();
    write(&guest, 0x30_0000, 1);
    write(&guest, 0x70_0fff, 1);
    memory.write_obj(1u8, GuestAddress(0x90_0000)).unwrap();
    let dirty = guest.vm.slots().take_dirty(slot).unwrap();
    let pages: Vec<u64> = dirty.pages().collect();
    for page in [0x30_0000, 0x70_0000, 0x90_0000] {
        assert!(pages.contains(&page), "{page:#x} is not in {pages:x?}");
    }
    assert_eq!(dirty.count(), pages.len() as u64);
    assert!(!pages.contains(&0x50_0000));
    let again = guest.vm.slots().take_dirty_all().unwrap();
    assert_eq!(again.iter().map(|dirty| dirty.count()).sum::<u64>(), 0);
    write(&guest, 0x30_0000, 2);
    assert!(guest.vm.slots().take_dirty(slot).unwrap().pages().any(|page| page == 0x30_0000));
    guest.vm.slots().set_dirty_logging(slot, false).unwrap();
    assert!(guest.vm.slots().take_dirty_all().unwrap().is_empty());
}

fn signals(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

#[test]
fn doorbells_ring_without_an_exit_until_they_are_removed() {
    let Some(host) = host() else { return };
    let guest = Guest::new(host, 1);
    let new_fd = || Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
    let port = IoEvent { space: IoSpace::Port, address: 0x30, width: 1, datamatch: None, fd: new_fd() };
    let any = IoEvent { space: IoSpace::Memory, address: WINDOW, width: 0, datamatch: None, fd: new_fd() };
    let exact =
        IoEvent { space: IoSpace::Memory, address: WINDOW + 64, width: 4, datamatch: Some(7), fd: new_fd() };
    for event in [&port, &any, &exact] {
        guest.vm.add_ioevent(event).unwrap();
    }
    assert!(guest.vm.add_ioevent(&port).is_err(), "one doorbell per place");
    // mov eax, 7; out 0x30, al; mov [rdi], al; mov [rdi], eax; mov [rdi+64], eax; inc eax; mov [rdi+64], eax
    let code = program(&[
        &[
            0xb8, 7, 0, 0, 0, 0xe6, 0x30, 0x88, 0x07, 0x89, 0x07, 0x89, 0x47, 0x40, 0xff, 0xc0, 0x89, 0x47,
            0x40,
        ],
        &STOP,
    ]);
    let regs = kvm_regs { rdi: WINDOW, ..Default::default() };
    guest.run_to_stop(&code, regs);
    assert_eq!((signals(&port.fd), signals(&any.fd), signals(&exact.fd)), (1, 2, 1));
    assert_eq!(guest.exits("memory:unclaimed"), 1, "only the value that doesn't match exits");
    assert_eq!(guest.exits("port:unclaimed"), 0);
    for event in [&port, &any, &exact] {
        guest.vm.remove_ioevent(event).unwrap();
    }
    guest.run_to_stop(&code, regs);
    assert_eq!((signals(&port.fd), signals(&any.fd), signals(&exact.fd)), (0, 0, 0));
    assert_eq!((guest.exits("memory:unclaimed"), guest.exits("port:unclaimed")), (5, 1));
}
