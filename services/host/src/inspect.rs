//! The daemon's live tree; [`metrics`] has its metrics.
//!
//! ```text
//! daemon/{version,pid,engine/...}
//! neighbours/GROUP/N/{slot,vm,uid,state,epoch_by_peer}     administrators only
//! segments/NAME/ports/...
//! vms/VM/nics/NIC/{mac,segment,rdma/{doorbells,queue_pairs/HANDLE/...},ethernet/...}
//! ```

pub(crate) mod metrics;

use std::collections::BTreeMap;

use hca::names::DeviceId;
use serde_json::{Map, Value, json};

use crate::engine::{DeviceView, EngineView};
use crate::hw_counters::merged;
use crate::identity::mac_text;
use crate::neighbours::Neighbours;
use crate::registry::Registry;

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

#[cfg(test)]
mod tests {
    use super::below;
    use serde_json::json;

    #[test]
    fn a_path_leads_down_and_a_wrong_one_says_what_there_is() {
        let tree = json!({"vms": {"a": {"nics": [1, 2]}}, "daemon": {}});
        assert_eq!(below(&tree, "vms/a/nics/1").unwrap(), &json!(2));
        assert_eq!(below(&tree, "").unwrap(), &tree);
        let error = below(&tree, "vm").unwrap_err();
        assert!(error.contains("daemon, vms"), "{error}");
    }
}
