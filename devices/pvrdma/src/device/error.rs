//! Why a command fails, and what the guest is told of it.

use hca::VerbsError;

use super::shared_region::RegionError;
use crate::page_list::PageListError;
use crate::ring::RingError;

/// Register ERR for what needs no number of its own.
pub(super) const REFUSED: u32 = 22;

/// Why a command fails.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The driver has not activated the device, or it has failed.
    #[error("The device takes no commands at present")]
    NotActive,
    /// The slots are not memory, or bus mastering is off.
    #[error("The command or response slot can't be accessed")]
    Slot,
    /// Not a command.
    #[error("There is no command {0}")]
    Unknown(u32),
    /// A value that can't be.
    #[error("{what} can't be {value:#x}")]
    Invalid {
        /// What.
        what: &'static str,
        /// As given.
        value: u64,
    },
    /// Objects of different contexts can't be used together.
    #[error("The {what} belongs to another context")]
    Context {
        /// What.
        what: &'static str,
    },
    /// The verb failed.
    #[error("The verb failed")]
    Verbs(
        #[from]
        #[source]
        VerbsError,
    ),
    /// A ring is unusable.
    #[error("The ring can't be used")]
    Ring(
        #[from]
        #[source]
        RingError,
    ),
    /// The pages of a region are unusable.
    #[error("The region's pages can't be used")]
    Pages(
        #[from]
        #[source]
        PageListError,
    ),
}

impl CommandError {
    /// What register ERR shows; never 0.
    pub(super) fn code(&self) -> u32 {
        match self {
            Self::NotActive => 19,
            Self::Slot | Self::Pages(PageListError::Memory(_)) => 14,
            Self::Unknown(_) => 38,
            Self::Context { .. } => 1,
            Self::Verbs(error) => super::verbs_code(error),
            Self::Invalid { .. } | Self::Ring(_) | Self::Pages(_) => REFUSED,
        }
    }

    pub(super) fn invalid(what: &'static str, value: impl Into<u64>) -> Self {
        Self::Invalid { what, value: value.into() }
    }
}

/// Why a guest can't be told that its device failed.
#[derive(Debug, thiserror::Error)]
pub enum FatalError {
    /// There is no usable region at the address.
    #[error("There is no usable shared region to post a fatal event in")]
    Region(
        #[from]
        #[source]
        RegionError,
    ),
    /// The ring is full or broken.
    #[error("The ring of asynchronous events takes no more; the guest is not listening")]
    Ring,
}
