//! A message to many hosts, forwarded along a tree; the answers return along it.
//!
//! The sender splits the list of hosts into a few parts. The first host of each part receives the message with the rest
//! of its part, and does the same. A host answers when it and all hosts below it are done. The sender retransmits
//! directly to hosts that don't answer in time: a broken branch costs one retransmission.

use std::collections::BTreeSet;

use crate::names::HostId;

/// Splits hosts into at most `degree` parts. Each part is its first host, and the hosts to which that one forwards the
/// message. Degree 0: each host is a part.
#[must_use]
pub fn split(hosts: &[HostId], degree: u8) -> Vec<(HostId, Vec<HostId>)> {
    let parts = if degree == 0 { hosts.len() } else { hosts.len().min(usize::from(degree)) };
    if parts == 0 {
        return Vec::new();
    }
    let (each, longer) = (hosts.len() / parts, hosts.len() % parts);
    let mut split = Vec::with_capacity(parts);
    let mut rest = hosts;
    for part in 0..parts {
        let (this, others) = rest.split_at(each + usize::from(part < longer));
        if let Some((head, tail)) = this.split_first() {
            split.push((*head, tail.to_vec()));
        }
        rest = others;
    }
    split
}

/// A forwarded message whose answers are being collected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ForwardedMessage {
    /// The host that receives the collected answer.
    pub parent: HostId,
    /// Whether this host itself is done.
    pub own_done: bool,
    /// Hosts below this one that aren't done.
    pub waiting: BTreeSet<HostId>,
    /// Hosts that are done: the answer lists them.
    pub done: BTreeSet<HostId>,
}

impl ForwardedMessage {
    /// Records that hosts below this one are done.
    pub fn finished(&mut self, hosts: &[HostId]) {
        for host in hosts {
            self.waiting.remove(host);
            self.done.insert(*host);
        }
    }

    /// Whether the answer can be sent.
    pub fn is_complete(&self) -> bool {
        self.own_done && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree reaches every host exactly once, in logarithmic depth.
    #[test]
    fn a_tree_reaches_each_host_once() {
        for count in [0_u32, 1, 2, 4, 5, 63, 1000] {
            for degree in [0, 1, 2, 4] {
                let hosts: Vec<_> = (0..count).map(HostId).collect();
                let mut reached = Vec::new();
                let mut level = vec![hosts.clone()];
                let mut depth = 0;
                while level.iter().any(|part| !part.is_empty()) {
                    depth += 1;
                    let mut next = Vec::new();
                    for part in &level {
                        for (head, rest) in split(part, degree) {
                            reached.push(head);
                            next.push(rest);
                        }
                    }
                    level = next;
                }
                reached.sort_unstable();
                assert_eq!(reached, hosts, "{count} hosts, degree {degree}");
                let most = match degree {
                    0 => 1,
                    1 => count,
                    2 => 10,
                    _ => 5,
                };
                assert!(depth <= most, "{count} hosts, degree {degree}: {depth} levels");
            }
        }
    }
}
