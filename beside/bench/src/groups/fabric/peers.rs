//! The peers over the same link: iperf3 and qperf over TCP, UCX over TCP. A server on the one host, a client on the other, each on the CPU
//! that the daemon of that host has otherwise.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};

use super::Bandwidth;
use super::link::{ADDRESSES, Link};
use super::used::Process;

/// Longest that a peer may take beyond its measurement.
const PATIENCE: Duration = Duration::from_secs(20);
const IPERF_PORT: &str = "5201";
const UCX_PORT: &str = "13337";
const QPERF_PORT: &str = "19765";
/// Bytes of UCX's messages, and of its latency.
const LARGE: u64 = 1 << 20;

/// Programs that are missing, with the package that has each.
pub fn missing() -> Vec<&'static str> {
    let programs =
        [("iperf3", "-v", "iperf3"), ("qperf", "--version", "qperf"), ("ucx_perftest", "-h", "ucx-utils")];
    let absent = |(program, flag, package): (&str, &str, &'static str)| {
        Command::new(program).arg(flag).output().is_err().then_some(package)
    };
    programs.into_iter().filter_map(absent).collect()
}

/// Where the peers run.
pub struct Peers<'a> {
    /// The link.
    pub link: &'a Link,
    /// CPU of each host.
    pub cpus: [usize; 2],
    /// Seconds that each measurement takes.
    pub seconds: u64,
}

impl Peers<'_> {
    fn pinned(&self, host: usize, program: &str) -> Command {
        let mut command = self.link.on(host, "taskset");
        let cpu = self.cpus.get(host).copied().unwrap_or_default();
        command.args(["-c", &cpu.to_string(), program]);
        command
    }

    /// Runs a server, then its client until it ends well. The client's output, and processor time of both.
    fn run(
        &self,
        name: &'static str,
        server: &mut Command,
        client: impl Fn() -> Command,
        ends_itself: bool,
    ) -> anyhow::Result<(String, Duration)> {
        let mut server = Process::start(name, server)?;
        // The server listens a moment after it has started; the client ends with an error until then.
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(50));
            let mut client = Process::start(name, &mut client())?;
            let text = client.output()?;
            let (fine, used) = client.finish(PATIENCE)?;
            // iperf3 ends well even when it only has an error to report.
            if fine && !text.contains("\"error\"") {
                let patience = if ends_itself { PATIENCE } else { Duration::ZERO };
                let (_, by_server) = server.finish(patience)?;
                return Ok((text, used + by_server));
            }
            if server.has_ended() {
                break;
            }
        }
        bail!("{name} over the link between two namespaces gave no result")
    }

    /// Bandwidth of one TCP stream, as iperf3 has it.
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
        let (text, used) = self.run("iperf3", &mut server, client, true)?;
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
            // Units spelt out: bytes per second, nanoseconds.
            client.args(["-uu", "-vvs", "-m", &size.to_string(), &ADDRESSES[1].to_string(), test]);
            client
        };
        self.run("qperf", &mut server, client, false)
    }

    /// Bandwidth of one TCP stream, as qperf has it.
    pub fn qperf_bandwidth(&self) -> anyhow::Result<Bandwidth> {
        let (text, used) = self.qperf("tcp_bw", 64 << 10)?;
        let (rate, received) = (value(&text, "bw")?, value(&text, "recv_bytes")?);
        Ok(Bandwidth { gigabytes: rate / 1e9, cpu_per_gib: per_gib(used, received) })
    }

    /// Microseconds there and back of a message of 8 bytes over TCP, from program to program. qperf's own figure is one way.
    pub fn qperf_round_trip(&self) -> anyhow::Result<f64> {
        let (text, _) = self.qperf("tcp_lat", 8)?;
        Ok(2.0 * value(&text, "latency")? / 1e3)
    }

    fn ucx(&self, test: &str, size: u64, count: u64) -> anyhow::Result<([f64; 8], Duration)> {
        let with = |mut command: Command| {
            command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "eth0").env("UCX_WARN_UNUSED_ENV_VARS", "n");
            command.args(["-p", UCX_PORT]);
            command
        };
        let mut server = with(self.pinned(1, "ucx_perftest"));
        let client = || {
            let mut client = with(self.pinned(0, "ucx_perftest"));
            client.args([&ADDRESSES[1].to_string(), "-t", test, "-s", &size.to_string(), "-f"]);
            client.args(["-n", &count.to_string(), "-w", &(count / 10).to_string()]);
            client
        };
        let (text, used) = self.run("ucx_perftest", &mut server, client, true)?;
        // iterations, latency (percentile, average, overall), bandwidth (average, overall), rate (average, overall)
        let numbers = text.lines().rev().find_map(|line| {
            let words = line.trim_start_matches("Final:").split_whitespace();
            let numbers: Vec<f64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
            numbers.try_into().ok()
        });
        let numbers =
            numbers.with_context(|| format!("ucx_perftest -t {test} printed no line of figures"))?;
        Ok((numbers, used))
    }

    /// Bandwidth of UCX's tagged messages of 1 MiB over TCP.
    pub fn ucx_bandwidth(&self) -> anyhow::Result<Bandwidth> {
        // Some 1.5 GB/s.
        let count = 1500 * self.seconds;
        let ([_, _, _, _, _, mib, _, _], used) = self.ucx("tag_bw", LARGE, count)?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let bytes = ((count + count / 10) * LARGE) as f64;
        Ok(Bandwidth { gigabytes: mib * 1_048_576.0 / 1e9, cpu_per_gib: per_gib(used, bytes) })
    }

    /// Microseconds there and back of a tagged message of 8 bytes. UCX's own figure is one way.
    pub fn ucx_round_trip(&self) -> anyhow::Result<f64> {
        let ([_, _, _, one_way, _, _, _, _], _) = self.ucx("tag_lat", 8, 20_000 * self.seconds)?;
        Ok(2.0 * one_way)
    }
}

/// The value of one of qperf's lines, `name = 12,345 unit`; its unit is bytes, bytes per second or nanoseconds.
fn value(text: &str, name: &str) -> anyhow::Result<f64> {
    let line = text.lines().find_map(|line| {
        let (key, rest) = line.split_once('=')?;
        (key.trim() == name).then(|| rest.trim().to_owned())
    });
    let line = line.with_context(|| format!("qperf printed no line '{name}':\n{text}"))?;
    let (number, unit) = line.split_once(' ').unwrap_or((&line, ""));
    let number: f64 =
        number.replace(',', "").parse().with_context(|| format!("qperf's '{name}' is no number: {line}"))?;
    // Without -uu qperf chooses units itself, with it some of them still.
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

/// Seconds of processor time per GiB.
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
