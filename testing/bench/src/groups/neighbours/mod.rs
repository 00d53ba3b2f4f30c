//! Group `neighbours`: the cost of messages between two VMs that read each other's memory. Payload programs run the crate `neighbour`
//! itself, over real windows (read-only memslots, added at run time) and a shared segment. The peers run in turns: a core's best read
//! rate, the same by copies, cache lines, and mechanisms of processes without VMs.
//!
//! No side sleeps, so no doorbells are used: payload programs have no interrupts.

pub mod bed;
mod sockets;

use anyhow::bail;
use payload_loops::job::Job;
use payload_loops::line::Side;
use payload_loops::rings::Role;

use self::bed::Bed;
use self::sockets::Between;
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Figures, Pairs, Report, gigabytes, nanoseconds};
use crate::outside::link::Link;
use crate::outside::{self, memif, ucx};
use crate::peers;
use crate::programs::Programs;

const LARGE: u64 = 64 << 10;
const SMALL: u64 = 64;
const LARGE_MESSAGES: u64 = 4_000;
const SMALL_MESSAGES: u64 = 400_000;
const ROUNDS: u64 = 20_000;
const SOCKET_MESSAGES: u64 = 1_000;
/// Number of samples of other programs: each takes about a second.
const OUTSIDE_SAMPLES: usize = 7;
/// The largest MTU of a veth pair.
const VETH_MTU: u32 = 65_535;

/// Measures the group; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let (host, cpus) = match super::kvm_and_cpus("neighbours")? {
        Ok(ground) => ground,
        Err(report) => return Ok(report),
    };
    let programs = Programs::build()?;
    let mut conditions = Conditions::now(Some(&host), "4 KiB");
    if !quick {
        conditions.scheduling = peers::prefer_this_process();
    }
    let mut session = Session {
        bed: Bed::start(&programs.path("measure"), cpus)?,
        cpus,
        khz: peers::tsc_khz(),
        samples: if quick { 3 } else { 51 },
        figures: Figures::of("neighbours"),
    };
    session.large()?;
    session.latency()?;
    session.small()?;
    session.sockets()?;
    session.ucx()?;
    session.memif()?;
    let Session { bed, figures, .. } = session;
    bed.finish()?;
    conditions.finish();
    Ok(Report {
        group: "neighbours",
        skipped: None,
        conditions,
        figures: figures.all,
        details: serde_json::Value::Null,
    })
}

const IN_PLACE: &str = "one-way latency of 64 bytes, read in place";
const ROUND: [Role; 2] = [Role::Ping, Role::Pong];

struct Session {
    bed: Bed,
    cpus: [usize; 2],
    khz: f64,
    samples: usize,
    figures: Figures,
}

impl Session {
    /// Messages of 64 KiB that the receiver reads in place.
    fn large(&mut self) -> anyhow::Result<()> {
        let khz = self.khz;
        let rate = |ticks| gigabytes(khz, ticks, LARGE_MESSAGES * LARGE);
        let exits = self.bed.exits();
        let bed = std::cell::RefCell::new(&mut self.bed);
        let ours = || Ok(rate(bed.borrow_mut().play([Role::Send, Role::Receive], LARGE_MESSAGES, LARGE)?));
        let pairs =
            Pairs::take(self.samples, ours, || Ok(rate(bed.borrow_mut().read(LARGE_MESSAGES, LARGE)?)))?;
        let copies = Pairs::take(self.samples, ours, || {
            Ok(rate(bed.borrow_mut().play([Role::CopyIn, Role::CopyOut], LARGE_MESSAGES, LARGE)?))
        })?;
        // Each sample requests a job once per VM (and twice if one VM is idle). Messages must add no exits.
        let samples = (self.samples as u64 + 1) * 2;
        let exits = self.bed.exits() - exits;
        if exits > 8 * samples {
            bail!(
                "{samples} times {LARGE_MESSAGES} messages left the guests {exits} times; they should never"
            );
        }
        let what = "messages of 64 KiB, read in place";
        let peer = "the same loads of the same memory, without messages";
        self.figures.add(Figure::new("read_64KiB", what, "GB/s", Better::Higher, peer, &pairs, Some(0.9)))?;
        let peer = "a ring through which they are copied in and out (rep movsb), in the same VMs";
        self.figures.add(Figure::new("copies_64KiB", what, "GB/s", Better::Higher, peer, &copies, Some(3.0)))
    }

    /// One message at a time, there and back, of 64 bytes, read in place.
    fn latency(&mut self) -> anyhow::Result<()> {
        let khz = self.khz;
        let one_way = |ticks| nanoseconds(khz, ticks, 2 * ROUNDS);
        let bed = std::cell::RefCell::new(&mut self.bed);
        let pairs = Pairs::take(
            self.samples,
            || Ok(one_way(bed.borrow_mut().play(ROUND, ROUNDS, SMALL)?)),
            || {
                let mut bed = bed.borrow_mut();
                let address = bed.word()?;
                let job = |side| Job::PingPong { address, side, rounds: ROUNDS };
                Ok(one_way(bed.run([job(Side::First), job(Side::Second)])?))
            },
        )?;
        let peer = "a cache line between the same two VMs";
        self.figures.add(Figure::new(
            "latency_64B",
            IN_PLACE,
            "ns",
            Better::Lower,
            peer,
            &pairs,
            Some(2.0),
        ))?;
        Ok(())
    }

    /// Small messages, many outstanding.
    fn small(&mut self) -> anyhow::Result<()> {
        let khz = self.khz;
        let rate = |ticks| 1e3 / nanoseconds(khz, ticks, SMALL_MESSAGES);
        let bed = std::cell::RefCell::new(&mut self.bed);
        let in_place = "messages of 64 bytes, read in place, 256 outstanding (aim 20)";
        let roles = [Role::Send, Role::Receive];
        let pairs = Pairs::take(
            self.samples,
            || Ok(rate(bed.borrow_mut().play(roles, SMALL_MESSAGES, SMALL)?)),
            || Ok(rate(bed.borrow_mut().play([Role::CopyIn, Role::CopyOut], SMALL_MESSAGES, SMALL)?)),
        )?;
        let peer = "a ring through which they are copied in and out (rep movsb), in the same VMs";
        self.figures.add(Figure::new("rate_64B", in_place, "M/s", Better::Higher, peer, &pairs, None))?;
        Ok(())
    }

    /// Adds a figure of Causeway and a peer's bandwidth with messages of 64 KiB.
    fn beside(
        &mut self,
        name: &str,
        peer: &str,
        samples: usize,
        mut rate: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<()> {
        let (khz, bed) = (self.khz, &mut self.bed);
        let ours = || {
            let ticks = bed.play([Role::Send, Role::Receive], LARGE_MESSAGES, LARGE)?;
            Ok(gigabytes(khz, ticks, LARGE_MESSAGES * LARGE))
        };
        let pairs = Pairs::take(samples, ours, &mut rate)?;
        let what = "messages of 64 KiB, read in place";
        self.figures.add(Figure::new(name, what, "GB/s", Better::Higher, peer, &pairs, None))
    }

    /// Sockets between processes without VMs.
    fn sockets(&mut self) -> anyhow::Result<()> {
        let (cpus, samples) = (self.cpus, self.samples);
        let rate = |between| sockets::rate(between, cpus, SOCKET_MESSAGES, LARGE);
        let peer = "a Unix socket between two processes' threads";
        self.beside("unix_64KiB", peer, samples, || rate(Between::Unix))?;
        self.beside("tcp_64KiB", "TCP over loopback", samples, || rate(Between::Loopback))?;
        if !rustix::process::geteuid().is_root() {
            eprintln!("bench: neighbours: peer TCP over veth SKIPPED: network namespaces need root");
            return Ok(());
        }
        let link = Link::new(VETH_MTU)?;
        let peer = "TCP over a veth pair between two network namespaces, MTU 65535";
        self.beside("veth_64KiB", peer, samples, || rate(Between::Namespaces(&link)))
    }

    /// DPDK's shared memory interface.
    fn memif(&mut self) -> anyhow::Result<()> {
        if !outside::missing(&[memif::PROGRAM]).is_empty() {
            eprintln!(
                "bench: neighbours: peer memif SKIPPED: dpdk-testpmd isn't installed (packages dpdk-dev, librte-net-memif23, librte-mempool-ring23)"
            );
            return Ok(());
        }
        let (khz, cpus, bed) = (self.khz, self.cpus, &mut self.bed);
        let ours = || {
            let ticks = bed.play([Role::Send, Role::Receive], SMALL_MESSAGES, SMALL)?;
            Ok(1e3 / nanoseconds(khz, ticks, SMALL_MESSAGES))
        };
        let samples = self.samples.min(OUTSIDE_SAMPLES);
        let pairs = Pairs::take(samples, ours, || Ok(memif::packets_per_second(cpus, 64)? / 1e6))?;
        let what = "messages of 64 bytes, read in place, 256 outstanding";
        let peer = "packets of 64 bytes by DPDK's memif (testpmd, no huge pages)";
        self.figures.add(Figure::new("rate_64B_memif", what, "M/s", Better::Higher, peer, &pairs, None))
    }

    /// UCX over shared memory.
    fn ucx(&mut self) -> anyhow::Result<()> {
        if !outside::missing(&[ucx::PROGRAM]).is_empty() {
            eprintln!(
                "bench: neighbours: peer UCX SKIPPED: ucx_perftest isn't installed (package ucx-utils)"
            );
            return Ok(());
        }
        let (khz, cpus) = (self.khz, self.cpus);
        let ucx = |kind, size, count| ucx::shared_memory(cpus, kind, size, count);
        let samples = self.samples.min(OUTSIDE_SAMPLES);
        let peer = "UCX over shared memory, tagged messages";
        self.beside("ucx_64KiB", peer, samples, || Ok(ucx("tag_bw", LARGE, 20_000)?.gigabytes))?;
        let bed = &mut self.bed;
        let ours = || Ok(nanoseconds(khz, bed.play(ROUND, ROUNDS, SMALL)?, 2 * ROUNDS));
        let pairs = Pairs::take(samples, ours, || Ok(ucx("tag_lat", SMALL, 200_000)?.latency * 1e3))?;
        self.figures.add(Figure::new(
            "latency_64B_ucx",
            IN_PLACE,
            "ns",
            Better::Lower,
            peer,
            &pairs,
            None,
        ))?;
        let bed = &mut self.bed;
        let ours = || {
            let ticks = bed.play([Role::Send, Role::Receive], SMALL_MESSAGES, SMALL)?;
            Ok(1e3 / nanoseconds(khz, ticks, SMALL_MESSAGES))
        };
        let pairs = Pairs::take(samples, ours, || Ok(ucx("tag_bw", SMALL, 2_000_000)?.rate / 1e6))?;
        let what = "messages of 64 bytes, read in place, 256 outstanding";
        self.figures.add(Figure::new("rate_64B_ucx", what, "M/s", Better::Higher, peer, &pairs, None))
    }
}
