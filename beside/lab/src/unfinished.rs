//! The error of a step that came to no end.

use std::time::{Duration, Instant};

/// A step of a scenario that came to no end: its timeout expired, or its host went away.
///
/// Only such an error can have the emulator for its cause ([`crate::emulator_faults`]). A wrong answer, a wrong byte and an exit status are errors of
/// other types, and stay failures whatever else happened.
#[derive(Debug)]
pub struct Unfinished {
    text: String,
    began: Instant,
}

impl Unfinished {
    /// A step whose timeout expires now.
    pub fn expired(timeout: Duration, text: impl Into<String>) -> Self {
        let now = Instant::now();
        Unfinished { text: text.into(), began: now.checked_sub(timeout).unwrap_or(now) }
    }

    /// A step whose host is gone.
    pub fn host_gone(text: impl Into<String>) -> Self {
        Unfinished { text: text.into(), began: Instant::now() }
    }

    /// When the step began.
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
