//! Translation of keys. A guest's keys are names inside its VM; the host's device assigns its own, and those of another host's device are
//! requested from its daemon.
//!
//! The rules are those of *Nomad* (2006; see `cores/nomad`). The virtual key never changes. The real key is created on first use at its
//! host, sent to daemons that request it, cached there, and invalidated when the guest deregisters. Addresses are never translated: a
//! registration begins at the guest's own address.

use std::collections::{BTreeSet, HashMap};

use hca::names::{DeviceId, PdHandle};

use super::rnic::Registered;

/// A guest's region, registered with the host's device.
#[derive(Debug, Clone)]
pub(super) struct Own {
    pub pd: PdHandle,
    pub registered: Registered,
    pub bytes: u64,
    /// Connections whose peers have the real key.
    told: BTreeSet<u32>,
}

/// The registrations of all VMs, by device and virtual key.
#[derive(Debug, Default)]
pub(super) struct OwnKeys {
    keys: HashMap<(DeviceId, u32), Own>,
}

impl OwnKeys {
    #[inline]
    pub fn get(&self, device: DeviceId, pd: PdHandle, key: u32) -> Option<Registered> {
        self.keys.get(&(device, key)).filter(|own| own.pd == pd).map(|own| own.registered)
    }

    pub fn insert(&mut self, device: DeviceId, pd: PdHandle, key: u32, registered: Registered, bytes: u64) {
        self.keys.insert((device, key), Own { pd, registered, bytes, told: BTreeSet::new() });
    }

    /// Records that a connection's peer gets a key's real number.
    pub fn tell(&mut self, device: DeviceId, key: u32, link: u32) {
        if let Some(own) = self.keys.get_mut(&(device, key)) {
            own.told.insert(link);
        }
    }

    /// Removes a region. Returns its registration, and the connections whose peers have its key.
    pub fn remove(&mut self, device: DeviceId, key: u32) -> Option<(Own, BTreeSet<u32>)> {
        let mut own = self.keys.remove(&(device, key))?;
        let told = std::mem::take(&mut own.told);
        Some((own, told))
    }

    /// Removes all regions of a device.
    pub fn remove_device(&mut self, device: DeviceId) -> Vec<Own> {
        self.keys.extract_if(|(of, _), _| *of == device).map(|(_, own)| own).collect()
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn bytes(&self) -> u64 {
        self.keys.values().map(|own| own.bytes).sum()
    }
}

/// State of a peer's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerKey {
    /// Requested from its daemon, with this serial number.
    Asked(u32),
    /// The real key.
    Real(u32),
    /// The peer has no such key.
    None,
}

/// Real keys of a connection's peer, by virtual key. A guest may use any number of keys; at most [`MAX_REMEMBERED_KEYS`] are cached.
#[derive(Debug, Default)]
pub(super) struct PeerKeys {
    keys: HashMap<u32, PeerKey>,
    /// Serial number of the last request.
    serial: u32,
}

/// Limit of cached keys per connection.
const MAX_REMEMBERED_KEYS: usize = 65_536;

impl PeerKeys {
    #[inline]
    pub fn get(&self, key: u32) -> Option<PeerKey> {
        self.keys.get(&key).copied()
    }

    /// Starts a request to the peer's daemon; returns its serial number.
    pub fn ask(&mut self, key: u32) -> u32 {
        if self.keys.len() >= MAX_REMEMBERED_KEYS {
            self.keys.clear();
        }
        self.serial = self.serial.wrapping_add(1);
        self.keys.insert(key, PeerKey::Asked(self.serial));
        self.serial
    }

    /// Handles a response. One with an older serial number is ignored.
    pub fn answer(&mut self, key: u32, serial: u32, real: Option<u32>) -> bool {
        match self.keys.get_mut(&key) {
            Some(known) if *known == PeerKey::Asked(serial) => {
                *known = real.map_or(PeerKey::None, PeerKey::Real);
                true
            }
            _ => false,
        }
    }

    /// Handles an invalidation by the peer. If a request is in progress, its response may be older than this: returns the next request's
    /// serial number.
    pub fn invalidate(&mut self, key: u32) -> Option<u32> {
        if matches!(self.keys.remove(&key)?, PeerKey::Asked(_)) {
            return Some(self.ask(key));
        }
        None
    }

    /// Forgets a key after a request failed for lack of it; the next use requests it again.
    pub fn forget(&mut self, key: u32) {
        self.keys.remove(&key);
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::print_stdout)] // For tests only.
mod tests {
    use super::super::rnic::HostMr;
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const DEVICE: DeviceId = DeviceId(1);
    const PD: PdHandle = PdHandle(1);

    fn registered(number: u32) -> Registered {
        Registered {
            mr: HostMr(number),
            lkey: number.rotate_left(8) ^ 0x55,
            rkey: number.rotate_left(16) ^ 0xAA,
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// The owner's guest registers a key.
        Register(u32),
        /// It deregisters the key; the peer is notified at once, or later.
        Deregister(u32),
        /// The peer uses a key.
        Use(u32),
        /// A message in flight arrives: its index, and whether another copy stays in flight.
        Deliver(usize, bool),
    }

    #[derive(Debug, Clone, Copy)]
    enum Message {
        Resolve(u32, u32),
        Resolved(u32, u32, Option<u32>),
        Invalidate(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = 0..4u32;
        prop_oneof![
            key.clone().prop_map(Step::Register),
            key.clone().prop_map(Step::Deregister),
            key.prop_map(Step::Use),
            (any::<usize>(), any::<bool>()).prop_map(|(which, again)| Step::Deliver(which, again)),
            (any::<usize>(), any::<bool>()).prop_map(|(which, again)| Step::Deliver(which, again)),
        ]
    }

    proptest! {
        /// Any order of registrations, requests, responses and invalidations, with messages delayed and repeated. A real key that a peer
        /// uses for a virtual one was that key's at some time and no other key's, so a stale one reaches nothing. Once every message has
        /// arrived, a real key that the peer has is the current one.
        #[test]
        fn a_peer_never_takes_one_key_for_another(steps in prop::collection::vec(step(), 1..200)) {
            let (mut own, mut peer) = (OwnKeys::default(), PeerKeys::default());
            let mut history: BTreeMap<u32, u32> = BTreeMap::new();
            let mut network: Vec<Message> = Vec::new();
            let mut next = 1;
            let deliver = |message, own: &mut OwnKeys, peer: &mut PeerKeys, network: &mut Vec<Message>| match message {
                Message::Resolve(key, serial) => {
                    let real = own.get(DEVICE, PD, key).map(|registered| registered.rkey);
                    own.tell(DEVICE, key, 7);
                    network.push(Message::Resolved(key, serial, real));
                }
                Message::Resolved(key, serial, real) => {
                    peer.answer(key, serial, real);
                }
                Message::Invalidate(key) => {
                    if let Some(serial) = peer.invalidate(key) {
                        network.push(Message::Resolve(key, serial));
                    }
                }
            };
            let all = steps.len() * 2;
            let last = (0..all).map(|_| Step::Deliver(0, false));
            for step in steps.into_iter().chain(last) {
                match step {
                    Step::Register(key) => if own.get(DEVICE, PD, key).is_none() {
                        own.insert(DEVICE, PD, key, registered(next), 1);
                        history.insert(registered(next).rkey, key);
                        next += 1;
                    },
                    Step::Deregister(key) => if let Some((_, told)) = own.remove(DEVICE, key)
                        && told.contains(&7)
                    {
                        network.push(Message::Invalidate(key));
                    },
                    Step::Use(key) => match peer.get(key) {
                        Some(PeerKey::Real(real)) => prop_assert_eq!(history.get(&real), Some(&key)),
                        Some(PeerKey::Asked(serial)) => network.push(Message::Resolve(key, serial)),
                        Some(PeerKey::None) => peer.forget(key),
                        None => {
                            let serial = peer.ask(key);
                            network.push(Message::Resolve(key, serial));
                        }
                    },
                    Step::Deliver(which, again) => if !network.is_empty() {
                        let index = which % network.len();
                        let message = network[index];
                        if !again {
                            network.remove(index);
                        }
                        deliver(message, &mut own, &mut peer, &mut network);
                    },
                }
            }
            while let Some(message) = network.pop() {
                deliver(message, &mut own, &mut peer, &mut network);
            }
            for key in 0..4 {
                let real = own.get(DEVICE, PD, key).map(|registered| registered.rkey);
                match peer.get(key) {
                    Some(PeerKey::Real(known)) => prop_assert_eq!(Some(known), real),
                    Some(PeerKey::Asked(_)) => prop_assert!(false, "an answer is missing"),
                    Some(PeerKey::None) | None => {}
                }
            }
        }

        /// Keys of one VM, or of one protection domain, are invalid in another.
        #[test]
        fn keys_are_names_inside_their_domain(keys in prop::collection::btree_map((0..3u32, any::<u32>()), 0..3u32, 0..40)) {
            let mut own = OwnKeys::default();
            for (number, (&(device, key), &pd)) in (1u32..).zip(&keys) {
                own.insert(DeviceId(device), PdHandle(pd), key, registered(number), 1);
            }
            for (number, (&(device, key), &pd)) in (1u32..).zip(&keys) {
                for (other_device, other_pd) in (0..3).flat_map(|device| (0..3).map(move |pd| (device, pd))) {
                    let found = own.get(DeviceId(other_device), PdHandle(other_pd), key);
                    let expected = (other_device == device && other_pd == pd).then(|| registered(number));
                    if other_device == device {
                        prop_assert_eq!(found, expected);
                    } else {
                        prop_assert_ne!(found, Some(registered(number)));
                    }
                }
            }
            let first = own.remove_device(DeviceId(0)).len();
            prop_assert_eq!(first, keys.keys().filter(|(device, _)| *device == 0).count());
        }
    }

    /// Cost of translating a request's keys: `cargo test --release -p host --lib cost_of_translation -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_translation() {
        for count in [1u32, 64, 4096, 65_536] {
            let (mut own, mut peer) = (OwnKeys::default(), PeerKeys::default());
            // In the engine's format: an index and a variant.
            let key = |number: u32| ((number + 1) << 8) | (number.wrapping_mul(0x9E37_79B9) >> 24);
            for number in 0..count {
                own.insert(DEVICE, PD, key(number), registered(number), 4096);
                let serial = peer.ask(key(number));
                assert!(peer.answer(key(number), serial, Some(registered(number).rkey)));
            }
            let rounds = 2_000_000u32;
            let mut best = [f64::MAX; 2];
            for _ in 0..5 {
                for (which, best) in best.iter_mut().enumerate() {
                    let start = std::time::Instant::now();
                    let mut sum = 0u32;
                    for round in 0..rounds {
                        let key = key(round.wrapping_mul(2_654_435_761) % count);
                        let real = if which == 0 {
                            own.get(DEVICE, PD, key).map_or(0, |registered| registered.lkey)
                        } else {
                            match peer.get(key) {
                                Some(PeerKey::Real(real)) => real,
                                _ => 0,
                            }
                        };
                        sum = sum.wrapping_add(std::hint::black_box(real));
                    }
                    std::hint::black_box(sum);
                    *best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(rounds));
                }
            }
            println!("{count} keys: lkey {:.1} ns, rkey {:.1} ns each, the best of 5 runs", best[0], best[1]);
        }
    }
}
