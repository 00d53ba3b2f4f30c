//! Whether page walks of a guest write to its page tables. One host's emulator only loads, as Intel's EPT without accessed bits of its
//! own. The other's also stores, as AMD's nested paging. The scenario counts faults at write-protected tables.

use crate::lab::Lab;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology, Walks};
use crate::walks_probe::{CASES, Faults, TABLES};
use anyhow::{Context, Result};
use serde_json::json;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "walks",
    about: "write faults at a guest's page tables on a host whose page walks only load, and on one whose walks store",
    topology,
    run,
    prompt: None,
};

const HOSTS: [(&str, Walks); 2] = [("reads", Walks::Read), ("writes", Walks::Write)];

fn topology(_: &Options) -> Topology {
    let hosts = HOSTS.into_iter().map(|(name, walks)| HostSpec::new(name).walks(walks));
    hosts.fold(Topology::new(), Topology::host)
}

fn run(lab: &Lab, _: &Options, report: &mut Report) -> Result<()> {
    for (number, (name, walks)) in HOSTS.into_iter().enumerate() {
        let host = lab.host(number)?;
        let said = host.sh("exec /share/.lab/lab walks-probe")?;
        let found = said
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<Vec<Faults>, _>>()
            .with_context(|| format!("The probe on {name} said {said:?}"))?;
        report.check(
            found.len() == CASES.len(),
            format!("{} of {} cases ran on {name}", found.len(), CASES.len()),
        );
        for (case, found) in CASES.iter().zip(&found) {
            let expected = if walks == Walks::Read { case.read_walks } else { [1; TABLES.len()] };
            report.check(
                found.case == case.name && found.pages == expected,
                format!(
                    "on {name}, {}: write faults at {TABLES:?} are {:?}, and not {expected:?}",
                    case.name, found.pages
                ),
            );
        }
        let sums: Vec<_> = found
            .iter()
            .map(|f| json!({"case": f.case, "write_faults": f.pages.iter().sum::<u32>()}))
            .collect();
        report.figure(name, sums);
    }
    Ok(())
}
