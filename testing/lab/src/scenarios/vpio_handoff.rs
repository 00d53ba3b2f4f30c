//! Two guests share a card of their host (RTL8139, e1000, NE2000) by hand-offs, each with the unmodified driver, under ping and TCP in
//! both directions.
//!
//! ```text
//!   guest g0 10.82.0.2 ─ vfio-user ─┐
//!                                   ├─ causeway card ─ card (QEMU's, behind an emulated IOMMU) ─ wire ─ e1000 10.82.0.1 ─ host
//!   guest g1 10.82.0.3 ─ vfio-user ─┘
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::vpio_nics::{self, CARDS, Card, HOST_SIDE};
use crate::channel::Session;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::guest_channel;
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::rdma;
use crate::scenario::{Options, Report, Scenario};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "vpio-handoff",
    about: "Two guests share one card (--only rtl8139, e1000 or ne2000) by context switch: hand-offs per second, lost frames and driver errors under ping and TCP",
    topology: vpio_nics::topology,
    run,
    prompt: None,
};

/// The cards in order.
const ORDER: [&str; 3] = ["rtl8139", "e1000", "ne2000"];
/// Guests, and the last bytes of their addresses.
const GUESTS: [(&str, u8); 2] = [("g0", 2), ("g1", 3)];
const SECONDS: u64 = 600;
/// Milliseconds between pings, each way and guest: low load for an emulated host. An NE2000's guest makes a hundred accesses per ping.
const BETWEEN: u64 = 500;
const NE2000_BETWEEN: u64 = 2000;
/// Bytes of each TCP exchange: sent, echoed, compared. An NE2000 moves four bytes per access, which is a message here.
const BYTES: u32 = 16384;
const NE2000_BYTES: u32 = 4096;
/// A guest's time slice in milliseconds while the other waits: an access costs milliseconds here.
const SLICE: u32 = 20;
const BOOT: Duration = Duration::from_secs(600);
/// Required minimum of hand-offs per second.
const PER_SECOND: f64 = 5.0;

fn address(last: u8) -> String {
    format!("10.82.0.{last}")
}

fn folder(card: &Card) -> String {
    format!("/run/causeway/card-{}", card.address())
}

fn state(host: &Host, card: &Card) -> Result<Value> {
    let text = host.sh(&format!("causeway inspect --card {} --json", folder(card)))?;
    serde_json::from_str(&text).context("`causeway inspect --card` printed no JSON")
}

/// Starts the card's daemon, which runs until the session is dropped.
fn serve(host: &Host, card: &Card) -> Result<Session> {
    let guests: String = GUESTS.iter().map(|(name, _)| format!(" --guest {name}")).collect();
    let script = format!("exec causeway card {} --slice {SLICE} --limit 3000{guests}", card.address());
    let daemon = host.spawn("card", &script)?;
    let until = Instant::now() + Duration::from_secs(60);
    while host.run(&format!("[ -S {}/state ]", folder(card)), Duration::from_secs(60))?.code != 0 {
        if Instant::now() > until || daemon.try_wait().is_some() {
            bail!("The card's daemon doesn't serve: {}", daemon.err.tail(8));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(daemon)
}

fn boot(host: &Host, card: &Card, name: &str, last: u8, kernel: &str) -> Result<Guest> {
    let own = address(last);
    let script = format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nmount -t tmpfs run /run\nmodprobe {driver} || exit 1\n\
         n=$(ls /sys/class/net | grep -v lo | head -n 1); [ -n \"$n\" ] || {{ dmesg | tail -n 20; exit 2; }}\n\
         ip link set $n name n0; ip addr add {own}/24 dev n0; ip link set n0 up\n\
         echo the nic is $(basename $(readlink /sys/class/net/n0/device/driver)) $(cat /sys/class/net/n0/address)\n{serve}",
        driver = card.driver(),
        serve = guest_channel::serve(&own),
    );
    let mut spec = GuestSpec::new(name, kernel, 1)
        .memory(384)
        .root()
        .script(&script)
        .file("agent", std::fs::read(crate::paths::agent()?)?);
    spec.extra.push(format!(
        "--vsock cid={},socket={} --vfio-user {}/{name}",
        last + 1,
        guest_channel::socket(name),
        folder(card)
    ));
    Guest::start(host, &spec, Vmm::Causeway)
}

/// Starts a script in a guest.
fn inside(host: &Host, name: &str, what: &str, script: &str) -> Result<Session> {
    let quoted = rdma::quoted(&format!("export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root; {script}"));
    host.spawn(&format!("{name}-{what}"), &format!("exec /share/.lab/lab in --wait 60 {name} {quoted}"))
}

/// Returns a `ping` command for a number of echoes, with a long time-out for the last one.
fn ping(card: &Card, to: &str, count: u64) -> String {
    format!("ping -q -c {count} -i {} -W 30 {to}", between(card) as f64 / 1000.0)
}

fn between(card: &Card) -> u64 {
    if card.is("ne2000") { NE2000_BETWEEN } else { BETWEEN }
}

/// Parses sent and answered echoes from ping's summary.
fn echoes(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find(|line| line.contains("packets transmitted"))?;
    let number = |part: &str| part.split_whitespace().next()?.parse().ok();
    let mut parts = line.split(',');
    Some((number(parts.next()?.trim())?, number(parts.next()?.trim())?))
}

/// Parses successful and failed exchanges from [`exchange`]'s last line.
fn exchanges(text: &str) -> Option<(u64, u64)> {
    let mut words = text.lines().find_map(|line| line.strip_prefix("TCP "))?.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

/// Returns a script that sends random bytes to the host's echo server and compares, repeatedly. The guest's receive window fits the
/// card's ring.
fn exchange(card: &Card, port: u16, seconds: u64) -> String {
    let bytes = if card.is("ne2000") { NE2000_BYTES } else { BYTES };
    let window = card.window() / 2;
    format!(
        "exec bash -c 'n=0; e=0; while [ $SECONDS -lt {seconds} ]; do head -c {bytes} /dev/urandom > /tmp/w; \
         timeout 60 socat -t 30 STDIO TCP:{HOST_SIDE}:{port},rcvbuf={window} < /tmp/w > /tmp/r; [ \"$(sha256sum < /tmp/w)\" = \"$(sha256sum < /tmp/r)\" ] || {{ e=$((e+1)); ls -l /tmp/w /tmp/r >&2; }}; n=$((n+1)); sleep 0.5; done; echo TCP $n $e'"
    )
}

/// Returns the error counters of a guest's driver.
fn driver_errors(host: &Host, name: &str) -> Result<u64> {
    let counters = "cd /sys/class/net/n0/statistics && cat rx_errors tx_errors rx_over_errors rx_fifo_errors rx_missed_errors tx_dropped tx_aborted_errors; \
                    dmesg | grep -c -e 'NETDEV WATCHDOG' -e 'n0: .*[Ee]rror' -e 'PCI Bus error'";
    let text = inside(host, name, "errors", &format!("{counters}; true"))?.output(BOOT)?.success()?;
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    if numbers.len() != 8 {
        bail!("The counters of guest {name} are {text:?}");
    }
    Ok(numbers.iter().sum())
}

/// Results of one card.
#[derive(Debug, Default)]
struct Outcome {
    handoffs: u64,
    lost: u64,
    errors: u64,
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    vpio_nics::prepare(host)?;
    let seconds = options.seconds.unwrap_or(SECONDS);
    let kernel = options.kernels.first().map_or("6.1-generic", String::as_str);
    let (mut all, mut cards) = (Outcome::default(), 0);
    for name in ORDER {
        let Some(card) = CARDS.iter().find(|card| card.is(name) && options.wants(name)) else { continue };
        progress!("  {name}");
        let one = share(host, card, seconds, kernel, report).with_context(|| format!("{name} failed"))?;
        cards += 1;
        all.handoffs += one.handoffs;
        all.lost += one.lost;
        all.errors += one.errors;
    }
    if cards == 0 {
        bail!("No card is called {:?}; {ORDER:?} are", options.only);
    }
    report.figure("handoffs", all.handoffs);
    report.figure("lost_frames", all.lost);
    report.figure("driver_errors", all.errors);
    Ok(())
}

/// Tests one card, from its daemon's start to its end.
fn share(host: &Host, card: &Card, seconds: u64, kernel: &str, report: &mut Report) -> Result<Outcome> {
    vpio_nics::address_peer(host, card, "vpio")?;
    let daemon = serve(host, card)?;
    let mut guests = Vec::new();
    for (name, last) in GUESTS {
        guests.push(boot(host, card, name, last, kernel)?);
    }
    for guest in &guests {
        let (line, _) = guest.expect("the nic is", BOOT)?;
        progress!("  {}", line.trim());
        if !line.contains(card.driver()) {
            bail!("The guest's driver is another: {line:?}");
        }
    }
    let looked = work(host, card, seconds, report);
    if looked.is_err() {
        eprintln!("card: {:?}", state(host, card).map(|tree| tree.to_string()));
        eprintln!("daemon: {}", daemon.err.tail(12));
    }
    let outcome = looked?;
    for (guest, (name, _)) in guests.iter().zip(GUESTS) {
        host.sh(&format!("causeway stop {name} --force"))?;
        guest.ended(Duration::from_secs(60))?;
        let trouble = guest.trouble();
        report.check(trouble.is_empty(), format!("the kernel of {name} complained: {trouble:?}"));
    }
    // SIGTERM: it ends in order, and releases the card.
    daemon.signal(15)?;
    let ended = daemon.wait(Duration::from_secs(60))?;
    report.check(ended == Some(0), format!("the card's daemon ended with {ended:?}: {}", daemon.err.tail(4)));
    Ok(outcome)
}

/// Runs ping and TCP in both guests at once; returns the results.
fn work(host: &Host, card: &Card, seconds: u64, report: &mut Report) -> Result<Outcome> {
    let patience = Duration::from_secs(seconds + 300);
    for (name, last) in GUESTS {
        inside(host, name, "first", &ping(card, HOST_SIDE, 2))?.output(BOOT)?.success()?;
        progress!("  {name} ({}) reaches the host", address(last));
    }
    let (before, begin) = (state(host, card)?, Instant::now());
    let count = seconds * 1000 / between(card);
    let (mut pings, mut streams, mut servers) = (Vec::new(), Vec::new(), Vec::new());
    for ((name, last), port) in GUESTS.into_iter().zip(7001..) {
        servers.push(host.spawn(
            &format!("echo-{name}"),
            &format!("exec socat -t 30 TCP-LISTEN:{port},reuseaddr,fork EXEC:cat"),
        )?);
        pings.push((format!("{name} to host"), inside(host, name, "ping", &ping(card, HOST_SIDE, count))?));
        pings.push((
            format!("host to {name}"),
            host.spawn(&format!("ping-{name}"), &format!("exec {}", ping(card, &address(last), count)))?,
        ));
        streams.push((name, inside(host, name, "tcp", &exchange(card, port, seconds))?));
    }
    let (mut lost, mut sent) = (0, 0);
    for (what, session) in &pings {
        let text = session.output(patience)?.stdout;
        let (asked, answered) = echoes(&text).with_context(|| format!("ping {what} said {text:?}"))?;
        progress!("    ping {what}: {asked} asked, {answered} answered");
        lost += asked - answered.min(asked);
        sent += asked;
    }
    let (after, took) = (state(host, card)?, begin.elapsed());
    let (mut carried, mut broken) = (0, 0);
    for (name, session) in &streams {
        let output = session.output(patience)?;
        let text = output.stdout;
        let (all, failed) = exchanges(&text).with_context(|| format!("TCP of {name} said {text:?}"))?;
        progress!("    TCP of {name}: {all} exchanges, {failed} failed");
        if failed > 0 {
            let said: Vec<&str> = output.stderr.lines().rev().take(4).collect();
            progress!("    the last that it said: {}", said.join(" | "));
        }
        report.check(all > 0, format!("{name} had no TCP exchange"));
        carried += all;
        broken += failed;
    }
    drop(servers);
    let mut errors = 0;
    for (name, _) in GUESTS {
        errors += driver_errors(host, name)?;
    }
    progress!("    card: {after}");
    let number = |tree: &Value, path: &str| tree.pointer(path).and_then(Value::as_u64).unwrap_or(0);
    let handoffs = number(&after, "/handoffs") - number(&before, "/handoffs");
    let per_second = handoffs as f64 / took.as_secs_f64();
    for place in ["/card/overruns", "/card/resets"] {
        lost += number(&after, place);
    }
    for (name, _) in GUESTS {
        lost += number(&after, &format!("/guests/{name}/frames/dropped"));
        lost += number(&after, &format!("/guests/{name}/frames/refused"));
        let refused = number(&after, &format!("/guests/{name}/decisions/refused"));
        report.check(refused == 0, format!("the model refused {refused} requests of {name}"));
    }
    let figures = json!({
        "seconds": took.as_secs(),
        "handoffs": handoffs,
        "handoffs_per_second": (per_second * 10.0).round() / 10.0,
        "lost_frames": lost,
        "driver_errors": errors,
        "pings": sent,
        "tcp_exchanges": carried,
        "tcp_failed": broken,
        "forced": number(&after, "/forced"),
        "longest_handoff_microseconds": number(&after, "/longest_handoff_microseconds"),
        "pinned_bytes_peak": number(&after, "/pinned_bytes_peak"),
    });
    progress!("    {}: {figures}", card.name());
    report.figure(card.name(), figures);
    report.check(
        per_second >= PER_SECOND,
        format!("{per_second:.1} hand-offs per second, {PER_SECOND} are to be shown"),
    );
    report.check(lost == 0, format!("{lost} frames were lost"));
    report.check(errors == 0, format!("drivers counted {errors} errors"));
    report.check(broken == 0, format!("{broken} TCP exchanges failed"));
    report.check(after["failed"].is_null(), format!("the card failed: {}", after["failed"]));
    Ok(Outcome { handoffs, lost, errors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ping_and_exchanges_say_is_understood() {
        let text = "PING 10.82.0.1 (10.82.0.1) 56(84) bytes of data.\n\n--- 10.82.0.1 ping statistics ---\n120 packets transmitted, 119 received, 0.83% packet loss, time 59ms\n";
        assert_eq!(echoes(text), Some((120, 119)));
        assert_eq!(echoes("ping: unknown host"), None);
        assert_eq!(exchanges("TCP 12 1\n"), Some((12, 1)));
        assert_eq!(exchanges("TCP \n"), None);
    }

    #[test]
    fn a_card_has_its_folder() {
        assert_eq!(folder(&CARDS[0]), "/run/causeway/card-0000:00:10.0");
    }
}
