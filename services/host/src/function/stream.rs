//! A function's state as a stream to or from its client, for both functions.

use std::io;
use std::sync::LazyLock;

use rustix::io::Errno;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::migration::DeviceState;

use crate::migration::stream::{Reader, Record, StreamError, put};

/// The stream; see the module.
#[derive(Debug)]
pub(super) struct Stream {
    pub state: DeviceState,
    outgoing: Vec<u8>,
    /// Number of its bytes that were read.
    read: usize,
    /// Limit of objects left in the current round.
    pub round_left: usize,
    incoming: Reader,
}

impl Stream {
    /// The stream of a function whose client has just connected.
    pub fn new(state: DeviceState) -> Self {
        Self { state, outgoing: Vec::new(), read: 0, round_left: 0, incoming: Reader::default() }
    }

    /// Appends a record for the client to read.
    pub fn push(&mut self, record: &Record) {
        if self.read == self.outgoing.len() {
            self.outgoing.clear();
            self.read = 0;
        }
        put(record, &mut self.outgoing);
    }

    /// Drops unread bytes.
    pub fn clear(&mut self) {
        self.outgoing.clear();
        self.read = 0;
        self.round_left = 0;
        self.incoming = Reader::default();
    }

    /// Whether everything was read.
    pub fn is_empty(&self) -> bool {
        self.read == self.outgoing.len()
    }

    /// Number of unread bytes.
    pub fn len(&self) -> usize {
        self.outgoing.len() - self.read
    }

    /// The next bytes, at most `most`.
    pub fn next(&mut self, most: usize) -> Vec<u8> {
        let rest = self.outgoing.get(self.read..).unwrap_or_default();
        let bytes = rest.get(..most.min(rest.len())).unwrap_or_default().to_vec();
        self.read += bytes.len();
        bytes
    }

    /// Accepts bytes from the client.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Vec<Record>, StreamError> {
        self.incoming.take(bytes)
    }

    /// Checks that the stream is complete.
    pub fn end(&self) -> Result<(), StreamError> {
        self.incoming.end()
    }
}

/// Logs a failure in words; the client gets an error number.
pub(super) fn failed(
    vm: &str,
    nic: &str,
    what: &str,
    error: &(dyn std::error::Error + 'static),
) -> io::Error {
    static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
    telemetry::guest_warn!(LOG, vm, nic, error, "An RDMA NIC can't {what}");
    Errno::INVAL.into()
}
