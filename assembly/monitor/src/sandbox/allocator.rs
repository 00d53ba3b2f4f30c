//! The C library's allocator, so that it gets by with what the filters allow, and grows in few steps.
#![allow(unsafe_code)] // mallopt(3) has no safe wrapper.

/// Lets all threads share one arena: when a thread's own arena shrinks, glibc opens
/// `/proc/sys/vm/overcommit_memory`; and it grows by one page of 4 KiB at a time, with a system call for each. Call it before other threads exist; twice does no harm.
pub(crate) fn use_one_arena() {
    // SAFETY: sets a parameter of the allocator, under its own lock.
    let accepted = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if accepted != 1 {
        tracing::warn!("The C library refused M_ARENA_MAX=1; the sandbox may refuse what its allocator does");
    }
}
