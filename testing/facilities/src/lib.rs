//! Facilities of the machine that tests need: KVM, root, programs of other packages. Also what test beds share: [`ports`], [`rng`].
//!
//! A test without a facility calls [`missing`] and returns. On a developer's machine that prints a line; if the facility is required,
//! the test fails. `make test` requires every facility that `tools/setup` installs. So a missing package or a changed machine fails
//! CI, instead of skipping tests.

pub mod ports;
pub mod rng;

use std::fmt::Display;
use std::io::Write as _;

/// Lists the required facilities, separated by commas or white space; `all` means every one.
pub const REQUIRED: &str = "CAUSEWAY_REQUIRED_FACILITIES";

/// A facility that a test may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Facility {
    /// A C compiler, `cc`.
    Cc,
    /// `O_DIRECT` on the file system of temporary files.
    DirectIo,
    /// etcd, the cluster service's store.
    Etcd,
    /// io_uring, for block devices.
    IoUring,
    /// KVM, at `/dev/kvm`.
    Kvm,
    /// Landlock in the kernel.
    Landlock,
    /// libibverbs, the host's RDMA library.
    Libibverbs,
    /// passt, user-mode networking.
    Passt,
    /// `qemu-img`, for disk images and their locks.
    QemuImg,
    /// `qemu-system-x86_64`, which serves emulated devices to tests.
    QemuSystem,
    /// The rights of root: mounts, namespaces, other users' processes.
    Root,
    /// A second processor.
    TwoProcessors,
    /// tun and tap devices.
    Tun,
    /// userfaultfd, for post-copy pages.
    Userfaultfd,
    /// Extended attributes on the file system of temporary files.
    Xattr,
}

impl Facility {
    /// Every facility.
    pub const ALL: [Facility; 15] = [
        Facility::Cc,
        Facility::DirectIo,
        Facility::Etcd,
        Facility::IoUring,
        Facility::Kvm,
        Facility::Landlock,
        Facility::Libibverbs,
        Facility::Passt,
        Facility::QemuImg,
        Facility::QemuSystem,
        Facility::Root,
        Facility::TwoProcessors,
        Facility::Tun,
        Facility::Userfaultfd,
        Facility::Xattr,
    ];

    /// Returns the name for [`REQUIRED`].
    pub fn name(self) -> &'static str {
        match self {
            Facility::Cc => "cc",
            Facility::DirectIo => "direct-io",
            Facility::Etcd => "etcd",
            Facility::IoUring => "io-uring",
            Facility::Kvm => "kvm",
            Facility::Landlock => "landlock",
            Facility::Libibverbs => "libibverbs",
            Facility::Passt => "passt",
            Facility::QemuImg => "qemu-img",
            Facility::QemuSystem => "qemu-system",
            Facility::Root => "root",
            Facility::TwoProcessors => "two-processors",
            Facility::Tun => "tun",
            Facility::Userfaultfd => "userfaultfd",
            Facility::Xattr => "xattr",
        }
    }
}

/// Returns whether `list` contains the facility.
///
/// # Panics
/// `list` contains an unknown name: a misspelled requirement would require nothing.
fn requires(list: &str, facility: Facility) -> bool {
    let names: Vec<&str> =
        list.split([',', ' ', '\n', '\t']).map(str::trim).filter(|name| !name.is_empty()).collect();
    for name in &names {
        assert!(
            *name == "all" || Facility::ALL.iter().any(|known| known.name() == *name),
            "{REQUIRED} names '{name}', which is no facility; there are all, {}",
            Facility::ALL.map(Facility::name).join(", ")
        );
    }
    names.iter().any(|name| *name == "all" || *name == facility.name())
}

/// Reports that the calling test can't run, past the test harness' capture.
///
/// # Panics
/// [`REQUIRED`] contains the facility.
pub fn missing(facility: Facility, why: impl Display) {
    let name = facility.name();
    let required = std::env::var(REQUIRED).unwrap_or_default();
    assert!(!requires(&required, facility), "{name} is required here ({REQUIRED}) and missing: {why}");
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Nothing can be done if standard error is closed.
    let _ = writeln!(std::io::stderr(), "{test}: SKIPPED: no {name}: {why}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_facilities() {
        assert!(requires("kvm, root", Facility::Kvm) && requires("kvm root", Facility::Root));
        assert!(!requires("kvm,root", Facility::Etcd) && !requires("", Facility::Kvm));
        assert!(Facility::ALL.iter().all(|facility| requires("all", *facility)));
    }

    #[test]
    #[should_panic(expected = "names 'kvn', which is no facility")]
    fn a_misspelled_name_is_no_requirement() {
        requires("kvn", Facility::Kvm);
    }
}
