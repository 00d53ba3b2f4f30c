//! Two host daemons, each with a namespace, a CPU and a VM: the work of `causeway host` between hosts. The VMs are monitors without
//! KVM in this process (`host_testbed`): vfio-user, a driver on guest RAM, and programs that post and poll there.

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use host_testbed::driver::{Endpoint, Guest};
use host_testbed::monitor::{Machine, Monitor};

use super::Bandwidth;
use crate::host_daemon::{self, HostDaemon};
use crate::outside::link::{ADDRESSES, Link};
use crate::outside::process;
use crate::outside::tcp::per_gib;
use crate::peers::pin;

/// Bytes of an RDMA write in bandwidth measurements.
const MESSAGE: u32 = 1 << 20;
/// Outstanding writes, each with its own part of the buffers.
const OUTSTANDING: u32 = 8;
const PAGE: u32 = 4096;
/// Time-out of each step.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Parameters of the daemons.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Whether they use a cluster key.
    pub encrypted: bool,
    /// `mtu` of the directory file.
    pub mtu: u32,
    /// First UDP port.
    pub port: u16,
    /// CPU of each host, which its daemon's engine and its program share.
    pub cpus: [usize; 2],
}

struct Side {
    daemon: HostDaemon,
    monitor: Monitor,
    guest: Guest,
    endpoint: Endpoint,
    cpu: usize,
    // RAM is dropped last.
    _machine: Machine,
}

/// The two daemons and their VMs, connected.
pub struct Daemons {
    sides: [Side; 2],
    seed: u8,
    _folder: tempfile::TempDir,
}

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[13], gid[15]) = (0xFF, 0xFF, 10, 80, last);
    gid
}

impl Daemons {
    /// Starts and connects the daemons.
    pub fn start(program: &Path, link: &Link, setup: Setup) -> anyhow::Result<Self> {
        let folder = host_daemon::folder()?;
        let at = |name: &str| folder.path().join(name);
        let mut text = format!("mtu = {}\n", setup.mtu);
        for (number, address) in (1..).zip(ADDRESSES) {
            text += &format!(
                "[[host]]\nname = \"h{number}\"\naddress = \"{address}:{}\"\n[[vm]]\nname = \"vm{number}\"\nid = {number}\n\
                 host = \"h{number}\"\n[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.80.0.{number}\"]\n",
                setup.port
            );
        }
        let (directory, key) = (at("directory.toml"), at("cluster.key"));
        std::fs::write(&directory, text).context("The directory file could not be written")?;
        let made =
            Command::new(program).arg("key").arg(&key).output().context("causeway could not be started")?;
        if !made.status.success() {
            bail!("'causeway key' failed: {}", String::from_utf8_lossy(&made.stderr).trim_end());
        }
        let start = |host: usize, address: std::net::Ipv4Addr, cpu: usize| -> anyhow::Result<Side> {
            let path = |path: &Path| path.display().to_string();
            let mut options = ["--engine-cpu", &cpu.to_string(), "--directory", &path(&directory)]
                .map(str::to_owned)
                .to_vec();
            options.extend(["--fabric-address".to_owned(), format!("{address}:{}", setup.port)]);
            if setup.encrypted {
                options.extend(["--cluster-key".to_owned(), path(&key)]);
            } else {
                options.push("--insecure".to_owned());
            }
            let socket = at(&format!("h{host}/host.sock"));
            Side::start(HostDaemon::start(link.on(host, program), &socket, &options)?, host, cpu)
        };
        let a = start(0, ADDRESSES[0], setup.cpus[0])?;
        let b = start(1, ADDRESSES[1], setup.cpus[1])?;
        a.guest.connect(&a.monitor, &a.endpoint, b.endpoint.qp.1, gid(2));
        b.guest.connect(&b.monitor, &b.endpoint, a.endpoint.qp.1, gid(1));
        Ok(Self { sides: [a, b], seed: 0, _folder: folder })
    }

    /// Writes messages of 1 MiB from the first VM's memory to the second's, several outstanding, for about `during`. Then compares
    /// all of the target.
    pub fn bandwidth(&mut self, during: Duration) -> anyhow::Result<Bandwidth> {
        self.seed = self.seed.wrapping_add(1);
        let [a, b] = &self.sides;
        let seed = self.seed;
        for offset in (0..MESSAGE * OUTSTANDING).step_by(PAGE as usize) {
            a.guest.put(&a.endpoint.buffer, offset.into(), &pattern(seed, offset));
            b.guest.put(&b.endpoint.buffer, offset.into(), &[0; PAGE as usize]);
        }
        let (writes, took, used) = std::thread::scope(|scope| {
            let program = scope.spawn(|| -> anyhow::Result<(u64, Duration, Duration)> {
                pin(a.cpu)?;
                // A first pass over all of it warms up sessions, congestion windows and page tables.
                a.write_all(b, u64::from(OUTSTANDING), Duration::ZERO)?;
                let before = [a.used()?, b.used()?];
                let own = process::by_this_thread();
                let began = Instant::now();
                let writes = a.write_all(b, u64::from(OUTSTANDING), during)?;
                let took = began.elapsed();
                let own = process::by_this_thread().saturating_sub(own);
                let daemons = a.used()?.saturating_sub(before[0]) + b.used()?.saturating_sub(before[1]);
                Ok((writes, took, daemons + own))
            });
            program.join().unwrap_or_else(|_| bail!("The program in the first VM panicked"))
        })?;
        let arrived = b.guest.bytes(&b.endpoint.buffer);
        for (offset, page) in
            (0..MESSAGE * OUTSTANDING).step_by(PAGE as usize).zip(arrived.chunks(PAGE as usize))
        {
            if page != pattern(seed, offset) {
                bail!("Bytes from {offset} on did not arrive as they were written");
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let bytes = (writes * u64::from(MESSAGE)) as f64;
        Ok(Bandwidth { gigabytes: bytes / took.as_secs_f64() / 1e9, cpu_per_gib: per_gib(used, bytes) })
    }

    /// Measures the round trip in microseconds. The first VM's program writes 8 bytes to the second's memory, whose program polls for
    /// them and writes them back. Each program polls only its own memory. Every round's bytes are checked.
    pub fn round_trip(&mut self, rounds: u32) -> anyhow::Result<f64> {
        let ready = Barrier::new(2);
        let [a, b] = &self.sides;
        let took = std::thread::scope(|scope| {
            let play = |side: usize| {
                let (own, other) = if side == 0 { (a, b) } else { (b, a) };
                let ready = &ready;
                move || -> anyhow::Result<Duration> {
                    let pinned = pin(own.cpu);
                    own.guest.put(&own.endpoint.buffer, PAGE.into(), &[0; 8]);
                    ready.wait();
                    pinned?;
                    own.ping_pong(other, side == 0, rounds)
                }
            };
            let (first, second) = (scope.spawn(play(0)), scope.spawn(play(1)));
            let ended = second.join().unwrap_or_else(|_| bail!("The program in the second VM panicked"));
            let took = first.join().unwrap_or_else(|_| bail!("The program in the first VM panicked"));
            ended.and(took)
        })?;
        Ok(took.as_secs_f64() * 1e6 / f64::from(rounds))
    }
}

/// Returns the bytes of the page at `offset`.
fn pattern(seed: u8, offset: u32) -> [u8; PAGE as usize] {
    let mut page = [0; PAGE as usize];
    for (at, word) in (offset..).step_by(4).zip(page.chunks_exact_mut(4)) {
        word.copy_from_slice(&(at.wrapping_mul(0x9E37_79B1) ^ u32::from(seed) << 8 | 1).to_le_bytes());
    }
    page
}

impl Side {
    fn start(daemon: HostDaemon, host: usize, cpu: usize) -> anyhow::Result<Self> {
        let last = u8::try_from(host + 1).unwrap_or(u8::MAX);
        let ram = u64::from(MESSAGE) * u64::from(OUTSTANDING) + (4 << 20);
        let machine = Machine::with_ram(&format!("vm{last}"), "s0", ram);
        // Doorbells are memory under load, and trap otherwise, as in a VM.
        let monitor = machine.connect(daemon.socket(), true);
        let mut guest = Guest::new(&machine);
        // 268 ms: this link loses nothing, and a program may be without its CPU for a while.
        guest.timeout = 16;
        guest.probe(&monitor, gid(last));
        let endpoint = guest.endpoint(&monitor, 1, MESSAGE * OUTSTANDING / PAGE);
        Ok(Self { daemon, monitor, guest, endpoint, cpu, _machine: machine })
    }

    fn used(&self) -> anyhow::Result<Duration> {
        process::so_far(self.daemon.id())
    }

    fn post(&self, to: &Side, wr_id: u64, from: Range<u32>, offset: u32) -> bool {
        let target = &to.endpoint.buffer;
        let to = (target.address + u64::from(offset), target.rkey);
        self.guest.post_write_from(&self.monitor, &self.endpoint, wr_id, from, to)
    }

    /// Polls a completion.
    fn take(&self) -> anyhow::Result<Option<u64>> {
        let Some(entry) = self.guest.take(&self.endpoint) else { return Ok(None) };
        if entry.status.get() != 0 {
            bail!("Write {} completed with status {}", entry.wr_id.get(), entry.status.get());
        }
        Ok(Some(entry.wr_id.get()))
    }

    /// Writes until at least `least` writes are complete and `during` is over; returns the number.
    fn write_all(&self, to: &Side, least: u64, during: Duration) -> anyhow::Result<u64> {
        let began = Instant::now();
        let (mut posted, mut done) = (0_u64, 0_u64);
        let mut last = began;
        loop {
            while posted - done < u64::from(OUTSTANDING) && (posted < least || began.elapsed() < during) {
                let part = u32::try_from(posted % u64::from(OUTSTANDING)).unwrap_or(0) * MESSAGE;
                if !self.post(to, posted, part..part + MESSAGE, part) {
                    bail!("The send queue is full with {} writes outstanding", posted - done);
                }
                posted += 1;
            }
            while let Some(wr_id) = self.take()? {
                if wr_id != done {
                    bail!("Write {wr_id} completed, and {done} was due");
                }
                done += 1;
                last = Instant::now();
            }
            if done == posted {
                return Ok(done);
            }
            if last.elapsed() > STEP_TIMEOUT {
                bail!("No write completed within {STEP_TIMEOUT:?}, {} are outstanding", posted - done);
            }
            // The daemon shares this CPU.
            std::thread::yield_now();
        }
    }

    /// One side of the ping-pong. Its own bytes are in the first page, the other's arrive in the second.
    fn ping_pong(&self, other: &Side, first: bool, rounds: u32) -> anyhow::Result<Duration> {
        let (mut posted, mut done) = (0_u64, 0_u64);
        let began = Instant::now();
        for round in 1..=rounds {
            if first {
                self.say(other, round, &mut posted)?;
            }
            let mut patience = 0_u32;
            while self.guest.word(&self.endpoint.buffer, (PAGE + 4).into()) != round {
                patience += 1;
                if patience.is_multiple_of(1024) && began.elapsed() > STEP_TIMEOUT {
                    bail!("Nothing came in round {round} of {rounds}");
                }
                std::thread::yield_now();
            }
            if self.guest.word(&self.endpoint.buffer, PAGE.into()) != !round {
                bail!("The bytes of round {round} are not those that were written");
            }
            if !first {
                self.say(other, round, &mut posted)?;
            }
            while self.take()?.is_some() {
                done += 1;
            }
        }
        let took = began.elapsed();
        while done < posted {
            done += u64::from(self.take()?.is_some());
            if began.elapsed() > 2 * STEP_TIMEOUT {
                bail!("{} writes of the last rounds did not complete", posted - done);
            }
            std::thread::yield_now();
        }
        Ok(took)
    }

    fn say(&self, other: &Side, round: u32, posted: &mut u64) -> anyhow::Result<()> {
        let bytes = (u64::from(round) << 32 | u64::from(!round)).to_le_bytes();
        self.guest.put(&self.endpoint.buffer, 0, &bytes);
        if !self.post(other, *posted, 0..8, PAGE) {
            bail!("The send queue is full in round {round}");
        }
        *posted += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE, pattern};

    #[test]
    fn what_was_written_before_or_elsewhere_is_told_apart() {
        let page = pattern(7, 5 * PAGE);
        assert_eq!(page, pattern(7, 5 * PAGE));
        for other in [pattern(8, 5 * PAGE), pattern(7, 6 * PAGE), [0; PAGE as usize]] {
            let words = page.chunks_exact(4).zip(other.chunks_exact(4));
            assert!(words.filter(|(a, b)| a == b).count() == 0);
        }
    }
}
