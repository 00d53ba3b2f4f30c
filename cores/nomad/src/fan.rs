//! One message to many hosts, along a tree; answers come back along it.
//!
//! The sender splits the list of hosts into a few parts. The first host of each gets the message with the rest of its part, and does
//! the same. It answers when it and all behind it are done. Whoever isn't heard of in time is told directly: a broken branch costs one
//! retry and nothing else.

use std::collections::BTreeSet;

use crate::names::HostId;

/// Splits hosts into at most `degree` parts: each part's first host, and the others, which it passes the message on to. Degree 0: each
/// host is a part.
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

/// A message that was passed on, and whose answers are collected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Spread {
    /// Who gets the answer.
    pub parent: HostId,
    /// This host itself is done.
    pub own: bool,
    /// Hosts behind it that aren't.
    pub waiting: BTreeSet<HostId>,
    /// Those that are, and weren't told of yet.
    pub done: BTreeSet<HostId>,
}

impl Spread {
    /// Hosts are done, behind this one.
    pub fn finished(&mut self, hosts: &[HostId]) {
        for host in hosts {
            self.waiting.remove(host);
            self.done.insert(*host);
        }
    }

    /// Whether the answer can leave.
    pub fn is_complete(&self) -> bool {
        self.own && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every host is reached exactly once, by a tree of logarithmic depth.
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
