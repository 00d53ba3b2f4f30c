//! Group `neighbours`: what messages between two VMs cost that read each other's memory. Payload programs run the crate `neighbour`
//! itself, over real windows (read-only memslots, added while they run) and a shared segment; beside them, in turns, what a
//! core can read at best, the same by copies, cache lines, and what processes without VMs use.
//!
//! Nobody sleeps, so doorbells don't ring: payload programs have no interrupts.

pub mod bed;
mod sockets;

use anyhow::{Context, bail};
use machine::kvm::{Host, HostError};
use payload_loops::job::Job;
use payload_loops::line::Side;
use payload_loops::rings::Role;

use self::bed::Bed;
use crate::conditions::Conditions;
use crate::figures::{Better, Figure, Pairs, Report};
use crate::peers;
use crate::programs::Programs;

const LARGE: u64 = 64 << 10;
const SMALL: u64 = 64;
const LARGE_MESSAGES: u64 = 4_000;
const SMALL_MESSAGES: u64 = 400_000;
const ROUNDS: u64 = 20_000;
const SOCKET_MESSAGES: u64 = 1_000;

/// Measures; see [`crate::groups::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let skipped = |reason: String, conditions| {
        eprintln!("bench: group neighbours SKIPPED: {reason}");
        Ok(Report { group: "neighbours", skipped: Some(reason), conditions, figures: Vec::new() })
    };
    let host = match Host::open() {
        Ok(host) => host,
        Err(error @ HostError::Absent { .. }) => {
            return skipped(format!("no /dev/kvm ({error})"), Conditions::now(None, "none"));
        }
        Err(error) => return Err(error).context("Group neighbours needs KVM"),
    };
    let cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).take(2).collect();
    let &[first, second] = cpus.as_slice() else {
        let reason = format!("two CPUs are needed, and this process may use {}", cpus.len());
        return skipped(reason, Conditions::now(Some(&host), "none"));
    };
    let programs = Programs::build()?;
    let mut conditions = Conditions::now(Some(&host), "4 KiB");
    if !quick {
        conditions.scheduling = peers::prefer_this_process();
    }
    let mut session = Session {
        bed: Bed::start(&programs.path("measure"), [first, second])?,
        cpus: [first, second],
        khz: peers::tsc_khz(),
        samples: if quick { 3 } else { 51 },
        figures: Vec::new(),
    };
    session.large()?;
    session.latency()?;
    session.small()?;
    session.sockets()?;
    let Session { bed, figures, .. } = session;
    bed.finish()?;
    conditions.finish();
    Ok(Report { group: "neighbours", skipped: None, conditions, figures })
}

struct Session {
    bed: Bed,
    cpus: [usize; 2],
    khz: f64,
    samples: usize,
    figures: Vec<Figure>,
}

impl Session {
    fn add(&mut self, figure: Option<Figure>) -> anyhow::Result<()> {
        let figure =
            figure.context("A sample of the last figure isn't a positive number; is the clock sound?")?;
        eprintln!("bench: neighbours: {}: {:.4} of {}", figure.name, figure.ratio, figure.peer.name);
        self.figures.push(figure);
        Ok(())
    }

    /// Messages of 64 KiB that the receiver reads where they lie.
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
        // Each sample asks for work once per VM (and twice where one VM rests); no message may add to that.
        let samples = (self.samples as u64 + 1) * 2;
        let exits = self.bed.exits() - exits;
        if exits > 8 * samples {
            bail!(
                "{samples} times {LARGE_MESSAGES} messages left the guests {exits} times; they should never"
            );
        }
        let what = "messages of 64 KiB, read in place";
        let peer = "the same loads of the same memory, without messages";
        self.add(Figure::new("read_64KiB", what, "GB/s", Better::Higher, peer, &pairs, Some(0.9)))?;
        let peer = "a ring through which they are copied in and out (rep movsb), in the same VMs";
        self.add(Figure::new("copies_64KiB", what, "GB/s", Better::Higher, peer, &copies, Some(3.0)))
    }

    /// One message of 64 bytes at a time, there and back.
    fn latency(&mut self) -> anyhow::Result<()> {
        let khz = self.khz;
        let one_way = |ticks| nanoseconds(khz, ticks, 2 * ROUNDS);
        let bed = std::cell::RefCell::new(&mut self.bed);
        let pairs = Pairs::take(
            self.samples,
            || Ok(one_way(bed.borrow_mut().play([Role::Ping, Role::Pong], ROUNDS, SMALL)?)),
            || {
                let mut bed = bed.borrow_mut();
                let address = bed.word()?;
                let job = |side| Job::PingPong { address, side, rounds: ROUNDS };
                Ok(one_way(bed.run([job(Side::First), job(Side::Second)])?))
            },
        )?;
        let what = "one-way latency of 64 bytes, read in place";
        let peer = "a cache line between the same two VMs";
        self.add(Figure::new("latency_64B", what, "ns", Better::Lower, peer, &pairs, Some(2.0)))
    }

    /// Messages of 64 bytes, many outstanding.
    fn small(&mut self) -> anyhow::Result<()> {
        let khz = self.khz;
        let rate = |ticks| 1e3 / nanoseconds(khz, ticks, SMALL_MESSAGES);
        let bed = std::cell::RefCell::new(&mut self.bed);
        let pairs = Pairs::take(
            self.samples,
            || Ok(rate(bed.borrow_mut().play([Role::Send, Role::Receive], SMALL_MESSAGES, SMALL)?)),
            || Ok(rate(bed.borrow_mut().play([Role::CopyIn, Role::CopyOut], SMALL_MESSAGES, SMALL)?)),
        )?;
        let what = "messages of 64 bytes, read in place, 256 outstanding (aim 20)";
        let peer = "a ring through which they are copied in and out (rep movsb), in the same VMs";
        self.add(Figure::new("rate_64B", what, "M/s", Better::Higher, peer, &pairs, None))
    }

    /// What processes without VMs use.
    fn sockets(&mut self) -> anyhow::Result<()> {
        let (khz, cpus) = (self.khz, self.cpus);
        for (name, peer, kind) in [
            ("unix_64KiB", "a Unix socket between two processes' threads", sockets::Kind::Unix),
            ("tcp_64KiB", "TCP over loopback", sockets::Kind::Tcp),
        ] {
            let bed = &mut self.bed;
            let pairs = Pairs::take(
                self.samples,
                || {
                    let ticks = bed.play([Role::Send, Role::Receive], LARGE_MESSAGES, LARGE)?;
                    Ok(gigabytes(khz, ticks, LARGE_MESSAGES * LARGE))
                },
                || sockets::rate(kind, cpus, SOCKET_MESSAGES, LARGE),
            )?;
            let what = "messages of 64 KiB, read in place";
            self.add(Figure::new(name, what, "GB/s", Better::Higher, peer, &pairs, None))?;
        }
        Ok(())
    }
}

/// Nanoseconds of `ticks`, spread over `count`.
fn nanoseconds(khz: f64, ticks: u64, count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let each = ticks as f64 * 1e6 / khz / count.max(1) as f64;
    each
}

/// GB/s of `bytes` in `ticks`.
fn gigabytes(khz: f64, ticks: u64, bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let rate = bytes as f64 / nanoseconds(khz, ticks, 1);
    rate
}
