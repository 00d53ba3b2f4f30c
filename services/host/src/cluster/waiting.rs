//! Monitors of this host that wait for a VM to migrate here.

use std::collections::btree_map::Entry;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use control_api::cluster::proto;
use control_api::names::check_name;

use super::ClusterDirectory;

/// A waiting monitor; the cluster knows it until this is dropped.
#[derive(Debug)]
pub(crate) struct Waits {
    directory: Arc<ClusterDirectory>,
    vm: String,
    /// Address reported to others.
    pub(crate) address: SocketAddr,
}

impl Waits {
    /// Registers a monitor that waits for a VM. The error is a sentence why the cluster isn't notified.
    pub(crate) fn begin(
        directory: &Arc<ClusterDirectory>,
        vm: &str,
        address: SocketAddr,
    ) -> Result<Self, String> {
        check_name("VM", vm).map_err(|error| error.to_string())?;
        let own = directory.address.ip();
        let ip = if address.ip().is_unspecified() { own } else { address.ip() };
        if address.port() == 0 {
            return Err(format!("{address} has no port that a source could connect to"));
        }
        if ip.is_loopback() && !own.is_loopback() {
            return Err(format!("Other hosts can't reach {address}, where a monitor waits for VM {vm}"));
        }
        let address = SocketAddr::new(ip, address.port());
        let mut waiting = directory.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.entry(vm.to_owned()) {
            Entry::Occupied(other) => {
                return Err(format!("A monitor waits here for VM {vm} already, at {}", other.get()));
            }
            Entry::Vacant(place) => place.insert(address),
        };
        drop(waiting);
        directory.changed.notify_one();
        tracing::info!(vm, %address, "A monitor waits for a VM to come");
        Ok(Self { directory: Arc::clone(directory), vm: vm.to_owned(), address })
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut waiting = self.directory.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.remove(&self.vm);
        drop(waiting);
        self.directory.changed.notify_one();
        tracing::info!(vm = self.vm, "No monitor waits for this VM any more");
    }
}

impl ClusterDirectory {
    /// All waiting monitors, for the service.
    pub(super) fn waiting(&self) -> Vec<proto::Waiting> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |(vm, address): (&String, &SocketAddr)| proto::Waiting {
            vm: vm.clone(),
            address: address.to_string(),
        };
        waiting.iter().map(one).collect()
    }
}
