//! Interrupt messages, as decoded from the ICR, redirection entries and MSIs, and the messages between nodes.

use serde::{Deserialize, Serialize};

/// The destination that addresses all APICs, in physical and logical mode of x2APICs.
pub const BROADCAST: u32 = u32::MAX;

/// Which APICs accept a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Destination {
    /// The APIC with this id.
    Physical(u32),
    /// Cluster in bits 31:16, a bit for each of its members below.
    Logical(u32),
    /// Every APIC.
    All,
    /// Every APIC but the one with this id.
    AllBut(u32),
}

impl Destination {
    fn new(logical: bool, value: u32) -> Self {
        match (value, logical) {
            (BROADCAST, _) => Self::All,
            (_, true) => Self::Logical(value),
            (_, false) => Self::Physical(value),
        }
    }

    /// Whether the APIC with this id accepts it.
    pub fn includes(self, apic_id: u32) -> bool {
        match self {
            Self::Physical(id) => id == apic_id,
            Self::Logical(value) => {
                let own = logical_id(apic_id);
                own >> 16 == value >> 16 && own & value & 0xFFFF != 0
            }
            Self::All => true,
            Self::AllBut(id) => id != apic_id,
        }
    }
}

/// Logical destination register (LDR) of an x2APIC, which is derived from its id.
pub fn logical_id(apic_id: u32) -> u32 {
    (apic_id >> 4) << 16 | 1 << (apic_id & 0xF)
}

/// Trigger mode. The EOI of a level-triggered interrupt is broadcast to the IOAPIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trigger {
    /// Once per edge.
    Edge,
    /// As long as the line is asserted.
    Level,
}

/// What a message does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// An interrupt at each destination.
    Fixed {
        /// Its vector.
        vector: u8,
        /// Its trigger mode.
        trigger: Trigger,
    },
    /// An interrupt at one of the destinations.
    LowestPriority {
        /// Its vector.
        vector: u8,
        /// Its trigger mode.
        trigger: Trigger,
    },
    /// System management interrupt: accepted and ignored, as VMs have no system management mode.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// INIT: resets the processor.
    Init,
    /// Start-up IPI.
    Startup {
        /// The page at which real-mode code begins.
        vector: u8,
    },
    /// ExtINT: an 8259 supplies the vector when the vCPU accepts the interrupt.
    External,
}

impl Delivery {
    /// Decodes bits 10:8 of ICR, redirection entries and MSI data. `None` for mode 3, which is reserved, and 6, which only the ICR has as
    /// start-up IPI.
    fn new(mode: u64, vector: u8, trigger: Trigger) -> Option<Self> {
        match mode & 7 {
            0 => Some(Self::Fixed { vector, trigger }),
            1 => Some(Self::LowestPriority { vector, trigger }),
            2 => Some(Self::Smi),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            7 => Some(Self::External),
            _ => None,
        }
    }
}

/// A message on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Which APICs accept it.
    pub destination: Destination,
    /// What it does there.
    pub delivery: Delivery,
}

/// A message between the controllers of two nodes. The sender has arbitrated lowest priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeMessage {
    /// An interrupt for the destination's APICs on the receiving node.
    Interrupt(Message),
    /// The EOI of a level-triggered interrupt, for the IOAPIC's node.
    EndOfInterrupt {
        /// Its vector.
        vector: u8,
    },
}

/// The lowest byte.
pub(crate) fn vector_of(bits: u64) -> u8 {
    bits.to_le_bytes()[0]
}

/// The lower half.
pub(crate) fn low(bits: u64) -> u32 {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

impl Message {
    /// The message that a write to the ICR sends. `None` for the reserved modes 3 and 7, and for INIT level de-assert, which processors
    /// since the Pentium 4 ignore. Trigger mode and level of other modes have no effect.
    pub(crate) fn from_command(command: u64, sender: u32) -> Option<Self> {
        let destination = match command >> 18 & 3 {
            0 => Destination::new(command >> 11 & 1 != 0, low(command >> 32)),
            1 => Destination::Physical(sender),
            2 => Destination::All,
            _ => Destination::AllBut(sender),
        };
        let vector = vector_of(command);
        let (level, asserted) = (command >> 15 & 1 != 0, command >> 14 & 1 != 0);
        let delivery = match command >> 8 & 7 {
            5 if level && !asserted => return None,
            6 => Delivery::Startup { vector },
            7 => return None,
            mode => Delivery::new(mode, vector, Trigger::Edge)?,
        };
        Some(Self { destination, delivery })
    }

    /// Decodes a message-signalled interrupt from the `address` and `data` of a device's write. With `extended`, address bits 11:5 are bits
    /// 14:8 of the destination (KVM_FEATURE_MSI_EXT_DEST_ID). Without it, destination 0xFF is a broadcast, as guests with 8 bits expect.
    pub fn from_msi(address: u64, data: u32, extended: bool) -> Result<Self, MsiError> {
        if address >> 20 != 0xFEE {
            return Err(MsiError::Address { address });
        }
        let short = low(address >> 12 & 0xFF);
        let high = if extended { low(address >> 5 & 0x7F) << 8 } else { 0 };
        let data = u64::from(data);
        let trigger = if data >> 15 & 1 != 0 { Trigger::Level } else { Trigger::Edge };
        let delivery = Delivery::new(data >> 8, vector_of(data), trigger)
            .ok_or(MsiError::DeliveryMode { mode: vector_of(data >> 8) & 7 })?;
        let logical = address >> 2 & 1 != 0;
        let delivery = match delivery {
            // The redirection hint, which has an effect only for a set of destinations.
            Delivery::Fixed { vector, trigger } if logical && address >> 3 & 1 != 0 => {
                Delivery::LowestPriority { vector, trigger }
            }
            other => other,
        };
        Ok(Self { destination: Self::device_destination(logical, short, high, extended), delivery })
    }

    /// The message of a redirection entry of the IOAPIC. With `extended`, bits 55:49 are bits 14:8 of the destination.
    pub(crate) fn from_redirection(entry: u64, extended: bool) -> Option<Self> {
        let high = if extended { low(entry >> 49 & 0x7F) << 8 } else { 0 };
        let level = entry >> 15 & 1 != 0;
        let trigger = if level { Trigger::Level } else { Trigger::Edge };
        let delivery = Delivery::new(entry >> 8, vector_of(entry), trigger)?;
        let logical = entry >> 11 & 1 != 0;
        let destination = Self::device_destination(logical, low(entry >> 56), high, extended);
        Some(Self { destination, delivery })
    }

    fn device_destination(logical: bool, short: u32, high: u32, extended: bool) -> Destination {
        if short == 0xFF && !extended { Destination::All } else { Destination::new(logical, high | short) }
    }
}

/// A device's write isn't a valid message-signalled interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MsiError {
    /// The address isn't in 0xFEE00000 to 0xFEEFFFFF, the APICs' range.
    #[error(
        "A message-signalled interrupt for address {address:#x} goes nowhere: the driver has to write 0xfee00000 to 0xfeefffff"
    )]
    Address {
        /// Guest-physical address.
        address: u64,
    },
    /// A reserved delivery mode.
    #[error(
        "A message-signalled interrupt has the reserved delivery mode {mode}: the driver has to choose another one"
    )]
    DeliveryMode {
        /// Bits 10:8 of its data.
        mode: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(vector: u8) -> Delivery {
        Delivery::Fixed { vector, trigger: Trigger::Edge }
    }

    #[test]
    fn commands_have_the_destination_of_their_shorthand_and_mode() {
        let send = |command| Message::from_command(command, 7);
        let message = |destination, delivery| Some(Message { destination, delivery });
        assert_eq!(send(0x0000_0003_0000_0031), message(Destination::Physical(3), fixed(0x31)));
        assert_eq!(send(0x0001_0002_0000_0831), message(Destination::Logical(0x1_0002), fixed(0x31)));
        assert_eq!(send(0xFFFF_FFFF_0000_0831), message(Destination::All, fixed(0x31)));
        assert_eq!(send(0x0000_0003_0004_0031), message(Destination::Physical(7), fixed(0x31)));
        assert_eq!(send(0x0008_0031), message(Destination::All, fixed(0x31)));
        assert_eq!(send(0x000C_0400), message(Destination::AllBut(7), Delivery::Nmi));
        assert_eq!(send(0xC500), message(Destination::Physical(0), Delivery::Init));
        assert_eq!(send(0x8500), None, "INIT level de-assert");
        assert_eq!(send(0x4699), message(Destination::Physical(0), Delivery::Startup { vector: 0x99 }));
        assert_eq!((send(0x0331), send(0x0731)), (None, None), "reserved modes");
    }

    #[test]
    fn logical_destinations_are_a_cluster_and_a_set() {
        assert_eq!(logical_id(0x123), 0x12_0008);
        let both = Destination::Logical(0x12_0009);
        assert!(both.includes(0x123) && both.includes(0x120));
        assert!(!both.includes(0x121) && !both.includes(0x113));
        assert!(!Destination::Logical(0x12_0000).includes(0x120));
    }

    #[test]
    fn extended_destinations_take_seven_more_bits() {
        let address = 0xFEE0_0000 | 0x34 << 12 | 0x12 << 5;
        let to = |extended| Message::from_msi(address, 0x41, extended).unwrap().destination;
        assert_eq!(to(true), Destination::Physical(0x1234));
        assert_eq!(to(false), Destination::Physical(0x34));
        let entry = 0x34 << 56 | 0x12 << 49 | 0x41;
        let to = |extended| Message::from_redirection(entry, extended).unwrap().destination;
        assert_eq!((to(true), to(false)), (Destination::Physical(0x1234), Destination::Physical(0x34)));
        let everyone = |extended| Message::from_msi(0xFEEF_F000, 0x41, extended).unwrap().destination;
        assert_eq!((everyone(false), everyone(true)), (Destination::All, Destination::Physical(0xFF)));
    }

    #[test]
    fn what_is_no_interrupt_message_is_named() {
        let error = |address, data| Message::from_msi(address, data, false).unwrap_err().to_string();
        assert!(error(0xFED0_0000, 0x41).contains("0xfed00000"));
        assert!(error(0x1_FEE0_0000, 0x41).contains("0x1fee00000"));
        assert!(error(0xFEE0_0000, 0x641).contains("mode 6"));
    }

    #[test]
    fn a_redirection_hint_picks_one_of_a_logical_set() {
        let lowest = Delivery::LowestPriority { vector: 0x41, trigger: Trigger::Level };
        assert_eq!(Message::from_msi(0xFEE0_300C, 0x8041, false).unwrap().delivery, lowest);
        let physical = Message::from_msi(0xFEE0_3008, 0x41, false).unwrap();
        assert_eq!(physical.delivery, fixed(0x41));
    }
}
