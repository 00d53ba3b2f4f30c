//! The VM that moves: `causeway run` with the guest `rdma-echo`, which is controlled through the console.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use payload_loops::tsc;

use super::hosts::Hosts;
use super::running::Running;

/// Name of the VM.
pub const NAME: &str = "mover";
/// Its RDMA NIC has the same address on each host.
const MAC: &str = "52:54:00:4d:00:01";
/// Time-out of a response: the guest may create 10,000 queue pairs before.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);
/// Requests that compare the guest's TSC with this host's.
const TSC_SAMPLES: u32 = 16;

/// What the VM is.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    /// The guest's file.
    pub guest: &'a Path,
    /// RAM in MiB. The guest has written all of it.
    pub memory_mib: u64,
}

/// What the guest measured, in TSC ticks.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Largest time between two passes of its loop.
    pub pass: u64,
    /// Largest time between two completions.
    pub completion: u64,
    /// Received messages.
    pub messages: u64,
}

/// A monitor with the VM, or one that waits for it.
pub struct Vm {
    /// The host's number.
    pub host: u8,
    running: Running,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Vm {
    /// Starts the VM, and waits for the guest's first line.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(hosts: &Hosts, host: u8, settings: Settings<'_>) -> anyhow::Result<Self> {
        let vm = Self::run(hosts, host, settings, &[])?;
        vm.response(b'B')?;
        Ok(vm)
    }

    /// Starts a monitor that waits for the VM.
    ///
    /// # Errors
    /// It can't be started.
    pub fn waiting(hosts: &Hosts, host: u8, settings: Settings<'_>) -> anyhow::Result<Self> {
        let key = hosts.path("cluster.key").display().to_string();
        let address = Hosts::migration_address(host);
        let mut vm = Self::run(hosts, host, settings, &["--incoming", &address, "--incoming-key", &key])?;
        // The last two steps of its start.
        vm.running.await_log("is registered with the cluster service")?;
        vm.running.await_log("Sandbox mode=")?;
        Ok(vm)
    }

    fn run(hosts: &Hosts, host: u8, settings: Settings<'_>, options: &[&str]) -> anyhow::Result<Self> {
        let nic = format!("segment=s0,name=rdma0,mac={MAC},host={}", hosts.daemon(host).display());
        let mut command = hosts.causeway(host);
        command.args(["run", "--name", NAME, "--memory", &format!("{}M", settings.memory_mib), "--kernel"]);
        command.arg(settings.guest).args(["--rng=off", "--on-reboot", "stop", "--console", "stdio"]);
        command.args(["--rdma", &nic]).args(options);
        let mut running =
            Running::start("causeway run", command, hosts.path(&format!("h{host}/{NAME}.log")))?;
        let (input, output) = running.pipes()?;
        let (sender, lines) = channel();
        // The thread ends with the process's output.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { host, running, input, lines })
    }

    /// Lets the guest create queue pairs; returns the number of the first one, which isn't idle.
    ///
    /// # Errors
    /// The guest fails.
    pub fn set_up(&mut self, address: u8, queue_pairs: u32, memory_mib: u64) -> anyhow::Result<u32> {
        let numbers = self.ask(b'Q', &format!("s {address:x} {queue_pairs:x} {memory_mib:x}"))?;
        let qpn = numbers.first().and_then(|number| u32::try_from(*number).ok());
        qpn.context("The guest names no queue pair")
    }

    /// Connects it to a peer, which sends the first message.
    ///
    /// # Errors
    /// The guest fails.
    pub fn connect(&mut self, qpn: u32, address: u8) -> anyhow::Result<()> {
        self.ask(b'C', &format!("c {qpn:x} {address:x} 0")).map(drop)
    }

    /// Begins a measurement.
    ///
    /// # Errors
    /// The guest fails.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        self.ask(b'Z', "z").map(drop)
    }

    /// Ends the measurement.
    ///
    /// # Errors
    /// The guest fails.
    pub fn end(&mut self) -> anyhow::Result<()> {
        self.ask(b'F', "f").map(drop)
    }

    /// Returns what the guest measured.
    ///
    /// # Errors
    /// The guest fails.
    pub fn measured(&mut self) -> anyhow::Result<Measured> {
        match self.ask(b'R', "r")?[..] {
            [pass, completion, messages, _] => Ok(Measured { pass, completion, messages }),
            ref numbers => bail!("The guest reports {} numbers", numbers.len()),
        }
    }

    /// Returns bounds for this host's TSC less the guest's.
    ///
    /// # Errors
    /// The guest fails.
    pub fn tsc_offset(&mut self) -> anyhow::Result<(i128, i128)> {
        let (mut low, mut high) = (i128::MIN, i128::MAX);
        for _ in 0..TSC_SAMPLES {
            let before = i128::from(tsc::start());
            let numbers = self.ask(b'T', "t")?;
            let after = i128::from(tsc::end());
            let guest = i128::from(*numbers.first().context("The guest reports no time")?);
            (low, high) = (low.max(before - guest), high.min(after - guest));
        }
        ensure!(low <= high, "The guest's TSC doesn't have this host's frequency");
        Ok((low, high))
    }

    /// Waits for the end of the monitor, whose VM has moved.
    ///
    /// # Errors
    /// It doesn't end, or with a failure.
    pub fn await_end(mut self) -> anyhow::Result<()> {
        self.running.await_end()
    }

    fn ask(&mut self, answer: u8, request: &str) -> anyhow::Result<Vec<u64>> {
        self.input.write_all(format!("{request}\n").as_bytes()).context("The guest's console is closed")?;
        self.response(answer)
    }

    fn response(&self, letter: u8) -> anyhow::Result<Vec<u64>> {
        let line = match self.lines.recv_timeout(RESPONSE_TIMEOUT) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => bail!("The guest didn't respond within {RESPONSE_TIMEOUT:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("The VM ended before the guest responded: {}", self.running.last_words())
            }
        };
        let (first, rest) = line.split_at_checked(1).context("The guest printed an empty line")?;
        ensure!(first.as_bytes() == [letter], "The guest reports: {line}");
        rest.split_whitespace()
            .map(|word| u64::from_str_radix(word, 16).with_context(|| format!("The guest printed: {line}")))
            .collect()
    }
}
