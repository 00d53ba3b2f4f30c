//! The emulator: QEMU's origin, its settings, and the command line of a host. docs/design/lab.md has the reasons.

use crate::image::Images;
use crate::topology::{HostSpec, Walks, mac};
use anyhow::{Result, bail};
use std::path::Path;
use std::process::Command;

/// The threads that emulate a host's CPUs (docs/design/lab.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// One, for a host with one CPU: the setting without lost guests.
    Single,
    /// One per CPU.
    Multi,
}

/// Emulation settings of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emulator {
    /// The newer QEMU unpacked from backports ([`crate::recipe::QEMU_RELEASE`]), or the system's.
    pub newer: bool,
    /// Mode of TCG's threads.
    pub threads: Threads,
    /// The `-cpu` argument.
    pub cpu: String,
    /// Whether KVM in the host uses nested paging.
    pub npt: bool,
    /// No emulator: this machine in separate namespaces ([`crate::native`]).
    pub native: bool,
}

impl Default for Emulator {
    fn default() -> Self {
        Emulator {
            newer: true,
            threads: Threads::Single,
            cpu: "max,+svm,-la57,-xsave,-erms,-fsrm,-pclmulqdq".into(),
            npt: true,
            native: false,
        }
    }
}

impl Emulator {
    /// Returns the default settings, changed by `LAB_EMULATOR`, a list such as `qemu=system,threads=single,npt=0`.
    pub fn chosen() -> Result<Self> {
        match std::env::var("LAB_EMULATOR") {
            Ok(text) => Self::parse(&text),
            Err(_) => Ok(Self::default()),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let mut e = Self::default();
        for word in text.split(',').filter(|w| !w.is_empty()) {
            match word {
                "qemu=system" => e.newer = false,
                "qemu=newer" => e.newer = true,
                "threads=single" => e.threads = Threads::Single,
                "threads=multi" => e.threads = Threads::Multi,
                "npt=0" => e.npt = false,
                "npt=1" => e.npt = true,
                "native" => e.native = true,
                _ => bail!(
                    "LAB_EMULATOR has {word:?}; it takes native, or qemu=system|newer, threads=single|multi and npt=0|1, with commas"
                ),
            }
        }
        Ok(e)
    }

    /// Makes `command` (which may already be a wrapper) run QEMU; its arguments follow.
    ///
    /// The unpacked QEMU is from a later release than the system, so it runs with its own loader and C library.
    pub fn run_by(&self, images: &Images, command: &mut Command) {
        if !self.newer {
            command.arg("qemu-system-x86_64");
            return;
        }
        let root = images.qemu_root();
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command.arg(root.join("usr/lib64/ld-linux-x86-64.so.2"));
        let path = format!("{0}:{0}/pulseaudio", libraries.display());
        command.args(["--argv0", "qemu-system-x86_64", "--library-path", &path]);
        command.arg(images.edited_qemu().unwrap_or_else(|| root.join("usr/bin/qemu-system-x86_64")));
    }

    /// Sets how the host's nested page walks access a guest's page tables.
    pub fn set_walks(&self, images: &Images, host: &HostSpec, command: &mut Command) -> Result<()> {
        if host.walks == Walks::Read && !(self.newer && images.edited_qemu().is_some()) {
            bail!(
                "Host {} needs page walks that only read, which QEMU has with the lab's edits alone: run `lab images`, which says why it can't build that",
                host.name
            );
        }
        let walks = match host.walks {
            Walks::Read => "read",
            Walks::Write => "write",
        };
        command.env("CAUSEWAY_LAB_WALKS", walks);
        Ok(())
    }

    /// Returns a line that describes the settings.
    pub fn describe(&self, images: &Images) -> String {
        if self.native {
            return "no emulator: this machine's own KVM".to_owned();
        }
        let mut command = Command::new("env");
        self.run_by(images, &mut command);
        let version = command
            .arg("--version")
            .output()
            .map(|o| String::from_utf8_lossy(&o.stdout).lines().next().unwrap_or("?").to_owned());
        format!(
            "{}{}, TCG with {}, -cpu {}, npt={}",
            version.unwrap_or_else(|e| format!("QEMU that doesn't run ({e})")),
            if self.newer { format!(" ({})", images.qemu_origin()) } else { String::new() },
            match self.threads {
                Threads::Single => "one thread",
                Threads::Multi => "a thread per CPU",
            },
            self.cpu,
            u8::from(self.npt)
        )
    }

    /// Returns the arguments for one host whose files are in `dir`. Link sockets are in `links`.
    pub fn arguments(
        &self,
        images: &Images,
        host: &HostSpec,
        index: usize,
        dir: &Path,
        links: &Path,
    ) -> Vec<String> {
        let mut a: Vec<String> = Vec::new();
        let mut add = |flag: &str, value: String| {
            a.push(flag.to_owned());
            if !value.is_empty() {
                a.push(value);
            }
        };
        let d = dir.display();
        let multi = self.threads == Threads::Multi;
        add("-name", host.name.clone());
        add("-nodefaults", String::new());
        add("-no-user-config", String::new());
        if self.newer {
            for data in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
                add("-L", images.qemu_root().join(data).display().to_string());
            }
        }
        let iommu = host.qemu.iter().any(|q| q.contains("iommu"));
        add("-machine", if iommu { "q35,kernel-irqchip=split".into() } else { "q35".into() });
        add("-accel", format!("tcg,thread={},tb-size=512", if multi { "multi" } else { "single" }));
        add("-cpu", self.cpu.clone());
        // A single thread for several CPUs hangs guests within seconds (docs/design/lab.md).
        add("-smp", if multi { host.cpus } else { 1 }.to_string());
        add("-m", format!("{}M", host.memory_mib));
        add("-display", "none".into());
        add("-no-reboot", String::new());
        add("-serial", format!("file:{d}/console"));
        add("-qmp", format!("unix:{d}/qmp,server=on,wait=off"));
        add("-kernel", images.host_kernel(host.newer).display().to_string());
        add("-initrd", images.host_initrd(host.newer).display().to_string());
        let mut words = vec![
            "console=ttyS0".to_owned(),
            "quiet".into(),
            "panic=-1".into(),
            "mitigations=off".into(),
            "tsc=reliable".into(),
            // A crowded machine is too slow for the check, and the host would then wait for a timer forever.
            "no_timer_check".into(),
            format!("tsc_early_khz={}", crate::clock::tsc_khz()),
            "random.trust_cpu=on".into(),
            "cryptomgr.notests".into(),
            "apparmor=0".into(),
            format!("lab.name={}", host.name),
            format!("kvm_amd.npt={}", u8::from(self.npt)),
        ];
        words.extend(host.kernel.iter().cloned());
        add("-append", words.join(" "));
        for (id, image) in [("root", images.host_root()), ("lab", images.guest_disk())] {
            add("-drive", format!("if=none,id={id},format=raw,readonly=on,file={}", image.display()));
            add("-device", format!("virtio-blk-pci,drive={id}"));
        }
        add("-drive", format!("if=none,id=scratch,format=raw,cache=unsafe,discard=unmap,file={d}/scratch"));
        add("-device", "virtio-blk-pci,drive=scratch".into());
        let guests = [(host.rdma, images.rdma_root()), (host.appliance, images.appliance_root())];
        for (_, image) in guests.into_iter().filter(|(wanted, _)| *wanted) {
            add("-drive", format!("if=none,id=guests,format=raw,readonly=on,file={}", image.display()));
            add("-device", "virtio-blk-pci,drive=guests".into());
        }
        add("-device", "virtio-serial-pci,id=serial0".into());
        add("-chardev", format!("socket,id=agent,path={d}/agent,server=on,wait=off"));
        add("-device", "virtserialport,bus=serial0.0,chardev=agent,name=lab".into());
        add("-fsdev", format!("local,id=share,path={d}/share,security_model=none,multidevs=remap"));
        add("-device", "virtio-9p-pci,fsdev=share,mount_tag=share".into());
        for (n, nic) in host.nics.iter().enumerate() {
            let id = format!("net{n}");
            match nic.link {
                Some((link, end)) => {
                    let path = |e: usize| links.join(format!("{link}.{e}")).display().to_string();
                    add(
                        "-netdev",
                        format!(
                            "dgram,id={id},local.type=unix,local.path={},remote.type=unix,remote.path={}",
                            path(end),
                            path(1 - end)
                        ),
                    );
                }
                None => add("-netdev", format!("hubport,id={id},hubid={}", 100 + n)),
            }
            add("-device", format!("{},netdev={id},mac={},romfile=", nic.model, mac(index, n)));
        }
        a.extend(host.qemu.iter().cloned());
        a
    }
}

/// Returns the file with a host's NICs for its init program: address, name, IP address or `-`.
pub fn nic_table(host: &HostSpec, index: usize) -> String {
    let lines = host.nics.iter().enumerate().map(|(n, nic)| {
        format!("{} {} {}\n", mac(index, n), nic.name, nic.address.as_deref().unwrap_or("-"))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    #[test]
    fn settings_are_read() {
        let e = Emulator::parse("qemu=system,threads=multi,npt=0").unwrap();
        assert!(!e.newer && e.threads == Threads::Multi && !e.npt);
        assert!(Emulator::parse("fast=yes").unwrap_err().to_string().contains("fast=yes"));
    }

    #[test]
    fn nics_are_listed_for_the_host() {
        let t = Topology::ring(2);
        assert_eq!(nic_table(&t.hosts[1], 1), "52:54:00:77:01:00 x0 10.77.0.2/24\n");
    }
}
