//! A driver's accesses to its device, by ports or memory, as data: the guest's part of a device benchmark.

use core::arch::asm;

/// Size in bytes of a [`Step`] in memory.
pub const STEP_SIZE: usize = 24;

/// Limit of polls of [`Step::Until`].
const TRIES: u32 = 1000;
/// Limit of polls of [`Step::UntilMemory`]: a quarter of an hour at ten nanoseconds each. The awaited thread may get no processor
/// while another one needs it, so the caller's time-out comes first.
const LOOKS: u64 = 1 << 36;

/// One instruction of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Writes a byte to a port: `out dx, al`.
    Out {
        /// The port.
        port: u16,
        /// The written value.
        value: u8,
    },
    /// Writes a 16-bit word to a port: `out dx, ax`.
    OutWord {
        /// The port.
        port: u16,
        /// The written value.
        value: u16,
    },
    /// `in al, dx`; the value is discarded.
    In {
        /// The port.
        port: u16,
    },
    /// Writes 32-bit words of memory to a port: `rep outsd`.
    Outs {
        /// The port.
        port: u16,
        /// Address of the first word.
        address: u64,
        /// Number of 32-bit words.
        words: u32,
    },
    /// `in al, dx` until a bit of `mask` is set.
    Until {
        /// The port.
        port: u16,
        /// The bits.
        mask: u8,
    },
    /// `mov [address], al`, `ax` or `eax`.
    Store {
        /// The address, a multiple of the size.
        address: u64,
        /// Size in bytes: 1, 2 or 4.
        size: u8,
        /// The written value.
        value: u32,
    },
    /// `mov eax, [address]`; the value is discarded.
    Load {
        /// The address, a multiple of the size.
        address: u64,
        /// Size in bytes: 1, 2 or 4.
        size: u8,
    },
    /// `mov eax, [address]` until a bit of `mask` is set.
    UntilMemory {
        /// The address, a multiple of 4.
        address: u64,
        /// The bits.
        mask: u32,
    },
}

impl Step {
    /// Returns the format in memory: three 64-bit words.
    pub fn to_bytes(self) -> [u8; STEP_SIZE] {
        // A size takes the place of the port in other steps.
        let (kind, port, value, address) = match self {
            Self::Store { address, size, value } => (6, size.into(), u64::from(value), address),
            Self::Load { address, size } => (7, size.into(), 0, address),
            Self::UntilMemory { address, mask } => (8, 4, u64::from(mask), address),
            Self::Out { port, value } => (1, port, u64::from(value), 0),
            Self::OutWord { port, value } => (5, port, u64::from(value), 0),
            Self::In { port } => (2, port, 0, 0),
            Self::Outs { port, address, words } => (3, port, u64::from(words), address),
            Self::Until { port, mask } => (4, port, u64::from(mask), 0),
        };
        let mut bytes = [0; STEP_SIZE];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip([kind | u64::from(port) << 16, value, address]) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a step.
    fn from_words([first, value, address]: [u64; 3]) -> Option<Self> {
        let port = u16::try_from(first >> 16).ok()?;
        Some(match first & 0xffff {
            1 => Self::Out { port, value: u8::try_from(value).ok()? },
            2 => Self::In { port },
            3 => Self::Outs { port, address, words: u32::try_from(value).ok()? },
            4 => Self::Until { port, mask: u8::try_from(value).ok()? },
            5 => Self::OutWord { port, value: u16::try_from(value).ok()? },
            6 => Self::Store { address, size: size(port)?, value: u32::try_from(value).ok()? },
            7 => Self::Load { address, size: size(port)? },
            8 => Self::UntilMemory { address, mask: u32::try_from(value).ok()? },
            _ => return None,
        })
    }

    /// Executes the step; returns whether it completed.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn act(self) -> bool {
        // SAFETY: the caller vouches for ports and memory.
        unsafe {
            match self {
                Self::Out { port, value } => {
                    asm!("out dx, al", in("dx") port, in("al") value, options(nostack, preserves_flags));
                }
                Self::OutWord { port, value } => {
                    asm!("out dx, ax", in("dx") port, in("ax") value, options(nostack, preserves_flags));
                }
                Self::In { port } => {
                    read(port);
                }
                Self::Outs { port, address, words } => asm!(
                    "cld", "rep outsd",
                    in("dx") port, inout("rsi") address => _, inout("rcx") u64::from(words) => _, options(nostack)
                ),
                Self::Store { address, size, value } => store(address, size, value),
                Self::Load { address, size } => drop(load(address, size)),
                Self::UntilMemory { address, mask } => {
                    return (0..LOOKS).any(|_| {
                        core::hint::spin_loop();
                        load(address, 4) & mask != 0
                    });
                }
                Self::Until { port, mask } => return (0..TRIES).any(|_| read(port) & mask != 0),
            }
        }
        true
    }
}

/// Returns the size of an access in bytes.
fn size(port: u16) -> Option<u8> {
    u8::try_from(port).ok().filter(|size| matches!(size, 1 | 2 | 4))
}

/// Stores with exactly one instruction.
///
/// # Safety
/// As for [`run`].
unsafe fn store(address: u64, size: u8, value: u32) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        match size {
            1 => asm!("mov [{}], al", in(reg) address, in("eax") value, options(nostack, preserves_flags)),
            2 => asm!("mov [{}], ax", in(reg) address, in("eax") value, options(nostack, preserves_flags)),
            _ => asm!("mov [{}], eax", in(reg) address, in("eax") value, options(nostack, preserves_flags)),
        }
    }
}

/// Loads with exactly one instruction.
///
/// # Safety
/// As for [`run`].
unsafe fn load(address: u64, size: u8) -> u32 {
    let value: u32;
    // SAFETY: the caller vouches for the address.
    unsafe {
        match size {
            1 => {
                asm!("movzx {:e}, byte ptr [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags))
            }
            2 => {
                asm!("movzx {:e}, word ptr [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags))
            }
            _ => asm!("mov {:e}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)),
        }
    }
    value
}

/// # Safety
/// As for [`run`].
unsafe fn read(port: u16) -> u8 {
    let value: u8;
    // SAFETY: the caller vouches for the port.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nostack, preserves_flags)) };
    value
}

/// Executes the `count` steps at `steps` in order, `times` times; returns the ticks, or 0 if a step didn't complete.
///
/// # Safety
/// In a VM only, with IOPL 3. The ports must tolerate it; steps and their addresses must be readable.
pub unsafe fn run(steps: u64, count: u64, times: u64) -> u64 {
    let started = crate::tsc::start();
    for _ in 0..times {
        for index in 0..count {
            let at = usize::try_from(steps + index * STEP_SIZE as u64).unwrap_or(usize::MAX);
            let at = core::ptr::with_exposed_provenance::<[u64; 3]>(at);
            // SAFETY: the caller vouches for the steps.
            let words = unsafe { at.read_volatile() };
            let Some(step) = Step::from_words(words) else { return 0 };
            // SAFETY: the caller vouches for ports and memory.
            let ended = unsafe { step.act() };
            if !ended {
                return 0;
            }
        }
    }
    crate::tsc::end().wrapping_sub(started)
}

#[cfg(test)]
mod tests {
    use super::Step;

    #[test]
    fn steps_come_back_from_bytes_and_unknown_ones_do_not() {
        for step in [
            Step::Out { port: 0x300, value: 0x22 },
            Step::OutWord { port: 0x310, value: 0x1234 },
            Step::In { port: 0x307 },
            Step::Outs { port: 0x310, address: 1 << 40, words: 379 },
            Step::Until { port: 0x307, mask: 0x40 },
            Step::Store { address: 0x4000_0010, size: 4, value: u32::MAX },
            Step::Load { address: 0x4000_003E, size: 2 },
            Step::UntilMemory { address: 0x4000_0010, mask: 0x2000 },
        ] {
            let mut words = [0; 3];
            for (word, chunk) in words.iter_mut().zip(step.to_bytes().chunks_exact(8)) {
                *word = u64::from_le_bytes(chunk.try_into().unwrap());
            }
            assert_eq!(Step::from_words(words), Some(step));
        }
        assert_eq!(Step::from_words([9, 0, 0]), None);
        assert_eq!(Step::from_words([6 | 3 << 16, 0, 0]), None, "three bytes");
        assert_eq!(Step::from_words([1, 256, 0]), None, "a byte has 8 bits");
    }
}
