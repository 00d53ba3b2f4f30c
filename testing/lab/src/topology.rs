//! A scenario's topology: hosts, their NICs and devices, and links between them.

use crate::recipe::Artifact;
use anyhow::{Result, bail};

/// A network card of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Name inside the host.
    pub name: String,
    /// QEMU's device model: `virtio-net-pci`, `rtl8139`, `ne2k_pci`, `e1000`…
    pub model: String,
    /// Address with prefix length, set at boot.
    pub address: Option<String>,
    /// The link, and which of its two ends; `None` without a cable.
    pub link: Option<(usize, usize)>,
}

/// How a nested page walk of the host's CPUs accesses a guest's page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walks {
    /// By loads. By a store only to set an accessed or dirty bit, as Intel's with EPT's own bits off.
    Read,
    /// By stores, as AMD's.
    Write,
}

/// One emulated host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSpec {
    /// Its name: letters, digits and hyphens.
    pub name: String,
    /// Number of CPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// NICs in PCI order.
    pub nics: Vec<Nic>,
    /// Whether `/dev/vdd` is the root disk of guests with RDMA.
    pub rdma: bool,
    /// Whether `/dev/vdd` is the root disk of guests in a storage appliance.
    pub appliance: bool,
    /// Whether its guests load the neighbour modules.
    pub neighbours: bool,
    /// Whether it boots a newer kernel than other hosts.
    pub newer: bool,
    /// How nested page walks access page tables.
    pub walks: Walks,
    /// Additional arguments of QEMU: devices, IOMMUs, drives.
    pub qemu: Vec<String>,
    /// Additional kernel command line words; `kvm_amd.npt=0` sets a KVM option.
    pub kernel: Vec<String>,
}

impl HostSpec {
    /// Creates a host with the lab's default size and no NICs.
    pub fn new(name: &str) -> Self {
        HostSpec {
            name: name.to_owned(),
            cpus: 2,
            memory_mib: 3072,
            nics: Vec::new(),
            rdma: false,
            appliance: false,
            neighbours: false,
            newer: false,
            walks: Walks::Write,
            qemu: Vec::new(),
            kernel: Vec::new(),
        }
    }

    /// Sets the number of CPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the memory in MiB.
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Attaches the root disk of guests with RDMA as `/dev/vdd`.
    pub fn rdma(mut self) -> Self {
        self.rdma = true;
        self
    }

    /// Attaches the root disk of guests in a storage appliance as `/dev/vdd`.
    pub fn appliance(mut self) -> Self {
        self.appliance = true;
        self
    }

    /// Builds the neighbour modules for its guests' kernels.
    pub fn neighbours(mut self) -> Self {
        self.neighbours = true;
        self
    }

    /// Boots it with a newer kernel ([`crate::recipe::NEWER_KERNEL`]) and few modules. For features that the usual kernel lacks, such
    /// as userfaultfd since Linux 6.4, which VMs that span hosts need.
    pub fn newer(mut self) -> Self {
        self.newer = true;
        self
    }

    /// Sets how nested page walks access page tables.
    pub fn walks(mut self, walks: Walks) -> Self {
        self.walks = walks;
        self
    }

    /// Adds arguments for QEMU.
    pub fn qemu<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.qemu.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds kernel command line words.
    pub fn kernel<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.kernel.extend(words.into_iter().map(Into::into));
        self
    }

    /// Adds a NIC without a cable.
    pub fn nic(mut self, name: &str, model: &str) -> Self {
        self.nics.push(Nic { name: name.to_owned(), model: model.to_owned(), address: None, link: None });
        self
    }
}

/// Hosts and the links between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// The hosts.
    pub hosts: Vec<HostSpec>,
    links: usize,
}

impl Topology {
    /// Creates an empty topology.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates one host called `host`.
    pub fn single() -> Self {
        Self::new().host(HostSpec::new("host"))
    }

    /// Creates `n` hosts `host0`, `host1`… with a link between each and the next. For more than two, also from the last to the first.
    pub fn ring(n: usize) -> Self {
        let mut t = Self::new();
        for i in 0..n {
            t = t.host(HostSpec::new(&format!("host{i}")));
        }
        for i in 0..n {
            if i + 1 < n || n > 2 {
                t = t.link(&format!("host{i}"), &format!("host{}", (i + 1) % n));
            }
        }
        t
    }

    /// Adds a host.
    pub fn host(mut self, host: HostSpec) -> Self {
        self.hosts.push(host);
        self
    }

    /// Links two hosts: each gets a virtio NIC. On both sides, link number `l` is called `x{l}`, with 10.77.l.1 and .2.
    pub fn link(self, a: &str, b: &str) -> Self {
        self.link_with(a, b, "virtio-net-pci")
    }

    /// Links two hosts with another NIC model.
    pub fn link_with(mut self, a: &str, b: &str, model: &str) -> Self {
        let link = self.links;
        self.links += 1;
        for (end, name) in [a, b].into_iter().enumerate() {
            let nic = Nic {
                name: format!("x{link}"),
                model: model.to_owned(),
                address: Some(format!("10.77.{link}.{}/24", end + 1)),
                link: Some((link, end)),
            };
            match self.hosts.iter_mut().find(|h| h.name == name) {
                Some(h) => h.nics.push(nic),
                // `check` reports it later: a builder chain can't return an error.
                None => self.hosts.push(HostSpec { cpus: 0, ..HostSpec::new(name) }),
            }
        }
        self
    }

    /// Returns the required images.
    pub fn artifacts(&self) -> Vec<Artifact> {
        let rdma = self.hosts.iter().any(|h| h.rdma).then_some(Artifact::Rdma);
        let neighbours = self.hosts.iter().any(|h| h.neighbours).then_some(Artifact::Neighbours);
        let appliance = self.hosts.iter().any(|h| h.appliance).then_some(Artifact::Appliance);
        let newer = self.hosts.iter().any(|h| h.newer).then_some(Artifact::Newer);
        let edited = self.hosts.iter().any(|h| h.walks == Walks::Read).then_some(Artifact::EditedQemu);
        Artifact::USUAL
            .into_iter()
            .chain(edited)
            .chain(newer)
            .chain(rdma)
            .chain(neighbours)
            .chain(appliance)
            .collect()
    }

    /// Checks the topology; returns the first problem.
    pub fn check(&self) -> Result<()> {
        if self.hosts.is_empty() {
            bail!("A topology needs at least one host");
        }
        for (i, h) in self.hosts.iter().enumerate() {
            if h.name.is_empty() || !h.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
                bail!("A host can't be called {:?}: letters, digits and hyphens only", h.name);
            }
            if self.hosts[..i].iter().any(|o| o.name == h.name) {
                bail!("Two hosts are called {}", h.name);
            }
            if h.cpus == 0 || h.cpus > 16 {
                bail!(
                    "Host {} has {} CPUs (a link that names an unknown host counts as none); 1 to 16 are possible",
                    h.name,
                    h.cpus
                );
            }
            if !(512..=16384).contains(&h.memory_mib) {
                bail!("Host {} has {} MiB of memory; 512 to 16384 are possible", h.name, h.memory_mib);
            }
            if h.rdma && h.appliance {
                bail!(
                    "Host {} can't have the root disks of RDMA and of appliance guests: both are /dev/vdd",
                    h.name
                );
            }
            for (n, nic) in h.nics.iter().enumerate() {
                if nic.name.is_empty()
                    || nic.name.len() > 15
                    || h.nics[..n].iter().any(|o| o.name == nic.name)
                {
                    bail!(
                        "Host {} can't have a NIC called {:?}: 1 to 15 characters, each name once",
                        h.name,
                        nic.name
                    );
                }
            }
        }
        Ok(())
    }
}

/// Returns the MAC address of a host's NIC: unique in a topology, and the same in every run.
pub fn mac(host: usize, nic: usize) -> String {
    format!("52:54:00:77:{:02x}:{:02x}", host & 0xff, nic & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_name_both_ends() {
        let t = Topology::ring(3);
        t.check().unwrap();
        let names: Vec<Vec<&str>> =
            t.hosts.iter().map(|h| h.nics.iter().map(|n| n.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["x0", "x2"], vec!["x0", "x1"], vec!["x1", "x2"]]);
        assert_eq!(t.hosts[2].nics[1].address.as_deref(), Some("10.77.2.1/24"));
        assert_eq!(Topology::ring(2).hosts[1].nics.len(), 1);
    }

    #[test]
    fn mistakes_are_named() {
        let bad = |t: Topology| t.check().unwrap_err().to_string();
        assert!(bad(Topology::new()).contains("at least one host"));
        assert!(bad(Topology::single().link("host", "other")).contains("other"));
        assert!(bad(Topology::single().host(HostSpec::new("host"))).contains("Two hosts"));
        assert!(bad(Topology::new().host(HostSpec::new("a b"))).contains("called"));
        assert!(bad(Topology::new().host(HostSpec::new("a").memory(1))).contains("memory"));
    }

    #[test]
    fn addresses_differ() {
        assert_ne!(mac(0, 1), mac(1, 0));
    }
}
