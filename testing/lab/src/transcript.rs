//! The output of a process or a console so far, line by line with times, and waits for further lines.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Limit of stored lines; beyond it the older half is dropped.
const KEPT_LINES: usize = 200_000;

#[derive(Debug, Default)]
struct Inside {
    lines: Vec<(Duration, String)>,
    partial: Vec<u8>,
    dropped: usize,
    ended: bool,
}

/// A growing text, shared between its writer and waiting readers.
#[derive(Debug, Clone)]
pub struct Transcript {
    name: Arc<str>,
    start: Instant,
    inside: Arc<(Mutex<Inside>, Condvar)>,
}

/// The outcome of a wait.
#[derive(Debug, Clone, PartialEq)]
pub enum Waited {
    /// The line and its time.
    Line(String, Duration),
    /// The writer ended first.
    Ended,
    /// The time-out expired.
    Timeout,
}

impl Transcript {
    /// Creates an empty transcript.
    pub fn new(name: &str) -> Self {
        Transcript { name: name.into(), start: Instant::now(), inside: Arc::default() }
    }

    /// Returns the transcript's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends bytes.
    pub fn push(&self, bytes: &[u8]) {
        let now = self.start.elapsed();
        let mut inside = self.lock();
        inside.partial.extend(bytes);
        while let Some(end) = inside.partial.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = inside.partial.drain(..=end).collect();
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
            inside.lines.push((now, text));
        }
        if inside.lines.len() > KEPT_LINES {
            inside.lines.drain(..KEPT_LINES / 2);
            inside.dropped += KEPT_LINES / 2;
        }
        self.inside.1.notify_all();
    }

    /// Marks the end of the text.
    pub fn end(&self) {
        self.lock().ended = true;
        self.inside.1.notify_all();
    }

    /// Returns the time since the last bytes; `None` after the end.
    pub fn silent_for(&self) -> Option<Duration> {
        let inside = self.lock();
        let last = inside.lines.last().map_or(Duration::ZERO, |line| line.0);
        (!inside.ended).then(|| self.start.elapsed().saturating_sub(last))
    }

    /// Describes the last output and its age, which distinguishes a hang from slowness.
    pub fn last_words(&self) -> String {
        let inside = self.lock();
        let partial = String::from_utf8_lossy(&inside.partial);
        match inside.lines.last() {
            // The time of an unfinished line is unknown.
            _ if !partial.trim().is_empty() => format!("it stopped within the line {:?}", partial.trim()),
            Some((when, line)) => {
                let ago = self.start.elapsed().saturating_sub(*when).as_secs_f64();
                format!("its last line came {ago:.0} s before: {:?}", line.trim())
            }
            None => "it had said nothing at all".to_owned(),
        }
    }

    /// Returns the number of lines: a position to wait from.
    pub fn position(&self) -> usize {
        let inside = self.lock();
        inside.dropped + inside.lines.len()
    }

    /// Returns the lines at or after a position.
    pub fn lines_from(&self, from: usize) -> Vec<String> {
        let inside = self.lock();
        let first = from.saturating_sub(inside.dropped);
        inside.lines.iter().skip(first).map(|line| line.1.clone()).collect()
    }

    /// Returns the lines at or after a time.
    pub fn lines_since(&self, time: Instant) -> Vec<String> {
        let from = time.saturating_duration_since(self.start);
        self.lock().lines.iter().filter(|line| line.0 >= from).map(|line| line.1.clone()).collect()
    }

    /// Waits for a line, at or after `from`, that contains `what`. An unfinished last line doesn't count.
    pub fn wait_for(&self, what: &str, from: usize, timeout: Duration) -> Waited {
        let until = Instant::now() + timeout;
        let mut seen = from;
        let mut inside = self.lock();
        loop {
            let first = seen.saturating_sub(inside.dropped);
            if let Some((when, line)) = inside.lines.iter().skip(first).find(|l| l.1.contains(what)) {
                return Waited::Line(line.clone(), *when);
            }
            seen = inside.dropped + inside.lines.len();
            if inside.ended {
                return Waited::Ended;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return Waited::Timeout };
            inside = self.inside.1.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns all lines that contain `what`, with their times.
    pub fn find(&self, what: &str) -> Vec<(Duration, String)> {
        self.lock().lines.iter().filter(|l| l.1.contains(what)).cloned().collect()
    }

    /// Returns the whole text.
    pub fn text(&self) -> String {
        let inside = self.lock();
        let mut text: String = inside.lines.iter().map(|l| format!("{}\n", l.1)).collect();
        text.push_str(&String::from_utf8_lossy(&inside.partial));
        text
    }

    /// Returns the last lines under a heading.
    pub fn tail(&self, lines: usize) -> String {
        let inside = self.lock();
        let skip = inside.lines.len().saturating_sub(lines);
        let mut text = format!("--- {} (last {} lines) ---\n", self.name, inside.lines.len() - skip);
        for (when, line) in &inside.lines[skip..] {
            text.push_str(&format!("{:8.2}  {line}\n", when.as_secs_f64()));
        }
        if !inside.partial.is_empty() {
            text.push_str(&format!("          {}\n", String::from_utf8_lossy(&inside.partial)));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_from_pieces_and_found() {
        let t = Transcript::new("x");
        t.push(b"LAB-L2 in");
        t.push(b"it 1.5\r\nnext");
        assert!(
            matches!(t.wait_for("init", 0, Duration::ZERO), Waited::Line(l, _) if l == "LAB-L2 init 1.5")
        );
        assert_eq!(t.wait_for("next", 0, Duration::ZERO), Waited::Timeout);
        assert_eq!(t.wait_for("init", t.position(), Duration::ZERO), Waited::Timeout);
        t.end();
        assert_eq!(t.wait_for("never", 0, Duration::from_secs(9)), Waited::Ended);
        assert!(t.tail(5).contains("LAB-L2 init 1.5"));
    }

    #[test]
    fn what_came_last_is_told() {
        let t = Transcript::new("x");
        assert!(t.last_words().contains("nothing"));
        t.push(b"LAB-L2 init 1.5\r\n");
        let words = t.last_words();
        assert!(words.contains("0 s before") && words.contains("\"LAB-L2 init 1.5\""), "{words}");
        t.push(b"[    2.0] half a l");
        assert!(t.last_words().contains("half a l"));
    }

    #[test]
    fn lines_before_a_time_are_left_out() {
        let t = Transcript::new("x");
        t.push(b"before\n");
        std::thread::sleep(Duration::from_millis(2));
        let time = Instant::now();
        t.push(b"after\n");
        assert_eq!(t.lines_since(time), ["after"]);
        assert_eq!(t.lines_since(t.start), ["before", "after"]);
    }

    #[test]
    fn a_waiter_is_woken() {
        let t = Transcript::new("x");
        let other = t.clone();
        let writer = std::thread::spawn(move || other.push(b"hello\n"));
        assert!(matches!(t.wait_for("hello", 0, Duration::from_secs(20)), Waited::Line(..)));
        writer.join().unwrap();
    }
}
