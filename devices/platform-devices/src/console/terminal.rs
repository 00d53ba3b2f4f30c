//! Raw mode of the user's terminal, and leaving it whatever happens.
#![allow(unsafe_code)] // Registering an exit handler with the C library.

use std::io;
use std::sync::{Mutex, Once, PoisonError};

use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// Settings to go back to; `None` while the terminal is not ours.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);
static HANDLERS: Once = Once::new();

/// Puts standard input into raw mode: keys go to the guest one by one, Ctrl-C included. Output
/// processing stays on, so that log lines on the same terminal still begin at its left edge. From now
/// on a panic that ends the process or an orderly exit of the process restores the terminal, and [`restore`] does.
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
            // The guest still has the terminal when a device of its own panics.
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

/// Restores the terminal where it was set to raw mode; harmless at any time. The program calls it
/// before it ends in a way that skips exit handlers, and on signals that end it: it is async-signal-safe,
/// as it waits for no lock, allocates nothing and makes one system call.
pub fn restore() {
    // A thread that panics while it holds the lock must not hang the process.
    let original = match ORIGINAL.try_lock() {
        Ok(mut original) => original.take(),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
        Err(std::sync::TryLockError::WouldBlock) => None,
    };
    if let Some(settings) = original {
        // Nothing better can be done when the terminal is gone.
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &settings);
    }
}

/// Whether standard input is a terminal that this process may read now; a background job may not.
pub(super) fn is_ours() -> bool {
    let stdin = rustix::stdio::stdin();
    rustix::termios::isatty(stdin)
        && tcgetpgrp(stdin).is_ok_and(|foreground| foreground == rustix::process::getpgrp())
}
