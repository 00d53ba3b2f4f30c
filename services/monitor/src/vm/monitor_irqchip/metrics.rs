//! Counters of interrupts, by source and by vCPU.

use std::sync::atomic::{AtomicU64, Ordering};

use apic::VcpuEvent;
use apic::registers::{END_OF_INTERRUPT, INTERRUPT_COMMAND, SELF_IPI};
use telemetry::metrics::Family;

/// Counters of one vCPU: delivered events and its writes.
#[derive(Default)]
struct VcpuCounters {
    interrupts: AtomicU64,
    nmis: AtomicU64,
    inits: AtomicU64,
    startups: AtomicU64,
    windows: AtomicU64,
    timer_kicks: AtomicU64,
    commands: AtomicU64,
    ends: AtomicU64,
}

/// Counters of a VM's controllers. Any thread may count.
pub(super) struct Counters {
    vcpus: Vec<VcpuCounters>,
    msis: AtomicU64,
    dropped_msis: AtomicU64,
    edges: AtomicU64,
    levels: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn new(vcpus: usize) -> Self {
        let [msis, dropped_msis, edges, levels] = std::array::from_fn(|_| AtomicU64::new(0));
        let vcpus = (0..vcpus).map(|_| VcpuCounters::default()).collect();
        Self { vcpus, msis, dropped_msis, edges, levels }
    }

    pub(super) fn msi(&self, sent: bool) {
        count(if sent { &self.msis } else { &self.dropped_msis });
    }

    pub(super) fn edge(&self) {
        count(&self.edges);
    }

    pub(super) fn level(&self) {
        count(&self.levels);
    }

    pub(super) fn timer_kick(&self, vcpu: usize) {
        self.of(Some(vcpu), |counters| Some(&counters.timer_kicks));
    }

    pub(super) fn event(&self, vcpu: Option<usize>, event: VcpuEvent) {
        self.of(vcpu, |counters| match event {
            VcpuEvent::Interrupt { .. } => Some(&counters.interrupts),
            VcpuEvent::Nmi => Some(&counters.nmis),
            VcpuEvent::Init => Some(&counters.inits),
            VcpuEvent::Startup { .. } => Some(&counters.startups),
            VcpuEvent::AwaitInterruptWindow => Some(&counters.windows),
            VcpuEvent::None | VcpuEvent::WaitForStartup | VcpuEvent::ExternalInterrupt => None,
        });
    }

    pub(super) fn write(&self, vcpu: Option<usize>, msr: u32) {
        self.of(vcpu, |counters| match msr {
            INTERRUPT_COMMAND | SELF_IPI => Some(&counters.commands),
            END_OF_INTERRUPT => Some(&counters.ends),
            _ => None,
        });
    }

    fn of(&self, vcpu: Option<usize>, which: impl FnOnce(&VcpuCounters) -> Option<&AtomicU64>) {
        if let Some(counter) = vcpu.and_then(|index| self.vcpus.get(index)).and_then(which) {
            count(counter);
        }
    }

    pub(super) fn read(&self, ids: &[u32]) -> InterruptCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let vcpu = |(id, counters): (&u32, &VcpuCounters)| {
            let kinds = [
                ("interrupt", get(&counters.interrupts)),
                ("nmi", get(&counters.nmis)),
                ("init", get(&counters.inits)),
                ("startup", get(&counters.startups)),
                ("window", get(&counters.windows)),
                ("timer_kick", get(&counters.timer_kicks)),
                ("command", get(&counters.commands)),
                ("end", get(&counters.ends)),
            ];
            (*id, kinds)
        };
        InterruptCounts {
            vcpus: ids.iter().zip(&self.vcpus).map(vcpu).collect(),
            sources: [
                ("msi", get(&self.msis)),
                ("dropped_msi", get(&self.dropped_msis)),
                ("edge", get(&self.edges)),
                ("level", get(&self.levels)),
            ],
        }
    }
}

/// A snapshot of the counters.
pub struct InterruptCounts {
    /// By APIC id: events delivered to the vCPU, its waits for an interrupt window, and its writes.
    vcpus: Vec<(u32, [(&'static str, u64); 8])>,
    /// Interrupts that devices sent, by source.
    sources: [(&'static str, u64); 4],
}

impl InterruptCounts {
    /// As metrics.
    pub fn families(&self) -> [Family; 2] {
        let mut vcpus = Family::counter(
            "apic_vcpu_events_total",
            "Of local APICs in the monitor, by vCPU: interrupts, NMIs, INITs and start-ups given to it, waits for an interrupt window, kicks \
             by its timer, interrupt commands and ends of interrupts that it wrote.",
        );
        for (id, kinds) in &self.vcpus {
            for (kind, value) in kinds {
                vcpus.add_count(&[("vcpu", &id.to_string()), ("event", kind)], *value);
            }
        }
        let mut sources = Family::counter(
            "apic_device_interrupts_total",
            "Interrupts of devices to controllers in the monitor: messages, messages for no APIC, edges and level-triggered eventfds.",
        );
        for (kind, value) in &self.sources {
            sources.add_count(&[("source", kind)], *value);
        }
        [vcpus, sources]
    }
}
