//! Panics that end what panicked and nothing else.
//!
//! ```text
//! contain(work) ── work panics ──▶ panic hook: is_contained()? logs, returns ──▶ Err(Panicked): the caller stops its device
//! any other panic ──────────────▶ panic hook: prints, ends the process
//! ```
//!
//! A hook runs before the stack unwinds and can't see who would catch the panic, so [`contain`] marks its thread. Code belongs into it when
//! its failure can be stopped at a device: a device's own thread, a library that reads an image. A vCPU or an engine doesn't: what
//! others wait for is lost with it.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// How many calls of [`contain`] this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// In builds with debug assertions, for tests: [`contain`] panics on a thread whose name this variable holds. Releases don't read it.
#[cfg(debug_assertions)]
pub const TEST_PANIC_VARIABLE: &str = "CAUSEWAY_TEST_CONTAINED_PANIC";

/// What panicked said this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Panicked(String);

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Panicked {}

/// Runs `work` on the calling thread. A panic in it ends `work` only. State that `work` changed may be half changed then: the caller stops
/// using it.
///
/// # Errors
/// What `work` said when it panicked.
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

/// Whether a panic of the calling thread ends in [`contain`]. For panic hooks.
pub fn is_contained() -> bool {
    DEPTH.get() > 0
}

/// What a panic's payload says.
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

    /// What is caught inside doesn't end the containment around it; another thread isn't in it.
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
