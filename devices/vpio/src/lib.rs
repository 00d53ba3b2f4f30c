//! Guarded passthrough: a physical device, the guests' own drivers, and a model between them.
//!
//! A [`Monitor`] holds one physical device and any number of guests. Each guest has a [`Model`](device_models::Model) of the device: what
//! it believes the device to hold. A request that the model lets pass goes to the device; one that it refuses is treated by the guest's
//! [`FailurePolicy`]. One guest at a time is *resident*, the device holds its context; the others wait, and the device goes from one to
//! the next when it is reusable.
//!
//! ```text
//! guest's access ──▶ Monitor::access ──▶ model ──▶ PhysicalDevice          Answer: value, wait, machine check, stopped
//! device's line  ──▶ Monitor::interrupt ─▶ virtual status ──▶ Monitor::line  level of the guest's own line
//! time           ──▶ Scheduler::next ──▶ Monitor::switch
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`monitor`] | the monitor |
//! | [`guest`] | what a guest is given: address, permissions, policy, memory |
//! | [`dma`] | windows: checked against the guest's memory, mapped or translated |
//! | [`switch`] | hand-off of the device |
//! | [`fast_forward`] | ring pointers that can't be written |
//! | [`exchange`] | another device of the same kind in the place of one |
//! | [`open`] | the device without its model, for a guest that is trusted with it |
//! | [`pad`] | scratch memory where the device is an emulation |
//! | [`sharing`] | a card whose receiver feeds all guests, while they take turns with the rest |
//! | [`shown`] | registers that a guest reads without anybody seeing it |
//! | [`scheduler`] | who holds the device next |
//! | [`violation`] | traces of refused requests, and their replay |
//! | [`plan`] | which pages and ports KVM may handle without an exit to user space |
//! | [`counters`] | what happened |
//! | [`remote`] | one that a QEMU process plays, as the physical device |
//! | [`vfio`] | a card of this host that is bound to vfio-pci, as the physical device |
//!
//! Sans-KVM and without threads or clocks: whoever owns a monitor calls it from one thread at a time, and gives it the time. Facts and
//! aims: specs nics and vpio. The idea: *Investigating Virtual Passthrough I/O on Commodity Devices* (2009).

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
