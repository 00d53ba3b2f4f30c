//! Hosts: registration and leases.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use control_api::names::check_name;
use nomad::coordinator::Event as CoordinatorEvent;
use nomad::{Body, HostId, Incarnation, Message, Node, VmId};

use super::{MAX_HOSTS, MAX_WAITING_MONITORS, Registry, Speaker};
use crate::refusal::Refusal;
use crate::state::{AboutHost, Change};

impl Registry {
    /// A host's daemon has started (`incarnation` 0), or is back with the incarnation of its earlier registration. VMs that an earlier start of it
    /// ran are lost: it has forgotten them.
    ///
    /// # Errors
    /// When the name or address can't be its, or it was started again since.
    pub fn register_host(
        &mut self,
        name: &str,
        address: SocketAddr,
        incarnation: Incarnation,
        now: Instant,
    ) -> Result<Speaker, Refusal> {
        self.resync(now)?;
        check_name("host", name).map_err(|error| Refusal::Invalid(error.to_string()))?;
        if address.ip().is_unspecified() || address.ip().is_multicast() || address.port() == 0 {
            return Err(Refusal::Invalid(format!(
                "{address} is no address at which host {name} can be reached; give --fabric-address another"
            )));
        }
        let hosts = &self.state().hosts;
        let at_address =
            hosts.at(address).filter_map(|host| hosts.get(&host)).find(|about| about.name != name);
        if let Some(other) = at_address {
            return Err(Refusal::Conflict(format!(
                "{address} is host {}'s; give host {name} another --fabric-address",
                other.name
            )));
        }
        let known = self.state().host(name).map(|(host, about)| (host, about.address));
        let Some((host, before)) = known else {
            if self.state().hosts.len() >= MAX_HOSTS {
                return Err(Refusal::TooMany(format!(
                    "Host {name} can't be registered: the cluster has {MAX_HOSTS} hosts"
                )));
            }
            let last = self.state().hosts.keys().next_back().map_or(0, |host| host.0);
            return self.begin_host(HostId(last + 1), name, address, incarnation.0.max(1), now);
        };
        let current = self.state().ledger.hosts.get(&host).copied().unwrap_or_default();
        if incarnation.0 == 0 {
            // Two daemons with one name would take it from each other for ever.
            if before != address && self.has_lease(host) {
                return Err(Refusal::Conflict(format!(
                    "Host {name} is at {before} and was heard of lately; give this one another --name, or wait {} s",
                    self.lease.as_secs().max(1)
                )));
            }
            return self.begin_host(host, name, address, current.0 + 1, now);
        }
        if incarnation < current {
            return Err(Refusal::old_start(name, incarnation, current));
        }
        if incarnation > current || before != address {
            return self.begin_host(host, name, address, incarnation.0, now);
        }
        self.renew(host, now);
        Ok(Speaker { host, incarnation })
    }

    fn begin_host(
        &mut self,
        host: HostId,
        name: &str,
        address: SocketAddr,
        incarnation: u64,
        now: Instant,
    ) -> Result<Speaker, Refusal> {
        let incarnation = Incarnation(incarnation);
        let hello = Message { from: Node::Host(host), incarnation, to: Node::Coordinator, body: Body::Hello };
        let mut actions = Vec::new();
        self.coordinator.step(CoordinatorEvent::Message(hello), &mut actions);
        let about = AboutHost { name: name.to_owned(), address };
        self.stage_actions(vec![Change::Host(host, about)], actions, now);
        self.reported.remove(&host);
        self.waiting.remove(&host);
        self.renew(host, now);
        tracing::info!(host = name, %address, incarnation = incarnation.0, "A host has started");
        Ok(Speaker { host, incarnation })
    }

    /// A host is gone for good, as its user says. Its VMs are lost, and may be started elsewhere; migrations end without it. Should it come back, the coordinator notifies it how those were
    /// decided. Returns the names of the VMs that are lost by it.
    ///
    /// # Errors
    /// When there is no such host, or it is heard of.
    pub fn forget_host(&mut self, name: &str, now: Instant) -> Result<Vec<String>, Refusal> {
        self.resync(now)?;
        let Some((host, _)) = self.state().host(name).filter(|(_, about)| !about.is_forgotten()) else {
            let shown: String = name.chars().take(64).collect();
            return Err(Refusal::Missing(format!(
                "The cluster has no host {}. See 'causeway cluster hosts'",
                shown.escape_debug()
            )));
        };
        if self.has_lease(host) {
            return Err(Refusal::Conflict(format!(
                "Host {name} can't be forgotten: it was heard of in the last {} s, so its VMs may run. End its daemon and its VMs, and try again then",
                self.lease.as_secs().max(1)
            )));
        }
        let alive = |registry: &Self| registry.state().ledger.vms.alive_on(host).collect::<Vec<VmId>>();
        let before = alive(self);
        let mut actions = Vec::new();
        let forgotten = self.coordinator.forget(host, &mut actions);
        forgotten.map_err(|refused| Refusal::of(&refused, self.state()))?;
        self.stage_actions(vec![Change::Host(host, AboutHost::forgotten(name))], actions, now);
        self.reported.remove(&host);
        self.silent.remove(&host);
        let after = alive(self);
        let lost = before.iter().filter(|vm| !after.contains(vm)).map(|vm| self.state().vm_name(*vm));
        let lost: Vec<String> = lost.collect();
        tracing::warn!(host = name, ?lost, "A host is forgotten, as its user says");
        Ok(lost)
    }

    /// A host is alive.
    ///
    /// # Errors
    /// When it isn't registered, or was started again since.
    pub fn heartbeat(&mut self, speaker: Speaker, now: Instant) -> Result<(), Refusal> {
        self.check(speaker, now)?;
        self.renew(speaker.host, now);
        Ok(())
    }

    /// Monitors of a host that wait for VMs, in place of those reported before.
    ///
    /// # Errors
    /// As [`Registry::heartbeat`], and when there are too many, or one can't be.
    pub fn set_waiting(
        &mut self,
        speaker: Speaker,
        waiting: BTreeMap<String, SocketAddr>,
        now: Instant,
    ) -> Result<(), Refusal> {
        self.check(speaker, now)?;
        if waiting.len() > MAX_WAITING_MONITORS {
            return Err(Refusal::TooMany(format!(
                "{} monitors that wait for VMs are too many; a host can have {MAX_WAITING_MONITORS}",
                waiting.len()
            )));
        }
        for (vm, address) in &waiting {
            check_name("VM", vm).map_err(|error| Refusal::Invalid(error.to_string()))?;
            if address.ip().is_unspecified() || address.port() == 0 {
                return Err(Refusal::Invalid(format!("No source of VM {vm} can connect to {address}")));
            }
        }
        self.waiting.insert(speaker.host, waiting);
        Ok(())
    }

    /// Where a monitor waits for a VM on a host.
    ///
    /// # Errors
    /// When none does, or there is no such host.
    pub fn find_waiting(&self, vm: &str, host: &str) -> Result<SocketAddr, Refusal> {
        let Some((id, _)) = self.state().host(host) else {
            let known = self.state().hosts.values().filter(|about| !about.is_forgotten());
            let names: Vec<&str> = known.map(|about| about.name.as_str()).collect();
            return Err(Refusal::Missing(format!(
                "The cluster has no host {host}; its hosts are: {}",
                names.join(", ")
            )));
        };
        if !self.has_lease(id) {
            return Err(Refusal::Missing(format!(
                "Host {host} isn't heard of: whether a monitor waits there for VM {vm} isn't known"
            )));
        }
        let waits = self.waiting.get(&id).and_then(|waiting| waiting.get(vm));
        waits.copied().ok_or_else(|| {
            Refusal::Missing(format!(
                "No monitor waits on host {host} for VM {vm}: start one there, causeway run … --name {vm} --incoming ADDRESS:PORT"
            ))
        })
    }

    pub(super) fn renew(&mut self, host: HostId, now: Instant) {
        self.leases.renew(host, now + self.lease);
        self.newly_silent.remove(&host);
        if self.silent.remove(&host) {
            tracing::info!(host = self.state().host_name(host), "A host is heard of again");
        }
    }
}
