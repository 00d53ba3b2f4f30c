//! Long commands execute in slices: each slice is bounded, and other guests are served in between.

use crate::support;

use dma::Dma;
use pvrdma::abi::PAGE;
use pvrdma::abi::commands::{CreateMr, Handle, MrResponse, mr_kind, number};
use pvrdma::abi::registers;
use pvrdma::device::{PAGE_TABLES_PER_SLICE, TEARDOWN_STEPS_PER_SLICE};
use pvrdma_testbed::Post;
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::queues::sge;
use support::{ALL, connected, run, side};
use zerocopy::{FromBytes, IntoBytes};

/// Number of pages of the largest memory region.
const MOST_PAGES: u32 = 262_144;
const PAGES_PER_TABLE: u32 = 512;

#[test]
fn a_large_registration_reads_a_bounded_number_of_pages_per_slice() {
    let (mut host, a, b, qa, qb) = connected(true, QpOptions::default());
    let mut large = side(&mut host, 3, true);
    // One page, listed in all tables.
    let page = large.guest.page();
    let table = large.guest.page();
    let entries: Vec<u8> = (0..PAGES_PER_TABLE).flat_map(|_| page.to_le_bytes()).collect();
    large.guest.memory.write(table, &entries).unwrap();
    let directory = large.guest.page();
    let tables: Vec<u8> = (0..MOST_PAGES / PAGES_PER_TABLE).flat_map(|_| table.to_le_bytes()).collect();
    large.guest.memory.write(directory, &tables).unwrap();
    let body = CreateMr {
        start: 0x4000_0000.into(),
        length: (u64::from(MOST_PAGES) * PAGE).into(),
        directory: directory.into(),
        pd: large.pd.into(),
        access: ALL.into(),
        kind: mr_kind::USER.into(),
        pages: MOST_PAGES.into(),
    };
    large.guest.place(number::CREATE_MR, body.as_bytes());
    large.guest.memory.record();
    let (mut slices, mut served) = (0, 0);
    loop {
        let more = host.write_slice(large.guest.id, registers::REQUEST, 0);
        slices += 1;
        let tables = large.guest.memory.take_record().iter().filter(|access| access.address == table).count();
        assert!(tables <= PAGE_TABLES_PER_SLICE as usize, "{tables} tables in a slice");
        if !more {
            break;
        }
        // Another guest is served before the command is complete.
        assert!(b.guest.post_receive(&qb, 1, &[]));
        assert!(a.guest.post_send(&qa, &Post::send(1, &[])));
        run(&mut host, &[&a, &b]);
        served += a.completions().len();
        assert_eq!(b.completions().len(), 1);
    }
    assert_eq!((slices, served), (MOST_PAGES / PAGES_PER_TABLE / PAGE_TABLES_PER_SLICE, 31));
    assert_eq!(host.read(large.guest.id, registers::ERROR), 0);
    let made = MrResponse::read_from_prefix(&large.guest.response()).unwrap().0;
    // The region is usable, to its last byte.
    let last = 0x4000_0000 + u64::from(MOST_PAGES) * PAGE - 8;
    let qp = large.qp(&mut host, QpOptions::default());
    large.guest.to_init(&mut host, &qp, ALL).unwrap();
    large.guest.connect(&mut host, &qp, qp.qpn, large.gid).unwrap();
    large.guest.memory.write(page + PAGE - 8, &[0x5A; 8]).unwrap();
    let mut target = large.region(&mut host, 0x10_0000, 4096);
    target.rkey = made.rkey.get();
    let read = Post::remote(1, pvrdma::abi::work::opcode::READ, last, target.rkey, &[sge(&target, 0, 8)]);
    assert!(large.guest.post_send(&qp, &read));
    run(&mut host, &[&large]);
    assert_eq!(large.completions(), [(1, 2, 0)]);
    assert_eq!(target.read(&large.guest.memory, 0, 8), [0x5A; 8]);
}

/// A page list whose later tables are not memory: the command fails after its first slices, and creates nothing.
#[test]
fn a_registration_that_fails_half_way_leaves_nothing() {
    let mut host = pvrdma_testbed::Host::default();
    let mut guest = side(&mut host, 1, true);
    let (page, table, directory) = (guest.guest.page(), guest.guest.page(), guest.guest.page());
    let entries: Vec<u8> = (0..PAGES_PER_TABLE).flat_map(|_| page.to_le_bytes()).collect();
    guest.guest.memory.write(table, &entries).unwrap();
    let tables: Vec<u8> = (0..511).map(|_| table).chain([1 << 40]).flat_map(u64::to_le_bytes).collect();
    guest.guest.memory.write(directory, &tables).unwrap();
    let body = CreateMr {
        start: 0.into(),
        length: (u64::from(MOST_PAGES) * PAGE).into(),
        directory: directory.into(),
        pd: guest.pd.into(),
        access: ALL.into(),
        kind: mr_kind::USER.into(),
        pages: MOST_PAGES.into(),
    };
    let failed: Result<MrResponse, u32> = guest.guest.command(&mut host, number::CREATE_MR, &body);
    assert!(failed.is_err_and(|code| code != 0));
    assert!(!host.devices.get(guest.guest.id).unwrap().is_unfinished());
    guest.guest.destroy(&mut host, number::DESTROY_PD, guest.pd).unwrap();
}

/// A context is destroyed in slices, and a reset in between ends the command.
#[test]
fn a_context_ends_in_slices_and_a_reset_ends_the_command() {
    let mut host = pvrdma_testbed::Host::default();
    let mut guest = side(&mut host, 1, true);
    // An object takes 32 steps and a check.
    let count = 3 * TEARDOWN_STEPS_PER_SLICE / 33;
    for _ in 0..count {
        guest.guest.pd(&mut host, guest.context.1);
    }
    let own = guest.region(&mut host, 0, 4096);
    let body = Handle { handle: guest.context.1.into() };
    guest.guest.place(number::DESTROY_UC, body.as_bytes());
    let mut slices = 1;
    while host.write_slice(guest.guest.id, registers::REQUEST, 0) {
        slices += 1;
        host.turn([(guest.guest.id, &guest.guest.uar)]);
    }
    assert!((3..=6).contains(&slices), "{slices}");
    assert_eq!(host.read(guest.guest.id, registers::ERROR), 0);
    assert!(guest.guest.destroy(&mut host, number::DESTROY_MR, own.handle).is_err(), "it went as well");
    assert!(guest.guest.destroy(&mut host, number::DESTROY_UC, guest.context.1).is_err());
    // Again, with a reset after the first slice.
    let context = guest.guest.context(&mut host);
    for _ in 0..count {
        guest.guest.pd(&mut host, context.1);
    }
    guest.guest.place(number::DESTROY_UC, Handle { handle: context.1.into() }.as_bytes());
    assert!(host.write_slice(guest.guest.id, registers::REQUEST, 0));
    host.write(guest.guest.id, registers::CONTROL, registers::control::RESET);
    assert!(!host.devices.get(guest.guest.id).unwrap().is_unfinished());
    guest.guest.probe(&mut host);
    guest.guest.context(&mut host);
}
