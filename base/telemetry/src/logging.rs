//! Set-up of `tracing`: lines on standard error, as text or JSON. Standard output is for the guest's console and for
//! the output of commands.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Logging options.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    /// A filter in `RUST_LOG`'s syntax (`debug`, `monitor=trace,info`). `None`: `RUST_LOG`, else `info`.
    pub filter: Option<String>,
    /// One JSON object per line instead of text.
    pub json: bool,
}

/// Logging can't be set up.
#[derive(Debug)]
pub enum LogError {
    /// The filter is invalid.
    Filter {
        /// The filter as given.
        filter: String,
        /// Its source: a flag or a variable.
        origin: &'static str,
        /// The reason.
        problem: String,
    },
    /// Other code has set up logging in this process.
    Taken,
}

impl std::fmt::Display for LogError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Filter { filter, origin, problem } => write!(
                f,
                "\"{}\" of {origin} is not a log filter ({problem}); write error, warn, info, debug, trace or \
                 off, or TARGET=LEVEL,...",
                filter.escape_debug()
            ),
            Self::Taken => f.write_str("Logging has been set up in this process already"),
        }
    }
}

impl std::error::Error for LogError {}

/// Sets up logging for the whole process, once.
///
/// # Errors
///
/// The filter is invalid, or logging was already set up.
pub fn init(options: &LogOptions) -> Result<(), LogError> {
    let (text, origin) = match (&options.filter, std::env::var("RUST_LOG")) {
        (Some(filter), _) => (filter.clone(), "--log-level"),
        (None, Ok(filter)) => (filter, "RUST_LOG"),
        (None, Err(_)) => (String::new(), "RUST_LOG"),
    };
    let filter = parse(&text).map_err(|problem| LogError::Filter { filter: text, origin, problem })?;
    // A line that can't be written (full disk, closed pipe) is lost. An error message on the same standard error would
    // panic.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    let result = if options.json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init()
    };
    result.map_err(|_| LogError::Taken)
}

fn parse(text: &str) -> Result<EnvFilter, String> {
    // EnvFilter accepts any single word as a target, so a misspelt level would silently disable logging.
    let text = text.trim();
    let bare = text.split(',').map(str::trim).filter(|part| !part.contains(['=', '[', ':', '_']));
    for word in bare.filter(|word| !word.is_empty()) {
        word.parse::<LevelFilter>().map_err(|_| format!("\"{}\" is no level", word.escape_debug()))?;
    }
    EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .parse(text)
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn levels_and_targets_are_filters_and_misspelt_levels_are_not() {
        for text in ["", "debug", "monitor=trace,info", "off", "virtio_devices=debug"] {
            assert!(parse(text).is_ok(), "{text}");
        }
        for text in ["verbose", "info,loud", "monitor=loud"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
