//! `causeway migrate`: connects to the destination, passes the connections to the VM's monitor, and prints its reports.
//!
//! The monitor's sandbox forbids it to open connections. This process has all rights of its user.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use cluster_key::ClusterKey;
use control_api::client::Client;
use control_api::host::HostClient;
use control_api::migration::{
    MigrationPhase, MigrationProgress, MigrationReport, MigrationRequest, MigrationTimeline, Packets,
    StreamKey, socket_of,
};

use crate::cli::{MigrateArgs, TransferArgs};
use crate::output;

/// Number of streams for a VM's memory without post-copy.
pub const STREAMS: u8 = 2;
/// Time-out of a connection to the destination.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of progress messages about a disk.
const DISK_MESSAGE_INTERVAL: Duration = Duration::from_secs(5);

/// Migrates a VM, or cancels its migration.
pub fn migrate(args: &MigrateArgs, json: bool) -> anyhow::Result<ExitCode> {
    if !args.group.is_empty() {
        return super::migrate_group::migrate(args, json);
    }
    let (name, client) = super::select(&args.target)?;
    if args.cancel {
        let done = client.cancel_migration()?;
        if json {
            output::print_json(&done)?;
        } else {
            output::print(&format!("The migration of {name} was cancelled\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let to = args.to.as_deref().ok_or_else(|| anyhow!("--to: where to?"))?;
    let to = &resolve(&args.transfer.daemon, &name, to)?;
    let post_copy_after = if args.post_copy { Some(0) } else { args.post_copy_after };
    let streams = args.transfer.streams.unwrap_or(if post_copy_after.is_some() { 3 } else { STREAMS });
    let monitor = request(&args.transfer, to, connect(to, streams)?, post_copy_after, &[], &client)?;
    let progress = match follow_reports(&name, &monitor, json)? {
        LastReport::Refused(problem) => bail!("{problem}"),
        LastReport::Ended(progress) => *progress,
    };
    match (progress.phase, progress.timeline) {
        (MigrationPhase::Done, Some(timeline)) => {
            if json {
                output::print_json(&timeline)?;
            } else {
                output::print(&describe(&name, &timeline))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        _ => Err(anyhow!(
            "{}",
            progress.problem.unwrap_or_else(|| "the migration ended without a report".to_owned())
        )),
    }
}

/// Sends the request to the monitor, and returns the connection of its reports. `group`: the VMs that move with it,
/// including itself; empty if it moves alone.
///
/// # Errors
/// The monitor doesn't accept the request: the VM continues to run at the source.
pub fn request(
    transfer: &TransferArgs,
    to: &str,
    streams: Vec<TcpStream>,
    post_copy_after: Option<u32>,
    group: &[String],
    client: &Client,
) -> anyhow::Result<Packets> {
    let requests = socket_of(client.socket());
    let monitor = Packets::connect(&requests)
        .with_context(|| format!("No monitor accepts migrations at {}", requests.display()))?;
    let key = transfer.key.as_deref().map(ClusterKey::load).transpose()?;
    let request = MigrationRequest {
        destination: to.to_owned(),
        downtime_ms: transfer.downtime,
        timeout_seconds: transfer.timeout,
        max_throttle_percent: transfer.max_throttle,
        post_copy_after,
        mirror: transfer.mirror.clone(),
        together: group.to_vec(),
        key: key.map(|key| StreamKey(*key.bytes())),
    };
    let fds: Vec<_> = streams.iter().map(|stream| stream.as_fd()).collect();
    monitor.send(&request, &fds, true).context("The VM's monitor doesn't accept the request")?;
    // Only the monitor's copies keep the streams open: this process closes its own.
    Ok(monitor)
}

/// A monitor's last report.
pub enum LastReport {
    /// The migration wasn't started, for this reason.
    Refused(String),
    /// The final progress.
    Ended(Box<MigrationProgress>),
}

/// Follows a monitor's reports until the last one.
///
/// # Errors
/// The monitor ended first: the outcome is unknown.
pub fn follow_reports(name: &str, monitor: &Packets, json: bool) -> anyhow::Result<LastReport> {
    let mut shown = None;
    let mut reported = Instant::now();
    loop {
        let report =
            monitor.receive::<MigrationReport>().context("The VM's monitor broke off its reports")?;
        let progress = match report {
            None => bail!("The VM's monitor ended before the migration did; see its own log"),
            Some((MigrationReport::Refused { problem }, _)) => return Ok(LastReport::Refused(problem)),
            Some((MigrationReport::Progress(progress), _)) => progress,
        };
        match progress.phase {
            phase if phase.is_last() => return Ok(LastReport::Ended(progress)),
            // A disk's first copy takes long, so its progress is printed.
            phase
                if !json
                    && (shown != Some((phase, progress.round))
                        || (progress.disk_bytes_left > 0 && reported.elapsed() >= DISK_MESSAGE_INTERVAL)) =>
            {
                shown = Some((phase, progress.round));
                reported = Instant::now();
                tracing::info!(
                    vm = name,
                    ?phase,
                    round = progress.round,
                    sent = progress.bytes_sent,
                    left = progress.pages_left,
                    disk_bytes_left = progress.disk_bytes_left,
                    asked_for = progress.pages_asked_for,
                    predicted_pause_ms = progress.predicted_pause_ms,
                    throttle_percent = progress.throttle_percent,
                    waits_for = progress.waits_for.as_deref(),
                    "Moving"
                );
            }
            _ => {}
        }
    }
}

/// Resolves `--to` for a VM. An address is returned as it is. For a host of the cluster, this host's daemon returns the
/// address.
///
/// # Errors
/// The daemon doesn't answer, or no monitor waits there.
pub fn resolve(daemon: &Path, vm: &str, to: &str) -> anyhow::Result<String> {
    if to.contains(':') {
        return Ok(to.to_owned());
    }
    let found = HostClient::new(daemon).find_waiting(vm, to);
    found.with_context(|| format!("--to: {to} has no port, so it is the name of a host of the cluster"))
}

/// Opens the connections to a VM's destination, all to the same one of a name's addresses.
///
/// # Errors
/// The name has no such address, or no monitor listens there.
pub fn connect(to: &str, count: u8) -> anyhow::Result<Vec<TcpStream>> {
    let addresses: Vec<SocketAddr> = to
        .to_socket_addrs()
        .with_context(|| format!("--to: {to} is no address with a port, like 192.0.2.1:7000"))?
        .collect();
    let mut problem = anyhow!("--to: {to} has no address");
    for address in addresses {
        let open = || {
            let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
            // Responses during the blackout must not be delayed by Nagle's algorithm.
            stream.set_nodelay(true)?;
            Ok::<_, std::io::Error>(stream)
        };
        match (0..count).map(|_| open()).collect() {
            Ok(streams) => return Ok(streams),
            Err(error) => {
                problem = anyhow!(error).context(format!(
                    "No monitor waits at {address}; start one with causeway run --incoming"
                ));
            }
        }
    }
    Err(problem)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", Duration::from_micros(bytes).as_secs_f64() * 1e6 / 1_048_576.0)
}

/// Formats the timeline as a table.
pub fn describe(name: &str, timeline: &MigrationTimeline) -> String {
    use std::fmt::Write as _;

    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = writeln!(text, "{name} runs at {} now", timeline.destination);
    describe_rounds(&mut text, timeline);
    for disk in &timeline.disks {
        let _ = writeln!(
            text,
            "{} migrated too: {}, {} copied including later writes",
            disk.name,
            mib(disk.bytes),
            mib(disk.copied)
        );
    }
    let _ = writeln!(
        text,
        "pause {:.1} ms: stop {:.1}, rest {:.1}, restore {:.1}, commit {:.1}; in all {:.0} ms, {} over {} streams, of which state {} bytes",
        timeline.pause_ms,
        timeline.stop_ms,
        timeline.rest_ms,
        timeline.restore_ms,
        timeline.commit_ms,
        timeline.total_ms,
        mib(timeline.bytes),
        timeline.streams,
        timeline.state_bytes
    );
    for peer in &timeline.peers {
        let _ = writeln!(text, "peers on host {} were suspended for {:.1} ms", peer.host, peer.pause_ms);
    }
    if let Some(post) = &timeline.post_copy {
        let _ = writeln!(
            text,
            "post-copy {:.0} ms: {} pages after the guest, {} of them on request, {}; {} waits for pages, median {} us, worst {} us",
            post.took_ms,
            post.missing_pages,
            post.asked_pages,
            mib(post.bytes),
            post.faults,
            post.fault_median_us,
            post.fault_worst_us
        );
        if post.left_pages > 0 {
            let _ =
                writeln!(text, "the VM ended there before {} of its pages were received", post.left_pages);
        }
    }
    text
}

/// Appends the table of pre-copy rounds.
fn describe_rounds(text: &mut String, timeline: &MigrationTimeline) {
    use std::fmt::Write as _;

    let _ = writeln!(
        text,
        "{:>6} {:>9} {:>10} {:>12} {:>9} {:>9}{}",
        "round",
        "took ms",
        "pages",
        "sent",
        "dirtied",
        "held %",
        if timeline.disks.is_empty() {
            String::new()
        } else {
            format!(" {:>13} {:>13}", "of disks", "written")
        }
    );
    for (number, round) in (1..).zip(&timeline.rounds) {
        let label = if round.stopped { "rest".to_owned() } else { format!("{number}") };
        let disks = if timeline.disks.is_empty() {
            String::new()
        } else {
            format!(" {:>13} {:>13}", mib(round.disk_bytes), mib(round.disk_bytes_dirtied))
        };
        let _ = writeln!(
            text,
            "{label:>6} {:>9} {:>10} {:>12} {:>9} {:>9}{disks}",
            round.took_ms,
            round.pages,
            mib(round.bytes),
            round.dirtied,
            round.throttle_percent
        );
    }
}

#[cfg(test)]
mod tests {
    use control_api::migration::{MigrationRound, MirroredDisk, PeerPause, PostCopyTimeline};

    use super::*;

    #[test]
    fn a_timeline_is_a_table() {
        let round = |stopped| MigrationRound {
            began_ms: 0,
            took_ms: 12,
            pages: 300,
            zero_pages: 0,
            bytes: 3 << 20,
            dirtied: 4,
            disk_bytes: 2 << 20,
            disk_bytes_dirtied: 4096,
            throttle_percent: 20,
            stopped,
        };
        let timeline = MigrationTimeline {
            destination: "h:1".to_owned(),
            streams: 2,
            rounds: vec![round(false), round(true)],
            bytes: 6 << 20,
            state_bytes: 50_000,
            until_stop_ms: 12.0,
            stop_ms: 1.0,
            rest_ms: 2.0,
            restore_ms: 3.0,
            commit_ms: 4.0,
            pause_ms: 10.0,
            total_ms: 22.0,
            peers: vec![PeerPause { host: "h3".to_owned(), pause_ms: 11.25 }],
            disks: vec![MirroredDisk { name: "disk0".to_owned(), bytes: 3 << 20, copied: 4 << 20 }],
            post_copy: Some(PostCopyTimeline {
                missing_pages: 900,
                asked_pages: 20,
                pushed_pages: 873,
                left_pages: 7,
                bytes: 3 << 20,
                took_ms: 40.0,
                faults: 19,
                fault_median_us: 210,
                fault_worst_us: 4000,
            }),
        };
        let text = describe("a", &timeline);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "a runs at h:1 now");
        assert_eq!(
            lines[2].split_whitespace().collect::<Vec<_>>(),
            ["1", "12", "300", "3.0", "MiB", "4", "20", "2.0", "MiB", "0.0", "MiB"]
        );
        assert!(lines[3].starts_with("  rest"));
        assert_eq!(lines[4], "disk0 migrated too: 3.0 MiB, 4.0 MiB copied including later writes");
        assert!(lines[5].starts_with(
            "pause 10.0 ms: stop 1.0, rest 2.0, restore 3.0, commit 4.0; in all 22 ms, 6.0 MiB"
        ));
        assert_eq!(lines[6], "peers on host h3 were suspended for 11.2 ms");
        assert_eq!(
            lines[7],
            "post-copy 40 ms: 900 pages after the guest, 20 of them on request, 3.0 MiB; 19 waits for pages, median 210 us, worst 4000 us"
        );
        assert_eq!(lines[8], "the VM ended there before 7 of its pages were received");
    }

    /// A value without a port is a host's name, which requires a daemon.
    #[test]
    fn a_host_is_resolved_by_the_daemon() {
        let nowhere = Path::new("/nowhere/host.sock");
        assert_eq!(resolve(nowhere, "a", "h2:7000").unwrap(), "h2:7000");
        let error = format!("{:#}", resolve(nowhere, "a", "h2").unwrap_err());
        assert!(error.starts_with("--to: h2 has no port, so it is the name of a host"), "{error}");
        assert!(error.contains("No host daemon answers at /nowhere/host.sock"), "{error}");
    }

    #[test]
    fn a_destination_without_a_port_is_refused() {
        let error = connect("192.0.2.1", 1).unwrap_err().to_string();
        assert!(error.contains("like 192.0.2.1:7000"), "{error}");
    }
}
