//! VMs that span nodes: what their shared memory requires of a host, and host settings that cost time
//! (`docs/reference/dsm.md`).

use machine::kvm::{BackEnd, Host};
use machine::memory::shared::SharedRam;
use machine::memory::{GuestRam, RamLayout, RamOptions};

use super::Finding;
use super::files::Files;

/// Size of the tested guest RAM, and offset of its shared part, in bytes.
const TRIED: (u64, u64) = (4 << 20, 2 << 20);

/// Examines this host, and tests shared memory.
pub fn examine(files: &Files) -> Vec<Finding> {
    let back_end = Host::open().map_or(BackEnd::Unknown, |host| host.capabilities().back_end);
    vec![
        shared_memory(),
        page_walks(back_end, files),
        huge(files),
        merging(files),
        balancing(files),
        rdma(monitor::dsm::rdma_devices()),
    ]
}

/// Checks whether links between nodes could use RDMA. The nodes alone know which address a device needs.
fn rdma(devices: Result<Vec<String>, monitor::dsm::NoRdma>) -> Finding {
    const NAME: &str = "links by RDMA";
    match devices {
        Ok(devices) => Finding::ok(
            NAME,
            format!(
                "possible with {} where it has the node's address (--peers rdma:HOST:PORT)",
                devices.join(", ")
            ),
        ),
        Err(absent) => Finding::limited(
            NAME,
            format!("not possible: {absent}"),
            "nodes of several hosts can be linked by tcp:HOST:PORT instead",
        ),
    }
}

fn shared_memory() -> Finding {
    const NAME: &str = "memory of several nodes";
    let tried = RamLayout::new(&[TRIED.0])
        .and_then(|layout| GuestRam::allocate(&layout, &RamOptions::default()))
        .map_err(|error| error.to_string())
        .and_then(|ram| SharedRam::new(&ram, TRIED.1).map(drop).map_err(|error| error.to_string()));
    match tried {
        Ok(()) => Finding::ok(NAME, "faults inside KVM can be seen (userfaultfd)"),
        Err(error) => Finding::missing(
            NAME,
            error,
            "run as a user that may open /dev/userfaultfd, or with CAP_SYS_PTRACE, on Linux 6.4 or newer",
        ),
    }
}

fn is_on(files: &Files, path: &str) -> Option<bool> {
    files.text(path).map(|text| matches!(text.as_str(), "Y" | "1"))
}

/// Checks whether the processor writes during a walk of a guest's page tables, and whether KVM shadows these tables.
fn page_walks(back_end: BackEnd, files: &Files) -> Finding {
    const NAME: &str = "page walks";
    const SHADOW: &str = "KVM keeps shadow copies of page tables, which go stale when another node changes a table: of no matter to payload guests, whose tables \
                          aren't shared";
    let parameter = |name: &str| is_on(files, &format!("/sys/module/{name}"));
    match back_end {
        BackEnd::Vmx if parameter("kvm_intel/parameters/ept") == Some(false) => {
            Finding::limited(NAME, SHADOW, "modprobe -r kvm_intel && modprobe kvm_intel ept=1 eptad=0")
        }
        BackEnd::Vmx => match parameter("kvm_intel/parameters/eptad") {
            Some(false) => Finding::ok(NAME, "read only (EPT without accessed and dirty bits)"),
            on => Finding::limited(
                NAME,
                match on {
                    Some(_) => {
                        "EPT has accessed and dirty bits: walks count as writes, so a page table that nodes share moves at each; payload guests share none"
                    }
                    None => {
                        "kvm_intel doesn't say whether EPT has accessed and dirty bits, with which walks count as writes"
                    }
                },
                "modprobe -r kvm_intel && modprobe kvm_intel eptad=0",
            ),
        },
        BackEnd::Svm if parameter("kvm_amd/parameters/npt") == Some(false) => Finding::limited(
            NAME,
            SHADOW,
            "there is no better way on AMD: with npt=1 every walk counts as a write",
        ),
        BackEnd::Svm => Finding::limited(
            NAME,
            "NPT: walks count as writes, so a page table that nodes share moves at each; payload guests share none",
            "no switch of AMD-V changes that; modprobe -r kvm_amd && modprobe kvm_amd npt=0 uses shadow page tables instead",
        ),
        BackEnd::Pvm => {
            Finding::limited(NAME, SHADOW, "a host with Intel VT-x and kvm_intel's eptad=0 has neither")
        }
        BackEnd::Unknown => Finding::limited(
            NAME,
            "not known without KVM",
            "a host with Intel VT-x and kvm_intel's eptad=0 is best",
        ),
    }
}

/// Pages move one by one. Monitors request small pages, which one setting overrides.
fn huge(files: &Files) -> Finding {
    const NAME: &str = "small pages";
    match files.choice("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        Some(choice) if choice == "force" => Finding::limited(
            NAME,
            "shmem_enabled is force: guest RAM may get huge pages, which have to be split before they can move",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
        _ => Finding::ok(NAME, "monitors get them for shared guest RAM"),
    }
}

fn merging(files: &Files) -> Finding {
    const NAME: &str = "merging beside nodes";
    match files.number("/sys/kernel/mm/ksm/run") {
        Some(1) => Finding::limited(
            NAME,
            "KSM runs: it leaves guest RAM alone, but takes processors from threads that serve other nodes",
            "echo 2 > /sys/kernel/mm/ksm/run",
        ),
        _ => Finding::ok(NAME, "KSM doesn't run"),
    }
}

fn balancing(files: &Files) -> Finding {
    const NAME: &str = "NUMA balancing";
    match files.number("/proc/sys/kernel/numa_balancing") {
        Some(on) if on != 0 => Finding::limited(
            NAME,
            "on: it takes translations away to see who uses pages, and each costs a guest a fault",
            "echo 0 > /proc/sys/kernel/numa_balancing",
        ),
        _ => Finding::ok(NAME, "off"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    /// Only EPT without accessed and dirty bits neither writes nor becomes stale. Every other mode reports its effect
    /// and the remedy.
    #[test]
    fn each_way_of_walking_page_tables_is_told_from_the_others() {
        const EPT: &str = "sys/module/kvm_intel/parameters/ept";
        const AD: &str = "sys/module/kvm_intel/parameters/eptad";
        const NPT: &str = "sys/module/kvm_amd/parameters/npt";
        for (back_end, entries, status, found) in [
            (BackEnd::Vmx, &[(EPT, "Y\n"), (AD, "N\n")][..], Status::Ok, "read only"),
            (BackEnd::Vmx, &[(EPT, "Y\n"), (AD, "Y\n")], Status::Limited, "EPT has accessed and dirty bits"),
            (BackEnd::Vmx, &[], Status::Limited, "doesn't say"),
            (BackEnd::Vmx, &[(EPT, "N\n"), (AD, "N\n")], Status::Limited, "shadow"),
            (BackEnd::Svm, &[(NPT, "Y\n")], Status::Limited, "NPT"),
            (BackEnd::Svm, &[(NPT, "1\n")], Status::Limited, "NPT"),
            (BackEnd::Svm, &[(NPT, "0\n")], Status::Limited, "shadow"),
            (BackEnd::Pvm, &[], Status::Limited, "shadow"),
            (BackEnd::Unknown, &[], Status::Limited, "not known"),
        ] {
            let (_root, host) = Files::synthetic(entries);
            let finding = page_walks(back_end, &host);
            assert_eq!(finding.status, status, "{finding:?}");
            assert!(finding.found.contains(found), "{finding:?}");
            assert_eq!(finding.remedy.is_none(), status == Status::Ok, "{finding:?}");
        }
    }

    /// RDMA links are possible, or the finding has the reason and the alternative.
    #[test]
    fn a_host_without_an_rdma_device_is_told_of_tcp() {
        assert_eq!(rdma(Ok(vec!["rxe0".to_owned()])).status, Status::Ok);
        let finding = rdma(Err(monitor::dsm::NoRdma::NoDevice));
        assert_eq!(finding.status, Status::Limited);
        assert!(finding.found.contains("rdma link add") && finding.remedy.unwrap().contains("tcp:"));
    }

    #[test]
    fn what_takes_pages_or_time_from_guests_is_told() {
        let (_root, host) = Files::synthetic(&[
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always never [force]\n"),
            ("sys/kernel/mm/ksm/run", "1\n"),
            ("proc/sys/kernel/numa_balancing", "1\n"),
        ]);
        for finding in [huge(&host), merging(&host), balancing(&host)] {
            assert_eq!(finding.status, Status::Limited, "{finding:?}");
            assert!(finding.remedy.is_some());
        }
        let (_root, host) = Files::synthetic(&[
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never force\n"),
            ("sys/kernel/mm/ksm/run", "0\n"),
            ("proc/sys/kernel/numa_balancing", "0\n"),
        ]);
        for finding in [huge(&host), merging(&host), balancing(&host)] {
            assert_eq!(finding.status, Status::Ok, "{finding:?}");
        }
    }
}
