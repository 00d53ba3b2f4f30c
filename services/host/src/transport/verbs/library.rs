//! Checks whether this host's RDMA device can carry guests' connections: libibverbs, and a device with an address and sufficient limits.

use super::rnic::RnicInfo;

/// Required scatter-gather elements per request.
const SGES: u32 = 16;
/// Limit of requests posted to a queue pair of the device.
const SENDS: u32 = 128;
/// Limit of receives posted to a queue pair of the device.
const RECEIVES: u32 = 512;

/// Why a host can't offer transport `verbs`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// The library can't be loaded.
    #[error(
        "libibverbs.so.1 can't be loaded ({0}); install rdma-core's libraries, with Debian libibverbs1 and ibverbs-providers"
    )]
    Library(String),
    /// The library lacks this function.
    #[error("libibverbs.so.1 has no function {0}; transport verbs needs rdma-core 29 or newer")]
    Function(&'static str),
    /// The host has no device.
    #[error(
        "This host has no RDMA device that user space may use; load its driver and ib_uverbs, or make one of an interface: rdma link add rxe0 type rxe netdev eth0"
    )]
    NoDevice,
    /// No device has the address.
    #[error(
        "No active RDMA device of this host has the address {address} (RoCE version 2); there are: {devices}. Give --fabric-address one of theirs, or the device's interface that address"
    )]
    NoAddress {
        /// The address that was searched for.
        address: std::net::IpAddr,
        /// The devices found, and their addresses.
        devices: String,
    },
    /// The device's limits are too low.
    #[error("The RDMA device {device} takes {sges} scatter-gather elements per request; guests have 16")]
    Elements {
        /// Name of the device.
        device: String,
        /// Its limit of elements per request.
        sges: u32,
    },
    /// The device can't be opened.
    #[error("The RDMA device {device} can't be opened ({why}); may this process use /dev/infiniband?")]
    Open {
        /// Name of the device.
        device: String,
        /// The reason.
        why: String,
    },
}

impl From<ibverbs::Absent> for Absent {
    fn from(absent: ibverbs::Absent) -> Self {
        match absent {
            ibverbs::Absent::Library(why) => Self::Library(why),
            ibverbs::Absent::Function(name) => Self::Function(name),
            ibverbs::Absent::NoDevice => Self::NoDevice,
            ibverbs::Absent::NoAddress { address, devices } => Self::NoAddress { address, devices },
            ibverbs::Absent::Open { device, why } => Self::Open { device, why },
        }
    }
}

/// A suitable device. It isn't open yet: the kernel requires that a device is opened with the credentials that later use it.
#[derive(Debug)]
pub struct Found {
    pub(super) port: ibverbs::Found,
    info: RnicInfo,
}

impl Found {
    /// Finds a device of this host with an address. Loads the library and its providers, so call it before the sandbox is entered.
    ///
    /// # Errors
    /// [`Absent`].
    pub fn look(address: std::net::IpAddr) -> Result<Self, Absent> {
        let port = ibverbs::Found::look(address)?;
        let found = port.info();
        if found.elements < SGES {
            return Err(Absent::Elements { device: found.device.clone(), sges: found.elements });
        }
        let info = RnicInfo {
            device: found.device.clone(),
            port: found.port,
            address: found.address,
            mtu: found.mtu,
            sends: SENDS.min(found.requests),
            receives: RECEIVES.min(found.requests),
            reads: found.reads,
            served_reads: found.served_reads,
        };
        Ok(Self { port, info })
    }

    /// Properties of the device.
    #[must_use]
    pub fn info(&self) -> &RnicInfo {
        &self.info
    }

    /// Path of the device's character device.
    #[must_use]
    pub fn node(&self) -> &std::path::Path {
        self.port.node()
    }
}

/// Names of this host's devices: whether it could offer transport `verbs`, with any address.
///
/// # Errors
/// [`Absent`].
pub fn devices() -> Result<Vec<String>, Absent> {
    Ok(ibverbs::devices()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sentences contain the daemon's own advice, whatever the library's crate prints elsewhere.
    #[test]
    fn what_is_absent_is_told_with_the_daemon_s_advice() {
        let address = std::net::IpAddr::from([203, 0, 113, 77]);
        for (absent, advice) in [
            (ibverbs::Absent::NoAddress { address, devices: "rxe0".to_owned() }, "--fabric-address"),
            (ibverbs::Absent::Function("ibv_x"), "transport verbs needs"),
        ] {
            let text = Absent::from(absent).to_string();
            assert!(text.contains(advice), "{text}");
        }
    }
}
