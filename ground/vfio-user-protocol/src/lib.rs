//! vfio-user for PCI devices: a device in another process, over a Unix socket.
//!
//! Facts: QEMU's `docs/interop/vfio-user.rst`, version 0.1 of the protocol. Both sides distrust each other: each
//! length is bounded before memory is taken for it, an unknown or malformed command gets an error reply and the
//! connection goes on, and a request to a server that hangs ends with an error after a time limit.
//!
//! ```text
//! client                                   server
//!   VERSION 0.1, capabilities (JSON)  ──▶    SO_PEERCRED, authorize
//!   GET_INFO, GET_REGION_INFO,        ──▶    regions, descriptors of mappable areas
//!   GET_REGION_IO_FDS, GET_IRQ_INFO          ioeventfds
//!   DMA_MAP with memfds               ──▶    maps guest RAM
//!   SET_IRQS with eventfds            ──▶    signals them from now on
//!   REGION_READ, REGION_WRITE, RESET  ◀─▶    the device
//!   (closes)                          ──▶    lets go of memory and eventfds
//! ```
//!
//! What isn't offered, and answered ENOTSUP: access to client memory by message (DMA_READ, DMA_WRITE),
//! REGION_WRITE_MULTI, and eventfds for mask and unmask.
//!
//! | module | holds |
//! |---|---|
//! | [`device`] | what a server's device implements: [`device::Device`] |
//! | [`server`] | offering a device on a socket |
//! | [`client`] | using a device from many threads |
//! | [`doorbell_mode`] | our extension: mapped or trapped doorbells, changed while the guest runs |
//! | [`migration`] | a device's state, and the pages that it writes, for a client that moves the guest |
//! | [`testing`] | a device for tests |

pub mod client;
pub mod device;
pub mod doorbell_mode;
pub mod migration;
mod region_info;
pub mod server;
mod session;
mod socket;
pub mod testing;
mod version;
mod wire;

pub use region_info::{RegionDescription, RegionError};
