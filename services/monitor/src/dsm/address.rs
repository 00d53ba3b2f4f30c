//! Addresses of nodes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Address on which a node listens: `unix:PATH`, `tcp:HOST:PORT` or `rdma:HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAddress {
    /// Path of a Unix socket on this host.
    Unix(PathBuf),
    /// Host and port, `HOST:PORT`.
    Tcp(String),
    /// Host and port of the TCP connection. Frames use the RDMA device that has the host's address.
    Rdma(String),
}

/// The text isn't an address of a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no address of a node; write unix:PATH, tcp:HOST:PORT or rdma:HOST:PORT")]
pub struct AddressError(String);

impl FromStr for NodeAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError(text.escape_debug().to_string());
        match text.split_once(':') {
            // A `sockaddr_un` holds 107 bytes and the terminating zero.
            Some(("unix", path)) if (1..108).contains(&path.len()) => Ok(Self::Unix(path.into())),
            Some((kind @ ("tcp" | "rdma"), place)) => {
                let (host, port) = place.rsplit_once(':').ok_or_else(wrong)?;
                let port_known = port.parse::<u16>().is_ok_and(|port| port != 0);
                match kind {
                    _ if host.is_empty() || !port_known => Err(wrong()),
                    "tcp" => Ok(Self::Tcp(place.to_owned())),
                    _ => Ok(Self::Rdma(place.to_owned())),
                }
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(place) => write!(formatter, "tcp:{place}"),
            Self::Rdma(place) => write!(formatter, "rdma:{place}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written_and_nothing_else_is() {
        for text in ["unix:/run/a b", "tcp:10.0.0.1:7000", "tcp:[fe80::1]:1", "rdma:10.0.0.1:7000"] {
            assert_eq!(text.parse::<NodeAddress>().unwrap().to_string(), text);
        }
        let long = format!("unix:/{}", "x".repeat(107));
        for text in [
            "",
            "unix:",
            "tcp:",
            "tcp:host",
            "tcp::7000",
            "tcp:host:0",
            "tcp:host:70000",
            "udp:h:1",
            "rdma:",
            "rdma:host",
            "rdma:host:0",
            &long,
        ] {
            assert!(text.parse::<NodeAddress>().is_err(), "{text}");
        }
    }
}
