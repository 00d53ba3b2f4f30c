//! What this host can do for VMs, what is missing, and how to get it.
//!
//! Each module looks at one part of the host and returns [`Finding`]s. Nothing here changes the host; KVM is tried out
//! with a throw-away VM.

mod devices;
mod files;
mod kernel;
mod kvm;
mod memory;
mod nodes;

use serde::Serialize;

use files::Files;

/// How good something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As good as Causeway can use it.
    Ok,
    /// There, but not all of it.
    Limited,
    /// Not there, or of no use.
    Missing,
}

/// One thing about the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub name: &'static str,
    /// How good it is.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// How to get more of it, where something is lacking.
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
    /// Which part.
    pub name: &'static str,
    /// What was found.
    pub findings: Vec<Finding>,
}

/// All findings.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether ordinary kernels run (`causeway run --kernel`).
    pub ordinary_kernels: bool,
    /// Whether payload guests run (`causeway run --payload`).
    pub payloads: bool,
    /// Both in a sentence.
    pub verdict: String,
    /// By part of the host.
    pub groups: Vec<Group>,
}

/// Looks at this host.
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
