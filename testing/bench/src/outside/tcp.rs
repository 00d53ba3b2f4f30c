//! Programs over a link: iperf3 and qperf over TCP, UCX over TCP. The server is on one host, the client on the other, each on a CPU.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};

use super::link::{ADDRESSES, INTERFACE, Link};
use super::process::serve;
use super::ucx;

const IPERF_PORT: &str = "5201";
const UCX_PORT: u16 = 13_337;
const QPERF_PORT: &str = "19765";
/// Bytes of UCX's messages, and of its latency.
const LARGE: u64 = 1 << 20;

/// Required programs: name, harmless argument, package.
pub const PROGRAMS: [(&str, &str, &str); 3] =
    [("iperf3", "-v", "iperf3"), ("qperf", "--version", "qperf"), ucx::PROGRAM];

/// Result of a transfer.
#[derive(Debug, Clone, Copy)]
pub struct Bandwidth {
    /// 10^9 bytes per second.
    pub gigabytes: f64,
    /// Processor time of both ends per GiB in seconds.
    pub cpu_per_gib: f64,
}

/// Parameters of the peers.
pub struct Peers<'a> {
    /// The link.
    pub link: &'a Link,
    /// CPU of each host.
    pub cpus: [usize; 2],
    /// Seconds of each measurement.
    pub seconds: u64,
}

impl Peers<'_> {
    fn pinned(&self, host: usize, program: &str) -> Command {
        let mut command = self.link.on(host, "taskset");
        let cpu = self.cpus.get(host).copied().unwrap_or_default();
        command.args(["-c", &cpu.to_string(), program]);
        command
    }

    /// Measures the bandwidth of one TCP stream with iperf3.
    pub fn iperf3(&self) -> anyhow::Result<Bandwidth> {
        let mut server = self.pinned(1, "iperf3");
        server.args(["-s", "-1", "-p", IPERF_PORT]);
        let client = || {
            let mut client = self.pinned(0, "iperf3");
            client.args([
                "-c",
                &ADDRESSES[1].to_string(),
                "-p",
                IPERF_PORT,
                "-J",
                "-t",
                &self.seconds.to_string(),
            ]);
            client
        };
        let (text, used) = serve("iperf3", &mut server, client, true)?;
        let report: serde_json::Value = serde_json::from_str(&text).context("iperf3's report is not JSON")?;
        let sum = &report["end"]["sum_received"];
        let (Some(bits), Some(bytes)) = (sum["bits_per_second"].as_f64(), sum["bytes"].as_f64()) else {
            bail!("iperf3's report has no end.sum_received");
        };
        Ok(Bandwidth { gigabytes: bits / 8e9, cpu_per_gib: per_gib(used, bytes) })
    }

    fn qperf(&self, test: &str, size: u64) -> anyhow::Result<(String, Duration)> {
        let mut server = self.pinned(1, "qperf");
        server.args(["--listen_port", QPERF_PORT]);
        let client = || {
            let mut client = self.pinned(0, "qperf");
            client.args(["--listen_port", QPERF_PORT, "-t", &self.seconds.to_string()]);
            // Explicit units: bytes per second, nanoseconds.
            client.args(["-uu", "-vvs", "-m", &size.to_string(), &ADDRESSES[1].to_string(), test]);
            client
        };
        serve("qperf", &mut server, client, false)
    }

    /// Measures the bandwidth of one TCP stream with qperf.
    pub fn qperf_bandwidth(&self) -> anyhow::Result<Bandwidth> {
        let (text, used) = self.qperf("tcp_bw", 64 << 10)?;
        let (rate, received) = (value(&text, "bw")?, value(&text, "recv_bytes")?);
        Ok(Bandwidth { gigabytes: rate / 1e9, cpu_per_gib: per_gib(used, received) })
    }

    /// Measures the round trip in microseconds of a message of 8 bytes over TCP, between programs. qperf's own figure is one way.
    pub fn qperf_round_trip(&self) -> anyhow::Result<f64> {
        let (text, _) = self.qperf("tcp_lat", 8)?;
        Ok(2.0 * value(&text, "latency")? / 1e3)
    }

    fn ucx(&self, kind: &str, size: u64, count: u64) -> anyhow::Result<ucx::Ucx> {
        let test = ucx::Test {
            kind,
            size,
            count,
            transports: "tcp",
            device: Some(INTERFACE),
            server: ADDRESSES[1].into(),
            port: UCX_PORT,
        };
        test.run(|host, program| self.pinned(host, program))
    }

    /// Measures the bandwidth of UCX's tagged messages of 1 MiB over TCP.
    pub fn ucx_bandwidth(&self) -> anyhow::Result<Bandwidth> {
        // About 1.5 GB/s.
        let ucx = self.ucx("tag_bw", LARGE, 1500 * self.seconds)?;
        Ok(Bandwidth { gigabytes: ucx.gigabytes, cpu_per_gib: per_gib(ucx.used, ucx.bytes) })
    }

    /// Measures the round trip in microseconds of a tagged message of 8 bytes. UCX's own figure is one way.
    pub fn ucx_round_trip(&self) -> anyhow::Result<f64> {
        Ok(2.0 * self.ucx("tag_lat", 8, 20_000 * self.seconds)?.latency)
    }
}

/// Parses one of qperf's lines, `name = 12,345 unit`; the unit is bytes, bytes per second or nanoseconds.
fn value(text: &str, name: &str) -> anyhow::Result<f64> {
    let line = text.lines().find_map(|line| {
        let (key, rest) = line.split_once('=')?;
        (key.trim() == name).then(|| rest.trim().to_owned())
    });
    let line = line.with_context(|| format!("qperf printed no line '{name}':\n{text}"))?;
    let (number, unit) = line.split_once(' ').unwrap_or((&line, ""));
    let number: f64 =
        number.replace(',', "").parse().with_context(|| format!("qperf's '{name}' is no number: {line}"))?;
    // Without -uu qperf chooses units itself, and with it still for some values.
    let factor = match unit.trim().trim_end_matches("/sec") {
        "" | "bytes" | "ns" => 1.0,
        "KB" | "us" => 1e3,
        "MB" | "ms" => 1e6,
        "GB" | "sec" => 1e9,
        "TB" => 1e12,
        _ => bail!("qperf's '{name}' has a unit that isn't known: {line}"),
    };
    Ok(number * factor)
}

/// Returns seconds of processor time per GiB.
pub fn per_gib(used: Duration, bytes: f64) -> f64 {
    used.as_secs_f64() / (bytes / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn units_of_qperf_are_understood_and_strange_ones_refused() {
        let text = "tcp_lat:\n    latency         =    24.5 us\n    bw  =  1.54 GB/sec\n    recv_bytes = 20,395 bytes\n    x = 1 parsec\n";
        assert_eq!(value(text, "latency").unwrap(), 24_500.0);
        assert_eq!(value(text, "bw").unwrap(), 1.54e9);
        assert_eq!(value(text, "recv_bytes").unwrap(), 20_395.0);
        assert!(value(text, "x").is_err() && value(text, "y").is_err());
    }
}
