//! Where a connection writes its packets.

/// Receives packets, from the BTH to the pad. The connection reserves a packet, writes it and commits it. A second reservation without a
/// commit discards the first.
pub trait Output {
    /// Reserves exactly `len` bytes. `None` when no more packets fit: the connection continues at the next call.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]>;
    /// Completes the packet reserved last.
    fn commit(&mut self);
}

/// Packets contiguous in a buffer of the caller, each with room before it (frame headers) and after it (ICRC, or an authentication tag).
/// Consecutive packets of one length can be sent by one call with segmentation offload.
#[derive(Debug)]
pub struct Batch<'a> {
    buffer: &'a mut [u8],
    lengths: &'a mut Vec<u32>,
    before: usize,
    behind: usize,
    position: usize,
    reserved: usize,
    most: usize,
}

impl<'a> Batch<'a> {
    /// An empty batch. `lengths` is cleared, and then receives the length of each packet without the room around it. It grows to `most`
    /// entries, so a reused one isn't allocated again.
    #[must_use]
    pub fn new(
        buffer: &'a mut [u8],
        lengths: &'a mut Vec<u32>,
        before: usize,
        behind: usize,
        most: usize,
    ) -> Self {
        lengths.clear();
        Self { buffer, lengths, before, behind, position: 0, reserved: 0, most }
    }

    /// Bytes of the buffer in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.position
    }

    /// Whether no packet was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.position == 0
    }
}

impl Output for Batch<'_> {
    #[inline]
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.lengths.len() >= self.most {
            return None;
        }
        let start = self.position + self.before;
        let packet = self.buffer.get_mut(start..start + len + self.behind)?;
        self.reserved = len;
        packet.get_mut(..len)
    }

    #[inline]
    fn commit(&mut self) {
        self.position += self.before + self.reserved + self.behind;
        self.lengths.push(u32::try_from(self.reserved).unwrap_or(u32::MAX));
    }
}
