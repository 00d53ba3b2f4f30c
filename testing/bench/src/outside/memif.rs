//! DPDK's shared memory interface (memif) with `testpmd`: one process sends packets as fast as possible, the other receives them. No
//! huge pages, no devices. testpmd copies packets into the ring and out of it, as it does for memory that isn't one file.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};

use super::pinned;
use super::process::Process;

/// Required program, harmless argument, package.
pub const PROGRAM: (&str, &str, &str) = ("dpdk-testpmd", "--version", "dpdk-dev and librte-net-memif23");

/// Seconds before the output is read, and the number of its last lines that count. It prints one line per second, or far fewer if its
/// forwarding thread starves the printing one: then it runs longer.
const SECONDS: [u64; 2] = [5, 20];
const COUNTED: usize = 3;
/// Time-out of its end.
const PEER_END_TIMEOUT: Duration = Duration::from_secs(20);

/// Measures the packets per second that the receiver gets, of `size` bytes (64 to 2,048).
///
/// # Errors
/// testpmd can't run, or doesn't report received packets.
pub fn packets_per_second(cpus: [usize; 2], size: u32) -> anyhow::Result<f64> {
    let mut last = None;
    for seconds in SECONDS {
        let (text, sent) = run(cpus, size, seconds)?;
        if let Some(rate) = rate(&text) {
            return Ok(rate);
        }
        last = Some((text, sent));
    }
    let (text, sent) = last.unwrap_or_default();
    bail!(
        "testpmd said fewer than {COUNTED} times that it receives by memif; the receiver:\n{text}\nand the sender:\n{sent}"
    )
}

/// Returns the output of receiver and sender after this many seconds.
fn run(cpus: [usize; 2], size: u32, seconds: u64) -> anyhow::Result<(String, String)> {
    let directory = tempfile::tempdir().context("A folder for memif's socket could not be had")?;
    let socket = directory.path().join("memif");
    let mut receiver = start(cpus[1], &socket, "server", &["--forward-mode=rxonly"])?;
    // Its socket appears a moment later.
    let began = std::time::Instant::now();
    while !socket.exists() && began.elapsed() < PEER_END_TIMEOUT && !receiver.has_ended() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let packets = format!("--txpkts={size}");
    let mut sender = start(cpus[0], &socket, "client", &["--forward-mode=txonly", &packets])?;
    std::thread::sleep(Duration::from_secs(seconds));
    receiver.interrupt()?;
    let text = receiver.output()?;
    receiver.finish(PEER_END_TIMEOUT)?;
    sender.interrupt()?;
    let sent = sender.output()?;
    sender.finish(PEER_END_TIMEOUT)?;
    Ok((text, sent))
}

fn start(cpu: usize, socket: &Path, role: &str, arguments: &[&str]) -> anyhow::Result<Process> {
    // At ordinary priority: it polls forever, and would block a measurement at the same real-time priority.
    let mut command = pinned(cpu, "chrt");
    command.args(["--other", "0", PROGRAM.0]);
    // A thread that waits, and one that forwards.
    command.args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--file-prefix", &format!("cwbench-{role}")]);
    command.args(["--no-huge", "-m", "512", "--iova-mode=va", "--no-pci", "--no-telemetry", "--vdev"]);
    command.arg(format!(
        "net_memif0,role={role},socket={},socket-abstract=no,rsize=10,bsize=2048",
        socket.display()
    ));
    command.args(["--", "--stats-period=1", "--nb-cores=1", "--total-num-mbufs=16384"]).args(arguments);
    Process::start("dpdk-testpmd", &mut command)
}

/// Returns the mean of the last printed rates.
fn rate(text: &str) -> Option<f64> {
    let rates: Vec<f64> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok())
        .filter(|rate| *rate > 0.0)
        .collect();
    let last = rates.get(rates.len().checked_sub(COUNTED)?..)?;
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    let mean = last.iter().sum::<f64>() / last.len() as f64;
    Some(mean)
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn the_last_seconds_count_and_silence_is_nothing() {
        let line = |pps: u64| format!("  Rx-pps:     {pps}          Rx-bps:    1\n  Tx-pps: 9 Tx-bps: 9\n");
        let text = [0, 5, 100, 200, 300].map(line).concat();
        assert_eq!(rate(&text), Some(200.0));
        assert_eq!(rate(&[0, 0, 0, 0].map(line).concat()), None);
        assert_eq!(rate(""), None);
    }
}
