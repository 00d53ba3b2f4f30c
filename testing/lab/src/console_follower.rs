//! Timestamps the lines of a host's console, which the emulator writes to a file.

use crate::transcript::Transcript;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(200);

struct Source {
    file: Mutex<File>,
    lines: Transcript,
}

impl Source {
    fn catch_up(&self) {
        let mut bytes = Vec::new();
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // Bytes that were read before an error count.
        let _ = file.read_to_end(&mut bytes);
        self.lines.push(&bytes);
    }
}

/// Follows a console's file until it is dropped.
pub struct ConsoleFollower(Option<Arc<Source>>);

impl ConsoleFollower {
    /// Existing lines get the current time. A file that can't be opened has no lines.
    pub fn start(path: &Path) -> Self {
        let Ok(file) = File::open(path) else { return ConsoleFollower(None) };
        let source = Arc::new(Source { file: Mutex::new(file), lines: Transcript::new("host console") });
        source.catch_up();
        let weak = Arc::downgrade(&source);
        std::thread::spawn(move || {
            while let Some(source) = weak.upgrade() {
                source.catch_up();
                drop(source);
                std::thread::sleep(INTERVAL);
            }
        });
        ConsoleFollower(Some(source))
    }

    /// Returns all lines so far.
    pub fn lines(&self) -> Option<&Transcript> {
        let source = self.0.as_ref()?;
        source.catch_up();
        Some(&source.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::ConsoleFollower;
    use std::io::Write as _;
    use std::time::{Duration, Instant};

    #[test]
    fn lines_have_the_time_at_which_they_came() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"before\n").unwrap();
        let follower = ConsoleFollower::start(file.path());
        std::thread::sleep(Duration::from_millis(5));
        let step = Instant::now();
        file.write_all(b"within\nunfinished").unwrap();
        let lines = follower.lines().unwrap();
        assert_eq!(lines.lines_from(0), ["before", "within"]);
        assert_eq!(lines.lines_since(step), ["within"]);
        assert!(ConsoleFollower::start(std::path::Path::new("/nonexistent/console")).lines().is_none());
    }
}
