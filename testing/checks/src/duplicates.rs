//! Refuses two versions of a rust-vmm crate, which would have two incompatible `GuestMemory` types.

use std::collections::BTreeMap;

use crate::metadata::Metadata;

const EXACT: [&str; 7] =
    ["vm-memory", "vmm-sys-util", "vm-superio", "linux-loader", "vfio_user", "vhost", "vhost-user-backend"];
const PREFIXES: [&str; 3] = ["kvm-", "vfio-", "virtio-"];

/// Returns one sentence per crate with several versions.
pub fn violations(metadata: &Metadata) -> Vec<String> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in &metadata.packages {
        let watched = EXACT.contains(&package.name.as_str())
            || PREFIXES.iter().any(|prefix| package.name.starts_with(prefix));
        if watched && !metadata.workspace_members.contains(&package.id) {
            versions.entry(&package.name).or_default().push(&package.version);
        }
    }
    versions
        .into_iter()
        .filter(|(_, versions)| versions.len() > 1)
        .map(|(name, versions)| {
            format!(
                "{name} is in the lock file {} times ({}): align the requirements",
                versions.len(),
                versions.join(", ")
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::violations;
    use crate::metadata::{Metadata, Package};

    #[test]
    fn two_versions_of_one_crate_are_named() {
        let package = |version: &str| Package {
            id: format!("vm-memory {version}"),
            name: "vm-memory".to_owned(),
            version: version.to_owned(),
            license: None,
            manifest_path: String::new(),
            dependencies: Vec::new(),
        };
        let mut metadata = Metadata {
            packages: vec![package("0.17.0")],
            workspace_members: Vec::new(),
            workspace_root: String::new(),
        };
        assert!(violations(&metadata).is_empty());
        metadata.packages.push(package("0.18.0"));
        assert_eq!(violations(&metadata).len(), 1);
    }
}
