//! The host's RDMA device, opened for the links of one node.

#![allow(unsafe_code)] // Calls a C library.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use ibverbs::abi::Context;
use ibverbs::{Absent, Found, PortInfo, Verbs};

/// The device. All threads of a node may use it; see [`Device::open`] for their credentials.
pub(in crate::dsm) struct Device {
    pub(super) library: Arc<Verbs>,
    pub(super) context: *mut Context,
    pub(super) info: PortInfo,
}

// SAFETY: any thread may call the library with a context, and `drop` closes it once, when no other reference exists.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Why a node's links can't use RDMA.
#[derive(Debug, thiserror::Error)]
pub enum NoDevice {
    /// The address can't be resolved.
    #[error("rdma:{place} is no address that can be looked up: {why}")]
    Address {
        /// The address, `HOST:PORT`.
        place: String,
        /// The cause.
        why: String,
    },
    /// The host has no device with that address.
    #[error(transparent)]
    Absent(#[from] Absent),
}

/// Resolves `HOST:PORT` to its first address. Blocks for a name.
///
/// # Errors
/// [`NoDevice::Address`].
pub(in crate::dsm) fn address_of(place: &str) -> Result<SocketAddr, NoDevice> {
    let wrong = |why: String| NoDevice::Address { place: place.to_owned(), why };
    let mut found = place.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name has no address".to_owned()))
}

impl Device {
    /// Opens a device. From then on, the credentials of the process and of its sending threads must not change: the kernel refuses requests
    /// with other credentials than the opener's (rdma_rxe gets requests by `write(2)`).
    ///
    /// # Errors
    /// [`Absent::Open`].
    pub(in crate::dsm) fn open(found: &Found) -> Result<Arc<Self>, Absent> {
        let context = found.open()?;
        Ok(Arc::new(Self { library: Arc::clone(found.library()), context, info: found.info().clone() }))
    }

    /// Whether the device's port has this address.
    pub(in crate::dsm) fn is_at(&self, address: IpAddr) -> bool {
        let wide = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        self.info.address == wide
    }

    /// The address of the device's port.
    pub(super) fn address(&self) -> Ipv6Addr {
        self.info.address
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `open` opened it. Queue pairs hold a reference to the device, so none exists any more.
        unsafe { (self.library.functions.close_device)(self.context) };
    }
}
