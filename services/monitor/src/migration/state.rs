//! State of a paused machine, without its RAM.

use machine::state::{SavedClock, SavedInterruptController, SavedVcpu};
use pci::function::SavedFunction;
use pci::root::SavedRoot;
use platform_devices::power::SavedPower;
use platform_devices::serial::SavedSerial;
use serde::{Deserialize, Serialize};

/// Version of a [`SavedMachine`] whose guest has a pending request. Its parts have versions of their own.
const MACHINE_STATE_VERSION: u32 = 2;
/// Version of one whose guest has none: older releases restore it, too.
const PLAIN_MACHINE_STATE_VERSION: u32 = 1;

/// A guest's request to its machine as a whole. A power-off has priority over a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestRequest {
    /// Restart the machine.
    Reset,
    /// Power the machine off.
    PowerOff,
}

/// A PCI function and its place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedPlace {
    /// Slot times 8 plus function.
    pub devfn: u8,
    /// Name of its device.
    pub name: String,
    /// Its state.
    pub function: SavedFunction,
}

/// State of the devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedDevices {
    /// The PCI bus.
    pub root: SavedRoot,
    /// The functions on it, without the host bridge.
    pub functions: Vec<SavedPlace>,
    /// The serial port, where there is one.
    pub serial: Option<SavedSerial>,
    /// Power, reset and sleep registers.
    pub power: SavedPower,
}

/// A paused machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedMachine {
    /// Version of the layout: [`SavedMachine::version_for`] of the writer.
    pub version: u32,
    /// Whether it ran before it was paused for the save.
    pub running: bool,
    /// vCPUs in order of creation.
    pub vcpus: Vec<SavedVcpu>,
    /// PICs and IOAPIC in the kernel, or local APICs and IOAPIC in the monitor.
    pub controller: SavedInterruptController,
    /// KVM's paravirtual clock.
    pub clock: SavedClock,
    /// State of the PCI functions, the serial port and the power registers.
    pub devices: SavedDevices,
    /// The guest's pending reset or power-off; the monitor that runs the guest executes it. From version 2 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<GuestRequest>,
}

impl SavedMachine {
    /// The version for a machine with this pending request.
    pub fn version_for(asked: Option<GuestRequest>) -> u32 {
        if asked.is_some() { MACHINE_STATE_VERSION } else { PLAIN_MACHINE_STATE_VERSION }
    }

    /// Encodes as CBOR with field names.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        ciborium::into_writer(self, &mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// Decodes a state. The code that uses its parts checks their content.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let state: Self = ciborium::from_reader(bytes)
            .map_err(|error| format!("The VM's saved state is damaged: {error}"))?;
        if !(PLAIN_MACHINE_STATE_VERSION..=MACHINE_STATE_VERSION).contains(&state.version) {
            return Err(format!(
                "The VM's saved state has version {}; this program restores versions {PLAIN_MACHINE_STATE_VERSION} to {MACHINE_STATE_VERSION}",
                state.version
            ));
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::state::{SavedKernelIrqchip, SavedMsr};
    use machine::x86;
    use pci::config::{ConfigSpace, Identity};
    use proptest::prelude::*;

    /// A machine with data in every part.
    fn saved() -> SavedMachine {
        let vcpu = |id| SavedVcpu {
            version: 1,
            id,
            cpuid: vec![x86::kvm_cpuid_entry2 { function: 1, eax: 7, ..Default::default() }],
            regs: x86::kvm_regs { rip: 0xffff_8000_1234_5678, ..Default::default() },
            sregs: x86::kvm_sregs { cr3: 0x1000, ..Default::default() },
            xsave: vec![3; 4096],
            xcrs: Some(x86::kvm_xcrs::default()),
            debugregs: x86::kvm_debugregs::default(),
            lapic: Some(x86::kvm_lapic_state::default()),
            mp_state: x86::kvm_mp_state { mp_state: 3 },
            events: x86::kvm_vcpu_events::default(),
            msrs: vec![SavedMsr { index: 0x10, value: u64::MAX }],
            tsc_khz: Some(2_000_000),
        };
        let chip = |chip_id| x86::kvm_irqchip { chip_id, ..Default::default() };
        let serial = SavedSerial {
            version: 1,
            divisor: 1,
            interrupt_enable: 5,
            interrupt_identification: 1,
            line_control: 3,
            line_status: 0x60,
            modem_control: 8,
            modem_status: 0xb0,
            scratch: 0,
            received: b"typed".to_vec(),
        };
        SavedMachine {
            version: PLAIN_MACHINE_STATE_VERSION,
            running: true,
            vcpus: vec![vcpu(0), vcpu(1)],
            controller: SavedInterruptController::KernelIrqchip(Box::new(SavedKernelIrqchip {
                version: 1,
                pic_master: chip(0),
                pic_slave: chip(1),
                ioapic: chip(2),
                pit: None,
            })),
            clock: SavedClock { version: 1, clock_ns: 5, realtime_ns: Some(6), host_tsc: None },
            devices: SavedDevices {
                root: SavedRoot {
                    version: 1,
                    config_address: 0x8000_0800,
                    host_bridge: ConfigSpace::builder(Identity::default()).build().save(),
                },
                functions: vec![SavedPlace {
                    devfn: 8,
                    name: "disk0".to_owned(),
                    function: SavedFunction {
                        kind: "virtio-block".to_owned(),
                        version: 1,
                        state: vec![1, 2, 3],
                    },
                }],
                serial: Some(serial),
                power: SavedPower { version: 1, pending_events: 1, sleep_type: 0 },
            },
            asked: None,
        }
    }

    /// A decoded state is encoded to the same bytes; no part is lost.
    #[test]
    fn a_machine_is_read_as_it_was_written() {
        let bytes = saved().encode().unwrap();
        let back = SavedMachine::decode(&bytes).unwrap();
        assert_eq!(back.devices, saved().devices);
        assert_eq!(back.clock, saved().clock);
        assert_eq!(
            (back.vcpus.len(), back.vcpus[1].id, back.vcpus[1].regs.rip),
            (2, 1, 0xffff_8000_1234_5678)
        );
        assert_eq!(back.encode().unwrap(), bytes);
    }

    /// An incomplete state, another version and other data are refused with a sentence.
    #[test]
    fn foreign_and_cut_state_is_refused() {
        let bytes = saved().encode().unwrap();
        for cut in (0..bytes.len()).step_by(7) {
            let error = SavedMachine::decode(&bytes[..cut]).unwrap_err();
            assert!(error.contains("damaged"), "{error}");
        }
        for version in [0, 3] {
            let other = SavedMachine { version, ..saved() }.encode().unwrap();
            let error = SavedMachine::decode(&other).unwrap_err();
            assert!(error.contains(&format!("has version {version}")), "{error}");
        }
    }

    /// The state includes the guest's request. A state without one is the same as older releases write and read.
    #[test]
    fn what_a_guest_has_asked_for_is_part_of_the_state() {
        for asked in [GuestRequest::Reset, GuestRequest::PowerOff].map(Some) {
            let version = SavedMachine::version_for(asked);
            let bytes = SavedMachine { version, asked, ..saved() }.encode().unwrap();
            let back = SavedMachine::decode(&bytes).unwrap();
            assert_eq!((back.version, back.asked), (2, asked));
        }
        let bytes = saved().encode().unwrap();
        assert_eq!((SavedMachine::version_for(None), SavedMachine::decode(&bytes).unwrap().asked), (1, None));
        assert!(!bytes.windows(5).any(|word| word == b"asked"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Changed bytes give a state or an error, never a panic.
        #[test]
        fn damaged_state_is_an_answer(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut bytes = saved().encode().unwrap();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Err(error) = SavedMachine::decode(&bytes) {
                prop_assert!(!error.contains('\n'), "{:?}", error);
            }
        }
    }
}
