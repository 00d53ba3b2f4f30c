//! Group `rdma`: what an RDMA write of a guest costs. A payload program posts work requests and polls completions in a VM, the
//! engine runs on another CPU; beside it, in turns, what the machine can do at best.

mod bed;
mod neighbour;
mod peers;

use anyhow::bail;

use self::bed::{Bed, FIRST_SLOTS, Plan};
use self::neighbour::{Latency, Neighbours};
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, nanoseconds};
use crate::outside::{self, ucx};
use crate::peers as host_threads;
use crate::programs::Programs;

const MIB: u64 = 1 << 20;
const LINE_ROUNDS: u64 = 10_000;
const LATENCY_WRITES: u64 = 20_000;
const RATE_WRITES: u64 = 100_000;
const LARGE_WRITES: u64 = 200;
/// Requests outstanding where one queue pair shall do its best.
const WINDOW: u64 = FIRST_SLOTS as u64;
/// Queue pairs in use at once.
const MANY: u32 = 4096;
/// Queue pairs that do nothing.
const IDLE: u32 = 30_000;
const UCX_SAMPLES: usize = 5;

/// Measures; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let (host, cpus) = match super::kvm_and_cpus("rdma")? {
        Ok(ground) => ground,
        Err(report) => return Ok(report),
    };
    let programs = Programs::build()?;
    let program = programs.path("measure");
    let switch = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let switch = switch.unwrap_or_else(|_| "not in this kernel".to_owned());
    let pages = format!("4 KiB, huge ones advised as for every VM (shmem_enabled: {})", switch.trim());
    let mut conditions = Conditions::now(Some(&host), &pages);
    if !quick {
        conditions.scheduling = host_threads::prefer_this_process();
    }
    let plan = Plan { queue_pairs: 1, idle: 0, memory: 64 * MIB, buffer: 16 * MIB };
    let mut session = Session {
        cpus,
        khz: host_threads::tsc_khz(),
        samples: if quick { 3 } else { 51 },
        figures: Figures::of("rdma"),
    };

    let mut bed = Bed::start(&program, cpus, plan)?;
    for (length, seed) in [(1, 3), (8, 5), (4097, 7), (1 << 20, 11)] {
        bed.verify(length, seed)?;
    }
    session.latency(&mut bed)?;
    session.rate(&mut bed)?;
    session.bandwidth(&mut bed)?;
    session.ucx(&mut bed)?;
    let mut many =
        Bed::start(&program, cpus, Plan { queue_pairs: MANY, idle: 0, memory: 192 * MIB, buffer: MIB })?;
    session.many(&mut many)?;
    many.finish()?;
    let mut idle =
        Bed::start(&program, cpus, Plan { queue_pairs: 1, idle: IDLE, memory: 960 * MIB, buffer: MIB })?;
    session.idle(&mut idle, &mut bed)?;
    idle.finish()?;
    bed.finish()?;
    session.neighbour()?;
    conditions.finish();
    Ok(Report {
        group: "rdma",
        skipped: None,
        conditions,
        figures: session.figures.all,
        details: serde_json::Value::Null,
    })
}

struct Session {
    cpus: [usize; 2],
    khz: f64,
    samples: usize,
    figures: Figures,
}

impl Session {
    /// Posting to completion, one at a time, against a cache line's way there and back.
    fn latency(&mut self, bed: &mut Bed) -> anyhow::Result<()> {
        let (khz, cpus) = (self.khz, self.cpus);
        let exits = bed.exits();
        let pairs = Pairs::take(
            self.samples,
            || Ok(nanoseconds(khz, bed.write(8, 1, 1, LATENCY_WRITES)?, LATENCY_WRITES)),
            || round_trip(cpus, khz),
        )?;
        // Each sample asks for work once; no write may add to that.
        let (exits, samples) = (bed.exits() - exits, self.samples as u64 + 1);
        if exits > 2 * samples {
            bail!("{samples} times {LATENCY_WRITES} writes left the guest {exits} times; they should never");
        }
        let what = "RDMA write of 8 bytes, post to completion";
        let peer = "a cache line's round trip between two host threads";
        self.figures.add(Figure::new("write_latency_8B", what, "ns", Better::Lower, peer, &pairs, Some(4.0)))
    }

    /// Small writes, many outstanding, against a bare ring.
    fn rate(&mut self, bed: &mut Bed) -> anyhow::Result<()> {
        let (khz, cpus) = (self.khz, self.cpus);
        let pairs = Pairs::take(
            self.samples,
            || Ok(1e3 / nanoseconds(khz, bed.write(8, 1, WINDOW, RATE_WRITES)?, RATE_WRITES)),
            || Ok(1e3 / peers::ring(cpus, 10 * RATE_WRITES)?),
        )?;
        let what = "RDMA writes of 8 bytes, one queue pair, 128 outstanding (aim 5)";
        let peer = "a bare ring of 64-byte messages between two host threads";
        self.figures.add(Figure::new("write_rate_8B", what, "M/s", Better::Higher, peer, &pairs, None))
    }

    /// Large writes against a copy of the same pages by one core.
    fn bandwidth(&mut self, bed: &mut Bed) -> anyhow::Result<()> {
        let khz = self.khz;
        let (source, target) = bed.host_addresses()?;
        let cpu = self.cpus[1];
        for (length, label) in [(64 << 10, "64KiB"), (1 << 20, "1MiB"), (8 << 20, "8MiB")] {
            let writes = LARGE_WRITES * MIB / u64::from(length).max(MIB / 4);
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            let rate = |ticks: u64| f64::from(length) * writes as f64 / (nanoseconds(khz, ticks, 1));
            let pairs = Pairs::take(
                self.samples,
                || Ok(rate(bed.write(length, 1, 4, writes)?)),
                || host_threads::copy(cpu, target, source, u64::from(length), writes).map(rate),
            )?;
            let what = format!("RDMA writes of {label}, 4 outstanding");
            let name = format!("write_bandwidth_{label}");
            let aim = (label == "1MiB").then_some(0.9);
            self.figures.add(Figure::new(
                &name,
                &what,
                "GB/s",
                Better::Higher,
                "memcpy of the same pages, one core",
                &pairs,
                aim,
            ))?;
        }
        Ok(())
    }

    /// The same against UCX over shared memory, which two processes without VMs use.
    fn ucx(&mut self, bed: &mut Bed) -> anyhow::Result<()> {
        if !outside::missing(&[ucx::PROGRAM]).is_empty() {
            eprintln!("bench: rdma: peer UCX SKIPPED: ucx_perftest isn't installed (package ucx-utils)");
            return Ok(());
        }
        let (khz, cpus) = (self.khz, self.cpus);
        let ucx = |kind, size, count| ucx::shared_memory(cpus, kind, size, count);
        let samples = self.samples.min(UCX_SAMPLES);
        let pairs = Pairs::take(
            samples,
            || Ok(nanoseconds(khz, bed.write(8, 1, 1, LATENCY_WRITES)?, LATENCY_WRITES)),
            || Ok(ucx("tag_lat", 8, 200_000)?.latency * 1e3),
        )?;
        let what = "RDMA write of 8 bytes, post to completion";
        self.figures.add(Figure::new(
            "write_latency_8B_ucx",
            what,
            "ns",
            Better::Lower,
            "UCX shared memory, tag, one way",
            &pairs,
            None,
        ))?;
        let pairs = Pairs::take(
            samples,
            || Ok(1e3 / nanoseconds(khz, bed.write(8, 1, WINDOW, RATE_WRITES)?, RATE_WRITES)),
            || Ok(ucx("tag_bw", 8, 2_000_000)?.rate / 1e6),
        )?;
        let what = "RDMA writes of 8 bytes, one queue pair, 128 outstanding";
        self.figures.add(Figure::new(
            "write_rate_8B_ucx",
            what,
            "M/s",
            Better::Higher,
            "UCX shared memory, tag",
            &pairs,
            None,
        ))?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let rate = |ticks: u64| (LARGE_WRITES * MIB) as f64 / nanoseconds(khz, ticks, 1);
        let pairs = Pairs::take(
            samples,
            || Ok(rate(bed.write(1 << 20, 1, 4, LARGE_WRITES)?)),
            || Ok(ucx("tag_bw", MIB, 5_000)?.gigabytes),
        )?;
        let what = "RDMA writes of 1 MiB, 4 outstanding";
        self.figures.add(Figure::new(
            "write_bandwidth_1MiB_ucx",
            what,
            "GB/s",
            Better::Higher,
            "UCX shared memory, tag",
            &pairs,
            None,
        ))
    }

    /// Many queue pairs in use, against one.
    fn many(&mut self, bed: &mut Bed) -> anyhow::Result<()> {
        let khz = self.khz;
        let bed = std::cell::RefCell::new(bed);
        let rate = |queue_pairs: u32, window| {
            let ticks = bed.borrow_mut().write(8, u64::from(queue_pairs), window, RATE_WRITES)?;
            Ok(1e3 / nanoseconds(khz, ticks, RATE_WRITES))
        };
        let pairs = Pairs::take(self.samples, || rate(MANY, u64::from(MANY)), || rate(1, WINDOW))?;
        let what = format!("RDMA writes of 8 bytes, {MANY} queue pairs in turn");
        let peer = "one queue pair, 128 outstanding";
        self.figures.add(Figure::new(
            "active_queue_pairs",
            &what,
            "M/s",
            Better::Higher,
            peer,
            &pairs,
            Some(0.9),
        ))
    }

    /// A victim's small writes beside a hostile guest on the same engine, against alone.
    fn neighbour(&mut self) -> anyhow::Result<()> {
        host_threads::pin(self.cpus[1])?;
        let mut guests = Neighbours::start(7)?;
        let mut latencies = (Vec::new(), Vec::new());
        guests.sample(true)?;
        for _ in 0..self.samples.min(UCX_SAMPLES) {
            latencies.0.push(guests.sample(true)?);
            latencies.1.push(guests.sample(false)?);
        }
        let (requests, commands) = guests.tally();
        eprintln!("bench: rdma: the attacker had {requests} requests and {commands} commands dealt with");
        let quantile = |which: fn(&Latency) -> f64| Pairs {
            pairs: latencies.0.iter().map(which).zip(latencies.1.iter().map(which)).collect(),
        };
        for (name, label, pairs) in [
            ("victim_median", "median", quantile(|latency| latency.median)),
            ("victim_p99", "99th percentile", quantile(|latency| latency.p99)),
        ] {
            let what = format!("write of 8 bytes beside a hostile guest, {label}");
            self.figures.add(Figure::new(
                name,
                &what,
                "ns",
                Better::Lower,
                "the same alone",
                &pairs,
                None,
            ))?;
        }
        Ok(())
    }

    /// Thousands of idle queue pairs beside the one in use, against none.
    fn idle(&mut self, crowded: &mut Bed, alone: &mut Bed) -> anyhow::Result<()> {
        let khz = self.khz;
        let rate = |bed: &mut Bed| -> anyhow::Result<f64> {
            Ok(1e3 / nanoseconds(khz, bed.write(8, 1, WINDOW, RATE_WRITES)?, RATE_WRITES))
        };
        let pairs = Pairs::take(self.samples, || rate(crowded), || rate(alone))?;
        let what = format!("RDMA writes of 8 bytes beside {IDLE} idle queue pairs");
        self.figures.add(Figure::new(
            "idle_queue_pairs",
            &what,
            "M/s",
            Better::Higher,
            "the same without them",
            &pairs,
            Some(0.97),
        ))
    }
}

/// Nanoseconds of a cache line's way to another core and back, as two host threads play it.
fn round_trip([first, second]: [usize; 2], khz: f64) -> anyhow::Result<f64> {
    let ticks = host_threads::ping_pong(first, second, LINE_ROUNDS)?;
    Ok(nanoseconds(khz, ticks, LINE_ROUNDS))
}
