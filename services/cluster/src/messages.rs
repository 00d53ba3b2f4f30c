//! Between the state and what travels.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use control_api::cluster::proto;
use nomad::coordinator::{Decision, MayRun, Stage};
use nomad::{HostId, Incarnation, VmId};

use crate::refusal::Refusal;
use crate::registry::{MAX_ADDRESSES, MAX_NICS, Registry, Speaker};
use crate::state::{Nic, State};

pub(crate) fn speaker(speaker: Option<proto::Speaker>) -> Result<Speaker, Refusal> {
    let speaker =
        speaker.ok_or_else(|| Refusal::Invalid("The message doesn't say which host speaks".to_owned()))?;
    Ok(Speaker { host: HostId(speaker.host), incarnation: Incarnation(speaker.incarnation) })
}

pub(crate) fn said(speaker: Speaker) -> proto::Speaker {
    proto::Speaker { host: speaker.host.0, incarnation: speaker.incarnation.0 }
}

pub(crate) fn socket_address(text: &str) -> Result<SocketAddr, Refusal> {
    text.parse().map_err(|_| {
        let text: String = text.chars().take(64).collect();
        Refusal::Invalid(format!("\"{}\" is no IP address with a port", text.escape_debug()))
    })
}

pub(crate) fn gid(bytes: &[u8]) -> Result<[u8; 16], Refusal> {
    bytes.try_into().map_err(|_| Refusal::Invalid(format!("An address has 16 bytes, not {}", bytes.len())))
}

pub(crate) fn nics(nics: Vec<proto::Nic>) -> Result<Vec<Nic>, Refusal> {
    // More than the registry allows isn't looked at.
    let nic = |nic: proto::Nic| -> Result<Nic, Refusal> {
        let mac = nic.mac.map(|mac| {
            <[u8; 6]>::try_from(mac.as_slice())
                .map_err(|_| Refusal::Invalid(format!("A MAC address has 6 bytes, not {}", mac.len())))
        });
        let addresses: BTreeSet<_> =
            nic.addresses.iter().take(MAX_ADDRESSES + 1).map(|bytes| gid(bytes)).collect::<Result<_, _>>()?;
        Ok(Nic { segment: nic.segment, addresses, mac: mac.transpose()? })
    };
    nics.into_iter().take(MAX_NICS + 1).map(nic).collect()
}

pub(crate) fn host(registry: &Registry, host: HostId) -> Option<proto::Host> {
    let about = registry.state().hosts.get(&host).filter(|about| !about.is_forgotten())?;
    let incarnation = registry.state().ledger.hosts.get(&host).copied().unwrap_or_default();
    Some(proto::Host {
        id: host.0,
        name: about.name.clone(),
        fabric_address: about.address.to_string(),
        incarnation: incarnation.0,
        heard: registry.has_lease(host),
    })
}

pub(crate) fn vm(state: &State, vm: VmId) -> Option<proto::Vm> {
    let (about, owner) = (state.vms.get(&vm)?, state.ledger.vms.get(&vm)?);
    let nic = |nic: &Nic| proto::Nic {
        segment: nic.segment.clone(),
        addresses: nic.addresses.iter().map(|address| address.to_vec()).collect(),
        mac: nic.mac.map(|mac| mac.to_vec()),
    };
    Some(proto::Vm {
        id: vm.0,
        name: about.name.clone(),
        host: owner.host.0,
        epoch: owner.epoch.0,
        alive: owner.alive,
        nics: about.nics.iter().map(nic).collect(),
    })
}

pub(crate) fn settings(registry: &Registry) -> proto::Settings {
    let settings = registry.state().settings;
    proto::Settings {
        mtu: settings.mtu,
        sockets: settings.sockets.into(),
        switch_milliseconds: registry.switch_ms(),
        pins: registry
            .pins()
            .iter()
            .map(|(vm, transport)| proto::Pin { vm: vm.clone(), transport: transport.clone() })
            .collect(),
    }
}

pub(crate) fn claimed(state: &State, name: &str, claimed: MayRun) -> proto::ClaimVmReply {
    use proto::claim_vm_reply::Answer;
    let (answer, epoch, host) = match claimed {
        MayRun::Undecided(_) => (Answer::Undecided, 0, String::new()),
        MayRun::Here(epoch) => (Answer::Here, epoch.0, String::new()),
        MayRun::Lost => (Answer::Lost, 0, String::new()),
        MayRun::Elsewhere(owner) => (Answer::Elsewhere, owner.epoch.0, state.host_name(owner.host)),
        MayRun::Ended => (Answer::Elsewhere, 0, String::new()),
    };
    let vm = state.vm(name).map_or(0, |(vm, _)| vm.0);
    proto::ClaimVmReply { answer: answer.into(), epoch, host, vm }
}

fn stage(stage: Option<Stage>) -> &'static str {
    match stage {
        Some(Stage::Reserving) => "reserving",
        Some(Stage::Copying) => "copying",
        Some(Stage::Queued) => "queued",
        Some(Stage::Switching) => "switching",
        Some(Stage::Settling) => "telling",
        None => "",
    }
}

/// All hosts.
pub(crate) fn hosts(registry: &Registry) -> Vec<proto::Host> {
    registry.state().hosts.keys().filter_map(|id| host(registry, *id)).collect()
}

/// All VMs.
pub(crate) fn vms(state: &State) -> Vec<proto::Vm> {
    state.vms.keys().filter_map(|id| vm(state, *id)).collect()
}

/// Everything but what isn't the registry's.
pub(crate) fn state(registry: &Registry) -> proto::State {
    let state = registry.state();
    proto::State {
        revision: state.revision,
        shown_revision: 0,
        settings: Some(settings(registry)),
        hosts: hosts(registry),
        vms: vms(state),
        links: state.ledger.links.iter().map(|(a, b)| proto::Link { vm: a.0, peer: b.0 }).collect(),
        migrations: state
            .ledger
            .migrations
            .iter()
            .map(|(id, stored)| proto::Migration {
                id: id.0,
                moves: stored
                    .moves
                    .iter()
                    .map(|moved| proto::Move {
                        vm: moved.vm.0,
                        from: moved.from.0,
                        to: moved.to.0,
                        epoch: moved.epoch.0,
                    })
                    .collect(),
                stage: stage(registry.stage(*id)).to_owned(),
                decision: match stored.decision {
                    Some(Decision::Committed) => "committed",
                    Some(Decision::Aborted) => "aborted",
                    None => "",
                }
                .to_owned(),
                owed: stored.owed.iter().flat_map(|owed| owed.keys()).map(|host| host.0).collect(),
                waits_for: registry.waits_for(*id).map_or(0, |vm| vm.0),
            })
            .collect(),
        ..proto::State::default()
    }
}
