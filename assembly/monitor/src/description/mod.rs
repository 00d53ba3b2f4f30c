//! What a VM is to be: read from a TOML file, from flags, or from both, then validated.
//!
//! ```text
//! vm.toml --parse--> written::Vm --flags override--> written::Vm --validate--> VmDescription
//!                    (what was written)                            (what holds; nothing left to check)
//! ```
//!
//! [`written`] mirrors the file, key by key. [`VmDescription`] can't hold a combination that makes no sense, so
//! nothing after [`validate`] checks values again. Validation is pure: no file is opened here except the
//! description itself.

mod cpu_list;
mod error;
mod mac;
mod neighbour;
mod nic;
mod one_or_many;
mod positions;
mod served;
mod size;
mod validate;
mod vm;
pub mod written;

pub use cpu_list::CpuList;
pub use error::{DescriptionError, Invalid, Key};
pub use mac::MacAddress;
pub use machine::interrupt::IrqchipKind;
pub use one_or_many::OneOrMany;
pub use positions::Positions;
pub use size::ByteSize;
pub use validate::validate;
pub use vm::{
    BootProtocol, Console, Cpus, Disk, DiskFormat, Guest, HugePages, LinuxBoot, Memory, Neighbour,
    NeighbourPeer, Net, NetBackend, Nic, NicMode, NicPermission, NicPolicy, NumaNode, OnReboot, Payload,
    Rdma, SandboxMode, VfioUser, VmDescription, Vsock,
};

use std::path::Path;

/// A description file is refused beyond this many bytes: it is some other file.
const LARGEST_FILE: u64 = 1 << 20;

/// Reads what is written in a TOML file, and where each key stands. Relative paths in it are taken from the
/// file's own directory.
pub fn read(path: &Path) -> Result<(written::Vm, Positions), DescriptionError> {
    use std::io::Read as _;

    let unreadable = |source| DescriptionError::Unreadable { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(DescriptionError::NotADescription {
            path: path.to_owned(),
            problem: format!("it is longer than {LARGEST_FILE} bytes"),
        });
    }
    let text = String::from_utf8(bytes).map_err(|error| DescriptionError::NotADescription {
        path: path.to_owned(),
        problem: format!("byte {} is not UTF-8 text", error.utf8_error().valid_up_to()),
    })?;
    parse(&text, path)
}

/// Parses the text of a description file; `path` is only named in errors and resolves relative paths.
pub fn parse(text: &str, path: &Path) -> Result<(written::Vm, Positions), DescriptionError> {
    let positions = Positions::of(text, path)?;
    let mut vm: written::Vm = toml::from_str(text).map_err(|error| positions.syntax_error(&error))?;
    if vm.name.is_none() {
        vm.name = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
    }
    vm.resolve_paths(path.parent().unwrap_or(Path::new("")));
    Ok((vm, positions))
}

/// Reads, parses and validates a description file.
pub fn load(path: &Path) -> Result<VmDescription, DescriptionError> {
    let (vm, positions) = read(path)?;
    validate(&vm).map_err(|invalid| positions.invalid(invalid))
}

#[cfg(test)]
mod tests;
