//! The layer rule: a crate depends on crates of lower rows only (docs/design/architecture.md has the table). A crate's row is its
//! directory.

use crate::metadata::{Metadata, Package};

/// Rows from the bottom up. `testing` and `fuzz` may use everything. Only tests use `testing`.
const ROWS: [&str; 7] = ["base", "cores", "devices", "services", "programs", "testing", "fuzz"];

/// Libraries that only one crate of the product may use. The lab's probe of page walks uses KVM directly, and not through the code
/// under test.
const SOLE_USERS: [(&str, &str, Option<&str>); 3] = [
    ("vm-memory", "machine", None),
    ("kvm-ioctls", "machine", Some("lab")),
    ("kvm-bindings", "machine", Some("lab")),
];

/// Returns one sentence per violation.
pub fn violations(metadata: &Metadata) -> Vec<String> {
    let ours: Vec<&Package> =
        metadata.packages.iter().filter(|package| metadata.workspace_members.contains(&package.id)).collect();
    let mut found = Vec::new();
    for package in &ours {
        let Some(row) = row_of(&metadata.workspace_root, package) else {
            found.push(format!(
                "{} lies in none of the layer folders {}: move it into one",
                package.manifest_path,
                ROWS.join(", ")
            ));
            continue;
        };
        for dependency in
            package.dependencies.iter().filter(|dependency| dependency.kind.as_deref() != Some("dev"))
        {
            if let Some((library, user, other)) =
                SOLE_USERS.iter().find(|(library, ..)| *library == dependency.name)
                && package.name != *user
                && Some(package.name.as_str()) != *other
            {
                found.push(format!(
                    "{} depends on {library}, which only {user} may name: use its re-exports",
                    package.name
                ));
            }
            let Some(target) = ours.iter().find(|other| other.name == dependency.name) else { continue };
            let Some(target_row) = row_of(&metadata.workspace_root, target) else { continue };
            let testing = ROWS[row] == "testing";
            if target_row >= row && !(testing && target_row == row) {
                found.push(format!(
                    "{} ({}) depends on {} ({}): a crate may depend on lower rows only",
                    package.name, ROWS[row], target.name, ROWS[target_row]
                ));
            }
        }
    }
    found
}

fn row_of(root: &str, package: &Package) -> Option<usize> {
    let relative = package.manifest_path.strip_prefix(root)?.trim_start_matches('/');
    let folder = relative.split('/').next()?;
    ROWS.iter().position(|row| *row == folder)
}

#[cfg(test)]
mod tests {
    use super::violations;
    use crate::metadata::{Dependency, Metadata, Package};

    fn package(folder: &str, name: &str, dependencies: &[&str]) -> Package {
        Package {
            id: name.to_owned(),
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            license: None,
            manifest_path: format!("/w/{folder}/{name}/Cargo.toml"),
            dependencies: dependencies
                .iter()
                .map(|name| Dependency { name: (*name).to_owned(), kind: None })
                .collect(),
        }
    }

    fn workspace(packages: Vec<Package>) -> Metadata {
        Metadata {
            workspace_members: packages.iter().map(|package| package.id.clone()).collect(),
            packages,
            workspace_root: "/w".to_owned(),
        }
    }

    #[test]
    fn downward_edges_pass_and_others_are_named() {
        let fine =
            workspace(vec![package("base", "machine", &[]), package("devices", "virtio", &["machine"])]);
        assert!(violations(&fine).is_empty());

        let upward =
            workspace(vec![package("base", "machine", &["virtio"]), package("devices", "virtio", &[])]);
        assert_eq!(violations(&upward).len(), 1);

        let sideways = workspace(vec![package("devices", "a", &["b"]), package("devices", "b", &[])]);
        assert_eq!(violations(&sideways).len(), 1);
    }

    #[test]
    fn a_crate_outside_the_folders_and_a_second_user_of_vm_memory_are_named() {
        assert_eq!(violations(&workspace(vec![package("misc", "x", &[])])).len(), 1);
        assert_eq!(violations(&workspace(vec![package("devices", "x", &["vm-memory"])])).len(), 1);
    }
}
