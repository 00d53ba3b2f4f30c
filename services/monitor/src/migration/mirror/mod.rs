//! Copying disks that only the source has: their content goes to the destination's images while the guest runs.
//!
//! ```text
//! source                                              destination
//!   │── Mirror: names and sizes of disks ───────────────▶│ checks its disks, locks and marks their images
//!   │◀── Mirror: those that are shared | Refused ────────│
//!   │ logs the guest's writes from here on               │
//!   │══ Block: contents, or zeroes; every stream ═══════▶│ writes them into the images
//!   │── Settle (each stream) ───────────────────────────▶│ waits for all streams', makes the images durable
//!   │◀── Settled ────────────────────────────────────────│ end of a round
//!   │══ Block: what was written meanwhile ══════════════▶│ …
//!   │ until little is left; then memory, and with each of its rounds what was written to disks
//!   │ stops the guest                                    │
//!   │══ Pages, Block: the rest ── Settle ───────────────▶│
//!   │◀── Settled ────────────────────────────────────────│
//!   │── State ── End ───────────────────────────────────▶│ refuses an incomplete disk
//! ```
//!
//! Until the destination runs the guest, it holds locks on its images, which are marked as incomplete. The source's images stay as they
//! are. A round ends when it is durable at the destination. So its duration includes the speed of that host's storage, and little is left
//! for the blackout.
//!
//! Disks are distributed over the streams in pieces of 1 MiB, always the same piece to the same stream, so that old content never
//! overtakes new content. [`source`] is the source's side, [`destination`] the destination's; neither uses sockets.

pub mod destination;
pub mod message;
pub mod source;

/// The first version of the protocol that copies disks.
pub const MIRROR_MIN_VERSION: u16 = 4;
