//! Where a serial console's bytes go and come from.
use std::io;
use std::path::PathBuf;
use crate::EventSink;

/// A back end, as the VM description names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleBackend {
    /// Standard input and output.
    Stdio,
    /// A pseudo-terminal; optionally with a symbolic link to it.
    Pty {
        /// Symbolic link to create.
        link: Option<PathBuf>,
    },
    /// Output to a file, truncated first; no input.
    File {
        /// Path.
        path: PathBuf,
    },
    /// A Unix stream socket on which this process listens; one client at a time.
    Socket {
        /// Path.
        path: PathBuf,
    },
    /// Nothing.
    Null,
}

/// A console could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The host refused something.
    #[error("The console could not {what}")]
    Host {
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// An open console.
pub struct Console {
    #[expect(dead_code)]
    events: EventSink,
}

impl Console {
    /// Opens the back end. The thread starts when a [`crate::serial::Serial`] takes the console.
    pub fn open(_backend: &ConsoleBackend, events: EventSink) -> Result<Self, ConsoleError> {
        Ok(Self { events })
    }

    /// Path of the pseudo-terminal's device, where there is one.
    pub fn pty_path(&self) -> Option<PathBuf> {
        None
    }
}
