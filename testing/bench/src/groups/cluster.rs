//! Group `cluster`: the shipped cluster service with a thousand hosts. Each host is the migration protocol's real state machine with the real
//! client on a connection of its own; monitors and engines are stand-ins that answer at once. Without keys, so without TLS.
//!
//! ```text
//!  this process                                              causeway cluster serve
//!   1,000 hosts, one thread ── 1,000 HTTP/2 connections ───▶  one thread for gRPC, one for the registry ─▶ database
//!   10,000 VMs, an all-to-all job of 1,000 of them
//! ```
//!
//! Peers are a bare gRPC round trip with the same service, and syncs of a file in the database's folder, in the same run.

mod host;
mod service;
mod session;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use self::service::{Etcd, Store};
use self::session::{Moving, Scale, Session};
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, Summary, median};
use crate::{host_daemon, programs};

const FULL: Scale =
    Scale { hosts: 1_000, vms_per_host: 10, ranks: 1_000, migrations: 100, lease: Duration::from_secs(6) };
const QUICK: Scale = Scale { hosts: 50, vms_per_host: 10, ranks: 50, migrations: 20, ..FULL };
/// Ranks of the job that move at once: each has a peer on every host, and they switch over one after the other.
const MOVING_RANKS: usize = 10;
/// Longest time from the service's death until all hosts are registered again, seconds.
const FAILOVER_AIM_S: f64 = 10.0;
/// Writes of a migration of its own: its beginning, its decision and its end.
const WRITES_PER_MIGRATION: f64 = 3.0;
/// Descriptors: a connection for each host, and some more.
const OPEN_FILES_RESERVE: u64 = 512;
/// Shortest lease of a leader in etcd, seconds.
const LEADER_LEASE_S: u64 = 2;
/// In the last line of a program that was built without etcd.
const WITHOUT_ETCD: &str = "built without etcd";

/// Measures the group; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let scale = if quick { QUICK } else { FULL };
    let mut conditions = Conditions::now(None, "4 KiB");
    conditions.scheduling = "ordinary, no TLS";
    let needed = u64::try_from(scale.hosts)? + OPEN_FILES_RESERVE;
    if let Some(few) = raise_open_files(needed) {
        let reason = format!("{needed} open files are needed, and this process may have {few}");
        return Ok(super::skipped("cluster", reason, conditions));
    }
    let program = programs::causeway_beside()?;
    let folder = host_daemon::folder()?;
    let mut figures = Figures::of("cluster");
    let file = Store::File(folder.path().join("cluster.redb"));
    eprintln!("bench: cluster: {} hosts, {} VMs", scale.hosts, scale.hosts * scale.vms_per_host);
    let session = Session::start(&program, folder.path(), file, 1, scale)?;
    let mut group = Group { session, figures: &mut figures, quick, aborted: 0 };
    let sync_s = sync(folder.path())?;
    group.registration(sync_s)?;
    group.messages("idle", &mut |_| Ok(()))?;
    group.migrations(sync_s)?;
    let leases_lost = group.failover()?;
    group.memory()?;
    let writes = group.session.metric("causeway_cluster_writes_total")?;
    let aborted = group.aborted;
    drop(group);
    let etcd = etcd_failover(&program, folder.path(), scale, &mut figures)?;
    conditions.finish();
    let details = json!({
        "hosts": scale.hosts,
        "vms": scale.hosts * scale.vms_per_host,
        "ranks": scale.ranks,
        "leases_lost_to_failover": leases_lost,
        "migrations_aborted": aborted,
        "writes_since_failover": writes,
        "etcd": etcd,
    });
    Ok(Report { group: "cluster", skipped: None, conditions, figures: figures.all, details })
}

/// Raises the limit of open files; `Some`: what it is, if it is too low.
fn raise_open_files(needed: u64) -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return None;
    }
    // If it can't be raised it stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    getrlimit(Resource::Nofile).current.filter(|current| *current < needed)
}

/// Returns the median seconds of a write of 4 KiB with its sync, in a folder.
fn sync(folder: &Path) -> anyhow::Result<f64> {
    let path = folder.join("sync");
    let file = File::create(&path).with_context(|| format!("{} could not be made", path.display()))?;
    let mut samples = Vec::new();
    for block in 0..200 {
        let began = Instant::now();
        file.write_all_at(&[0x5A; 4096], block % 16 * 4096).context("A file could not be written")?;
        file.sync_data().context("A file could not be synced")?;
        samples.push(began.elapsed().as_secs_f64());
    }
    samples.sort_by(f64::total_cmp);
    Ok(median(&samples))
}

/// Returns the 50th and 99th percentile.
fn percentiles(mut samples: Vec<f64>) -> anyhow::Result<(f64, f64)> {
    samples.sort_by(f64::total_cmp);
    let rank = (samples.len() * 99).div_ceil(100).max(1);
    let summary = Summary::of(&samples).context("No message was answered")?;
    Ok((summary.median, samples.get(rank - 1).copied().unwrap_or(summary.maximum)))
}

fn one(ours: f64, peer: f64) -> Pairs {
    Pairs { pairs: vec![(ours, peer)] }
}

fn float(number: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let float = number as f64;
    float
}

struct Group<'a> {
    session: Session,
    figures: &'a mut Figures,
    quick: bool,
    /// Migrations that were aborted, since the machine was too busy for their time limits.
    aborted: usize,
}

impl Group<'_> {
    fn scale(&self) -> Scale {
        self.session.scale
    }

    /// How long all VMs took to be registered, and the job's connections to be reported.
    fn registration(&mut self, sync_s: f64) -> anyhow::Result<()> {
        let Scale { hosts, vms_per_host, ranks, .. } = self.scale();
        let vms = hosts * vms_per_host;
        self.figures.add(Figure::new(
            "register_vms",
            &format!("{hosts} hosts start and register {vms} VMs"),
            "s",
            Better::Lower,
            "a sync for each VM, one after the other",
            &one(self.session.registered_s, sync_s * float(vms)),
            None,
        ))?;
        let linked_s = self.session.link()?;
        self.session.check()?;
        self.figures.add(Figure::new(
            "report_links",
            &format!("their hosts report the connections of {ranks} VMs, all to all"),
            "s",
            Better::Lower,
            "a sync for each host, one after the other",
            &one(linked_s, sync_s * float(hosts)),
            None,
        ))
    }

    /// Round trips of messages, in rounds, and of bare gRPC requests beside them. `load` comes before each message.
    fn messages(
        &mut self,
        name: &str,
        load: &mut dyn FnMut(&Session) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (rounds, count) = if self.quick { (2, 50) } else { (7, 300) };
        let mut client = self.session.client()?;
        for (to, to_host) in [("coordinator", false), ("host", true)] {
            let (mut p50, mut p99) = (Pairs::default(), Pairs::default());
            for round in 0..rounds {
                let (mut ours, mut peer) = (Vec::new(), Vec::new());
                for number in 0..count {
                    load(&self.session)?;
                    ours.push(self.session.probe(round * count + number, to_host)?);
                    peer.push(self.session.echo(&mut client)?);
                }
                let (ours, peer) = (percentiles(ours)?, percentiles(peer)?);
                p50.pairs.push((ours.0, peer.0));
                p99.pairs.push((ours.1, peer.1));
            }
            let path = if to_host {
                "host to host through the service, and back"
            } else {
                "host to coordinator, and back"
            };
            for (percentile, pairs) in [("p50", p50), ("p99", p99)] {
                self.figures.add(Figure::new(
                    &format!("{to}_{percentile}_{name}"),
                    &format!("a message from {path}, {percentile}, {name}"),
                    "ms",
                    Better::Lower,
                    &format!("a gRPC round trip with the service, {percentile}"),
                    &pairs,
                    None,
                ))?;
            }
        }
        Ok(())
    }

    /// Migrations at once: of VMs without connections, with messages beside them, and of the job's ranks.
    fn migrations(&mut self, sync_s: f64) -> anyhow::Result<()> {
        let (count, rounds) = (self.scale().migrations, if self.quick { 2 } else { 5 });
        let mut pairs = Pairs::default();
        for round in 0..rounds {
            let began = Instant::now();
            let vms = self.session.begin_migrations(count, false, round)?;
            let (last, committed) = self.session.until_arrived(&vms)?;
            self.aborted += count - committed;
            let rate = float(committed) / (last - began).as_secs_f64();
            pairs.pairs.push((rate, 1.0 / (WRITES_PER_MIGRATION * sync_s)));
        }
        self.figures.add(Figure::new(
            "migrations",
            &format!("{count} migrations at once, from the first request until the last VM runs"),
            "per s",
            Better::Higher,
            "three syncs for each migration, one after the other",
            &pairs,
            Some(1.0),
        ))?;
        let mut moving = Moving::default();
        let under = format!("under_{count}_migrations");
        self.messages(&under, &mut |session| session.keep_moving(&mut moving, count))?;
        self.session.until_still(&mut moving)?;
        self.aborted += moving.aborted;
        eprintln!(
            "bench: cluster: {} migrations ended beside the messages, {} were aborted",
            moving.ended, moving.aborted
        );
        self.ranks(sync_s)
    }

    /// Ranks of the job that move at once.
    fn ranks(&mut self, sync_s: f64) -> anyhow::Result<()> {
        let (ranks, rounds) = (self.scale().ranks, if self.quick { 1 } else { 3 });
        let mut pairs = Pairs::default();
        for round in 0..rounds {
            let began = Instant::now();
            let vms = self.session.begin_migrations(MOVING_RANKS, true, round)?;
            let (last, committed) = self.session.until_arrived(&vms)?;
            self.aborted += MOVING_RANKS - committed;
            let each_ms = (last - began).as_secs_f64() * 1e3 / float(committed);
            pairs.pairs.push((each_ms, WRITES_PER_MIGRATION * sync_s * 1e3));
        }
        self.figures.add(Figure::new(
            "rank_migration",
            &format!(
                "each of {MOVING_RANKS} VMs of the job that move at once, with {} peers, whose hosts are asked through the service",
                ranks - 1
            ),
            "ms",
            Better::Lower,
            "three syncs",
            &pairs,
            None,
        ))
    }

    /// The service dies and is started again. Returns the leases that were lost to it.
    fn failover(&mut self) -> anyhow::Result<f64> {
        let rounds = if self.quick { 1 } else { 3 };
        let (mut registered, mut reported, mut lost) = (Pairs::default(), Pairs::default(), 0.0);
        let mut kept = Pairs::default();
        let hosts = float(self.scale().hosts);
        for _ in 0..rounds {
            let (registered_s, reported_s) = self.session.fail_over()?;
            registered.pairs.push((registered_s, FAILOVER_AIM_S));
            reported.pairs.push((reported_s, FAILOVER_AIM_S));
            // Leases that run out do so within a lease of the new service's start.
            std::thread::sleep(self.scale().lease + Duration::from_secs(1));
            let lost_now = self.session.metric("causeway_cluster_leases_lost_total")?;
            kept.pairs.push((hosts - lost_now, hosts));
            lost += lost_now;
            self.session.check()?;
        }
        self.figures.add(failover_figure(
            "failover",
            "the service is killed and started again",
            &registered,
        ))?;
        self.figures.add(Figure::new(
            "failover_reported",
            "the same, until all VMs and connections are reported again",
            "s",
            Better::Lower,
            "the aim for registrations",
            &reported,
            None,
        ))?;
        self.figures.add(Figure::new(
            "failover_leases",
            "hosts whose lease lasted over it",
            "hosts",
            Better::Higher,
            "all hosts",
            &kept,
            Some(1.0),
        ))?;
        Ok(lost)
    }

    fn memory(&mut self) -> anyhow::Result<()> {
        let instance = self.session.instances.first().context("There is no instance")?;
        let (now, empty) = (instance.resident()? / 1e6, self.session.empty_resident / 1e6);
        self.figures.add(Figure::new(
            "resident_memory",
            "resident memory of the service with all hosts, VMs and connections",
            "MB",
            Better::Lower,
            "the same service before the first host",
            &one(now, empty),
            None,
        ))
    }
}

fn failover_figure(name: &str, what: &str, pairs: &Pairs) -> Option<Figure> {
    let what = format!("{what}: until all hosts are registered again");
    Figure::new(name, &what, "s", Better::Lower, "the aim, 10 s", pairs, Some(1.0))
}

/// Two instances on etcd, of which the leader dies. Returns what was done, for the report.
fn etcd_failover(
    program: &Path,
    folder: &Path,
    scale: Scale,
    figures: &mut Figures,
) -> anyhow::Result<serde_json::Value> {
    let Some(etcd) = Etcd::start(folder)? else {
        eprintln!("bench: cluster: etcd isn't installed: one instance was measured only");
        return Ok(json!("not installed"));
    };
    let store = Store::Etcd { members: etcd.members.clone(), leader_lease: LEADER_LEASE_S };
    eprintln!("bench: cluster: the same hosts with two instances on etcd");
    let mut session = match Session::start(program, folder, store, 2, scale) {
        Ok(session) => session,
        // A build without the feature.
        Err(error) if format!("{error:#}").contains(WITHOUT_ETCD) => {
            eprintln!("bench: cluster: causeway is built without etcd: one instance was measured only");
            return Ok(json!("causeway is built without the feature etcd"));
        }
        Err(error) => return Err(error),
    };
    let sync_s = sync(folder)?;
    let vms = scale.hosts * scale.vms_per_host;
    figures.add(Figure::new(
        "register_vms_etcd",
        &format!("{} hosts start and register {vms} VMs, state in etcd", scale.hosts),
        "s",
        Better::Lower,
        "a sync for each VM, one after the other",
        &one(session.registered_s, sync_s * float(vms)),
        None,
    ))?;
    let linked_s = session.link()?;
    session.check()?;
    figures.add(Figure::new(
        "report_links_etcd",
        &format!("their hosts report the connections of {} VMs, all to all, state in etcd", scale.ranks),
        "s",
        Better::Lower,
        "a sync for each host, one after the other",
        &one(linked_s, sync_s * float(scale.hosts)),
        None,
    ))?;
    let (registered_s, reported_s) = session.fail_over()?;
    let pairs = one(registered_s, FAILOVER_AIM_S);
    figures.add(failover_figure("failover_etcd", "the leader of two instances is killed", &pairs))?;
    std::thread::sleep(scale.lease + Duration::from_secs(1));
    let lost = session.metric("causeway_cluster_leases_lost_total")?;
    session.check()?;
    Ok(json!({ "leases_lost_to_failover": lost, "reported_again_s": reported_s }))
}
