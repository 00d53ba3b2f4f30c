//! Receive filters of all cards.

use super::multicast_index;

/// Largest number of exact station addresses: an e1000's.
const STATIONS: usize = 16;

/// A multicast filter.
#[expect(clippy::large_enum_variant, reason = "a few, for a moment each: no reason to allocate")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    /// No multicast frame passes.
    None,
    /// Every multicast frame passes.
    All,
    /// A bit per value of six bits of the Ethernet CRC.
    Hashed(u64),
    /// A bit per value of twelve bits of the address, after a shift by the first value.
    Table(u8, [u32; 128]),
}

/// A receive filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter {
    on: bool,
    everything: bool,
    all_stations: bool,
    broadcasts: bool,
    groups: Groups,
    stations: [Option<[u8; 6]>; STATIONS],
}

impl Filter {
    /// Creates the filter of a receiver that is enabled (`on`), with these settings and no stations.
    pub const fn new(on: bool, everything: bool, broadcasts: bool, groups: Groups) -> Self {
        Self { on, everything, all_stations: false, broadcasts, groups, stations: [None; STATIONS] }
    }

    /// Adds all unicast frames, but no multicast frames.
    #[must_use]
    pub const fn with_stations(mut self) -> Self {
        self.all_stations = true;
        self
    }

    /// Adds a station address. Beyond 16, more than any card has, it is ignored.
    #[must_use]
    pub fn with(mut self, station: [u8; 6]) -> Self {
        if let Some(place) = self.stations.iter_mut().find(|place| place.is_none()) {
            *place = Some(station);
        }
        self
    }

    /// Returns whether the filter accepts a frame.
    pub fn accepts(&self, frame: &[u8]) -> bool {
        let Some(to) = frame.first_chunk::<6>() else { return false };
        if !self.on {
            return false;
        }
        if self.everything || self.stations.contains(&Some(*to)) {
            return true;
        }
        if *to == [0xFF; 6] {
            return self.broadcasts;
        }
        if to[0] & 1 == 0 {
            return self.all_stations;
        }
        match &self.groups {
            Groups::None => false,
            Groups::All => true,
            Groups::Hashed(bits) => bits >> multicast_index(to) & 1 == 1,
            Groups::Table(shift, words) => {
                let index = usize::from(u16::from_le_bytes([to[4], to[5]]) >> shift & 0xFFF);
                words[index >> 5] >> (index & 31) & 1 == 1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
    const ALL_HOSTS: [u8; 6] = [0x01, 0, 0x5E, 0, 0, 1];

    #[test]
    fn a_receiver_takes_what_its_settings_say() {
        let none = Filter::new(true, false, false, Groups::None).with(OWN);
        assert!(none.accepts(&OWN) && !none.accepts(&OTHER) && !none.accepts(&[0xFF; 6]));
        assert!(!none.accepts(&ALL_HOSTS) && none.with(ALL_HOSTS).accepts(&ALL_HOSTS), "a group by itself");
        let all = Filter::new(true, true, false, Groups::None);
        assert!(all.accepts(&OTHER) && all.accepts(&[0xFF; 6]) && all.accepts(&ALL_HOSTS));
        assert!(!Filter::new(false, true, true, Groups::All).accepts(&OWN), "it is off");
        let hashed = Filter::new(true, false, true, Groups::Hashed(1 << 31));
        assert!(hashed.accepts(&ALL_HOSTS) && hashed.accepts(&[0xFF; 6]) && !hashed.accepts(&OTHER));
        // Bits 47 to 36 of the address: 0100h >> 4.
        let mut words = [0; 128];
        words[0] = 1 << 16;
        let table = |shift| Filter::new(true, false, false, Groups::Table(shift, words));
        assert!(table(4).accepts(&ALL_HOSTS) && !table(3).accepts(&ALL_HOSTS));
        assert!(!all.accepts(&OWN[..5]), "no address");
        let stations = none.with_stations();
        assert!(stations.accepts(&OTHER) && !stations.accepts(&ALL_HOSTS) && !stations.accepts(&[0xFF; 6]));
    }
}
