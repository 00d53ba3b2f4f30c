//! Group `rdma`: the cost of a guest's RDMA write. A payload program posts work requests and polls completions in a VM whose HCA a
//! sandboxed `causeway host` daemon serves over vfio-user. The peers run in turns: the engine alone on a thread of this process, and
//! the machine's limit.
//!
//! | file | holds |
//! |---|---|
//! | `bed` | the two VMs, and the measured writes |
//! | `nic` | a NIC of the daemon in a VM, by the monitor's code |
//! | `engine_alone` | the engine without its daemon |
//! | `driver` | what a guest's driver does before a program posts |
//! | `copies` | copies of guest memory by `dma` |
//! | `neighbour` | a hostile guest on the same engine |
//! | `peers` | a bare ring |

pub mod bed;
mod copies;
mod driver;
mod engine_alone;
mod neighbour;
mod nic;
mod peers;

use std::cell::RefCell;
use std::path::PathBuf;

use anyhow::{Context, bail};

use self::bed::{Bed, FIRST_SLOTS, Plan};
use self::copies::{Copies, Direction};
use self::neighbour::{Latency, Neighbours};
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, Turns, gigabytes, nanoseconds};
use crate::host_daemon;
use crate::outside::{self, ucx};
use crate::peers as host_threads;
use crate::programs::{self, Programs};

const MIB: u64 = 1 << 20;
const LINE_ROUNDS: u64 = 10_000;
const LATENCY_WRITES: u64 = 20_000;
const RATE_WRITES: u64 = 100_000;
const LARGE_WRITES: u64 = 200;
/// Outstanding requests of a single queue pair at its best.
const WINDOW: u64 = FIRST_SLOTS as u64;
/// Queue pairs in use at once.
const MANY: u32 = 4096;
/// Idle queue pairs.
const IDLE: u32 = 30_000;
const UCX_SAMPLES: usize = 5;
/// Fewer writes per exit mean that doorbells weren't memory while the program polled.
const WRITES_PER_EXIT: u64 = 1000;
/// `Seccomp` of a process with a filter.
const SECCOMP_FILTER: u32 = 2;
/// The second peer of each figure.
const ALONE: &str = "the engine alone, a thread of the bench, no daemon";

/// Measures the group; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let (host, cpus) = match super::kvm_and_cpus("rdma")? {
        Ok(ground) => ground,
        Err(report) => return Ok(report),
    };
    let program = Programs::build()?.path("measure");
    let causeway = programs::causeway()?;
    let switch = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let switch = switch.unwrap_or_else(|_| "not in this kernel".to_owned());
    let pages = format!("4 KiB, huge ones advised as for every VM (shmem_enabled: {})", switch.trim());
    let mut conditions = Conditions::now(Some(&host), &pages);
    // The daemon has the priority that a user's daemon has.
    conditions.scheduling = "ordinary, all sides";
    let beds = Beds { causeway, program, cpus };
    let mut session = Session {
        cpus,
        khz: host_threads::tsc_khz(),
        samples: if quick { 3 } else { 51 },
        figures: Figures::of("rdma"),
        exits: None,
    };

    let mut both = beds.start(Plan { queue_pairs: 1, idle: 0, memory: 64 * MIB, buffer: 16 * MIB })?;
    let daemon = both.daemon.daemon().context("A bed that a daemon serves has one")?;
    let confinement = daemon.confinement()?;
    if confinement.seccomp != SECCOMP_FILTER {
        bail!(
            "The daemon runs without its seccomp filter; figures are to be of the product as users start it"
        );
    }
    for bed in [&mut both.daemon, &mut both.alone] {
        for (length, seed) in [(1, 3), (8, 5), (4097, 7), (1 << 20, 11)] {
            bed.verify(length, seed)?;
        }
    }
    session.latency(&mut both)?;
    session.rate(&mut both)?;
    session.bandwidth(&mut both)?;
    session.ucx(&mut both)?;
    let mut many = beds.start(Plan { queue_pairs: MANY, idle: 0, memory: 192 * MIB, buffer: MIB })?;
    session.many(&mut many)?;
    many.finish()?;
    let mut idle = beds.start(Plan { queue_pairs: 1, idle: IDLE, memory: 960 * MIB, buffer: MIB })?;
    session.idle(&mut idle, &mut both)?;
    idle.finish()?;
    both.finish()?;
    session.copies()?;
    session.neighbour()?;
    conditions.finish();
    let details = serde_json::json!({ "daemon": confinement, "exits_of_write_latency_8B": session.exits });
    Ok(Report { group: "rdma", skipped: None, conditions, figures: session.figures.all, details })
}

/// Parameters of the test beds.
struct Beds {
    causeway: PathBuf,
    program: PathBuf,
    cpus: [usize; 2],
}

/// The same test bed with both servers.
struct Both {
    daemon: Bed,
    alone: Bed,
}

impl Beds {
    fn start(&self, plan: Plan) -> anyhow::Result<Both> {
        Ok(Both {
            daemon: Bed::by_daemon(host_daemon::folder()?, &self.causeway, &self.program, self.cpus, plan)?,
            alone: Bed::engine_alone(&self.program, self.cpus, plan)?,
        })
    }
}

impl Both {
    fn finish(self) -> anyhow::Result<()> {
        self.daemon.finish()?;
        self.alone.finish()
    }
}

/// A figure's name and its peer's.
struct Named<'a> {
    name: &'a str,
    what: &'a str,
    unit: &'static str,
    better: Better,
    peer: &'a str,
    aim: Option<f64>,
}

struct Session {
    cpus: [usize; 2],
    khz: f64,
    samples: usize,
    figures: Figures,
    /// Exits of the program's VM during all measured single writes of 8 bytes through the daemon.
    exits: Option<u64>,
}

impl Session {
    /// Takes turns through the daemon, with the engine alone, and of the peer: two figures.
    fn compare(
        &mut self,
        samples: usize,
        named: &Named<'_>,
        both: &mut Both,
        ours: impl Fn(&mut Bed) -> anyhow::Result<f64>,
        mut peer: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<()> {
        let Both { daemon, alone } = both;
        let turns = Turns::take(samples, &mut [&mut || ours(daemon), &mut || ours(alone), &mut peer])?;
        self.add(named, &turns)
    }

    /// Adds the figures of turns of (through the daemon, the engine alone, the peer).
    fn add(&mut self, named: &Named<'_>, turns: &Turns) -> anyhow::Result<()> {
        let Named { name, what, unit, better, peer, aim } = *named;
        self.figures.add(Figure::new(name, what, unit, better, peer, &turns.pairs(0, 2), aim))?;
        let name = format!("{name}_engine_alone");
        self.figures.add(Figure::new(&name, what, unit, better, ALONE, &turns.pairs(0, 1), None))
    }

    /// Returns a measurement: nanoseconds of a write of 8 bytes, one at a time.
    fn one_write(&self) -> impl Fn(&mut Bed) -> anyhow::Result<f64> + use<> {
        let khz = self.khz;
        move |bed| Ok(nanoseconds(khz, bed.write(8, 1, 1, LATENCY_WRITES)?, LATENCY_WRITES))
    }

    /// Returns a measurement: million writes of 8 bytes per second, by `queue_pairs` in turn.
    fn many_writes(&self, queue_pairs: u64, window: u64) -> impl Fn(&mut Bed) -> anyhow::Result<f64> + use<> {
        let khz = self.khz;
        move |bed| Ok(1e3 / nanoseconds(khz, bed.write(8, queue_pairs, window, RATE_WRITES)?, RATE_WRITES))
    }

    /// Returns a measurement: GB/s of large writes, 4 outstanding.
    fn large_writes(&self, length: u32, writes: u64) -> impl Fn(&mut Bed) -> anyhow::Result<f64> + use<> {
        let khz = self.khz;
        move |bed| Ok(gigabytes(khz, bed.write(length, 1, 4, writes)?, u64::from(length) * writes))
    }

    /// Post to completion, one at a time, against a cache line's round trip.
    fn latency(&mut self, both: &mut Both) -> anyhow::Result<()> {
        let (khz, cpus) = (self.khz, self.cpus);
        let _ = (both.daemon.take_exits(), both.alone.take_exits());
        let writes = LATENCY_WRITES * (self.samples as u64 + 1);
        let named = Named {
            name: "write_latency_8B",
            what: "RDMA write of 8 bytes, post to completion",
            unit: "ns",
            better: Better::Lower,
            peer: "a cache line's round trip between two host threads",
            aim: Some(4.0),
        };
        self.compare(self.samples, &named, both, self.one_write(), || round_trip(cpus, khz))?;
        let (exits, alone) = (both.daemon.take_exits(), both.alone.take_exits());
        eprintln!("bench: rdma: {exits} exits in {writes} writes through the daemon");
        // On a loaded machine a program may lose its processor for 100 ms. Then its doorbells trap, and some dozens exit.
        if exits > writes / WRITES_PER_EXIT || alone > 0 {
            bail!(
                "{writes} writes left the guest {exits} times through the daemon and {alone} times with the engine alone; while a program polls \
                 they should not"
            );
        }
        self.exits = Some(exits);
        Ok(())
    }

    /// Small writes, many outstanding, against a bare ring.
    fn rate(&mut self, both: &mut Both) -> anyhow::Result<()> {
        let cpus = self.cpus;
        let named = Named {
            name: "write_rate_8B",
            what: "RDMA writes of 8 bytes, one queue pair, 128 outstanding (aim 5)",
            unit: "M/s",
            better: Better::Higher,
            peer: "a bare ring of 64-byte messages between two host threads",
            aim: None,
        };
        let ring = || Ok(1e3 / peers::ring(cpus, 10 * RATE_WRITES)?);
        self.compare(self.samples, &named, both, self.many_writes(1, WINDOW), ring)
    }

    /// Large writes against one core's copy of the same pages: those of the bed that the daemon serves.
    fn bandwidth(&mut self, both: &mut Both) -> anyhow::Result<()> {
        let khz = self.khz;
        let (source, target) = both.daemon.host_addresses()?;
        let cpu = self.cpus[1];
        for (length, label) in [(64 << 10, "64KiB"), (1 << 20, "1MiB"), (8 << 20, "8MiB")] {
            let writes = LARGE_WRITES * MIB / u64::from(length).max(MIB / 4);
            let copy = || {
                let ticks = host_threads::copy(cpu, target, source, u64::from(length), writes)?;
                Ok(gigabytes(khz, ticks, u64::from(length) * writes))
            };
            let named = Named {
                name: &format!("write_bandwidth_{label}"),
                what: &format!("RDMA writes of {label}, 4 outstanding"),
                unit: "GB/s",
                better: Better::Higher,
                peer: "memcpy of the same pages, one core",
                aim: (label == "1MiB").then_some(0.9),
            };
            self.compare(self.samples, &named, both, self.large_writes(length, writes), copy)?;
        }
        Ok(())
    }

    /// The same against UCX over shared memory between two processes without VMs.
    fn ucx(&mut self, both: &mut Both) -> anyhow::Result<()> {
        if !outside::missing(&[ucx::PROGRAM]).is_empty() {
            eprintln!("bench: rdma: peer UCX SKIPPED: ucx_perftest isn't installed (package ucx-utils)");
            return Ok(());
        }
        let cpus = self.cpus;
        let ucx = |kind, size, count| ucx::shared_memory(cpus, kind, size, count);
        let samples = self.samples.min(UCX_SAMPLES);
        let named = Named {
            name: "write_latency_8B_ucx",
            what: "RDMA write of 8 bytes, post to completion",
            unit: "ns",
            better: Better::Lower,
            peer: "UCX shared memory, tag, one way",
            aim: None,
        };
        let latency = || Ok(ucx("tag_lat", 8, 200_000)?.latency * 1e3);
        self.compare(samples, &named, both, self.one_write(), latency)?;
        let named = Named {
            name: "write_rate_8B_ucx",
            what: "RDMA writes of 8 bytes, one queue pair, 128 outstanding",
            unit: "M/s",
            better: Better::Higher,
            peer: "UCX shared memory, tag",
            aim: None,
        };
        let rate = || Ok(ucx("tag_bw", 8, 2_000_000)?.rate / 1e6);
        self.compare(samples, &named, both, self.many_writes(1, WINDOW), rate)?;
        let named = Named {
            name: "write_bandwidth_1MiB_ucx",
            what: "RDMA writes of 1 MiB, 4 outstanding",
            unit: "GB/s",
            ..named
        };
        let bandwidth = || Ok(ucx("tag_bw", MIB, 5_000)?.gigabytes);
        self.compare(samples, &named, both, self.large_writes(1 << 20, LARGE_WRITES), bandwidth)
    }

    /// Many queue pairs in use, against one of the same bed.
    fn many(&mut self, both: &mut Both) -> anyhow::Result<()> {
        let (many, one) = (self.many_writes(MANY.into(), MANY.into()), self.many_writes(1, WINDOW));
        let Both { daemon, alone } = both;
        let daemon = RefCell::new(daemon);
        let turns = Turns::take(
            self.samples,
            &mut [&mut || many(&mut daemon.borrow_mut()), &mut || many(alone), &mut || {
                one(&mut daemon.borrow_mut())
            }],
        )?;
        let named = Named {
            name: "active_queue_pairs",
            what: &format!("RDMA writes of 8 bytes, {MANY} queue pairs in turn"),
            unit: "M/s",
            better: Better::Higher,
            peer: "one queue pair, 128 outstanding",
            aim: Some(0.9),
        };
        self.add(&named, &turns)
    }

    /// One queue pair in use with thousands of idle ones, against without.
    fn idle(&mut self, crowded: &mut Both, empty: &mut Both) -> anyhow::Result<()> {
        let rate = self.many_writes(1, WINDOW);
        let named = Named {
            name: "idle_queue_pairs",
            what: &format!("RDMA writes of 8 bytes beside {IDLE} idle queue pairs"),
            unit: "M/s",
            better: Better::Higher,
            peer: "the same without them",
            aim: Some(0.97),
        };
        self.compare(self.samples, &named, crowded, &rate, || rate(&mut empty.daemon))
    }

    /// Copies out of and into guest memory, against `memcpy`.
    fn copies(&mut self) -> anyhow::Result<()> {
        let (khz, cpu) = (self.khz, self.cpus[1]);
        let copies = RefCell::new(Copies::new()?);
        for (direction, name, text) in
            [(Direction::Out, "copy_out", "out of"), (Direction::In, "copy_in", "into")]
        {
            for (length, repeats, label) in copies::SIZES {
                let rate = |ticks| gigabytes(khz, ticks, length * repeats);
                let pairs = Pairs::take(
                    self.samples,
                    || Ok(rate(copies.borrow_mut().by_dma(cpu, direction, length, repeats)?)),
                    || Ok(rate(copies.borrow_mut().by_memcpy(cpu, direction, length, repeats)?)),
                )?;
                self.figures.add(Figure::new(
                    &format!("dma_{name}_{label}"),
                    &format!("copy {text} guest memory, {label}, in the cache"),
                    "GB/s",
                    Better::Higher,
                    "memcpy",
                    &pairs,
                    (length >= copies::LARGE_BYTES).then_some(0.5),
                ))?;
            }
        }
        Ok(())
    }

    /// A victim's small writes with a hostile guest on the same engine, against without.
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
            let what = format!("engine alone: write of 8 bytes beside a hostile guest, {label}");
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
}

/// Returns nanoseconds of a cache line's round trip between two host threads on two cores.
fn round_trip([first, second]: [usize; 2], khz: f64) -> anyhow::Result<f64> {
    let ticks = host_threads::ping_pong(first, second, LINE_ROUNDS)?;
    Ok(nanoseconds(khz, ticks, LINE_ROUNDS))
}
