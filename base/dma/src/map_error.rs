//! Why guest memory, or the bitmap of its pages, can't be mapped.

/// Why a range of guest memory can't be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The range is empty, unaligned, or wraps around.
    #[error("Guest memory at {address:#x} with {size:#x} bytes is not a range of whole pages")]
    Shape {
        /// Guest address.
        address: u64,
        /// Size in bytes.
        size: u64,
    },
    /// It overlaps a range that is mapped already.
    #[error(
        "Guest memory at {address:#x} with {size:#x} bytes overlaps what is mapped at {other:#x}; unmap that first"
    )]
    Overlap {
        /// Guest address.
        address: u64,
        /// Size in bytes.
        size: u64,
        /// Guest address of the overlapped range.
        other: u64,
    },
    /// The file could shrink later, and an access would then kill this process by SIGBUS.
    #[error(
        "The memory file for {address:#x} is not sealed against shrinking; guest RAM must be a memfd with F_SEAL_SHRINK"
    )]
    NotSealed {
        /// Guest address.
        address: u64,
    },
    /// The file is shorter than the range.
    #[error("The memory file for {address:#x} has {len:#x} bytes, the range needs {needed:#x}")]
    TooShort {
        /// Guest address.
        address: u64,
        /// File length.
        len: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The kernel refused.
    #[error("Guest memory at {address:#x} with {size:#x} bytes can't be mapped")]
    Kernel {
        /// Guest address.
        address: u64,
        /// Size in bytes.
        size: u64,
        /// The kernel's error.
        #[source]
        source: rustix::io::Errno,
    },
}
