//! Tools over the networks of two guests, and their exits.

use crate::channel::Output;
use crate::scenarios::neighbours_member::Member;
use crate::{progress, rdma};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Time-out of a tool, which takes minutes on a busy machine.
pub(super) const TOOL_TIMEOUT: Duration = Duration::from_secs(480);
/// MiB of each transfer with a checksum.
pub(super) const MIB: u64 = 32;
/// Bytes of a request, and of its response.
const REQUEST: u64 = 64;
/// The guests.
pub(super) const NAMES: [&str; 2] = ["a", "b"];

/// Figures of a part of the scenario.
pub(super) type Found = Result<Value>;

/// A network to a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Net {
    /// The guest module `mmnet`, over the neighbours' rings.
    Mmnet,
    /// virtio-net, taps and a bridge of the host.
    Virtio,
    /// virtio-net whose frames go to neighbours.
    Direct,
}

impl Net {
    pub(super) fn name(self) -> &'static str {
        match self {
            Net::Mmnet => "mmnet",
            Net::Virtio => "virtio",
            Net::Direct => "neighbours",
        }
    }

    /// Returns the address of guest `number`.
    pub(super) fn address(self, number: usize) -> String {
        match self {
            Net::Mmnet => format!("10.81.0.{number}"),
            Net::Virtio => format!("10.79.0.{number}"),
            Net::Direct => format!("10.82.0.{number}"),
        }
    }
}

/// Returns a guest's number, from 1 on: the last part of its addresses.
pub(super) fn number(of: &Member<'_>) -> usize {
    if of.name == NAMES[0] { 1 } else { 2 }
}

/// Returns the exits of both guests, of all kinds.
fn exits(a: &Member<'_>, b: &Member<'_>) -> Result<u64> {
    Ok(a.exits()? + b.exits()?)
}

/// Transfers random bytes from one guest to the other, and compares checksums.
pub(super) fn transfer(net: Net, from: &Member<'_>, to: &Member<'_>) -> Result<()> {
    let server = "socat -u TCP-LISTEN:7001,reuseaddr - | sha256sum | sed 's/^/SUM /'";
    let client = format!(
        "head -c {bytes} /dev/urandom > /tmp/w && echo SUM $(sha256sum < /tmp/w) && socat -u FILE:/tmp/w TCP:{address}:7001; s=$?; rm /tmp/w; exit $s",
        bytes = MIB << 20,
        address = net.address(number(to))
    );
    let (got, sent) = rdma::both((to, from), server, true, &listens(7001), &client, TOOL_TIMEOUT)?;
    let sum = |o: &Output| -> Result<String> {
        let line = o.stdout.lines().find_map(|l| l.strip_prefix("SUM ")?.split_whitespace().next());
        line.map(str::to_owned).with_context(|| format!("no checksum: {:?} {:?}", o.stdout, o.stderr))
    };
    let (got, sent) = (sum(&got)?, sum(&sent)?);
    if got != sent {
        bail!("{MIB} MiB over {} arrived changed: {sent} became {got}", net.name());
    }
    Ok(())
}

/// Returns a condition that holds when a process listens on a TCP port.
pub(super) fn listens(port: u16) -> String {
    format!("ss -Hltn sport = :{port} | grep -q .")
}

/// Runs iperf3 both ways over two networks; returns exits per MiB.
pub(super) fn throughput((a, b): (&Member<'_>, &Member<'_>), nets: [Net; 2], seconds: u64) -> Found {
    let mut found = Map::new();
    for net in nets {
        for (direction, reverse) in [("a_to_b", ""), ("b_to_a", "-R")] {
            let client = format!("iperf3 -J -t {seconds} {reverse} -c {}", net.address(2));
            let before = exits(a, b)?;
            let (_, client) =
                rdma::both((b, a), "iperf3 -s -1 > /dev/null", true, &listens(5201), &client, TOOL_TIMEOUT)?;
            let exits = exits(a, b)? - before;
            let bytes = iperf_bytes(&client.stdout)
                .with_context(|| format!("iperf3 ended with {}: {}", client.code, client.stderr))?;
            let mib = bytes as f64 / f64::from(1 << 20);
            let line = json!({"mib": mib, "mbits": bytes as f64 * 8e-6 / seconds as f64, "exits": exits, "exits_per_mib": exits as f64 / mib});
            progress!("  {} {direction}: {line}", net.name());
            found.insert(format!("{}_{direction}", net.name()), line);
        }
    }
    Ok(found.into())
}

/// Returns the received bytes in iperf3's JSON.
fn iperf_bytes(text: &str) -> Result<u64> {
    let tree: Value = serde_json::from_str(text).context("iperf3 printed no JSON")?;
    let bytes = tree["end"]["sum_received"]["bytes"].as_u64().filter(|b| *b > 0);
    bytes.with_context(|| format!("iperf3 received nothing: {}", tree["error"]))
}

/// Runs requests and responses of 64 bytes by fio's network engine; returns exits per transaction.
pub(super) fn requests((a, b): (&Member<'_>, &Member<'_>), nets: [Net; 2], count: u64) -> Found {
    let mut found = Map::new();
    for net in nets {
        let fio = |more: &str| {
            format!(
                "fio --eta=never --name=rr --ioengine=net --protocol=tcp --nodelay=1 --pingpong=1 --port=8888 --bs={REQUEST} --size={} --thread \
                 --output-format=json {more}",
                REQUEST * count
            )
        };
        let client = fio(&format!("--rw=write --hostname={}", net.address(2)));
        let before = exits(a, b)?;
        let server = fio("--rw=read --listen");
        let (_, client) = rdma::both((b, a), &server, true, &listens(8888), &client, TOOL_TIMEOUT)?;
        let exits = exits(a, b)? - before;
        let (done, micros) = fio_transactions(&client.stdout)
            .with_context(|| format!("fio ended with {}: {}", client.code, client.stderr))?;
        if done < count {
            bail!("{done} of {count} transactions over {} were done", net.name());
        }
        let line = json!({"transactions": done, "exits": exits, "exits_per_transaction": exits as f64 / done as f64, "microseconds": micros});
        progress!("  {}: {line}", net.name());
        found.insert(net.name().into(), line);
    }
    Ok(found.into())
}

/// Returns fio's number of writes, and the time of one with its response in µs.
fn fio_transactions(text: &str) -> Result<(u64, f64)> {
    let start = text.find('{').context("fio printed no JSON")?;
    let tree: Value = serde_json::from_str(&text[start..]).context("fio's JSON can't be read")?;
    let write = &tree["jobs"][0]["write"];
    let done = write["total_ios"].as_u64().context("fio's JSON has no total_ios")?;
    let runtime = write["runtime"].as_f64().context("fio's JSON has no runtime")?;
    Ok((done, runtime * 1000.0 / done.max(1) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_read() {
        assert_eq!(iperf_bytes(r#"{"end":{"sum_received":{"bytes":42}}}"#).unwrap(), 42);
        assert!(iperf_bytes(r#"{"error":"unable to connect","end":{}}"#).is_err());
        let text = "x\n{\"jobs\":[{\"write\":{\"total_ios\":1000,\"runtime\":50}}]}";
        assert_eq!(fio_transactions(text).unwrap(), (1000, 50.0));
        assert!(fio_transactions("{}").is_err());
    }
}
