//! Attacks of a hostile guest on an e1000.

use super::memory::Memory;

pub const START: u32 = 0x10_0000;
pub const END: u32 = 0x20_0000;
pub const RX_RING: u32 = START + 0x1000;
pub const TX_RING: u32 = START + 0x2000;
pub const BUFFER: u64 = 0x11_0000;
/// Memory of another guest.
pub const FOREIGN: u64 = 0x20_0000;

/// Both engines run on rings of eight descriptors. The buffers are the guest's own.
pub const SETUP: &[(u32, u32)] = &[
    (0x0, 1 << 26),
    (0x3800, TX_RING),
    (0x3804, 0),
    (0x3808, 0x80),
    (0x400, 2),
    (0x2800, RX_RING),
    (0x2804, 0),
    (0x2808, 0x80),
    (0x100, 1 << 15 | 2),
    (0x2818, 7),
];

/// BAR, offset, value.
pub type Write = (u8, u32, u32);
/// A descriptor of 16 bytes at an address.
pub type Descriptor = (u32, u64, u64);

/// Returns a transmit descriptor for 64 bytes at `address`: legacy, end of packet, report.
pub const fn tx(at: u32, address: u64) -> Descriptor {
    (at, address, 64 | 0x0B << 24)
}

pub struct Attack {
    pub name: &'static str,
    pub descriptors: &'static [Descriptor],
    pub writes: &'static [Write],
}

pub const HONEST: Attack =
    Attack { name: "a frame of its own", descriptors: &[tx(TX_RING, BUFFER)], writes: &[] };

pub const ATTACKS: &[Attack] = &[
    Attack {
        name: "a frame out of foreign memory",
        descriptors: &[tx(TX_RING, FOREIGN)],
        writes: &[(0, 0x3818, 1)],
    },
    Attack {
        name: "by the old place of the tail",
        descriptors: &[tx(TX_RING, FOREIGN)],
        writes: &[(0, 0x438, 1)],
    },
    Attack { name: "a buffer in foreign memory", descriptors: &[(RX_RING, FOREIGN, 0)], writes: &[] },
    Attack {
        name: "a length of 20 bits",
        descriptors: &[(TX_RING, BUFFER, 0xF_FFFF | 1 << 20 | 0x2B << 24)],
        writes: &[(0, 0x3818, 1)],
    },
    Attack {
        name: "larger buffers after the last is full",
        descriptors: &[(RX_RING, FOREIGN - 2048, 0)],
        writes: &[(0, 0x100, 1 << 15 | 1 << 25 | 1 << 16 | 1 << 5 | 2)],
    },
    Attack {
        name: "a chain of a long frame",
        descriptors: &[(RX_RING, BUFFER, 0), (RX_RING + 16, FOREIGN - 100, 0)],
        writes: &[(0, 0x100, 1 << 15 | 1 << 5 | 2)],
    },
    Attack {
        name: "a ring outside",
        descriptors: &[],
        writes: &[(0, 0x400, 0), (0, 0x3800, END), (0, 0x400, 2), (0, 0x3818, 1)],
    },
    Attack {
        name: "a ring moved while it runs",
        descriptors: &[],
        writes: &[(0, 0x3800, END), (0, 0x3818, 1)],
    },
    Attack { name: "by its old place", descriptors: &[], writes: &[(0, 0x420, END), (0, 0x438, 1)] },
    Attack { name: "by its upper half", descriptors: &[], writes: &[(0, 0x3804, 1), (0, 0x3818, 1)] },
    Attack {
        name: "a ring grown while it runs",
        descriptors: &[],
        writes: &[(0, 0x400, 0), (0, 0x3800, END - 0x80), (0, 0x400, 2), (0, 0x3808, 0x1000), (0, 0x3818, 9)],
    },
    Attack {
        name: "a head beyond the ring",
        descriptors: &[],
        writes: &[(0, 0x400, 0), (0, 0x3800, END - 0x80), (0, 0x3810, 8), (0, 0x3818, 9), (0, 0x400, 2)],
    },
    Attack {
        name: "a tail beyond the ring",
        descriptors: &[],
        writes: &[(0, 0x400, 0), (0, 0x3800, END - 0x80), (0, 0x3808, 0), (0, 0x400, 2), (0, 0x3818, 0x10)],
    },
    Attack {
        name: "a receive ring outside",
        descriptors: &[],
        writes: &[(0, 0x100, 0), (0, 0x2800, END), (0, 0x100, 1 << 15 | 2), (0, 0x2818, 7)],
    },
    Attack {
        name: "by index and data of the other BAR",
        descriptors: &[],
        writes: &[(1, 0, 0x3800), (1, 4, END), (1, 0, 0x3818), (1, 4, 1)],
    },
];

/// Writes the attack's descriptors to memory.
pub fn prepare(ports: &mut dyn Memory, of: &Attack) {
    for at in 0..8 {
        ports.store(u64::from(RX_RING) + 16 * at, &BUFFER.to_le_bytes());
        ports.store(u64::from(TX_RING) + 16 * at, &BUFFER.to_le_bytes());
    }
    for &(at, address, rest) in of.descriptors {
        ports.store(u64::from(at), &[address.to_le_bytes(), rest.to_le_bytes()].concat());
    }
}

/// Returns the requests (BAR, offset, value) that start both engines, then those of the attack.
pub fn requests(of: &Attack) -> impl Iterator<Item = Write> {
    SETUP.iter().map(|&(offset, value)| (0, offset, value)).chain(of.writes.iter().copied())
}
