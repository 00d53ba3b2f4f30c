//! Contains panics: only the panicking work ends.
//!
//! ```text
//! contain(work) ── work panics ──▶ panic hook: is_contained()? logs, returns ──▶ Err(Panicked): the caller stops its device
//! any other panic ──────────────▶ panic hook: prints, ends the process
//! ```
//!
//! The hook runs before the stack unwinds and can't know whether the panic will be caught, so [`contain`] marks its
//! thread. Contain code whose failure can be confined to a device: a device's own thread, or a library that reads an
//! image. Don't contain a vCPU or an engine, since other threads would wait for it forever.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// The depth of nested [`contain`] calls on this thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// In builds with debug assertions, for tests: [`contain`] panics on the thread that this variable names. Release
/// builds ignore it.
#[cfg(debug_assertions)]
pub const TEST_PANIC_VARIABLE: &str = "CAUSEWAY_TEST_CONTAINED_PANIC";

/// The message of a panic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Panicked(String);

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Panicked {}

/// Runs `work` on the calling thread, and catches its panic. State that `work` changes may be inconsistent after a
/// panic, so the caller must stop using it.
///
/// # Errors
/// The panic's message.
pub fn contain<R>(work: impl FnOnce() -> R) -> Result<R, Panicked> {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get().saturating_sub(1));
        }
    }
    catch_unwind(AssertUnwindSafe(|| {
        DEPTH.set(DEPTH.get().saturating_add(1));
        let _leave = Leave;
        #[cfg(debug_assertions)]
        panic_for_tests();
        work()
    }))
    .map_err(|panic| Panicked(text(&*panic).to_owned()))
}

/// Returns whether [`contain`] catches a panic of the calling thread. For panic hooks.
pub fn is_contained() -> bool {
    DEPTH.get() > 0
}

/// Returns the message of a panic's payload.
pub fn text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text.as_str(),
        (None, None) => "no message",
    }
}

#[cfg(debug_assertions)]
#[allow(clippy::panic)] // Its purpose.
fn panic_for_tests() {
    let Some(name) = std::env::var_os(TEST_PANIC_VARIABLE) else { return };
    if std::thread::current().name().is_some_and(|own| name == own) {
        panic!("a test asks for it");
    }
}

#[cfg(test)]
mod tests {
    use super::{contain, is_contained};

    #[test]
    fn a_panic_ends_the_work_and_the_thread_goes_on() {
        assert_eq!(contain(|| (is_contained(), 7)), Ok((true, 7)));
        let caught = contain(|| -> u32 { panic!("a {}", "device") });
        assert_eq!(caught.unwrap_err().to_string(), "a device");
        assert!(!is_contained());
    }

    /// A nested caught panic doesn't end the outer containment. Containment doesn't extend to other threads.
    #[test]
    fn containment_nests_and_belongs_to_its_thread() {
        contain(|| {
            contain(|| panic!("inside")).unwrap_err();
            assert!(is_contained());
            assert!(!std::thread::spawn(is_contained).join().unwrap());
        })
        .unwrap();
        assert!(!is_contained());
    }
}
