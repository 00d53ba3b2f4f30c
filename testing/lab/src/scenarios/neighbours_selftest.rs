//! The self-tests of the neighbour modules that need no neighbour: `guest/mmnet/test`, with `neigh_loop` instead of the core, in one
//! guest.

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::image::Images;
use crate::kernel::Modules;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::recipe::{self, Artifact};
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use crate::{paths, progress};
use anyhow::{Context, Result};
use std::fs;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "neighbours-selftest",
    about: "client and server of mmblk against each other in one guest's kernel (TAP): verification, a ring that is full, links that die, unloading",
    topology: |_| Topology::new().host(HostSpec::new("host").cpus(2).memory(2048).neighbours()),
    run,
    prompt: None,
};

/// RAM of the guest in MiB: two RAM disks and files of a tmpfs use it.
const MEMORY_MIB: u32 = 512;
const SELFTEST_TIMEOUT: Duration = Duration::from_secs(900);
const TEST: &str = "guest/mmnet/test/mmblk-selftest.sh";

/// Parses a line of TAP: whether a check succeeded, and its number and name.
fn check(line: &str) -> Option<(bool, &str)> {
    let line = line.trim();
    line.strip_prefix("ok ").map(|name| (true, name)).or_else(|| Some((false, line.strip_prefix("not ok ")?)))
}

/// Parses the planned number of checks.
fn plan(line: &str) -> Option<usize> {
    line.trim().strip_prefix("1..")?.parse().ok()
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    host.sh("truncate -s 64M /tmp/disk.raw")?;
    let kernel = options.kernels.first().map_or(recipe::NEIGHBOUR_KERNELS[0], String::as_str);
    let test = paths::workspace().join(TEST);
    let mut spec = GuestSpec::new("selftest", kernel, options.cpus.first().copied().unwrap_or(2))
        .memory(MEMORY_MIB)
        .root()
        .disk("/tmp/disk.raw", false)
        .script(
            "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\ncd /lab\nfor m in $(cat order); do case $m in brd) p='rd_nr=2 rd_size=32768';; *) p=;; esac\n\
             insmod $m.ko $p || exit 9; done\nsh mmblk-selftest.sh",
        )
        .file("mmblk-selftest.sh", fs::read(&test).with_context(|| format!("Can't read {}", test.display()))?);
    for name in ["neigh_loop", "mmblk"] {
        spec = spec.file(&format!("{name}.ko"), module(kernel, name)?);
    }
    let images = Images::ready(&[Artifact::Kernels])?;
    let modules = Modules::scan(&images.kernel(kernel).join("modules"))?.in_order(&["configfs", "brd"])?;
    let order: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
    spec = spec.file("order", order.join(" ").into_bytes());
    for (module, path) in &modules {
        spec = spec.file(&format!("{module}.ko"), fs::read(path)?);
    }
    let guest = Guest::start(host, &spec, Vmm::Causeway)?;
    let status = guest.script_status(SELFTEST_TIMEOUT)?;
    let lines = guest.session.out.lines_from(0);
    let (mut passed, mut failed) = (0, 0);
    for (number, line) in lines.iter().enumerate() {
        match check(line) {
            Some((true, name)) => {
                passed += 1;
                progress!("ok {name}");
            }
            Some((false, name)) => {
                failed += 1;
                // The lines after it that begin with # have the reason.
                let why: Vec<&str> = lines
                    .iter()
                    .skip(number + 1)
                    .map(|line| line.trim())
                    .take_while(|line| line.starts_with('#'))
                    .collect();
                report.check(false, format!("{name}: {}", why.join(" / ")));
            }
            None => {}
        }
    }
    let planned = lines.iter().find_map(|line| plan(line));
    report.check(
        planned == Some(passed + failed) && passed > 0,
        format!("{passed} checks passed and {failed} failed, of {planned:?} that there were to be"),
    );
    report.check(status == 0, format!("the test ended with status {status}"));
    report.check(guest.trouble().is_empty(), format!("the guest's kernel complains: {:?}", guest.trouble()));
    report.figure("passed", passed);
    report.figure("failed", failed);
    report.figure("kernel", kernel);
    guest.ended(Duration::from_secs(60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tap_is_read() {
        assert_eq!(check("ok 3 a file system\r"), Some((true, "3 a file system")));
        assert_eq!(check("not ok 4 zeroes"), Some((false, "4 zeroes")));
        assert_eq!(check("# ok"), None);
        assert_eq!((plan("1..15\r"), plan("1..")), (Some(15), None));
    }
}
