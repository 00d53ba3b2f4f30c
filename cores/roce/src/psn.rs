//! Packet sequence numbers. The wire carries 24 bits. Internally they are extended to 64 bits that never wrap, so that they compare and
//! subtract like any number (IBTA volume 1, 9.7.2).

/// Bits of a PSN on the wire.
pub const MASK: u32 = 0xFF_FFFF;

/// Half of the sequence space: a PSN this far back is a duplicate, and no more than this may be outstanding.
pub const HALF: u64 = 1 << 23;

/// A base far above zero, so that numbers before the first one exist as well.
const BASE: u64 = 1 << 32;

/// The extended form of a connection's first PSN.
#[inline]
#[must_use]
pub fn first(wire: u32) -> u64 {
    BASE + u64::from(wire & MASK)
}

/// The low 24 bits of an extended PSN, for the wire.
#[inline]
#[must_use]
pub fn wire(extended: u64) -> u32 {
    (extended & 0xFF_FFFF) as u32
}

/// The extended PSN nearest to `reference` that has these 24 bits: in `reference - 2^23 .. reference + 2^23`.
#[inline]
#[must_use]
pub fn extend(received: u32, reference: u64) -> u64 {
    let ahead = u64::from(received.wrapping_sub(wire(reference)) & MASK);
    if ahead < HALF {
        reference.wrapping_add(ahead)
    } else {
        reference.wrapping_add(ahead).wrapping_sub(1 << 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_near_the_reference_are_found_again() {
        for reference in [first(0), first(5), first(MASK), first(0) + (1 << 40) - 3] {
            for offset in [0, 1, 2, HALF - 1] {
                assert_eq!(extend(wire(reference + offset), reference), reference + offset);
                assert_eq!(extend(wire(reference - offset), reference), reference - offset);
            }
            assert_eq!(extend(wire(reference - HALF), reference), reference - HALF);
            assert_eq!(extend(wire(reference + HALF), reference), reference - HALF, "the far half is behind");
        }
    }
}
