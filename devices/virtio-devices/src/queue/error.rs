//! What a guest can do wrong with a ring.

/// A driver broke the rules of split virtqueues. The device can't trust the ring any more: it stops, with
/// this text as the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The queue isn't enabled.
    #[error("Queue {queue} was used before the driver enabled it")]
    NotReady {
        /// Queue index.
        queue: u16,
    },
    /// A part of the ring lies outside RAM.
    #[error("Queue {queue}: the {part} at {address:#x} lies outside guest RAM")]
    RingOutsideRam {
        /// Queue index.
        queue: u16,
        /// Which part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
    },
    /// The available index jumped by more than the queue holds.
    #[error("Queue {queue}: the available index moved from {from} to {to}, but the queue has {size} entries")]
    AvailableIndex {
        /// Queue index.
        queue: u16,
        /// Position of the device.
        from: u16,
        /// Index that the driver wrote.
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
        /// Entries of the table.
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
    /// Longer than [`super::MAX_SEGMENTS`].
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
        /// Bytes.
        len: u32,
    },
    /// 2.7.4.2: readable buffers come first.
    #[error("Queue {queue}: the chain at descriptor {head} has a readable buffer behind a writable one")]
    Order {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// 2.7.5.2: not more than 2^32 bytes.
    #[error("Queue {queue}: the chain at descriptor {head} holds more than 4 GiB")]
    TooLong {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
    },
    /// An indirect table where none may be.
    #[error("Queue {queue}: the indirect table at descriptor {head} is refused: {reason}")]
    Indirect {
        /// Queue index.
        queue: u16,
        /// Head of the chain.
        head: u16,
        /// What is wrong.
        reason: &'static str,
    },
    /// A chain is shorter than the device's request format asks for.
    #[error("A request ends after {have} of {want} bytes")]
    Short {
        /// Bytes there are.
        have: u64,
        /// Bytes needed.
        want: u64,
    },
    /// Guest memory that was RAM when the chain was checked isn't any more.
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
        /// Its text.
        what: String,
    },
}
