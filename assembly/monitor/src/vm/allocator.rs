//! The C library's allocator, set for this process.
#![allow(unsafe_code)] // mallopt(3) has no safe wrapper.

/// Lets all threads share one arena. Arenas of threads cost memory for each thread and, when they shrink, glibc reads
/// `/proc/sys/vm/overcommit_memory`, which the sandbox refuses. The data path allocates next to nothing, so the
/// shared lock is not contended.
pub fn use_one_arena() {
    // SAFETY: called before this process has other threads; the parameters are constants of mallopt(3).
    let accepted = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if accepted != 1 {
        tracing::warn!("the C library refused M_ARENA_MAX=1; threads will use more memory");
    }
}
