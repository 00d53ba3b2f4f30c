//! Descriptor chains, copied and validated before use.

use machine::memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, is_writable};

use super::error::RingError;

/// Limit of buffers in a chain, whatever the indirect table contains: the kernel's limit for a vectored request (`UIO_MAXIOV`).
pub const MAX_SEGMENTS: usize = 1024;

const DESCRIPTOR_SIZE: u32 = 16;
const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
const F_INDIRECT: u16 = 4;

/// One buffer of a chain: a validated copy of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: GuestAddress,
    /// Length in bytes, never 0.
    pub len: u32,
}

/// A chain that the driver made available: owned, with at most [`MAX_SEGMENTS`] buffers and 2^32 - 1 bytes. All its bytes were in RAM when
/// it was popped. Readable buffers may also be in a neighbour's memory that the guest has mapped; writable ones may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable: usize,
}

impl Chain {
    /// Index for `Ring::complete`.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Buffers that the device may read, in order.
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.readable]
    }

    /// Buffers that the device may write, in order.
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.readable..]
    }
}

/// Total length of a list of buffers, bytes.
pub fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// The `len` bytes at `offset` of a list of buffers, as a list; `None` when the list is shorter.
pub fn part(segments: &[Segment], offset: u64, len: u64) -> Option<Vec<Segment>> {
    let end = offset.checked_add(len)?;
    if end > total_len(segments) {
        return None;
    }
    let mut out = Vec::new();
    let mut start = 0u64;
    for segment in segments {
        let stop = start + u64::from(segment.len);
        let from = offset.max(start);
        let to = end.min(stop);
        if from < to {
            // Both differences lie within this segment, whose address + len was checked against RAM.
            let address = segment.address.checked_add(from - start)?;
            out.push(Segment { address, len: u32::try_from(to - from).ok()? });
        }
        start = stop;
    }
    Some(out)
}

/// Source of chains: one queue's descriptor table and rules.
pub(super) struct Source<'a> {
    pub memory: &'a GuestMemory,
    pub queue: u16,
    pub table: GuestAddress,
    pub size: u16,
    /// Whether `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
}

struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Source<'_> {
    /// Walks the chain at `head`. Reads each descriptor exactly once.
    pub(super) fn collect(&self, head: u16) -> Result<Chain, RingError> {
        let queue = self.queue;
        let mut segments: Vec<Segment> = Vec::with_capacity(8);
        let mut readable = 0usize;
        let mut total = 0u32;
        let (mut table, mut entries) = (self.table, u32::from(self.size));
        let (mut index, mut visited, mut in_indirect) = (head, 0u32, false);
        loop {
            if u32::from(index) >= entries {
                return Err(RingError::DescriptorIndex { queue, index, table: entries });
            }
            visited += 1;
            if visited > entries {
                return Err(RingError::Loop { queue, head });
            }
            let descriptor = self.read(table, index)?;
            if descriptor.flags & F_INDIRECT != 0 {
                let refuse = |reason| Err(RingError::Indirect { queue, head, reason });
                if !self.indirect {
                    return refuse("indirect descriptors were not negotiated");
                }
                if in_indirect {
                    return refuse("it lies within another one");
                }
                if descriptor.flags & F_NEXT != 0 {
                    return refuse("its descriptor has a successor");
                }
                if descriptor.len == 0 || !descriptor.len.is_multiple_of(DESCRIPTOR_SIZE) {
                    return refuse("its length isn't a multiple of 16");
                }
                if descriptor.len / DESCRIPTOR_SIZE > u32::from(u16::MAX) {
                    return refuse("it has more than 65535 entries");
                }
                if !is_writable(self.memory, descriptor.address, descriptor.len.into()) {
                    return refuse("it lies outside guest RAM");
                }
                table = GuestAddress(descriptor.address);
                entries = descriptor.len / DESCRIPTOR_SIZE;
                (index, visited, in_indirect) = (0, 0, true);
                continue;
            }
            let (address, len) = (descriptor.address, descriptor.len);
            if len == 0 {
                return Err(RingError::ZeroLength { queue, head });
            }
            let usable = if descriptor.flags & F_WRITE == 0 {
                in_memory(self.memory, address, len)
            } else {
                is_writable(self.memory, address, len.into())
            };
            if !usable {
                return Err(RingError::BufferOutsideRam { queue, address, len });
            }
            total = total.checked_add(len).ok_or(RingError::TooLong { queue, head })?;
            if segments.len() == MAX_SEGMENTS {
                return Err(RingError::TooManySegments { queue, head, limit: MAX_SEGMENTS });
            }
            if descriptor.flags & F_WRITE == 0 {
                if segments.len() > readable {
                    return Err(RingError::Order { queue, head });
                }
                readable += 1;
            }
            segments.push(Segment { address: GuestAddress(address), len });
            if descriptor.flags & F_NEXT == 0 {
                return Ok(Chain { head, segments, readable });
            }
            index = descriptor.next;
        }
    }

    fn read(&self, table: GuestAddress, index: u16) -> Result<Descriptor, RingError> {
        let outside =
            RingError::RingOutsideRam { queue: self.queue, part: "descriptor table", address: table.0 };
        let offset = u64::from(index) * u64::from(DESCRIPTOR_SIZE);
        let Some(address) = table.checked_add(offset) else { return Err(outside) };
        let mut raw = [0u8; 16];
        if self.memory.read_slice(&mut raw, address).is_err() {
            return Err(outside);
        }
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = raw;
        Ok(Descriptor {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        })
    }
}

/// Whether all of `address..address + len` is memory that the device may read; it may cross from one region into an adjacent one.
fn in_memory(memory: &GuestMemory, address: u64, len: u32) -> bool {
    address.checked_add(u64::from(len)).is_some()
        && usize::try_from(len).is_ok_and(|len| memory.check_range(GuestAddress(address), len))
}
