//! Debian kernels boot to user space with 1, 2 and 4 vCPUs. Power-off, reboot and the power button work.

use crate::clock;
use crate::emulator_faults;
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use crate::unfinished::Unfinished;
use anyhow::{Result, bail};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "boot",
    about: "Debian kernels 6.1, 6.1 cloud and 6.12 with 1, 2 and 4 vCPUs: user space, power-off, reboot, power button (--count N: N boots in a row)",
    topology: |_| Topology::single(),
    run,
    prompt: None,
};

const GUEST_TIMEOUT: Duration = Duration::from_secs(150);

/// The end of a guest's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    PowerOff,
    Reboot,
    Button,
}

impl End {
    fn parse(text: &str) -> Result<Self> {
        Ok(match text {
            "poweroff" => End::PowerOff,
            "reboot" => End::Reboot,
            "button" => End::Button,
            _ => bail!("A guest can't end by {text:?}; it can by poweroff, reboot and button"),
        })
    }
}

fn one(host: &Host, options: &Options, (kernel, cpus, bzimage, end): &Run) -> Result<Duration> {
    let (vmm, kernel, cpus, bzimage, end) = (options.vmm()?, kernel.as_str(), *cpus, *bzimage, *end);
    let word = match end {
        End::PowerOff => "lab.end=poweroff",
        End::Reboot => "lab.end=reboot",
        End::Button => "lab.end=halt",
    };
    let mut spec = GuestSpec::new("boot", kernel, cpus).root().cmdline([word]);
    spec.bzimage = bzimage;
    if options.interrupts_in_monitor()? {
        spec.extra.push("--interrupts monitor".to_owned());
        // Emulated hosts are AMD's, where Linux finds it nowhere else without KVM's clock.
        spec = spec.cmdline([format!("tsc_early_khz={}", clock::tsc_khz())]);
    }
    let guest = Guest::start(host, &spec, vmm)?;
    let (_, init) = guest.expect("LAB-L2 init", GUEST_TIMEOUT)?;
    let (line, _) = guest.expect("LAB-L2 user space", GUEST_TIMEOUT)?;
    if !line.contains(&format!("cpus {cpus} ")) {
        bail!("The guest should have {cpus} vCPUs and says {line:?}");
    }
    guest.expect("LAB-L2 exit 0", GUEST_TIMEOUT)?;
    match end {
        End::PowerOff => guest.ended(GUEST_TIMEOUT)?,
        End::Reboot => {
            // Causeway restarts its guest in place, which a second init proves. QEMU is configured to do the same.
            let from = guest.session.out.position();
            guest.expect_from("LAB-L2 init", from, GUEST_TIMEOUT)?;
            guest.expect_from("LAB-L2 user space", from, GUEST_TIMEOUT)?;
            guest.session.signal(15)?;
            if guest.session.wait(GUEST_TIMEOUT)?.is_none() {
                bail!("The monitor didn't end after SIGTERM");
            }
        }
        End::Button => {
            press(host, &guest)?;
            guest.expect("LAB-L2 power button", GUEST_TIMEOUT)?;
            guest.ended(GUEST_TIMEOUT)?;
        }
    }
    let trouble = guest.trouble();
    if !trouble.is_empty() {
        bail!("The guest's console has {}", trouble.join(" / "));
    }
    Ok(init)
}

fn press(host: &Host, guest: &Guest) -> Result<()> {
    let name = &guest.spec.name;
    let command = match guest.vmm {
        Vmm::Causeway => format!("causeway stop --power-button {}", guest.spec.name),
        _ => format!(
            "(echo '{{\"execute\":\"qmp_capabilities\"}}{{\"execute\":\"system_powerdown\"}}'; sleep 1) | socat - UNIX-CONNECT:/tmp/{name}.qmp"
        ),
    };
    host.sh(&command).map(drop)
}

/// Returns the runs: kernel, vCPUs, bzImage, end.
type Run = (String, u32, bool, End);

fn plan(options: &Options) -> Result<Vec<Run>> {
    let ends: Vec<End> = options.ends.iter().map(|e| End::parse(e)).collect::<Result<_>>()?;
    let kernels: Vec<String> = if options.kernels.is_empty() {
        ["6.1-cloud", "6.1-generic", "6.12-generic"].map(String::from).to_vec()
    } else {
        options.kernels.clone()
    };
    let cpus = if options.cpus.is_empty() { vec![1, 2, 4] } else { options.cpus.clone() };
    let mut all = Vec::new();
    for k in &kernels {
        for c in &cpus {
            all.push((k.clone(), *c, false, End::PowerOff));
            if options.count.is_some() {
                all.push((k.clone(), *c, true, End::PowerOff));
            }
        }
    }
    if options.count.is_none() {
        for (i, k) in kernels.iter().enumerate() {
            let c = cpus[i % cpus.len()];
            all.push((k.clone(), c, true, End::PowerOff));
            all.push((k.clone(), c, false, End::Reboot));
            all.push((k.clone(), c, false, End::Button));
        }
    }
    if !ends.is_empty() {
        // Selected by name: every kernel with every number of vCPUs ends in each of these ways.
        all = all
            .iter()
            .filter(|r| r.3 == End::PowerOff && !r.2)
            .flat_map(|r| ends.iter().map(|e| (r.0.clone(), r.1, r.2, *e)))
            .collect();
    }
    Ok(match options.count {
        Some(n) => all.into_iter().cycle().take(n as usize).collect(),
        None => all,
    })
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let vmm = options.vmm()?;
    if vmm == Vmm::Causeway {
        lab.install_causeway()?;
    }
    let host = lab.host(0)?;
    let runs = plan(options)?;
    let (mut failures, mut fastest, mut slowest) = (0, f64::MAX, 0f64);
    for (n, one_run) in runs.iter().enumerate() {
        let (kernel, cpus, bzimage, end) = one_run;
        let what = format!(
            "boot {}/{}: {kernel}{}, {cpus} vCPU, {end:?}",
            n + 1,
            runs.len(),
            if *bzimage { " bzImage" } else { "" }
        );
        host.forget_consoles();
        match one(host, options, one_run) {
            Ok(init) => {
                fastest = fastest.min(init.as_secs_f64());
                slowest = slowest.max(init.as_secs_f64());
                progress!("{what}: init after {:.2} s", init.as_secs_f64());
            }
            Err(e) => {
                progress!("{what}: FAILED: {e:#}");
                let states = e.downcast_ref().map(|e: &Unfinished| vec![host.state(e.began())]);
                // If the fault is excused, the whole scenario restarts on another host.
                if emulator_faults::found(&e, &states.unwrap_or_default(), false).is_some() {
                    return Err(e.context(what));
                }
                // Immediately, so that the failure counts independently of later events.
                failures += 1;
                report.check(false, format!("{what}: {e:#}"));
                if host.answers() {
                    host.wakes_by_signal();
                }
                eprint!("{}", host.tails());
                lab.hold()?;
                host.looked_at();
                if !host.answers() {
                    bail!("The emulated host hangs after {} boots", n + 1);
                }
                if failures >= 5 && failures * 2 > n {
                    report.check(false, format!("gave up after {} boots", n + 1));
                    break;
                }
            }
        }
    }
    report.figure("boots", runs.len());
    report.figure("failures", failures);
    report.figure("init_s_fastest", fastest);
    report.figure("init_s_slowest", slowest);
    report.figure("monitor", vmm.name());
    report.figure("interrupts", options.interrupts.as_deref().unwrap_or("kernel"));
    report.check(failures == 0, format!("{failures} boots failed"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_covers_kernels_and_vcpus() {
        let all = plan(&Options::default()).unwrap();
        assert_eq!(all.len(), 9 + 9);
        assert_eq!(plan(&Options { count: Some(50), ..Options::default() }).unwrap().len(), 50);
        let buttons =
            plan(&Options { ends: vec!["button".into()], cpus: vec![1], ..Options::default() }).unwrap();
        assert!(buttons.len() == 3 && buttons.iter().all(|r| r.3 == End::Button));
        assert!(plan(&Options { ends: vec!["unplug".into()], ..Options::default() }).is_err());
        assert!(all.iter().any(|r| r.0 == "6.12-generic" && r.1 == 4));
    }
}
