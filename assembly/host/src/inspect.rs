//! The daemon's live tree, and its metrics.
//!
//! ```text
//! daemon/{version,pid,engine/...}
//! neighbours/GROUP/N/{slot,vm,uid,state,epoch_by_peer}     administrators only
//! segments/NAME/ports/...
//! vms/VM/nics/NIC/{mac,segment,rdma/{doorbells,queue_pairs/HANDLE/...},ethernet/...}
//! ```

use std::collections::BTreeMap;

use hca::names::DeviceId;
use serde_json::{Map, Value, json};
use telemetry::metrics::{EncodeError, Family, encode};

use crate::engine::{DeviceView, EngineView};
use crate::hw_counters::merged;
use crate::identity::mac_text;
use crate::neighbours::Neighbours;
use crate::peer_messages::PeerMessagesReport;
use crate::registry::Registry;
use crate::transport::{ENCRYPTED, SessionCounters};

/// Limit of queue pairs per device in metrics: a label per queue pair doesn't scale to thousands.
const QUEUE_PAIR_METRICS: usize = 256;

/// The tree for user `uid`.
pub(crate) fn tree(registry: &Registry, neighbours: &Neighbours, uid: u32) -> Value {
    let functions = registry.functions(uid);
    let view = registry.engine().call(|worker| worker.view()).ok();
    let mut vms: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
    for (info, rdma, ethernet) in functions {
        let device = rdma.device().and_then(|id| device(view.as_ref(), id));
        let mut shown = rdma.inspect();
        if let (Some(place), Some(Value::Object(more))) = (shown.as_object_mut(), device.map(device_tree)) {
            place.extend(more);
        }
        let nic = json!({
            "mac": mac_text(info.mac),
            "segment": info.segment,
            "tap": info.tap,
            "mtu": info.mtu,
            "uid": info.uid,
            "sockets": info.functions,
            "ethernet": ethernet.inspect(),
            "rdma": shown,
        });
        vms.entry(info.key.vm).or_default().insert(info.key.name, nic);
    }
    let vms: Map<String, Value> = vms.into_iter().map(|(vm, nics)| (vm, json!({ "nics": nics }))).collect();
    let segments: Map<String, Value> = registry
        .segments()
        .all()
        .into_iter()
        .filter(|network| {
            crate::access::is_administrator(uid) || vms.values().any(|vm| uses(vm, network.name()))
        })
        .map(|network| (network.name().to_owned(), network.inspect()))
        .collect();
    json!({
        "daemon": {
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "engine": view.as_ref().map(|view| view.counters),
            "verbs": view.as_ref().and_then(|view| view.verbs.clone()),
            "cluster": view.as_ref().and_then(|view| view.directory.clone()),
            "fabric": view.and_then(|view| view.fabric),
        },
        // Only administrators may read which VMs a VM permits.
        "neighbours": crate::access::is_administrator(uid).then(|| neighbours.inspect()),
        "segments": segments,
        "vms": vms,
    })
}

fn uses(vm: &Value, segment: &str) -> bool {
    let nics = vm.get("nics").and_then(Value::as_object);
    nics.is_some_and(|nics| nics.values().any(|nic| nic.get("segment").is_some_and(|name| name == segment)))
}

fn device(view: Option<&EngineView>, id: DeviceId) -> Option<&DeviceView> {
    view?.devices.iter().find(|device| device.id == id.0)
}

fn device_tree(device: &DeviceView) -> Value {
    let mut queue_pairs = Map::new();
    for qp in device.hca.iter().flat_map(|hca| &hca.queue_pairs) {
        let peer = device.peers.iter().find(|peer| peer.handle == qp.handle.0);
        let shown = json!({
            "qpn": qp.qpn,
            "kind": qp.kind,
            "state": qp.state,
            "peer": peer.map(|peer| json!({ "gid": peer.gid, "qpn": peer.qpn })),
            "transport": peer.map(|peer| peer.transport),
            "connection": peer.and_then(|peer| peer.remote.as_ref()).map(|remote| json!({
                "host": remote.host.map(|host| host.to_string()),
                "counters": remote.counters,
                "verbs": remote.verbs,
                "instead_of_verbs": remote.instead_of_verbs,
            })),
            "counters": counters(qp.counters.list()),
        });
        queue_pairs.insert(qp.handle.to_string(), shown);
    }
    let gids: Map<String, Value> = device
        .hca
        .iter()
        .flat_map(|hca| &hca.gids)
        .map(|(index, gid)| (index.to_string(), Value::from(gid.as_str())))
        .collect();
    json!({
        "doorbells": device.doorbells,
        "doorbell_mode_switches": device.doorbell_mode_switches,
        "doorbell_mode_failures": device.doorbell_mode_failures,
        "interrupts": { "sent": device.interrupts.0, "nobody_listened": device.interrupts.1 },
        "driver": device.function,
        "late_memory": { "still_to_come": device.late_memory, "waits": device.memory_waits },
        "bus_master": device.hca.as_ref().map(|hca| hca.enabled),
        "gids": gids,
        "objects": device.hca.as_ref().map(|hca| hca.objects),
        "limits": device.hca.as_ref().map(|hca| hca.limits),
        "counters": device.hca.as_ref().map(|hca| counters(merged(hca.counters.list(), device.roce.as_ref()))),
        "queue_pairs": queue_pairs,
    })
}

fn counters(list: Vec<(&'static str, u64)>) -> Value {
    Value::Object(list.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value))).collect())
}

/// The subtree at a path like `vms/web1/nics`.
pub(crate) fn below<'a>(tree: &'a Value, path: &str) -> Result<&'a Value, String> {
    let mut at = tree;
    for step in path.split('/').filter(|step| !step.is_empty()) {
        let next = match at {
            Value::Object(map) => map.get(step),
            Value::Array(items) => step.parse::<usize>().ok().and_then(|index| items.get(index)),
            _ => None,
        };
        at = next.ok_or_else(|| {
            let known = match at {
                Value::Object(map) if !map.is_empty() => {
                    map.keys().take(20).cloned().collect::<Vec<_>>().join(", ")
                }
                _ => "nothing".to_owned(),
            };
            format!("There is no \"{}\" in the daemon's tree; there is {known}", step.escape_debug())
        })?;
    }
    Ok(at)
}

/// All metrics in Prometheus' text format.
pub(crate) fn metrics(registry: &Registry) -> Result<String, EncodeError> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut add = |name: &str, help: &str, labels: &[(&str, &str)], value: u64| {
        let family = families.entry(name.to_owned()).or_insert_with(|| {
            if name.ends_with("_total") { Family::counter(name, help) } else { Family::gauge(name, help) }
        });
        family.add_count(labels, value);
    };
    let view = registry.engine().call(|worker| worker.view()).ok();
    if let Some(view) = &view {
        let loops = &view.counters;
        for (name, help, value) in [
            ("polls", "Rounds of the engine's loop.", loops.polls),
            ("empty_polls", "Rounds of the engine's loop that found nothing to do.", loops.empty_polls),
            ("sleeps", "Times the engine's thread went to sleep.", loops.sleeps),
            ("calls", "Register accesses and other calls that the engine's thread carried out.", loops.calls),
            ("trapped_doorbells", "Doorbells that cost their guest an exit.", loops.trapped_doorbells),
        ] {
            add(&format!("causeway_host_engine_{name}_total"), help, &[], value);
        }
    }
    if let Some(fabric) = view.as_ref().and_then(|view| view.fabric.as_ref()) {
        let encrypted = u64::from(fabric.encryption == ENCRYPTED);
        add("causeway_host_fabric_encrypted", "Whether packets between hosts are encrypted.", &[], encrypted);
        let sessions = fabric.sessions.iter().flat_map(SessionCounters::list);
        for (name, help, value) in fabric.counters.list().chain(sessions) {
            add(&format!("causeway_host_fabric_{name}_total"), help, &[], value);
        }
    }
    if let Some(cluster) = view.as_ref().and_then(|view| view.directory.as_ref()) {
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
            add(&format!("causeway_host_cluster_{name}"), help, &[], value);
        }
    }
    if let Some(cluster) = view.as_ref().and_then(|view| view.directory.as_ref()) {
        messages(&cluster.messages, &mut add);
    }
    // With root's rights: a client that may read metrics may read all of them.
    for (info, rdma, _) in registry.functions(0) {
        let labels = [("vm", info.key.vm.as_str()), ("device", info.key.name.as_str()), ("port", "1")];
        let of_nic = &labels[..2];
        let functions = u64::from(info.connected.iter().all(|connected| *connected));
        add(
            "causeway_host_nic_connected",
            "Whether a monitor uses both functions of the NIC.",
            of_nic,
            functions,
        );
        for (name, value) in rdma.wire_counters() {
            let help = format!("Counter {name} of the NIC's plain RoCEv2 frames (transport wire).");
            add(&format!("causeway_host_wire_{name}_total"), &help, of_nic, value);
        }
        let Some(device) = rdma.device().and_then(|id| device(view.as_ref(), id)) else { continue };
        add(
            "causeway_host_doorbell_mode_switches_total",
            "Changes between doorbells in memory and trapped doorbells.",
            of_nic,
            device.doorbell_mode_switches,
        );
        add("causeway_host_interrupts_total", "Interrupts sent to the guest.", of_nic, device.interrupts.0);
        add(
            "causeway_host_memory_waits_total",
            "Times that something waited for memory of the guest that was still to come (post-copy).",
            of_nic,
            device.memory_waits,
        );
        let Some(hca) = &device.hca else { continue };
        for (name, value) in merged(hca.counters.list(), device.roce.as_ref()) {
            let help = format!("Linux's counter {name} of the port.");
            // Linux counts data in words of four bytes, the exporter in bytes.
            let bytes = if name.ends_with("_data") { value.saturating_mul(4) } else { value };
            add(&metric_name(name), &help, &labels, bytes);
        }
        let objects = &hca.objects;
        for (name, value) in [
            ("queue_pairs", u64::from(objects.queue_pairs)),
            ("completion_queues", u64::from(objects.completion_queues)),
            ("memory_regions", u64::from(objects.memory_regions)),
            ("registered_bytes", objects.registered_bytes),
        ] {
            add(&format!("causeway_host_{name}"), "Objects that the guest has.", of_nic, value);
        }
        for qp in hca.queue_pairs.iter().take(QUEUE_PAIR_METRICS) {
            let qpn = qp.qpn.to_string();
            let labels = [of_nic[0], of_nic[1], ("qpn", qpn.as_str())];
            for (name, value) in qp.counters.list() {
                let help = format!("Counter {name} of a queue pair.");
                add(&format!("causeway_host_qp_{name}_total"), &help, &labels, value);
            }
            let peer = device.peers.iter().find(|peer| peer.handle == qp.handle.0);
            let remote = peer.and_then(|peer| peer.remote.as_ref());
            for (name, value) in
                remote.and_then(|remote| remote.verbs.as_ref()).iter().flat_map(|link| link.counters.list())
            {
                let help = format!("Counter {name} of a queue pair that the host's RDMA device carries.");
                add(&format!("causeway_host_verbs_{name}_total"), &help, &labels, value);
            }
            for (name, value) in
                remote.and_then(|remote| remote.counters.as_ref()).iter().flat_map(|counters| counters.list())
            {
                let help = format!("Counter {name} of a queue pair's connection to another host.");
                add(&format!("causeway_host_connection_{name}_total"), &help, &labels, value);
            }
        }
    }
    let families: Vec<Family> = families.into_values().collect();
    encode(&families, &[])
}

/// Metrics of messages of the migration protocol.
fn messages(report: &PeerMessagesReport, add: &mut impl FnMut(&str, &str, &[(&str, &str)], u64)) {
    for (verb, counts) in [("sent", &report.sent), ("received", &report.received)] {
        let name = format!("causeway_host_migration_messages_{verb}_total");
        let help = format!(
            "Messages of the migration protocol {verb}, by path: between hosts directly or through the cluster service, or with the coordinator."
        );
        for (path, count) in counts.list() {
            add(&name, &help, &[("path", path)], count);
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
        add(&format!("causeway_host_peer_{name}"), help, &[], value);
    }
    for (reason, count) in &report.connections_refused {
        let help = "Connections of other daemons that were refused, by reason.";
        add("causeway_host_peer_connections_refused_total", help, &[("reason", reason)], *count);
    }
    for (reason, count) in &report.messages_dropped {
        let help = "Messages of other daemons that were dropped, by reason.";
        add("causeway_host_peer_messages_dropped_total", help, &[("reason", reason)], *count);
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
    use super::{below, metric_name};
    use serde_json::json;

    #[test]
    fn a_path_leads_down_and_a_wrong_one_says_what_there_is() {
        let tree = json!({"vms": {"a": {"nics": [1, 2]}}, "daemon": {}});
        assert_eq!(below(&tree, "vms/a/nics/1").unwrap(), &json!(2));
        assert_eq!(below(&tree, "").unwrap(), &tree);
        let error = below(&tree, "vm").unwrap_err();
        assert!(error.contains("daemon, vms"), "{error}");
    }

    #[test]
    fn counters_have_the_names_of_the_usual_exporter() {
        assert_eq!(metric_name("port_xmit_data"), "node_infiniband_port_data_transmitted_bytes_total");
        assert_eq!(metric_name("rx_write_requests"), "node_infiniband_rx_write_requests_total");
    }
}
