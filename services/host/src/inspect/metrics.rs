//! The daemon's metrics in Prometheus' text format.

use std::collections::BTreeMap;

use telemetry::metrics::{EncodeError, Family, encode};

use super::device;
use crate::engine::{DeviceView, LoopCounters};
use crate::function::rdma::RdmaFunction;
use crate::hw_counters::merged;
use crate::peer_messages::PeerMessagesReport;
use crate::registry::{NicInfo, Registry};
use crate::transport::{DirectoryReport, ENCRYPTED, FabricReport, SessionCounters};

/// Limit of queue pairs per device in metrics: a label per queue pair doesn't scale to thousands.
const QUEUE_PAIR_METRICS: usize = 256;

/// Names and values of labels.
type Labels<'a> = [(&'a str, &'a str)];

/// All metrics.
pub(crate) fn text(registry: &Registry) -> Result<String, EncodeError> {
    let mut families = Families::default();
    let view = registry.engine().call(|worker| worker.view()).ok();
    if let Some(view) = &view {
        families.add_engine(&view.counters);
        if let Some(fabric) = &view.fabric {
            families.add_fabric(fabric);
        }
        if let Some(directory) = &view.directory {
            families.add_cluster(directory);
            families.add_peer_messages(&directory.messages);
        }
    }
    // With root's rights: a client that may read metrics may read all of them.
    for (info, rdma, _) in registry.functions(0) {
        let of_nic = [("vm", info.key.vm.as_str()), ("device", info.key.name.as_str())];
        families.add_nic(&info, &rdma, &of_nic);
        if let Some(device) = rdma.device().and_then(|id| device(view.as_ref(), id)) {
            families.add_device(device, &of_nic);
        }
    }
    let families: Vec<Family> = families.0.into_values().collect();
    encode(&families, &[])
}

/// Metric families by name.
#[derive(Default)]
struct Families(BTreeMap<String, Family>);

impl Families {
    /// Adds a value; by its name's ending it is a counter or a gauge.
    fn add(&mut self, name: &str, help: &str, labels: &Labels<'_>, value: u64) {
        let family = self.0.entry(name.to_owned()).or_insert_with(|| {
            if name.ends_with("_total") { Family::counter(name, help) } else { Family::gauge(name, help) }
        });
        family.add_count(labels, value);
    }

    fn add_engine(&mut self, loops: &LoopCounters) {
        for (name, help, value) in [
            ("polls", "Rounds of the engine's loop.", loops.polls),
            ("empty_polls", "Rounds of the engine's loop that found nothing to do.", loops.empty_polls),
            ("sleeps", "Times the engine's thread went to sleep.", loops.sleeps),
            ("calls", "Register accesses and other calls that the engine's thread carried out.", loops.calls),
            ("trapped_doorbells", "Doorbells that cost their guest an exit.", loops.trapped_doorbells),
        ] {
            self.add(&format!("causeway_host_engine_{name}_total"), help, &[], value);
        }
    }

    fn add_fabric(&mut self, fabric: &FabricReport) {
        let encrypted = u64::from(fabric.encryption == ENCRYPTED);
        self.add(
            "causeway_host_fabric_encrypted",
            "Whether packets between hosts are encrypted.",
            &[],
            encrypted,
        );
        let sessions = fabric.sessions.iter().flat_map(SessionCounters::list);
        for (name, help, value) in fabric.counters.list().chain(sessions) {
            self.add(&format!("causeway_host_fabric_{name}_total"), help, &[], value);
        }
    }

    fn add_cluster(&mut self, cluster: &DirectoryReport) {
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        for (name, help, value) in [
            (
                "connected",
                "Whether the cluster service is followed at present.",
                u64::from(cluster.connected),
            ),
            ("outage_seconds", "How long the cluster service hasn't been followed.", cluster.outage_seconds),
            (
                "failures_total",
                "Connections to the cluster service that broke, and attempts to make one that failed.",
                cluster.failures,
            ),
            ("revision", "Revision of the cluster's state that is known here.", cluster.revision),
            ("hosts", "Hosts of the cluster.", count(cluster.hosts)),
            ("vms", "VMs of the cluster that run.", count(cluster.vms)),
            (
                "refused_old_epochs_total",
                "News of VMs in older epochs, passed over.",
                cluster.refused_old_epochs,
            ),
        ] {
            self.add(&format!("causeway_host_cluster_{name}"), help, &[], value);
        }
    }

    /// Adds metrics of messages of the migration protocol.
    fn add_peer_messages(&mut self, report: &PeerMessagesReport) {
        for (verb, counts) in [("sent", &report.sent), ("received", &report.received)] {
            let name = format!("causeway_host_migration_messages_{verb}_total");
            let help = format!(
                "Messages of the migration protocol {verb}, by path: between hosts directly or through the cluster service, or with the coordinator."
            );
            for (path, count) in counts.list() {
                self.add(&name, &help, &[("path", path)], count);
            }
        }
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        for (name, help, value) in [
            ("connections", "Direct connections with other daemons at present.", count(report.connections)),
            (
                "connections_established_total",
                "Direct connections with other daemons that were established.",
                report.connections_established,
            ),
            (
                "connection_attempts_failed_total",
                "Attempts to connect to other daemons that failed.",
                report.connection_attempts_failed,
            ),
            ("sent_bytes_total", "Bytes sent by direct connections with other daemons.", report.bytes_sent),
            (
                "received_bytes_total",
                "Bytes received by direct connections with other daemons.",
                report.bytes_received,
            ),
        ] {
            self.add(&format!("causeway_host_peer_{name}"), help, &[], value);
        }
        for (reason, count) in &report.connections_refused {
            let help = "Connections of other daemons that were refused, by reason.";
            self.add("causeway_host_peer_connections_refused_total", help, &[("reason", reason)], *count);
        }
        for (reason, count) in &report.messages_dropped {
            let help = "Messages of other daemons that were dropped, by reason.";
            self.add("causeway_host_peer_messages_dropped_total", help, &[("reason", reason)], *count);
        }
    }

    /// Adds what a NIC has without a device in the engine, too.
    fn add_nic(&mut self, info: &NicInfo, rdma: &RdmaFunction, of_nic: &Labels<'_>) {
        let functions = u64::from(info.connected.iter().all(|connected| *connected));
        self.add(
            "causeway_host_nic_connected",
            "Whether a monitor uses both functions of the NIC.",
            of_nic,
            functions,
        );
        for (name, value) in rdma.wire_counters() {
            let help = format!("Counter {name} of the NIC's plain RoCEv2 frames (transport wire).");
            self.add(&format!("causeway_host_wire_{name}_total"), &help, of_nic, value);
        }
    }

    fn add_device(&mut self, device: &DeviceView, of_nic: &Labels<'_>) {
        self.add(
            "causeway_host_doorbell_mode_switches_total",
            "Changes between doorbells in memory and trapped doorbells.",
            of_nic,
            device.doorbell_mode_switches,
        );
        self.add(
            "causeway_host_interrupts_total",
            "Interrupts sent to the guest.",
            of_nic,
            device.interrupts.0,
        );
        self.add(
            "causeway_host_memory_waits_total",
            "Times that something waited for memory of the guest that was still to come (post-copy).",
            of_nic,
            device.memory_waits,
        );
        if let Some(hca) = &device.hca {
            self.add_hca(device, hca, of_nic);
        }
    }

    /// Adds the counters of the HCA's port, the guest's objects, and its queue pairs up to [`QUEUE_PAIR_METRICS`].
    fn add_hca(&mut self, device: &DeviceView, hca: &hca::engine::DeviceReport, of_nic: &Labels<'_>) {
        let of_port = [of_nic, &[("port", "1")]].concat();
        for (name, value) in merged(hca.counters.list(), device.roce.as_ref()) {
            let help = format!("Linux's counter {name} of the port.");
            // Linux counts data in words of four bytes, the exporter in bytes.
            let bytes = if name.ends_with("_data") { value.saturating_mul(4) } else { value };
            self.add(&metric_name(name), &help, &of_port, bytes);
        }
        let objects = &hca.objects;
        for (name, value) in [
            ("queue_pairs", u64::from(objects.queue_pairs)),
            ("completion_queues", u64::from(objects.completion_queues)),
            ("memory_regions", u64::from(objects.memory_regions)),
            ("registered_bytes", objects.registered_bytes),
        ] {
            self.add(&format!("causeway_host_{name}"), "Objects that the guest has.", of_nic, value);
        }
        for qp in hca.queue_pairs.iter().take(QUEUE_PAIR_METRICS) {
            let qpn = qp.qpn.to_string();
            let of_qp = [of_nic, &[("qpn", qpn.as_str())]].concat();
            for (name, value) in qp.counters.list() {
                let help = format!("Counter {name} of a queue pair.");
                self.add(&format!("causeway_host_qp_{name}_total"), &help, &of_qp, value);
            }
            self.add_connection(device, qp.handle.0, &of_qp);
        }
    }

    /// Adds the counters of a queue pair's connection to another host, if it has one.
    fn add_connection(&mut self, device: &DeviceView, handle: u32, of_qp: &Labels<'_>) {
        let peer = device.peers.iter().find(|peer| peer.handle == handle);
        let Some(remote) = peer.and_then(|peer| peer.remote.as_ref()) else { return };
        for (name, value) in remote.verbs.iter().flat_map(|link| link.counters.list()) {
            let help = format!("Counter {name} of a queue pair that the host's RDMA device carries.");
            self.add(&format!("causeway_host_verbs_{name}_total"), &help, of_qp, value);
        }
        for (name, value) in remote.counters.iter().flat_map(|counters| counters.list()) {
            let help = format!("Counter {name} of a queue pair's connection to another host.");
            self.add(&format!("causeway_host_connection_{name}_total"), &help, of_qp, value);
        }
    }
}

/// The name that node_exporter gives a counter of `/sys/class/infiniband/*/ports/*/{counters,hw_counters}`.
fn metric_name(counter: &str) -> String {
    let name = match counter {
        "port_xmit_data" => "port_data_transmitted_bytes",
        "port_rcv_data" => "port_data_received_bytes",
        "port_xmit_packets" => "port_packets_transmitted",
        "port_rcv_packets" => "port_packets_received",
        other => other,
    };
    format!("node_infiniband_{name}_total")
}

#[cfg(test)]
mod tests {
    use super::metric_name;

    #[test]
    fn counters_have_the_names_of_the_usual_exporter() {
        assert_eq!(metric_name("port_xmit_data"), "node_infiniband_port_data_transmitted_bytes_total");
        assert_eq!(metric_name("rx_write_requests"), "node_infiniband_rx_write_requests_total");
    }
}
