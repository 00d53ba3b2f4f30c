//! Examines what this host can do for VMs, what is missing, and how to get it.
//!
//! Each module examines one part of the host and returns [`Finding`]s. Nothing changes the host. KVM is tested with a
//! temporary VM.

mod devices;
mod files;
mod kernel;
mod kvm;
mod memory;
mod nodes;

use serde::Serialize;

use files::Files;

/// Rating of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Fully usable.
    Ok,
    /// Partly usable.
    Limited,
    /// Missing or unusable.
    Missing,
}

/// One property of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The property's name.
    pub name: &'static str,
    /// The rating.
    pub status: Status,
    /// The observed state.
    pub found: String,
    /// The remedy, if something is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), remedy: None }
    }

    fn limited(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Limited, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Missing, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// Findings about one part of the host.
#[derive(Debug, Serialize)]
pub struct Group {
    /// The part's name.
    pub name: &'static str,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// All findings.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether ordinary kernels run (`causeway run --kernel`).
    pub ordinary_kernels: bool,
    /// Whether payload guests run (`causeway run --payload`).
    pub payloads: bool,
    /// A sentence with both.
    pub verdict: String,
    /// The findings by part of the host.
    pub groups: Vec<Group>,
}

/// Examines this host.
pub fn examine() -> Report {
    let files = Files::of_host();
    let kvm = kvm::examine(&files);
    let verdict = match (kvm.ordinary_kernels, kvm.payloads) {
        (true, _) => "This host runs ordinary kernels and payload guests.",
        (false, true) => {
            "This host runs payload guests only; for ordinary kernels use the virtual lab (make demo)."
        }
        (false, false) => "This host can't run VMs natively; use the virtual lab (make demo).",
    };
    Report {
        ordinary_kernels: kvm.ordinary_kernels,
        payloads: kvm.payloads,
        verdict: verdict.to_owned(),
        groups: vec![
            Group { name: "KVM", findings: kvm.findings },
            Group { name: "Memory", findings: memory::examine(&files) },
            Group { name: "VMs of several nodes", findings: nodes::examine(&files) },
            Group { name: "Devices", findings: devices::examine(&files) },
            Group { name: "Kernel features", findings: kernel::examine(&files) },
        ],
    }
}
