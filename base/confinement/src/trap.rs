//! Handles a refused system call: prints one line on standard error, runs the process' last action, and ends the
//! process.
#![allow(unsafe_code)] // A signal handler, and what is safe to call in one.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::OnceLock;

/// Exit status of a process that its sandbox ended: 128 + SIGSYS, as if the signal had killed it.
pub const REFUSED_EXIT_CODE: i32 = 128 + libc::SIGSYS;

/// A process' own part of the handling.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    /// The rest of the line after the thread's name: what has ended, and the remedy.
    pub advice: &'static str,
    /// Called between the line and the exit. It must be async-signal-safe and may use only system calls that every
    /// filter permits.
    pub last: fn(),
}

static ENDING: OnceLock<Ending> = OnceLock::new();

/// Installs the handler: a refused system call (SIGSYS) prints the call and the thread, and ends the process with
/// status [`REFUSED_EXIT_CODE`]. The first `ending` of a process stays in effect.
pub fn install(ending: Ending) -> io::Result<()> {
    ENDING.get_or_init(|| ending);
    // SAFETY: all zeroes is a valid sigaction: no flags, empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = refused as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is initialized, and the handler calls async-signal-safe functions only.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    if result == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// A line that is built without allocation.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Line {
    fn push(&mut self, text: &[u8]) {
        for byte in text {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = *byte;
                self.len += 1;
            }
        }
    }

    fn push_number(&mut self, number: u32) {
        let mut digits = [0_u8; 10];
        let mut rest = number;
        let mut first = digits.len();
        loop {
            first -= 1;
            // Below ten, so it fits.
            digits[first] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.push(&digits[first..]);
    }
}

/// Returns the name of an x86-64 system call number. Async-signal-safe.
pub fn name_of(number: u32) -> &'static str {
    usize::try_from(number).ok().and_then(syscalls::Sysno::new).map_or("unknown", |call| call.name())
}

extern "C" fn refused(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    let mut line = Line { bytes: [0; 256], len: 0 };
    line.push(b"causeway: the sandbox refused the system call ");
    // SAFETY: the kernel passes a valid siginfo_t, and that of a SIGSYS has this field.
    let number = unsafe { (*info).si_syscall() }.cast_unsigned();
    line.push(name_of(number).as_bytes());
    line.push(b" (");
    line.push_number(number);
    line.push(b") in thread \"");
    let mut thread = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, NUL included.
    unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
    line.push(thread.split(|byte| *byte == 0).next().unwrap_or_default());
    line.push(b"\"; ");
    // Reads a cell that was filled before the handler was installed: no lock, no allocation.
    let ending = ENDING.get();
    line.push(ending.map_or("", |ending| ending.advice).as_bytes());
    line.push(b"\n");
    // SAFETY: write(2) is async-signal-safe and allowed in every filter; the buffer is ours.
    unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len) };
    if let Some(ending) = ending {
        (ending.last)();
    }
    // SAFETY: _exit(2) is async-signal-safe and allowed in every filter.
    unsafe { libc::_exit(REFUSED_EXIT_CODE) };
}
