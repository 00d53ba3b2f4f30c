//! Disks that only the source has: their content is copied to the destination's images while the guest runs.
//!
//! ```text
//! source                                               destination
//!   │── Mirror: names and sizes of disks ───────────────▶│ has it such disks? takes and marks their images
//!   │◀── Mirror: those that are shared | Refused ─────────│
//!   │ notes from here on what the guest writes           │
//!   │══ Block: contents, or zeroes; every stream ═══════▶│ writes them into the images
//!   │── Settle (each stream) ───────────────────────────▶│ waits for all streams', makes the images durable
//!   │◀── Settled ─────────────────────────────────────────│ one round is there
//!   │══ Block: what was written meanwhile ═══════════════▶│ …
//!   │ until little is left; then memory, and each of its rounds with what was written to disks
//!   │ stops the guest                                    │
//!   │══ Pages, Block: the rest ── Settle ───────────────▶│
//!   │◀── Settled ─────────────────────────────────────────│
//!   │── State ── End ────────────────────────────────────▶│ refuses a disk that isn't whole
//! ```
//!
//! Until the destination runs the guest its images are marked as incomplete and locked by it; the source's are as ever. A round is over when it is
//! durable at the destination, so that its time says how fast that host's storage is, too, and little is left for the pause.
//!
//! A disk goes through the streams by pieces of 1 MiB, always the same piece by the same stream, so that an old content never overtakes a new one.
//! [`leaving`] is the source's side, [`arriving`] the destination's; neither knows of sockets.

pub mod arriving;
pub mod leaving;
pub mod message;

/// The first version of the protocol that knows it.
pub const SINCE: u16 = 4;
