//! Compiles the rings of `guest/mmnet` for a process, with `c/shim.h` instead of Linux's headers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The module's compiled files.
const SOURCES: [&str; 4] = ["core_ring.c", "core_send.c", "core_receive.c", "core_third.c"];
/// The module's headers, whose includes must be found.
const HEADERS: [&str; 2] = ["core.h", "neigh.h"];

fn main() -> std::io::Result<()> {
    let tree = Path::new("../..");
    let module = tree.join("guest/mmnet");
    let protocol = tree.join("devices/neighbour/include");
    let empty = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("include");
    let files: Vec<PathBuf> = SOURCES.iter().chain(&HEADERS).map(|name| module.join(name)).collect();
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    for file in [Path::new("c"), Path::new("build.rs"), &protocol] {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    // The shim, which comes first, declares what Linux's headers would. The headers themselves are empty.
    for header in linux_headers(&files)? {
        let path = empty.join(header);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, "")?;
    }
    cc::Build::new()
        .files(SOURCES.iter().map(|name| module.join(name)))
        .file("c/rings.c")
        .include(&module)
        .include(&protocol)
        .include("c")
        .include(&empty)
        .flag("-include")
        .flag("c/shim.h")
        .std("gnu11")
        .flags(["-Wno-sign-compare", "-Wno-unused-parameter", "-Wno-unknown-warning-option", "-Werror"])
        // Undefined behavior ends the process, and so does any error that the shim detects.
        .flags(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-fno-sanitize=alignment"])
        .compile("mmnet_rings");
    Ok(())
}

/// Returns the Linux headers that the files include.
fn linux_headers(files: &[PathBuf]) -> std::io::Result<BTreeSet<String>> {
    let mut headers = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(file)?;
        headers.extend(
            text.lines()
                .filter_map(|line| Some(line.strip_prefix("#include <linux/")?.strip_suffix('>')?.to_owned()))
                .map(|name| format!("linux/{name}")),
        );
    }
    Ok(headers)
}
