//! Interrupt controllers without I/O: x2APICs, IOAPIC and message-signalled interrupts, for a VM whose controllers the kernel doesn't
//! emulate, such as a VM that spans hosts.
//!
//! Inputs are register accesses, lines, messages and the time. Outputs are [`Action`]s, and the [`VcpuEvent`]s that each vCPU requests.
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
//! Only its vCPU's thread changes a local APIC's registers, timer and interrupts in service. Other threads set bits of IRR, and latch NMI,
//! INIT and start-up IPIs. They do so before they append [`Action::Kick`]. So no wake-up is lost if a kicked vCPU calls
//! [`VcpuPort::next_event`] once more. Only calls of the vCPU's thread append [`Action::SetTimer`], so settings can't overtake one another.
//!
//! # A VM that spans nodes
//! Each node knows the APIC ids of all nodes ([`Config`]), and logical ids are derived from ids. So a node resolves destinations without
//! messages. An IPI or MSI to APICs of other nodes is one [`Action::Send`] per node, and the receiver delivers it to its own APICs. The
//! sender arbitrates lowest priority. The IOAPIC is on one node, and EOIs of level-triggered interrupts are sent there. Nodes share
//! nothing else.
//!
//! # What guests get
//! - x2APIC mode only, and locked, as on processors that report LEGACY_XAPIC_DISABLED: a write that changes IA32_APIC_BASE raises #GP.
//!   There are no registers in memory. The shell sets [`registers::ARCH_CAPABILITIES_XAPIC_DISABLE_STATUS`] in IA32_ARCH_CAPABILITIES, and
//!   x2APIC in CPUID.
//! - Writes of reserved bits or read-only registers raise #GP. Writes of delivery status and remote IRR in LVT entries have no effect.
//! - No suppression of EOI broadcasts (SVR bit 12 is reserved). It would cost a guest one more exit per level-triggered interrupt, and on
//!   nodes without the IOAPIC one more message. The IOAPIC has its EOI register all the same.
//! - No TSC-deadline mode, since KVM handles its MSR before user space. The timer is one-shot or periodic.
//! - SMIs are accepted and ignored. The vector determines the destination of a lowest-priority interrupt.
//! - Vectors below 16 aren't delivered. ESR records them, and the error entry of the LVT interrupts.
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
