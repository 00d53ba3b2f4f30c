//! Builds the machine map for firmware from the description, and vCPU registers from the loaded kernel.

use firmware::layout;
use firmware::map::{AddressRange, Cpu, MachineMap, PciWindows, PowerPorts, RamRange, default_pci_routes};
use firmware::registers::{BootRegisters, Segment, TableRegister};
use machine::interrupt::IrqchipKind;
use machine::memory::RamLayout;
use machine::vcpu::StartRegisters;
use machine::x86::{CpuId, CpuTopology, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use platform_devices::power;

use crate::description::VmDescription;

/// Describes the machine to its firmware.
pub fn machine_map(
    description: &VmDescription,
    ram: &RamLayout,
    topology: &CpuTopology,
    physical_bits: u8,
    console: bool,
) -> MachineMap {
    let ram: Vec<RamRange> = ram
        .ranges()
        .iter()
        .map(|range| RamRange {
            range: AddressRange { start: range.start, len: range.size },
            node: u32::try_from(range.node).unwrap_or(u32::MAX),
        })
        .collect();
    let cpus = (0..topology.vcpus())
        .map(|index| Cpu {
            // CpuTopology allows no id above 254.
            apic_id: u8::try_from(topology.apic_id(index)).unwrap_or(u8::MAX),
            node: node_of(description, index),
        })
        .collect();
    let node_distances = if description.numa.len() > 1 {
        description.numa.iter().map(|node| node.distances.clone()).collect()
    } else {
        Vec::new()
    };
    let port = |offset: u16| layout::POWER_REGISTERS + offset;
    MachineMap {
        pci: PciWindows {
            memory32: layout::PCI_MEMORY32,
            memory64: layout::pci_memory64(&ram, physical_bits),
        },
        ram,
        cpus,
        node_distances,
        pci_routes: default_pci_routes(),
        power: PowerPorts {
            reset: port(power::RESET),
            reset_value: power::RESET_VALUE,
            sleep_control: port(power::SLEEP_CONTROL),
            sleep_status: port(power::SLEEP_STATUS),
            events: port(power::EVENTS),
        },
        console,
        x2apic: description.interrupts == IrqchipKind::Monitor,
    }
}

/// Ends the 64-bit PCI window at `address`, where another range begins.
pub fn end_pci_below(map: &mut MachineMap, address: u64) {
    map.pci.memory64 = map.pci.memory64.and_then(|window| {
        let len = window.len.min(address.checked_sub(window.start)?);
        (len > 0).then_some(AddressRange { start: window.start, len })
    });
}

/// The NUMA node of a vCPU; validation put every vCPU in exactly one.
fn node_of(description: &VmDescription, vcpu: u32) -> u32 {
    let Ok(vcpu) = u16::try_from(vcpu) else { return 0 };
    let found = description.numa.iter().position(|node| node.cpus.contains(vcpu));
    found.and_then(|node| u32::try_from(node).ok()).unwrap_or(0)
}

/// Physical address bits that the guest's CPUID reports (leaf 0x8000_0008), 36 where it has no such leaf.
pub fn physical_bits(cpuid: &CpuId) -> u8 {
    cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == 0x8000_0008)
        .and_then(|entry| u8::try_from(entry.eax & 0xff).ok())
        .unwrap_or(36)
}

/// The boot CPU's registers in KVM's format.
pub fn start_registers(boot: &BootRegisters) -> StartRegisters {
    let data = segment(&boot.data);
    StartRegisters {
        regs: kvm_regs {
            rip: boot.rip,
            rsp: boot.rsp,
            rbx: boot.rbx,
            rsi: boot.rsi,
            rflags: boot.rflags,
            ..Default::default()
        },
        sregs: kvm_sregs {
            cs: segment(&boot.code),
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            tr: segment(&boot.task),
            gdt: table(boot.gdt),
            idt: table(boot.idt),
            cr0: boot.cr0,
            cr3: boot.cr3,
            cr4: boot.cr4,
            efer: boot.efer,
            ..Default::default()
        },
        fpu: None,
        msrs: Vec::new(),
    }
}

fn segment(segment: &Segment) -> kvm_segment {
    kvm_segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
        type_: segment.kind,
        present: u8::from(segment.present),
        dpl: segment.privilege,
        db: u8::from(segment.default_32),
        s: u8::from(segment.code_or_data),
        l: u8::from(segment.long),
        g: u8::from(segment.granularity),
        avl: 0,
        unusable: u8::from(!segment.present),
        padding: 0,
    }
}

fn table(register: TableRegister) -> kvm_dtable {
    kvm_dtable { base: register.base, limit: register.limit, padding: [0; 3] }
}
