//! The requests of a monitor about its VM's migration (`MoveVm`): it reports a step, and waits for the next phase.

use std::time::{Duration, Instant};

use control_api::cluster::proto::claim_vm_reply::Answer as Claim;
use control_api::cluster::{ClusterError, proto as cluster_proto};
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, ClaimVm, MoveVmReply, PeerHold};
use tonic::Status;

use crate::cluster::ClusterDirectory;
use crate::migration::handle::{MigrationHandle, MonitorReport};
use crate::migration::phases::Phase;
use crate::registry::Registry;

/// Limit of the wait for a phase; then the response has the present one, and the monitor repeats its request.
const MAX_ANSWER_DELAY: Duration = Duration::from_secs(10);
/// Time after which a converged VM's monitor is notified that another VM migrates first. Meanwhile it copies written pages again, so that
/// few are left for the switchover.
const QUEUED: Duration = Duration::from_secs(1);
/// Time after which the monitor of a VM of a group is notified that other members' monitors haven't requested the migration.
const GATHERING: Duration = Duration::from_secs(1);
/// Interval of requests to the cluster service, whose answer changes with other hosts' requests and reports.
const SERVICE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Limit of the wait for the reports of the peers' hosts about their pauses.
const REPORTS: Duration = Duration::from_secs(1);

/// Executes a monitor's step. The response has the VM's phase, and the epoch in which the VM runs or is to run on this host.
///
/// # Errors
/// When this daemon takes part in no migrations, or a migration can't begin.
pub(super) async fn step(
    cluster: &ClusterDirectory,
    registry: &Registry,
    vm: &str,
    step: Step,
) -> Result<MoveVmReply, Status> {
    let none =
        || Status::unavailable("This daemon doesn't take part in migrations: it is starting or ending");
    let migration_handle = cluster.migration_handle().ok_or_else(none)?;
    // `Idle` is an end as well: a daemon that was restarted meanwhile knows no migration, and never will.
    let ended = |phase: &Phase| phase.is_end() || *phase == Phase::Idle;
    let phase = match step {
        Step::Begin(host) => return begin(cluster, registry, migration_handle, vm, host).await,
        Step::BeginTogether(wish) => {
            return begin_together(cluster, registry, migration_handle, vm, wish).await;
        }
        Step::Converged(_) => {
            migration_handle.report(vm, MonitorReport::Converged);
            return Ok(may_stop(migration_handle, vm, |phase| ended(phase) || *phase == Phase::Stop).await);
        }
        Step::Stopped(_) => {
            migration_handle.report(vm, MonitorReport::Stopped);
            migration_handle.phases().get(vm)
        }
        Step::Arrived(_) => {
            migration_handle.report(vm, MonitorReport::Arrived);
            wait(migration_handle, vm, ended).await
        }
        Step::Broken(_) => {
            cancel(cluster, migration_handle, vm).await;
            wait(migration_handle, vm, ended).await
        }
        Step::Wait(_) => wait(migration_handle, vm, ended).await,
        Step::Look(_) => migration_handle.phases().get(vm),
        Step::Peers(_) => return Ok(peers(cluster, migration_handle, vm).await),
        Step::Claim(asked) => return Ok(claim(cluster, migration_handle, vm, asked).await),
    };
    Ok(MoveVmReply { epoch: migration_handle.phases().epoch(vm), ..reply(phase) })
}

async fn wait(migration_handle: &MigrationHandle, vm: &str, wanted: impl Fn(&Phase) -> bool) -> Phase {
    let waited = tokio::time::timeout(MAX_ANSWER_DELAY, migration_handle.phases().wait(vm, wanted)).await;
    waited.unwrap_or_else(|_| migration_handle.phases().get(vm))
}

/// Waits until a converged VM may be stopped. If another VM must migrate first, the response names it after [`QUEUED`].
async fn may_stop(
    migration_handle: &MigrationHandle,
    vm: &str,
    wanted: impl Fn(&Phase) -> bool,
) -> MoveVmReply {
    let until = Instant::now() + MAX_ANSWER_DELAY;
    loop {
        let waited = tokio::time::timeout(QUEUED, migration_handle.phases().wait(vm, &wanted)).await;
        let phase = waited.unwrap_or_else(|_| migration_handle.phases().get(vm));
        let waits_for = migration_handle.phases().waits_for(vm).filter(|_| !wanted(&phase));
        if wanted(&phase) || waits_for.is_some() || Instant::now() > until {
            let epoch = migration_handle.phases().epoch(vm);
            return MoveVmReply { epoch, waits_for: waits_for.unwrap_or_default(), ..reply(phase) };
        }
    }
}

fn reply(phase: Phase) -> MoveVmReply {
    let (state, reason) = match phase {
        Phase::Idle => (State::Unknown, "this host's daemon knows of no migration of it".to_owned()),
        Phase::Begun | Phase::Handing | Phase::Reserved(_) => (State::Pending, String::new()),
        Phase::Copying(_) => (State::Copy, String::new()),
        Phase::Stop => (State::Stop, String::new()),
        Phase::Running => (State::Runs, String::new()),
        Phase::Moved => (State::Moved, String::new()),
        Phase::Aborted(reason) => (State::Stays, reason),
        Phase::Failed => (State::Failed, String::new()),
    };
    MoveVmReply { state: state.into(), reason, ..MoveVmReply::default() }
}

/// Responds to a monitor that is in doubt: with this daemon's decision if it has one, else with the cluster service's.
async fn claim(
    cluster: &ClusterDirectory,
    migration_handle: &MigrationHandle,
    vm: &str,
    asked: ClaimVm,
) -> MoveVmReply {
    let phase = migration_handle.phases().get(vm);
    if phase.is_end() {
        return reply(phase);
    }
    let pending = |reason: String| MoveVmReply { reason, ..reply(Phase::Begun) };
    let (epoch, keeps) = (asked.epoch, asked.keeps);
    let request =
        cluster_proto::ClaimVmRequest { speaker: Some(cluster.speaker()), vm: vm.to_owned(), epoch, keeps };
    let service = cluster.service();
    let answer = async {
        let mut client = service.connect().await?;
        service.within("ClaimVm", client.claim_vm(request)).await
    };
    let answer = match answer.await {
        Ok(answer) => answer,
        Err(error) => return pending(format!("the cluster service can't be asked ({error})")),
    };
    match answer.answer() {
        Claim::Undecided => pending("the cluster service hasn't decided".to_owned()),
        Claim::Here if phase != Phase::Idle => {
            // The migration thread resumes the VM's devices. Afterwards the phase is an end, and the monitor's next claim gets it.
            migration_handle.started(answer.vm, answer.epoch, 0);
            pending("it is this host's, and goes on as soon as its devices do".to_owned())
        }
        Claim::Here => MoveVmReply { epoch: answer.epoch, ..reply(Phase::Running) },
        Claim::Lost => reply(Phase::Failed),
        Claim::Elsewhere => elsewhere(&asked, &answer.host, answer.epoch),
    }
}

/// Interprets a service's response that another host has the VM in `epoch`, or, with an empty `host`, that it knows no such VM.
///
/// A service that has lost its database, or has an old copy of it, sends such a response about a VM that no other host has. The monitor
/// then keeps the last copy of the VM, in doubt, until its user decides.
fn elsewhere(asked: &ClaimVm, host: &str, epoch: u64) -> MoveVmReply {
    let is_forgotten = host.is_empty() || asked.keeps && epoch < asked.epoch;
    if !is_forgotten {
        return MoveVmReply {
            reason: format!("host {host} has it, in epoch {epoch}"),
            ..reply(Phase::Moved)
        };
    }
    let knows = match host {
        "" => "no such VM".to_owned(),
        host => {
            format!("host {host} as its owner in epoch {epoch}, and it ran here in epoch {}", asked.epoch)
        }
    };
    let reason = format!(
        "the cluster service knows {knows}: the VM has ended elsewhere, or the service's database was lost"
    );
    MoveVmReply { reason, ..reply(Phase::Begun) }
}

/// Peer pauses of a VM's migration by host, in microseconds, as the hosts have reported them to the service. Waits up to [`REPORTS`] for
/// the reports of all hosts.
async fn peers(cluster: &ClusterDirectory, migration_handle: &MigrationHandle, vm: &str) -> MoveVmReply {
    let mut answer = reply(migration_handle.phases().get(vm));
    let (Some((migration, hosts)), Some(number)) = (migration_handle.phases().peers(vm), cluster.number(vm))
    else {
        return answer;
    };
    let until = Instant::now() + REPORTS;
    let service = cluster.service();
    let mut connected = None;
    loop {
        let asked = async {
            let client = match &mut connected {
                Some(client) => client,
                none => none.insert(service.connect().await?),
            };
            let request = cluster_proto::GetHoldsRequest { migration };
            service.within("GetHolds", client.get_holds(request)).await
        };
        match asked.await {
            Ok(told) => {
                let of = told.holds.into_iter().filter(|hold| hold.vm == number.0);
                answer.peers =
                    of.map(|hold| PeerHold { host: hold.host, microseconds: hold.microseconds }).collect();
            }
            Err(error) if error.is_refusal() => {
                tracing::debug!(%error, vm, "The service doesn't say how long peers were held");
                return answer;
            }
            // The service may be restarting.
            Err(error) => {
                connected = None;
                tracing::debug!(%error, vm, "The service can't be asked how long peers were held");
            }
        }
        let all = hosts.iter().all(|host| answer.peers.iter().any(|held| held.host == *host));
        if all || Instant::now() > until {
            return answer;
        }
        tokio::time::sleep(SERVICE_POLL_INTERVAL).await;
    }
}

/// Checks that all RDMA NICs of a VM are connected to its monitor, without which they can't migrate.
fn movable(registry: &Registry, vm: &str) -> Result<(), Status> {
    for (shared, rdma) in registry.rdma_functions(vm) {
        let name = &shared.key;
        if rdma.device().is_none() {
            return Err(Status::failed_precondition(format!(
                "{name} can't move: its monitor isn't connected"
            )));
        }
    }
    Ok(())
}

fn moves_already(vm: &str) -> Status {
    Status::failed_precondition(format!("VM {vm} takes part in a migration already"))
}

/// Requests a migration of one VM from the cluster service, and waits until pre-copy may start.
async fn begin(
    cluster: &ClusterDirectory,
    registry: &Registry,
    migration_handle: &MigrationHandle,
    vm: &str,
    host: String,
) -> Result<MoveVmReply, Status> {
    movable(registry, vm)?;
    if !migration_handle.phases().begin(vm, None) {
        return Err(moves_already(vm));
    }
    let wish = cluster_proto::Wish { vm: vm.to_owned(), host };
    let speaker = Some(cluster.speaker());
    let request = cluster_proto::MigrateRequest { wishes: vec![wish], speaker, ..Default::default() };
    match ask(cluster, &request).await {
        Ok(reply) => {
            begun(cluster, migration_handle, vm, reply.migration, "the destination gives it no room").await
        }
        Err(error) => {
            migration_handle.phases().withdraw(vm, Phase::Idle);
            Err(refusal(vm, error))
        }
    }
}

/// As [`begin`], for a member of a group. Each member's monitor sends its own request. While some are missing, the response names them
/// after [`GATHERING`], and the monitor repeats its request with the same `attempt`.
async fn begin_together(
    cluster: &ClusterDirectory,
    registry: &Registry,
    migration_handle: &MigrationHandle,
    vm: &str,
    BeginTogether { host, vms, attempt }: BeginTogether,
) -> Result<MoveVmReply, Status> {
    movable(registry, vm)?;
    if !migration_handle.phases().begin(vm, Some(attempt)) {
        return Err(moves_already(vm));
    }
    let wish = cluster_proto::Wish { vm: vm.to_owned(), host };
    let speaker = Some(cluster.speaker());
    let request = cluster_proto::MigrateRequest { wishes: vec![wish], speaker, together: vms, attempt };
    let until = Instant::now() + GATHERING;
    loop {
        // Another member's request may have completed the group. Then the coordinator notifies this host, even if a response was lost.
        let phase = migration_handle.phases().get(vm);
        if phase != Phase::Begun {
            return Ok(MoveVmReply { epoch: migration_handle.phases().epoch(vm), ..reply(phase) });
        }
        let reason = match ask(cluster, &request).await {
            Ok(reply) if reply.migration != 0 => {
                let no_room = "a destination has no room for it or for another VM of its group";
                return begun(cluster, migration_handle, vm, reply.migration, no_room).await;
            }
            Ok(reply) => format!("waits for VM {} of its group", reply.missing.join(", ")),
            Err(error) if error.is_refusal() => {
                migration_handle.phases().withdraw(vm, Phase::Idle);
                return Err(refusal(vm, error));
            }
            // A restarted service has lost the members' requests; all of them repeat theirs.
            Err(error) => format!("waits for the cluster service: {error}"),
        };
        if Instant::now() > until {
            return Ok(MoveVmReply { state: State::Pending.into(), reason, ..MoveVmReply::default() });
        }
        tokio::time::sleep(SERVICE_POLL_INTERVAL).await;
    }
}

/// Waits until a migration that the service has begun permits pre-copy. Cancels it after [`MAX_ANSWER_DELAY`].
async fn begun(
    cluster: &ClusterDirectory,
    migration_handle: &MigrationHandle,
    vm: &str,
    migration: u64,
    no_room: &str,
) -> Result<MoveVmReply, Status> {
    let phase =
        wait(migration_handle, vm, |phase| phase.is_end() || matches!(phase, Phase::Copying(_))).await;
    if phase == Phase::Begun {
        // The destination refused, or a host was lost, so the coordinator never notified the source. The migration may still be undecided.
        withdraw(cluster, vm, migration).await;
        migration_handle.phases().withdraw(vm, Phase::Idle);
        return Err(Status::failed_precondition(format!(
            "VM {vm} can't move: {no_room}; does a monitor wait there (`causeway run --incoming`)?"
        )));
    }
    Ok(MoveVmReply { epoch: migration_handle.phases().epoch(vm), ..reply(phase) })
}

fn refusal(vm: &str, error: ClusterError) -> Status {
    Status::failed_precondition(match error {
        ClusterError::Refused { reason, .. } => reason,
        error => format!("VM {vm} can't move: {error}"),
    })
}

async fn ask(
    cluster: &ClusterDirectory,
    request: &cluster_proto::MigrateRequest,
) -> Result<cluster_proto::MigrateReply, ClusterError> {
    let service = cluster.service();
    let mut client = service.connect().await?;
    service.within("Migrate", client.migrate(request.clone())).await
}

/// Aborts a migration whose monitor can't continue. If this host can't abort it on its own, the cluster service is requested to.
async fn cancel(cluster: &ClusterDirectory, migration_handle: &MigrationHandle, vm: &str) {
    // A migration whose group is incomplete hasn't begun. If the service can't be reached, it drops the VM's request after some seconds.
    if migration_handle.phases().withdraw(vm, Phase::Aborted("it was cancelled".to_owned())) {
        give_up(cluster, vm, cluster_proto::CancelMigrationRequest { migration: 0, vm: vm.to_owned() }).await;
    }
    let phase = migration_handle.phases().get(vm);
    migration_handle.report(vm, MonitorReport::Broken);
    if let Phase::Copying(migration) | Phase::Reserved(migration) = phase {
        withdraw(cluster, vm, migration).await;
    }
}

/// Requests the service to abort a migration.
async fn withdraw(cluster: &ClusterDirectory, vm: &str, migration: u64) {
    give_up(cluster, vm, cluster_proto::CancelMigrationRequest { migration, vm: String::new() }).await;
}

async fn give_up(cluster: &ClusterDirectory, vm: &str, request: cluster_proto::CancelMigrationRequest) {
    let service = cluster.service();
    let asked = async {
        let mut client = service.connect().await?;
        service.within("CancelMigration", client.cancel_migration(request)).await
    };
    if let Err(error) = asked.await {
        // The migration is decided already, or the service can't be reached. Then this host has aborted it, or learns the decision later.
        tracing::debug!(%error, vm, "A migration can't be cancelled at the service");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A monitor can't undo what it does with the response: a source ends when its VM has moved, a destination when it hasn't.
    #[test]
    fn a_service_that_has_forgotten_a_vm_ends_no_copy_of_it() {
        let state = |keeps, epoch, host, known| elsewhere(&ClaimVm { epoch, keeps }, host, known).state();
        assert_eq!(state(true, 3, "h2", 4), State::Moved);
        // An aborted migration: its source has the VM in the previous epoch.
        assert_eq!(state(false, 4, "h1", 3), State::Moved);
        for (keeps, epoch, host, known) in [(true, 3, "h2", 2), (true, 3, "", 0), (false, 4, "", 0)] {
            assert_eq!(state(keeps, epoch, host, known), State::Pending, "{keeps} {epoch} {host} {known}");
        }
    }
}
