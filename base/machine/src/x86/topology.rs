//! The cores that a guest sees, and their APIC ids.

/// Limit for the number of vCPUs of a VM: APIC ids are 8 bits wide, 255 is the broadcast id, and the I/O APIC has 254.
pub const MAX_VCPUS: u32 = 254;
/// The highest APIC id of a vCPU.
pub const MAX_APIC_ID: u32 = MAX_VCPUS - 1;

/// The cores that the guest sees: packages (sockets) of cores, one thread per core.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CpuTopology {
    packages: Vec<u32>,
}

/// The topology isn't possible.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TopologyError {
    /// No vCPUs, or too many.
    #[error("{0} vCPUs are not possible: choose 1 to 254")]
    Count(u64),
    /// A package without cores.
    #[error("CPU package {0} has no cores; leave it out or give it at least one")]
    Empty(usize),
    /// The packages need APIC ids above the limit.
    #[error(
        "{packages} CPU packages with up to {cores} cores need APIC ids up to {highest}, but {most} is the highest; use fewer packages or more equal ones",
        most = MAX_APIC_ID
    )]
    ApicIds {
        /// Number of packages.
        packages: usize,
        /// Cores of the largest.
        cores: u32,
        /// Highest id needed.
        highest: u64,
    },
}

impl CpuTopology {
    /// One package with `vcpus` cores.
    pub fn flat(vcpus: u32) -> Result<Self, TopologyError> {
        if vcpus == 0 {
            return Err(TopologyError::Count(0));
        }
        Self::packages(&[vcpus])
    }

    /// One package per entry (one per NUMA node, usually), with that many cores.
    pub fn packages(cores: &[u32]) -> Result<Self, TopologyError> {
        let total: u64 = cores.iter().map(|cores| u64::from(*cores)).sum();
        if total == 0 || total > u64::from(MAX_VCPUS) {
            return Err(TopologyError::Count(total));
        }
        if let Some(empty) = cores.iter().position(|cores| *cores == 0) {
            return Err(TopologyError::Empty(empty));
        }
        let topology = Self { packages: cores.to_vec() };
        let stride = u64::from(topology.stride());
        let last = cores.last().map_or(0, |cores| u64::from(*cores) - 1);
        let highest = (cores.len() as u64 - 1) * stride + last;
        if highest > u64::from(MAX_APIC_ID) {
            let most = cores.iter().copied().max().unwrap_or(0);
            return Err(TopologyError::ApicIds { packages: cores.len(), cores: most, highest });
        }
        Ok(topology)
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> u32 {
        self.packages.iter().sum()
    }

    /// Number of packages.
    pub fn package_count(&self) -> usize {
        self.packages.len()
    }

    /// APIC ids per package: a power of two.
    pub(super) fn stride(&self) -> u32 {
        self.packages.iter().copied().max().unwrap_or(1).next_power_of_two()
    }

    /// Package of vCPU `index`, and the vCPU's number within it.
    fn place(&self, index: u32) -> (usize, u32) {
        let mut left = index;
        for (package, &cores) in self.packages.iter().enumerate() {
            if left < cores {
                return (package, left);
            }
            left -= cores;
        }
        (self.packages.len().saturating_sub(1), left)
    }

    /// APIC id of vCPU `index`, which is also its KVM id. Ids of a package are consecutive; packages begin at multiples of a power of
    /// two.
    pub fn apic_id(&self, index: u32) -> u32 {
        let (package, core) = self.place(index);
        u32::try_from(package).unwrap_or(0) * self.stride() + core
    }

    /// Package of vCPU `index`.
    pub fn package(&self, index: u32) -> usize {
        self.place(index).0
    }

    /// Cores of the package of vCPU `index`.
    pub(super) fn cores_beside(&self, index: u32) -> u32 {
        self.packages.get(self.package(index)).copied().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn apic_ids_of_packages_begin_at_powers_of_two() {
        let topology = CpuTopology::packages(&[3, 2, 3]).unwrap();
        let ids: Vec<u32> = (0..8).map(|index| topology.apic_id(index)).collect();
        assert_eq!(ids, [0, 1, 2, 4, 5, 8, 9, 10]);
        let packages: Vec<usize> = (0..8).map(|index| topology.package(index)).collect();
        assert_eq!(packages, [0, 0, 0, 1, 1, 2, 2, 2]);
    }

    #[test]
    fn impossible_topologies_are_errors() {
        assert_eq!(CpuTopology::flat(0), Err(TopologyError::Count(0)));
        assert_eq!(CpuTopology::flat(255), Err(TopologyError::Count(255)));
        assert_eq!(CpuTopology::packages(&[]), Err(TopologyError::Count(0)));
        assert_eq!(CpuTopology::packages(&[1, 0]), Err(TopologyError::Empty(1)));
        assert!(matches!(
            CpuTopology::packages(&[65, 65, 65]),
            Err(TopologyError::ApicIds { highest: 320, .. })
        ));
        assert_eq!(
            CpuTopology::packages(&[u32::MAX, u32::MAX]),
            Err(TopologyError::Count(2 * u64::from(u32::MAX)))
        );
        assert!(matches!(
            CpuTopology::packages(&[127, 127]),
            Err(TopologyError::ApicIds { highest: 254, .. })
        ));
        assert!(CpuTopology::packages(&[126, 126]).is_ok());
        assert!(CpuTopology::flat(254).is_ok());
        assert!(CpuTopology::packages(&[1; 254]).is_ok());
    }

    proptest! {
        /// Every accepted topology has distinct ids within the limit, and an id determines its package.
        #[test]
        fn ids_are_distinct_and_carry_the_package(cores in prop::collection::vec(1u32..40, 1..20)) {
            if let Ok(topology) = CpuTopology::packages(&cores) {
                let mut ids: Vec<u32> = (0..topology.vcpus()).map(|index| topology.apic_id(index)).collect();
                for (index, id) in (0u32..).zip(&ids) {
                    prop_assert!(*id <= MAX_APIC_ID);
                    prop_assert_eq!((id / topology.stride()) as usize, topology.package(index));
                }
                ids.dedup();
                prop_assert_eq!(ids.len(), topology.vcpus() as usize);
            }
        }
    }
}
