//! Contents of the images: package lists, kernel modules and scripts, and the hash that decides whether a cached image
//! is valid.

/// Incremented when the assembly of images changes in a way that the lists below don't show.
pub const VERSION: u32 = 1;

/// Debian packages in the root file system of an emulated host.
pub const HOST_PACKAGES: &[&str] = &[
    "base-files",
    "base-passwd",
    "bash",
    "bridge-utils",
    "busybox-static",
    "bsdextrautils",
    "coreutils",
    "dash",
    "debianutils",
    "diffutils",
    "e2fsprogs",
    "ethtool",
    "findutils",
    "fio",
    "gawk",
    "gdb",
    "grep",
    "gzip",
    "hostname",
    "ibverbs-providers",
    "ibverbs-utils",
    "infiniband-diags",
    "iperf3",
    "ipxe-qemu",
    "iproute2",
    "iptables",
    "iputils-ping",
    "kmod",
    "less",
    "libc-bin",
    "lsof",
    "mount",
    "ncurses-base",
    "ncurses-bin",
    "netcat-openbsd",
    "nftables",
    "passt",
    "pciutils",
    "perftest",
    "procps",
    "psmisc",
    "python3-minimal",
    "python3",
    "qemu-system-x86",
    "qemu-utils",
    "rdma-core",
    "rdmacm-utils",
    "seabios",
    "sed",
    "socat",
    "strace",
    "sysvinit-utils",
    "tar",
    "tcpdump",
    "util-linux",
    "util-linux-extra",
    "vim-tiny",
    "xz-utils",
];

/// Debian packages in the root file system of a guest.
pub const GUEST_PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "busybox-static",
    "coreutils",
    "dash",
    "e2fsprogs",
    "ethtool",
    "fio",
    "grep",
    "ibverbs-providers",
    "ibverbs-utils",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libc-bin",
    "mount",
    "pciutils",
    "perftest",
    "procps",
    "rdma-core",
    "rdmacm-utils",
    "sed",
    "socat",
    "util-linux",
];

/// Debian packages in the root file system of a guest that does RDMA: user space as Debian ships it.
pub const RDMA_PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "busybox-static",
    "coreutils",
    "dash",
    "diffutils",
    "e2fsprogs",
    "ethtool",
    "fio",
    "gawk",
    "grep",
    "gzip",
    "hostname",
    "ibverbs-providers",
    "ibverbs-utils",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libc-bin",
    "mount",
    "nfs-common",
    "nfs-kernel-server",
    "nvme-cli",
    "openmpi-bin",
    "pciutils",
    "perftest",
    "procps",
    "psmisc",
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "sed",
    "socat",
    "strace",
    "tar",
    "ucx-utils",
    "util-linux",
];

/// Packages to build the driver and this repository's guest programs, in a separate root.
pub const RDMA_BUILD_PACKAGES: &[&str] = &[
    "coreutils",
    "dash",
    "gawk",
    "gcc-12",
    "grep",
    "libibverbs-dev",
    "libopenmpi-dev",
    "librdmacm-dev",
    "make",
    "sed",
    "xz-utils",
];

/// Packages to build a module, in addition to a kernel's headers.
pub const MODULE_BUILD_PACKAGES: &[&str] =
    &["coreutils", "dash", "diffutils", "findutils", "gawk", "gcc-12", "grep", "make", "sed"];

/// Packages to check the modules' sources, in addition.
pub const MODULE_CHECK_PACKAGES: &[&str] = &["perl", "sparse", "tar", "xz-utils"];

/// The Debian release whose backports have the newer QEMU. Its C library is included, so any release works.
pub const QEMU_RELEASE: &str = "trixie";

/// The newer QEMU, which is unpacked beside the system's.
pub const QEMU_PACKAGES: &[&str] = &["qemu-system-x86", "seabios"];

/// A Debian kernel that guests (and hosts) boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRecipe {
    /// Name in scenarios and directories.
    pub name: &'static str,
    /// The package that depends on the newest kernel of the kind.
    pub meta: &'static str,
    /// Prefix of that kernel's package name.
    pub prefix: &'static str,
}

/// The kernels of the lab. The first is also the kernel of the hosts.
pub const KERNELS: &[KernelRecipe] = &[
    KernelRecipe { name: "6.1-generic", meta: "linux-image-amd64", prefix: "linux-image-6.1." },
    KernelRecipe { name: "6.1-cloud", meta: "linux-image-cloud-amd64", prefix: "linux-image-6.1." },
    KernelRecipe { name: "6.12-generic", meta: "linux-image-amd64", prefix: "linux-image-6.12." },
    KernelRecipe { name: "6.12-cloud", meta: "linux-image-cloud-amd64", prefix: "linux-image-6.12." },
];

/// Modules in the initramfs of a host, which suffice to mount its root disk.
pub const HOST_INITRD_MODULES: &[&str] =
    &["virtio_pci", "virtio_blk", "crc32c_generic", "crc32c-intel", "ext4", "overlay"];

/// Modules in the initramfs of a guest; all of them are loaded.
pub const GUEST_INITRD_MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "overlay",
    "virtio_net",
    "virtio-rng",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "evdev",
    "button",
];

/// Modules in a guest's root disk, for scripts to `modprobe`.
pub const GUEST_ROOT_MODULES: &[&str] = &[
    "rdma_rxe",
    "rdma_ucm",
    "ib_uverbs",
    "ib_umad",
    "vmxnet3",
    "8139too",
    "8139cp",
    "ne2k-pci",
    "e1000",
    "e1000e",
    "nvme",
    "tun",
    "bridge",
    "veth",
    "9p",
    "9pnet_virtio",
    "virtiofs",
    "vsock_diag",
    "dm-mod",
    "loop",
    "pcnet32",
    "e100",
    "uio_pci_generic",
    "null_blk",
    "brd",
    "tcp_bbr",
    "msr",
    "userio",
];

/// The kernel of guests with RDMA; the cloud kernels have no rxe.
pub const RDMA_KERNEL: &str = "6.1-generic";

/// Modules in the root disk of a guest with RDMA. `vmw_pvrdma`, which Debian doesn't build, is built from its source.
pub const RDMA_MODULES: &[&str] = &[
    "vmxnet3",
    "ib_core",
    "ib_uverbs",
    "ib_umad",
    "rdma_ucm",
    "rdma_rxe",
    // rxe loads it by a computed name, so it isn't a listed dependency.
    "crc32_generic",
    "crc32_pclmul",
    "nvmet",
    "nvmet-rdma",
    "nvme-rdma",
    "nvme-fabrics",
    "rpcrdma",
    "nfsd",
    "nfs",
    "nfsv3",
    "nfsv4",
    "brd",
    "null_blk",
    "loop",
    "vsock_diag",
];

/// Debian packages in the root file system of a guest in a storage appliance, or of its client.
pub const APPLIANCE_PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "busybox-static",
    "coreutils",
    "dash",
    "diffutils",
    "e2fsprogs",
    "ethtool",
    "findutils",
    "fio",
    "gawk",
    "grep",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libc-bin",
    "mdadm",
    "mount",
    "nbd-client",
    "nbd-server",
    "nfs-common",
    "nfs-kernel-server",
    "procps",
    "sed",
    "socat",
    "tar",
    "util-linux",
];

/// Modules in that root disk, for each kernel of [`NEIGHBOUR_KERNELS`].
pub const APPLIANCE_MODULES: &[&str] =
    &["configfs", "bridge", "md-mod", "raid456", "nbd", "nfsd", "nfsv4", "loop", "vsock_diag"];

/// Directories of Debian's kernel source in the archive that guests unpack over the network: 776 files of 6.1.192, 18
/// MiB.
pub const APPLIANCE_TREE: &[&str] =
    &["block", "drivers/md", "fs/ext4", "fs/nfs", "fs/nfsd", "kernel/sched", "lib/raid6", "mm", "net/bridge"];

/// The package with that source.
pub const APPLIANCE_SOURCE: &str = "linux-source-6.1";

/// The kernels of guests with neighbours.
pub const NEIGHBOUR_KERNELS: &[&str] = &["6.1-generic", "6.12-generic"];

/// Sources of this repository's programs in the root disk of a guest with RDMA.
pub const RDMA_SOURCES: &[(&str, &str)] = &[
    ("rdma-common.h", include_str!("../guest-programs/rdma-common.h")),
    ("rdma-loop.c", include_str!("../guest-programs/rdma-loop.c")),
    ("rdma-verify.c", include_str!("../guest-programs/rdma-verify.c")),
    ("rdma-counter.c", include_str!("../guest-programs/rdma-counter.c")),
    ("exact-judge.h", include_str!("../guest-programs/exact-judge.h")),
    ("rdma-exact.c", include_str!("../guest-programs/rdma-exact.c")),
    ("mpi-check.c", include_str!("../guest-programs/mpi-check.c")),
    ("mpi-steady.c", include_str!("../guest-programs/mpi-steady.c")),
];

/// Directories of kernel modules that an emulated host doesn't need.
pub const HOST_MODULES_LEFT_OUT: &[&str] = &[
    "sound",
    "drivers/gpu",
    "drivers/media",
    "drivers/staging",
    "drivers/iio",
    "drivers/net/wireless",
    "drivers/infiniband/hw",
    "drivers/isdn",
    "drivers/hid",
    "drivers/mtd",
    "drivers/usb",
    "drivers/scsi",
    "drivers/bluetooth",
    "drivers/hwmon",
    "drivers/leds",
    "drivers/power",
    "drivers/rtc",
    "drivers/regulator",
    "drivers/mfd",
    "drivers/message",
    "drivers/firewire",
    "drivers/thunderbolt",
    "drivers/comedi",
    "net/mac80211",
    "net/wireless",
    "net/bluetooth",
    "net/nfc",
    "drivers/nfc",
    "drivers/input",
    "drivers/i2c",
    "drivers/target",
    "drivers/net/ethernet/mellanox",
    "drivers/net/ethernet/broadcom",
    "drivers/net/ethernet/chelsio",
    "drivers/net/ethernet/qlogic",
    "drivers/net/ethernet/sfc",
    "drivers/net/ethernet/cavium",
    "drivers/net/usb",
    "fs/ocfs2",
    "fs/gfs2",
    "fs/nfs",
    "fs/nfsd",
    "fs/ceph",
    "fs/btrfs",
    "fs/f2fs",
    "fs/reiserfs",
    "fs/jfs",
    "fs/smb",
    "fs/afs",
    "fs/nilfs2",
    "fs/ubifs",
    "fs/jffs2",
    "drivers/pinctrl",
    "drivers/platform",
    "drivers/edac",
    "net/sctp",
];

/// The kernel of hosts with a newer one ([`crate::topology::HostSpec::newer`]).
pub const NEWER_KERNEL: &str = "6.12-generic";

/// The modules of such a host, and their dependencies.
pub const NEWER_MODULES: &[&str] = &[
    "9p",
    "9pnet_virtio",
    "virtio_console",
    "kvm-amd",
    "virtio_net",
    "tun",
    "rdma_rxe",
    "ib_uverbs",
    // rxe loads it by a computed name, so it isn't a listed dependency.
    "crc32_generic",
    "sch_netem",
];

/// Additional commands of such a host's first program after the root is mounted: the root has only the other kernel's
/// modules.
pub const NEWER_INIT: &str =
    "d=/new/usr/lib/modules/$(uname -r)\nmkdir -p $d\ncp -r /newer/* $d/\nchroot /new depmod $(uname -r)\n";
/// Inserted before this line of [`HOST_INITRD_INIT`].
pub const NEWER_INIT_BEFORE: &str = "umount /proc\n";

/// PID 1 of a host's initramfs.
pub const HOST_INITRD_INIT: &str = include_str!("../assets/host-initrd-init.sh");
/// PID 1 of a host.
pub const HOST_INIT: &str = include_str!("../assets/host-init.sh");
/// PID 1 of a guest.
pub const GUEST_INIT: &str = include_str!("../assets/guest-init.sh");

/// Returns a 64-bit FNV-1a hash over parts. Each part is followed by its length, so that `["ab", "c"]` and `["a",
/// "bc"]` differ.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut h: u64 = 0xcbf2_9ce4_8422_2325;
    let mut eat = |bytes: &[u8]| {
        for b in bytes {
            h ^= u64::from(*b);
            h = h.wrapping_mul(0x0100_0000_01b3);
        }
    };
    for part in parts {
        eat(part.as_bytes());
        eat(&(part.len() as u64).to_le_bytes());
    }
    format!("{h:016x}")
}

/// A cached build result, which is rebuilt when its recipe changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artifact {
    /// Debian's QEMU of a later release, unpacked.
    Qemu,
    /// QEMU built from source with the lab's edits, with the former's libraries and data ([`crate::qemu_build`]).
    EditedQemu,
    /// Kernels, unpacked.
    Kernels,
    /// A host's root disk and initramfs.
    Host,
    /// The initramfs of hosts with a newer kernel.
    Newer,
    /// The disk with everything from which guests boot.
    Guest,
    /// The root disk of guests with RDMA.
    Rdma,
    /// The modules of guests with neighbours.
    Neighbours,
    /// The root disk of guests in a storage appliance.
    Appliance,
}

impl Artifact {
    /// All artifacts, in build order.
    pub const ALL: [Artifact; 9] = [
        Artifact::Qemu,
        Artifact::EditedQemu,
        Artifact::Kernels,
        Artifact::Host,
        Artifact::Newer,
        Artifact::Guest,
        Artifact::Rdma,
        Artifact::Neighbours,
        Artifact::Appliance,
    ];
    /// The artifacts that every topology needs.
    pub const USUAL: [Artifact; 4] = [Artifact::Qemu, Artifact::Kernels, Artifact::Host, Artifact::Guest];

    /// Returns the name of its stamp file, and in progress lines.
    pub fn name(self) -> &'static str {
        match self {
            Artifact::Qemu => "qemu",
            Artifact::EditedQemu => "edited-qemu",
            Artifact::Kernels => "kernels",
            Artifact::Host => "host",
            Artifact::Newer => "newer",
            Artifact::Guest => "guest",
            Artifact::Rdma => "rdma",
            Artifact::Neighbours => "neighbours",
            Artifact::Appliance => "appliance",
        }
    }

    /// Returns the hash of everything that determines the artifact's content.
    pub fn recipe(self) -> String {
        let version = VERSION.to_string();
        let sources = crate::neighbours_image::fingerprint();
        let kernels: Vec<&str> = KERNELS.iter().flat_map(|k| [k.name, k.meta, k.prefix]).collect();
        let mut parts = vec![self.name(), version.as_str()];
        match self {
            Artifact::Qemu => {
                parts.push(QEMU_RELEASE);
                parts.extend(QEMU_PACKAGES);
            }
            Artifact::EditedQemu => {
                parts.push(QEMU_RELEASE);
                // One by one, since all of them are borrowed longer than the others.
                for part in crate::qemu_build::recipe() {
                    parts.push(part);
                }
            }
            Artifact::Kernels => parts.extend(kernels),
            Artifact::Host => {
                parts.extend(HOST_PACKAGES);
                parts.extend(&kernels[..3]);
                parts.extend(HOST_INITRD_MODULES);
                parts.extend(HOST_MODULES_LEFT_OUT);
                parts.extend([HOST_INITRD_INIT, HOST_INIT]);
            }
            Artifact::Newer => {
                parts.extend(kernels);
                parts.extend(HOST_INITRD_MODULES);
                parts.extend(NEWER_MODULES);
                parts.extend([NEWER_KERNEL, HOST_INITRD_INIT, NEWER_INIT, NEWER_INIT_BEFORE]);
            }
            Artifact::Guest => {
                parts.extend(GUEST_PACKAGES);
                parts.extend(kernels);
                parts.extend(GUEST_INITRD_MODULES);
                parts.extend(GUEST_ROOT_MODULES);
                parts.push(GUEST_INIT);
            }
            Artifact::Rdma => {
                parts.extend(RDMA_PACKAGES);
                parts.extend(RDMA_BUILD_PACKAGES);
                parts.extend(&kernels[..3]);
                parts.push(RDMA_KERNEL);
                parts.extend(RDMA_MODULES);
                parts.extend(RDMA_SOURCES.iter().flat_map(|(name, text)| [*name, *text]));
                parts.push(crate::rdma_image::RECIPE);
            }
            Artifact::Neighbours => {
                parts.extend(MODULE_BUILD_PACKAGES);
                parts.extend(MODULE_CHECK_PACKAGES);
                parts.extend(kernels);
                parts.extend(NEIGHBOUR_KERNELS);
                parts.push(&sources);
            }
            Artifact::Appliance => {
                parts.extend(APPLIANCE_PACKAGES);
                parts.extend(APPLIANCE_MODULES);
                parts.extend(APPLIANCE_TREE);
                parts.push(APPLIANCE_SOURCE);
                parts.extend(kernels);
                parts.extend(NEIGHBOUR_KERNELS);
            }
        }
        hash(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_between_parts_count() {
        assert_ne!(hash(["ab", "c"]), hash(["a", "bc"]));
        assert_ne!(hash(["a"]), hash(["a", ""]));
        assert_eq!(hash(["fio", "iperf3"]), hash(["fio", "iperf3"]));
        assert_ne!(hash(["fio", "iperf3"]), hash(["iperf3", "fio"]));
    }

    #[test]
    fn a_newer_host_has_a_place_for_its_modules() {
        assert_eq!(HOST_INITRD_INIT.matches(NEWER_INIT_BEFORE).count(), 1);
        assert!(KERNELS.iter().any(|kernel| kernel.name == NEWER_KERNEL));
    }

    #[test]
    fn every_artifact_has_its_own_recipe() {
        let mut all: Vec<String> = Artifact::ALL.iter().map(|a| a.recipe()).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), Artifact::ALL.len());
    }
}
