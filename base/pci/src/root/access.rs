//! The guest's access to configuration spaces: ECAM (PCI Express Base 5.0, 7.2.2) and the port pair 0xCF8/0xCFC (PCI
//! Local Bus 3.0, 3.2.2.3.2).

use super::FunctionAddress;

/// Size in bytes of ECAM for bus 0, the only bus.
pub const ECAM_SIZE: u64 = 1 << 20;
/// First of the eight ports.
pub const CONFIG_PORTS_START: u16 = 0xCF8;
/// Number of ports.
pub const CONFIG_PORTS_LEN: u16 = 8;

/// The implemented bits of the address latch: enable, bus, slot, function, dword.
const LATCH_MASK: u32 = 0x80FF_FFFC;
const LATCH_ENABLE: u32 = 1 << 31;

/// Returns function and register of an ECAM offset; `None` beyond bus 0.
pub(super) fn ecam_target(offset: u64) -> Option<(FunctionAddress, u16)> {
    let offset = u32::try_from(offset).ok().filter(|offset| u64::from(*offset) < ECAM_SIZE)?;
    let [low, middle, high, _] = offset.to_le_bytes();
    let devfn = high << 4 | middle >> 4;
    Some((FunctionAddress::from_devfn(devfn), u16::from_le_bytes([low, middle & 0xF])))
}

/// Returns the latch after a dword write to 0xCF8.
pub(super) fn latch_value(written: u32) -> u32 {
    written & LATCH_MASK
}

/// Returns function and register of port 0xCFC + `port`; `None` if disabled or beyond bus 0.
pub(super) fn latch_target(latch: u32, port: u8) -> Option<(FunctionAddress, u16)> {
    let [register, devfn, bus, _] = latch.to_le_bytes();
    (latch & LATCH_ENABLE != 0 && bus == 0)
        .then(|| (FunctionAddress::from_devfn(devfn), u16::from(register & !3 | port & 3)))
}

/// Splits an access into naturally aligned pieces of 4, 2 or 1 bytes: offset from its start, length.
pub(super) fn aligned_pieces(start: u64, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let misalignment = usize::from(start.to_le_bytes()[0] & 3);
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = misalignment + done;
        let piece = [4, 2, 1].into_iter().find(|size| at % size == 0 && done + size <= len)?;
        done += piece;
        Some((done - piece, piece))
    })
}

#[cfg(test)]
mod tests {
    use super::{aligned_pieces, ecam_target, latch_target, latch_value};
    use crate::root::FunctionAddress;

    #[test]
    fn ecam_offsets_name_slot_function_and_register() {
        let address = FunctionAddress::new(31, 5).unwrap();
        assert_eq!(ecam_target(31 << 15 | 5 << 12 | 0xABC), Some((address, 0xABC)));
        assert_eq!(ecam_target(1 << 20), None);
        assert_eq!(ecam_target(u64::MAX), None);
    }

    #[test]
    fn the_latch_ignores_reserved_bits_and_answers_for_bus_0_only() {
        let latch = latch_value(0xFF00_1A3F);
        assert_eq!(latch, 0x8000_1A3C);
        assert_eq!(latch_target(latch, 2), Some((FunctionAddress::new(3, 2).unwrap(), 0x3E)));
        assert_eq!(latch_target(latch & !(1 << 31), 0), None);
        assert_eq!(latch_target(latch | 1 << 16, 0), None);
    }

    #[test]
    fn pieces_are_aligned_and_cover_everything() {
        for start in 0..8 {
            for len in 0..=8 {
                let mut next = 0;
                for (at, size) in aligned_pieces(start, len) {
                    assert_eq!(at, next);
                    assert_eq!((usize::try_from(start).unwrap() + at) % size, 0);
                    next += size;
                }
                assert_eq!(next, len);
            }
        }
    }
}
