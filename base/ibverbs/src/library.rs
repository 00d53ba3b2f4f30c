//! libibverbs, loaded at run time, so that a host without it runs Causeway all the same.
//!
//! This module declares the library's functions and finds the device that has an address.

#![allow(unsafe_code)] // Calls a C library.

use std::ffi::{CStr, c_int, c_void};
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::abi::{
    AsyncEvent, Channel, Context, Cq, Device, DeviceAttr, GID_ROCE_V2, GidEntry, Mr, PORT_ACTIVE, Pd,
    PortAttr, Qp, QpAttr, QpInitAttr,
};

/// The shared object's name, with the only ABI version so far.
const LIBRARY: &str = "libibverbs.so.1";

/// Why a host's RDMA devices can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// The library can't be loaded.
    #[error(
        "libibverbs.so.1 can't be loaded ({0}); install rdma-core's libraries, with Debian libibverbs1 and ibverbs-providers"
    )]
    Library(String),
    /// The library lacks this function.
    #[error("libibverbs.so.1 has no function {0}; rdma-core 29 or newer is needed")]
    Function(&'static str),
    /// The host has no device.
    #[error(
        "This host has no RDMA device that user space may use; load its driver and ib_uverbs, or make one of an interface: rdma link add rxe0 type rxe netdev eth0"
    )]
    NoDevice,
    /// No device has the address.
    #[error(
        "No active RDMA device of this host has the address {address} (RoCE version 2); there are: {devices}. Name one of theirs, or give the device's interface that address"
    )]
    NoAddress {
        /// The address that was searched for.
        address: IpAddr,
        /// The devices found, and their addresses.
        devices: String,
    },
    /// The device can't be opened.
    #[error("The RDMA device {device} can't be opened ({why}); may this process use /dev/infiniband?")]
    Open {
        /// The device's name.
        device: String,
        /// The reason.
        why: String,
    },
}

macro_rules! library {
    ($($name:ident $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions, by their names without `ibv_`.
        pub struct Functions {
            $(#[doc = concat!("`", $symbol, "`.")] pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn load(library: &libloading::Library) -> Result<Self, Absent> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the function's in <infiniband/verbs.h>; the library outlives the pointer, see `Verbs`.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| Absent::Function($symbol))?
                    },)*
                })
            }
        }
    };
}

library! {
    get_device_list "ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    open_device "ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device "ibv_close_device": fn(*mut Context) -> c_int;
    query_device "ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port "ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_ex "_ibv_query_gid_ex": fn(*mut Context, u32, u32, *mut GidEntry, u32, usize) -> c_int;
    alloc_pd "ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd "ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr_iova "ibv_reg_mr_iova": fn(*mut Pd, *mut c_void, usize, u64, c_int) -> *mut Mr;
    dereg_mr "ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel "ibv_create_comp_channel": fn(*mut Context) -> *mut Channel;
    destroy_comp_channel "ibv_destroy_comp_channel": fn(*mut Channel) -> c_int;
    create_cq "ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
    destroy_cq "ibv_destroy_cq": fn(*mut Cq) -> c_int;
    get_cq_event "ibv_get_cq_event": fn(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events "ibv_ack_cq_events": fn(*mut Cq, u32);
    create_qp "ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp "ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp "ibv_destroy_qp": fn(*mut Qp) -> c_int;
    get_async_event "ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event "ibv_ack_async_event": fn(*mut AsyncEvent);
}

/// The loaded library, with its providers. It is never unloaded.
pub struct Verbs {
    /// The functions that it exports.
    pub functions: Functions,
    devices: Vec<*mut Device>,
    // Dropped after `functions`, which point into it.
    _library: libloading::Library,
}

// SAFETY: the library may be called from any thread; the list of devices is never freed nor changed.
unsafe impl Send for Verbs {}
// SAFETY: as above.
unsafe impl Sync for Verbs {}

impl std::fmt::Debug for Verbs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Verbs").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}

impl Verbs {
    /// Loads the library, with the providers of the host's devices. Call it before the sandbox is entered.
    ///
    /// # Errors
    /// [`Absent::Library`], [`Absent::Function`].
    pub fn load() -> Result<Arc<Self>, Absent> {
        // SAFETY: the library's initialisers are those of rdma-core; they do nothing that depends on this program.
        let library = unsafe { libloading::Library::new(LIBRARY) };
        let library = library.map_err(|error| Absent::Library(error.to_string()))?;
        let functions = Functions::load(&library)?;
        let mut count = 0;
        // SAFETY: it writes the number of devices and returns a list, which only another call would free; this program never makes that
        // call.
        let list = unsafe { (functions.get_device_list)(&raw mut count) };
        let mut devices = Vec::new();
        for index in 0..usize::try_from(count).unwrap_or(0) {
            if list.is_null() {
                break;
            }
            // SAFETY: the list has `count` elements.
            devices.push(unsafe { *list.add(index) });
        }
        Ok(Arc::new(Self { functions, devices, _library: library }))
    }

    /// Finds the port that has `address` as a RoCE version 2 GID.
    ///
    /// # Errors
    /// [`Absent::NoDevice`], [`Absent::NoAddress`].
    pub fn find(self: &Arc<Self>, address: IpAddr) -> Result<Found, Absent> {
        if self.devices.is_empty() {
            return Err(Absent::NoDevice);
        }
        let wanted = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let mut seen = Vec::new();
        for &device in &self.devices {
            let (name, node) = names(device);
            let context = match self.open(device, &name) {
                Ok(context) => context,
                Err(error) => {
                    seen.push(format!("{name} ({error})"));
                    continue;
                }
            };
            let looked = self.look(context, &name, &wanted, &mut seen);
            // SAFETY: opened above, and no object was created in it.
            unsafe { (self.functions.close_device)(context) };
            if let Some(info) = looked {
                let node = PathBuf::from("/dev/infiniband").join(node);
                return Ok(Found { library: Arc::clone(self), device, node, info });
            }
        }
        Err(Absent::NoAddress { address, devices: seen.join(", ") })
    }

    fn open(&self, device: *mut Device, name: &str) -> Result<*mut Context, Absent> {
        // SAFETY: a device of the library's list.
        let context = unsafe { (self.functions.open_device)(device) };
        if context.is_null() {
            let why = std::io::Error::last_os_error().to_string();
            return Err(Absent::Open { device: name.to_owned(), why });
        }
        Ok(context)
    }

    /// Searches all ports of a device for an address.
    fn look(
        &self,
        context: *mut Context,
        name: &str,
        wanted: &[u8; 16],
        seen: &mut Vec<String>,
    ) -> Option<PortInfo> {
        // SAFETY: plain numbers.
        let mut device: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context, and room for more than the library writes.
        if unsafe { (self.functions.query_device)(context, &raw mut device) } != 0 {
            seen.push(format!("{name} (doesn't answer)"));
            return None;
        }
        for number in 1..=device.phys_port_cnt {
            // SAFETY: plain numbers.
            let mut port: PortAttr = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            if unsafe { (self.functions.query_port)(context, number, &raw mut port) } != 0 {
                continue;
            }
            if port.state != PORT_ACTIVE {
                seen.push(format!("{name} port {number} (not active)"));
                continue;
            }
            for index in 0..u8::try_from(port.gid_tbl_len).unwrap_or(u8::MAX) {
                let mut entry = GidEntry::default();
                let size = std::mem::size_of::<GidEntry>();
                // SAFETY: as above; the size limits how much is written.
                let got = unsafe {
                    (self.functions.query_gid_ex)(
                        context,
                        u32::from(number),
                        u32::from(index),
                        &raw mut entry,
                        0,
                        size,
                    )
                };
                if got != 0 || entry.gid_type != GID_ROCE_V2 {
                    continue;
                }
                if entry.gid.0 != *wanted {
                    seen.push(format!("{name} port {number} at {}", Ipv6Addr::from(entry.gid.0)));
                    continue;
                }
                let number_of = |most: c_int| u32::try_from(most).unwrap_or(0);
                let reads = |most: c_int| u8::try_from(most.clamp(0, 255)).unwrap_or(0);
                return Some(PortInfo {
                    device: name.to_owned(),
                    port: number,
                    address: (*wanted).into(),
                    gid_index: index,
                    mtu: u8::try_from(port.active_mtu.clamp(1, 5)).unwrap_or(1),
                    requests: number_of(device.max_qp_wr),
                    elements: number_of(device.max_sge),
                    reads: reads(device.max_qp_init_rd_atom),
                    served_reads: reads(device.max_qp_rd_atom),
                });
            }
        }
        None
    }
}

/// Name of the device, and path of its character device.
fn names(device: *mut Device) -> (String, String) {
    // SAFETY: a device of the library's list, which is never freed; its name ends with a NUL within its array.
    let name = unsafe { CStr::from_ptr((*device).name.as_ptr()) };
    // SAFETY: as above.
    let node = unsafe { CStr::from_ptr((*device).dev_name.as_ptr()) };
    (name.to_string_lossy().into_owned(), node.to_string_lossy().into_owned())
}

/// A port of a device, and its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// The device's name, as `ibv_devices` prints it.
    pub device: String,
    /// Port number, from 1 on.
    pub port: u8,
    /// Address by which peers reach the port.
    pub address: Ipv6Addr,
    /// Index of the address in the port's GID table.
    pub gid_index: u8,
    /// Active path MTU as its verbs code, 1 to 5 for 256 to 4096 bytes.
    pub mtu: u8,
    /// Limit of work requests in a queue of a queue pair.
    pub requests: u32,
    /// Limit of scatter-gather elements in a work request.
    pub elements: u32,
    /// Limit of READs and atomics outstanding as initiator.
    pub reads: u8,
    /// Limit of READs and atomics outstanding as responder.
    pub served_reads: u8,
}

/// A device that has the address. It isn't open yet: the kernel requires that a device is opened with the credentials that later use it.
#[derive(Debug, Clone)]
pub struct Found {
    library: Arc<Verbs>,
    device: *mut Device,
    node: PathBuf,
    info: PortInfo,
}

// SAFETY: the pointer is one of the library's list, which is never freed nor changed.
unsafe impl Send for Found {}
// SAFETY: as above.
unsafe impl Sync for Found {}

impl Found {
    /// Finds a device of this host with an address. Loads the library and its providers, so call it before the sandbox is entered.
    ///
    /// # Errors
    /// [`Absent`].
    pub fn look(address: IpAddr) -> Result<Self, Absent> {
        Verbs::load()?.find(address)
    }

    /// The port that has the address.
    #[must_use]
    pub fn info(&self) -> &PortInfo {
        &self.info
    }

    /// Path of the device's character device.
    #[must_use]
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// The library by which it is used.
    #[must_use]
    pub fn library(&self) -> &Arc<Verbs> {
        &self.library
    }

    /// Opens the device. The caller closes it ([`Functions::close_device`]) after it has destroyed all objects of it.
    ///
    /// # Errors
    /// [`Absent::Open`].
    pub fn open(&self) -> Result<*mut Context, Absent> {
        self.library.open(self.device, &self.info.device)
    }
}

/// Names of all devices of this host.
///
/// # Errors
/// [`Absent::Library`], [`Absent::Function`], [`Absent::NoDevice`].
pub fn devices() -> Result<Vec<String>, Absent> {
    let library = Verbs::load()?;
    if library.devices.is_empty() {
        return Err(Absent::NoDevice);
    }
    Ok(library.devices.iter().map(|device| names(*device).0).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::print_stderr)] // For tests only.
mod tests {
    use super::*;

    /// With the library installed, all its functions are found, and a host without a device gets an error that says so. Without the
    /// library, the error names the package to install.
    #[test]
    fn a_host_says_what_it_lacks() {
        let address = std::net::IpAddr::from([203, 0, 113, 77]);
        let error = match Found::look(address) {
            Ok(found) => panic!("a documentation address is no host's: {found:?}"),
            Err(error) => error,
        };
        let text = error.to_string();
        match error {
            Absent::Library(_) => {
                facilities::missing(facilities::Facility::Libibverbs, "its functions are not checked");
                assert!(text.contains("install"));
            }
            Absent::NoDevice => assert!(text.contains("rdma link add"), "{text}"),
            Absent::NoAddress { .. } => assert!(text.contains("203.0.113.77"), "{text}"),
            other => panic!("{other}"),
        }
    }
}
