//! Output of Causeway's programs, and of the kernel that runs them, when one of them fails by itself. Never the
//! emulator's fault.

/// Parts of a line, in lower case. Each shows an own fault.
const SIGNS: [&str; 12] = [
    // Texts of Rust and of the monitor's panic hook (`programs/causeway/src/failure.rs`), in any thread.
    "panicked at ",
    "this is a bug of causeway",
    // Rust's aborts, which run no panic hook.
    "fatal runtime error:",
    "thread panicked while processing panic",
    "panic in a function that cannot unwind",
    "has overflowed its stack",
    "memory allocation of ",
    // The sandbox's signal handler (`base/confinement/src/trap.rs`).
    "the sandbox refused the system call",
    // The kernel: programs took all memory.
    "out of memory: killed process",
    "out of memory and no killable processes",
    "invoked oom-killer",
    "oom-kill:",
];

/// Returns whether a line shows an own fault.
pub fn is_own(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    SIGNS.iter().any(|sign| line.contains(sign))
}

/// Returns the first such line of a text.
pub fn found(text: &str) -> Option<String> {
    text.lines().find(|line| is_own(line)).map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{found, is_own};

    #[test]
    fn panics_in_any_thread_are_own_faults() {
        for line in [
            "thread 'engine' panicked at services/host/src/lib.rs:1:2:",
            "thread 'engine' (618) panicked at services/host/src/lib.rs:1:2:",
            "thread '<unnamed>' panicked at services/host/src/lib.rs:1:2:",
            "thread main panicked at a.rs:1: no",
            "causeway: This is a bug of causeway 0.1.0: thread vcpu0 panicked at services/host/src/lib.rs:1: no",
        ] {
            assert!(is_own(line), "{line}");
        }
    }

    #[test]
    fn aborts_are_own_faults() {
        for line in [
            "memory allocation of 137438953472 bytes failed",
            "fatal runtime error: stack overflow, aborting",
            "fatal runtime error: failed to initiate panic, error 5",
            "thread 'vcpu0' has overflowed its stack",
            "thread panicked while processing panic. aborting.",
            "panic in a function that cannot unwind",
        ] {
            assert!(is_own(line), "{line}");
        }
    }

    #[test]
    fn what_the_kernel_ends_is_an_own_fault() {
        for line in [
            "[   31.1] Out of memory: Killed process 618 (causeway) total-vm:1048576kB, anon-rss:1kB",
            "[   31.1] Memory cgroup out of memory: Killed process 618 (causeway) total-vm:1048576kB",
            "[   31.1] causeway invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE), order=0",
            "[   31.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=causeway,pid=618,uid=0",
        ] {
            assert!(is_own(line), "{line}");
        }
    }

    /// The recognizer and the sandbox's handler share the text.
    #[test]
    fn a_refused_system_call_is_an_own_fault() {
        let text = "causeway: the sandbox refused the system call ";
        assert!(include_str!("../../../base/confinement/src/trap.rs").contains(text));
        assert!(is_own(&format!("{text}ioctl (16) in thread \"control\"; the process ends")));
    }

    #[test]
    fn other_lines_are_no_own_faults() {
        for line in [
            "[  330.127375] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [ibv_ud_pingpong:275]",
            "causeway: Virtual machine a isn't there",
            "LAB-L2 init 3.1",
            "[    0.1] Freeing unused kernel image memory: 2048K",
            "",
        ] {
            assert!(!is_own(line), "{line}");
        }
        assert_eq!(found("a\nb\n"), None);
        assert_eq!(found("a\n  thread 'x' panicked at b:1:2:\n").unwrap(), "thread 'x' panicked at b:1:2:");
    }
}
