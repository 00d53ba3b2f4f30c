//! Load errors. Each message is one sentence that names the file and the remedy.

use std::path::PathBuf;

use machine::memory::GuestMemoryError;

/// A kernel, an initrd or a command line can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file can't be opened.
    #[error("The {role} {} can't be opened", path.display())]
    Open {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        path: PathBuf,
        /// Error of `open`.
        #[source]
        source: std::io::Error,
    },
    /// It isn't a regular file.
    #[error("The {role} {} is {what}; give a file", path.display())]
    NotAFile {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// It has no bytes.
    #[error("The {role} {name} is empty")]
    Empty {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        name: String,
    },
    /// It is no kernel.
    #[error("The kernel {name} is neither a bzImage nor a vmlinux: {hint}")]
    Unrecognised {
        /// Its path.
        name: String,
        /// What it is, or what to do.
        hint: &'static str,
    },
    /// It is a kernel for another machine.
    #[error("The kernel {name} is for {machine}; this machine is x86-64 (64-bit)")]
    WrongMachine {
        /// Its path.
        name: String,
        /// The machine.
        machine: String,
    },
    /// The file ends too early.
    #[error(
        "The kernel {name} is truncated: {what} ends at byte {needed} and the file has {have}; copy it again"
    )]
    Truncated {
        /// Its path.
        name: String,
        /// The part that isn't complete.
        what: &'static str,
        /// Bytes the file should have at least.
        needed: u64,
        /// Bytes it has.
        have: u64,
    },
    /// A header contradicts itself or the format.
    #[error("The kernel {name} is damaged: {what}")]
    Malformed {
        /// Its path.
        name: String,
        /// What is wrong, with the values.
        what: String,
    },
    /// The protocol that was asked for isn't offered by the image.
    #[error("The kernel {name} can't be booted by {protocol}: {why}")]
    Protocol {
        /// Its path.
        name: String,
        /// The protocol.
        protocol: &'static str,
        /// Reason and remedy; completes the message after the colon.
        why: &'static str,
    },
    /// It doesn't fit into RAM.
    #[error(
        "The {role} {name} needs memory up to {end:#x} and the VM's RAM there ends at {ram_end:#x}; \
         give the VM at least {} MiB", needed.div_ceil(1 << 20)
    )]
    TooBig {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        name: String,
        /// End of the memory that it needs.
        end: u64,
        /// End of the RAM that could hold it.
        ram_end: u64,
        /// Bytes of RAM that would do.
        needed: u64,
    },
    /// No amount of RAM would make room.
    #[error("The {role} {name} can't be placed: {what}")]
    Unplaceable {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        name: String,
        /// Why, with the values.
        what: String,
    },
    /// The command line is not acceptable.
    #[error("The kernel command line {what}")]
    CommandLine {
        /// What is wrong, with the values.
        what: String,
    },
    /// The file could not be read.
    #[error("The {role} {name} can't be read at byte {offset}")]
    Read {
        /// "kernel" or "initrd".
        role: &'static str,
        /// Its path.
        name: String,
        /// Offset in the file, bytes.
        offset: u64,
        /// Error of the read.
        #[source]
        source: std::io::Error,
    },
    /// Guest memory refused a write.
    #[error("Guest memory at {address:#x} can't hold {what}")]
    Memory {
        /// What was to be written.
        what: &'static str,
        /// Guest-physical address of the first byte.
        address: u64,
        /// Error of the guest memory.
        #[source]
        source: GuestMemoryError,
    },
    /// The VM's RAM is not laid out as a kernel needs it.
    #[error("The VM's memory can't hold a kernel: {what}")]
    Ram {
        /// What is wrong, with the values.
        what: String,
    },
}
