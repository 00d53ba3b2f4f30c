//! Version negotiation: JSON capabilities.

use crate::wire::{MAX_FDS, MAX_TRANSFER, MAX_VERSION_DATA, wire_len};

/// Limit of DMA ranges per client.
pub(crate) const MAX_DMA_MAPS: u32 = 4096;

/// The peer's limits, with defaults applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerLimits {
    /// Descriptors that it accepts per message.
    pub max_fds: usize,
    /// Bytes of one read or write.
    pub max_transfer: u32,
    /// DMA ranges at a time.
    pub max_dma_maps: u32,
    /// It announces GET_REGION_IO_FDS.
    pub region_io_fds: bool,
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self { max_fds: 1, max_transfer: MAX_TRANSFER, max_dma_maps: 65535, region_io_fds: false }
    }
}

#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
struct VersionData {
    #[serde(default)]
    capabilities: Capabilities,
}

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct Capabilities {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_msg_fds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_data_xfer_size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_dma_maps: Option<u64>,
    /// An extension of Causeway. GET_REGION_IO_FDS is optional, and a widely used server loses synchronization of its
    /// stream on it: `vfio_user` 0.1.7 doesn't read the body of unknown commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    region_io_fds: Option<bool>,
}

/// Version data of a peer.
#[derive(Debug)]
pub(crate) struct Offer(Capabilities);

impl Offer {
    /// Parses version data (JSON with a terminating NUL). Empty data mean the defaults.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        if data.len() > MAX_VERSION_DATA {
            return None;
        }
        let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
        if text.is_empty() {
            return Some(Self(Capabilities::default()));
        }
        serde_json::from_slice::<VersionData>(text).ok().map(|data| Self(data.capabilities))
    }

    /// Returns the peer's limits.
    pub(crate) fn limits(&self) -> PeerLimits {
        let default = PeerLimits::default();
        let small = |value: Option<u64>, default: u32| {
            value.map_or(default, |value| u32::try_from(value).unwrap_or(u32::MAX))
        };
        let fds = usize::try_from(small(self.0.max_msg_fds, 1)).unwrap_or(MAX_FDS);
        PeerLimits {
            max_fds: fds.min(MAX_FDS),
            max_transfer: small(self.0.max_data_xfer_size, default.max_transfer).min(MAX_TRANSFER),
            max_dma_maps: small(self.0.max_dma_maps, default.max_dma_maps),
            region_io_fds: self.0.region_io_fds.unwrap_or(false),
        }
    }

    /// Returns the server's answer to this offer: its own limits for the offered capabilities.
    pub(crate) fn answer(&self) -> Vec<u8> {
        let own = own();
        encode(Capabilities {
            max_msg_fds: self.0.max_msg_fds.and(own.max_msg_fds),
            max_data_xfer_size: self.0.max_data_xfer_size.and(own.max_data_xfer_size),
            max_dma_maps: self.0.max_dma_maps.and(own.max_dma_maps),
            region_io_fds: self.0.region_io_fds.and(own.region_io_fds),
        })
    }
}

/// Returns the offer of this crate's client.
pub(crate) fn client_offer() -> Vec<u8> {
    encode(own())
}

fn own() -> Capabilities {
    Capabilities {
        max_msg_fds: Some(u64::from(wire_len(MAX_FDS))),
        max_data_xfer_size: Some(u64::from(MAX_TRANSFER)),
        max_dma_maps: Some(u64::from(MAX_DMA_MAPS)),
        region_io_fds: Some(true),
    }
}

fn encode(capabilities: Capabilities) -> Vec<u8> {
    // Numbers under fixed names: serialization can't fail.
    let mut data = serde_json::to_vec(&VersionData { capabilities }).unwrap_or_default();
    data.push(0);
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_only_what_was_offered() {
        let offer = Offer::parse(b"{\"capabilities\":{\"max_msg_fds\":8,\"x\":{}}}\0").unwrap();
        assert_eq!(offer.limits(), PeerLimits { max_fds: 8, ..PeerLimits::default() });
        assert_eq!(offer.answer(), b"{\"capabilities\":{\"max_msg_fds\":64}}\0");
        assert_eq!(Offer::parse(b"\0").unwrap().limits(), PeerLimits::default());
        assert_eq!(Offer::parse(b"{}").unwrap().limits(), PeerLimits::default());
    }

    #[test]
    fn absurd_offers_are_bounded_or_refused() {
        let offer = Offer::parse(
            b"{\"capabilities\":{\"max_msg_fds\":18446744073709551615,\"max_data_xfer_size\":4294967296}}",
        )
        .unwrap();
        assert_eq!(offer.limits().max_fds, MAX_FDS);
        assert_eq!(offer.limits().max_transfer, MAX_TRANSFER);
        assert!(Offer::parse(&[b'['; 4096]).is_none());
        assert!(Offer::parse(&[b' '; 4097]).is_none());
        assert!(Offer::parse(b"{\"capabilities\":{\"max_msg_fds\":-1}}").is_none());
        assert!(Offer::parse(b"\xff\xfe").is_none());
    }
}
