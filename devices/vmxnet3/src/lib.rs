//! The vmxnet3 network device for the unmodified Linux driver, and Ethernet segments that connect several.
//!
//! | module | holds |
//! |---|---|
//! | [`device`] | [`Vmxnet3`]: registers, activation, queues; no threads, no PCI configuration space |
//! | [`pci`] | identity, BARs and vectors for the PCI shell around it |
//! | [`mod@registers`] | register offsets, commands, limits |
//! | [`interrupts`] | the trait [`Interrupts`] |
//! | [`frame`] | frames and offloads ([`Offload`]) |
//! | [`segment`] | [`Segment`]: the switch between devices and other ports |
//! | [`runner`] | [`SegmentThread`]: a thread that owns a segment; [`NicHandle`]: a device in it |
//! | [`tap`] | [`tap::Tap`]: a port for a host's tap interface |
//! | [`saved`] | [`SavedVmxnet3`] |
//! | [`counters`] | [`PortCounters`], under Linux's names |
//! | [`mac`] | [`MacAddress`] |
//!
//! A model of the Linux driver, for tests, is in the crate `vmxnet3-testbed`.
//!
//! Sources: docs/design/specs/vmxnet3.md; Linux `drivers/net/vmxnet3`, kernels 6.1 (which selects revision 7) and 6.12.

mod checksum;
pub mod counters;
mod descriptors;
pub mod device;
mod filter;
#[cfg(test)]
mod fixtures;
pub mod frame;
pub mod interrupts;
pub mod mac;
pub mod pci;
mod receive;
pub mod registers;
pub mod runner;
pub mod saved;
pub mod segment;
mod segmentation;
mod shared_area;
mod switch;
pub mod tap;
mod transmit;

pub use counters::PortCounters;
pub use device::{Vmxnet3, Vmxnet3Config};
pub use frame::Offload;
pub use interrupts::Interrupts;
pub use mac::MacAddress;
pub use runner::{NicHandle, SegmentThread};
pub use saved::SavedVmxnet3;
pub use segment::{Companion, FramePort, PortId, PortRules, Segment, SegmentConfig};
pub use shared_area::ActivationError;
