//! Whether this host's RDMA device can carry guests' connections: libibverbs, and a device with an address and room enough.

use super::rnic::RnicInfo;

/// Scatter-gather elements that a guest's request may have.
const SGES: u32 = 16;
/// Requests that a queue pair of the device gets at most.
const SENDS: u32 = 128;
/// Receives that it gets at most.
const RECEIVES: u32 = 512;

/// A host can't offer transport `verbs`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// The library.
    #[error(
        "libibverbs.so.1 can't be loaded ({0}); install rdma-core's libraries, with Debian libibverbs1 and ibverbs-providers"
    )]
    Library(String),
    /// A function of it.
    #[error("libibverbs.so.1 has no function {0}; transport verbs needs rdma-core 29 or newer")]
    Function(&'static str),
    /// No device at all.
    #[error(
        "This host has no RDMA device that user space may use; load its driver and ib_uverbs, or make one of an interface: rdma link add rxe0 type rxe netdev eth0"
    )]
    NoDevice,
    /// None with the address.
    #[error(
        "No active RDMA device of this host has the address {address} (RoCE version 2); there are: {devices}. Give --fabric-address one of theirs, or the device's interface that address"
    )]
    NoAddress {
        /// What was looked for.
        address: std::net::IpAddr,
        /// What there is.
        devices: String,
    },
    /// A device that can't do enough.
    #[error("The RDMA device {device} takes {sges} scatter-gather elements per request; guests have 16")]
    Elements {
        /// Which.
        device: String,
        /// What it takes.
        sges: u32,
    },
    /// It can't be opened.
    #[error("The RDMA device {device} can't be opened ({why}); may this process use /dev/infiniband?")]
    Open {
        /// Which.
        device: String,
        /// Why.
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

/// A device that will do. It isn't open yet: the kernel wants it opened with the credentials that it is used with.
#[derive(Debug)]
pub struct Found {
    pub(super) port: ibverbs::Found,
    info: RnicInfo,
}

impl Found {
    /// Looks for a device of this host with an address. The library and its drivers are loaded by that: before a sandbox.
    ///
    /// # Errors
    /// Why the host can't offer the transport.
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

    /// What was found.
    #[must_use]
    pub fn info(&self) -> &RnicInfo {
        &self.info
    }

    /// The device's file.
    #[must_use]
    pub fn node(&self) -> &std::path::Path {
        self.port.node()
    }
}

/// Whether a host could offer transport `verbs`, without an address: the devices it has.
///
/// # Errors
/// Why it can't.
pub fn devices() -> Result<Vec<String>, Absent> {
    Ok(ibverbs::devices()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The daemon's own advice is in its sentences, whatever the library's crate says to others.
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
