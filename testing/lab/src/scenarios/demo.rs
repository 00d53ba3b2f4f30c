//! The scenario of `make demo`: Debian under Causeway with disk and network, fio with verification, an iperf3 transfer, the boot time,
//! and every exit by cause.

use super::net::{guest_up, tap};
use crate::guest::{Guest, GuestSpec, Vmm};
use crate::heartbeat::Heartbeat;
use crate::lab::Lab;
use crate::measure::Measured;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use crate::{paths, progress};
use anyhow::{Context, Result};
use serde_json::json;
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "demo",
    about: "Debian under the monitor with disk and network: fio with verification, iperf3, boot time, exits by cause",
    topology: |_| Topology::single(),
    run,
    prompt: None,
};

/// Limit of a monitor's memory beyond guest RAM, MiB.
const MAX_MIB_BEYOND_RAM: u64 = 15;
/// Limit without its program's file.
const MAX_MIB_BEYOND_RAM_AND_PROGRAM: u64 = 8;
const GUEST_TIMEOUT: Duration = Duration::from_secs(120);

fn script() -> String {
    let mut s = guest_up("10.78.0");
    s.push_str(
        "echo \"DEMO $(. /etc/os-release; echo $PRETTY_NAME), kernel $(uname -r), $(nproc) CPUs, $(free -m | sed -n 's/^Mem: *\\([0-9]*\\).*/\\1/p') MiB\"\n\
         fio --eta=never --name=demo --filename=/dev/vdb --rw=randwrite --bs=16k --size=16m --ioengine=libaio --iodepth=16 --direct=1 --fsync=64 \\\n\
           --verify=crc32c --do_verify=1 --verify_fatal=1 --output=/tmp/fio 2>&1; r=$?\n\
         grep -E 'WRITE:|READ:' /tmp/fio | sed 's/^ */DEMO fio /'; echo \"DEMO fio verification status $r\"; [ $r = 0 ] || exit 1\n\
         iperf3 -c 10.78.0.1 -n 16M -f m > /tmp/i 2>&1 || { cat /tmp/i; exit 2; }\n\
         grep -E 'sender|receiver' /tmp/i | sed 's/^/DEMO iperf3 /'\n\
         echo DEMO done; read -r answer\n",
    );
    s
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let vmm = options.vmm()?;
    if vmm == Vmm::Causeway {
        lab.install_causeway()?;
    }
    let host = lab.host(0)?;
    tap(host, "tap0", "10.78.0")?;
    host.sh("mke2fs -q -F -t ext4 -O ^has_journal /dev/vdc 1G && mkdir -p /disks && mount /dev/vdc /disks && truncate -s 64M /disks/demo")?;
    let _iperf = host.spawn("iperf3 server", "exec iperf3 -s")?;
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let spec =
        GuestSpec::new("demo", kernel, 2).root().disk("/disks/demo", false).tap("tap0").script(&script());
    progress!("demo: {}", spec.command(vmm, "…"));
    let guest = Guest::start(host, &spec, vmm)?;
    let (_, init) = guest.expect("LAB-L2 init", GUEST_TIMEOUT)?;
    progress!("demo: from exec to the guest's first program: {:.2} s (emulated host)", init.as_secs_f64());
    let (_, user) = guest.expect("LAB-L2 script", GUEST_TIMEOUT)?;
    let heartbeat = Heartbeat::start("demo: the guest runs fio and iperf3".to_owned());
    guest.expect("DEMO done", GUEST_TIMEOUT)?;
    drop(heartbeat);
    for (_, line) in guest.session.out.find("DEMO ") {
        progress!("demo: guest: {}", line.trim_start_matches("DEMO ").trim());
    }
    let pid = host.sh("ls /sys/kernel/debug/kvm | grep -E '^[0-9]+-[0-9]+$' | cut -d- -f1 | head -n 1")?;
    let measured =
        Measured::parse(&host.sh(&format!("/share/.lab/lab measure {} {}", pid.trim(), spec.memory_mib))?);
    progress!("demo: exits as KVM counts them");
    for (name, count) in &measured.counters {
        if name.ends_with("exits") || name == "hypercalls" || name == "pf_taken" || name == "insn_emulation" {
            progress!("demo:   {name:24} {count:>9}");
        }
    }
    if vmm == Vmm::Causeway {
        exits_by_cause(lab, report)?;
    }
    guest.session.input(b"\n")?;
    let status = guest.script_status(GUEST_TIMEOUT)?;
    guest.ended(GUEST_TIMEOUT)?;
    report.figure("init_s", init.as_secs_f64());
    report.figure("user_space_s", user.as_secs_f64());
    report.figure("kvm_counters", json!(measured.counters));
    let all = measured.pss_kib / 1024;
    let unshared = measured.pss_kib.saturating_sub(measured.files_kib) / 1024;
    report.figure("beyond_ram_mib_pss", all);
    report.figure("beyond_ram_and_program_mib_pss", unshared);
    if vmm == Vmm::Causeway {
        let most = MAX_MIB_BEYOND_RAM_AND_PROGRAM;
        report.check(
            unshared < most,
            format!("the monitor takes {unshared} MiB beyond guest RAM and its program; the limit is {most}"),
        );
        // The resident part of a program's file depends on its optimization, and CI's isn't optimized.
        let most = MAX_MIB_BEYOND_RAM;
        report.check(
            all < most || paths::is_built_for_ci(&paths::causeway()?),
            format!("the monitor takes {all} MiB beyond guest RAM; under {most} are promised"),
        );
    }
    report.check(status == 0, format!("the guest's script ended with status {status}"));
    Ok(())
}

/// Prints the monitor's own table: every exit by cause, and by address if there is one.
fn exits_by_cause(lab: &Lab, report: &mut Report) -> Result<()> {
    let text = lab.host(0)?.sh("causeway inspect demo --json")?;
    let tree: serde_json::Value =
        serde_json::from_str(&text).context("`causeway inspect demo --json` printed no JSON")?;
    let mut rows = Vec::new();
    collect(&tree, "", false, &mut rows);
    rows.sort_by_key(|r| std::cmp::Reverse(r.1));
    progress!("demo: exits as the monitor counts them, most frequent first");
    for (cause, count) in rows.iter().take(24) {
        progress!("demo:   {cause:56} {count:>9}");
    }
    report.figure("exits", rows.iter().map(|r| json!([r.0, r.1])).collect::<Vec<_>>());
    report.check(!rows.is_empty(), "the monitor's tree has no exit counters");
    Ok(())
}

/// Collects every nonzero number below a key about exits, with its path.
fn collect(value: &serde_json::Value, path: &str, inside: bool, rows: &mut Vec<(String, u64)>) {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        serde_json::Value::Object(map) => {
            for (key, v) in map {
                collect(v, &below(key), inside || key.contains("exit"), rows);
            }
        }
        serde_json::Value::Array(list) => {
            for (i, v) in list.iter().enumerate() {
                collect(v, &below(&i.to_string()), inside, rows);
            }
        }
        serde_json::Value::Number(n) if inside => {
            if let Some(n) = n.as_u64().filter(|n| *n > 0) {
                rows.push((path.to_owned(), n));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_counters_are_found_anywhere_in_the_tree() {
        let tree = json!({"vm": {"cpus": [{"exits": {"io": 3, "mmio": 0}}]}, "ram": 7});
        let mut rows = Vec::new();
        collect(&tree, "", false, &mut rows);
        assert_eq!(rows, [("vm.cpus.0.exits.io".to_owned(), 3)]);
    }
}
