//! /dev/kvm: opening it, and what this host's KVM can do.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::vm::{Vm, VmError};
use crate::x86::CpuId;

/// KVM can't be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No device node.
    #[error(
        "{path} doesn't exist: load the module kvm_intel or kvm_amd, or enable virtualisation in the firmware"
    )]
    Absent {
        /// Path tried.
        path: PathBuf,
    },
    /// Not allowed.
    #[error(
        "{path} may not be opened by user {uid}: it belongs to user {owner}, group {group} ({group_name}) with mode {mode:03o}; add the user to that group"
    )]
    NoPermission {
        /// Path tried.
        path: PathBuf,
        /// Our user.
        uid: u32,
        /// Its owner.
        owner: u32,
        /// Its group.
        group: u32,
        /// The group's name, or `unnamed`.
        group_name: String,
        /// Its mode bits.
        mode: u32,
    },
    /// Some other failure of open.
    #[error("{path} can't be opened")]
    Open {
        /// Path tried.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It isn't KVM, or one from before 2007.
    #[error("{path} speaks KVM API version {found}, but 12 is needed: use a current Linux kernel")]
    ApiVersion {
        /// Path.
        path: PathBuf,
        /// Version found.
        found: i32,
    },
    /// Something that can't be done without is missing.
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
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What runs guest code underneath KVM's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackEnd {
    /// AMD-V.
    Svm,
    /// Intel VT-x.
    Vmx,
    /// Pagetable virtual machine: guests run in ring 3 of the host, without hardware virtualisation.
    Pvm,
    /// None of these.
    Unknown,
}

/// What `causeway doctor` reports about KVM.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Capabilities {
    /// KVM_GET_API_VERSION.
    pub api_version: i32,
    /// What is underneath.
    pub back_end: BackEnd,
    /// Largest number of vCPUs of a VM.
    pub max_vcpus: usize,
    /// Recommended number of vCPUs.
    pub recommended_vcpus: usize,
    /// Number of memslots of a VM.
    pub memslots: usize,
    /// Largest number of interrupt routes.
    pub irq_routes: usize,
    /// Capabilities that Causeway can't do without and this host lacks.
    pub missing: Vec<&'static str>,
    /// Capabilities that make Causeway faster or more able, by name.
    pub optional: Vec<(&'static str, bool)>,
}

/// Whether kernel code runs at native speed.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Ring0Probe {
    /// Whether an ordinary kernel can be expected to boot.
    pub ordinary_kernels: bool,
    /// What was seen, as one sentence.
    pub finding: String,
    /// Nanoseconds per simple ring-0 instruction, where the probe ran to its end.
    pub ns_per_instruction: Option<f64>,
}

/// KVM of this host, opened.
#[derive(Debug)]
pub struct Host {
    #[allow(dead_code)]
    kvm: kvm_ioctls::Kvm,
}

impl Host {
    /// Opens /dev/kvm and checks the API version and the capabilities that Causeway needs.
    pub fn open() -> Result<Self, HostError> {
        Self::open_at(Path::new("/dev/kvm"))
    }

    /// Opens a given device node.
    pub fn open_at(_path: &Path) -> Result<Self, HostError> {
        todo!()
    }

    /// What this host can do.
    pub fn capabilities(&self) -> Capabilities {
        todo!()
    }

    /// The CPUID leaves that KVM can give to guests. See [`crate::x86::guest_cpuid`] for those of one vCPU.
    pub fn supported_cpuid(&self) -> Result<CpuId, HostError> {
        todo!()
    }

    /// Creates a VM without memory, interrupt controllers or vCPUs.
    pub fn create_vm(&self) -> Result<Arc<Vm>, VmError> {
        todo!()
    }

    /// Runs a few thousand simple ring-0 instructions in a throw-away VM and tells whether ordinary kernels can run.
    /// Takes at most half a second.
    pub fn probe_ring0(&self) -> Result<Ring0Probe, VmError> {
        todo!()
    }
}
