//! UAR pages (Linux `vmw_pvrdma-abi.h`): three words per page, which only the guest writes.

/// Offset of the queue pair word.
pub const QP: u64 = 0;
/// Offset of the completion queue word.
pub const CQ: u64 = 4;
/// Offset of the shared receive queue word.
pub const SRQ: u64 = 8;

/// The handle in any of the words.
pub const HANDLE: u32 = 0x00FF_FFFF;

/// QP word: sends were posted.
pub const QP_SEND: u32 = 1 << 30;
/// QP word: receives were posted.
pub const QP_RECEIVE: u32 = 1 << 31;
/// CQ word: notify of the next solicited completion.
pub const CQ_ARM_SOLICITED: u32 = 1 << 29;
/// CQ word: notify of the next completion.
pub const CQ_ARM: u32 = 1 << 30;
/// CQ word: an empty queue was polled; requires no action.
pub const CQ_POLL: u32 = 1 << 31;
/// SRQ word: receives were posted.
pub const SRQ_RECEIVE: u32 = 1 << 30;
