//! Requests that a card's model refuses, made by a guest's root user while the driver runs the card (`lab inject`).
//! Neither driver nor card is prepared. They are those of `devices/vpio/tests/it/recovery.rs`, for a guest whose memory
//! ends at [`TARGET`].

use anyhow::{Context, Result, bail};

use super::cards::{E1000_ID, RTL8139_ID, TARGET};
use super::only;
use super::registers::Registers;

/// Memory that no guest of the lab has.
const FOREIGN: u32 = 0x4000_0000;

/// Offset, bytes, value.
pub type Write = (u32, u8, u32);

/// A violation.
#[derive(Debug)]
pub struct Violation {
    /// Name for messages.
    pub name: &'static str,
    /// Registers whose writes are refused while the driver is idle, in order, with the description's names.
    pub refused: &'static [&'static str],
    /// Registers that may be refused, too: while the driver is active, or when the driver uses the remaining state.
    pub also: &'static [&'static str],
    /// All writes.
    pub writes: &'static [Write],
}

type Names = &'static [&'static str];

const fn by(name: &'static str, refused: Names, also: Names, writes: &'static [Write]) -> Violation {
    Violation { name, refused, also, writes }
}

/// A card and its violations.
#[derive(Debug)]
pub struct Card {
    /// Its name.
    pub name: &'static str,
    /// The BARs that its registers are in.
    pub bars: &'static [u8],
    /// The violations.
    pub violations: &'static [Violation],
    /// A one-byte port (BAR, offset) that is read afterwards, if nearly all writes may be deferred. A read makes the
    /// monitor drain the deferred writes, as a driver's reads do all the time.
    read_after: Option<(u8, u32)>,
    identity: (u16, u16),
    ports: [bool; 2],
}

impl Card {
    /// Returns the card of that name.
    pub fn find(name: &str) -> Option<&'static Card> {
        [&RTL8139, &E1000, &NE2000].into_iter().find(|card| card.name == name)
    }
}

static RTL8139: Card = Card {
    name: "rtl8139",
    bars: &[0, 1],
    violations: &[
        by("the ring is moved while the receiver runs", &["RBSTART"], &[], &[(0x30, 4, FOREIGN)]),
        // The address alone is no violation yet, and the driver writes it only at its start. So its own frames by this
        // descriptor are refused until then.
        by("a frame out of foreign memory", &["TSD0"], &["TSAD0"], &[(0x20, 4, FOREIGN), (0x10, 4, 100)]),
        by(
            "a frame through the end of memory",
            &["TSD0"],
            &["TSAD0"],
            &[(0x20, 4, TARGET - 64), (0x10, 4, 100)],
        ),
        by("a part of an address", &["TSAD0"], &[], &[(0x22, 2, 0x4000)]),
    ],
    read_after: Some((0, 0x37)),
    identity: RTL8139_ID,
    ports: [true, false],
};

static E1000: Card = Card {
    name: "e1000",
    bars: &[0],
    violations: &[
        by("the ring is moved while the receiver runs", &["RDBAL"], &[], &[(0x2800, 4, FOREIGN)]),
        by("the ring is grown while the transmitter runs", &["TDLEN"], &[], &[(0x3808, 4, 0x1_0000)]),
        by("a tail beyond the ring", &["TDT"], &[], &[(0x3818, 4, 0xFFFF)]),
        by("a tail beyond the ring, at its old place", &["TDT"], &[], &[(0x438, 4, 0xFFFF)]),
        by("a tail beyond the ring that receives", &["RDT"], &[], &[(0x2818, 4, 0xFFFF)]),
        by("the card's place in the ring", &["TDH"], &[], &[(0x3810, 4, 0x40)]),
    ],
    read_after: None,
    identity: E1000_ID,
    ports: [false, true],
};

static NE2000: Card = Card {
    name: "ne2000",
    bars: &[0],
    violations: &[
        by(
            "a frame out of the PROM",
            &["CR"],
            &["TPSR", "TBCR0", "TBCR1"],
            &[(0x04, 1, 0), (0x05, 1, 0x40), (0x06, 1, 0), (0x00, 1, 0x26)],
        ),
        by(
            "the ring is grown while the receiver runs",
            &["PSTOP", "BNRY"],
            &[],
            &[(0x02, 1, 0xFF), (0x03, 1, 0xFE)],
        ),
    ],
    read_after: Some((0, 0x00)),
    identity: (0x10EC, 0x8029),
    ports: [true, true],
};

/// Makes the requests through a BAR of the only card of that kind.
pub fn inject(card: &str, number: usize, bar: u8) -> Result<()> {
    let card = Card::find(card).with_context(|| format!("There are no violations for a card {card:?}"))?;
    let violation = card
        .violations
        .get(number)
        .with_context(|| format!("There is no violation {number} for {}", card.name))?;
    if !card.bars.contains(&bar) {
        bail!("The registers of {} are not in BAR {bar}", card.name);
    }
    let mut registers = Registers::open(&only(card.name, card.identity)?, card.ports)?;
    for &(offset, size, value) in violation.writes {
        registers.write(bar, offset, size, value)?;
    }
    if let Some((bar, offset)) = card.read_after {
        registers.read_port(bar, offset)?;
    }
    Ok(())
}
