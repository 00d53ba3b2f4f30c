//! A monitor's part in its VM's migration.

use std::time::Duration;

use control_api::cluster::{ClusterError, proto as cluster_proto};
use control_api::host::proto::MoveVmReply;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use tonic::Status;

use crate::cluster::ClusterDirectory;
use crate::engine::EngineGone;
use crate::migration::manager::{MoverHandle, Phase, Said};
use crate::registry::Registry;

/// An answer comes after so long at the latest.
const LONGEST: Duration = Duration::from_secs(10);

/// One step; what the monitor is to do.
pub(super) async fn step(
    cluster: &ClusterDirectory,
    registry: &Registry,
    vm: &str,
    step: Step,
) -> Result<MoveVmReply, Status> {
    let none =
        || Status::unavailable("This daemon doesn't take part in migrations: it is starting or ending");
    let mover = cluster.mover().ok_or_else(none)?;
    let ended = |phase: &Phase| phase.is_end();
    let phase = match step {
        Step::Begin(host) => return begin(cluster, registry, mover, vm, host).await,
        Step::Converged(_) => {
            mover.said(vm, Said::Converged);
            wait(mover, vm, |phase| ended(phase) || *phase == Phase::Stop).await
        }
        Step::Stopped(_) => {
            mover.said(vm, Said::Stopped);
            mover.phases().get(vm)
        }
        Step::Arrived(_) => {
            mover.said(vm, Said::Arrived);
            wait(mover, vm, ended).await
        }
        Step::Broken(_) => {
            cancel(cluster, mover, vm).await;
            wait(mover, vm, ended).await
        }
        Step::Wait(_) => wait(mover, vm, ended).await,
    };
    Ok(reply(phase))
}

async fn wait(mover: &MoverHandle, vm: &str, wanted: impl Fn(&Phase) -> bool) -> Phase {
    let waited = tokio::time::timeout(LONGEST, mover.phases().wait(vm, wanted)).await;
    waited.unwrap_or_else(|_| mover.phases().get(vm))
}

fn reply(phase: Phase) -> MoveVmReply {
    let (state, reason) = match phase {
        Phase::Idle => (State::Stays, "no migration of it is under way".to_owned()),
        Phase::Begun | Phase::Handing | Phase::Awaited(_) => (State::Pending, String::new()),
        Phase::Copying(_) => (State::Copy, String::new()),
        Phase::Stop => (State::Stop, String::new()),
        Phase::Runs => (State::Runs, String::new()),
        Phase::Moved => (State::Moved, String::new()),
        Phase::Stays(reason) => (State::Stays, reason),
        Phase::Failed => (State::Failed, String::new()),
    };
    MoveVmReply { state: state.into(), reason }
}

/// Asks the cluster service for a migration, and waits until the VM may be copied.
async fn begin(
    cluster: &ClusterDirectory,
    registry: &Registry,
    mover: &MoverHandle,
    vm: &str,
    host: String,
) -> Result<MoveVmReply, Status> {
    for (shared, rdma) in registry.rdma_functions(vm) {
        let name = &shared.key;
        let Some(device) = rdma.device() else {
            return Err(Status::failed_precondition(format!(
                "{name} can't move: its monitor isn't connected"
            )));
        };
        let movable = registry.engine().call(move |worker| worker.movable(device));
        match movable {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let why =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                return Err(Status::failed_precondition(format!("{name} can't move: {why}")));
            }
            Err(EngineGone) => return Err(Status::unavailable(EngineGone.to_string())),
        }
    }
    if !mover.phases().begin(vm) {
        return Err(Status::failed_precondition(format!("VM {vm} takes part in a migration already")));
    }
    let service = cluster.service();
    let wish = cluster_proto::Wish { vm: vm.to_owned(), host };
    let request = cluster_proto::MigrateRequest { wishes: vec![wish], ..Default::default() };
    let asked = async {
        let mut client = service.connect().await?;
        service.within("Migrate", client.migrate(request)).await
    };
    let migration = match asked.await {
        Ok(reply) => reply.migration,
        Err(error) => {
            mover.phases().set(vm, Phase::Idle);
            let text = match error {
                ClusterError::Refused { reason, .. } => reason,
                error => format!("VM {vm} can't move: {error}"),
            };
            return Err(Status::failed_precondition(text));
        }
    };
    let phase = wait(mover, vm, |phase| phase.is_end() || matches!(phase, Phase::Copying(_))).await;
    if phase == Phase::Begun {
        // The destination had no room, or a host was lost: the source never heard of it. What is still under way is ended.
        withdraw(cluster, vm, migration).await;
        mover.phases().set(vm, Phase::Idle);
        let text = format!(
            "VM {vm} can't move: the destination gives it no room; does a monitor wait there (`causeway run --incoming`)?"
        );
        return Err(Status::failed_precondition(text));
    }
    Ok(reply(phase))
}

/// The monitor can't go on: where this host can't give the migration up on its own, the service is asked to.
async fn cancel(cluster: &ClusterDirectory, mover: &MoverHandle, vm: &str) {
    let phase = mover.phases().get(vm);
    mover.said(vm, Said::Broken);
    if let Phase::Copying(migration) | Phase::Awaited(migration) = phase {
        withdraw(cluster, vm, migration).await;
    }
}

/// Asks the service to give a migration up.
async fn withdraw(cluster: &ClusterDirectory, vm: &str, migration: u64) {
    let service = cluster.service();
    let asked = async {
        let mut client = service.connect().await?;
        let request = cluster_proto::CancelMigrationRequest { migration };
        service.within("CancelMigration", client.cancel_migration(request)).await
    };
    if let Err(error) = asked.await {
        // It is over already, or the service is away: then this host has given it up, or will be told.
        tracing::debug!(%error, vm, "A migration can't be cancelled at the service");
    }
}
