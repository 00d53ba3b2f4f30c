//! Until when hosts count as alive, in the order in which their leases end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nomad::HostId;

/// Leases of hosts; the next one to end is found without a scan.
#[derive(Debug, Default)]
pub(super) struct Leases {
    until: BTreeMap<HostId, Instant>,
    in_order: BTreeSet<(Instant, HostId)>,
}

impl Leases {
    pub fn renew(&mut self, host: HostId, until: Instant) {
        self.remove(host);
        self.until.insert(host, until);
        self.in_order.insert((until, host));
    }

    pub fn remove(&mut self, host: HostId) {
        if let Some(before) = self.until.remove(&host) {
            self.in_order.remove(&(before, host));
        }
    }

    pub fn runs(&self, host: HostId) -> bool {
        self.until.contains_key(&host)
    }

    /// When the next lease ends.
    pub fn next(&self) -> Option<Instant> {
        self.in_order.first().map(|(until, _)| *until)
    }

    /// Removes a lease that has ended.
    pub fn take_over(&mut self, now: Instant) -> Option<HostId> {
        let (until, host) = self.in_order.first().copied()?;
        if until > now {
            return None;
        }
        self.remove(host);
        Some(host)
    }

    /// Gives all leases more time.
    pub fn extend(&mut self, by: Duration) {
        self.until.values_mut().for_each(|until| *until += by);
        self.in_order = self.until.iter().map(|(host, until)| (*until, *host)).collect();
    }

    /// Removes the leases of hosts that aren't known.
    pub fn retain(&mut self, known: impl Fn(HostId) -> bool) {
        self.until.retain(|host, _| known(*host));
        self.in_order.retain(|(_, host)| known(*host));
    }
}

impl FromIterator<(HostId, Instant)> for Leases {
    fn from_iter<T: IntoIterator<Item = (HostId, Instant)>>(all: T) -> Self {
        let mut leases = Self::default();
        for (host, until) in all {
            leases.renew(host, until);
        }
        leases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The index says the same as a scan of all leases, whatever was renewed, removed and extended.
    #[test]
    fn the_next_lease_to_end_is_that_of_a_scan() {
        let (mut leases, mut rng) = (Leases::default(), facilities::rng::SplitMix64::new(3));
        let began = Instant::now();
        let mut ended = 0;
        for step in 0..4_000_u32 {
            let (host, at) = (HostId(rng.between(1, 40)), began + Duration::from_millis(step.into()));
            match rng.below(20) {
                0 => leases.remove(host),
                1 => leases.extend(Duration::from_millis(rng.below(9).into())),
                2 => leases.retain(|host| host.0 % 7 != 0),
                3..8 => ended += u32::from(leases.take_over(at).is_some()),
                _ => leases.renew(host, at + Duration::from_millis(rng.below(90).into())),
            }
            assert_eq!(leases.next(), leases.until.values().copied().min(), "step {step}");
            assert_eq!(leases.in_order.len(), leases.until.len());
        }
        assert!(ended > 100, "{ended}");
    }
}
