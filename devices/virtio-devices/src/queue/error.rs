//! A guest's errors in using a ring.

/// A driver violated the rules of split virtqueues. The device can't trust the ring any more: it stops, with this text as the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The queue isn't enabled.
    #[error("Queue {queue} was used before the driver enabled it")]
    NotReady {
        /// Queue index.
        queue: u16,
    },
    /// A part of the ring is outside of RAM.
    #[error("Queue {queue}: the {part} at {address:#x} lies outside guest RAM")]
    RingOutsideRam {
        /// Queue index.
        queue: u16,
        /// Name of the part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
    },
    /// The available index advanced by more than the queue's size.
    #[error("Queue {queue}: the available index moved from {from} to {to}, but the queue has {size} entries")]
    AvailableIndex {
        /// Queue index.
        queue: u16,
        /// The device's position.
        from: u16,
        /// The driver's index.
        to: u16,
        /// Queue size.
        size: u16,
    },
    /// More chains are in flight than the queue has descriptors.
    #[error("Queue {queue}: more than {size} chains in flight; a descriptor was made available twice")]
    TooManyInFlight {
        /// Queue index.
        queue: u16,
        /// Queue size.
        size: u16,
    },
    /// A descriptor index is beyond its table.
    #[error("Queue {queue}: descriptor {index} is beyond its table of {table}")]
    DescriptorIndex {
        /// Queue index.
        queue: u16,
        /// Descriptor index.
        index: u16,
        /// Number of entries of the table.
        table: u32,
    },
    /// The chain is longer than its table: it loops.
    #[error("Queue {queue}: the chain at descriptor {head} loops")]
    Loop {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// The chain is longer than [`super::MAX_SEGMENTS`].
    #[error("Queue {queue}: the chain at descriptor {head} has more than {limit} buffers")]
    TooManySegments {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
        /// The limit.
        limit: usize,
    },
    /// A buffer of length zero.
    #[error("Queue {queue}: the chain at descriptor {head} has a buffer of length zero")]
    ZeroLength {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// A buffer isn't in RAM.
    #[error("Queue {queue}: a buffer of {len} bytes at {address:#x} lies outside guest RAM")]
    BufferOutsideRam {
        /// Queue index.
        queue: u16,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        len: u32,
    },
    /// A readable buffer follows a writable one (2.7.4.2).
    #[error("Queue {queue}: the chain at descriptor {head} has a readable buffer behind a writable one")]
    Order {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// The chain has more than 2^32 - 1 bytes (2.7.5.2).
    #[error("Queue {queue}: the chain at descriptor {head} holds more than 4 GiB")]
    TooLong {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// An indirect table that isn't permitted.
    #[error("Queue {queue}: the indirect table at descriptor {head} is refused: {reason}")]
    Indirect {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
        /// The violated rule.
        reason: &'static str,
    },
    /// The chain is shorter than the device's request format.
    #[error("A request ends after {have} of {want} bytes")]
    Short {
        /// Number of bytes in the chain.
        have: u64,
        /// Number of bytes needed.
        want: u64,
    },
    /// Guest memory that was RAM when the chain was validated isn't any more.
    #[error("Guest memory at {address:#x} was removed while a device used it")]
    MemoryGone {
        /// Guest-physical address.
        address: u64,
    },
    /// The virtqueue library refused the operation.
    #[error("Queue {queue}: {what}")]
    Library {
        /// Queue index.
        queue: u16,
        /// The library's error.
        what: String,
    },
}
