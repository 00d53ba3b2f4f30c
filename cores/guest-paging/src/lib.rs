//! Guest-virtual addresses to guest-physical ones, by a guest's own segments and page tables. No I/O: the caller reads memory.
//!
//! A monitor that carries out an instruction for a vCPU knows registers, and needs pages. The way there:
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
//! # What a walk answers
//! A walk says what the processor would do with the tables as they are now. Where it would raise a fault, the answer is
//! [`WalkError::Fault`], and the caller lets the processor execute the instruction. Where a table isn't in memory that the caller reaches, the
//! answer is [`WalkError::Absent`]. A walk writes nothing: where the processor would set an accessed or dirty bit,
//! [`Translation::flags_are_set`] is false, and a caller that must not skip that lets the processor execute the instruction.
//!
//! Another vCPU may change tables during a walk, as it may during the processor's. Each entry is read once. The translation may be older than a
//! store of that vCPU, which is what a TLB may do as well, until the caller's vCPU executes an instruction that invalidates TLB entries.
//!
//! # Concurrency
//! All types are plain values; a walk takes at most five reads and no locks.
//!
//! Facts: Intel SDM volume 3, chapters "Protected-Mode Memory Management" and "Paging"; AMD APM volume 2, "Page Translation and Protection".

pub mod address;
pub mod segment;
pub mod state;
pub mod walk;

pub use address::{GuestPhysical, GuestVirtual};
pub use segment::{Segment, SegmentFault};
pub use state::{CodeSize, PagingState};
pub use walk::{Access, EntryWidth, PageSize, Tables, Translation, WalkError, walk};
