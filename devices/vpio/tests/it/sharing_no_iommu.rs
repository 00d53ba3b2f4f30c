//! A shared e1000 without an IOMMU. Only the addresses that it gets confine it to its guests' memory, which is
//! scattered on the bus. The tests judge by what the card touched. After a guest has lost the card, it may read only
//! the next holder's memory, and write no guest's.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device_models::PhysicalDevice as _;
use device_models::devices::e1000::E1000;
use device_models::devices::rtl8139::RTL8139;
use device_models::grammar::{Choices as _, Grammar};
use device_models::reference::e1000::E1000Card;
use device_models::reference::rtl8139::Rtl8139;
use support::e1000_attacks::{ATTACKS, HONEST, RX_RING, SETUP, TX_RING, prepare, requests};
use support::memory::{MEMORY, SCRATCH, Shared, at, memory};
use support::nic::Driver;
use support::shared::{Front, OUTSIDE, Resets, STATION, Table, View, Which, scattered};
use support::{Bare, Guest, Numbers, Ports as _, address, config, e1000, frame};
use vpio::sharing::SharedCard;
use vpio::{FailurePolicy, GuestId, MemoryMap as _, Monitor};

const PLAIN: Which = (&E1000, false);
/// Base of the test frames in a guest's memory, which the driver doesn't use.
const FREE: u64 = 0x8_0000;

/// Lets a guest's driver act.
fn with(table: &mut Table, number: u8, act: impl FnOnce(&mut e1000::Driver, &mut Guest<'_, Front>)) {
    let mut guest = Guest::new(&mut table.monitor, GuestId(number.into()));
    let Driver::E1000(driver, _) = &mut table.drivers[usize::from(number)] else { unreachable!() };
    act(driver, &mut guest);
}

/// A frame that the card cuts into segments of `segment` bytes.
fn long(mark: u8, length: usize) -> Vec<u8> {
    let mut frame = frame(OUTSIDE, mark, length);
    (54..length).for_each(|at| frame[at] = mark.wrapping_add(at.to_le_bytes()[0]) ^ at.to_le_bytes()[1]);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[46] = 0x50;
    frame
}

type Frames = Vec<Vec<u8>>;

/// Runs random traffic: frames anywhere in a guest's memory, in up to three pieces, with polls, hand-offs and
/// interrupts. Returns the frames on the wire, the frames that guests got, and the reports of their frames.
fn run(which: Which, seed: u64) -> (Frames, [Frames; 2], Vec<String>) {
    let mut table = Table::new(which);
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15 ^ seed);
    let (mut wire, mut got, mut told, mut holder) = (Vec::new(), [Vec::new(), Vec::new()], Vec::new(), 1u8);
    for step in 0..400u32 {
        let mark = step.to_le_bytes()[0];
        let below = |numbers: &mut Numbers, limit: u64| numbers.next() % limit;
        let length = 60 + usize::try_from(below(&mut numbers, 1455)).unwrap();
        match below(&mut numbers, 7) {
            0 | 1 => {
                let number = u8::try_from(below(&mut numbers, 2)).unwrap();
                table.arrive(&frame(address(number), mark, length));
                table.look();
            }
            2 => {
                let to = [OUTSIDE, address(1 - holder), [0xFF; 6]][step as usize % 3];
                let (sent, mut pieces, mut done) = (frame(to, mark, length), Vec::new(), 0);
                while done < length {
                    let most = u64::try_from(length - done).unwrap();
                    let now = if pieces.len() == 2 { most } else { 1 + below(&mut numbers, most) };
                    // 16 KiB apart, so in different slots, at any offset.
                    let base = memory(holder).start + FREE;
                    let place =
                        base + 0x4000 * u64::try_from(pieces.len()).unwrap() + below(&mut numbers, 0x3A00);
                    let to = done + usize::try_from(now).unwrap();
                    table.store(holder, place, &sent[done..to]);
                    pieces.push((place, u16::try_from(now).unwrap()));
                    done = to;
                }
                with(&mut table, holder, |driver, guest| driver.send_pieces(guest, &pieces));
                table.look();
            }
            3 => {
                let sent = long(mark, 60 + usize::try_from(below(&mut numbers, 24_000)).unwrap());
                let place = memory(holder).start + FREE + below(&mut numbers, 0x2000);
                table.store(holder, place, &sent);
                let all = (place, u32::try_from(sent.len()).unwrap());
                with(&mut table, holder, |driver, guest| driver.send_cut_at(guest, all, 54, 1200));
                table.look();
            }
            4 => {
                holder = 1 - holder;
                table.turn(holder);
            }
            _ => {
                let (frames, sent, _) = table.interrupt(holder);
                told.push(format!("{step}: {sent}"));
                got[usize::from(holder)].extend(frames);
            }
        }
        wire.extend(table.wire());
    }
    for number in [0, 1, 0, 1] {
        table.turn(number);
        let (frames, sent, _) = table.interrupt(number);
        told.push(format!("{number}: {sent}"));
        got[usize::from(number)].extend(frames);
        wire.extend(table.wire());
    }
    let front = table.monitor.physical();
    told.push(format!("{:?} {:?} {:?}", front.fed(0), front.fed(1), front.totals()));
    assert_eq!((front.totals().resets, front.fed(0).refused + front.fed(1).refused), (0, 0));
    assert_eq!(table.refused(), 0);
    table.was_good();
    assert_eq!(table.mapped() == 0, !which.1, "without an IOMMU nothing is mapped");
    (wire, got, told)
}

/// Two guests with scattered memory send, receive and get reports as with an IOMMU: every frame, intact and in order.
#[test]
fn everything_is_as_with_an_iommu() {
    for seed in 1..=10 {
        let (with, without) = (run((&E1000, true), seed), run(PLAIN, seed));
        assert!(with.0.len() > 100 && with.1.iter().all(|got| got.len() > 20), "frames came and went");
        assert!(with.0 == without.0, "{seed}: {} and {} on the wire", with.0.len(), without.0.len());
        assert!(with.1 == without.1, "{seed}: what guests got");
        assert_eq!(with.2, without.2, "{seed}");
    }
}

/// At each byte around the border of two slots, and across several borders, the frame on the wire equals that in the
/// guest's memory.
#[test]
fn frames_across_borders_are_whole() {
    let mut table = Table::new(PLAIN);
    let borders: Vec<u64> = scattered(1).0[40..48].iter().map(|slot| slot.guest_base).collect();
    for (mark, before) in (1u8..).zip([1u64, 2, 5, 6, 7, 13, 14, 59, 60, 63, 64, 99]) {
        for border in &borders {
            let out = frame(OUTSIDE, mark, 100);
            table.store(1, border - before, &out);
            with(&mut table, 1, |driver, guest| driver.send_at(guest, border - before, 100));
            table.look();
            assert_eq!(table.wire(), vec![out], "{before} bytes before {border:x}");
            table.interrupt(1);
        }
    }
    // Seven slots in one descriptor.
    let (first, end) = (borders[0], borders[6] + 0x1000);
    let sent = long(9, usize::try_from(end - first).unwrap());
    table.store(1, first, &sent);
    let all = (first, u32::try_from(sent.len()).unwrap());
    with(&mut table, 1, |driver, guest| driver.send_cut_at(guest, all, 54, 1400));
    table.look();
    let body: Vec<u8> = table.wire().iter().flat_map(|segment| segment[54..].to_vec()).collect();
    assert!(body == sent[54..], "{} bytes of {}", body.len(), sent.len() - 54);
    table.was_good();
}

/// A frame that has too many pieces because its memory is scattered isn't sent, but other frames are.
#[test]
fn a_frame_of_too_many_pieces_is_refused() {
    let mut table = Table::new(PLAIN);
    // From the last byte of a slot of five pages to the first byte behind a slot of one page: three pieces each. The
    // limit is 128.
    let slot = scattered(1).0.windows(2).find(|pair| pair[0].length == 0x5000).unwrap()[1];
    assert_eq!(slot.length, 0x1000);
    let wide = (slot.guest_base - 1, 0x1002);
    with(&mut table, 1, |driver, guest| {
        driver.send_pieces(guest, &[wide; 43]);
        driver.send_pieces(guest, &[(memory(1).start + FREE, 100)]);
    });
    table.look();
    assert_eq!((table.wire().len(), table.monitor.physical_ref().fed(1).refused), (1, 1));
    // 126 pieces: too long for the wire, but the card gets them.
    with(&mut table, 1, |driver, guest| driver.send_pieces(guest, &[wide; 42]));
    table.look();
    assert_eq!(
        (table.monitor.physical_ref().fed(1).sent, table.monitor.physical_ref().fed(1).refused),
        (2, 1)
    );
    table.was_good();
}

/// A guest can't use bus addresses: those of its own memory, of the other guest's, or of the owner's rings. Nor memory
/// behind its last slot.
#[test]
fn a_guest_cannot_name_addresses_of_the_bus() {
    let mut table = Table::new(PLAIN);
    let (own, others) = (scattered(1), scattered(0));
    let all = [own.0[3].device_base, others.0[3].device_base, at(0), at(1), SCRATCH, SCRATCH + 0x1000];
    with(&mut table, 1, |driver, guest| {
        all.iter().for_each(|&place| driver.send_at(guest, place, 64));
        driver.send_at(guest, memory(1).end - 32, 64);
        driver.send_at(guest, memory(1).start - 32, 64);
    });
    table.look();
    assert_eq!((table.wire().len(), table.monitor.physical_ref().fed(1).refused), (0, 8));
    table.was_good();
}

/// Control for the tests above with frames across borders: the card reads foreign memory if only the first address was
/// translated.
#[test]
fn an_address_alone_is_not_enough() {
    let slots = scattered(1);
    let border = slots.0[41].guest_base;
    let allowed = slots.0.iter().map(|slot| slot.device_base..slot.device_base + slot.length);
    let ram = Shared::new(allowed.chain(std::iter::once(SCRATCH..SCRATCH + 0x1000)).collect());
    let mut card = E1000Card::new(STATION, ram.clone(), false);
    card.set_bus_master(true).unwrap();
    let first = slots.dma(border - 50, 50, device_models::describe::Direction::DeviceReads).unwrap();
    ram.store(SCRATCH, &[first.to_le_bytes(), (100u64 | 0x0B << 24).to_le_bytes()].concat());
    for (offset, value) in [(0x3800, 0x3000_0000), (0x3808, 0x80), (0x400, 2), (0x3818, 1)] {
        card.write(0, offset, 4, value).unwrap();
    }
    card.tick();
    assert_eq!(ram.log().1, 50, "behind the border is somebody else's memory");
}

/// A way by which a guest loses the card or its memory.
type Way = fn(&mut Table);

/// A card with unread descriptors is reset before its holder loses it. It reads none of them after the reset. In the
/// control, the card ignores the reset, and the log shows its reads.
#[test]
fn a_card_that_does_not_come_to_an_end_is_reset_first() {
    let handed_on: Way = |table| table.take(0);
    let gone: Way = |table| {
        table.monitor.physical().park();
        table.monitor.release().unwrap();
        table.allow(None);
        table.monitor.physical().seat(None);
        table.monitor.physical().forget_memory(1).unwrap();
    };
    let no_master: Way = |table| {
        table.monitor.physical().set_guest_bus_master(false).unwrap();
        table.allow(None);
    };
    let switched_off: Way = |table| {
        Guest::new(&mut table.monitor, GuestId(1)).write(0x400, 4, 0);
        table.allow(None);
    };
    let machine_reset: Way = |table| {
        table.monitor.power_on(GuestId(1)).unwrap();
        table.allow(None);
    };
    for (number, way) in [handed_on, gone, no_master, switched_off, machine_reset].into_iter().enumerate() {
        for stubborn in [false, true] {
            let mut table = Table::new(PLAIN);
            let card = table.monitor.physical().card();
            (card.slow, card.resets) = (true, if stubborn { Resets::Ignored } else { Resets::Work });
            for mark in 0..5 {
                table.send(1, &frame(OUTSIDE, mark, 700));
            }
            way(&mut table);
            assert_eq!(table.monitor.physical_ref().totals().resets, 1, "{number}");
            table.monitor.physical().card().hear();
            assert_eq!(table.ram.log().1 > 0, stubborn, "{number}: {} bytes", table.ram.log().1);
            assert_eq!(table.wire().is_empty(), !stubborn, "{number}");
        }
    }
    // For a card that can't be reset, the owner gets an error. It reads nothing either.
    let mut table = Table::new(PLAIN);
    let card = table.monitor.physical().card();
    (card.slow, card.resets) = (true, Resets::Fail);
    table.send(1, &frame(OUTSIDE, 1, 700));
    table.monitor.release().unwrap_err();
    table.allow(None);
    table.monitor.physical().card().hear();
    assert_eq!((table.ram.log().1, table.wire()), (0, Vec::<Vec<u8>>::new()));
    assert!(table.monitor.physical().card().card.blocked() > 0, "bus mastering was switched off first");
    // The next guest uses the card after its reset.
    let mut table = Table::new(PLAIN);
    table.monitor.physical().card().slow = true;
    table.send(1, &frame(OUTSIDE, 1, 700));
    table.take(0);
    table.monitor.physical().card().hear();
    let (out, into) = (frame(OUTSIDE, 2, 300), frame(address(0), 3, 400));
    table.send(0, &out);
    table.arrive(&into);
    table.look();
    assert_eq!((table.wire(), table.interrupt(0).0), (vec![out], vec![into]));
    table.was_good();
}

/// Impossible configurations are errors: a guest without a memory map on such a card, and another kind of card with
/// DMA.
#[test]
fn what_is_missing_is_named() {
    let ram = Shared::new(Vec::new());
    let rtl8139 = Rtl8139::new(STATION, ram.clone(), false);
    let refused = SharedCard::<_, Shared, _>::new(&RTL8139, rtl8139, ram.clone()).err().unwrap().to_string();
    assert!(refused.contains("without an IOMMU can't be shared"), "{refused}");

    let card = E1000Card::new(STATION, ram.clone(), false);
    let mut front = SharedCard::<_, Shared, _>::new(&E1000, card, ram.clone()).unwrap();
    front.add_seat(address(0));
    let mut monitor = Monitor::new(&E1000, front);
    let mut slots = support::memory::slots(0);
    slots.0[0].device_base = slots.0[0].guest_base;
    monitor.add(config(0, FailurePolicy::Ignore, &[], slots));
    monitor.physical().seat(Some((0, ram.clone(), true)));
    monitor.switch(GuestId(0), false).unwrap();
    ram.store(TX_RING.into(), &[MEMORY.start.to_le_bytes(), (64u64 | 0x0B << 24).to_le_bytes()].concat());
    let write = |&(offset, value): &(u32, u32)| {
        let access = device_models::Access { bar: 0, offset, size: 4, write: Some(value) };
        monitor.access(GuestId(0), access)
    };
    let failed = SETUP.iter().chain([&(0x3818, 1)]).map(write).find_map(Result::err).unwrap().to_string();
    assert!(failed.contains("add the seat with its memory map"), "{failed}");
}

/// A hostile guest's attacks on an e1000 succeed on a bare card without an IOMMU, and fail on a shared one. Either
/// guest can be the attacker, and the other one continues. The emulated receiver blocks the attacks that cause neither
/// a refusal nor a dropped frame.
#[test]
fn attacks_succeed_on_a_bare_card_and_not_on_a_shared_one() {
    for of in ATTACKS {
        let ram = Shared::new(vec![MEMORY]);
        let mut bare = Bare(E1000Card::new(STATION, ram.clone(), false));
        bare.0.set_bus_master(true).unwrap();
        prepare(&mut bare, of);
        for (bar, offset, value) in requests(of) {
            bare.0.write(bar, offset, 4, value).unwrap();
        }
        bare.0.tick();
        for length in [4000, 60, 1514, 600].repeat(4) {
            bare.0.receive(&frame([0xFF; 6], 0x55, length));
        }
        bare.0.tick();
        assert!(ram.log().1 > 0, "{}: the bare card withstands", of.name);

        let mut table = Table::with(PLAIN, FailurePolicy::Ignore);
        table.turn(0);
        let mut guest = Guest::new(&mut table.monitor, GuestId(0));
        prepare(&mut guest, of);
        for (bar, offset, value) in requests(of) {
            guest.bar = bar;
            guest.write(offset, 4, value);
        }
        traffic(&mut table);
        assert_eq!(table.ram.log().1, 0, "{}", of.name);
        // The other guest, whose driver ran all the time.
        table.take(1);
        table.wire();
        let out = frame(OUTSIDE, 7, 500);
        table.send(1, &out);
        table.look();
        assert_eq!(table.wire(), vec![out], "{}", of.name);
        let (frames, sent, _) = table.interrupt(1);
        assert_eq!((frames.len(), sent), (12, 1), "{}: those of the wire", of.name);
        // A correct driver of the attacker's guest works, too.
        table.take(0);
        let mut guest = Guest::new(&mut table.monitor, GuestId(0));
        prepare(&mut guest, &HONEST);
        SETUP.iter().for_each(|&(offset, value)| guest.write(offset, 4, value));
        guest.write(0x3818, 4, 1);
        traffic(&mut table);
        assert_eq!(table.wire().len(), 1, "{}: the card stands still", of.name);
        table.was_good();
    }
}

/// As for the bare card. The owner's receiver accepts no frame of 4,000 bytes.
fn traffic(table: &mut Table) {
    table.look();
    for length in [4000, 60, 1514, 600].repeat(4) {
        let taken = table.monitor.physical().card().card.receive(&frame([0xFF; 6], 0x55, length));
        assert_eq!(taken, length <= 1514);
    }
    table.look();
}

/// Overwrites both guests' memory until the end, half of the time their rings. Addresses are the guests' own, bus
/// addresses, and random ones; so are lengths and commands.
fn rewrite(numbers: &mut Numbers, views: &[View; 2], ram: &Shared) {
    let number = u8::try_from(numbers.next() % 2).unwrap();
    let base = memory(number).start - MEMORY.start;
    let of = numbers.next();
    let address = match of % 4 {
        0 => base + u64::from(TX_RING) + numbers.next() % 0x10 * 8,
        1 => base + u64::from(RX_RING) + numbers.next() % 0x10 * 8,
        _ => memory(number).start + numbers.next() % 0x1_FFFE * 8,
    };
    let any = numbers.next();
    let value = match (address % 16, of / 4 % 8) {
        (0, 0..4) => memory(number).start - 0x800 + any % 0x10_1000,
        (0, 4) => at(number) + any % 0x40_0000,
        (0, 5) => SCRATCH + any % 0x8_4000,
        (0, 6) => any % 0x40_0000,
        // A frame of up to 4 KiB, or a piece of one, or a context.
        (8, 0..5) => any & 0xFFFF_FF00_FF00_0FFF | 0x0100_0000,
        // Extended, up to 32 KiB.
        (8, 5 | 6) => any & 0xFFFF_FF00_FF00_7FFF | 0x2010_0000,
        _ => any,
    };
    ram.store(views[usize::from(number)].place(address).unwrap(), &value.to_le_bytes());
}

/// Random requests, frames and hand-offs, while another thread overwrites both guests' memory, preferably rings and
/// descriptors. The card stays in its own memory and the holder's. `CAUSEWAY_RACES` sets the number of requests.
#[test]
fn no_sequence_of_requests_leaves_what_was_granted() {
    let wanted: u64 =
        std::env::var("CAUSEWAY_RACES").ok().and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let (mut requests, mut refused, mut touched, mut handoffs, mut seed) = (0, 0, 0, 0u64, 0u64);
    let (mut sent, mut unsent, mut resets) = (0, 0, 0);
    while requests < wanted {
        seed += 1;
        let mut table = Table::with(PLAIN, FailurePolicy::Ignore);
        let over = Arc::new(AtomicBool::new(false));
        let racer = std::thread::spawn({
            let (over, ram, views) = (Arc::clone(&over), table.ram.clone(), [0, 1].map(|of| table.view(of)));
            move || {
                let mut numbers = Numbers(seed);
                while !over.load(Ordering::Relaxed) {
                    rewrite(&mut numbers, &views, &ram);
                }
            }
        });
        let grammar = Grammar::new(&E1000);
        let (mut numbers, mut holder) = (Numbers(seed), 1u8);
        for _ in 0..4000 {
            let id = GuestId(holder.into());
            match numbers.next() % 64 {
                0..4 => {
                    let to = [[0xFF; 6], address(0), address(1), OUTSIDE][numbers.below(4)];
                    table.monitor.physical().card().card.receive(&frame(to, 0x55, 700));
                }
                4..8 => table.look(),
                8..11 => table.monitor.interrupt().unwrap(),
                11 => {
                    let base = u32::try_from(memory(holder).start - MEMORY.start).unwrap();
                    for &(offset, value) in SETUP {
                        let value = if matches!(offset, 0x3800 | 0x2800) { value + base } else { value };
                        Guest::new(&mut table.monitor, id).write(offset, 4, value);
                        requests += 1;
                    }
                }
                12..18 => {
                    let tail = u32::try_from(numbers.next() % 8).unwrap();
                    let at = if numbers.next().is_multiple_of(3) { 0x2818 } else { 0x3818 };
                    Guest::new(&mut table.monitor, id).write(at, 4, tail);
                    requests += 1;
                }
                18 => {
                    // At a quiescent point, or at any other moment.
                    if numbers.next().is_multiple_of(2) {
                        table.look();
                        table.monitor.settle().unwrap();
                    }
                    holder = 1 - holder;
                    table.take(holder);
                    handoffs += 1;
                }
                19 => {
                    let on = !numbers.next().is_multiple_of(4);
                    table.monitor.physical().set_guest_bus_master(on).unwrap();
                }
                _ => {
                    for access in grammar.request(&mut numbers) {
                        table.monitor.access(id, access).unwrap();
                        requests += 1;
                    }
                }
            }
            assert_eq!(table.ram.log().1, 0, "seed {seed}: {:?}", table.monitor.violations(id).last());
        }
        over.store(true, Ordering::Relaxed);
        racer.join().unwrap();
        refused += table.refused();
        touched += table.ram.log().0;
        let front = table.monitor.physical_ref();
        sent += front.fed(0).sent + front.fed(1).sent;
        unsent += front.fed(0).refused + front.fed(1).refused;
        resets += front.totals().resets;
    }
    println!(
        "e1000, shared, no IOMMU: {requests} requests, {refused} refused, {handoffs} hand-offs, {sent} frames handed to the card, {unsent} not, \
         {resets} resets, {touched} bytes of DMA, 0 outside"
    );
    assert!(refused > 1000 && touched > 100_000 && handoffs > 1000, "{refused} {touched} {handoffs}");
    assert!(sent > 1000 && unsent > 1000, "{sent} {unsent}");
}
