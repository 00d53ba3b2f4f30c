//! Why a request could not be done.

use std::io;
use std::path::PathBuf;

/// A request could not be done.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Connecting.
    #[error("No vfio-user server answers at {path}; start it, and check who may open the socket")]
    Connect {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The connection is lost, or the server hangs: this client does nothing more.
    #[error("The vfio-user server failed during {request}")]
    Lost {
        /// What was asked.
        request: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The server refused; the connection goes on.
    #[error("The vfio-user server refused {request} ({values})")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// With which values.
        values: String,
        /// Its error number.
        #[source]
        source: io::Error,
    },
    /// The server answered what can't be.
    #[error("The vfio-user server answered {request} with nonsense: {what}")]
    Malformed {
        /// What was asked.
        request: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The caller asked for what the server didn't negotiate.
    #[error("{what} is more than the vfio-user server takes ({limit})")]
    TooMuch {
        /// What was asked, with its value.
        what: String,
        /// The limit.
        limit: u64,
    },
}

impl ClientError {
    /// Whether the connection is lost with it.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Connect { .. })
    }
}
