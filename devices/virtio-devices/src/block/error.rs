//! Why a disk can't be attached.

use std::io;
use std::path::{Path, PathBuf};

/// Why a disk image can't be used. Never caused by the guest.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The file doesn't exist.
    #[error("Disk image {} does not exist; check the path, or create it: truncate -s 10G {}", .path.display(), .path.display())]
    Missing {
        /// Path of the image.
        path: PathBuf,
    },
    /// A migration didn't fill it completely.
    #[error("Disk image {} is incomplete: a migration that was to fill it has not ended; move the VM again with --mirror, or use another image", .path.display())]
    Incomplete {
        /// Path of the image.
        path: PathBuf,
    },
    /// No permission.
    #[error("Disk image {} can't be opened for {access}: permission denied; change its permissions{}", .path.display(), if *.access == "reading" { "" } else { " or attach it read-only" })]
    Permission {
        /// Path of the image.
        path: PathBuf,
        /// "reading" or "reading and writing".
        access: &'static str,
    },
    /// On a read-only file system.
    #[error("Disk image {} lies on a read-only file system; attach it read-only", .path.display())]
    ReadOnlyFileSystem {
        /// Path of the image.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("Disk image {} is a {kind}; give a regular file or a block device", .path.display())]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// Kind of file.
        kind: &'static str,
    },
    /// Smaller than a block.
    #[error("Disk image {} is {size} bytes long, but a disk has at least one block of {unit} bytes; extend it: truncate -s 10G {}", .path.display(), .path.display())]
    Empty {
        /// Path of the image.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
        /// Size of a block, bytes.
        unit: u64,
    },
    /// Invalid logical block size.
    #[error("Disk {name} can't have logical blocks of {bytes} bytes; give 512 or 4096")]
    BlockSize {
        /// Device name.
        name: String,
        /// As given.
        bytes: u32,
    },
    /// Another process uses the image.
    #[error("Disk image {} is in use by another virtual machine{}; stop that one, or attach the image read-only to both", .path.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Locked {
        /// Path of the image.
        path: PathBuf,
        /// Its process identifier, if the kernel reports it.
        pid: Option<i32>,
    },
    /// qcow2 opened for writing.
    #[error("Disk image {} is in qcow2 format, which can only be read; attach it read-only, convert it (qemu-img convert -O raw {} disk.raw), or give the format raw if that is what it is", .path.display(), .path.display())]
    Qcow2Writable {
        /// Path of the image.
        path: PathBuf,
    },
    /// Configured as qcow2, but isn't.
    #[error("Disk image {} is not in qcow2 format, as was asked for; give the format raw", .path.display())]
    NotQcow2 {
        /// Path of the image.
        path: PathBuf,
    },
    /// It has another format's signature, and no format is configured.
    #[error("Disk image {} begins like one in {format} format and would be used as a raw one; {}, or give the format raw if its bytes are the disk's", .path.display(), remedy(.path, .format))]
    FormatNotStated {
        /// Path of the image.
        path: PathBuf,
        /// The format's name.
        format: &'static str,
    },
    /// A qcow2 image that refers to other files.
    #[error("Disk image {} needs another file ({other}), which is not opened for safety; make it one file: qemu-img convert -O raw {} disk.raw", .path.display(), .path.display())]
    Qcow2References {
        /// Path of the image.
        path: PathBuf,
        /// Name of the other file in the header.
        other: String,
    },
    /// A qcow2 image with a feature that changes what is read.
    #[error("Disk image {} uses a feature of qcow2 that is not supported ({feature}); make it a raw image: qemu-img convert -O raw {} disk.raw", .path.display(), .path.display())]
    Qcow2Feature {
        /// Path of the image.
        path: PathBuf,
        /// Name of the feature.
        feature: String,
    },
    /// Damaged qcow2.
    #[error("Disk image {} is damaged; check it: qemu-img check {}", .path.display(), .path.display())]
    Qcow2Damaged {
        /// Path of the image.
        path: PathBuf,
        /// The library's error.
        #[source]
        source: io::Error,
    },
    /// `O_DIRECT` isn't possible.
    #[error("Disk image {} can't be used with direct = true: {reason}; leave direct out", .path.display())]
    Direct {
        /// Path of the image.
        path: PathBuf,
        /// The reason.
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
    /// Invalid number of queues.
    #[error("Disk {name} can't have {queues} queues; give 1 to {max}")]
    Queues {
        /// Device name.
        name: String,
        /// As given.
        queues: u16,
        /// Upper bound.
        max: u16,
    },
    /// io_uring is configured and doesn't work.
    #[error(
        "Disk {name} was to use io_uring, which this host refuses; set its engine to auto or synchronous"
    )]
    NoUring {
        /// Device name.
        name: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The saved state doesn't fit the image.
    #[error("Saved state of disk {name} doesn't fit: {reason}")]
    Restore {
        /// Device name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// Another error of the host.
    #[error("Disk image {} could not be {what}", .path.display())]
    Host {
        /// Path of the image.
        path: PathBuf,
        /// The failed operation.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// Advice for an image whose format isn't configured.
fn remedy(path: &Path, format: &str) -> String {
    let convert = format!("convert it (qemu-img convert -O raw {} disk.raw)", path.display());
    if format == "qcow2" {
        format!("give the format qcow2 and attach it read-only, {convert}")
    } else {
        convert
    }
}
