//! Counters of a VM under the names that Linux's own exporters use: `kvm_*` after KVM's statistics, `node_disk_*`
//! and `node_network_*` after node_exporter, one `device` label per device.

use control_api::types::{ExitTable, VmState};
use serde_json::{Value, json};
use telemetry::metrics::Family;

use super::machine::Machine;
use crate::migration::postcopy::fetching::Report;

/// Counters of block devices: key in the device tree, metric, help.
const DISK: [(&str, &str, &str); 8] = [
    ("reads_completed", "node_disk_reads_completed_total", "Reads completed."),
    ("read_bytes", "node_disk_read_bytes_total", "Bytes read."),
    ("writes_completed", "node_disk_writes_completed_total", "Writes completed."),
    ("written_bytes", "node_disk_written_bytes_total", "Bytes written."),
    ("flushes", "node_disk_flush_requests_total", "Flushes completed."),
    ("discards", "node_disk_discards_completed_total", "Discards completed."),
    ("in_flight", "node_disk_io_now", "Requests in progress."),
    ("errors", "node_disk_io_errors_total", "Requests that ended in an error."),
];

/// Counters of network interfaces.
const NETWORK: [(&str, &str, &str); 8] = [
    ("receive_bytes", "node_network_receive_bytes_total", "Bytes received by the guest."),
    ("receive_packets", "node_network_receive_packets_total", "Frames received by the guest."),
    ("receive_drop", "node_network_receive_drop_total", "Frames for the guest that were dropped."),
    ("receive_errs", "node_network_receive_errs_total", "Receive errors."),
    ("transmit_bytes", "node_network_transmit_bytes_total", "Bytes sent by the guest."),
    ("transmit_packets", "node_network_transmit_packets_total", "Frames sent by the guest."),
    ("transmit_drop", "node_network_transmit_drop_total", "Frames of the guest that were dropped."),
    ("transmit_errs", "node_network_transmit_errs_total", "Transmit errors."),
];

/// All families of a VM, without the `vm` label.
pub fn families(machine: &Machine, exits: &ExitTable) -> Vec<Family> {
    let mut families = vec![
        gauge("kvm_vcpus", "Virtual CPUs.", machine.description.cpus.count().into()),
        gauge("kvm_memory_bytes", "Guest RAM.", machine.description.memory.size),
        gauge("kvm_running", "1 while the vCPUs run.", u64::from(*machine.state() == VmState::Running)),
    ];
    let mut clocks = Family::counter(
        "migration_clock_differences_total",
        "Arrivals from a host whose wall clock differed too much to be believed.",
    );
    clocks.add_count(&[], u64::from(machine.clock_differed));
    families.push(clocks);
    families.extend(exit_families(exits));
    families.extend(machine.irqchip.monitor().into_iter().flat_map(|irqchip| irqchip.counts().families()));
    let mut by_metric: Vec<Family> = Vec::new();
    for (_, function) in machine.root.functions() {
        let tree = function.inspect();
        let Some(counters) = find(&tree, "counters") else { continue };
        for (key, metric, help) in DISK.iter().chain(&NETWORK) {
            let Some(value) = counters.get(*key).and_then(Value::as_u64) else { continue };
            let mut family = if metric.ends_with("_total") {
                Family::counter(metric, help)
            } else {
                Family::gauge(metric, help)
            };
            family.add_count(&[("device", function.name())], value);
            by_metric.push(family);
        }
    }
    families.extend(by_metric);
    families
}

fn exit_families(exits: &ExitTable) -> [Family; 3] {
    let mut causes = Family::counter("kvm_userspace_exits_total", "Exits to the monitor by vCPU and cause.");
    let mut ranges =
        Family::counter("kvm_userspace_exits_by_range_total", "Accesses by vCPU and address range.");
    for vcpu in &exits.vcpus {
        let number = vcpu.vcpu.to_string();
        for (cause, count) in &vcpu.causes {
            causes.add_count(&[("vcpu", &number), ("cause", cause)], *count);
        }
        for (range, count) in &vcpu.ranges {
            ranges.add_count(&[("vcpu", &number), ("range", range)], *count);
        }
    }
    let mut kernel = Family::counter("kvm_stat_total", "KVM's own statistics, summed over vCPUs.");
    for (name, count) in &exits.kernel {
        kernel.add_count(&[("stat", name)], *count);
    }
    [causes, ranges, kernel]
}

/// Metrics of a post-copy at its destination.
pub fn post_copy_families(report: &Report) -> [Family; 3] {
    let mut faults = Family::counter(
        "migration_postcopy_faults_total",
        "Pages that were waited for after the VM had arrived by post-copy.",
    );
    faults.add_count(&[], report.waits.count);
    let mut waits = Family::gauge(
        "migration_postcopy_fault_microseconds",
        "How long such pages were waited for: half of them no longer than the median.",
    );
    waits.add_count(&[("quantile", "0.5")], report.waits.median_us.into());
    waits.add_count(&[("quantile", "1")], report.waits.worst_us.into());
    [
        gauge(
            "migration_postcopy_pages_left",
            "Pages of the VM's memory that are still at its source.",
            report.left,
        ),
        faults,
        waits,
    ]
}

/// The post-copy's state for the device tree.
pub fn post_copy_tree(report: &Report) -> Value {
    json!({
        "phase": if report.over { "done" } else { "fetching" },
        "pages_left": report.left,
        "faults": report.waits.count,
        "fault_median_us": report.waits.median_us,
        "fault_worst_us": report.waits.worst_us,
        "zero_faults": report.zero,
        "pages_dropped": report.dropped,
    })
}

fn gauge(name: &str, help: &str, value: u64) -> Family {
    let mut family = Family::gauge(name, help);
    family.add_count(&[], value);
    family
}

/// The first object under `key`, at any depth.
fn find<'a>(tree: &'a Value, key: &str) -> Option<&'a Value> {
    let object = tree.as_object()?;
    object
        .get(key)
        .filter(|value| value.is_object())
        .or_else(|| object.values().find_map(|value| find(value, key)))
}
