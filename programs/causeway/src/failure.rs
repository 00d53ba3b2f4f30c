//! Error output of the program: one sentence, its causes as a list, and a nonzero exit status.

use std::io::Write as _;
use std::process::ExitCode;

use clap::error::ErrorKind;
use telemetry::guest_log::GuestLog;
use telemetry::{containment, guest_error};

/// Exit status of every failure.
const FAILED: u8 = 1;
/// Exit status after a panic, as Rust's own.
const PANICKED: i32 = 101;

/// Prints an error and its causes to standard error.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let causes: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
    let text = if json {
        serde_json::json!({ "error": error.to_string(), "causes": causes }).to_string()
    } else {
        let mut text = format!("causeway: {error}");
        for cause in causes {
            text.push_str("\n  because: ");
            text.push_str(&cause);
        }
        text
    };
    print_error(&text);
    ExitCode::from(FAILED)
}

/// Prints help or version on request, else the command line's problem in one sentence.
pub fn usage(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Fails only if the output has no reader.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        print_error("causeway: No command was given; causeway --help lists them");
        return ExitCode::from(FAILED);
    }
    print_error(&format!("causeway: {}", sentence(&error.render().to_string())));
    ExitCode::from(FAILED)
}

/// Joins clap's first paragraph and its tips into one line.
fn sentence(rendered: &str) -> String {
    let mut paragraphs = rendered.split("\n\n").map(|paragraph| {
        paragraph.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    });
    let first = paragraphs.next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(&first);
    let mut letters = first.chars();
    let mut sentence: String =
        letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect();
    for tip in paragraphs.filter_map(|paragraph| paragraph.strip_prefix("tip: ").map(str::to_owned)) {
        sentence.push_str("; ");
        sentence.push_str(&tip);
    }
    sentence
}

fn print_error(text: &str) {
    // Nothing can be done if standard error is closed.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Installs the panic hook. It reports a panic as a bug with its location, and ends the whole process: a monitor
/// without one of its threads would hang. A panic inside [`containment::contain`] ends only that work, and its caller
/// stops the device.
pub fn install_panic_hook() {
    // A guest can repeatedly start a device that panics.
    let contained_log = GuestLog::new();
    std::panic::set_hook(Box::new(move |info| {
        let what = containment::text(info.payload());
        let place = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        if containment::is_contained() {
            let version = env!("CARGO_PKG_VERSION");
            guest_error!(
                contained_log,
                "This is a bug of causeway {version}: thread {name} panicked at {place}: {what}; what it served ends, the rest goes on"
            );
            return;
        }
        print_error(&format!(
            "causeway: This is a bug of causeway {}: thread {name} panicked at {place}: {what}",
            env!("CARGO_PKG_VERSION")
        ));
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
            print_error(&std::backtrace::Backtrace::force_capture().to_string());
        }
        std::process::exit(PANICKED);
    }));
}

/// Panics in a thread that `CAUSEWAY_TEST_PANIC` names, to test the program's output. Only in builds with debug
/// assertions, so not in releases.
#[cfg(debug_assertions)]
pub fn panic_for_tests() {
    let Some(name) = std::env::var_os("CAUSEWAY_TEST_PANIC") else { return };
    let name = name.to_string_lossy().into_owned();
    let thread = std::thread::Builder::new().name(name).spawn(|| panic!("a test asks for it"));
    // The hook ends the process.
    if let Ok(thread) = thread {
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::sentence;

    #[test]
    fn what_clap_says_becomes_one_line() {
        let rendered = "error: unexpected argument '--cpu' found\n\n  tip: a similar argument exists: '--cpus'\n\nUsage: x\n";
        assert_eq!(
            sentence(rendered),
            "Unexpected argument '--cpu' found; a similar argument exists: '--cpus'"
        );
    }
}
