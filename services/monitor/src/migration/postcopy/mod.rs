//! Post-copy: the guest runs at the destination before all of its memory is present there.
//!
//! ```text
//! source                                              destination
//!   │── Postcopy ────────────────────────────────────────▶│ checks for a userfaultfd, RAM in small pages, and its daemon's support
//!   │◀────────────────────────────── Accepted | Refused ──│
//!   │══ Pages: rounds, if any, every stream ═════════════▶│ the guest runs at the source
//!   │ stops the guest, unlocks its disks                  │
//!   │── Missing: not-present pages ──────────────────────▶│
//!   │── State ── End (each stream) ──────────────────────▶│ removes these pages from RAM, registers it for faults
//!   │══ Pages: pushed, third stream on ══════════════════▶│   from here on, in any order
//!   │◀── Want: requested pages, second stream ────────────│
//!   │══ Pages: these, second stream ═════════════════════▶│
//!   │◀──────────────────────────────────────────── Ready ─│ restores, locks the disks
//!   │── Go ──────────────────────────────────────────────▶│ runs the guest
//!   │◀────────────────────────────────────────── Running ─│
//!   │══ Pages, Want, Pages ══════════════════════════════▶│ the guest runs at the destination
//!   │◀── Complete, second stream ─────────────────────────│ all pages are present: an ordinary VM
//!   ends
//! ```
//!
//! Until `Go` a failure is the same as without post-copy: the source has every page, and resumes the guest. Afterwards neither side has
//! the whole VM. **If either side, or the connection, is lost before `Complete`, the VM is lost.** Both sides report it.
//!
//! Each page is sent once. The guest is stopped at the source, so its pages don't change there. A received page belongs to the guest, so
//! no later copy may overwrite it. [`outgoing::Outgoing`] and [`incoming::Incoming`] hold the page states, without sockets or threads;
//! [`serving`] and [`fetching`] are the threads that use them.
//!
//! A not-present page is a hole: this process's threads block on it in the kernel ([`machine::memory::postcopy`]). The host daemon, which
//! also maps the RAM of VMs with RDMA NICs, must not block. [`presence`] shows it which pages are present, and receives its requests for
//! others.

pub mod fetching;
pub mod incoming;
pub mod message;
pub mod outgoing;
pub mod presence;
pub mod serving;
pub mod set;
pub mod source;

/// The first version of the protocol with post-copy.
pub const POSTCOPY_MIN_VERSION: u16 = 3;
/// Least number of streams: for control frames, for requested pages, and for pushed pages.
pub const POSTCOPY_MIN_STREAMS: usize = 3;
