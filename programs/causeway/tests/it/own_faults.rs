//! The lab recognizes the program's own failures, so that it doesn't classify one as an emulator fault.

use std::process::{Command, Stdio};

fn standard_error(command: &mut Command) -> (Option<i32>, String) {
    let output = command.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Only builds with debug assertions panic on request.
#[cfg(debug_assertions)]
#[test]
fn the_lab_recognizes_a_panic_of_any_thread() {
    for thread in ["vcpu0", "engine", "a thread with spaces"] {
        for backtrace in ["0", "1"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
            command.args(["list"]).env("CAUSEWAY_TEST_PANIC", thread).env("RUST_BACKTRACE", backtrace);
            let (code, text) = standard_error(&mut command);
            assert_eq!(code, Some(101), "{text}");
            let line = lab::own_faults::found(&text).unwrap();
            assert!(line.contains(thread) && line.contains("a test asks for it"), "{line}");
        }
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn a_release_does_not_panic_when_it_is_asked_to() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    let (code, text) = standard_error(command.args(["--version"]).env("CAUSEWAY_TEST_PANIC", "vcpu0"));
    assert_eq!((code, lab::own_faults::found(&text)), (Some(0), None));
}

/// An error sentence, as for a missing VM, isn't a fault of the program.
#[test]
fn the_lab_takes_no_ordinary_error_for_a_panic() {
    let runtime = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_causeway"));
    command.args(["stop", "nobody"]).env("XDG_RUNTIME_DIR", runtime.path());
    let (code, text) = standard_error(&mut command);
    assert_eq!((code, lab::own_faults::found(&text)), (Some(1), None), "{text}");
    assert!(!text.is_empty());
}
