//! Identifiers in the namespace of one VM. They are assigned once, are never translated on the data path, and stay valid on whatever host
//! the VM runs.

/// Declares a `u32` newtype.
macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

name! {
    /// A device (one HCA of one VM) in this engine.
    DeviceId
}
name! {
    /// An isolated network: GIDs are unique within one.
    SegmentId
}
name! {
    /// A user context (one open device file in the guest). 0 is the guest kernel's, which always exists.
    ContextHandle
}
name! {
    /// A protection domain; below 2^24, never 0.
    PdHandle
}
name! {
    /// A memory region; never 0.
    MrHandle
}
name! {
    /// A completion queue; never 0, below the device's limit.
    CqHandle
}
name! {
    /// A shared receive queue; never 0, below the device's limit.
    SrqHandle
}
name! {
    /// A queue pair in the guest's ABI; never 0, below the device's limit.
    QpHandle
}
name! {
    /// A queue pair number in packets, 24 bits. 1 is the general services queue pair.
    Qpn
}
name! {
    /// An lkey or rkey. Bits 31:8 are the index of the memory region; bits 7:0 are a variant that its owner may choose at each fast
    /// registration. Never 0.
    Key
}

/// The general services queue pair.
pub const GSI: Qpn = Qpn(1);

/// A global identifier: an IPv6 address, or an IPv4 address as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4 address, if it is one.
    #[must_use]
    pub fn ipv4(self) -> Option<std::net::Ipv4Addr> {
        std::net::Ipv6Addr::from(self.0).to_ipv4_mapped()
    }
}

impl std::fmt::Debug for Gid {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&std::net::Ipv6Addr::from(self.0), formatter)
    }
}
