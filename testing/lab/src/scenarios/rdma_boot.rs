//! Two guests with RDMA devices boot in parallel and power off, repeatedly: the common start of all RDMA scenarios.

use crate::lab::Lab;
use crate::progress;
use crate::rdma::{self, Pair};
use crate::scenario::{Options, Report, Scenario};
use anyhow::{Context, Result};
use std::time::Instant;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rdma-boot",
    about: "two guests with RDMA devices boot at the same time, reach each other and power off (--count N: N times on one host)",
    topology: rdma::topology,
    run,
    prompt: Some(rdma::prompt),
};

/// Default number of pairs; `--count` overrides it.
const COUNT: u32 = 5;

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let host = lab.host(0)?;
    let (mut fastest, mut slowest) = (f64::MAX, 0f64);
    let count = options.count.unwrap_or(COUNT);
    for n in 1..=count {
        host.forget_consoles();
        let start = Instant::now();
        let before = host.processor_time()?;
        // The first hang ends the run, so that it can be examined.
        let pair = Pair::start(lab, options).with_context(|| format!("pair {n} of {count}"))?;
        let seconds = start.elapsed().as_secs_f64();
        let busy = host.processor_time()?.saturating_sub(before).as_secs_f64();
        pair.finish().with_context(|| format!("pair {n} of {count}"))?;
        (fastest, slowest) = (fastest.min(seconds), slowest.max(seconds));
        progress!("pair {n}/{count}: up after {seconds:.1} s, {busy:.1} s of the emulator's processor time");
        report.figure("pairs", n);
    }
    report.figure("up_s_fastest", fastest);
    report.figure("up_s_slowest", slowest);
    Ok(())
}
