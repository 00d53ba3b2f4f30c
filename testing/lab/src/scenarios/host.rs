//! Two linked hosts: KVM exists, and the link transports packets. The smallest scenario, and the template for new ones.

use crate::lab::Lab;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use anyhow::{Context, Result};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "host",
    about: "two emulated hosts boot, have KVM, and reach each other over their link",
    topology: |_| Topology::ring(2),
    run,
    prompt: None,
};

fn run(lab: &Lab, _: &Options, report: &mut Report) -> Result<()> {
    let (a, b) = (lab.host(0)?, lab.host(1)?);
    for h in [a, b] {
        h.sh("test -c /dev/kvm && grep -q svm /proc/cpuinfo")?;
    }
    let text = a.sh("ping -q -c 20 -i 0.05 -w 30 10.77.0.2")?;
    let lost: f64 = text
        .split([' ', ','])
        .find_map(|w| w.strip_suffix('%'))
        .and_then(|p| p.parse().ok())
        .context("ping printed no loss")?;
    report.figure("boot_s", a.boot_time().as_secs_f64());
    report.figure("ping_lost_percent", lost);
    report.check(lost == 0.0, "packets were lost between the hosts");
    Ok(())
}
