//! Network namespaces, one per node, and a separate link between any two of them, which can be cut.

use crate::command;
use anyhow::{Context, Result, bail};
use std::process::Command;

/// Port of every node in its own namespace.
const PORT: u16 = 7000;

/// Namespaces that are removed on drop.
pub struct Network {
    prefix: String,
    nodes: u8,
}

/// A link by its ends, the lower node first.
pub type Ends = (u8, u8);

/// Returns all links between `nodes` nodes.
pub fn links(nodes: u8) -> impl Iterator<Item = Ends> {
    (0..nodes).flat_map(move |low| (low + 1..nodes).map(move |high| (low, high)))
}

fn ip(words: &[&str]) -> Result<()> {
    command::output(Command::new("ip").args(words)).map(drop)
}

impl Network {
    /// Creates namespaces for `nodes` nodes.
    pub fn new(nodes: u8) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("Cutting links takes network namespaces, and these take root; use sudo");
        }
        let network = Self { prefix: format!("cwf{}", std::process::id()), nodes };
        for node in 0..nodes {
            let name = network.namespace(node);
            ip(&["netns", "add", &name]).with_context(|| format!("No namespace for node {node}"))?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
        }
        for (low, high) in links(nodes) {
            let (a, b) = (network.namespace(low), network.namespace(high));
            let (here, there) = (format!("n{high}"), format!("n{low}"));
            ip(&["-n", &a, "link", "add", &here, "type", "veth", "peer", "name", &there, "netns", &b])
                .with_context(|| format!("No link between nodes {low} and {high}"))?;
            for (name, device, end) in [(&a, &here, 1), (&b, &there, 2)] {
                let address = format!("{}/30", host((low, high), end));
                ip(&["-n", name, "addr", "add", &address, "dev", device])?;
                ip(&["-n", name, "link", "set", device, "up"])?;
            }
        }
        Ok(network)
    }

    /// Returns the namespace of a node.
    pub fn namespace(&self, node: u8) -> String {
        format!("{}-{node}", self.prefix)
    }

    /// Returns `--peers` of a node in a VM of `nodes` nodes: the address of each other node on the link to it.
    pub fn peers(me: u8, nodes: u8) -> Vec<String> {
        let place = |node: u8| match node.cmp(&me) {
            std::cmp::Ordering::Less => host((node, me), 1),
            std::cmp::Ordering::Equal => "0.0.0.0".to_owned(),
            std::cmp::Ordering::Greater => host((me, node), 2),
        };
        (0..nodes).map(|node| format!("tcp:{}:{PORT}", place(node))).collect()
    }

    /// Sets a link down or up. Packets in flight and later ones are lost without notice.
    pub fn set_link(&self, ends: Ends, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.namespace(ends.0), "link", "set", &format!("n{}", ends.1), state])
    }
}

/// Returns the address of end 1 or 2 of a link.
fn host(ends: Ends, end: u8) -> String {
    format!("10.77.{}.{end}", ends.0 * 16 + ends.1)
}

impl Drop for Network {
    fn drop(&mut self) {
        for node in 0..self.nodes {
            if let Err(error) = ip(&["netns", "del", &self.namespace(node)]) {
                eprintln!("lab: {error:#}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_nodes_has_a_link_and_both_ends_know_it() {
        assert_eq!(links(4).count(), 6);
        assert_eq!(Network::peers(0, 3), ["tcp:0.0.0.0:7000", "tcp:10.77.1.2:7000", "tcp:10.77.2.2:7000"]);
        assert_eq!(Network::peers(2, 3), ["tcp:10.77.2.1:7000", "tcp:10.77.18.1:7000", "tcp:0.0.0.0:7000"]);
    }
}
