//! `causeway migrate --group` and `causeway drain`: several VMs of this host migrate together, either all or none.
//! `drain` also moves the VMs without connections, one by one.
//!
//! Each VM's monitor copies its own memory over its own connections, and sends its own request. The cluster service
//! starts when all VMs are requested. So VMs of other hosts can take part: a command there names the same group.

use std::net::TcpStream;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use control_api::client::Client;
use control_api::discovery::{self, SocketState};
use control_api::migration::{MigrationPhase, MigrationTimeline};
use control_api::types::VmState;
use serde_json::json;

use super::migrate::{LastReport, STREAMS, connect, describe, follow_reports, request, resolve};
use crate::cli::{DrainArgs, Member, MigrateArgs, TransferArgs};
use crate::output;

/// Interval at which the command checks whether it must cancel the other VMs' migrations.
const FAILURE_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A VM that this command moves.
struct MigratingVm {
    name: String,
    client: Client,
    to: String,
}

/// The outcome for one VM.
enum MemberOutcome {
    Moved(Box<MigrationTimeline>),
    /// It didn't move, for this reason.
    NotMoved(String),
    /// It is unknown where the VM runs.
    InDoubt(String),
}

/// Migrates a group.
pub fn migrate(args: &MigrateArgs, json: bool) -> anyhow::Result<ExitCode> {
    let names: Vec<String> = args.group.iter().map(|member| member.name.clone()).collect();
    let vms = destinations(&args.group, args.to.as_deref())?
        .into_iter()
        .map(|(name, to)| {
            let to = resolve(&args.transfer.daemon, &name, &to)?;
            let found = discovery::select(&discovery::runtime_directory(), Some(&name))?;
            Ok(MigratingVm { client: found.client(), name, to })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (ended, first) = migrate_together(&vms, &names, &args.transfer, json)?;
    finish(&vms, &ended, first, json)
}

/// Moves all VMs of this host. VMs with RDMA NICs move together, since they may be connected. Then the others move one
/// by one.
pub fn drain(args: &DrainArgs, json: bool) -> anyhow::Result<ExitCode> {
    let directory = discovery::runtime_directory();
    let mut running = discovery::find(&directory)?;
    running.retain(|vm| vm.state != SocketState::Stale);
    running.sort_by(|one, other| one.name.cmp(&other.name));
    let mut here = Vec::new();
    for vm in running {
        let unknown = || format!("The state of VM {} is unknown: nothing has moved", vm.name);
        let summary = vm.client().summary().with_context(unknown)?;
        // A monitor that waits for a VM has none to move.
        if summary.state != VmState::Incoming {
            here.push((vm, summary.rdma_nics > 0));
        }
    }
    if here.is_empty() {
        bail!("No VM runs here (in {}): there is nothing to move", directory.display());
    }
    let members: Vec<Member> =
        here.iter().map(|(vm, _)| Member { name: vm.name.clone(), to: None }).collect();
    let destinations = destinations(&members, Some(&args.to))?;
    let vms = here.into_iter().zip(destinations).map(|((vm, grouped), (name, to))| {
        let to = resolve(&args.transfer.daemon, &name, &to)?;
        Ok((MigratingVm { name, client: vm.client(), to }, grouped))
    });
    let vms = vms.collect::<anyhow::Result<Vec<_>>>()?;
    let (grouped, alone): (Vec<_>, Vec<_>) = vms.into_iter().partition(|(_, grouped)| *grouped);
    let [grouped, alone] = [grouped, alone].map(|vms| vms.into_iter().map(|(vm, _)| vm).collect::<Vec<_>>());
    let names: Vec<String> = grouped.iter().map(|vm| vm.name.clone()).collect();
    let (mut ended, mut first) = if grouped.is_empty() {
        (Vec::new(), None)
    } else {
        migrate_together(&grouped, &names, &args.transfer, json)?
    };
    for vm in &alone {
        let end = match (&first, ended.iter().all(|one| matches!(one, MemberOutcome::Moved(_)))) {
            (None, true) => migrate_alone(vm, &args.transfer, json),
            _ => MemberOutcome::NotMoved("it wasn't started, since another VM hasn't moved".to_owned()),
        };
        if let MemberOutcome::NotMoved(problem) = &end {
            first.get_or_insert_with(|| format!("VM {}: {problem}", vm.name));
        }
        ended.push(end);
    }
    let vms: Vec<MigratingVm> = grouped.into_iter().chain(alone).collect();
    finish(&vms, &ended, first, json)
}

/// Moves a VM that isn't connected to others.
fn migrate_alone(vm: &MigratingVm, transfer: &TransferArgs, json: bool) -> MemberOutcome {
    match connect(&vm.to, transfer.streams.unwrap_or(STREAMS)) {
        Ok(streams) => migrate_one(vm, streams, &[], transfer, json),
        Err(error) => MemberOutcome::NotMoved(format!("{error:#}")),
    }
}

/// Returns the destination of each member that this command moves: its own address, or one of consecutive ports of one
/// host.
fn destinations(group: &[Member], to: Option<&str>) -> anyhow::Result<Vec<(String, String)>> {
    for (at, member) in group.iter().enumerate() {
        if group.iter().take(at).any(|other| other.name == member.name) {
            bail!("--group names VM {} twice", member.name);
        }
    }
    let Some(to) = to else {
        let own = group.iter().filter_map(|member| Some((member.name.clone(), member.to.clone()?)));
        let own: Vec<_> = own.collect();
        if own.is_empty() {
            bail!(
                "No VM of --group has an address to go to: add --to ADDRESS:PORT, or =ADDRESS:PORT to each that runs here"
            );
        }
        return Ok(own);
    };
    if let Some(member) = group.iter().find(|member| member.to.is_some()) {
        bail!("VM {} has an address of its own, and --to gives another: use one of both", member.name);
    }
    if !to.contains(':') {
        // A host of the cluster: each VM's own monitor waits there.
        return Ok(group.iter().map(|member| (member.name.clone(), to.to_owned())).collect());
    }
    let parts = to.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let (host, first) =
        parts.with_context(|| format!("--to: {to} is no address with a port, like 192.0.2.1:7000"))?;
    let ports = (0_u16..).map(|number| first.checked_add(number));
    group
        .iter()
        .zip(ports)
        .map(|(member, port)| {
            let port = port.with_context(|| {
                format!(
                    "--to: {} VMs need consecutive ports from {first} on, and 65535 is the last",
                    group.len()
                )
            })?;
            Ok((member.name.clone(), format!("{host}:{port}")))
        })
        .collect()
}

/// Moves the VMs of this host that belong to a group, which may contain others. Returns the outcome per VM, and the
/// first failure's reason.
///
/// # Errors
/// Nothing was started.
fn migrate_together(
    vms: &[MigratingVm],
    group: &[String],
    transfer: &TransferArgs,
    json: bool,
) -> anyhow::Result<(Vec<MemberOutcome>, Option<String>)> {
    // A missing destination is detected before any monitor gets a request.
    let streams: Vec<Vec<TcpStream>> = vms
        .iter()
        .map(|vm| {
            connect(&vm.to, transfer.streams.unwrap_or(STREAMS))
                .with_context(|| format!("VM {} can't move", vm.name))
        })
        .collect::<anyhow::Result<_>>()?;
    // The first failure has the cause; the others only report an abort.
    let first = Mutex::new(None);
    let ended: Vec<MemberOutcome> = std::thread::scope(|scope| {
        let first = &first;
        let threads: Vec<_> = vms
            .iter()
            .zip(streams)
            .map(|(vm, streams)| {
                scope.spawn(move || {
                    let ended = migrate_one(vm, streams, group, transfer, json);
                    if let MemberOutcome::NotMoved(problem) = &ended {
                        note_failure(first, &vm.name, problem);
                    }
                    ended
                })
            })
            .collect();
        // After one VM has failed, the others must not wait for it. The cancellation is repeated for a VM whose monitor
        // hasn't started.
        while threads.iter().any(|one| !one.is_finished()) {
            if has_failed(first) {
                for (vm, _) in vms.iter().zip(&threads).filter(|(_, one)| !one.is_finished()) {
                    // Refused if no migration is in progress or it is already decided.
                    let _ = vm.client.cancel_migration();
                }
            }
            std::thread::sleep(FAILURE_POLL_INTERVAL);
        }
        let panicked = || MemberOutcome::InDoubt("a thread of this command panicked".to_owned());
        threads.into_iter().map(|one| one.join().unwrap_or_else(|_| panicked())).collect()
    });
    Ok((ended, first.into_inner().ok().flatten()))
}

fn note_failure(first: &Mutex<Option<String>>, name: &str, problem: &str) {
    if let Ok(mut first) = first.lock() {
        first.get_or_insert_with(|| format!("VM {name}: {problem}"));
    }
}

fn has_failed(first: &Mutex<Option<String>>) -> bool {
    first.lock().is_ok_and(|first| first.is_some())
}

/// Moves one of the VMs.
fn migrate_one(
    vm: &MigratingVm,
    streams: Vec<TcpStream>,
    group: &[String],
    transfer: &TransferArgs,
    json: bool,
) -> MemberOutcome {
    let monitor = match request(transfer, &vm.to, streams, None, group, &vm.client) {
        Ok(monitor) => monitor,
        Err(error) => return MemberOutcome::NotMoved(format!("{error:#}")),
    };
    match follow_reports(&vm.name, &monitor, json) {
        Ok(LastReport::Refused(problem)) => MemberOutcome::NotMoved(problem),
        Ok(LastReport::Ended(progress)) => match (progress.phase, progress.timeline) {
            (MigrationPhase::Done, Some(timeline)) => MemberOutcome::Moved(Box::new(timeline)),
            (MigrationPhase::InDoubt, _) => MemberOutcome::InDoubt(progress.problem.unwrap_or_default()),
            _ => MemberOutcome::NotMoved(
                progress.problem.unwrap_or_else(|| "the migration ended without a report".to_owned()),
            ),
        },
        Err(error) => MemberOutcome::InDoubt(format!("{error:#}")),
    }
}

/// Prints the outcome.
fn finish(
    vms: &[MigratingVm],
    ended: &[MemberOutcome],
    first: Option<String>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let moved = ended.iter().filter(|one| matches!(one, MemberOutcome::Moved(_))).count();
    if json {
        let rows: Vec<_> = vms.iter().zip(ended).map(|(vm, ended)| row(&vm.name, &vm.to, ended)).collect();
        output::print_json(&json!({ "moved": moved == ended.len(), "vms": rows }))?;
    } else {
        for (vm, ended) in vms.iter().zip(ended) {
            if let MemberOutcome::Moved(timeline) = ended {
                output::print(&describe(&vm.name, timeline))?;
            }
        }
    }
    if moved == ended.len() {
        return Ok(ExitCode::SUCCESS);
    }
    let doubt: Vec<String> = vms
        .iter()
        .zip(ended)
        .filter_map(|(vm, ended)| match ended {
            MemberOutcome::InDoubt(problem) => Some(format!("VM {}: {problem}", vm.name)),
            _ => None,
        })
        .collect();
    let why = first.unwrap_or_else(|| doubt.join("; "));
    if moved == 0 && doubt.is_empty() {
        return Err(anyhow!("{why}")
            .context(format!("None of {} VMs has moved, all run where they were", ended.len())));
    }
    // The service decides the same for all VMs of a group, but a monitor may not have got the decision. VMs that move
    // alone may fail alone.
    let stay = ended.len() - moved - doubt.len();
    let doubtful = match doubt.len() {
        0 => String::new(),
        count => {
            format!("; where {count} are isn't known here (`causeway cluster vms`, `causeway list` there)")
        }
    };
    Err(anyhow!("{why}").context(format!(
        "{moved} of {} VMs are known to have moved, {stay} run where they were{doubtful}",
        ended.len()
    )))
}

fn row(name: &str, to: &str, ended: &MemberOutcome) -> serde_json::Value {
    match ended {
        MemberOutcome::Moved(timeline) => {
            json!({ "vm": name, "to": to, "state": "moved", "timeline": timeline })
        }
        MemberOutcome::NotMoved(problem) => {
            json!({ "vm": name, "to": to, "state": "stays", "problem": problem })
        }
        MemberOutcome::InDoubt(problem) => {
            json!({ "vm": name, "to": to, "state": "in-doubt", "problem": problem })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(text: &str) -> Vec<Member> {
        text.split(',').map(|member| member.parse().expect("a member")).collect()
    }

    fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(name, to)| ((*name).to_owned(), (*to).to_owned())).collect()
    }

    /// With one host, each member has a port of it. Otherwise each has its own address; another command moves a member
    /// without one.
    #[test]
    fn each_member_has_its_destination() {
        let to = destinations(&group("a,b"), Some("[::1]:7000")).expect("places");
        assert_eq!(to, pairs(&[("a", "[::1]:7000"), ("b", "[::1]:7001")]));
        let to = destinations(&group("a=h2:7000,b"), None).expect("places");
        assert_eq!(to, pairs(&[("a", "h2:7000")]));
        let to = destinations(&group("a,b"), Some("h2")).expect("places");
        assert_eq!(to, pairs(&[("a", "h2"), ("b", "h2")]));
    }

    #[test]
    fn what_is_no_group_is_refused_with_a_sentence() {
        let refused =
            |text: &str, to: Option<&str>| destinations(&group(text), to).expect_err("refused").to_string();
        assert!(refused("a,a", Some("h:1")).contains("VM a twice"));
        assert!(refused("a,b", None).contains("add --to"));
        assert!(refused("a=h:1,b", Some("h:2")).contains("use one of both"));
        assert!(refused("a,b", Some("h:")).contains("like 192.0.2.1:7000"));
        assert!(refused("a,b", Some("h:65535")).contains("consecutive ports from 65535"));
        assert!("a=".parse::<Member>().expect_err("refused").contains("a=192.0.2.1:7000"));
    }

    /// One sentence names the VM and the reason, and the exit status isn't 0. A VM in doubt isn't reported as not
    /// moved.
    #[test]
    fn a_failure_names_the_vm_and_the_reason() {
        let vms = ["a", "b"].map(|name| MigratingVm {
            name: name.to_owned(),
            client: Client::new("/nowhere"),
            to: "h:1".to_owned(),
        });
        let stays = || MemberOutcome::NotMoved("no".to_owned());
        let error = finish(&vms, &[stays(), stays()], Some("VM b: no room".to_owned()), false)
            .expect_err("it failed");
        assert_eq!(format!("{error:#}"), "None of 2 VMs has moved, all run where they were: VM b: no room");
        let doubt = MemberOutcome::InDoubt("not heard".to_owned());
        let error = finish(&vms, &[stays(), doubt], None, false).expect_err("it failed");
        let text = format!("{error:#}");
        assert!(
            text.starts_with("0 of 2 VMs are known to have moved, 1 run where they were; where 1 are"),
            "{text}"
        );
        assert!(text.ends_with(": VM b: not heard"), "{text}");
    }
}
