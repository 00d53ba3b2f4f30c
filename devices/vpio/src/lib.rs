//! Guarded passthrough: a physical device, the guests' own drivers, and a model between them.
//!
//! A [`Monitor`] owns one physical device and serves any number of guests. Each guest has a
//! [`Model`](device_models::Model): the state of the device as this guest's driver left it. The monitor passes a
//! permitted request to the device. It handles a refused request by the guest's [`FailurePolicy`]. One guest at a time
//! is *resident*: the device holds its context. A hand-off moves the device to the next guest at a quiescent point.
//!
//! ```text
//! guest's access ──▶ Monitor::access ──▶ model ──▶ PhysicalDevice          Answer: value, wait, machine check, stopped
//! device's line  ──▶ Monitor::interrupt ─▶ virtual status ──▶ Monitor::line  level of the guest's own line
//! time           ──▶ Scheduler::next ──▶ Monitor::switch
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`monitor`] | register accesses, interrupts and policies |
//! | [`guest`] | a guest's configuration: address, permissions, policy, memory |
//! | [`dma`] | DMA windows: checked against the guest's memory, mapped or translated |
//! | [`switch`] | hand-off of the device |
//! | [`fast_forward`] | ring pointers that can't be written |
//! | [`exchange`] | replacement of the device by another one of the same kind |
//! | [`open`] | passthrough: a trusted guest uses the device without its model |
//! | [`pad`] | scratch memory for an emulated device |
//! | [`sharing`] | a card whose receiver serves all guests, while a hand-off moves the rest |
//! | [`shown`] | shadow register pages, which a guest reads without an exit |
//! | [`scheduler`] | which guest is resident next |
//! | [`violation`] | traces of refused requests, and their replay |
//! | [`plan`] | which pages and ports KVM may handle without an exit to user space |
//! | [`counters`] | event counters |
//! | [`remote`] | a physical device that a QEMU process emulates |
//! | [`vfio`] | a physical device of this host that is bound to vfio-pci |
//!
//! The crate uses neither KVM nor threads nor clocks. The owner of a monitor calls it from one thread at a time and
//! passes the time in. `docs/design/vpio.md` has the design. The idea: *Investigating Virtual Passthrough I/O on
//! Commodity Devices* (2009).

mod card_memory;
pub mod counters;
pub mod dma;
pub mod exchange;
pub mod fast_forward;
pub mod guest;
pub mod monitor;
pub mod open;
pub mod pad;
pub mod plan;
pub mod remote;
pub mod scheduler;
mod scratch;
pub mod sharing;
pub mod shown;
pub mod switch;
pub mod vfio;
pub mod violation;

pub use counters::Counters;
pub use dma::{MemoryMap, Slot, Slots};
pub use guest::{FailurePolicy, GuestConfig, GuestId};
pub use monitor::{Answer, Monitor, MonitorError};
pub use open::Passed;
pub use scheduler::Scheduler;
pub use switch::Switched;
pub use violation::Violation;
