//! Which objects of a device were made, changed or destroyed since somebody asked: what a migration still has to copy.
//!
//! A bit per handle, apart from the objects, so that marking touches no cache line of theirs, and asking looks at one word for 64 of
//! them.

use crate::saved::{Kind, Name};

/// A bit per handle.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<u64>,
    count: usize,
}

impl Bits {
    #[inline]
    fn set(&mut self, handle: u32) {
        let (at, bit) = ((handle / 64) as usize, 1u64 << (handle % 64));
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        self.count += usize::from(self.words[at] & bit == 0);
        self.words[at] |= bit;
    }
}

/// What was touched. Off, it costs a look at a flag.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    on: bool,
    kinds: [Bits; Kind::ALL.len()],
}

impl Marks {
    /// An object was made, changed or destroyed; its handle was a live one, so the bits stay below the device's limits.
    #[inline]
    pub fn touch(&mut self, kind: Kind, handle: u32) {
        if self.on {
            self.kinds[kind as usize].set(handle);
        }
    }

    /// Begins or ends marking; nothing is marked afterwards.
    pub fn set(&mut self, on: bool) {
        *self = Self { on, ..Self::default() };
    }

    pub fn on(&self) -> bool {
        self.on
    }

    /// How many objects are marked.
    pub fn count(&self) -> usize {
        self.kinds.iter().map(|bits| bits.count).sum()
    }

    /// Takes the marks, in the order in which objects refer to each other.
    pub fn take(&mut self, mut each: impl FnMut(Name)) {
        for kind in Kind::ALL {
            let bits = &mut self.kinds[kind as usize];
            if bits.count == 0 {
                continue;
            }
            bits.count = 0;
            for (word, at) in bits.words.iter_mut().zip(0u32..) {
                let mut left = std::mem::take(word);
                while left != 0 {
                    each(Name { kind, handle: at * 64 + left.trailing_zeros() });
                    left &= left - 1;
                }
            }
        }
    }
}
