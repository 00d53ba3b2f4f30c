//! Captures the log lines of a piece of code, for tests.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // Test support: a failure ends the test.

use std::io;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Buffer {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Returns the lines that `code` logs on the calling thread. Lines of other threads aren't captured.
pub fn lines_of(code: impl FnOnce()) -> Vec<String> {
    let buffer = Buffer::default();
    let subscriber =
        tracing_subscriber::fmt().with_writer(buffer.clone()).with_ansi(false).without_time().finish();
    tracing::subscriber::with_default(subscriber, code);
    let bytes = buffer.0.lock().unwrap();
    String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
}
