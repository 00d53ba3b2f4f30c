//! Errors of requests.

use std::io;
use std::path::PathBuf;

/// A request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection can't be opened.
    #[error("No vfio-user server answers at {path}; start it, and check who may open the socket")]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The connection is lost, or the server hangs. All later requests fail.
    #[error("The vfio-user server failed during {request}")]
    Lost {
        /// The request.
        request: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The server refused the request. The connection stays open.
    #[error("The vfio-user server refused {request} ({values})")]
    Refused {
        /// The request.
        request: &'static str,
        /// Its values.
        values: String,
        /// The server's error number.
        #[source]
        source: io::Error,
    },
    /// The server's reply is invalid.
    #[error("The vfio-user server answered {request} with nonsense: {what}")]
    Malformed {
        /// The request.
        request: &'static str,
        /// The problem.
        what: &'static str,
    },
    /// The request exceeds a limit that the server negotiated.
    #[error("{what} is more than the vfio-user server takes ({limit})")]
    TooMuch {
        /// The request, with its value.
        what: String,
        /// The limit.
        limit: u64,
    },
}

impl ClientError {
    /// Returns whether the connection is lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Connect { .. })
    }
}
