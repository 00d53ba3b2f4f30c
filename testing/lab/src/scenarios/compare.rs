//! Compares Causeway and QEMU with KVM on one host: time to the guest's first program, memory, exits.

use crate::guest::{Guest, GuestSpec, Vmm};
use crate::host::Host;
use crate::lab::Lab;
use crate::measure::Measured;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "qemu-compare",
    about: "Causeway against QEMU/KVM microvm and q35 in the same host: exec to guest init, memory beyond guest RAM, exits by cause",
    topology: |_| Topology::single(),
    run,
    prompt: None,
};

const GUEST_TIMEOUT: Duration = Duration::from_secs(200);

/// TCG caches translated code for every page from which guest or host code ran. A write to such a page first discards its translations,
/// which takes ten times as long as the write. So memory that one guest frees may slow the next start down, by seconds of seven. A real
/// processor has no such effect. Before each boot, outside of the measured time, half a gigabyte of recently freed memory is therefore
/// written once. So all monitors start alike.
const CALM: &str = "python3 -c 'import mmap
m = mmap.mmap(-1, 512 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(m), 4096): m[at] = 1'";

/// The monitor's program comes from the share, page by page at each start, and QEMU's from the host's disk. A copy in the host's memory
/// makes them alike.
const LOCAL: &str = "cp /share/bin/causeway /tmp/causeway && mount --bind /tmp/causeway /share/bin/causeway";

struct Boot {
    init: f64,
    /// Processor time of the emulated host from exec to init.
    work: f64,
    user: f64,
    measured: Measured,
}

fn pid_of(host: &Host, vmm: Vmm) -> Result<u32> {
    // The monitor may have several processes; KVM lists the one that holds the VM.
    let name = if vmm == Vmm::Causeway { "causeway" } else { "qemu-system-x86" };
    let text = host.sh("ls /sys/kernel/debug/kvm | grep -E '^[0-9]+-[0-9]+$' | cut -d- -f1 | sort -u")?;
    text.lines()
        .find_map(|l| l.trim().parse().ok())
        .with_context(|| format!("KVM lists no VM while {name} runs"))
}

fn boot(host: &Host, vmm: Vmm, kernel: &str, cpus: u32) -> Result<Boot> {
    let name = format!("cmp-{}", vmm.name());
    let spec = GuestSpec::new(&name, kernel, cpus).root().cmdline(["lab.end=halt"]);
    host.forget_consoles();
    host.sh(CALM)?;
    let before = host.processor_time()?;
    let guest = Guest::start(host, &spec, vmm)?;
    let (_, init) = guest.expect("LAB-L2 init", GUEST_TIMEOUT)?;
    let work = host.processor_time()?.saturating_sub(before);
    let (_, user) = guest.expect("LAB-L2 exit 0", GUEST_TIMEOUT)?;
    std::thread::sleep(Duration::from_millis(500));
    let pid = pid_of(host, vmm)?;
    let measured = Measured::parse(&host.sh(&format!("/share/.lab/lab measure {pid} {}", spec.memory_mib))?);
    guest.session.kill()?;
    guest.session.wait(GUEST_TIMEOUT)?;
    Ok(Boot { init: init.as_secs_f64(), work: work.as_secs_f64(), user: user.as_secs_f64(), measured })
}

fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => v[n / 2],
        n => f64::midpoint(v[n / 2 - 1], v[n / 2]),
    }
}

/// Returns the counters of exit causes, most frequent first.
fn causes(m: &Measured) -> Value {
    const CAUSES: &[&str] = &[
        "exits",
        "io_exits",
        "mmio_exits",
        "halt_exits",
        "irq_exits",
        "irq_window_exits",
        "nmi_window_exits",
        "signal_exits",
        "hypercalls",
        "insn_emulation",
        "pf_taken",
        "pf_mmio_spte_created",
        "req_event",
        "irq_injections",
        "fpu_reload",
    ];
    let map: Map<String, Value> =
        CAUSES.iter().filter(|c| m.counter(c) > 0).map(|c| ((*c).to_owned(), json!(m.counter(c)))).collect();
    Value::Object(map)
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    lab.install_causeway()?;
    let host = lab.host(0)?;
    host.sh(LOCAL)?;
    let kernel = options.kernels.first().map_or("6.1-cloud", String::as_str);
    let cpus = options.cpus.first().copied().unwrap_or(1);
    let rounds = options.count.unwrap_or(5);
    let peers = [Vmm::Causeway, Vmm::QemuMicrovm, Vmm::QemuQ35];
    // One boot of each isn't counted: programs and kernels come from the disk at first.
    let mut boots: Vec<Vec<Boot>> = vec![Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=rounds {
        for (i, vmm) in peers.into_iter().enumerate() {
            let b = boot(host, vmm, kernel, cpus)?;
            progress!(
                "{} {}: init after {:.2} s ({:.2} s of work), user space done after {:.2} s, {} exits, {:.1} MiB beyond guest RAM (PSS {:.1})",
                if round == 0 { "warm-up" } else { "measured" },
                vmm.name(),
                b.init,
                b.work,
                b.user,
                b.measured.counter("exits"),
                mib(b.measured.rss_kib),
                mib(b.measured.pss_kib)
            );
            if round > 0 {
                boots[i].push(b);
            }
        }
    }
    let init: Vec<f64> =
        boots.iter().map(|b| median(&b.iter().map(|x| x.init).collect::<Vec<_>>())).collect();
    let pss: Vec<f64> = boots
        .iter()
        .map(|b| median(&b.iter().map(|x| mib(x.measured.pss_kib)).collect::<Vec<_>>()))
        .collect();
    let rss: Vec<f64> = boots
        .iter()
        .map(|b| median(&b.iter().map(|x| mib(x.measured.rss_kib)).collect::<Vec<_>>()))
        .collect();
    let (ratio_microvm, ratio_q35) = (init[0] / init[1], init[0] / init[2]);
    report.figure("init_ratio_microvm", round3(ratio_microvm));
    // External load only adds time: on a crowded machine the fastest boots say more than the medians.
    let fastest = |i: usize| boots[i].iter().map(|b| b.init).fold(f64::INFINITY, f64::min);
    report.figure("init_ratio_microvm_fastest", round3(fastest(0) / fastest(1)));
    report.figure("init_ratio_q35", round3(ratio_q35));
    // Other load adds time but no work. The guest's own work is the same under all monitors.
    let medians = |of: fn(&Boot) -> f64| -> Vec<f64> {
        boots.iter().map(|b| median(&b.iter().map(of).collect::<Vec<_>>())).collect()
    };
    let work = medians(|b| b.work);
    report.figure("work_ratio_microvm", round3(work[0] / work[1]));
    report.figure("work_ratio_q35", round3(work[0] / work[2]));
    let own = medians(|b| seconds(b.measured.own_ms));
    report.figure("monitor_work_ratio_microvm", round3(own[0] / own[1]));
    report.figure(
        "monitor_work",
        "processor time of the monitor's process inside the host up to user space, its guest's not counted",
    );
    report.figure("rss_mib", round3(pss[0]));
    report.figure("qemu_rss_mib", round3(pss[1]));
    report.figure("qemu_q35_rss_mib", round3(pss[2]));
    report.figure("memory", "proportional set size without guest RAM; plain resident set in *_plain_mib");
    report.figure("rss_plain_mib", round3(rss[0]));
    report.figure("qemu_rss_plain_mib", round3(rss[1]));
    for (i, vmm) in peers.into_iter().enumerate() {
        report.figure(
            &format!("init_s_{}", vmm.name()),
            json!(boots[i].iter().map(|b| round3(b.init)).collect::<Vec<_>>()),
        );
        report.figure(
            &format!("work_s_{}", vmm.name()),
            json!(boots[i].iter().map(|b| round3(b.work)).collect::<Vec<_>>()),
        );
        report.figure(
            &format!("monitor_work_s_{}", vmm.name()),
            json!(boots[i].iter().map(|b| round3(seconds(b.measured.own_ms))).collect::<Vec<_>>()),
        );
        if let Some(last) = boots[i].last() {
            report.figure(&format!("exits_{}", vmm.name()), causes(&last.measured));
        }
    }
    let thp = host.sh("cat /sys/kernel/mm/transparent_hugepage/shmem_enabled")?;
    report.figure("host_shmem_thp", thp.trim());
    report.figure("rounds", rounds);
    report.figure("kernel", kernel);
    report.check(
        ratio_microvm <= 0.7,
        format!("exec to init is {ratio_microvm:.2} of microvm's; at most 0.7 is promised"),
    );
    report.check(
        pss[0] <= 15.0,
        format!("the monitor takes {:.1} MiB beyond guest RAM; at most 15 are promised", pss[0]),
    );
    report.check(
        pss[0] * 2.0 <= pss[1],
        format!("the monitor takes {:.1} MiB and QEMU {:.1}: more than half", pss[0], pss[1]),
    );
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "sizes of processes are far below 2^52 KiB")]
fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

fn seconds(ms: u64) -> f64 {
    Duration::from_millis(ms).as_secs_f64()
}

fn round3(v: f64) -> f64 {
    (v * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_even_and_odd_counts() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).is_nan());
    }
}
