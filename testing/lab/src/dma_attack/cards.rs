//! The attacked cards and the attacks: DMA attacks that QEMU's cards execute unless something prevents them.

/// Base of the attacker's own memory: rings, descriptors, frames. The kernel doesn't use it (`memmap`).
pub const OWN: u32 = 0x1000_0000;
/// Size in bytes of the ranges at [`OWN`] and before [`TARGET`].
pub const SIZE: u32 = 0x10_0000;
/// End of the guest's memory. The kernel doesn't use the [`SIZE`] bytes before it either.
pub const TARGET: u32 = 0x2000_0000;

/// PCI vendor and device of an RTL8139.
pub const RTL8139_ID: (u16, u16) = (0x10EC, 0x8139);
/// PCI vendor and device of an 82540EM.
pub const E1000_ID: (u16, u16) = (0x8086, 0x100E);

/// The target's content before an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Marked bytes, which occur in no other frames.
    Secret,
    /// Zeros: descriptors in it have no address and count as done.
    Zeros,
}

/// An access: BAR, offset, bytes, value.
pub type Write = (u8, u32, u8, u32);

/// An attack. Everything else is as in the card's `setup`.
#[derive(Debug)]
pub struct Attack {
    /// Name for messages.
    pub name: &'static str,
    /// The target's content.
    pub fill: Fill,
    /// Words in the attacker's own memory: address, value.
    pub memory: &'static [(u32, u64)],
    /// Writes to the card.
    pub writes: &'static [Write],
}

/// An attacked card.
#[derive(Debug)]
pub struct Card {
    /// Its name.
    pub name: &'static str,
    /// PCI vendor and device.
    pub identity: (u16, u16),
    /// The BARs through which each attack is tried. A write's BAR 0 stands for the tried one; other BARs are literal.
    pub bars: &'static [u8],
    /// Whether a BAR consists of ports.
    pub ports: [bool; 2],
    /// The reset: write it, then wait.
    pub reset: Write,
    /// Words in the attacker's own memory for every attack.
    pub memory: &'static [(u32, u64)],
    /// Starts both engines on the attacker's own memory.
    pub setup: &'static [Write],
    /// Releases frames that were held back. QEMU's RTL8139 does so while its ring is full, until the read pointer is
    /// written, even across resets.
    pub let_in: &'static [Write],
    /// Sends a frame as a correct driver does after [`Card::setup`].
    pub honest: &'static [Write],
    /// The attacks.
    pub attacks: &'static [Attack],
}

impl Card {
    /// Returns the card of that name.
    pub fn find(name: &str) -> Option<&'static Card> {
        [&RTL8139, &E1000].into_iter().find(|card| card.name == name)
    }
}

/// Builds an attack that consists of writes to the card only.
const fn by(name: &'static str, writes: &'static [Write]) -> Attack {
    Attack { name, fill: Fill::Secret, memory: &[], writes }
}

/// Addresses of the attacker's own frames, and of received ones.
const FRAME: u32 = OWN + 0x1_0000;
/// Descriptors of the RTL8139's C+ mode.
const PLUS: u32 = OWN + 0x2_0000;

/// `OWN` of a C+ descriptor, the last of its ring, 2048 bytes.
const PLUS_RECEIVE: u64 = 0xC000_0800;
/// The same with a whole frame of 1000 bytes to send.
const PLUS_SEND: u64 = 0xF000_03E8;

/// The RTL8139. BAR 0 (ports) and BAR 1 (memory) have the same registers.
pub static RTL8139: Card = Card {
    name: "rtl8139",
    identity: RTL8139_ID,
    bars: &[0, 1],
    ports: [true, false],
    reset: (0, 0x37, 1, 0x10),
    memory: &[],
    setup: &[
        (0, 0x30, 4, OWN),
        (0, 0x37, 1, 0x0C),
        (0, 0x44, 4, 0xF78A),
        (0, 0x40, 4, 0x0300_0680),
        (0, 0x20, 4, FRAME),
        (0, 0x24, 4, FRAME),
    ],
    let_in: &[(0, 0x38, 2, 0xFFF0)],
    honest: &[(0, 0x10, 4, 1000)],
    attacks: &[
        by("frame outside", &[(0, 0x20, 4, TARGET), (0, 0x10, 4, 1000)]),
        by("frame through the end of memory", &[(0, 0x20, 4, TARGET - 64), (0, 0x10, 4, 1000)]),
        by("frame larger than others", &[(0, 0x20, 4, TARGET - 0x600), (0, 0x10, 4, 0x1FFF)]),
        by("ring outside", &[(0, 0x37, 1, 0x04), (0, 0x30, 4, TARGET), (0, 0x37, 1, 0x0C)]),
        by(
            "ring through the end of memory",
            &[(0, 0x37, 1, 0x04), (0, 0x30, 4, TARGET - 0x400), (0, 0x37, 1, 0x0C)],
        ),
        by("ring moved while the receiver runs", &[(0, 0x30, 4, TARGET)]),
        by(
            "ring grown while the receiver runs",
            &[
                (0, 0x37, 1, 0x04),
                (0, 0x44, 4, 0x078A),
                (0, 0x30, 4, TARGET - 0x2010),
                (0, 0x37, 1, 0x0C),
                (0, 0x44, 4, 0xFF8A),
            ],
        ),
        by("statistics of the C+ mode", &[(0, 0xE0, 2, 0x01), (0, 0x14, 4, 0), (0, 0x10, 4, TARGET | 8)]),
        Attack {
            name: "buffer of the C+ mode's receive ring",
            fill: Fill::Secret,
            memory: &[(PLUS, PLUS_RECEIVE), (PLUS + 8, TARGET as u64)],
            writes: &[(0, 0xE0, 2, 0x02), (0, 0xE4, 4, PLUS), (0, 0xE8, 4, 0)],
        },
        Attack {
            name: "frame of the C+ mode's transmit ring",
            fill: Fill::Secret,
            memory: &[(PLUS, PLUS_SEND), (PLUS + 8, TARGET as u64)],
            writes: &[(0, 0xE0, 2, 0x01), (0, 0x20, 4, PLUS), (0, 0x24, 4, 0), (0, 0xD9, 1, 0x40)],
        },
    ],
};

const TX_RING: u32 = OWN + 0x1000;
const RX_RING: u32 = OWN + 0x2000;
/// Returns the command of a legacy descriptor of this length: end of packet, report status.
const fn send(length: u64) -> u64 {
    length | 0x0B << 24
}

/// The e1000, whose BAR 0 is memory. On the real chip, BAR 1 and the registers' old offsets reach the rings, too.
/// QEMU's card ignores both, so the tests of `vpio` cover these attacks.
pub static E1000: Card = Card {
    name: "e1000",
    identity: E1000_ID,
    bars: &[0],
    ports: [false, true],
    reset: (0, 0x0000, 4, 0x0400_0000),
    memory: &[
        (RX_RING, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x10, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x20, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x30, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x40, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x50, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x60, FRAME as u64 + 0x1_0000),
        (RX_RING + 0x70, FRAME as u64 + 0x1_0000),
        (TX_RING, FRAME as u64),
        (TX_RING + 8, send(1000)),
    ],
    setup: &[
        (0, 0x0000, 4, 0x61),
        (0, 0x3800, 4, TX_RING),
        (0, 0x3804, 4, 0),
        (0, 0x3808, 4, 0x80),
        (0, 0x3810, 4, 0),
        (0, 0x3818, 4, 0),
        (0, 0x2800, 4, RX_RING),
        (0, 0x2804, 4, 0),
        (0, 0x2808, 4, 0x80),
        (0, 0x2810, 4, 0),
        (0, 0x2818, 4, 0),
        (0, 0x0400, 4, 0x0003_F0FA),
        (0, 0x0100, 4, 0x8002),
        (0, 0x2818, 4, 7),
    ],
    let_in: &[],
    honest: &[(0, 0x3818, 4, 1)],
    attacks: &[
        Attack {
            name: "frame outside",
            fill: Fill::Secret,
            memory: &[(TX_RING, TARGET as u64), (TX_RING + 8, send(1000))],
            writes: &[(0, 0x3818, 4, 1)],
        },
        Attack {
            name: "frame through the end of memory",
            fill: Fill::Secret,
            memory: &[(TX_RING, TARGET as u64 - 64), (TX_RING + 8, send(1000))],
            writes: &[(0, 0x3818, 4, 1)],
        },
        Attack {
            name: "piece of a data descriptor's length",
            fill: Fill::Secret,
            memory: &[(TX_RING, TARGET as u64 - 0x400), (TX_RING + 8, 0x1000 | 1 << 20 | 0x2B << 24)],
            writes: &[(0, 0x3818, 4, 1)],
        },
        Attack {
            name: "buffer outside",
            fill: Fill::Secret,
            memory: &[(RX_RING, TARGET as u64), (RX_RING + 0x10, TARGET as u64)],
            writes: &[],
        },
        Attack {
            name: "buffer through the end of memory",
            fill: Fill::Secret,
            memory: &[(RX_RING, TARGET as u64 - 256)],
            writes: &[],
        },
        Attack {
            name: "buffers grown after they were handed over",
            fill: Fill::Secret,
            memory: &[(RX_RING, TARGET as u64 - 256), (RX_RING + 0x10, TARGET as u64 - 256)],
            writes: &[(0, 0x0100, 4, 0), (0, 0x0100, 4, 0x3_8002), (0, 0x0100, 4, 0x8002)],
        },
        Attack {
            name: "ring outside",
            fill: Fill::Zeros,
            memory: &[],
            writes: &[(0, 0x0100, 4, 0), (0, 0x2800, 4, TARGET), (0, 0x0100, 4, 0x8002), (0, 0x2818, 4, 6)],
        },
        Attack {
            name: "ring moved while the receiver runs",
            fill: Fill::Zeros,
            memory: &[],
            writes: &[(0, 0x2800, 4, TARGET), (0, 0x2818, 4, 6)],
        },
        Attack {
            name: "ring grown while the receiver runs",
            fill: Fill::Zeros,
            memory: &[],
            writes: &[
                (0, 0x0100, 4, 0),
                (0, 0x2800, 4, TARGET - 0x80),
                (0, 0x0100, 4, 0x8002),
                (0, 0x2808, 4, 0x1000),
                (0, 0x2818, 4, 0x80),
            ],
        },
        Attack {
            name: "head beyond the ring",
            fill: Fill::Zeros,
            memory: &[],
            writes: &[
                (0, 0x0100, 4, 0),
                (0, 0x2800, 4, TARGET - 0x80),
                (0, 0x2810, 4, 8),
                (0, 0x2818, 4, 7),
                (0, 0x0100, 4, 0x8002),
            ],
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_name_memory_of_the_attacker_or_the_target_and_their_names_differ() {
        for card in [&RTL8139, &E1000] {
            for (number, attack) in card.attacks.iter().enumerate() {
                for &(address, _) in card.memory.iter().chain(attack.memory) {
                    assert!((OWN..OWN + SIZE).contains(&address), "{}: {address:#x}", attack.name);
                }
                assert!(
                    card.attacks[..number].iter().all(|other| other.name != attack.name),
                    "{}",
                    attack.name
                );
                let reaches =
                    |value: u64| (u64::from(TARGET) - 0x4000..u64::from(TARGET + SIZE)).contains(&value);
                let named = attack.writes.iter().map(|&(.., value)| u64::from(value));
                let stored = attack.memory.iter().map(|&(_, value)| value);
                assert!(named.chain(stored).any(reaches), "{} has no target", attack.name);
            }
        }
    }
}
