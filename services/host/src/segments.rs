//! Named networks: an Ethernet segment and an RDMA segment of the same name, shared by all NICs attached to it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dma::MappedMemory;
use hca::names::SegmentId;
use vmxnet3::runner::{PlugError, SegmentThread};
use vmxnet3::tap::Tap;
use vmxnet3::{PortId, PortRules, SegmentConfig};

use crate::access::may_use;

/// Why a network can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// Its thread can't be started.
    #[error("The thread of segment {name} can't be started")]
    Start {
        /// Name of the segment.
        name: String,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The tap isn't the user's.
    #[error(
        "Tap {tap} may not be used by user {uid}: it is {whose}; make it with `ip tuntap add {tap} mode tap user {uid}`"
    )]
    Tap {
        /// Name of the interface.
        tap: String,
        /// The user.
        uid: u32,
        /// Description of its owner.
        whose: String,
    },
    /// The tap can't be opened.
    #[error("Tap {tap} can't be connected with segment {name}")]
    OpenTap {
        /// Name of the interface.
        tap: String,
        /// Name of the segment.
        name: String,
        /// The error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// All networks in use.
#[derive(Debug, Default)]
pub struct Segments {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    networks: BTreeMap<String, Weak<Network>>,
    /// Next segment number. Never reused: a queue pair of an old network must not reach a new one.
    next: u32,
}

/// One network; it ends when it is dropped by its last user.
pub struct Network {
    name: String,
    id: SegmentId,
    thread: SegmentThread<MappedMemory>,
    /// Taps with their ports.
    taps: Mutex<BTreeMap<String, Weak<Uplink>>>,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Network")
            .field("name", &self.name)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// A network's connection with a tap; it ends when it is dropped by its last user.
#[derive(Debug)]
pub struct Uplink {
    network: Arc<Network>,
    port: PortId,
    tap: String,
}

impl Drop for Uplink {
    fn drop(&mut self) {
        // If the thread is gone, so are its ports.
        let _ = self.network.thread.detach_port(self.port);
    }
}

impl Segments {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The network with a name, started if it isn't in use yet.
    ///
    /// # Errors
    /// When its thread can't be started.
    pub fn join(&self, name: &str) -> Result<Arc<Network>, SegmentError> {
        let mut state = self.state();
        if let Some(network) = state.networks.get(name).and_then(Weak::upgrade) {
            return Ok(network);
        }
        let thread = SegmentThread::start(SegmentConfig::new(name))
            .map_err(|source| SegmentError::Start { name: name.to_owned(), source })?;
        state.next += 1;
        let id = SegmentId(state.next);
        let network = Arc::new(Network { name: name.to_owned(), id, thread, taps: Mutex::default() });
        state.networks.retain(|_, network| network.strong_count() > 0);
        state.networks.insert(name.to_owned(), Arc::downgrade(&network));
        Ok(network)
    }

    /// Networks in use, by name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Network>> {
        self.state().networks.values().filter_map(Weak::upgrade).collect()
    }
}

impl Network {
    /// Name of the network, as configured.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its RDMA segment.
    #[must_use]
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// The Ethernet segment.
    #[must_use]
    pub fn ethernet(&self) -> &SegmentThread<MappedMemory> {
        &self.thread
    }

    /// Connects the network with a tap, or shares that connection.
    ///
    /// # Errors
    /// When the tap doesn't exist, isn't `uid`'s, or can't be opened.
    pub fn uplink(self: &Arc<Self>, tap: &str, uid: u32) -> Result<Arc<Uplink>, SegmentError> {
        check_owner(tap, uid)?;
        let mut taps = self.taps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(uplink) = taps.get(tap).and_then(Weak::upgrade) {
            return Ok(uplink);
        }
        let failed = |source| SegmentError::OpenTap { tap: tap.to_owned(), name: self.name.clone(), source };
        let port = Tap::open(tap).map_err(|error| failed(error.into()))?;
        let rules = PortRules { any_source: true, partial_checksums: true };
        let port = self
            .thread
            .attach_port(tap, Box::new(port), rules)
            .map_err(|error: PlugError| failed(error.into()))?;
        let uplink = Arc::new(Uplink { network: Arc::clone(self), port, tap: tap.to_owned() });
        taps.retain(|_, uplink| uplink.strong_count() > 0);
        taps.insert(tap.to_owned(), Arc::downgrade(&uplink));
        Ok(uplink)
    }

    /// Reports ports and their traffic.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let ports = self.thread.report().unwrap_or_default();
        let ports: serde_json::Map<String, serde_json::Value> = ports
            .into_iter()
            .map(|port| {
                let counters: BTreeMap<_, _> = port.counters.values().into_iter().collect();
                let learnt: Vec<String> = port.learnt.iter().map(ToString::to_string).collect();
                let mac = port.mac.map(|mac| mac.to_string());
                (port.name, serde_json::json!({ "mac": mac, "learnt": learnt, "counters": counters }))
            })
            .collect();
        serde_json::json!({ "rdma_segment": self.id.0, "ports": ports })
    }
}

impl Uplink {
    /// Name of the interface.
    #[must_use]
    pub fn tap(&self) -> &str {
        &self.tap
    }
}

/// Checks that a tap is the user's. The daemon may open every tap; a user may connect only taps that it could open itself.
fn check_owner(tap: &str, uid: u32) -> Result<(), SegmentError> {
    let refused = |whose: String| SegmentError::Tap { tap: tap.escape_debug().to_string(), uid, whose };
    let plain = (1..=15).contains(&tap.len())
        && tap != "."
        && tap != ".."
        && tap.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:".contains(&byte));
    if !plain {
        return Err(refused("no name of an interface".to_owned()));
    }
    let owner = match std::fs::read_to_string(format!("/sys/class/net/{tap}/owner")) {
        Ok(owner) => owner.trim().parse::<i64>().ok().and_then(|owner| u32::try_from(owner).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(refused("no tap, or not there".to_owned()));
        }
        Err(error) => return Err(refused(format!("of unknown ownership ({error})"))),
    };
    match owner {
        Some(owner) if may_use(uid, owner) => Ok(()),
        None if crate::access::is_administrator(uid) => Ok(()),
        Some(owner) => Err(refused(format!("user {owner}'s"))),
        None => Err(refused("nobody's in particular".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::{Segments, check_owner};

    #[test]
    fn a_name_is_one_network_as_long_as_somebody_uses_it() {
        let segments = Segments::default();
        let (a, b) = (segments.join("blue").unwrap(), segments.join("blue").unwrap());
        let other = segments.join("red").unwrap();
        assert_eq!((a.id(), segments.all().len()), (b.id(), 2));
        assert_ne!(a.id(), other.id());
        let old = a.id();
        drop((a, b));
        assert_ne!(segments.join("blue").unwrap().id(), old);
    }

    #[test]
    fn what_is_no_tap_of_the_user_is_refused_with_a_way_out() {
        for tap in ["lo", "nonexistent0", "../../etc", "", "a/b", "sixteencharslong"] {
            let error = check_owner(tap, 0).unwrap_err().to_string();
            assert!(error.contains("ip tuntap add"), "{error}");
        }
    }
}
