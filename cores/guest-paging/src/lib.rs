//! Translates guest-virtual to guest-physical addresses by a guest's segments and page tables. No I/O: the caller reads memory.
//!
//! A monitor that emulates an instruction of a vCPU has its registers, and needs the pages that it accesses:
//!
//! ```text
//! segment : offset ──Segment::linear──▶ GuestVirtual ──walk──▶ Translation { GuestPhysical, page size, tables }
//!                     base, limit, type                 tables, permissions      │
//!                                                                     pages to pin: the one, and its tables
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`address`] | the two kinds of addresses |
//! | [`state`] | registers that paging and segmentation depend on; code size |
//! | [`segment`] | offsets in segments to linear addresses |
//! | [`mod@walk`] | page walks of 32-bit, PAE, 4-level and 5-level paging |
//!
//! # Results of a walk
//! The result is what the processor would do with the present tables:
//! - If the processor would raise a fault, the result is [`WalkError::Fault`], and the caller lets the processor execute the instruction.
//! - If the caller can't read a table, the result is [`WalkError::Absent`].
//! - A walk writes nothing. If the processor would set an accessed or dirty bit, [`Translation::flags_are_set`] is false. A caller that
//!   must not omit this lets the processor execute the instruction.
//!
//! Another vCPU may change tables during a walk, as during a walk of the processor. Each entry is read once. The translation may be older
//! than a store of that vCPU, like a TLB entry, until the caller's vCPU executes an instruction that invalidates TLB entries.
//!
//! # Concurrency
//! All types are plain values. A walk makes at most five reads, and acquires no locks.
//!
//! Sources: Intel SDM volume 3, chapters "Protected-Mode Memory Management" and "Paging"; AMD APM volume 2, "Page Translation and
//! Protection".

pub mod address;
pub mod segment;
pub mod state;
pub mod walk;

pub use address::{GuestPhysical, GuestVirtual};
pub use segment::{Segment, SegmentFault};
pub use state::{CodeSize, PagingState};
pub use walk::{Access, EntryWidth, PageSize, Tables, Translation, WalkError, walk};
