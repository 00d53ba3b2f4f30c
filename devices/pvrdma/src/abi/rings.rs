//! Ring state and event elements (Linux `pvrdma_ring.h`, `pvrdma_dev_api.h`).

/// Offsets in a ring's first page.
pub mod state {
    /// Producer index of the first pair: the send queue's, written by the guest.
    pub const TX_TAIL: u64 = 0;
    /// Consumer index of the first pair: the send queue's, written by the device.
    pub const TX_HEAD: u64 = 4;
    /// Producer index of the second pair: a receive queue's (written by the guest), a completion or event queue's (written by the device).
    pub const RX_TAIL: u64 = 8;
    /// Consumer index of the second pair.
    pub const RX_HEAD: u64 = 12;
}

/// Pages that the driver allocates for an event ring, with the page for the indices. Only the first two are used.
pub const EVENT_RING_PAGES: u32 = 4;
/// Slots of the asynchronous event ring. The driver computes 1536 elements, but its index masks require a power of two and so leave 512.
pub const ASYNC_SLOTS: u32 = 512;
/// Bytes of an asynchronous event: type, then object.
pub const ASYNC_ELEMENT: u64 = 8;
/// Slots of the completion notification ring; as above, of 3072 elements 1024 are left.
pub const COMPLETION_SLOTS: u32 = 1024;
/// Bytes of a completion notification: the completion queue's handle.
pub const COMPLETION_ELEMENT: u64 = 4;

/// Types of asynchronous events.
pub mod event {
    /// Completion queue error.
    pub const CQ_ERROR: u32 = 0;
    /// Queue pair failed.
    pub const QP_FATAL: u32 = 1;
    /// An invalid request arrived.
    pub const QP_REQUEST_ERROR: u32 = 2;
    /// A request without permission arrived.
    pub const QP_ACCESS_ERROR: u32 = 3;
    /// Communication established.
    pub const COMMUNICATION_ESTABLISHED: u32 = 4;
    /// Send queue drained.
    pub const SQ_DRAINED: u32 = 5;
    /// Device failed.
    pub const DEVICE_FATAL: u32 = 8;
    /// Port came up.
    pub const PORT_ACTIVE: u32 = 9;
    /// Port went down.
    pub const PORT_ERROR: u32 = 10;
    /// Shared receive queue failed.
    pub const SRQ_ERROR: u32 = 14;
    /// Shared receive queue fell below its limit.
    pub const SRQ_LIMIT_REACHED: u32 = 15;
    /// The last receive of a shared receive queue's queue pair was consumed.
    pub const QP_LAST_WQE_REACHED: u32 = 16;
}
