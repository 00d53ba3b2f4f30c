//! Hosts on this machine: network namespaces, each with a veth pair to a bridge, removed at the end. The bridge's namespace is a host, too.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::Ordering;

use super::link::{INTERFACE, MADE, PREFIX, ip, remove_left_behind};

/// Name of the bridge in its namespace.
const BRIDGE: &str = "br0";

/// The namespaces. Dropping them removes them.
#[derive(Debug)]
pub struct Network {
    /// The bridge's, then the hosts'.
    names: Vec<String>,
}

impl Network {
    /// Creates the bridge and `hosts` hosts.
    ///
    /// # Errors
    /// A namespace or a link can't be created.
    pub fn new(hosts: u8) -> anyhow::Result<Self> {
        remove_left_behind();
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let mut network = Self { names: Vec::new() };
        for host in 0..=hosts {
            let name = format!("{PREFIX}{}-{number}h{host}", std::process::id());
            ip(&["netns", "add", &name])?;
            network.names.push(name);
        }
        let bridge = network.name(0);
        ip(&["-n", bridge, "link", "add", BRIDGE, "type", "bridge"])?;
        for host in 0..=hosts {
            let name = network.name(host);
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            let interface = if host == 0 {
                BRIDGE
            } else {
                let port = format!("port{host}");
                ip(&[
                    "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", &port, "netns",
                    bridge,
                ])?;
                ip(&["-n", bridge, "link", "set", &port, "master", BRIDGE, "up"])?;
                INTERFACE
            };
            ip(&["-n", name, "addr", "add", &format!("{}/24", Self::address(host)), "dev", interface])?;
            ip(&["-n", name, "link", "set", interface, "up"])?;
        }
        Ok(network)
    }

    /// Returns the address of a host; 0 is the bridge's.
    #[must_use]
    pub const fn address(host: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, if host == 0 { 254 } else { host })
    }

    fn name(&self, host: u8) -> &str {
        self.names.get(usize::from(host)).map_or("", String::as_str)
    }

    /// Returns a command that runs `program` on a host, as [`super::link::Link::on`].
    pub fn on(&self, host: u8, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(host), "setpriv", "--pdeathsig", "KILL"]).arg(program);
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(error) = ip(&["netns", "del", name]) {
                eprintln!("bench: network namespace {name} is left behind: {error:#}");
            }
        }
    }
}
