//! Interrupt controllers of two nodes: register accesses of hostile vCPUs, lines, MSIs, MMIO, messages between the nodes, and
//! messages that no node sends.
//!
//! Checked:
//! - There is no panic and no endless loop, and a step has a bounded number of actions.
//! - A vCPU accepts the highest requested vector, whose class is above those of all vectors in service and above TPR's.
//! - Every reached state is restored identically from its saved form.

#![no_main]

use apic::message::{Delivery, Destination, Message, Trigger};
use apic::{Action, Config, Controllers, IoApicLocation, LocalInput, NodeMessage, RemoteApic, VcpuEvent};
use libfuzzer_sys::fuzz_target;

const STEPS: usize = 200;
const APICS: usize = 3;

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    /// An x2APIC register with a mostly small value.
    Register {
        node: bool,
        vcpu: u8,
        register: u8,
        value: u32,
    },
    AnyMsr {
        node: bool,
        vcpu: u8,
        msr: u32,
        value: u64,
    },
    Command {
        node: bool,
        vcpu: u8,
        to: u8,
        command: u32,
    },
    Read {
        node: bool,
        vcpu: u8,
        msr: u16,
    },
    Next {
        node: bool,
        vcpu: u8,
        interruptible: bool,
    },
    End {
        node: bool,
        vcpu: u8,
    },
    Cr8 {
        node: bool,
        vcpu: u8,
        cr8: u8,
    },
    Input {
        node: bool,
        vcpu: u8,
        input: u8,
    },
    Line {
        node: bool,
        pin: u8,
        asserted: bool,
        until_end: bool,
    },
    Entry {
        pin: u8,
        low: u32,
        to: u8,
    },
    Mmio {
        offset: u16,
        data: [u8; 8],
        len: u8,
    },
    Msi {
        node: bool,
        address: u32,
        data: u32,
    },
    Stranger {
        node: bool,
        to: u32,
        kind: u8,
        vector: u8,
    },
    Wait {
        ns: u32,
    },
    Restore {
        node: bool,
    },
}

/// APICs 0 to 2 with the IOAPIC on node 0, 0x10 to 0x12 on node 1.
fn config(node: usize) -> Config {
    let ids = |node: usize| (0..3).map(move |index| if node == 0 { index } else { 0x10 | index });
    let other = 1 - node;
    let number = u16::try_from(other).expect("small");
    Config {
        local_apic_ids: ids(node).collect(),
        remote_apics: ids(other).map(|apic_id| RemoteApic { apic_id, node: number }).collect(),
        bootstrap_apic_id: 0,
        io_apic: if node == 0 { IoApicLocation::Here } else { IoApicLocation::Node(0) },
        timer_tick_ns: 1,
        extended_destination_ids: true,
    }
}

struct World {
    nodes: [Controllers; 2],
    now_ns: u64,
    actions: Vec<Action>,
}

impl World {
    /// Delivers the last step's messages, which cause only interrupts of pins.
    fn deliver(&mut self, node: usize) {
        let (mut node, mut hops) = (node, 0);
        while !self.actions.is_empty() {
            assert!(self.actions.len() <= 24 * (2 + APICS) + APICS + 3, "actions grow");
            let sent: Vec<NodeMessage> = self
                .actions
                .drain(..)
                .filter_map(|action| match action {
                    Action::Send { message, node: to } => {
                        assert_eq!(usize::from(to), 1 - node);
                        Some(message)
                    }
                    _ => None,
                })
                .collect();
            node = 1 - node;
            for message in sent {
                self.nodes[node].receive(message, &mut self.actions);
            }
            hops += 1;
            // An EOI to node 0, and interrupts of its pins.
            assert!(hops <= 3, "messages go round");
        }
    }

    fn next(&mut self, node: usize, vcpu: usize, interruptible: bool) {
        let before = self.nodes[node].save(self.now_ns).local[vcpu].clone();
        let port = self.nodes[node].vcpu(before.id).expect("it is this node's");
        let event = port.next_event(interruptible, self.now_ns, &mut self.actions);
        let VcpuEvent::Interrupt { vector } = event else { return };
        assert!(interruptible && before.requested.highest() == Some(vector));
        assert!(vector >> 4 > before.task_priority >> 4);
        assert!(before.in_service.iter().all(|other| vector >> 4 > other >> 4));
    }

    fn step(&mut self, step: &Step) -> usize {
        let now_ns = self.now_ns;
        let (nodes, actions) = (&self.nodes, &mut self.actions);
        let port = |node: bool, vcpu: u8| {
            let controllers = &nodes[usize::from(node)];
            controllers.vcpu(controllers.apic_ids()[usize::from(vcpu) % APICS]).expect("its own id")
        };
        match *step {
            Step::Register { node, vcpu, register, value } => {
                let msr = 0x800 | u32::from(register & 0x3F);
                let _ = port(node, vcpu).write_msr(msr, value.into(), now_ns, actions);
                usize::from(node)
            }
            Step::AnyMsr { node, vcpu, msr, value } => {
                let _ = port(node, vcpu).write_msr(msr, value, now_ns, actions);
                let _ = port(node, vcpu).read_msr(msr, now_ns, actions);
                usize::from(node)
            }
            Step::Command { node, vcpu, to, command } => {
                let value = u64::from(to & 0x1F) << 32 | u64::from(command & 0xC_DFFF);
                port(node, vcpu).write_msr(0x830, value, now_ns, actions).expect("no reserved bit");
                usize::from(node)
            }
            Step::Read { node, vcpu, msr } => {
                let _ = port(node, vcpu).read_msr(msr.into(), now_ns, actions);
                usize::from(node)
            }
            Step::Next { node, vcpu, interruptible } => {
                self.next(usize::from(node), usize::from(vcpu) % APICS, interruptible);
                usize::from(node)
            }
            Step::End { node, vcpu } => {
                port(node, vcpu).write_msr(0x80B, 0, now_ns, actions).expect("always allowed");
                usize::from(node)
            }
            Step::Cr8 { node, vcpu, cr8 } => {
                port(node, vcpu).set_cr8(cr8);
                usize::from(node)
            }
            Step::Input { node, vcpu, input } => {
                let input = match input & 7 {
                    0 => LocalInput::Thermal,
                    1 => LocalInput::Performance,
                    bits if bits & 1 == 0 => LocalInput::Lint0(bits & 2 != 0),
                    bits => LocalInput::Lint1(bits & 2 != 0),
                };
                port(node, vcpu).set_input(input, actions);
                usize::from(node)
            }
            _ => self.device_step(step),
        }
    }

    fn device_step(&mut self, step: &Step) -> usize {
        let (nodes, actions) = (&self.nodes, &mut self.actions);
        match *step {
            Step::Line { node, pin, asserted, until_end } => {
                let controllers = &nodes[usize::from(node)];
                let pin = u32::from(pin % 26);
                let driven = if until_end {
                    controllers.assert_until_end(pin, actions)
                } else {
                    controllers.set_line(pin, asserted, actions)
                };
                assert_eq!(driven.is_ok(), !node && pin < 24);
                usize::from(node)
            }
            Step::Entry { pin, low, to } => {
                let index = 0x10 + 2 * (pin % 24);
                for (index, value) in [(index + 1, u32::from(to) << 24), (index, low)] {
                    nodes[0].write_io_apic(0, &[index], actions);
                    nodes[0].write_io_apic(0x10, &value.to_le_bytes(), actions);
                }
                0
            }
            Step::Mmio { offset, mut data, len } => {
                let len = usize::from(len % 9);
                nodes[0].write_io_apic(offset.into(), &data[..len], actions);
                nodes[0].read_io_apic(offset.into(), &mut data[..len]);
                0
            }
            Step::Msi { node, address, data } => {
                let address = 0xFEE0_0000 | u64::from(address & 0xF_FFFF);
                let _ = nodes[usize::from(node)].signal_msi(address, data, actions);
                usize::from(node)
            }
            Step::Stranger { node, to, kind, vector } => {
                nodes[usize::from(node)].receive(message(to, kind, vector), actions);
                usize::from(node)
            }
            Step::Wait { ns } => {
                self.now_ns += u64::from(ns);
                0
            }
            Step::Restore { node } => {
                let node = usize::from(node);
                let saved = self.nodes[node].save(self.now_ns);
                let restored = Controllers::restore(config(node), &saved, self.now_ns);
                self.nodes[node] = restored.expect("a state that was reached");
                assert_eq!(self.nodes[node].save(self.now_ns), saved);
                node
            }
            _ => 0,
        }
    }
}

fn message(to: u32, kind: u8, vector: u8) -> NodeMessage {
    let trigger = if kind & 1 == 0 { Trigger::Edge } else { Trigger::Level };
    let delivery = match kind >> 1 & 7 {
        0 => Delivery::Fixed { vector, trigger },
        1 => Delivery::LowestPriority { vector, trigger },
        2 => Delivery::Smi,
        3 => Delivery::Nmi,
        4 => Delivery::Init,
        5 => Delivery::Startup { vector },
        6 => Delivery::External,
        _ => return NodeMessage::EndOfInterrupt { vector },
    };
    let destination = match kind >> 4 & 3 {
        0 => Destination::Physical(to & 0x1F),
        1 => Destination::Logical(to),
        2 => Destination::All,
        _ => Destination::AllBut(to & 0x1F),
    };
    NodeMessage::Interrupt(Message { destination, delivery })
}

fuzz_target!(|steps: Vec<Step>| {
    let nodes = [0, 1].map(|node| Controllers::new(config(node)).expect("it can be"));
    let mut world = World { nodes, now_ns: 0, actions: Vec::new() };
    for (node, controllers) in world.nodes.iter().enumerate() {
        for apic_id in controllers.apic_ids() {
            let startup =
                Message { destination: Destination::All, delivery: Delivery::Startup { vector: 1 } };
            controllers.receive(NodeMessage::Interrupt(startup), &mut Vec::new());
            let port = controllers.vcpu(*apic_id).expect("its own id");
            port.next_event(true, 0, &mut Vec::new());
            port.write_msr(0x80F, 0x1FF, 0, &mut Vec::new())
                .unwrap_or_else(|error| panic!("{node}: {error}"));
        }
    }
    for step in steps.iter().take(STEPS) {
        let node = world.step(step);
        world.deliver(node);
    }
});
