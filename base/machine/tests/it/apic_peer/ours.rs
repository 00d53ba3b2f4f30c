//! The side of crate `apic`: its controllers, called as the monitor calls them.

use apic::registers::END_OF_INTERRUPT;
use apic::saved::SavedLocalApic;
use apic::{Action, Config, Controllers, IoApicLocation, SavedControllers, VcpuEvent};

pub struct Ours {
    controllers: Controllers,
    /// Kicks, timers and ends of interrupts, which the comparison ignores.
    actions: Vec<Action>,
    pub now_ns: u64,
}

impl Ours {
    pub fn new() -> Self {
        let config = Config {
            local_apic_ids: vec![0, 1],
            remote_apics: Vec::new(),
            bootstrap_apic_id: 0,
            io_apic: IoApicLocation::Here,
            timer_tick_ns: 1,
            extended_destination_ids: false,
        };
        let mut ours =
            Self { controllers: Controllers::new(config).unwrap(), actions: Vec::new(), now_ns: 0 };
        // vCPU 1 runs from the start, as KVM's does.
        ours.write(0, 0x830, 0x1_0000_4600);
        assert_eq!(ours.next(1), VcpuEvent::Startup { vector: 0 });
        ours.write(0, 0x830, 0);
        ours.write(0, 0x828, 0);
        ours.write(0, 0x828, 0);
        ours
    }

    fn port(&self, vcpu: usize) -> apic::VcpuPort<'_> {
        self.controllers.vcpu(u32::try_from(vcpu).unwrap()).unwrap()
    }

    pub fn write(&mut self, vcpu: usize, msr: u32, value: u64) -> bool {
        let mut actions = std::mem::take(&mut self.actions);
        actions.clear();
        let allowed = self.port(vcpu).write_msr(msr, value, self.now_ns, &mut actions).is_ok();
        self.actions = actions;
        allowed
    }

    pub fn read(&mut self, vcpu: usize, msr: u32) -> Option<u64> {
        self.port(vcpu).read_msr(msr, self.now_ns, &mut Vec::new()).ok()
    }

    pub fn next(&mut self, vcpu: usize) -> VcpuEvent {
        self.port(vcpu).next_event(true, self.now_ns, &mut Vec::new())
    }

    /// Delivers a pending interrupt to the vCPU.
    pub fn take(&mut self, vcpu: usize) -> Option<u8> {
        match self.next(vcpu) {
            VcpuEvent::Interrupt { vector } => Some(vector),
            VcpuEvent::None => None,
            other => panic!("vCPU {vcpu} has {other:?} to do"),
        }
    }

    /// Delivers a pending NMI.
    pub fn take_nmi(&mut self, vcpu: usize) -> bool {
        if !self.save().local[vcpu].nmi_latched {
            return false;
        }
        assert_eq!(self.next(vcpu), VcpuEvent::Nmi);
        true
    }

    pub fn end(&mut self, vcpu: usize) {
        assert!(self.write(vcpu, END_OF_INTERRUPT, 0));
    }

    pub fn write_io_apic(&mut self, index: u8, value: u32) {
        self.controllers.write_io_apic(0, &[index], &mut Vec::new());
        self.controllers.write_io_apic(0x10, &value.to_le_bytes(), &mut Vec::new());
    }

    pub fn set_line(&mut self, pin: u32, asserted: bool) {
        self.controllers.set_line(pin, asserted, &mut Vec::new()).unwrap();
    }

    pub fn signal_msi(&mut self, address: u32, data: u32) {
        self.controllers.signal_msi(address.into(), data, &mut Vec::new()).unwrap();
    }

    pub fn save(&self) -> SavedControllers {
        self.controllers.save(self.now_ns)
    }

    pub fn local(&self, vcpu: usize) -> SavedLocalApic {
        self.save().local.swap_remove(vcpu)
    }
}
