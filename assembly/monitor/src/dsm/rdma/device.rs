//! The host's RDMA device, opened for the links of one node.

#![allow(unsafe_code)] // Calls a C library.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use ibverbs::abi::Context;
use ibverbs::{Absent, Found, PortInfo, Verbs};

/// The device. All threads of a node use it; see [`Device::open`].
pub(in crate::dsm) struct Device {
    pub(super) library: Arc<Verbs>,
    pub(super) context: *mut Context,
    pub(super) info: PortInfo,
}

// SAFETY: the library may be called with a context from any thread, and this closes it once, when nobody else has it.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

/// This node's links can't go by RDMA.
#[derive(Debug, thiserror::Error)]
pub enum NoDevice {
    /// The address isn't one.
    #[error("rdma:{place} is no address that can be looked up: {why}")]
    Address {
        /// What was given.
        place: String,
        /// Why it isn't.
        why: String,
    },
    /// The host has no device there.
    #[error(transparent)]
    Absent(#[from] Absent),
}

/// The first address that a place `HOST:PORT` has.
///
/// # Errors
/// [`NoDevice::Address`].
pub(in crate::dsm) fn address_of(place: &str) -> Result<SocketAddr, NoDevice> {
    let wrong = |why: String| NoDevice::Address { place: place.to_owned(), why };
    let mut found = place.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name has no address".to_owned()))
}

impl Device {
    /// Opens what was found. Neither the process's credentials nor those of a thread that sends may change from here on: the kernel refuses requests of
    /// other credentials than the opener's (rdma_rxe takes them by write(2)).
    ///
    /// # Errors
    /// [`Absent::Open`].
    pub(in crate::dsm) fn open(found: &Found) -> Result<Arc<Self>, Absent> {
        let context = found.open()?;
        Ok(Arc::new(Self { library: Arc::clone(found.library()), context, info: found.info().clone() }))
    }

    /// Whether it is the one with this address.
    pub(in crate::dsm) fn is_at(&self, address: IpAddr) -> bool {
        let wide = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        self.info.address == wide
    }

    /// Its address.
    pub(super) fn address(&self) -> Ipv6Addr {
        self.info.address
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: opened by `open`; queue pairs hold the device, so there are none any more.
        unsafe { (self.library.functions.close_device)(self.context) };
    }
}
