//! The console: the serial port's registers, without interrupts. Each access is an exit.

#![allow(unsafe_code)] // Port instructions.

use core::arch::asm;

const DATA: u16 = 0x3f8;
const LINE_STATUS: u16 = 0x3fd;
/// A byte has been received.
const DATA_READY: u8 = 1;

fn read(port: u16) -> u8 {
    let value;
    // SAFETY: the serial port's registers change no memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Writes a byte.
pub fn put(byte: u8) {
    // SAFETY: the serial port's registers change no memory.
    unsafe { asm!("out dx, al", in("dx") DATA, in("al") byte, options(nomem, nostack, preserves_flags)) };
}

/// Reads a byte, if one has come.
pub fn take() -> Option<u8> {
    (read(LINE_STATUS) & DATA_READY != 0).then(|| read(DATA))
}

/// Writes text.
pub fn print(text: &str) {
    for byte in text.bytes() {
        put(byte);
    }
}

/// Writes a line of a letter and hexadecimal numbers.
pub fn reply(letter: u8, numbers: &[u64]) {
    put(letter);
    for number in numbers {
        put(b' ');
        let digits = (67 - number.leading_zeros()) / 4;
        for digit in (0..digits.max(1)).rev() {
            let digit = (number >> (4 * digit) & 0xf) as u8;
            put(if digit < 10 { b'0' + digit } else { b'a' + digit - 10 });
        }
    }
    put(b'\n');
}

/// Most bytes of a request.
const LINE_BYTES: usize = 64;
/// Most numbers of a request.
pub const NUMBERS: usize = 4;

/// A request that arrives byte by byte.
pub struct Line {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

impl Line {
    /// Creates an empty one.
    pub const fn new() -> Self {
        Self { bytes: [0; LINE_BYTES], length: 0 }
    }

    /// Takes what has arrived. Returns the letter and the hexadecimal numbers of a complete line.
    pub fn poll(&mut self) -> Option<(u8, [u64; NUMBERS])> {
        while let Some(byte) = take() {
            if byte == b'\n' {
                let request = parse(self.bytes.get(..self.length)?);
                self.length = 0;
                return request;
            }
            if let Some(slot) = self.bytes.get_mut(self.length) {
                *slot = byte;
                self.length += 1;
            }
        }
        None
    }
}

fn parse(line: &[u8]) -> Option<(u8, [u64; NUMBERS])> {
    let (letter, rest) = line.split_first()?;
    let mut numbers = [0; NUMBERS];
    let words = rest.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    for (slot, word) in numbers.iter_mut().zip(words) {
        for byte in word {
            let digit = (*byte as char).to_digit(16)?;
            *slot = *slot << 4 | u64::from(digit);
        }
    }
    Some((*letter, numbers))
}
