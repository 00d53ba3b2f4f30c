//! Invariants under random steps of guests, devices and other nodes.

use apic::message::{Delivery, Destination, Message, Trigger};
use apic::registers::*;
use apic::vectors::VectorSet;
use apic::{Action, Controllers, LocalInput, NodeMessage, SavedControllers, VcpuEvent};
use proptest::prelude::*;

use crate::common::*;

/// A step of a guest, a device, another node, or the caller.
#[derive(Debug, Clone)]
enum Step {
    Write { vcpu: usize, msr: u32, value: u64 },
    Read { vcpu: usize, msr: u32 },
    Next { vcpu: usize, interruptible: bool },
    End { vcpu: usize },
    Cr8 { vcpu: usize, cr8: u8 },
    Input { vcpu: usize, input: LocalInput },
    Line { pin: u32, asserted: bool },
    UntilEnd { pin: u32 },
    Mmio { offset: u64, data: Vec<u8> },
    Msi { address: u64, data: u32 },
    Receive(NodeMessage),
    Wait { ns: u64 },
    Restore,
}

fn msr() -> impl Strategy<Value = u32> {
    prop_oneof![8 => X2APIC_FIRST..=0x83F, 1 => X2APIC_FIRST..=X2APIC_LAST, 1 => any::<u32>()]
}

/// Register values, mostly such as software writes.
fn register_write() -> impl Strategy<Value = (u32, u64)> {
    prop_oneof![
        2 => (msr(), any::<u64>()),
        2 => (msr(), 0..0x400u64),
        3 => (any::<u64>(), 0..0x25u64)
            .prop_map(|(bits, to)| (INTERRUPT_COMMAND, to << 32 | bits & !COMMAND_RESERVED_BITS & 0xFFFF_FFFF)),
        1 => any::<u8>().prop_map(|vector| (SELF_IPI, vector.into())),
        2 => (LVT_TIMER..=LVT_ERROR, any::<u64>()).prop_map(|(msr, bits)| (msr, bits & 0x3_F7FF)),
        2 => prop_oneof![Just(0x1FFu64), Just(0xFF)].prop_map(|value| (SPURIOUS_VECTOR, value)),
        1 => (0..1000u64).prop_map(|count| (INITIAL_COUNT, count)),
    ]
}

const COMMAND_RESERVED_BITS: u64 = 0xFFF3_2000;

fn message() -> impl Strategy<Value = NodeMessage> {
    let trigger = || prop_oneof![Just(Trigger::Edge), Just(Trigger::Level)];
    let delivery = prop_oneof![
        4 => (any::<u8>(), trigger()).prop_map(|(vector, trigger)| Delivery::Fixed { vector, trigger }),
        1 => (any::<u8>(), trigger()).prop_map(|(vector, trigger)| Delivery::LowestPriority { vector, trigger }),
        1 => any::<u8>().prop_map(|vector| Delivery::Startup { vector }),
        1 => prop_oneof![Just(Delivery::Nmi), Just(Delivery::Init), Just(Delivery::Smi), Just(Delivery::External)],
    ];
    let destination = prop_oneof![
        (0..0x25u32).prop_map(Destination::Physical),
        any::<u32>().prop_map(Destination::Physical),
        any::<u32>().prop_map(|bits| Destination::Logical(bits & 0x3_FFFF)),
        Just(Destination::All),
        any::<u32>().prop_map(Destination::AllBut),
    ];
    prop_oneof![
        (destination, delivery)
            .prop_map(|(destination, delivery)| NodeMessage::Interrupt(Message { destination, delivery })),
        any::<u8>().prop_map(|vector| NodeMessage::EndOfInterrupt { vector }),
    ]
}

fn input() -> impl Strategy<Value = LocalInput> {
    prop_oneof![
        Just(LocalInput::Thermal),
        Just(LocalInput::Performance),
        any::<bool>().prop_map(LocalInput::Lint0),
        any::<bool>().prop_map(LocalInput::Lint1),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let vcpu = || 0..4usize;
    let mmio = prop_oneof![
        (0..0x50u8).prop_map(|index| (0, vec![index])),
        prop::collection::vec(any::<u8>(), 4).prop_map(|data| (0x10, data)),
        any::<u8>().prop_map(|vector| (0x40, vec![vector, 0, 0, 0])),
        (any::<u64>(), prop::collection::vec(any::<u8>(), 0..=8)),
    ];
    let msi = prop_oneof![
        (any::<u64>(), any::<u32>()),
        (any::<u64>(), any::<u32>()).prop_map(|(bits, data)| (0xFEE0_0000 | bits & 0xF_FFFF, data & 0xFFFF)),
    ];
    prop_oneof![
        8 => (vcpu(), register_write()).prop_map(|(vcpu, (msr, value))| Step::Write { vcpu, msr, value }),
        2 => (vcpu(), msr()).prop_map(|(vcpu, msr)| Step::Read { vcpu, msr }),
        6 => (vcpu(), any::<bool>()).prop_map(|(vcpu, interruptible)| Step::Next { vcpu, interruptible }),
        3 => vcpu().prop_map(|vcpu| Step::End { vcpu }),
        1 => (vcpu(), any::<u8>()).prop_map(|(vcpu, cr8)| Step::Cr8 { vcpu, cr8 }),
        1 => (vcpu(), input()).prop_map(|(vcpu, input)| Step::Input { vcpu, input }),
        2 => (0..25u32, any::<bool>()).prop_map(|(pin, asserted)| Step::Line { pin, asserted }),
        1 => (0..25u32).prop_map(|pin| Step::UntilEnd { pin }),
        3 => mmio.prop_map(|(offset, data)| Step::Mmio { offset, data }),
        2 => msi.prop_map(|(address, data)| Step::Msi { address, data }),
        2 => message().prop_map(Step::Receive),
        1 => prop_oneof![0..1000u64, any::<u64>()].prop_map(|ns| Step::Wait { ns }),
        1 => Just(Step::Restore),
    ]
}

struct World {
    controllers: Controllers,
    now_ns: u64,
    actions: Vec<Action>,
}

impl World {
    fn new() -> Self {
        Self { controllers: running(config()), now_ns: 0, actions: Vec::new() }
    }

    fn apic_id(&self, vcpu: usize) -> u32 {
        self.controllers.apic_ids()[vcpu]
    }

    fn saved(&self) -> SavedControllers {
        self.controllers.save(self.now_ns)
    }

    /// Executes a step. An error is a valid result.
    fn step(&mut self, step: &Step) {
        let (controllers, now_ns, actions) = (&self.controllers, self.now_ns, &mut self.actions);
        let port = |vcpu: usize| controllers.vcpu(controllers.apic_ids()[vcpu]).unwrap();
        match step {
            Step::Write { vcpu, msr, value } => drop(port(*vcpu).write_msr(*msr, *value, now_ns, actions)),
            Step::Read { vcpu, msr } => drop(port(*vcpu).read_msr(*msr, now_ns, actions)),
            Step::Next { vcpu, interruptible } => self.next(*vcpu, *interruptible),
            Step::End { vcpu } => port(*vcpu).write_msr(END_OF_INTERRUPT, 0, now_ns, actions).unwrap(),
            Step::Cr8 { vcpu, cr8 } => port(*vcpu).set_cr8(*cr8),
            Step::Input { vcpu, input } => port(*vcpu).set_input(*input, actions),
            Step::Line { pin, asserted } => drop(controllers.set_line(*pin, *asserted, actions)),
            Step::UntilEnd { pin } => drop(controllers.assert_until_end(*pin, actions)),
            Step::Mmio { offset, data } => {
                controllers.write_io_apic(*offset, data, actions);
                controllers.read_io_apic(*offset, &mut [0; 8]);
            }
            Step::Msi { address, data } => drop(controllers.signal_msi(*address, *data, actions)),
            Step::Receive(message) => controllers.receive(*message, actions),
            Step::Wait { ns } => self.now_ns = self.now_ns.saturating_add(*ns),
            Step::Restore => {
                let saved = self.saved();
                let bytes = postcard::to_stdvec(&saved).unwrap();
                let read: SavedControllers = postcard::from_bytes(&bytes).unwrap();
                self.controllers = Controllers::restore(config(), &read, self.now_ns).unwrap();
                assert_eq!(self.saved(), saved);
            }
        }
    }

    /// Checks that the vCPU accepts the highest requested vector, whose class is above those of all vectors in service and above TPR's.
    fn next(&mut self, vcpu: usize, interruptible: bool) {
        let apic_id = self.apic_id(vcpu);
        let before = self.saved().local[vcpu].clone();
        let port = self.controllers.vcpu(apic_id).unwrap();
        let has_event = port.has_event(interruptible, self.now_ns, &mut self.actions);
        let event = port.next_event(interruptible, self.now_ns, &mut self.actions);
        let sleeps = [VcpuEvent::None, VcpuEvent::WaitForStartup, VcpuEvent::AwaitInterruptWindow];
        assert_eq!(has_event, !sleeps.contains(&event), "{event:?}");
        let after = &self.saved().local[vcpu];
        let VcpuEvent::Interrupt { vector } = event else { return };
        assert!(interruptible && !before.waits_for_startup);
        assert_eq!(before.requested.highest(), Some(vector));
        let class = vector >> 4;
        assert!(class > before.task_priority >> 4, "TPR {:#x}, vector {vector:#x}", before.task_priority);
        assert!(before.in_service.iter().all(|other| class > other >> 4));
        let without: VectorSet = before.requested.iter().filter(|other| *other != vector).collect();
        assert_eq!(after.requested, without);
        assert_eq!(after.in_service, before.in_service.iter().chain([vector]).collect());
    }

    /// Checks the invariants after a step.
    fn check(&mut self) {
        // Limit of a step's actions: each pin may end, interrupt all APICs of this node, and send a message to each node.
        let limit = 24 * (1 + 4 + 2) + 4 + 2 + 1;
        assert!(self.actions.len() <= limit, "{} actions of one step", self.actions.len());
        self.actions.clear();
        let saved = self.saved();
        let restored = Controllers::restore(config(), &saved, self.now_ns).expect("a state that was reached");
        assert_eq!(restored.save(self.now_ns), saved);
        let io_apic = saved.io_apic.unwrap();
        for pin in 0..24 {
            let entry = io_apic.entries[pin];
            let level = entry & 0x8000 != 0;
            let line = (io_apic.asserted | io_apic.until_end) >> pin & 1 != 0;
            assert!(level || entry & 0x4000 == 0, "remote IRR of an edge-triggered entry");
            if level && line && entry & 0x1_0000 == 0 && entry & 0x700 == 0 && entry & 0x4000 == 0 {
                assert!(
                    !self.accepts(entry),
                    "an asserted line that an APIC would accept doesn't wait: {entry:#x}"
                );
            }
        }
    }

    /// Whether the destination of an unmasked fixed entry would have accepted its interrupt when its line or entry last changed.
    fn accepts(&self, entry: u64) -> bool {
        let vector = entry & 0xFF;
        let to = u32::try_from(entry >> 56).unwrap();
        vector >= 16 && entry & 0x800 == 0 && [0x22, 0x23, 0x40].contains(&to)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_guests_devices_and_nodes_break_nothing(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
            world.check();
        }
    }

    /// A vCPU accepts an edge to its enabled APIC exactly once, in any order of sends, accepts and EOIs.
    #[test]
    fn no_edge_is_lost_or_repeated(
        sends in prop::collection::vec((0..4u32, 16..=255u8, 0..3u8, any::<bool>()), 1..80),
        takes in prop::collection::vec(0..4usize, 0..80),
    ) {
        let controllers = running(config());
        let ids = controllers.apic_ids().to_vec();
        let mut requested = [[0u32; 256]; 4];
        let mut taken = [[0u32; 256]; 4];
        let mut takes = takes.into_iter();
        let take = |vcpu: usize, taken: &mut [[u32; 256]; 4]| match next(&controllers, ids[vcpu]) {
            VcpuEvent::Interrupt { vector } => { taken[vcpu][usize::from(vector)] += 1; true }
            other => { assert_eq!(other, VcpuEvent::None); false }
        };
        for (to, vector, way, end) in sends {
            let vcpu = usize::try_from(to).unwrap();
            let index = usize::from(vector);
            let pending = requested[vcpu][index] > taken[vcpu][index];
            let bits = u64::from(vector);
            let before = match way {
                0 => write(&controllers, 0, INTERRUPT_COMMAND, u64::from(ids[vcpu]) << 32 | bits),
                1 => {
                    let mut actions = Vec::new();
                    let address = 0xFEE0_0000 | u64::from(ids[vcpu]) << 12;
                    controllers.signal_msi(address, vector.into(), &mut actions).unwrap();
                    actions
                }
                _ => {
                    set_pin(&controllers, 4, u64::from(ids[vcpu]) << 56 | bits);
                    let actions = set_line(&controllers, 4, true);
                    set_line(&controllers, 4, false);
                    actions
                }
            };
            let own = way == 0 && vcpu == 0;
            prop_assert_eq!(before.is_empty(), pending || own, "kicked once per request");
            requested[vcpu][index] += u32::from(!pending);
            if let Some(vcpu) = takes.next() {
                take(vcpu, &mut taken);
                if end {
                    write(&controllers, ids[vcpu], END_OF_INTERRUPT, 0);
                }
            }
        }
        for (vcpu, id) in ids.iter().enumerate() {
            for _ in 0..16 {
                write(&controllers, *id, END_OF_INTERRUPT, 0);
            }
            while take(vcpu, &mut taken) {
                write(&controllers, *id, END_OF_INTERRUPT, 0);
            }
        }
        prop_assert_eq!(requested, taken);
    }

    /// A level-triggered pin interrupts once, and once more after each EOI while the line is asserted.
    #[test]
    fn a_level_comes_again_while_its_line_is_asserted(
        vector in 16..=255u8,
        ends in 0..20usize,
        masked_first in any::<bool>(),
    ) {
        let controllers = running(config());
        let entry = 2u64 << 56 | 0x8000 | u64::from(vector);
        set_pin(&controllers, 9, entry | if masked_first { 0x1_0000 } else { 0 });
        set_line(&controllers, 9, true);
        if masked_first {
            prop_assert_eq!(next(&controllers, 2), VcpuEvent::None);
            set_pin(&controllers, 9, entry);
        }
        for _ in 0..ends {
            prop_assert_eq!(serve(&controllers, 2).map(|(vector, _)| vector), Some(vector));
        }
        set_line(&controllers, 9, false);
        prop_assert_eq!(vectors(&controllers, 2), [vector]);
    }

    /// A read of any MSR changes no state.
    #[test]
    fn reads_have_no_effect(steps in prop::collection::vec(step(), 0..40), msr in msr()) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        let before = world.saved();
        world.step(&Step::Read { vcpu: 0, msr });
        prop_assert_eq!(world.saved(), before);
    }
}
