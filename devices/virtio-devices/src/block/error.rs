//! Why a disk can't be attached.

use std::io;
use std::path::{Path, PathBuf};

/// A disk image can't be used as asked. Never caused by the guest.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// No such file.
    #[error("Disk image {} does not exist; check the path, or create it: truncate -s 10G {}", .path.display(), .path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A migration didn't fill it to the end.
    #[error("Disk image {} is incomplete: a migration that was to fill it has not ended; move the VM again with --mirror, or use another image", .path.display())]
    Incomplete {
        /// The image.
        path: PathBuf,
    },
    /// No permission.
    #[error("Disk image {} can't be opened for {access}: permission denied; change its permissions{}", .path.display(), if *.access == "reading" { "" } else { " or attach it read-only" })]
    Permission {
        /// The image.
        path: PathBuf,
        /// "reading" or "reading and writing".
        access: &'static str,
    },
    /// On a read-only file system.
    #[error("Disk image {} lies on a read-only file system; attach it read-only", .path.display())]
    ReadOnlyFileSystem {
        /// The image.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("Disk image {} is a {kind}; give a regular file or a block device", .path.display())]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Not a block.
    #[error("Disk image {} is {size} bytes long, but a disk has at least one block of {unit} bytes; extend it: truncate -s 10G {}", .path.display(), .path.display())]
    Empty {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// Bytes of a block.
        unit: u64,
    },
    /// Logical block size.
    #[error("Disk {name} can't have logical blocks of {bytes} bytes; give 512 or 4096")]
    BlockSize {
        /// Device name.
        name: String,
        /// As given.
        bytes: u32,
    },
    /// Somebody else uses it.
    #[error("Disk image {} is in use by another virtual machine{}; stop that one, or attach the image read-only to both", .path.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Locked {
        /// The image.
        path: PathBuf,
        /// Who, where the kernel says.
        pid: Option<i32>,
    },
    /// qcow2 opened for writing.
    #[error("Disk image {} is in qcow2 format, which can only be read; attach it read-only, convert it (qemu-img convert -O raw {} disk.raw), or give the format raw if that is what it is", .path.display(), .path.display())]
    Qcow2Writable {
        /// The image.
        path: PathBuf,
    },
    /// Asked for qcow2, but it isn't.
    #[error("Disk image {} is not in qcow2 format, as was asked for; give the format raw", .path.display())]
    NotQcow2 {
        /// The image.
        path: PathBuf,
    },
    /// Begins like an image of another format, and nobody said that it is raw.
    #[error("Disk image {} begins like one in {format} format and would be used as a raw one; {}, or give the format raw if its bytes are the disk's", .path.display(), remedy(.path, .format))]
    FormatNotStated {
        /// The image.
        path: PathBuf,
        /// The format's name.
        format: &'static str,
    },
    /// qcow2 that refers to other files.
    #[error("Disk image {} needs another file ({other}), which is not opened for safety; make it one file: qemu-img convert -O raw {} disk.raw", .path.display(), .path.display())]
    Qcow2References {
        /// The image.
        path: PathBuf,
        /// Name of the other file, as the header has it.
        other: String,
    },
    /// qcow2 with a feature that changes what is read.
    #[error("Disk image {} uses a feature of qcow2 that is not supported ({feature}); make it a raw image: qemu-img convert -O raw {} disk.raw", .path.display(), .path.display())]
    Qcow2Feature {
        /// The image.
        path: PathBuf,
        /// Which, in words.
        feature: String,
    },
    /// Damaged qcow2.
    #[error("Disk image {} is damaged; check it: qemu-img check {}", .path.display(), .path.display())]
    Qcow2Damaged {
        /// The image.
        path: PathBuf,
        /// What the library said.
        #[source]
        source: io::Error,
    },
    /// O_DIRECT isn't possible.
    #[error("Disk image {} can't be used with direct = true: {reason}; leave direct out", .path.display())]
    Direct {
        /// The image.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// Serial number too long, or not printable.
    #[error("Serial number {serial:?} of disk {name} must be 1 to 20 printable ASCII characters")]
    Serial {
        /// Device name.
        name: String,
        /// As given.
        serial: String,
    },
    /// Queue count.
    #[error("Disk {name} can't have {queues} queues; give 1 to {max}")]
    Queues {
        /// Device name.
        name: String,
        /// As given.
        queues: u16,
        /// Most.
        max: u16,
    },
    /// io_uring was demanded and doesn't work.
    #[error(
        "Disk {name} was to use io_uring, which this host refuses; set its engine to auto or synchronous"
    )]
    NoUring {
        /// Device name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Saved state doesn't fit the image.
    #[error("Saved state of disk {name} doesn't fit: {reason}")]
    Restore {
        /// Device name.
        name: String,
        /// Why.
        reason: String,
    },
    /// Anything else the host refused.
    #[error("Disk image {} could not be {what}", .path.display())]
    Host {
        /// The image.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What to do with an image whose format wasn't given.
fn remedy(path: &Path, format: &str) -> String {
    let convert = format!("convert it (qemu-img convert -O raw {} disk.raw)", path.display());
    if format == "qcow2" {
        format!("give the format qcow2 and attach it read-only, {convert}")
    } else {
        convert
    }
}
