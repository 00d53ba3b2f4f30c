//! The error of a step that didn't complete.

use std::time::{Duration, Instant};

/// A step of a scenario that didn't complete: its time-out expired, or its host disappeared.
///
/// Only such an error can be an emulator fault ([`crate::emulator_faults`]). A wrong answer, a wrong byte and an exit status are errors
/// of other types, and always count as failures.
#[derive(Debug)]
pub struct Unfinished {
    text: String,
    began: Instant,
}

impl Unfinished {
    /// Creates the error of a step whose time-out expires now.
    pub fn expired(timeout: Duration, text: impl Into<String>) -> Self {
        let now = Instant::now();
        Unfinished { text: text.into(), began: now.checked_sub(timeout).unwrap_or(now) }
    }

    /// Creates the error of a step whose host is gone.
    pub fn host_gone(text: impl Into<String>) -> Self {
        Unfinished { text: text.into(), began: Instant::now() }
    }

    /// Returns the step's start.
    pub fn began(&self) -> Instant {
        self.began
    }
}

impl std::fmt::Display for Unfinished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Unfinished {}

#[cfg(test)]
mod tests {
    use super::Unfinished;
    use anyhow::Context;
    use std::time::{Duration, Instant};

    #[test]
    fn it_is_found_below_what_was_added_to_it() {
        let before = Instant::now();
        let error: anyhow::Result<()> =
            Err(Unfinished::expired(Duration::from_millis(1), "no line came").into());
        let error = error.context("step").context("scenario").unwrap_err();
        assert!(error.downcast_ref::<Unfinished>().unwrap().began() >= before - Duration::from_millis(1));
        assert_eq!(format!("{error:#}"), "scenario: step: no line came");
    }

    #[test]
    fn an_error_that_quotes_it_is_another() {
        let inner = anyhow::Error::from(Unfinished::host_gone("no line came"));
        assert!(anyhow::anyhow!("5 bytes are wrong: {inner:#}").downcast_ref::<Unfinished>().is_none());
    }
}
