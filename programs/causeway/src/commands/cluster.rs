//! `causeway cluster`: runs the cluster service, and queries it.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
use std::time::Duration;

use anyhow::Context as _;
use cluster::{Server, ServerConfig};
use control_api::cluster::ClusterError;
use control_api::cluster::proto::{Migration, Nic, Role, State};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::cluster::{AskArgs, ClusterCommand, ForgetArgs, ServeArgs};
use crate::output;

/// Executes the command.
pub fn cluster(command: &ClusterCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ClusterCommand::Serve(args) => serve(args, json),
        ClusterCommand::Status(args) => show_status(args, json),
        ClusterCommand::Hosts(args) => show(args, json, |state| json!(hosts_json(state)), hosts),
        ClusterCommand::Vms(args) => show(args, json, |state| json!(vms_json(state)), vms),
        ClusterCommand::Forget(args) => forget(args, json),
    }
}

/// Runs the service until a signal.
fn serve(args: &ServeArgs, json: bool) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("Signals can't be listened to")?;
    let several = args.etcd.client(args.listen)?;
    let config = ServerConfig {
        keys: args.keys.load()?,
        metrics: args.metrics,
        lease: Duration::from_secs(args.lease),
        switch_limit: Duration::from_millis(args.switch_limit),
        pins: args.pin.iter().map(|(vm, transport)| (vm.clone(), transport.name().to_owned())).collect(),
        mtu: args.mtu,
        sockets: args.sockets,
        ..ServerConfig::new(args.listen, args.state.clone().unwrap_or_default())
    };
    let server = match several {
        Some((etcd, candidate)) => Server::elected(&config, etcd, &candidate)?,
        None => Server::start(&config)?,
    };
    if json {
        let metrics = server.metrics().map(|address| address.to_string());
        output::print_json(&json!({ "listen": server.address().to_string(), "metrics": metrics }))?;
    }
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "The cluster service ends: hosts keep their last known state");
    }
    drop(server);
    Ok(())
}

/// Declares a host gone.
fn forget(args: &ForgetArgs, as_json: bool) -> anyhow::Result<()> {
    let lost = args.ask.keys.service(&args.ask.cluster)?.forget(&args.host)?;
    if as_json {
        return output::print_json(&json!({ "host": args.host, "lost": lost }));
    }
    let vms = match lost.len() {
        0 => "it had no VM".to_owned(),
        _ => format!("lost, and free to be started elsewhere: {}", lost.join(", ")),
    };
    output::print(&format!("Host {} is forgotten; {vms}\n", args.host))
}

fn show(
    args: &AskArgs,
    as_json: bool,
    machine: impl Fn(&State) -> Value,
    people: impl Fn(&State) -> String,
) -> anyhow::Result<()> {
    let state = args.keys.service(&args.cluster)?.state()?;
    if as_json { output::print_json(&machine(&state)) } else { output::print(&people(&state)) }
}

/// Prints the state and each instance's role. If no instance leads, prints only the instances.
fn show_status(args: &AskArgs, as_json: bool) -> anyhow::Result<()> {
    let service = args.keys.service(&args.cluster)?;
    let roles = service.roles()?;
    let state = service.state();
    let instances: Vec<Value> = roles.iter().map(|(name, role)| instance_json(name, role)).collect();
    let shown = match &state {
        Ok(state) => {
            let mut shown = status_json(state);
            shown["instances"] = json!(instances);
            shown
        }
        Err(_) => json!({ "instances": instances }),
    };
    let answered = roles.iter().any(|(_, role)| role.is_ok());
    if state.is_ok() || answered {
        if as_json { output::print_json(&shown)? } else { output::print(&output::tree(&shown))? }
    }
    state.map(drop).map_err(Into::into)
}

fn role_json(role: &Role) -> Value {
    let text = |text: &str| if text.is_empty() { Value::Null } else { json!(text) };
    json!({
        "leads": role.leads,
        "leader": text(&role.leader),
        "store": role.store,
        "store_place": role.store_place,
        "store_answers": role.store_answers,
        "store_error": text(&role.store_error),
        "term": role.term,
        "lease_milliseconds": role.lease_milliseconds,
        "terms_led": role.terms_led,
    })
}

fn instance_json(name: &str, role: &Result<Role, ClusterError>) -> Value {
    let mut shown = match role {
        Ok(role) => role_json(role),
        Err(error) => json!({ "error": error.to_string() }),
    };
    shown["address"] = json!(name);
    shown
}

/// Names by number.
struct Names {
    hosts: BTreeMap<u32, String>,
    vms: BTreeMap<u32, String>,
}

impl Names {
    fn of(state: &State) -> Self {
        let hosts = state.hosts.iter().map(|host| (host.id, host.name.clone())).collect();
        let vms = state.vms.iter().map(|vm| (vm.id, vm.name.clone())).collect();
        Self { hosts, vms }
    }

    fn host(&self, id: u32) -> String {
        self.hosts.get(&id).cloned().unwrap_or_else(|| format!("host {id}"))
    }

    fn vm(&self, id: u32) -> String {
        self.vms.get(&id).cloned().unwrap_or_else(|| format!("VM {id}"))
    }
}

/// Formats an address for users.
fn address(gid: &[u8]) -> String {
    let Ok(bytes) = <[u8; 16]>::try_from(gid) else { return "?".to_owned() };
    let address = Ipv6Addr::from(bytes);
    address.to_ipv4_mapped().map_or_else(|| address.to_string(), |address| address.to_string())
}

fn addresses(nic: &Nic) -> Vec<String> {
    nic.addresses.iter().map(|gid| address(gid)).collect()
}

fn hosts_json(state: &State) -> Vec<Value> {
    let vms = |id| state.vms.iter().filter(|vm| vm.host == id && vm.alive).count();
    state
        .hosts
        .iter()
        .map(|host| {
            json!({
                "id": host.id,
                "name": host.name,
                "address": host.fabric_address,
                "incarnation": host.incarnation,
                "heard": host.heard,
                "vms": vms(host.id),
            })
        })
        .collect()
}

fn vms_json(state: &State) -> Vec<Value> {
    let names = Names::of(state);
    state
        .vms
        .iter()
        .map(|vm| {
            let nics: Vec<Value> = vm
                .nics
                .iter()
                .map(|nic| json!({ "segment": nic.segment, "addresses": addresses(nic) }))
                .collect();
            let peers: Vec<String> = state
                .links
                .iter()
                .filter_map(|link| match vm.id {
                    id if id == link.vm => Some(names.vm(link.peer)),
                    id if id == link.peer => Some(names.vm(link.vm)),
                    _ => None,
                })
                .collect();
            json!({
                "id": vm.id,
                "name": vm.name,
                "host": names.host(vm.host),
                "epoch": vm.epoch,
                "state": if vm.alive { "running" } else { "lost" },
                "nics": nics,
                "peers": peers,
            })
        })
        .collect()
}

fn migration_json(migration: &Migration, names: &Names) -> Value {
    let moves: Vec<Value> = migration
        .moves
        .iter()
        .map(|moved| {
            json!({
                "vm": names.vm(moved.vm),
                "from": names.host(moved.from),
                "to": names.host(moved.to),
                "epoch": moved.epoch,
            })
        })
        .collect();
    let owed: Vec<String> = migration.owed.iter().map(|host| names.host(*host)).collect();
    let waits_for = (migration.waits_for != 0).then(|| names.vm(migration.waits_for));
    json!({
        "id": migration.id,
        "stage": migration.stage,
        "decision": migration.decision,
        "moves": moves,
        "kept_for": owed,
        "waits_for": waits_for,
    })
}

fn status_json(state: &State) -> Value {
    let names = Names::of(state);
    let settings = state.settings.clone().unwrap_or_default();
    let pins: BTreeMap<&str, &str> =
        settings.pins.iter().map(|pin| (pin.vm.as_str(), pin.transport.as_str())).collect();
    json!({
        "version": state.version,
        "store": state.role.as_ref().map(|role| &role.store),
        "leader": state.role.as_ref().map(|role| &role.leader),
        "term": state.role.as_ref().map(|role| role.term),
        "authenticated": state.authenticated,
        "uptime_seconds": state.uptime_seconds,
        "revision": state.revision,
        "watchers": state.watchers,
        "mtu": settings.mtu,
        "sockets": settings.sockets,
        "pins": pins,
        "hosts": state.hosts.len(),
        "hosts_heard": state.hosts.iter().filter(|host| host.heard).count(),
        "vms": state.vms.len(),
        "vms_running": state.vms.iter().filter(|vm| vm.alive).count(),
        "connected_pairs": state.links.len(),
        "migrations": state.migrations.iter().map(|migration| migration_json(migration, &names)).collect::<Vec<_>>(),
    })
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

fn hosts(state: &State) -> String {
    if state.hosts.is_empty() {
        return "No host has registered; start `causeway host --cluster` there\n".to_owned();
    }
    let mut rows = vec![row(&["NAME", "ADDRESS", "STATE", "STARTS", "VMS"])];
    for host in &state.hosts {
        let vms = state.vms.iter().filter(|vm| vm.host == host.id && vm.alive).count();
        rows.push(vec![
            host.name.clone(),
            host.fabric_address.clone(),
            if host.heard { "heard" } else { "silent" }.to_owned(),
            host.incarnation.to_string(),
            vms.to_string(),
        ]);
    }
    output::table(&rows)
}

fn vms(state: &State) -> String {
    if state.vms.is_empty() {
        return "The cluster has no VM; `causeway run --rdma` on a host of it starts one\n".to_owned();
    }
    let names = Names::of(state);
    let mut rows = vec![row(&["NAME", "ID", "HOST", "EPOCH", "STATE", "ADDRESSES"])];
    for vm in &state.vms {
        let of_nic = |nic: &Nic| format!("{}: {}", nic.segment, addresses(nic).join(" "));
        rows.push(vec![
            vm.name.clone(),
            vm.id.to_string(),
            names.host(vm.host),
            vm.epoch.to_string(),
            if vm.alive { "running" } else { "lost" }.to_owned(),
            vm.nics.iter().map(of_nic).collect::<Vec<_>>().join(", "),
        ]);
    }
    output::table(&rows)
}

#[cfg(test)]
mod tests {
    use control_api::cluster::proto;

    use super::{State, address, hosts, vms, vms_json};

    fn state() -> State {
        let mut gid = vec![0; 16];
        gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, 1]);
        let nics = vec![proto::Nic { segment: "s0".to_owned(), addresses: vec![gid], mac: None }];
        let vm = |id: u32, alive| proto::Vm {
            id,
            name: format!("vm{id}"),
            host: 1,
            epoch: 3,
            alive,
            nics: nics.clone(),
        };
        let host = proto::Host {
            id: 1,
            name: "h1".to_owned(),
            fabric_address: "10.77.0.1:4792".to_owned(),
            incarnation: 2,
            heard: true,
        };
        State {
            hosts: vec![host],
            vms: vec![vm(1, true), vm(2, false)],
            links: vec![proto::Link { vm: 1, peer: 2 }],
            ..State::default()
        }
    }

    #[test]
    fn hosts_and_vms_are_tables() {
        assert_eq!(
            hosts(&state()),
            "NAME  ADDRESS         STATE  STARTS  VMS\nh1    10.77.0.1:4792  heard  2       1\n"
        );
        assert_eq!(
            vms(&state()),
            "NAME  ID  HOST  EPOCH  STATE    ADDRESSES\nvm1   1   h1    3      running  s0: 10.0.0.1\nvm2   2   h1    3      lost     s0: 10.0.0.1\n"
        );
        assert_eq!(vms_json(&state())[1]["peers"][0], "vm1");
        assert_eq!(address(&[1; 3]), "?");
    }
}
