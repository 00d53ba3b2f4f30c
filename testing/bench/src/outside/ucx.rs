//! UCX's benchmark `ucx_perftest`: a server and a client, each on a CPU.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

use super::process::serve;

/// Required program, harmless argument, package.
pub const PROGRAM: (&str, &str, &str) = ("ucx_perftest", "-h", "ucx-utils");

/// Port of the connection on loopback.
const PORT: u16 = 13_337;

/// Parameters of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct Test<'a> {
    /// UCX's name: `tag_lat`, `tag_bw`.
    pub kind: &'a str,
    /// Bytes per message.
    pub size: u64,
    /// Number of messages without warm-up.
    pub count: u64,
    /// UCX's names of transports (UCX_TLS).
    pub transports: &'a str,
    /// Network device (UCX_NET_DEVICES), if needed.
    pub device: Option<&'a str>,
    /// The server's address.
    pub server: IpAddr,
    /// The server's port.
    pub port: u16,
}

/// The result.
#[derive(Debug, Clone, Copy)]
pub struct Ucx {
    /// Mean microseconds per message; one way in latency tests.
    pub latency: f64,
    /// Mean 10^9 bytes per second.
    pub gigabytes: f64,
    /// Mean messages per second.
    pub rate: f64,
    /// Processor time of both.
    pub used: Duration,
    /// Bytes sent, including warm-up.
    pub bytes: f64,
}

impl Test<'_> {
    /// Runs the measurement. `on` returns the command that runs a program on the client's (0) or the server's (1) side.
    ///
    /// # Errors
    /// It can't run, or has no result.
    pub fn run(&self, on: impl Fn(usize, &str) -> Command) -> anyhow::Result<Ucx> {
        let (name, _, _) = PROGRAM;
        let with = |side| {
            let mut command = on(side, name);
            command.env("UCX_TLS", self.transports).env("UCX_WARN_UNUSED_ENV_VARS", "n");
            if let Some(device) = self.device {
                command.env("UCX_NET_DEVICES", device);
            }
            command.args(["-p", &self.port.to_string()]);
            command
        };
        let warm = self.count / 10;
        let client = || {
            let mut client = with(0);
            client.args([&self.server.to_string(), "-t", self.kind, "-s", &self.size.to_string(), "-f"]);
            client.args(["-n", &self.count.to_string(), "-w", &warm.to_string()]);
            client
        };
        let (text, used) = serve(name, &mut with(1), client, true)?;
        let found = numbers(&text);
        let [_, _, _, latency, _, mib, _, rate] = found.with_context(|| {
            format!(
                "ucx_perftest -t {} -s {} over {} printed no line of figures",
                self.kind, self.size, self.transports
            )
        })?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let bytes = ((self.count + warm) * self.size) as f64;
        Ok(Ucx { latency, gigabytes: mib * 1_048_576.0 / 1e9, rate, used, bytes })
    }
}

/// Measures UCX over shared memory between two CPUs of this host, with a connection over loopback.
///
/// # Errors
/// As for [`Test::run`].
pub fn shared_memory(cpus: [usize; 2], kind: &str, size: u64, count: u64) -> anyhow::Result<Ucx> {
    let test = Test {
        kind,
        size,
        count,
        // All of UCX's kinds: posix, sysv, cma.
        transports: "sm,self",
        device: None,
        server: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: PORT,
    };
    let [client, server] = cpus;
    test.run(|side, program| super::pinned(if side == 0 { client } else { server }, program))
}

/// Iterations; latency (percentile, average, overall); bandwidth (average, overall); rate (average, overall).
fn numbers(text: &str) -> Option<[f64; 8]> {
    text.lines().rev().find_map(|line| {
        let words = line.trim_start_matches("Final:").split_whitespace();
        let numbers: Vec<f64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        numbers.try_into().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn the_last_line_of_figures_counts() {
        let text = "+---+\n 1000 1 2 3 4 5 6 7\nFinal:  100000  0.15  0.16  0.17  390.0  391.0  6500000  6600000\n\n";
        assert_eq!(numbers(text), Some([100_000.0, 0.15, 0.16, 0.17, 390.0, 391.0, 6.5e6, 6.6e6]));
        assert_eq!(numbers("[error] no such transport\n"), None);
    }
}
