//! KVM: whether it exists, its backend, and whether it runs ordinary kernels.

use machine::kvm::{BackEnd, Host, HostError};

use super::Finding;
use super::files::Files;

/// KVM's abilities.
pub struct Kvm {
    /// Whether ordinary kernels run.
    pub ordinary_kernels: bool,
    /// Whether payload guests run.
    pub payloads: bool,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// Examines KVM, and runs a temporary VM.
pub fn examine(files: &Files) -> Kvm {
    let host = match Host::open() {
        Ok(host) => host,
        Err(error) => {
            return Kvm { ordinary_kernels: false, payloads: false, findings: vec![unusable(&error, files)] };
        }
    };
    let capabilities = host.capabilities();
    let mut findings = vec![
        Finding::ok("/dev/kvm", format!("usable, API version {}", capabilities.api_version)),
        back_end(capabilities.back_end, files),
    ];
    if capabilities.missing.is_empty() {
        findings.push(Finding::ok("required capabilities", "all there"));
    } else {
        let lacking = format!("lacks {}", capabilities.missing.join(", "));
        findings.push(Finding::missing("required capabilities", lacking, "use a newer Linux kernel"));
    }
    let absent: Vec<_> =
        capabilities.optional.iter().filter(|(_, there)| !there).map(|(name, _)| *name).collect();
    findings.push(if absent.is_empty() {
        Finding::ok("optional capabilities", "all there")
    } else {
        let found = format!("lacks {}", absent.join(", "));
        Finding::limited("optional capabilities", found, "a newer Linux kernel may have them")
    });
    findings.push(Finding::ok(
        "limits",
        format!(
            "{} vCPUs per VM ({} recommended), {} memory slots, {} interrupt routes",
            capabilities.max_vcpus,
            capabilities.recommended_vcpus,
            capabilities.memslots,
            capabilities.irq_routes
        ),
    ));
    let payloads = capabilities.missing.is_empty();
    let ordinary_kernels = payloads && ordinary_kernels(&host, &mut findings);
    findings.extend(nested(capabilities.back_end, files));
    Kvm { ordinary_kernels, payloads, findings }
}

fn unusable(error: &HostError, files: &Files) -> Finding {
    let reason = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
    let found = format!("{error}{reason}");
    let virtual_host = cpu_flags(files).iter().any(|flag| flag == "hypervisor");
    let remedy = match error {
        HostError::Absent { .. } if virtual_host => {
            "this host is a VM itself: turn on nested virtualisation where it runs, then modprobe kvm_intel or kvm_amd"
        }
        HostError::Absent { .. } => {
            "turn on virtualisation in the firmware, then modprobe kvm_intel or kvm_amd"
        }
        HostError::NoPermission { group_name, .. } if group_name == "kvm" => {
            "usermod -aG kvm USER, then log in again"
        }
        HostError::NoPermission { .. } => {
            "chgrp kvm /dev/kvm && chmod 660 /dev/kvm, then usermod -aG kvm USER, then log in again"
        }
        _ => "use a current Linux kernel with KVM",
    };
    Finding::missing("/dev/kvm", found, remedy)
}

fn cpu_flags(files: &Files) -> Vec<String> {
    let info = files.text("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("flags"));
    let flags = line.and_then(|line| line.split_once(':')).map(|(_, flags)| flags);
    flags.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

fn back_end(back_end: BackEnd, files: &Files) -> Finding {
    let nested = if cpu_flags(files).iter().any(|flag| flag == "hypervisor") {
        ", nested: this host is a VM itself"
    } else {
        ""
    };
    match back_end {
        BackEnd::Svm => Finding::ok("back end", format!("AMD-V (svm){nested}")),
        BackEnd::Vmx => Finding::ok("back end", format!("Intel VT-x (vmx){nested}")),
        BackEnd::Pvm => Finding::limited(
            "back end",
            format!("PVM: guests run in the host's ring 3, without hardware virtualisation{nested}"),
            "a host with AMD-V or Intel VT-x runs ordinary kernels",
        ),
        BackEnd::Unknown => Finding::limited(
            "back end",
            format!("neither svm, vmx nor pvm{nested}"),
            "a host with AMD-V or Intel VT-x is what Causeway is tested on",
        ),
    }
}

fn ordinary_kernels(host: &Host, findings: &mut Vec<Finding>) -> bool {
    const NAME: &str = "ordinary kernels";
    const REMEDY: &str = "use a host with AMD-V or Intel VT-x, or the virtual lab (make demo)";
    match host.probe_ring0() {
        Ok(probe) => {
            let finding = if probe.ordinary_kernels {
                Finding::ok(NAME, probe.finding)
            } else {
                Finding::missing(NAME, probe.finding, REMEDY)
            };
            findings.push(finding);
            probe.ordinary_kernels
        }
        Err(error) => {
            let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
            let text = chain.map(ToString::to_string).collect::<Vec<_>>().join(": ");
            findings.push(Finding::missing(NAME, text, REMEDY));
            false
        }
    }
}

/// Checks whether guests can run KVM themselves.
fn nested(back_end: BackEnd, files: &Files) -> Option<Finding> {
    let module = match back_end {
        BackEnd::Svm => "kvm_amd",
        BackEnd::Vmx => "kvm_intel",
        BackEnd::Pvm | BackEnd::Unknown => return None,
    };
    let on = matches!(files.text(&format!("/sys/module/{module}/parameters/nested"))?.as_str(), "Y" | "1");
    Some(if on {
        Finding::ok("VMs inside VMs", "guests can use KVM themselves")
    } else {
        Finding::limited(
            "VMs inside VMs",
            "off",
            format!("modprobe -r {module} && modprobe {module} nested=1"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn the_back_end_says_whether_it_is_nested() {
        let (_root, real) = Files::synthetic(&[("proc/cpuinfo", "processor : 0\nflags : fpu svm\n")]);
        assert_eq!(back_end(BackEnd::Svm, &real).found, "AMD-V (svm)");
        let (_root, virtual_host) =
            Files::synthetic(&[("proc/cpuinfo", "flags\t\t: fpu svm hypervisor lm\n")]);
        assert!(back_end(BackEnd::Svm, &virtual_host).found.contains("nested"));
        assert_eq!(back_end(BackEnd::Pvm, &virtual_host).status, Status::Limited);
    }

    #[test]
    fn an_absent_kvm_is_explained_differently_inside_a_vm() {
        let absent = HostError::Absent { path: "/dev/kvm".into() };
        let (_root, virtual_host) = Files::synthetic(&[("proc/cpuinfo", "flags : hypervisor\n")]);
        assert!(unusable(&absent, &virtual_host).remedy.unwrap().contains("nested virtualisation"));
        let (_root, real) = Files::synthetic(&[]);
        assert!(unusable(&absent, &real).remedy.unwrap().contains("firmware"));
    }

    #[test]
    fn nested_kvm_is_read_from_the_module() {
        let (_root, host) = Files::synthetic(&[("sys/module/kvm_amd/parameters/nested", "1\n")]);
        assert_eq!(nested(BackEnd::Svm, &host).unwrap().status, Status::Ok);
        assert_eq!(nested(BackEnd::Vmx, &host), None);
        let (_root, host) = Files::synthetic(&[("sys/module/kvm_intel/parameters/nested", "N\n")]);
        assert!(nested(BackEnd::Vmx, &host).unwrap().remedy.unwrap().contains("kvm_intel nested=1"));
    }
}
