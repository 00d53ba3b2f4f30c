//! Why a command fails, and the error code that the guest reads.

use hca::VerbsError;

use super::shared_region::RegionError;
use crate::page_list::PageListError;
use crate::ring::RingError;

/// Value of register ERR for errors without a number of their own.
pub(super) const REFUSED: u32 = 22;

/// Why a command fails.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The driver has not activated the device, or it has failed.
    #[error("The device takes no commands at present")]
    NotActive,
    /// The slots are not memory, or bus mastering is disabled.
    #[error("The command or response slot can't be accessed")]
    Slot,
    /// An unknown command.
    #[error("There is no command {0}")]
    Unknown(u32),
    /// A value out of range.
    #[error("{what} can't be {value:#x}")]
    Invalid {
        /// Name of the value.
        what: &'static str,
        /// Value as given.
        value: u64,
    },
    /// Objects of different contexts can't be used together.
    #[error("The {what} belongs to another context")]
    Context {
        /// Name of the object.
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
    /// Value of register ERR; never 0.
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

/// Why the device can't report its failure to the guest.
#[derive(Debug, thiserror::Error)]
pub enum FatalError {
    /// The address holds no usable region.
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
