//! vfio-user for PCI devices: a device in another process, over a Unix socket.
//!
//! Source: QEMU's `docs/interop/vfio-user.rst`, version 0.1 of the protocol. Each side distrusts the other. It limits
//! each length before it allocates memory for it. An unknown or malformed command gets an error reply, and the
//! connection stays open. A request to a server that hangs times out.
//!
//! ```text
//! client                                   server
//!   VERSION 0.1, capabilities (JSON)  ──▶    SO_PEERCRED, authorize
//!   GET_INFO, GET_REGION_INFO,        ──▶    regions, descriptors of mappable areas
//!   GET_REGION_IO_FDS, GET_IRQ_INFO          ioeventfds
//!   DMA_MAP with memfds               ──▶    maps guest RAM
//!   SET_IRQS with eventfds            ──▶    signals them from now on
//!   REGION_READ, REGION_WRITE, RESET  ◀─▶    the device
//!   (closes)                          ──▶    releases memory and eventfds
//! ```
//!
//! Not supported, with error ENOTSUP: access to client memory by message (DMA_READ, DMA_WRITE), REGION_WRITE_MULTI, and
//! eventfds for mask and unmask.
//!
//! | module | holds |
//! |---|---|
//! | [`device`] | the interface of a server's device: [`device::Device`] |
//! | [`server`] | serves a device on a socket |
//! | [`client`] | uses a device from many threads |
//! | [`doorbell_mode`] | Causeway's extension: mapped or trapped doorbells, changed while the guest runs |
//! | [`migration`] | a device's state and its dirty pages, for a client that migrates the guest |

pub mod client;
pub mod device;
pub mod doorbell_mode;
pub mod migration;
mod region_info;
pub mod server;
mod session;
mod socket;
mod version;
mod wire;

pub use region_info::{RegionDescription, RegionError};
