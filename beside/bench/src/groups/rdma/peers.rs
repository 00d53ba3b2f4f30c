//! The peers of group `rdma`: a bare ring in shared memory, and UCX over shared memory.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::peers::pin;

/// Slots of the ring, one cache line each.
const SLOTS: usize = 1024;

#[repr(align(64))]
struct Line([AtomicU64; 8]);

impl Line {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// Nanoseconds per message that a ring of 64-byte messages between two pinned threads takes: the sequence number in a slot says
/// that it is full, nothing else is shared but a consumer's index, looked at when the ring seems full.
pub fn ring(cpus: [usize; 2], messages: u64) -> anyhow::Result<f64> {
    let slots: Vec<Line> = (0..SLOTS).map(|_| Line::new()).collect();
    let consumed = Line::new();
    // Both are on their CPUs before one of them spins: at real-time priority it would keep the other from ever moving.
    let ready = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let (slots, consumed, ready) = (&slots, &consumed, &ready);
        let consumer = scope.spawn(move || -> anyhow::Result<u64> {
            let pinned = pin(cpus[1]);
            ready.wait();
            pinned?;
            let mut sum = 0_u64;
            for turn in 1..=messages {
                let Some(slot) = slots.get(index(turn)) else { break };
                while slot.0[0].load(Ordering::Acquire) != turn {
                    std::hint::spin_loop();
                }
                sum = slot
                    .0
                    .iter()
                    .skip(1)
                    .fold(sum, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)));
                consumed.0[0].store(turn, Ordering::Release);
            }
            Ok(sum)
        });
        let pinned = pin(cpus[0]);
        ready.wait();
        pinned?;
        let began = Instant::now();
        let mut seen = 0;
        for turn in 1..=messages {
            while turn - seen > SLOTS as u64 {
                seen = consumed.0[0].load(Ordering::Acquire);
            }
            let Some(slot) = slots.get(index(turn)) else { break };
            for word in slot.0.iter().skip(1) {
                word.store(turn, Ordering::Relaxed);
            }
            slot.0[0].store(turn, Ordering::Release);
        }
        let sum = match consumer.join() {
            Ok(sum) => sum?,
            Err(_) => bail!("The ring's consumer panicked"),
        };
        let elapsed = began.elapsed();
        if sum != 7 * (messages * (messages + 1) / 2) {
            bail!("The bare ring lost messages");
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let each = elapsed.as_nanos() as f64 / messages as f64;
        Ok(each)
    })
}

fn index(turn: u64) -> usize {
    usize::try_from(turn).unwrap_or(0) % SLOTS
}

/// One line of `ucx_perftest`'s result over shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Ucx {
    /// Microseconds per message, overall.
    pub latency: f64,
    /// MB/s (2^20 bytes), overall.
    pub bandwidth: f64,
    /// Messages per second, overall.
    pub rate: f64,
}

/// Whether UCX's benchmark is installed.
pub fn has_ucx() -> bool {
    Command::new("ucx_perftest").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Runs `ucx_perftest` of kind `test` over shared memory, server and client on a CPU each, on loopback's port `port`.
pub fn ucx(cpus: [usize; 2], test: &str, size: u64, iterations: u64, port: u16) -> anyhow::Result<Ucx> {
    let command = |cpu: usize| {
        let mut command = Command::new("ucx_perftest");
        command
            .env("UCX_TLS", "sm,self")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .args(["-p", &port.to_string(), "-c", &cpu.to_string()])
            .stderr(Stdio::null());
        command
    };
    let mut server = command(cpus[1])
        .stdout(Stdio::null())
        .spawn()
        .context("ucx_perftest could not be started; is ucx-utils installed?")?;
    let mut last = String::new();
    // The server listens a moment after it has started; the client ends with an error until then.
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(50));
        let client = command(cpus[0])
            .args(["127.0.0.1", "-t", test, "-s", &size.to_string(), "-n", &iterations.to_string(), "-f"])
            .args(["-w", &(iterations / 10).to_string()])
            .output();
        match client {
            Ok(output) if output.status.success() => {
                last = String::from_utf8_lossy(&output.stdout).into_owned();
                break;
            }
            Ok(_) => {}
            Err(error) => {
                last.clear();
                eprintln!("bench: rdma: ucx_perftest: {error}");
                break;
            }
        }
        if server.try_wait().ok().flatten().is_some() {
            break;
        }
    }
    let _ = server.kill();
    let _ = server.wait();
    let found = last.lines().rev().find_map(|line| {
        let numbers: Vec<f64> = line
            .trim_start_matches("Final:")
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        // iterations, latency (percentile, average, overall), bandwidth (average, overall), rate (average, overall)
        match numbers.as_slice() {
            [_, _, _, latency, _, bandwidth, _, rate] => {
                Some(Ucx { latency: *latency, bandwidth: *bandwidth, rate: *rate })
            }
            _ => None,
        }
    });
    found.with_context(|| format!("ucx_perftest -t {test} -s {size} over shared memory gave no result"))
}
