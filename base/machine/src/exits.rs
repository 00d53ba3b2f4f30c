//! Exit accounting: every VM exit counted per vCPU, by cause and by address range.
//!
//! The owning vCPU thread is the only writer of its counters, so it counts with a plain load and store, without a lock prefix. Other
//! threads read values that are never torn and at most slightly old.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

macro_rules! causes {
    ($($variant:ident = $name:literal, $doc:literal;)+) => {
        /// Why a vCPU came back to user space.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum ExitCause { $(#[doc = $doc] $variant,)+ }

        impl ExitCause {
            /// All causes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Its name in tables and JSON.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
        }
    };
}

causes! {
    IoIn = "io_in", "Port read.";
    IoOut = "io_out", "Port write.";
    MmioRead = "mmio_read", "Memory-mapped read.";
    MmioWrite = "mmio_write", "Memory-mapped write.";
    Hlt = "hlt", "HLT without an in-kernel interrupt controller.";
    Kick = "kick", "A signal from this process (KVM_RUN returned EINTR): pause, kick or stop.";
    Retry = "retry", "KVM_RUN returned EAGAIN: the vCPU waited for SIPI.";
    Intr = "intr", "KVM_EXIT_INTR.";
    IrqWindow = "irq_window", "KVM_EXIT_IRQ_WINDOW_OPEN.";
    Shutdown = "shutdown", "Triple fault.";
    SystemEvent = "system_event", "KVM_EXIT_SYSTEM_EVENT.";
    InternalError = "internal_error", "KVM_EXIT_INTERNAL_ERROR: mostly an instruction that KVM can't emulate.";
    FailEntry = "fail_entry", "KVM_EXIT_FAIL_ENTRY.";
    MemoryFault = "memory_fault", "KVM_EXIT_MEMORY_FAULT, or EFAULT from KVM_RUN.";
    ReadMsr = "rdmsr", "KVM_EXIT_X86_RDMSR.";
    WriteMsr = "wrmsr", "KVM_EXIT_X86_WRMSR.";
    IoapicEoi = "ioapic_eoi", "KVM_EXIT_IOAPIC_EOI (split interrupt controller).";
    Hypercall = "hypercall", "KVM_EXIT_HYPERCALL.";
    Hyperv = "hyperv", "KVM_EXIT_HYPERV.";
    Xen = "xen", "KVM_EXIT_XEN.";
    Debug = "debug", "KVM_EXIT_DEBUG.";
    Exception = "exception", "KVM_EXIT_EXCEPTION.";
    SetTpr = "set_tpr", "KVM_EXIT_SET_TPR.";
    TprAccess = "tpr_access", "KVM_EXIT_TPR_ACCESS.";
    Nmi = "nmi", "KVM_EXIT_NMI.";
    Watchdog = "watchdog", "KVM_EXIT_WATCHDOG.";
    DirtyRingFull = "dirty_ring_full", "KVM_EXIT_DIRTY_RING_FULL.";
    ApResetHold = "ap_reset_hold", "KVM_EXIT_AP_RESET_HOLD.";
    BusLock = "bus_lock", "KVM_EXIT_X86_BUS_LOCK.";
    Notify = "notify", "KVM_EXIT_NOTIFY.";
    Unknown = "unknown", "KVM_EXIT_UNKNOWN.";
    Other = "other", "Any other reason.";
}

impl ExitCause {
    /// The cause for a KVM_EXIT_* number. Port and memory accesses have causes of their own.
    pub(crate) fn of_reason(reason: u32) -> Self {
        use kvm_bindings::*;
        match reason {
            KVM_EXIT_INTR => Self::Intr,
            KVM_EXIT_HLT => Self::Hlt,
            KVM_EXIT_IRQ_WINDOW_OPEN => Self::IrqWindow,
            KVM_EXIT_SHUTDOWN => Self::Shutdown,
            KVM_EXIT_SYSTEM_EVENT => Self::SystemEvent,
            KVM_EXIT_INTERNAL_ERROR => Self::InternalError,
            KVM_EXIT_FAIL_ENTRY => Self::FailEntry,
            KVM_EXIT_MEMORY_FAULT => Self::MemoryFault,
            KVM_EXIT_X86_RDMSR => Self::ReadMsr,
            KVM_EXIT_X86_WRMSR => Self::WriteMsr,
            KVM_EXIT_IOAPIC_EOI => Self::IoapicEoi,
            KVM_EXIT_HYPERCALL => Self::Hypercall,
            KVM_EXIT_HYPERV => Self::Hyperv,
            KVM_EXIT_XEN => Self::Xen,
            KVM_EXIT_DEBUG => Self::Debug,
            KVM_EXIT_EXCEPTION => Self::Exception,
            KVM_EXIT_SET_TPR => Self::SetTpr,
            KVM_EXIT_TPR_ACCESS => Self::TprAccess,
            KVM_EXIT_NMI => Self::Nmi,
            KVM_EXIT_WATCHDOG => Self::Watchdog,
            KVM_EXIT_DIRTY_RING_FULL => Self::DirtyRingFull,
            KVM_EXIT_AP_RESET_HOLD => Self::ApResetHold,
            KVM_EXIT_X86_BUS_LOCK => Self::BusLock,
            KVM_EXIT_NOTIFY => Self::Notify,
            KVM_EXIT_UNKNOWN => Self::Unknown,
            _ => Self::Other,
        }
    }
}

/// Number of a named address range in a VM's exit tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RangeId(u16);

impl RangeId {
    /// No device claims the port.
    pub const UNCLAIMED_PORT: Self = Self(0);
    /// No device claims the memory address.
    pub const UNCLAIMED_MEMORY: Self = Self(1);
    /// Names past the table's end share one counter.
    pub const OTHER: Self = Self(2);
}

const CHUNK: usize = 64;
const CHUNKS: usize = 64;

/// The names of address ranges of one VM: `port:<name>` and `memory:<name>`. Both buses and the exit tables share it. It holds at most
/// 4,096 names and never removes one, so that counters survive a range that moves.
#[derive(Debug)]
pub struct RangeNames {
    table: Mutex<NameTable>,
}

#[derive(Debug)]
struct NameTable {
    names: Vec<String>,
    ids: HashMap<String, RangeId>,
}

impl RangeNames {
    /// A table with the names of unclaimed accesses only.
    pub fn new() -> Arc<Self> {
        let mut table = NameTable { names: Vec::new(), ids: HashMap::new() };
        for name in ["port:unclaimed", "memory:unclaimed", "other"] {
            table.intern(name.to_owned());
        }
        Arc::new(Self { table: Mutex::new(table) })
    }

    /// The number for a name; the same name gets the same number.
    pub(crate) fn intern(&self, space: &str, name: &str) -> RangeId {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).intern(format!("{space}:{name}"))
    }

    fn all(&self) -> Vec<String> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).names.clone()
    }
}

impl NameTable {
    fn intern(&mut self, name: String) -> RangeId {
        if let Some(id) = self.ids.get(&name) {
            return *id;
        }
        let Some(id) = u16::try_from(self.names.len()).ok().filter(|id| usize::from(*id) < CHUNK * CHUNKS)
        else {
            return RangeId::OTHER;
        };
        self.names.push(name.clone());
        self.ids.insert(name, RangeId(id));
        RangeId(id)
    }
}

/// The counters of one vCPU. Only its thread writes; any thread may read.
#[derive(Debug)]
pub(crate) struct VcpuExits {
    causes: [AtomicU64; ExitCause::ALL.len()],
    ranges: [OnceLock<Box<[AtomicU64; CHUNK]>>; CHUNKS],
}

/// Adds one to a counter that has one writer.
fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

impl VcpuExits {
    pub(crate) fn new() -> Self {
        Self {
            causes: std::array::from_fn(|_| AtomicU64::new(0)),
            ranges: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    /// Counts one exit. To be called by the owning vCPU thread only.
    pub(crate) fn count(&self, cause: ExitCause) {
        bump(&self.causes[cause as usize]);
    }

    /// Counts the address range of an exit. To be called by the owning vCPU thread only.
    pub(crate) fn count_range(&self, id: RangeId) {
        let index = usize::from(id.0);
        if let Some(chunk) = self.ranges.get(index / CHUNK) {
            let chunk = chunk.get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
            bump(&chunk[index % CHUNK]);
        }
    }

    pub(crate) fn snapshot(&self, vcpu: u32, names: &RangeNames) -> VcpuExitSnapshot {
        let causes: BTreeMap<String, u64> = ExitCause::ALL
            .iter()
            .map(|cause| (cause.name().to_owned(), self.causes[*cause as usize].load(Ordering::Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let mut ranges = BTreeMap::new();
        for (index, name) in names.all().into_iter().enumerate() {
            let chunk = self.ranges.get(index / CHUNK).and_then(OnceLock::get);
            let count = chunk.map_or(0, |chunk| chunk[index % CHUNK].load(Ordering::Relaxed));
            if count > 0 {
                ranges.insert(name, count);
            }
        }
        VcpuExitSnapshot { vcpu, total: causes.values().sum(), causes, ranges }
    }
}

/// Exits of one vCPU at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct VcpuExitSnapshot {
    /// Id of the vCPU, which is its APIC id.
    pub vcpu: u32,
    /// All exits to user space.
    pub total: u64,
    /// By cause ([`ExitCause::name`]); causes that never happened are left out.
    pub causes: BTreeMap<String, u64>,
    /// Port and memory accesses by range: `port:<name>` or `memory:<name>` as registered with the bus,
    /// `port:unclaimed` and `memory:unclaimed` for those that no device claims. Ranges never touched are left out.
    pub ranges: BTreeMap<String, u64>,
}

/// Exits of a VM at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct ExitSnapshot {
    /// Per vCPU.
    pub vcpus: Vec<VcpuExitSnapshot>,
}

impl ExitSnapshot {
    /// All exits of all vCPUs.
    pub fn total(&self) -> u64 {
        self.vcpus.iter().map(|v| v.total).sum()
    }

    /// By cause, over all vCPUs.
    pub fn causes(&self) -> BTreeMap<String, u64> {
        sum(self.vcpus.iter().map(|v| &v.causes))
    }

    /// By range, over all vCPUs.
    pub fn ranges(&self) -> BTreeMap<String, u64> {
        sum(self.vcpus.iter().map(|v| &v.ranges))
    }
}

fn sum<'a>(maps: impl Iterator<Item = &'a BTreeMap<String, u64>>) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (name, count) in maps.flatten() {
        *all.entry(name.clone()).or_insert(0) += count;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_its_own_counter_and_name() {
        let exits = VcpuExits::new();
        for (times, cause) in ExitCause::ALL.iter().enumerate() {
            (0..=times).for_each(|_| exits.count(*cause));
        }
        let snapshot = exits.snapshot(3, &RangeNames::new());
        assert_eq!(snapshot.causes.len(), ExitCause::ALL.len());
        for (times, cause) in (1u64..).zip(ExitCause::ALL) {
            assert_eq!(snapshot.causes[cause.name()], times);
        }
        assert_eq!(snapshot.total, snapshot.causes.values().sum::<u64>());
        assert_eq!(snapshot.vcpu, 3);
    }

    #[test]
    fn a_range_that_comes_back_keeps_its_counter() {
        let names = RangeNames::new();
        let exits = VcpuExits::new();
        exits.count_range(names.intern("port", "serial0"));
        exits.count_range(names.intern("memory", "serial0"));
        exits.count_range(names.intern("port", "serial0"));
        exits.count_range(RangeId::UNCLAIMED_PORT);
        let ranges = exits.snapshot(0, &names).ranges;
        assert_eq!(ranges["port:serial0"], 2);
        assert_eq!(ranges["memory:serial0"], 1);
        assert_eq!(ranges["port:unclaimed"], 1);
        assert_eq!(ranges.len(), 3);
    }

    #[test]
    fn names_past_the_table_share_a_counter_instead_of_growing_it() {
        let names = RangeNames::new();
        for n in 0..CHUNK * CHUNKS + 10 {
            names.intern("memory", &n.to_string());
        }
        assert_eq!(names.all().len(), CHUNK * CHUNKS);
        assert_eq!(names.intern("memory", "one more"), RangeId::OTHER);
        let exits = VcpuExits::new();
        exits.count_range(RangeId::OTHER);
        assert_eq!(exits.snapshot(0, &names).ranges["other"], 1);
    }

    #[test]
    fn a_snapshot_survives_json() {
        let exits = VcpuExits::new();
        exits.count(ExitCause::IoOut);
        exits.count_range(RangeId::UNCLAIMED_MEMORY);
        let snapshot = ExitSnapshot { vcpus: vec![exits.snapshot(0, &RangeNames::new())] };
        let back: ExitSnapshot = serde_json::from_str(&serde_json::to_string(&snapshot).unwrap()).unwrap();
        assert_eq!(back, snapshot);
        assert_eq!(back.total(), 1);
        assert_eq!(back.causes()["io_out"], 1);
        assert_eq!(back.ranges()["memory:unclaimed"], 1);
    }
}
