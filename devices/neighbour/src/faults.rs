//! Why a message can't be posted or received.

use core::fmt;

use crate::layout::MOST_PARTS;
use crate::part::Part;

/// Why a message can't be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The ring is full, or too many messages are outstanding. Retry after completions.
    Full,
    /// The message has no parts, or more than [`MOST_PARTS`] or than the ring has entries.
    Parts {
        /// Number of parts.
        count: usize,
    },
    /// A part isn't in the sender's own window.
    Outside(Part),
    /// The peer violated the protocol.
    Broken(Violation),
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(f, "The ring is full; wait for completions"),
            Self::Parts { count } => {
                write!(
                    f,
                    "A message of {count} parts is not possible; it has 1 to {MOST_PARTS}, and no more than the ring"
                )
            }
            Self::Outside(part) => {
                write!(f, "{:#x} bytes at {:#x} are not in this VM's own window", part.length, part.address)
            }
            Self::Broken(violation) => write!(f, "{violation}"),
        }
    }
}

impl core::error::Error for PostError {}

/// A violation of the protocol by a peer, which ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// A part of a message is neither RAM of its sender nor in another member's window.
    Outside(Part),
    /// The flags are unknown.
    Flags(u16),
    /// A message with more than [`MOST_PARTS`] parts, or more than the ring holds.
    TooLong,
    /// The first entry of a message is valid, and a later one isn't.
    Torn,
    /// The id is out of range, or differs within a message.
    Id(u32),
    /// The completed id isn't outstanding.
    NotOutstanding(u32),
    /// The receiver's count of taken entries goes back, or exceeds the sent ones.
    Taken {
        /// The new count.
        says: u32,
        /// The previous count.
        before: u32,
        /// Number of sent entries.
        sent: u32,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside(part) => {
                write!(
                    f,
                    "The neighbour sent {:#x} bytes at {:#x}, which is not its RAM",
                    part.length, part.address
                )
            }
            Self::Flags(flags) => write!(f, "The neighbour sent an entry with unknown flags {flags:#x}"),
            Self::TooLong => write!(f, "The neighbour sent a message with more than {MOST_PARTS} parts"),
            Self::Torn => write!(f, "The neighbour sent a message without its later parts"),
            Self::Id(id) => write!(f, "The neighbour sent a message with the impossible id {id}"),
            Self::NotOutstanding(id) => {
                write!(f, "The neighbour completed message {id}, which is not outstanding")
            }
            Self::Taken { says, before, sent } => write!(
                f,
                "The neighbour reports {says} consumed entries, after {before}, and {sent} were sent"
            ),
        }
    }
}

impl core::error::Error for Violation {}
