//! The description of a VM: read from a TOML file, from flags, or from both, then validated.
//!
//! ```text
//! vm.toml --parse--> written::Vm --flags override--> written::Vm --validate--> VmDescription
//!                     (as written)                           (validated, complete)
//! ```
//!
//! [`written`] has the file's keys one to one. [`VmDescription`] can't represent an invalid combination, so no code after [`validate`]
//! checks values again. Validation is pure: it opens no file. Only [`read`] opens the description itself.

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

/// Limit in bytes for a description file. A larger file is something else.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads a TOML file, and the position of each key. Relative paths in it start at the file's own directory.
pub fn read(path: &Path) -> Result<(written::Vm, Positions), DescriptionError> {
    use std::io::Read as _;

    let unreadable = |source| DescriptionError::Unreadable { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(DescriptionError::NotADescription {
            path: path.to_owned(),
            problem: format!("it is longer than {MAX_FILE_BYTES} bytes"),
        });
    }
    let text = String::from_utf8(bytes).map_err(|error| DescriptionError::NotADescription {
        path: path.to_owned(),
        problem: format!("byte {} is not UTF-8 text", error.utf8_error().valid_up_to()),
    })?;
    parse(&text, path)
}

/// Parses the text of a description file. `path` appears in errors, and its directory resolves relative paths.
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
