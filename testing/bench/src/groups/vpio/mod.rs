//! Group `vpio`: cards that a guest drives as Linux's drivers do, by real instructions in a VM.
//!
//! | module | holds |
//! |---|---|
//! | [`ne2000`] | by ports: the reference emulation, under its model or bare, against trapping every access |
//! | [`rtl8139`] | by memory: a card that sends at 100 Mbit/s, under its model, passed through, and with every access trapped |
//! | [`card`] | that card |
//! | [`e1000`] | by memory: a card that sends and receives at 1 Gbit/s, the same three ways |
//! | [`gigabit`] | that card |
//! | [`counts`] | exits, requests, checks, time in the monitor |

mod bytes;
mod card;
mod counts;
mod e1000;
mod gigabit;
mod ne2000;
mod rtl8139;

use anyhow::Context;
use serde_json::Value;

use crate::conditions::Conditions;
use crate::figures::{Figures, Report};
use crate::peers;
use crate::programs::Programs;

/// Measures the group; see [`super::Group::run`].
pub fn run(quick: bool) -> anyhow::Result<Report> {
    let host = match super::kvm("vpio")? {
        Ok(host) => host,
        Err(report) => return Ok(report),
    };
    let programs = Programs::build()?;
    let mut conditions = Conditions::now(Some(&host), "4 KiB");
    conditions.scheduling = peers::prefer_this_process();
    let cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    let (Some(&cpu), Some(&other)) = (cpus.first(), cpus.last()) else {
        anyhow::bail!("This process may run on no CPU that can be named")
    };
    let samples = if quick { 3 } else { 21 };
    let mut figures = Figures::of("vpio");
    let mut details = serde_json::Map::new();
    peers::pin(cpu)?;
    ne2000::measure(&programs, cpu, samples, &mut figures, &mut details).context("NE2000")?;
    rtl8139::measure(&programs, (cpu, other), samples, &mut figures, &mut details).context("RTL8139")?;
    e1000::measure(&programs, (cpu, other), samples, &mut figures, &mut details).context("e1000")?;
    println!("{}", counts::table(&details));
    conditions.finish();
    let figures = figures.all;
    Ok(Report { group: "vpio", skipped: None, conditions, figures, details: Value::Object(details) })
}
