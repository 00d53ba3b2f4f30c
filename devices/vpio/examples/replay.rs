//! Replays violation files that `causeway run --nic vpio:ADDRESS,violations=FILE` wrote: `cargo run -p vpio --example
//! replay -- FILE ...`.
//!
//! Prints a line per violation. The exit status is 1 if this program decides a violation differently from the monitor
//! that recorded it.

use std::process::ExitCode;

use vpio::violation::{TraceError, decides_as_before, read};

fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// Replays a file. Returns the number of violations, and how many of them this program decides differently.
fn replay(path: &str) -> Result<(usize, usize), Box<dyn std::error::Error>> {
    let violations = read(&std::fs::read_to_string(path)?)?;
    let mut otherwise = 0;
    for violation in &violations {
        let verdict: Result<(), TraceError> = decides_as_before(violation);
        otherwise += usize::from(verdict.is_err());
        println!(
            "{path}: {} of {}, after {} events: {} {}",
            violation.start.device,
            violation.guest,
            violation.told.len(),
            violation.refusal,
            verdict.map_or_else(
                |error| format!("OTHERWISE: {}", chain(&error)),
                |()| "The same again.".to_owned()
            )
        );
    }
    Ok((violations.len(), otherwise))
}

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let (mut all, mut otherwise, mut unread) = (0, 0, 0);
    for file in &files {
        match replay(file) {
            Ok((violations, others)) => {
                all += violations;
                otherwise += others;
            }
            Err(error) => {
                unread += 1;
                eprintln!("{file}: {}", chain(error.as_ref()));
            }
        }
    }
    println!(
        "{all} violations, {otherwise} decided otherwise, {unread} of {} files can't be read",
        files.len()
    );
    if all == 0 || otherwise + unread > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
