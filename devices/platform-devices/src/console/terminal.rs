//! Raw mode of the user's terminal, and its restoration in all cases.
#![allow(unsafe_code)] // Registering an exit handler with the C library.

use std::io;
use std::sync::{Mutex, Once, PoisonError};

use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// Settings to restore; `None` while the terminal isn't in raw mode.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);
static HANDLERS: Once = Once::new();

/// Puts standard input into raw mode: each key goes to the guest, Ctrl-C included. Output processing stays on, so that
/// log lines on the same terminal start at its left edge. A panic that ends the process, its orderly exit, and
/// [`restore`] restore the terminal.
pub(super) fn make_raw() -> io::Result<()> {
    let stdin = rustix::stdio::stdin();
    let mut original = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner);
    if original.is_some() {
        return Ok(());
    }
    let settings = tcgetattr(stdin)?;
    let mut raw = settings.clone();
    raw.make_raw();
    raw.output_modes |= OutputModes::OPOST | OutputModes::ONLCR;
    tcsetattr(stdin, OptionalActions::Now, &raw)?;
    *original = Some(settings);
    drop(original);
    HANDLERS.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // The guest keeps the terminal after a contained panic of one of its devices.
            if !telemetry::containment::is_contained() {
                restore();
            }
            next(info);
        }));
        // SAFETY: `at_exit` is a plain function that neither unwinds nor runs after this process.
        unsafe { libc::atexit(at_exit) };
    });
    Ok(())
}

extern "C" fn at_exit() {
    restore();
}

/// Restores the terminal if it is in raw mode; harmless at any time. The program calls it before an end that skips exit
/// handlers, and on signals that end it. It is async-signal-safe: it waits for no lock, allocates nothing and makes one
/// system call.
pub fn restore() {
    // A thread that panics while it holds the lock must not hang the process.
    let original = match ORIGINAL.try_lock() {
        Ok(mut original) => original.take(),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
        Err(std::sync::TryLockError::WouldBlock) => None,
    };
    if let Some(settings) = original {
        // Nothing can be done if the terminal is gone.
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &settings);
    }
}

/// Returns whether standard input is a terminal that this process may read now. A background job may not.
pub(super) fn is_ours() -> bool {
    let stdin = rustix::stdio::stdin();
    rustix::termios::isatty(stdin)
        && tcgetpgrp(stdin).is_ok_and(|foreground| foreground == rustix::process::getpgrp())
}
