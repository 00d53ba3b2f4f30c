//! A guest migrates between monitors under load. It counts, hashes memory repeatedly, writes and verifies its disk, and reports each
//! step over one TCP connection to the host, which also pings it. Nothing may be lost, and one monitor runs it at a time.

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "migrate",
    about: "a working guest with disk and network moves from monitor to monitor of one host, one move is refused, one cancelled, and one destination is killed: nothing lost",
    topology: |_| Topology::new().host(HostSpec::new("host").memory(4096)),
    run,
    prompt: None,
};

pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(180);
pub(super) const NET: &str = "10.78.0";
/// The disk's part of a step: writes are read back, bypassing the guest's page cache.
const VERIFY: &str = r#"place=$((n % 400))
    dd if=/tmp/w/new of=/dev/vdb bs=128k count=1 seek=$place conv=notrunc oflag=direct 2>/dev/null || wrong=$((wrong+1))
    [ "$(dd if=/dev/vdb bs=128k count=1 skip=$place iflag=direct 2>/dev/null | sha256sum)" = "$sum" ] || wrong=$((wrong+1))"#;

/// Creates a bridge with an address, a tap per place of the guest, and the disk.
pub(super) fn prepare(host: &Host) -> Result<()> {
    host.sh(&format!(
        "ip link add br0 type bridge && ip addr add {NET}.1/24 dev br0 && ip link set br0 up && \
         for t in 0 1; do ip tuntap add tap$t mode tap vnet_hdr && ip link set tap$t master br0 && ip link set tap$t up; done && \
         mke2fs -q -F -t ext4 -O ^has_journal /dev/vdc 1G && mkdir -p /disks && mount /dev/vdc /disks && truncate -s 64M /disks/data"
    ))
    .map(drop)
}

/// Returns the guest's script, which runs until the host opens port 7002. It reports each step as a line on the console and over one
/// TCP connection.
pub(super) fn script(disk: bool) -> String {
    let verify = if disk { VERIFY } else { "" };
    let mut s = super::net::guest_up(NET);
    s.push_str(&format!(
        r#"mkdir -p /tmp/w; head -c 16777216 /dev/urandom > /tmp/w/keep; kept=$(sha256sum < /tmp/w/keep)
boot=$(cat /proc/sys/kernel/random/boot_id)
work() {{
  n=0; wrong=0
  while ! socat -u OPEN:/dev/null TCP:{NET}.1:7002 2>/dev/null; do
    n=$((n+1))
    [ $((n % 8)) = 0 ] && [ "$(sha256sum < /tmp/w/keep)" != "$kept" ] && wrong=$((wrong+1))
    head -c 131072 /dev/urandom > /tmp/w/new; sum=$(sha256sum < /tmp/w/new)
    {verify}
    echo "WORK $n $wrong $boot" | tee /dev/console
  done
}}
work | socat -u - TCP:{NET}.1:7001
"#
    ));
    s
}

fn spec(name: &str, kernel: &str, tap: u32) -> GuestSpec {
    GuestSpec::new(name, kernel, 2)
        .memory(384)
        .root()
        .disk("/disks/data", false)
        .tap(&format!("tap{tap}"))
        .script(&script(true))
}

/// Starts a monitor that waits at a port of its own; returns when it listens.
fn waiting(host: &Host, kernel: &str, number: u32, memory: u32) -> Result<Guest> {
    let mut spec = spec(&format!("place{number}"), kernel, number % 2).memory(memory);
    spec.extra.push(format!("--incoming 127.0.0.1:{}", port(number)));
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    let listens = format!(
        "for i in $(seq 300); do ss -Hltn 'sport = :{}' | grep -q . && causeway inspect place{number} summary | grep -q incoming && exit 0; sleep 0.3; done; exit 1",
        port(number)
    );
    if host.run(&listens, STEP_TIMEOUT)?.code != 0 {
        bail!("The monitor place{number} doesn't wait for a VM: {}", guest.session.err.tail(5));
    }
    Ok(guest)
}

fn port(number: u32) -> u32 {
    7100 + number
}

/// Returns the command that migrates the guest. Every other migration repeats pre-copy rounds until little is left. The others stop the
/// guest early, as an emulated host copies slowly.
fn migrate(number: u32, to: u32) -> String {
    let how = if number % 2 == 1 { "--downtime 100 --streams 3" } else { "--downtime 3000 --streams 2" };
    format!("causeway --json migrate place{number} --to 127.0.0.1:{} {how}", port(to))
}

/// One step of the guest as received by the host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) number: u64,
    pub(super) wrong: u64,
    pub(super) boot: String,
}

pub(super) fn steps(text: &str) -> Vec<Step> {
    let step = |line: &str| {
        let mut words = line.strip_prefix("WORK ")?.split_whitespace();
        Some(Step {
            number: words.next()?.parse().ok()?,
            wrong: words.next()?.parse().ok()?,
            boot: words.next()?.to_owned(),
        })
    };
    text.lines().filter_map(step).collect()
}

/// Returns the number of steps that are missing, repeated or out of order, and of boot ids besides the first.
pub(super) fn breaks(steps: &[Step]) -> usize {
    let orders = steps.iter().zip(1u64..).filter(|(step, expected)| step.number != *expected).count();
    let boots =
        steps.iter().filter(|step| Some(&step.boot) != steps.first().map(|first| &first.boot)).count();
    orders + boots
}

fn heard(host: &Host) -> Result<u64> {
    Ok(host.sh("wc -l < /tmp/steps || true")?.trim().parse().unwrap_or(0))
}

/// Waits until the guest has made `more` steps and answers a ping.
pub(super) fn works_on(host: &Host, guest: &Guest, more: u64) -> Result<()> {
    let from = heard(host)?;
    let script = format!(
        "for i in $(seq 400); do [ $(wc -l < /tmp/steps) -ge {} ] && break; sleep 0.3; done; [ $(wc -l < /tmp/steps) -ge {} ] && \
         for i in $(seq 20); do ping -c 1 -W 2 {NET}.2 >/dev/null && exit 0; done; exit 1",
        from + more,
        from + more
    );
    if host.run(&script, STEP_TIMEOUT)?.code != 0 {
        bail!(
            "Guest {} doesn't go on after step {from}: console {:?}, monitor {:?}",
            guest.spec.name,
            guest.session.out.tail(4),
            guest.session.err.tail(6)
        );
    }
    Ok(())
}

/// Returns the VM's state as a monitor reports it.
fn state(host: &Host, number: u32) -> Result<String> {
    Ok(host
        .sh(&format!("causeway --json inspect place{number} summary/state"))?
        .trim()
        .trim_matches('"')
        .to_owned())
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    if options.vmm()? != Vmm::Causeway {
        bail!("Only our monitor takes part in this scenario");
    }
    lab.install_causeway()?;
    let host = lab.host(0)?;
    prepare(host)?;
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let moves = options.count.unwrap_or(5);
    let _steps =
        host.spawn("steps", "exec socat -u TCP-LISTEN:7001,reuseaddr OPEN:/tmp/steps,creat,append")?;
    let mut errors = 0;

    let mut guest = Guest::start(host, &spec("place0", kernel, 0), Vmm::Causeway)?;
    guest.expect("WORK 2 ", STEP_TIMEOUT)?;
    let ping = host.spawn("ping", &format!("exec ping -n -i 0.5 {NET}.2"))?;

    // A monitor with another configuration refuses, without effect on the guest.
    let other = waiting(host, kernel, 1, 256)?;
    let refused = host.run(&migrate(0, 1), STEP_TIMEOUT)?;
    report.check(
        refused.code != 0 && refused.stderr.contains("its memory is"),
        format!("a destination with other memory was to refuse; it said {:?}", refused.stderr),
    );
    other.session.wait(STEP_TIMEOUT)?.context("A destination that refused didn't end")?;
    works_on(host, &guest, 2)?;

    // The destination dies during pre-copy: the guest continues at the source.
    let doomed = waiting(host, kernel, 1, 384)?;
    let killed = host.run(
        &format!(
            "({} --max-throttle 0 >/tmp/doomed 2>&1; echo $? >/tmp/doomed.code) & \
             for i in $(seq 200); do causeway --json inspect place0 migration/phase | grep -q copying && break; sleep 0.05; done; \
             kill -9 $(causeway --json inspect place1 summary/pid); wait; cat /tmp/doomed.code",
            migrate(0, 1)
        ),
        STEP_TIMEOUT,
    )?;
    doomed.session.wait(STEP_TIMEOUT)?.context("A killed monitor didn't end")?;
    report.check(
        killed.stdout.trim() == "1" && state(host, 0)? == "running",
        format!("the guest of a killed destination was to go on: {killed:?}, {}", state(host, 0)?),
    );
    works_on(host, &guest, 2)?;

    // A cancelled migration: without throttling, and with nearly no permitted blackout, it would not converge.
    let idle = waiting(host, kernel, 1, 384)?;
    let cancelled = host.run(
        &format!(
            "({} --downtime 0 --max-throttle 0 >/tmp/cancelled 2>&1; echo $? >/tmp/cancelled.code) & \
             for i in $(seq 200); do causeway --json inspect place0 migration/phase | grep -q copying && break; sleep 0.05; done; \
             causeway migrate place0 --cancel; wait; cat /tmp/cancelled.code /tmp/cancelled",
            migrate(0, 1).replace(" --downtime 3000", "")
        ),
        STEP_TIMEOUT,
    )?;
    idle.session.wait(STEP_TIMEOUT)?.context("The destination of a cancelled migration didn't end")?;
    report.check(
        cancelled.stdout.contains("\n1\n") && cancelled.stdout.contains("The migration was cancelled"),
        format!("a migration was to be cancelled: {cancelled:?}"),
    );
    works_on(host, &guest, 2)?;

    let (mut bytes, mut rounds, mut pause) = (0, 0, 0f64);
    for number in 0..moves {
        let next = waiting(host, kernel, number + 1, 384)?;
        let output = host.run(&migrate(number, number + 1), STEP_TIMEOUT)?;
        if output.code != 0 {
            bail!(
                "Move {} failed: {}; source {:?}, destination {:?}",
                number + 1,
                output.stderr,
                guest.session.err.tail(8),
                next.session.err.tail(8)
            );
        }
        let timeline: Value = serde_json::from_str(output.stdout.trim())
            .with_context(|| format!("The timeline is {:?}", output.stdout))?;
        // The source ends by itself, successfully.
        guest.ended(STEP_TIMEOUT)?;
        errors += guest.trouble().len();
        guest = next;
        works_on(host, &guest, 3)?;
        report.check(state(host, number + 1)? == "running", format!("place{} doesn't run", number + 1));
        let part = |name: &str| timeline[name].as_f64().unwrap_or(0.0);
        let list = timeline["rounds"].as_array().map_or(0, Vec::len);
        bytes += timeline["bytes"].as_u64().unwrap_or(0);
        rounds += list;
        pause = pause.max(timeline["pause_ms"].as_f64().unwrap_or(0.0));
        progress!(
            "move {}/{moves}: {list} rounds, {} bytes, state {} bytes, pause {:.0} ms: stop {:.0}, rest {:.0}, restore {:.0}, commit {:.0} (emulated: says nothing)",
            number + 1,
            timeline["bytes"],
            timeline["state_bytes"],
            part("pause_ms"),
            part("stop_ms"),
            part("rest_ms"),
            part("restore_ms"),
            part("commit_ms")
        );
    }

    // The guest ends by itself when the port is open.
    let _end = host.spawn("end", "exec socat -u TCP-LISTEN:7002,reuseaddr,fork OPEN:/dev/null,append")?;
    let status = guest.script_status(STEP_TIMEOUT)?;
    guest.ended(STEP_TIMEOUT)?;
    errors += guest.trouble().len();
    ping.signal(2)?;
    ping.wait(STEP_TIMEOUT)?;
    let steps = steps(&host.sh("cat /tmp/steps")?);
    let wrong = steps.last().map_or(1, |step| step.wrong);
    let broken = breaks(&steps);
    let pinged = ping.out.text();
    let answers = pinged.lines().filter(|line| line.contains("bytes from")).count();
    let repeated = pinged.lines().filter(|line| line.contains("DUP!")).count();
    errors += broken + repeated + usize::try_from(wrong).unwrap_or(usize::MAX);

    report.figure("moves", moves);
    report.figure("errors", errors);
    report.figure("refused", 1);
    report.figure("killed_destinations", 1);
    report.figure("cancelled", 1);
    report.figure("steps", steps.len());
    report.figure("wrong_hashes", wrong);
    report.figure("steps_missing_or_repeated", broken);
    report.figure("rounds", rounds);
    report.figure("bytes", bytes);
    report.figure("longest_pause_ms_emulated", pause);
    report.figure("pings_answered", answers);
    report.figure("pings_repeated", repeated);
    report.figure("guest_status", status);
    report.check(errors == 0, format!("{errors} errors; steps {:?} to {:?}", steps.first(), steps.last()));
    report.check(steps.len() as u64 >= u64::from(moves) * 3, format!("only {} steps arrived", steps.len()));
    report.check(status == 0, format!("the guest's script ended with status {status}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lost, a repeated and a foreign step are each detected.
    #[test]
    fn breaks_in_the_steps_are_counted() {
        let of = |text: &str| breaks(&steps(text));
        assert_eq!(of("WORK 1 0 a\nWORK 2 0 a\nWORK 3 0 a\n"), 0);
        assert_eq!(of("WORK 1 0 a\nWORK 3 0 a\n"), 1);
        assert_eq!(of("WORK 1 0 a\nWORK 1 0 a\nWORK 2 0 a\n"), 2);
        assert_eq!(of("WORK 1 0 a\nWORK 2 0 b\n"), 1);
        assert_eq!(steps("junk\nWORK x\nWORK 7 2 c")[0].wrong, 2);
    }
}
