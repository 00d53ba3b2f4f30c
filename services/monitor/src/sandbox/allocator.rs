//! Settings of the C library's allocator, so that it needs only allowed system calls, and few.
#![allow(unsafe_code)] // mallopt(3) has no safe wrapper.

/// Makes all threads share one arena. When a thread's own arena shrinks, glibc opens `/proc/sys/vm/overcommit_memory`. Such an arena also
/// grows by 4 KiB at a time, with a system call for each. To be called before other threads exist. May be called twice.
pub(crate) fn use_one_arena() {
    // SAFETY: sets a parameter of the allocator, under its own lock.
    let accepted = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if accepted != 1 {
        tracing::warn!("The C library refused M_ARENA_MAX=1; the sandbox may refuse what its allocator does");
    }
}
