//! TX queues: fetching packets from descriptors, and completing them.

use dma::Dma;

use crate::descriptors::{Cursor, OffloadMode, TxDescriptor, store_tx_completion};
use crate::frame::{ETHERNET_HEADER, FRAME_MAX, LARGE_FRAME_MAX, MacKind, Offload, Piece};
use crate::registers::QueueError;
use crate::shared_area::TxLayout;

/// Limit of descriptors of a packet (Linux: 16, or 24 with segmentation).
const PIECES_MAX: usize = 24;

/// A queue of an active device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TxQueue {
    pub layout: TxLayout,
    pub next: Cursor,
    pub completion: Cursor,
    pub stopped: Option<u32>,
    pub stats: TxStats,
}

/// Statistics in the order of the queue's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct TxStats {
    pub tso: Traffic,
    pub unicast: Traffic,
    pub multicast: Traffic,
    pub broadcast: Traffic,
    pub errors: u64,
    pub discards: u64,
}

/// Packets and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Traffic {
    pub packets: u64,
    pub bytes: u64,
}

impl Traffic {
    pub fn add(&mut self, packets: u64, bytes: usize) {
        self.packets = self.packets.wrapping_add(packets);
        self.bytes = self.bytes.wrapping_add(bytes as u64);
    }
}

impl TxStats {
    pub fn words(&self) -> [u64; 10] {
        let Self { tso, unicast, multicast, broadcast, errors, discards } = *self;
        [
            tso.packets,
            tso.bytes,
            unicast.packets,
            unicast.bytes,
            multicast.packets,
            multicast.bytes,
            broadcast.packets,
            broadcast.bytes,
            errors,
            discards,
        ]
    }

    /// Counts a frame that was sent.
    pub fn sent(&mut self, kind: MacKind, bytes: usize) {
        match kind {
            MacKind::Unicast => self.unicast.add(1, bytes),
            MacKind::Multicast => self.multicast.add(1, bytes),
            MacKind::Broadcast => self.broadcast.add(1, bytes),
        }
    }
}

/// A packet in a queue, where it stays until it is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TxPacket {
    pub queue: usize,
    /// Length in bytes, without the tag to insert.
    pub len: usize,
    pub offload: Offload,
    /// Bytes of headers of a TSO packet, as claimed by the driver.
    pub header_len: u16,
    pub vlan: Option<u16>,
    /// It is malformed: complete it and count an error.
    pub bad: bool,
    last: u32,
    after: Cursor,
}

impl TxQueue {
    pub fn new(layout: TxLayout) -> Self {
        Self {
            layout,
            next: Cursor::START,
            completion: Cursor::START,
            stopped: None,
            stats: TxStats::default(),
        }
    }

    /// Whether a packet waits.
    pub fn has_work(&self, memory: &impl Dma) -> bool {
        self.stopped.is_none()
            && !matches!(
                TxDescriptor::load(memory, self.next.address(self.layout.ring), self.next.generation),
                Ok(None)
            )
    }

    /// The packet at the head of the queue; puts its pieces into `pieces`.
    pub fn fetch(
        &self,
        queue: usize,
        memory: &impl Dma,
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<TxPacket>, QueueError> {
        pieces.clear();
        let mut at = self.next;
        let load = |at: Cursor| TxDescriptor::load(memory, at.address(self.layout.ring), at.generation);
        let Some(first) = load(at)? else { return Ok(None) };
        let mut descriptor = first;
        let mut len = 0;
        loop {
            if descriptor.dtype {
                return Err(QueueError::NotSupported);
            }
            if pieces.len() == PIECES_MAX {
                return Err(QueueError::BigPacket);
            }
            let piece = usize::try_from(descriptor.len).map_err(|_| QueueError::BigPacket)?;
            pieces.push(Piece { address: descriptor.address, len: piece });
            len += piece;
            if descriptor.eop {
                break;
            }
            at = at.after(self.layout.ring_size);
            if at.next == self.next.next {
                return Err(QueueError::NoEop);
            }
            // The driver passes the first descriptor on last, so the others must belong to the device already.
            descriptor = load(at)?.ok_or(QueueError::NoEop)?;
        }
        let offload = match first.mode {
            OffloadMode::None => Offload::None,
            OffloadMode::Encapsulated => return Err(QueueError::NotSupported),
            OffloadMode::Checksum => Offload::Checksum { start: first.header_len, at: first.msscof },
            OffloadMode::Tso => Offload::Tso { mss: first.msscof },
        };
        let (fits, longest) = match offload {
            Offload::Checksum { start, at } => (
                start <= at && usize::from(at) + 2 <= len && usize::from(start) >= ETHERNET_HEADER,
                FRAME_MAX,
            ),
            Offload::Tso { mss } => (mss > 0 && usize::from(first.header_len) < len, LARGE_FRAME_MAX),
            Offload::None | Offload::Verified => (true, FRAME_MAX),
        };
        Ok(Some(TxPacket {
            queue,
            len,
            offload,
            header_len: first.header_len,
            vlan: first.vlan,
            bad: !fits || len < ETHERNET_HEADER || len > longest,
            last: at.next,
            after: at.after(self.layout.ring_size),
        }))
    }

    /// Completes the packet that [`TxQueue::fetch`] returned last.
    pub fn complete(&mut self, memory: &impl Dma, packet: &TxPacket) -> Result<(), QueueError> {
        store_tx_completion(memory, self.layout.completion, self.completion, packet.last)?;
        self.completion = self.completion.after(self.layout.completion_size);
        self.next = packet.after;
        Ok(())
    }
}
