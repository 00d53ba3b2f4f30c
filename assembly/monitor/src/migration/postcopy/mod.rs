//! Post-copy: the guest runs at the destination before all of its memory is there.
//!
//! ```text
//! source                                               destination
//!   │── Postcopy ────────────────────────────────────────▶│ has it a userfaultfd, RAM in small pages, and has its daemon, if it has one, this ABI?
//!   │◀────────────────────────────── Accepted | Refused ──│
//!   │══ Pages: rounds, if any, every stream ═════════════▶│ the guest runs at the source
//!   │ stops the guest, gives up its disks                 │
//!   │── Missing: which pages are still here ─────────────▶│
//!   │── State ── End (each stream) ──────────────────────▶│ takes these pages out of RAM, watches it for faults
//!   │══ Pages: pushed, third stream on ══════════════════▶│   from here on, in any order
//!   │◀── Want: pages that are waited for, second stream ──│
//!   │══ Pages: these, second stream ═════════════════════▶│
//!   │◀──────────────────────────────────────────── Ready ─│ restores, takes the disks
//!   │── Go ──────────────────────────────────────────────▶│ runs the guest
//!   │◀────────────────────────────────────────── Running ─│
//!   │══ Pages, Want, Pages ══════════════════════════════▶│ the guest runs at the destination
//!   │◀── Complete, second stream ─────────────────────────│ all are there: an ordinary VM
//!   ends
//! ```
//!
//! Until `Go` all is as without: the source has every page and goes on where anything fails. Afterwards neither side has the whole
//! VM: **if one of them, or what is between them, is lost before `Complete`, the VM is lost.** Both say so.
//!
//! Each page goes once: the guest stands still at the source, so that no page changes there, and a page that has come is the guest's,
//! so that none may come again. Which pages are where is known by [`outgoing::Outgoing`] and [`incoming::Incoming`], which have neither
//! sockets nor threads; [`serving`] and [`fetching`] are the threads around them.
//!
//! A page that is missing is a hole: this process's threads wait for it in the kernel ([`machine::memory::arriving`]). The host's daemon, which maps
//! the RAM of VMs with RDMA NICs as well, isn't to wait: [`presence`] tells it which pages are here, and takes its wishes for others.

pub mod departing;
pub mod fetching;
pub mod incoming;
pub mod message;
pub mod outgoing;
pub mod presence;
pub mod serving;
pub mod set;

/// The first version of the protocol that knows it.
pub const SINCE: u16 = 3;
/// Streams that it takes: what is said, pages that are waited for, and all other pages.
pub const LEAST_STREAMS: usize = 3;
