//! A guest migrates between two hosts many times, every few seconds, while perftest runs between it and another guest. Memory and
//! descriptors of daemons, monitors and the cluster service must not grow with the number of migrations.
//!
//! Hosts, guests and network are those of `migrate-rdma`.

use super::migrate_rdma;
use super::migrate_talk as talk;
use super::rdma_fabric;
use crate::busy::{self, Look};
use crate::growth::{self, Holding, Limit};
use crate::lab::Lab;
use crate::progress;
use crate::rdma::{Device, Layout, Member, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate-many",
    about: "a guest moves --count times in a row (100), a move every --seconds (5), with perftest running: no error, no growth of memory or descriptors",
    topology: rdma_fabric::topology,
    run,
    prompt: None,
};

/// Nothing may grow from this migration on, or from half of them if there are fewer than twice as many.
const FROM: usize = 10;
/// Permitted variation between two of many migrations. 6 MiB correspond to a leak of 68 KiB per migration in 90 of them.
const LIMIT: Limit = Limit { anonymous_kib: 6 << 10, mappings: 40, descriptors: 8 };
/// Time-out until perftest prints a line after the last migration: it prints one per three seconds of the guest's clock.
const GOES_ON: Duration = Duration::from_secs(90);
/// Port of perftest's server.
const PORT: u16 = 18515;
/// Number of perftest's queue pairs.
const QUEUE_PAIRS: usize = 4;
/// The hosts' link accepts packets of the emulator's limit. An emulated host takes a tenth of a millisecond per packet, independent of
/// its length, where a real NIC segments.
const LONG_PACKETS: &str = "ip link set x0 mtu 60000 && ip link set br1 mtu 60000";
/// Doorbells stay trapped. Otherwise the daemon would poll them in memory without a pause, on the host's only CPU, which its guest and
/// the copy need, too.
const TRAPPED: &str = " --doorbell-window 1";
/// Size of perftest's messages in bytes.
const LENGTH: u32 = 4096;

/// Returns the command of an endless perftest with periodic output. Its queue pairs retransmit after 2 s: emulated hosts may stall that
/// long.
pub(super) fn perftest(m: &Member<'_>, port: u16, server: &str) -> String {
    format!(
        "({IN_QUARTER}stdbuf -oL ib_send_bw -p {port} -d {} -x {} -F -q {QUEUE_PAIRS} -s {LENGTH} -t 32 -u 19 --run_infinitely -D 3 {server})",
        m.port.device, m.port.gid
    )
}

/// Ends perftest in a guest. Returns its output, and whether that shows a failure.
pub(super) fn perftest_ends(m: &Member<'_>, name: &str) -> Result<(bool, String)> {
    let said = m.sh(&format!("cat /run/{name}.out; pkill -x ib_send_bw; true"))?;
    let failed =
        ["Completion with error", "Failed status", "ailed to"].iter().any(|word| said.contains(word));
    Ok((failed, said))
}

/// Limits later programs of a guest's shell to a quarter of a CPU. perftest polls, and slows the copy of memory on an emulated host
/// down several times. Its rate means nothing here.
pub(super) const QUARTER: &str = "mkdir -p /sys/fs/cgroup && { mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; } && \
     echo +cpu > /sys/fs/cgroup/cgroup.subtree_control && mkdir -p /sys/fs/cgroup/work && echo '25000 100000' > /sys/fs/cgroup/work/cpu.max";
const IN_QUARTER: &str = "echo 0 > /sys/fs/cgroup/work/cgroup.procs; exec ";

/// Returns the number of messages per line that perftest printed.
fn messages(said: &str) -> Vec<u64> {
    let length = LENGTH.to_string();
    let sent = |line: &str| {
        let mut words = line.split_whitespace();
        if words.next()? == length { words.next()?.parse().ok() } else { None }
    };
    said.lines().filter_map(sent).collect()
}

/// Returns the number of lines with figures that the client has printed.
fn lines(m: &Member<'_>) -> Result<u64> {
    lines_of(m, "work")
}

/// As [`lines`], of the perftest with that name.
pub(super) fn lines_of(m: &Member<'_>, name: &str) -> Result<u64> {
    let said = m.sh(&format!("grep -c '^ *{LENGTH} ' /run/{name}.out || true"))?;
    said.trim().parse().with_context(|| format!("grep counted {said:?}"))
}

/// As [`lines`], and fails if perftest has ended.
fn goes_on(m: &Member<'_>) -> Result<u64> {
    let said =
        m.sh(&format!("[ -e /run/work.code ] && echo ended; grep -c '^ *{LENGTH} ' /run/work.out || true"))?;
    said.trim().parse().with_context(|| format!("perftest in guest {}: {said:?} lines", m.name))
}

pub(super) fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| bail!("A thread panicked"))
}

fn shown(holding: &Holding) -> Value {
    holding
        .iter()
        .map(|(role, held)| {
            let held = json!({"anonymous_kib": held.anonymous_kib, "resident_kib": held.resident_kib,
                "mappings": held.mappings, "descriptors": held.descriptors});
            (role.clone(), held)
        })
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// Returns the first sample for the comparison with the last one of `moves` migrations: at least [`FROM`], on the same host.
fn first_compared(moves: usize) -> usize {
    let from = FROM.min(moves / 2).max(1);
    from + (moves - from) % 2
}

/// Samples the hosts' CPU time, if enabled.
fn looks(lab: &Lab) -> Result<Vec<Look>> {
    if busy::wanted() { lab.hosts().iter().map(Look::take).collect() } else { Ok(Vec::new()) }
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.rdma_device()? != Device::Pvrdma {
        bail!("migrate-many is about Causeway's device");
    }
    let moves = usize::try_from(options.count.unwrap_or(100))?;
    let every = Duration::from_secs(options.seconds.unwrap_or(5));
    let _service = talk::service(lab)?;
    for host in lab.hosts() {
        host.sh(LONG_PACKETS)?;
    }
    let mut layout = Layout { cmdline: talk::SMALL, ..talk::layout(&[0, 1]) };
    for daemon in &mut layout.daemons {
        daemon.push_str(TRAPPED);
    }
    let mut pair = Pair::place(lab, options, layout)?;
    talk::shrink(&pair.a)?;
    for m in [&pair.a, &pair.b] {
        m.sh(QUARTER)?;
    }
    talk::detach(&pair.b, &perftest(&pair.b, PORT, ""))?;
    talk::detach(&pair.a, &perftest(&pair.a, PORT, &pair.b.tcp))?;
    let began = Instant::now();
    let (first, mut transports) = loop {
        let (found, by) = talk::connected(&pair.a)?;
        if found.len() >= QUEUE_PAIRS && lines(&pair.a)? > 0 {
            break (found, by);
        }
        if began.elapsed() > talk::STEP_TIMEOUT {
            bail!("perftest doesn't begin: {found:?}, {}", pair.a.sh("cat /run/work.out")?);
        }
        std::thread::sleep(Duration::from_secs(2));
    };
    if busy::wanted() {
        progress!("memory of guest a: {}", pair.a.sh("tr -s ' \n' ' ' < /proc/meminfo")?);
    }
    let mut errors = 0_u32;
    let from = first_compared(moves);
    let mut samples: BTreeMap<usize, Holding> = BTreeMap::new();
    let (mut needed, mut pauses, mut silent) = (Vec::new(), Vec::new(), 0);
    let mut printed = lines(&pair.a)?;
    let mut next = Some(migrate_rdma::awaited(&pair, 1)?);
    let began = Instant::now();
    for number in 1..=moves {
        let start = Instant::now();
        let coming = next.take().context("Nobody waits for the guest")?;
        let idle = looks(lab)?;
        let timeline = migrate_rdma::go(lab, &mut pair, coming, number % 2, migrate_rdma::BEFORE)
            .with_context(|| format!("Move {number}"))?;
        let moved = start.elapsed();
        let at_end = looks(lab)?;
        for ((host, end), begin) in lab.hosts().iter().zip(&at_end).zip(&idle) {
            progress!("{} was busy with: {}", host.name(), end.since(begin));
        }
        pauses.push(timeline["pause_ms"].as_f64().unwrap_or(0.0));
        if number == from || number == moves || number % 10 == 0 {
            // Before the next monitor exists.
            samples.insert(number, growth::held(lab.hosts())?);
        }
        // The next migration's monitor starts while the guest is examined: most of both is waiting for an emulated host.
        let looked = std::thread::scope(|scope| {
            let next =
                (number < moves).then(|| scope.spawn(|| migrate_rdma::awaited(&pair, (number + 1) % 2)));
            let peer = scope.spawn(|| talk::works(&pair.b));
            let found = scope.spawn(|| talk::connected(&pair.a));
            let looked = goes_on(&pair.a).and_then(|count| {
                let peer = joined(peer)?;
                let found = joined(found)?;
                peer.then_some((found, count)).context("perftest in guest b has ended")
            });
            let next = next.map(joined);
            (looked, next)
        });
        next = looked.1.transpose()?;
        let ((now, by), count) = looked.0.with_context(|| format!("After move {number}"))?;
        errors += u32::from(now != first);
        report
            .check(now == first, format!("queue pairs were {first:?}, and are {now:?} after move {number}"));
        transports.extend(by);
        silent += u32::from(count == printed);
        printed = count;
        let busy = start.elapsed();
        // A migration that exceeds the interval starts the next one at once, and later ones catch up.
        let due = every * u32::try_from(number).unwrap_or(u32::MAX);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        needed.push(busy);
        progress!(
            "move {number}/{moves}, after {:.0} s: {:.1} s, of which the command {:.1} s, the migration {:.1} s, pause {:.1} s (emulated: says nothing), {} bytes in {} rounds",
            began.elapsed().as_secs_f64(),
            busy.as_secs_f64(),
            moved.as_secs_f64(),
            timeline["total_ms"].as_f64().unwrap_or(0.0) / 1000.0,
            timeline["pause_ms"].as_f64().unwrap_or(0.0) / 1000.0,
            timeline["bytes"],
            timeline["rounds"].as_array().map_or(0, Vec::len)
        );
        if let Some(held) = samples.get(&number) {
            progress!("{}", shown(held));
        }
    }
    let took = began.elapsed();
    // It must also continue after the last migration. A guest in an emulated host may need ten seconds for a line.
    let (before, still) = (lines(&pair.a)?, Instant::now());
    let mut after = before;
    while after <= before && still.elapsed() < GOES_ON {
        std::thread::sleep(Duration::from_secs(1));
        after = lines(&pair.a)?;
    }
    let line_after = still.elapsed();
    if after <= before {
        // Distinguishes a hang from slowness: its output and the guest's clock, some seconds apart.
        let look = "cat /proc/uptime; tail -n 2 /run/work.out; ps -o pid,stat,time,args | grep ib_send; sleep 5; cat /proc/uptime; \
             tail -n 2 /run/work.out; ps -o pid,stat,time,args | grep ib_send; true";
        let said = pair.a.sh(look)?;
        report.check(
            false,
            format!("perftest doesn't go on after the last move: {before} lines, then {after}; {said}"),
        );
    }
    talk::go_on(&pair)?;
    for m in [&pair.a, &pair.b] {
        let (failed, said) = perftest_ends(m, "work")?;
        if m.name == pair.a.name {
            let sent = messages(&said);
            report.figure("perftest_lines", sent.len() as u64);
            report.figure("perftest_messages", sent.iter().sum::<u64>());
        }
        errors += u32::from(failed);
        report.check(!failed, format!("perftest in guest {}: {said}", m.name));
        errors += talk::complaints(m, report)?;
    }
    let (Some(first), Some(last)) = (samples.get(&from), samples.get(&moves)) else { bail!("Nothing moved") };
    let grown = growth::grown(first, last, LIMIT);
    for sentence in &grown {
        report.check(false, format!("from move {from} to {moves}: {sentence}"));
    }
    pauses.sort_unstable_by(f64::total_cmp);
    needed.sort_unstable();
    let in_tenths = |time: Option<&Duration>| (time.map_or(0.0, Duration::as_secs_f64) * 10.0).round() / 10.0;
    report.figure("moves", moves as u64);
    report.figure("errors", errors);
    report.figure("grown", grown.len() as u64);
    report.figure("seconds_from_one_to_the_next", (took.as_secs_f64() / moves as f64 * 10.0).round() / 10.0);
    // Duration of a migration with all samples. One that exceeds the interval is compensated only by faster ones.
    report.figure("seconds_of_a_move_median", in_tenths(needed.get(needed.len() / 2)));
    report.figure("seconds_of_a_move_longest", in_tenths(needed.last()));
    report.figure("pause_ms_median", pauses.get(pauses.len() / 2).copied().unwrap_or(0.0).round());
    report.figure("moves_without_a_line_of_perftest", silent);
    report.figure("seconds_to_the_line_after_the_last", line_after.as_secs());
    report.figure("transports", transports.into_iter().collect::<Vec<_>>());
    report.figure("compared_from_move", from as u64);
    report.figure("held_then", shown(first));
    report.figure("held_last", shown(last));
    report.check(errors == 0, format!("{errors} errors"));
    pair.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as perftest prints them, among its other lines.
    #[test]
    fn perftests_messages_are_counted() {
        let said = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 4096           1024             0.00               1.33   \t\t     0.000341\n\
            4096 bytes\n 4096           77             0.00               0.10   \t\t     0.000026\n";
        assert_eq!(messages(said), [1024, 77]);
        assert!(messages("").is_empty());
    }

    /// Both samples are of migrations to the same host, with as many migrations between them as possible.
    #[test]
    fn samples_are_compared_on_the_same_host() {
        assert_eq!(first_compared(100), 10);
        assert_eq!(first_compared(101), 11);
        assert_eq!(first_compared(4), 2);
        assert_eq!(first_compared(1), 1);
        for moves in 1..200 {
            let from = first_compared(moves);
            assert!(from <= moves && (moves - from).is_multiple_of(2), "{moves}");
        }
    }
}
