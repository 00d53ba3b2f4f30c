//! Saved state, in types separate from those at run time.
//!
//! Version rule: any change of a field is another [`VERSION`], and a state of another version is refused. A state may be hostile: restoring
//! checks every value, so that the controllers never get a state that they can't reach by themselves.

use serde::{Deserialize, Serialize};

use crate::topology::ConfigError;
use crate::vectors::VectorSet;

/// Version of these types.
pub const VERSION: u32 = 1;

/// Controllers of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedControllers {
    /// Version of this structure.
    pub version: u32,
    /// Local APICs, ascending by id.
    pub local: Vec<SavedLocalApic>,
    /// The IOAPIC, if it is on this node.
    pub io_apic: Option<SavedIoApic>,
}

/// A local APIC. The value of a register is what a read of its MSR returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedLocalApic {
    /// Its id.
    pub id: u32,
    /// Task priority register (TPR).
    pub task_priority: u8,
    /// Spurious-interrupt vector register (SVR).
    pub spurious: u32,
    /// Interrupt command register (ICR).
    pub command: u64,
    /// Interrupt request register (IRR): vectors that the vCPU hasn't accepted.
    pub requested: VectorSet,
    /// In-service register (ISR): accepted vectors without their EOI.
    pub in_service: VectorSet,
    /// Trigger mode register (TMR): vectors of level-triggered interrupts.
    pub trigger: VectorSet,
    /// Timer, thermal sensor, performance counters, LINT0, LINT1, error.
    pub lvt: [u32; 6],
    /// Error status register (ESR), as software last latched it.
    pub error_status: u32,
    /// Errors found since ESR was last written.
    pub errors_found: u32,
    /// Initial count.
    pub initial_count: u32,
    /// Divide configuration.
    pub divide_configuration: u32,
    /// Nanoseconds until the count reaches 0; `None` while it is 0.
    pub timer_remaining_ns: Option<u64>,
    /// Levels of LINT0 and LINT1.
    pub lint_asserted: [bool; 2],
    /// INIT was received, and the vCPU hasn't been reset.
    pub init_latched: bool,
    /// Vector of a start-up IPI that the vCPU hasn't executed.
    pub startup_latched: Option<u8>,
    /// An NMI was received, and isn't injected yet.
    pub nmi_latched: bool,
    /// An ExtINT was received, and isn't injected yet.
    pub external_latched: bool,
    /// The vCPU waits for a start-up IPI.
    pub waits_for_startup: bool,
}

/// An IOAPIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedIoApic {
    /// The 4 bits of the identification register.
    pub id: u8,
    /// Index register.
    pub select: u8,
    /// Redirection entries.
    pub entries: [u64; 24],
    /// Lines that devices assert, a bit per pin.
    pub asserted: u32,
    /// Lines that are asserted until the end of their interrupt is reported, a bit per pin.
    pub until_end: u32,
}

/// Saved state can't be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The state has another version than [`VERSION`].
    #[error(
        "Saved interrupt controllers have version {found}, but this program reads version {VERSION}: restore them with the program that saved them"
    )]
    Version {
        /// Version found.
        found: u32,
    },
    /// The saved APIC ids aren't this node's, so the state belongs to another VM or node.
    #[error(
        "Saved interrupt controllers are for APIC ids {found:x?}, but this node has {expected:x?}: use the VM's own description"
    )]
    ApicIds {
        /// Ids found.
        found: Vec<u32>,
        /// Ids of this node.
        expected: Vec<u32>,
    },
    /// Only one of state and node has the IOAPIC.
    #[error(
        "Saved interrupt controllers and this node differ in having the IOAPIC: use the VM's own description"
    )]
    IoApicLocation,
    /// A value that no local APIC can have.
    #[error(
        "Saved local APIC {apic_id:#x} has {what} {value:#x}, which can't be: the saved state is damaged"
    )]
    LocalApic {
        /// Id of the APIC.
        apic_id: u32,
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A value that no IOAPIC can have.
    #[error("Saved IOAPIC has {what} {value:#x}, which can't be: the saved state is damaged")]
    IoApic {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The [`crate::Config`] is invalid.
    #[error("Interrupt controllers can't be restored as described")]
    Config(#[source] ConfigError),
}
