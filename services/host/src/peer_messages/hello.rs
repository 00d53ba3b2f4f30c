//! Who both ends of a connection are, and which peers are refused.
//!
//! ```text
//!  0 version of the migration protocol (1)   1 zero (7)
//!  8 sender's host number (4)               12 receiver's host number (4)
//! 16 sender's incarnation (8)               24 receiver's incarnation, as the sender knows it; 0: not known (8)
//! ```

use std::net::IpAddr;

use nomad::{HostId, Incarnation};

use super::Hosts;

/// Bytes of a Hello frame's payload.
pub(super) const HELLO_BYTES: usize = 32;

/// The first frame of each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub version: u8,
    pub from: HostId,
    pub to: HostId,
    pub incarnation: Incarnation,
    /// 0: not known.
    pub known_incarnation: Incarnation,
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(super) enum Refusal {
    #[error("its address is none of a host of this cluster")]
    Stranger,
    #[error("too many connections of its address, or of all, are in their handshake")]
    Busy,
    #[error("its handshake took too long")]
    Timeout,
    #[error("its connection was closed or broke during the handshake")]
    Closed,
    #[error(
        "it doesn't have this daemon's cluster key, or only one of both has a key: give all hosts the same --cluster-key"
    )]
    Key,
    #[error("it doesn't speak this version of the protocol: run the same release on all hosts")]
    Version,
    #[error("it sent something else than a handshake")]
    Malformed,
    #[error("it is, or looks for, another host than the directory has at these addresses")]
    WrongHost,
    #[error("it, or what it knows of this host, is of an earlier or later start of the host")]
    OldIncarnation,
    #[error("this daemon isn't registered at the cluster service yet")]
    NotRegistered,
}

impl Refusal {
    /// All, for metrics.
    pub const ALL: [Self; 10] = [
        Self::Stranger,
        Self::Busy,
        Self::Timeout,
        Self::Closed,
        Self::Key,
        Self::Version,
        Self::Malformed,
        Self::WrongHost,
        Self::OldIncarnation,
        Self::NotRegistered,
    ];

    /// A label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
            Self::Key => "key",
            Self::Version => "version",
            Self::Malformed => "malformed",
            Self::WrongHost => "wrong_host",
            Self::OldIncarnation => "old_incarnation",
            Self::NotRegistered => "not_registered",
        }
    }
}

impl Hello {
    /// What this host says to a peer; `None` if it isn't registered.
    pub fn to(hosts: &dyn Hosts, to: HostId) -> Option<Self> {
        let (from, incarnation) = hosts.own()?;
        let known_incarnation = hosts.host(to).map_or(Incarnation(0), |host| host.incarnation);
        Some(Self { version: nomad::wire::VERSION, from, to, incarnation, known_incarnation })
    }

    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0] = self.version;
        bytes[8..12].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.to.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.incarnation.0.to_le_bytes());
        bytes[24..].copy_from_slice(&self.known_incarnation.0.to_le_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Refusal> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[0] != nomad::wire::VERSION {
            return Err(Refusal::Version);
        }
        if bytes[1..8] != [0; 7] {
            return Err(Refusal::Malformed);
        }
        Ok(Self {
            version: bytes[0],
            from: HostId(word(8)),
            to: HostId(word(12)),
            incarnation: Incarnation(long(16)),
            known_incarnation: Incarnation(long(24)),
        })
    }

    /// Checks a peer's Hello that came from `ip`. `expected`: the host that this daemon has connected to.
    pub fn check(&self, hosts: &dyn Hosts, ip: IpAddr, expected: Option<HostId>) -> Result<(), Refusal> {
        let (own, incarnation) = hosts.own().ok_or(Refusal::NotRegistered)?;
        if self.to != own || self.from == own || expected.is_some_and(|expected| expected != self.from) {
            return Err(Refusal::WrongHost);
        }
        // The same as for packets: a host's messages come from its address in the directory.
        let known = hosts.host(self.from).filter(|known| known.address.ip() == ip);
        let known = known.ok_or(Refusal::WrongHost)?;
        let old = self.incarnation.0 == 0 || self.incarnation < known.incarnation;
        // A peer that knows a later start of this host takes this daemon for one that is gone.
        if old || self.known_incarnation > incarnation {
            return Err(Refusal::OldIncarnation);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use nomad::Message;

    use super::*;
    use crate::peer_messages::{InboxPermit, KnownHost};

    /// This host is number 1, in incarnation 3; hosts 2 and 3 have addresses 127.0.0.2 and 127.0.0.3, in incarnation 5.
    #[derive(Default)]
    struct Three {
        unregistered: bool,
    }

    impl Hosts for Three {
        fn own(&self) -> Option<(HostId, Incarnation)> {
            (!self.unregistered).then_some((HostId(1), Incarnation(3)))
        }

        fn host(&self, host: HostId) -> Option<KnownHost> {
            let last = u8::try_from(host.0).ok().filter(|last| (1..=3).contains(last))?;
            let address = std::net::SocketAddr::from(([127, 0, 0, last], 4792));
            Some(KnownHost { name: format!("h{last}"), address, incarnation: Incarnation(5) })
        }

        fn has_host_at(&self, ip: IpAddr) -> bool {
            (1..=3).any(|host| self.host(HostId(host)).is_some_and(|host| host.address.ip() == ip))
        }

        fn deliver(&self, _message: Message, _permit: InboxPermit) {}
    }

    fn hello() -> Hello {
        Hello {
            version: nomad::wire::VERSION,
            from: HostId(2),
            to: HostId(1),
            incarnation: Incarnation(5),
            known_incarnation: Incarnation(3),
        }
    }

    #[test]
    fn a_hello_is_read_as_written() {
        assert_eq!(Hello::parse(&hello().encode()), Ok(hello()));
        let mut other = hello().encode();
        other[0] += 1;
        assert_eq!(Hello::parse(&other), Err(Refusal::Version));
        let mut reserved = hello().encode();
        reserved[7] = 1;
        assert_eq!(Hello::parse(&reserved), Err(Refusal::Malformed));
    }

    #[test]
    fn a_peer_is_refused_unless_it_is_the_directorys_host() {
        let two: IpAddr = [127, 0, 0, 2].into();
        let check = |hello: Hello, ip, expected| hello.check(&Three::default(), ip, expected);
        assert_eq!(check(hello(), two, None), Ok(()));
        assert_eq!(check(hello(), two, Some(HostId(2))), Ok(()));
        assert_eq!(check(hello(), two, Some(HostId(3))), Err(Refusal::WrongHost));
        // Another host's address, a host that isn't known, this host, a message for another one.
        assert_eq!(check(hello(), [127, 0, 0, 3].into(), None), Err(Refusal::WrongHost));
        assert_eq!(check(Hello { from: HostId(9), ..hello() }, two, None), Err(Refusal::WrongHost));
        assert_eq!(check(Hello { from: HostId(1), ..hello() }, two, None), Err(Refusal::WrongHost));
        assert_eq!(check(Hello { to: HostId(3), ..hello() }, two, None), Err(Refusal::WrongHost));
        // Its own incarnation, and what it knows of this host's.
        let of = |incarnation, known| Hello {
            incarnation: Incarnation(incarnation),
            known_incarnation: Incarnation(known),
            ..hello()
        };
        assert_eq!(check(of(4, 3), two, None), Err(Refusal::OldIncarnation));
        assert_eq!(check(of(0, 3), two, None), Err(Refusal::OldIncarnation));
        assert_eq!(check(of(5, 4), two, None), Err(Refusal::OldIncarnation));
        // A host that has just been started again, of which this one hasn't heard, and which hasn't heard of this one.
        assert_eq!(check(of(6, 0), two, None), Ok(()));
        let unregistered = Three { unregistered: true };
        assert_eq!(hello().check(&unregistered, two, None), Err(Refusal::NotRegistered));
    }
}
