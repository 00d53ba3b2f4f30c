//! Why a message can't be sent or taken.

use core::fmt;

use crate::layout::MOST_PARTS;
use crate::part::Part;

/// A message can't be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The receiver has not taken enough yet, or too many messages are outstanding: try again after completions.
    Full,
    /// No parts, or more than [`MOST_PARTS`] (or than the ring has entries).
    Parts {
        /// As given.
        count: usize,
    },
    /// A part is not in the own window.
    Outside(Part),
    /// The peer broke the rules.
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

/// What a peer did that it must not. The connection ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// A part of a message isn't RAM of its sender, nor in another member's window.
    Outside(Part),
    /// Flags that this version doesn't have.
    Flags(u16),
    /// A message with more than [`MOST_PARTS`] parts, or more than the ring holds.
    TooLong,
    /// The first entry of a message is there, and another isn't.
    Torn,
    /// An id that can't be, or differs within a message.
    Id(u32),
    /// A completion of what isn't outstanding.
    NotOutstanding(u32),
    /// The peer says that it took entries which were never sent, or fewer than before.
    Taken {
        /// What it says.
        says: u32,
        /// What it said before.
        before: u32,
        /// What was sent.
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
                "The neighbour says that it took {says} entries, after {before}, and {sent} were sent"
            ),
        }
    }
}

impl core::error::Error for Violation {}
