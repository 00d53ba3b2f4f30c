//! A function's state on its way out or in, whatever function it is.

use std::io;
use std::sync::LazyLock;

use rustix::io::Errno;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::migration::DeviceState;

use crate::migration::stream::{Reader, Record, StreamError, put};

/// See the module.
#[derive(Debug)]
pub(super) struct Stream {
    pub state: DeviceState,
    outgoing: Vec<u8>,
    /// Bytes of it that were read.
    read: usize,
    /// Objects that the round under way still has, at most.
    pub round_left: usize,
    incoming: Reader,
}

impl Stream {
    /// Of a function whose client has just come.
    pub fn new(state: DeviceState) -> Self {
        Self { state, outgoing: Vec::new(), read: 0, round_left: 0, incoming: Reader::default() }
    }

    /// More to hand out.
    pub fn push(&mut self, record: &Record) {
        if self.read == self.outgoing.len() {
            self.outgoing.clear();
            self.read = 0;
        }
        put(record, &mut self.outgoing);
    }

    /// Forgets what wasn't read.
    pub fn clear(&mut self) {
        self.outgoing.clear();
        self.read = 0;
        self.round_left = 0;
        self.incoming = Reader::default();
    }

    /// Whether all was read.
    pub fn is_empty(&self) -> bool {
        self.read == self.outgoing.len()
    }

    /// Bytes that weren't read.
    pub fn len(&self) -> usize {
        self.outgoing.len() - self.read
    }

    /// The next bytes.
    pub fn next(&mut self, most: usize) -> Vec<u8> {
        let rest = self.outgoing.get(self.read..).unwrap_or_default();
        let bytes = rest.get(..most.min(rest.len())).unwrap_or_default().to_vec();
        self.read += bytes.len();
        bytes
    }

    /// Bytes came.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Vec<Record>, StreamError> {
        self.incoming.take(bytes)
    }

    /// All has come.
    pub fn end(&self) -> Result<(), StreamError> {
        self.incoming.end()
    }
}

/// A failure that the log tells of in words; the client gets a number.
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
