//! /dev/kvm: opening it, and the capabilities of this host's KVM.

#![allow(unsafe_code)] // Handing the opened descriptor to kvm-ioctls.

use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm};
use rustix::fs::{Mode, OFlags};

use crate::vm::{Vm, VmError, errno};
use crate::x86::CpuId;

/// KVM's API version, the same since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// KVM can't be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The device node doesn't exist.
    #[error(
        "{path} doesn't exist: load the module kvm_intel or kvm_amd, or enable virtualisation in the firmware"
    )]
    Absent {
        /// Path tried.
        path: PathBuf,
    },
    /// The device node's mode forbids access.
    #[error(
        "{path} may not be opened by user {uid}: it belongs to user {owner}, group {group} ({group_name}) with mode {mode:03o}; {}",
        if mode & 0o60 == 0o60 { "add the user to that group" } else { "give that group access (chmod g+rw) and add the user to it" }
    )]
    NoPermission {
        /// Path tried.
        path: PathBuf,
        /// User id of this process.
        uid: u32,
        /// User id of the node's owner.
        owner: u32,
        /// Group id of the node.
        group: u32,
        /// The group's name, or `unnamed`.
        group_name: String,
        /// Its mode bits.
        mode: u32,
    },
    /// `open` failed for another reason.
    #[error("{path} can't be opened")]
    Open {
        /// Path tried.
        path: PathBuf,
        /// Error of `open`.
        #[source]
        source: std::io::Error,
    },
    /// The node isn't KVM's, or the kernel is older than Linux 2.6.22.
    #[error("{path} speaks KVM API version {found}, but 12 is needed: use a current Linux kernel")]
    ApiVersion {
        /// Path of the node that was opened.
        path: PathBuf,
        /// Version found.
        found: i32,
    },
    /// KVM lacks a required capability.
    #[error("KVM of this host lacks {missing}: use a newer Linux kernel")]
    Lacks {
        /// Names of the missing capabilities.
        missing: String,
    },
    /// An ioctl failed.
    #[error("KVM refused to {what}")]
    Refused {
        /// What was tried.
        what: String,
        /// Error of the ioctl.
        #[source]
        source: std::io::Error,
    },
}

/// The virtualization technology below KVM's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackEnd {
    /// AMD-V (SVM).
    Svm,
    /// Intel VT-x.
    Vmx,
    /// Pagetable virtual machine: guests run in ring 3 of the host, without hardware virtualisation.
    Pvm,
    /// None of these could be recognized.
    Unknown,
}

/// What `causeway doctor` reports about KVM.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Capabilities {
    /// Result of KVM_GET_API_VERSION, always 12.
    pub api_version: i32,
    /// The technology below KVM.
    pub back_end: BackEnd,
    /// Largest number of vCPUs of a VM.
    pub max_vcpus: usize,
    /// Recommended number of vCPUs.
    pub recommended_vcpus: usize,
    /// Number of memslots of a VM.
    pub memslots: usize,
    /// Largest number of interrupt routes.
    pub irq_routes: usize,
    /// Required capabilities that this host lacks.
    pub missing: Vec<&'static str>,
    /// Optional capabilities by name, and whether this host has them. They add speed or functions.
    pub optional: Vec<(&'static str, bool)>,
}

/// KVM of this host, opened.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
}

/// Required capabilities.
const REQUIRED: &[(&str, Cap)] = &[
    ("user memory", Cap::UserMemory),
    ("interrupt controllers", Cap::Irqchip),
    ("irqfd", Cap::Irqfd),
    ("interrupt routing", Cap::IrqRouting),
    ("MSI signalling", Cap::SignalMsi),
    ("ioeventfd", Cap::Ioeventfd),
    ("ioeventfd of any length", Cap::IoeventfdNoLength),
    ("read-only memory", Cap::ReadonlyMem),
    ("immediate exit", Cap::ImmediateExit),
    ("TSS address", Cap::SetTssAddr),
    ("identity map address", Cap::SetIdentityMapAddr),
    ("CPUID", Cap::ExtCpuid),
    ("multiprocessor state", Cap::MpState),
    ("vCPU events", Cap::VcpuEvents),
    ("debug registers", Cap::Debugregs),
    ("XSAVE", Cap::Xsave),
    ("clock adjustment", Cap::AdjustClock),
];

impl Host {
    /// Opens /dev/kvm and checks the API version and the capabilities that Causeway needs.
    pub fn open() -> Result<Self, HostError> {
        Self::open_at(Path::new("/dev/kvm"))
    }

    /// Opens a given device node.
    pub fn open_at(path: &Path) -> Result<Self, HostError> {
        let host = Self::open_for_inspection(path)?;
        let missing = host.missing();
        if missing.is_empty() { Ok(host) } else { Err(HostError::Lacks { missing: missing.join(", ") }) }
    }

    /// Opens a device node without a check of its capabilities. For reports ([`Capabilities::missing`]), not for VMs.
    pub fn open_for_inspection(path: &Path) -> Result<Self, HostError> {
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| open_error(path, error))?;
        // SAFETY: this function owns the descriptor and transfers it. The next step checks that the device is KVM's: another one answers
        // the version ioctl with an error or another number.
        let kvm = unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) };
        let found = kvm.get_api_version();
        if found != API_VERSION {
            return Err(HostError::ApiVersion { path: path.to_owned(), found });
        }
        Ok(Self { kvm })
    }

    fn missing(&self) -> Vec<&'static str> {
        REQUIRED.iter().filter(|(_, cap)| !self.kvm.check_extension(*cap)).map(|(name, _)| *name).collect()
    }

    /// The capabilities of this host.
    pub fn capabilities(&self) -> Capabilities {
        let number = |cap| usize::try_from(self.kvm.check_extension_int(cap)).unwrap_or(0);
        let raw = |cap: u32| self.kvm.check_extension_raw(cap.into()) > 0;
        let has = |cap| self.kvm.check_extension(cap);
        Capabilities {
            api_version: self.kvm.get_api_version(),
            back_end: back_end(),
            max_vcpus: self.kvm.get_max_vcpus(),
            recommended_vcpus: self.kvm.get_nr_vcpus(),
            memslots: self.kvm.get_nr_memslots(),
            irq_routes: number(Cap::IrqRouting),
            missing: self.missing(),
            optional: vec![
                ("dirty_ring", raw(kvm_bindings::KVM_CAP_DIRTY_LOG_RING)),
                ("manual_dirty_log", raw(kvm_bindings::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)),
                ("binary_stats", raw(kvm_bindings::KVM_CAP_BINARY_STATS_FD)),
                ("irqfd_resample", has(Cap::IrqfdResample)),
                ("pit", has(Cap::Pit2)),
                ("split_irqchip", has(Cap::SplitIrqchip)),
                ("x2apic_api", has(Cap::X2ApicApi)),
                ("tsc_control", has(Cap::TscControl)),
                ("tsc_deadline", has(Cap::TscDeadlineTimer)),
                ("xsave2", has(Cap::Xsave2)),
                ("sync_mmu", has(Cap::SyncMmu)),
                ("coalesced_mmio", has(Cap::CoalescedMmio)),
                ("user_space_msr", has(Cap::X86UserSpaceMsr)),
                ("memory_fault_exits", has(Cap::MemoryFaultInfo)),
                ("nested_state", has(Cap::NestedState)),
                ("guest_memfd", has(Cap::GuestMemfd)),
                ("disable_exits", raw(kvm_bindings::KVM_CAP_X86_DISABLE_EXITS)),
                ("exit_on_emulation_failure", raw(kvm_bindings::KVM_CAP_EXIT_ON_EMULATION_FAILURE)),
            ],
        }
    }

    /// The CPUID leaves that KVM can offer to guests. [`crate::x86::guest_cpuid`] makes those of one vCPU from them.
    pub fn supported_cpuid(&self) -> Result<CpuId, HostError> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| HostError::Refused { what: "list its CPUID leaves".into(), source: errno(e) })
    }

    /// Whether KVM emulates the APIC's TSC-deadline timer. KVM doesn't list its CPUID bit as supported, because the timer needs the
    /// in-kernel APIC.
    pub(crate) fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Creates a VM without memory, interrupt controllers or vCPUs.
    pub fn create_vm(&self) -> Result<Arc<Vm>, VmError> {
        Vm::create(&self.kvm)
    }
}

fn open_error(path: &Path, error: rustix::io::Errno) -> HostError {
    let path = path.to_owned();
    match error {
        rustix::io::Errno::NOENT | rustix::io::Errno::NXIO | rustix::io::Errno::NODEV => {
            HostError::Absent { path }
        }
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => match std::fs::metadata(&path) {
            Ok(metadata) => HostError::NoPermission {
                uid: rustix::process::geteuid().as_raw(),
                owner: metadata.uid(),
                group: metadata.gid(),
                group_name: group_name(metadata.gid()).unwrap_or_else(|| "unnamed".into()),
                mode: metadata.mode() & 0o777,
                path,
            },
            Err(source) => HostError::Open { path, source },
        },
        other => HostError::Open { path, source: other.into() },
    }
}

fn group_name(gid: u32) -> Option<String> {
    let groups = std::fs::read_to_string("/etc/group").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
    })
}

/// Finds the technology below KVM, from the processor's flags and the loaded modules.
pub fn back_end() -> BackEnd {
    let module = |name: &str| Path::new("/sys/module").join(name).exists();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    classify(&cpuinfo, module)
}

fn classify(cpuinfo: &str, module: impl Fn(&str) -> bool) -> BackEnd {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let flag = |name: &str| flags.split_ascii_whitespace().any(|flag| flag == name);
    // PVM first: its module may be loaded on a processor whose hardware virtualization is disabled or in use.
    if module("kvm_pvm") {
        BackEnd::Pvm
    } else if module("kvm_amd") && flag("svm") {
        BackEnd::Svm
    } else if module("kvm_intel") && flag("vmx") {
        BackEnd::Vmx
    } else if flag("svm") {
        // Built into the kernel: no module directory unless it has parameters.
        BackEnd::Svm
    } else if flag("vmx") {
        BackEnd::Vmx
    } else {
        BackEnd::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_device_is_named_with_what_to_do() {
        let error = Host::open_at(Path::new("/nonexistent/kvm")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/kvm") && error.contains("kvm_amd"), "{error}");
    }

    #[test]
    fn a_device_that_is_not_kvm_is_refused() {
        let error = Host::open_at(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error, HostError::ApiVersion { .. }), "{error}");
    }

    #[test]
    fn the_back_end_follows_modules_and_flags() {
        let amd = "processor : 0\nflags\t\t: fpu svm sse\n";
        let intel = "processor : 0\nflags\t\t: fpu vmx sse\n";
        let plain = "processor : 0\nflags\t\t: fpu sse\n";
        let loaded = |names: &'static [&'static str]| move |name: &str| names.contains(&name);
        assert_eq!(classify(amd, loaded(&["kvm_amd", "kvm"])), BackEnd::Svm);
        assert_eq!(classify(intel, loaded(&["kvm_intel", "kvm"])), BackEnd::Vmx);
        assert_eq!(classify(plain, loaded(&["kvm_pvm", "kvm"])), BackEnd::Pvm);
        assert_eq!(classify(plain, loaded(&["kvm"])), BackEnd::Unknown);
        assert_eq!(classify(amd, loaded(&[])), BackEnd::Svm);
        assert_eq!(classify("", loaded(&[])), BackEnd::Unknown);
    }
}
