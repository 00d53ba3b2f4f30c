//! The guest-visible shape of a machine. It must be the same at both ends, for any hosts and files behind it.

use machine::interrupt::IrqchipKind;
use machine::x86::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use crate::description::{NetBackend, VmDescription};

/// Version of [`Shape`].
const VERSION: u32 = 1;

/// A device on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShapeDevice {
    /// Name of the device, for instance `disk0`.
    pub name: String,
    /// virtio device id.
    pub device_id: u16,
    /// Sizes of its queues.
    pub queues: Vec<u16>,
}

/// A machine as its guest sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Version of this type.
    pub version: u32,
    /// Name of the VM, for messages: names may differ.
    pub name: String,
    /// Version of the monitor, for messages.
    pub program: String,
    /// APIC ids of the vCPUs.
    pub vcpus: Vec<u32>,
    /// RAM: start, bytes, NUMA node.
    pub memory: Vec<(u64, u64, u32)>,
    /// PCI windows: start and bytes, below and above 4 GiB.
    pub windows: Vec<(u64, u64)>,
    /// Whether there is a serial port.
    pub console: bool,
    /// Devices, in the order of their slots.
    pub devices: Vec<ShapeDevice>,
    /// Where its interrupt controllers are. Older releases don't send it, and had them in the kernel.
    #[serde(default)]
    pub interrupts: IrqchipKind,
    /// CPUID leaves of the first vCPU.
    pub cpuid: Vec<kvm_cpuid_entry2>,
}

impl Shape {
    /// The version of this type that is written.
    pub const VERSION: u32 = VERSION;

    /// Why a guest of a machine of shape `offered` can't run in one of this shape; `None` where it can.
    pub fn incompatibility(&self, offered: &Self) -> Option<String> {
        if offered.version != VERSION {
            return Some(format!(
                "its description has version {}, known here is {VERSION}; use the same release",
                offered.version
            ));
        }
        if offered.vcpus != self.vcpus {
            return Some(format!(
                "it has {} vCPUs (APIC ids {:?}), here are {} ({:?}); give --cpus as at the source",
                offered.vcpus.len(),
                offered.vcpus,
                self.vcpus.len(),
                self.vcpus
            ));
        }
        if offered.memory != self.memory {
            return Some(format!(
                "its memory is {:x?} (start, bytes, node), here it is {:x?}; give memory and nodes as at the source",
                offered.memory, self.memory
            ));
        }
        if offered.windows != self.windows {
            return Some(format!(
                "its PCI windows are {:x?}, here they are {:x?}: the hosts' processors have different physical address sizes",
                offered.windows, self.windows
            ));
        }
        if offered.console != self.console {
            return Some("one has a serial port and the other has not".to_owned());
        }
        if offered.devices != self.devices {
            let list = |devices: &[ShapeDevice]| {
                let one = |device: &ShapeDevice| format!("{} ({} queues)", device.name, device.queues.len());
                devices.iter().map(one).collect::<Vec<_>>().join(", ")
            };
            return Some(format!(
                "its devices are {}, here are {}; describe them as at the source, in the same order",
                list(&offered.devices),
                list(&self.devices)
            ));
        }
        if offered.interrupts != self.interrupts {
            return Some(format!(
                "its interrupt controllers are in the {}, here they are in the {}; give --interrupts {0} as at the source",
                offered.interrupts, self.interrupts
            ));
        }
        missing_features(&self.cpuid, &offered.cpuid)
    }
}

/// One register of a CPUID leaf whose bits are features: leaf, subleaf, name, register.
type Features = (u32, u32, &'static str, fn(&kvm_cpuid_entry2) -> u32);

/// Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; KVM's own leaf (Linux, virt/kvm/x86/cpuid).
const FEATURES: [Features; 12] = [
    (1, 0, "ECX", |leaf| leaf.ecx),
    (1, 0, "EDX", |leaf| leaf.edx),
    (7, 0, "EBX", |leaf| leaf.ebx),
    (7, 0, "ECX", |leaf| leaf.ecx),
    (7, 0, "EDX", |leaf| leaf.edx),
    (7, 1, "EAX", |leaf| leaf.eax),
    (0xd, 0, "EAX", |leaf| leaf.eax),
    (0xd, 1, "EAX", |leaf| leaf.eax),
    (0x8000_0001, 0, "ECX", |leaf| leaf.ecx),
    (0x8000_0001, 0, "EDX", |leaf| leaf.edx),
    (0x8000_0008, 0, "EBX", |leaf| leaf.ebx),
    (0x4000_0001, 0, "EAX", |leaf| leaf.eax),
];

/// Features that the guest may use and this host's processor or KVM lacks.
fn missing_features(here: &[kvm_cpuid_entry2], offered: &[kvm_cpuid_entry2]) -> Option<String> {
    let find = |set: &[kvm_cpuid_entry2], function, index| {
        set.iter().find(|leaf| leaf.function == function && leaf.index == index).copied()
    };
    let vendor = |set: &[kvm_cpuid_entry2]| find(set, 0, 0).map(|leaf| (leaf.ebx, leaf.edx, leaf.ecx));
    if vendor(here) != vendor(offered) {
        return Some("the hosts' processors are of different makers".to_owned());
    }
    FEATURES.iter().find_map(|(function, index, register, value)| {
        let has = |set| find(set, *function, *index).map_or(0, |leaf| value(&leaf));
        let missing = has(offered) & !has(here);
        (missing != 0).then(|| {
            format!(
                "this host's processor lacks features that the guest was given: CPUID leaf {function:#x}.{index}, {register}, bits {missing:#x}"
            )
        })
    })
}

/// Why a VM can't migrate: devices whose state is outside this process, each with its reason.
pub fn migration_blockers(description: &VmDescription) -> Option<String> {
    let mut found = Vec::new();
    for device in &description.vfio_user {
        found.push(format!("{} (served by another process)", device.name));
    }
    for nic in &description.nics {
        found.push(format!("{} (the guest drives a NIC of this host)", nic.name));
    }
    if description.neighbour.is_some() {
        found.push("the neighbourhood (other VMs of this host map its memory)".to_owned());
    }
    for (index, net) in description.net.iter().enumerate() {
        if net.backend == NetBackend::User {
            found
                .push(format!("net{index} (its connections are in a passt process of this host; use a tap)"));
        }
    }
    (!found.is_empty()).then(|| found.join(", "))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::description;

    fn leaf(function: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ecx, ..Default::default() }
    }

    /// The shape of a small machine.
    pub fn shape() -> Shape {
        Shape {
            version: VERSION,
            name: "a".to_owned(),
            program: "0".to_owned(),
            vcpus: vec![0, 1],
            memory: vec![(0, 16 << 20, 0)],
            windows: vec![(0xc000_0000, 1 << 28)],
            console: true,
            devices: vec![ShapeDevice { name: "disk0".to_owned(), device_id: 2, queues: vec![256] }],
            interrupts: IrqchipKind::Kernel,
            cpuid: vec![leaf(0, 0x444d_4163), leaf(1, 0b111)],
        }
    }

    /// Each difference that a guest would notice is an obstacle with a sentence of its own. Names, releases and additional features of
    /// the destination are none.
    #[test]
    fn what_a_guest_would_notice_is_an_incompatibility() {
        let ours = shape();
        let same = Shape { name: "b".to_owned(), program: "9".to_owned(), ..shape() };
        assert_eq!(ours.incompatibility(&same), None);
        assert_eq!(
            ours.incompatibility(&Shape { cpuid: vec![leaf(0, 0x444d_4163), leaf(1, 0b101)], ..shape() }),
            None
        );
        let others = [
            (Shape { version: 2, ..shape() }, "version 2"),
            (Shape { vcpus: vec![0], ..shape() }, "1 vCPUs"),
            (Shape { memory: vec![(0, 32 << 20, 0)], ..shape() }, "memory"),
            (Shape { windows: vec![], ..shape() }, "PCI windows"),
            (Shape { console: false, ..shape() }, "serial port"),
            (Shape { devices: vec![], ..shape() }, "devices are , here are disk0 (1 queues)"),
            (Shape { interrupts: IrqchipKind::Monitor, ..shape() }, "give --interrupts monitor"),
            (Shape { cpuid: vec![leaf(0, 1)], ..shape() }, "different makers"),
            (
                Shape { cpuid: vec![leaf(0, 0x444d_4163), leaf(1, 0b1111)], ..shape() },
                "leaf 0x1.0, ECX, bits 0x8",
            ),
        ];
        for (other, expected) in others {
            let incompatibility = ours.incompatibility(&other).unwrap();
            assert!(incompatibility.contains(expected), "{incompatibility}");
        }
    }

    #[test]
    fn devices_that_block_migration_are_named() {
        let of = |text: &str| {
            let (written, _) =
                description::parse(&format!("kernel = \"k\"\n{text}"), "/x/a.toml".as_ref()).unwrap();
            migration_blockers(&description::validate(&written).unwrap())
        };
        assert_eq!(of("[[net]]\ntap = \"t\"\n[[disks]]\npath = \"d\"\n[[rdma]]\nsegment = \"s\""), None);
        for (text, name) in [
            ("[[vfio-user]]\nsocket = \"s\"", "served by another process"),
            ("[[net]]\nuser = true", "net0"),
            ("[neighbour]\ngroup = \"g\"\npermit = [\"b@7\"]", "neighbourhood"),
        ] {
            assert!(of(text).unwrap().contains(name), "{:?}", of(text));
        }
    }
}
