//! Interrupt controllers without I/O: the x2APICs, the IOAPIC and the message-signalled interrupts of a VM whose hypervisor doesn't emulate them in
//! the kernel, as of one that spans hosts.
//!
//! Register accesses, lines, messages and the time come in; [`Action`]s go out, and each vCPU asks what it has to do next.
//!
//! ```text
//! vCPU n:  RDMSR, WRMSR, CR8 ─▶ VcpuPort(n) ──IPI──▶ bus ──▶ local APICs of this node ──▶ Action::Kick ─▶ VcpuPort::next_event
//!                                  │  EOI of level       ▲ └▶ Action::Send ─▶ other nodes ─▶ Controllers::receive
//!                                  ▼                     │
//! devices: lines, MMIO ─────────▶ IOAPIC ────────────────┤
//!          MSI ──────────────────────────────────────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`controllers`] | a node's controllers and the bus between them |
//! | [`topology`] | which APICs exist, and on which nodes |
//! | [`message`] | what travels on the bus, and how ICR, MSIs and redirection entries are decoded |
//! | [`registers`] | numbers and bits |
//! | [`saved`] | saved state |
//! | [`vectors`] | a set of vectors |
//!
//! # Which thread calls what
//! Everything takes `&self`; each local APIC has a lock of its own, and so has the IOAPIC. No call holds locks of two local APICs.
//!
//! | thread | calls | does with actions |
//! |---|---|---|
//! | of vCPU n | [`VcpuPort`] n: before each entry [`VcpuPort::set_cr8`], [`VcpuPort::next_event`], [`VcpuPort::cr8`]; at exits the MSRs, and MMIO of the IOAPIC | kicks others; sets its own timer |
//! | of devices | [`Controllers::set_line`], [`Controllers::assert_until_end`], [`Controllers::signal_msi`] | kicks |
//! | of links to other nodes | [`Controllers::receive`] | kicks |
//! | of timers | nothing: it kicks vCPU n when n's timer is due | |
//! | of control, while all others rest | [`Controllers::save`], [`Controllers::load`], [`Controllers::reset`] | |
//!
//! A local APIC's registers, timer and interrupts in service change on its vCPU's thread only; others set bits of IRR and latch NMI, INIT and
//! start-up IPIs. They are latched before [`Action::Kick`] goes out, so no wake-up is lost where the kick makes the vCPU ask once more after it came.
//! [`Action::SetTimer`] comes only from calls of the vCPU's thread, so settings can't overtake one another.
//!
//! # A VM that spans nodes
//! The APIC ids of all nodes are known to each ([`Config`]), and logical ids are derived from ids, so a node resolves destinations without asking. An
//! IPI or MSI to APICs elsewhere is one [`Action::Send`] per node, and the receiver gives it to its own APICs. Lowest priority is arbitrated by the
//! sender. The IOAPIC is on one node; ends of level-triggered interrupts are sent there. Nothing else is shared.
//!
//! # What guests get
//! - x2APIC mode only, and locked, as on processors that report LEGACY_XAPIC_DISABLED: a write to IA32_APIC_BASE that changes anything is answered
//!   with #GP. There are no registers in memory. The shell sets [`registers::ARCH_CAPABILITIES_XAPIC_DISABLE_STATUS`] in IA32_ARCH_CAPABILITIES, and
//!   x2APIC in CPUID.
//! - Reserved bits and read-only registers answer with #GP. Delivery status and remote IRR in LVT entries may be written, without effect.
//! - No suppression of EOI broadcasts (SVR bit 12 is reserved): a guest that suppresses them ends each level-triggered interrupt by one more exit, and
//!   on nodes without the IOAPIC by one more message. The IOAPIC has its EOI register all the same.
//! - No TSC-deadline mode: KVM handles its MSR before user space sees it. The timer is one-shot or periodic.
//! - SMIs are accepted and ignored. Lowest priority is chosen by vector.
//! - Vectors below 16 aren't delivered: ESR says so, and the error entry of the LVT interrupts.
//!
//! Facts: Intel SDM volume 3, "Advanced Programmable Interrupt Controller"; 82093AA data sheet.

pub mod controllers;
mod io_apic;
mod local;
pub mod message;
pub mod registers;
pub mod saved;
pub mod topology;
pub mod vectors;

pub use controllers::{Action, Controllers, LineError, LocalInput, VcpuPort};
pub use io_apic::IO_APIC_PINS;
pub use local::{GeneralProtection, MIN_PERIODIC_INTERRUPT_NS, VcpuEvent};
pub use message::{Message, MsiError, NodeMessage};
pub use saved::{RestoreError, SavedControllers};
pub use topology::{Config, ConfigError, IoApicLocation, NodeId, RemoteApic};
