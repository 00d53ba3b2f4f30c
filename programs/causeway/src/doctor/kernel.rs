//! Kernel features that Causeway uses: io_uring, userfaultfd, Landlock, seccomp.

use rustix::thread::CapabilitySet;

use super::Finding;
use super::files::Files;

/// Examines the kernel.
pub fn examine(files: &Files) -> Vec<Finding> {
    vec![release(files), io_uring(files), userfaultfd(files), landlock(), seccomp(files)]
}

fn release(files: &Files) -> Finding {
    match files.text("/proc/sys/kernel/osrelease") {
        Some(release) => Finding::ok("Linux", release),
        None => Finding::limited("Linux", "/proc doesn't say its version", "mount /proc"),
    }
}

/// Tests it by use, since containers may also refuse it by seccomp.
fn io_uring(files: &Files) -> Finding {
    const NAME: &str = "io_uring";
    let error = match io_uring::IoUring::new(2) {
        Ok(_) => return Finding::ok(NAME, "usable"),
        Err(error) => error,
    };
    let remedy = match files.number("/proc/sys/kernel/io_uring_disabled") {
        Some(1 | 2) => "sysctl kernel.io_uring_disabled=0",
        _ => "use a kernel with CONFIG_IO_URING, and a container profile that allows it",
    };
    Finding::limited(NAME, format!("{error}: disks use threads that block instead"), remedy)
}

/// Checks which faults user space may handle for guest RAM. KVM's own accesses are kernel faults.
fn userfaultfd(files: &Files) -> Finding {
    const NAME: &str = "userfaultfd";
    let Some(open_to_all) = files.number("/proc/sys/vm/unprivileged_userfaultfd") else {
        return Finding::missing(NAME, "not in this kernel", "use a kernel with CONFIG_USERFAULTFD");
    };
    let ptrace = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE));
    let device =
        std::fs::OpenOptions::new().read(true).write(true).open(files.path("/dev/userfaultfd")).is_ok();
    let allowed =
        [(open_to_all == 1, "to everyone"), (ptrace, "by CAP_SYS_PTRACE"), (device, "by /dev/userfaultfd")];
    match allowed.into_iter().find(|(yes, _)| *yes) {
        Some((_, how)) => Finding::ok(NAME, format!("for the kernel's accesses too, allowed {how}")),
        None => Finding::limited(
            NAME,
            "only for accesses of user space, not KVM's: no VM can span hosts or migrate by post-copy",
            "let the user open /dev/userfaultfd, or sysctl vm.unprivileged_userfaultfd=1",
        ),
    }
}

fn landlock() -> Finding {
    const NAME: &str = "Landlock";
    match monitor::sandbox::landlock_abi() {
        Ok(abi) => Finding::ok(NAME, format!("ABI {abi}")),
        Err(reason) => {
            Finding::limited(NAME, reason, "boot a kernel of 5.13 or newer with landlock in its lsm= list")
        }
    }
}

fn seccomp(files: &Files) -> Finding {
    const NAME: &str = "seccomp";
    let Some(actions) = files.text("/proc/sys/kernel/seccomp/actions_avail") else {
        return Finding::missing(
            NAME,
            "not in this kernel: only --sandbox off runs",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        );
    };
    let has = |action: &str| actions.split_whitespace().any(|have| have == action);
    match (has("trap"), has("user_notif")) {
        (true, true) => Finding::ok(NAME, "filters, and --sandbox log"),
        (true, false) => Finding::limited(
            NAME,
            "filters; --sandbox log can't show refused calls",
            "use Linux 5.5 or newer",
        ),
        (false, _) => Finding::missing(NAME, "no filters that trap", "use Linux 4.14 or newer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn seccomp_and_userfaultfd_are_read_from_proc() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::below(root.path());
        assert_eq!(seccomp(&files).status, Status::Missing);
        assert_eq!(userfaultfd(&files).status, Status::Missing);
        for (path, text) in [
            ("proc/sys/kernel/seccomp/actions_avail", "kill_process trap errno\n"),
            ("proc/sys/vm/unprivileged_userfaultfd", "1\n"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(seccomp(&files).status, Status::Limited);
        assert!(userfaultfd(&files).found.contains("allowed to everyone"));
    }
}
