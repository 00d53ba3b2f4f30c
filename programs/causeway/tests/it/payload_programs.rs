//! The payload programs for tests of spanning VMs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the directory of the built payload programs, or `None` if no payload VM can span nodes.
pub fn programs(test: &str) -> Option<&'static Path> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    for (device, facility) in
        [("/dev/kvm", facilities::Facility::Kvm), ("/dev/userfaultfd", facilities::Facility::Userfaultfd)]
    {
        if !Path::new(device).exists() {
            facilities::missing(facility, format!("{test} needs {device}"));
            return None;
        }
    }
    Some(FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned();
        let target = root.join("target/payload");
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--release", "--locked", "-p", "payload-programs", "--manifest-path"])
            .arg(root.join("guest/payload/Cargo.toml"))
            .arg("--target-dir")
            .arg(&target)
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env_remove("CARGO_BUILD_TARGET")
            .status();
        assert!(status.unwrap().success(), "the payload programs could not be built");
        target.join("release")
    }))
}
