//! Ports for tests that choose where a program listens.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below Linux's range of ephemeral ports (32768 and up, `net.ipv4.ip_local_port_range`), and above well-known ones. No socket that is
/// bound to port 0, and no outgoing connection, takes one of these between a test's choice and its bind.
const RANGE: Range<u32> = 10_240..32_256;

/// Numbers the ports that this process has been given, from a random one on, so that processes side by side use different ones.
static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
    let random = RandomState::new().build_hasher().finish();
    AtomicU32::new(u32::try_from(random % u64::from(RANGE.end - RANGE.start)).unwrap_or_default())
});

/// Returns the first of `count` consecutive ports, free for TCP and UDP on every IPv4 address of this host. Within a process none is
/// returned twice until all of the range have been.
///
/// # Panics
/// If none of the range is free.
#[must_use]
pub fn free(count: u16) -> u16 {
    let size = RANGE.end - RANGE.start;
    for _ in 0..size / u32::from(count) {
        let offset = NEXT.fetch_add(u32::from(count), Ordering::Relaxed) % size;
        let first = RANGE.start + offset;
        let ports = first..first + u32::from(count);
        if ports.end <= RANGE.end && ports.into_iter().all(|port| u16::try_from(port).is_ok_and(is_free)) {
            return u16::try_from(first).unwrap_or_default();
        }
    }
    panic!(
        "No {count} consecutive ports of {RANGE:?} are free: end the programs that hold them (ss -tulpn lists them)"
    );
}

/// Returns an address of loopback with a port as [`free`] chooses it.
#[must_use]
pub fn loopback() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, free(1)))
}

fn is_free(port: u16) -> bool {
    let any = (Ipv4Addr::UNSPECIFIED, port);
    UdpSocket::bind(any).is_ok() && TcpListener::bind(any).is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_given_twice_or_while_it_is_used() {
        let mut given = HashSet::new();
        for _ in 0..200 {
            let first = free(3);
            for port in first..first + 3 {
                assert!(RANGE.contains(&u32::from(port)) && given.insert(port), "{port}");
            }
        }
        let used = UdpSocket::bind((Ipv4Addr::LOCALHOST, free(1))).unwrap_or_else(|e| panic!("{e}"));
        let port = used.local_addr().map(|address| address.port()).unwrap_or_default();
        assert!(!is_free(port), "{port} is bound");
    }
}
