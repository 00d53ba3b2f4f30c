//! Small sets of controllers, and steps that tests share.

use apic::registers::{END_OF_INTERRUPT, SPURIOUS_VECTOR};
use apic::{Action, Config, Controllers, IoApicLocation, RemoteApic, VcpuEvent};

/// APICs 0, 1, 2 and 0x21 here, 0x22 and 0x23 on node 7, 0x40 on node 9; the IOAPIC is here.
pub fn config() -> Config {
    Config {
        local_apic_ids: vec![0, 1, 2, 0x21],
        remote_apics: vec![
            RemoteApic { apic_id: 0x22, node: 7 },
            RemoteApic { apic_id: 0x23, node: 7 },
            RemoteApic { apic_id: 0x40, node: 9 },
        ],
        bootstrap_apic_id: 0,
        io_apic: IoApicLocation::Here,
        timer_tick_ns: 1,
        extended_destination_ids: false,
    }
}

/// Controllers whose vCPUs run, with APICs enabled by software.
pub fn running(config: Config) -> Controllers {
    let controllers = Controllers::new(config).unwrap();
    start(&controllers);
    controllers
}

/// Starts each vCPU and enables its APIC.
pub fn start(controllers: &Controllers) {
    for apic_id in controllers.apic_ids().to_vec() {
        write(controllers, 0, 0x830, u64::from(apic_id) << 32 | 0x4601);
        while !matches!(next(controllers, apic_id), VcpuEvent::None | VcpuEvent::WaitForStartup) {}
        write(controllers, apic_id, SPURIOUS_VECTOR, 0x1FF);
    }
}

pub fn write(controllers: &Controllers, apic_id: u32, msr: u32, value: u64) -> Vec<Action> {
    let mut actions = Vec::new();
    controllers.vcpu(apic_id).unwrap().write_msr(msr, value, 0, &mut actions).unwrap();
    actions
}

pub fn read(controllers: &Controllers, apic_id: u32, msr: u32) -> u64 {
    controllers.vcpu(apic_id).unwrap().read_msr(msr, 0, &mut Vec::new()).unwrap()
}

pub fn next(controllers: &Controllers, apic_id: u32) -> VcpuEvent {
    controllers.vcpu(apic_id).unwrap().next_event(true, 0, &mut Vec::new())
}

/// Accepts a vCPU's next interrupt and ends it. Returns its vector and the EOI's actions.
pub fn serve(controllers: &Controllers, apic_id: u32) -> Option<(u8, Vec<Action>)> {
    match next(controllers, apic_id) {
        VcpuEvent::Interrupt { vector } => Some((vector, write(controllers, apic_id, END_OF_INTERRUPT, 0))),
        VcpuEvent::None => None,
        other => panic!("{other:?}"),
    }
}

/// Accepts and ends all interrupts of a vCPU. Returns their vectors in order.
pub fn vectors(controllers: &Controllers, apic_id: u32) -> Vec<u8> {
    std::iter::from_fn(|| serve(controllers, apic_id)).map(|(vector, _)| vector).collect()
}

pub fn set_pin(controllers: &Controllers, pin: u8, entry: u64) -> Vec<Action> {
    let mut actions = Vec::new();
    for (index, half) in [(0x11 + 2 * pin, entry >> 32), (0x10 + 2 * pin, entry & 0xFFFF_FFFF)] {
        controllers.write_io_apic(0, &[index], &mut actions);
        controllers.write_io_apic(0x10, &u32::try_from(half).unwrap().to_le_bytes(), &mut actions);
    }
    actions
}

pub fn pin_entry(controllers: &Controllers, pin: u8) -> u64 {
    let mut data = [0; 4];
    controllers.write_io_apic(0, &[0x10 + 2 * pin], &mut Vec::new());
    controllers.read_io_apic(0x10, &mut data);
    u32::from_le_bytes(data).into()
}

pub fn set_line(controllers: &Controllers, pin: u32, asserted: bool) -> Vec<Action> {
    let mut actions = Vec::new();
    controllers.set_line(pin, asserted, &mut actions).unwrap();
    actions
}
