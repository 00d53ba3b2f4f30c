//! Reports of connections.

use std::net::SocketAddr;

use hca::names::{DeviceId, Gid, Qpn};

use super::pin::{self, TransportKind};
use super::{LinkReport, NOBODY, REFUSED, Transports};

/// The remote path of a queue pair, for reports.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ConnectionReport {
    /// Name of the transport.
    pub transport: &'static str,
    /// The peer's host, if the directory knows it.
    pub host: Option<SocketAddr>,
    /// Counters of the protocol, if this daemon implements it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<roce::Counters>,
    /// State of the connection at the host's RDMA device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbs: Option<LinkReport>,
    /// Why it doesn't use `verbs`, to which it is pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instead_of_verbs: Option<String>,
}

impl Transports {
    /// Report of a queue pair's connection.
    #[must_use]
    pub fn report(&self, device: DeviceId, qpn: Qpn) -> Option<ConnectionReport> {
        if let Some((host, link)) = self.verbs.report_of(device, qpn) {
            let transport = TransportKind::Verbs.name();
            return Some(ConnectionReport {
                transport,
                host,
                counters: None,
                verbs: Some(link),
                instead_of_verbs: None,
            });
        }
        let entry = self.connections.by_number(device, qpn.0)?;
        let kind = if entry.outside { TransportKind::Wire } else { TransportKind::Fabric };
        Some(ConnectionReport {
            transport: kind.name(),
            host: entry.host,
            counters: Some(*entry.connection.counters()),
            verbs: None,
            instead_of_verbs: self.instead.get(&entry.qp).cloned(),
        })
    }

    /// Counters of all connections of a device; `None`: it has no way to other hosts.
    #[must_use]
    pub fn device_counters(&self, device: DeviceId) -> Option<roce::Counters> {
        let has_way = self.nics.contains_key(&device) || self.wire.has(device);
        has_way.then(|| self.connections.counters(device))
    }

    /// Transport by which a device reaches a remote peer; `None`: none.
    #[must_use]
    pub fn reaches(&self, device: DeviceId, peer: Gid) -> Option<&'static str> {
        let owner = self.owner(device, peer);
        let way = match owner {
            Some(owner) => {
                self.directory.host(owner)?;
                let nic = self.nics.get(&device)?;
                if pin::is_verbs(self.directory.as_ref(), nic.vm, owner) {
                    return Some(if self.verbs.is_there() { TransportKind::Verbs.name() } else { REFUSED });
                }
                TransportKind::Fabric
            }
            None => self.wire.has(device).then_some(TransportKind::Wire)?,
        };
        let allowed = self
            .nics
            .get(&device)
            .map_or(Ok(()), |nic| pin::check(self.directory.as_ref(), nic.vm, owner.unwrap_or(NOBODY), way));
        Some(if allowed.is_ok() { way.name() } else { REFUSED })
    }
}
