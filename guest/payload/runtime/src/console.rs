//! Console output. One call's output is written as a unit, so that lines of several vCPUs don't mix.

use core::fmt::{self, Write};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, Ordering};

/// Locked while one vCPU prints.
static PRINTING: AtomicBool = AtomicBool::new(false);

/// Size of the output buffer in bytes.
const PIECE: usize = 256;

struct Console {
    piece: [u8; PIECE],
    filled: usize,
}

impl Console {
    fn flush(&mut self) {
        if let Some(bytes) = self.piece.get(..self.filled)
            && !bytes.is_empty()
        {
            crate::ports::write_console(bytes);
        }
        self.filled = 0;
    }
}

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.filled == PIECE {
                self.flush();
            }
            if let Some(slot) = self.piece.get_mut(self.filled) {
                *slot = byte;
                self.filled += 1;
            }
        }
        Ok(())
    }
}

/// Prints; used by the macros.
#[doc(hidden)]
pub fn print(arguments: fmt::Arguments<'_>) {
    while PRINTING.swap(true, Ordering::Acquire) {
        spin_loop();
    }
    print_now(arguments);
    PRINTING.store(false, Ordering::Release);
}

/// Prints without the lock: a panic may happen while a line is being printed, and must not wait for it.
#[doc(hidden)]
pub fn print_now(arguments: fmt::Arguments<'_>) {
    let mut console = Console { piece: [0; PIECE], filled: 0 };
    // Writing to the console can't fail.
    let _ = console.write_fmt(arguments);
    console.flush();
}

/// Prints to the console.
#[macro_export]
macro_rules! print {
    ($($argument:tt)*) => { $crate::console::print(::core::format_args!($($argument)*)) };
}

/// Prints a line to the console.
#[macro_export]
macro_rules! println {
    () => { $crate::print!("\n") };
    ($($argument:tt)*) => { $crate::console::print(::core::format_args!("{}\n", ::core::format_args!($($argument)*))) };
}
