//! Deferred (coalesced) writes on real KVM: they cost no exits, and reach devices in order and before later accesses.

use crate::common;

use std::sync::{Arc, Mutex};

use common::{Guest, STOP, WINDOW, host, program};
use machine::bus::BusDevice;
use machine::coalesced::CoalescedZone;
use machine::vm::IoSpace;
use machine::x86::kvm_regs;

const PORT: u64 = 0x310;
const TIMES: u64 = 1000;

/// Range, offset, value.
type Write = (&'static str, u64, u64);

/// The writes to either range, in order.
struct Log(Mutex<Vec<Write>>);

struct Range(&'static str, Arc<Log>);

impl BusDevice for Range {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.1.0.lock().unwrap().push((self.0, offset, u64::MAX));
        data.fill(0);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        let mut value = [0; 8];
        value[..data.len()].copy_from_slice(data);
        self.1.0.lock().unwrap().push((self.0, offset, u64::from_le_bytes(value)));
    }
}

/// Counts down from 1000, writes each number to memory and to a port, and then reads from memory.
fn count_down() -> (Vec<u8>, kvm_regs) {
    // loop: mov [rdi+0x10], ecx; mov eax, ecx; out dx, eax; dec ecx; jnz loop; mov eax, [rdi+0x40]
    let code = [0x89, 0x4f, 0x10, 0x89, 0xc8, 0xef, 0xff, 0xc9, 0x75, 0xf6, 0x8b, 0x47, 0x40];
    let regs = kvm_regs { rdi: WINDOW, rdx: PORT, rcx: TIMES, ..Default::default() };
    (program(&[&code, &STOP]), regs)
}

fn run(zones: &[CoalescedZone]) -> Option<(Guest, Vec<Write>)> {
    let guest = Guest::new(host()?, 1);
    let log = Arc::new(Log(Mutex::default()));
    let range = |name| Arc::new(Range(name, Arc::clone(&log))) as Arc<dyn BusDevice>;
    guest.memory.insert(WINDOW, 0x1000, "card", range("memory")).unwrap();
    guest.ports.insert(PORT, 8, "card", range("port")).unwrap();
    for zone in zones {
        guest.vm.add_coalesced_zone(zone).unwrap();
    }
    let (code, regs) = count_down();
    guest.run_to_stop(&code, regs);
    let seen = log.0.lock().unwrap().clone();
    Some((guest, seen))
}

const ZONES: [CoalescedZone; 2] = [
    CoalescedZone { space: IoSpace::Memory, address: WINDOW + 0x10, length: 8 },
    CoalescedZone { space: IoSpace::Port, address: PORT, length: 4 },
];

#[test]
fn coalesced_writes_arrive_in_order_before_the_next_access_and_exit_only_when_the_ring_is_full() {
    let (Some((prompt, expected)), Some((coalesced, seen))) = (run(&[]), run(&ZONES)) else { return };
    assert_eq!(expected.len() as u64, 2 * TIMES + 1);
    assert_eq!(seen, expected);
    assert_eq!(prompt.exits("memory:card") + prompt.exits("port:card"), 2 * TIMES + 1);
    // The ring holds 169 writes; the next one exits, and drains the ring.
    let exits = coalesced.exits("memory:card") + coalesced.exits("port:card");
    assert_eq!(exits, 1 + 2 * TIMES / 170);
    assert_eq!(coalesced.vm.coalesced().drained(), 2 * TIMES + 1 - exits);
}

#[test]
fn a_removed_zone_defers_no_write() {
    let Some((guest, _)) = run(&ZONES) else { return };
    for zone in &ZONES {
        guest.vm.remove_coalesced_zone(zone).unwrap();
    }
    let before = (guest.vm.coalesced().drained(), guest.exits("memory:card") + guest.exits("port:card"));
    let (code, regs) = count_down();
    guest.run_to_stop(&code, regs);
    let after = (guest.vm.coalesced().drained(), guest.exits("memory:card") + guest.exits("port:card"));
    assert_eq!((after.0 - before.0, after.1 - before.1), (0, 2 * TIMES + 1));
}

#[test]
fn a_pause_drains_the_ring() {
    let Some((guest, _)) = run(&ZONES) else { return };
    // loop: mov [rdi+0x10], ecx; then an endless loop without an access
    let code = program(&[&[0x89, 0x4f, 0x10, 0xeb, 0xfe]]);
    guest.load(common::CODE, &code);
    let drained = guest.vm.coalesced().drained();
    let regs = kvm_regs { rdi: WINDOW, rcx: 7, ..Default::default() };
    guest.vcpus.set_state(0, common::start(regs)).unwrap();
    guest.vcpus.resume().unwrap();
    let begin = std::time::Instant::now();
    while guest.vm.coalesced().drained() == drained {
        assert!(begin.elapsed().as_secs() < 20, "nothing came");
        std::thread::sleep(std::time::Duration::from_millis(20));
        guest.vcpus.pause().unwrap();
        guest.vcpus.resume().unwrap();
    }
    assert_eq!(guest.vm.coalesced().drained(), drained + 1);
}
