//! virtio-blk requests (virtio 1.2, 5.2.6): from a chain to a validated operation. Reads guest memory, does no I/O.

use machine::memory::{GuestAddress, GuestMemory};

use crate::queue::{self, Chain, RingError, Segment, part, total_len};

/// Size of a sector in requests and in the capacity, bytes, whatever the block size.
pub const SECTOR: u64 = 512;
/// Length of the identification string (`VIRTIO_BLK_T_GET_ID`), bytes.
pub const ID_BYTES: usize = 20;
/// Limit of ranges in a discard or write-zeroes request.
pub const MAX_RANGES: u32 = 16;
/// Limit of sectors in a range of a discard request (1 GiB).
pub const MAX_DISCARD_SECTORS: u32 = 1 << 21;
/// Limit of sectors in a range of a write-zeroes request (4 MiB): where a file system can't zero, as many bytes are written.
pub const MAX_ZERO_SECTORS: u32 = 1 << 13;

const HEADER: usize = 16;
const RANGE: usize = 16;
const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const RANGE_UNMAP: u32 = 1;

/// Status of a request for the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_BLK_S_OK`: the operation is complete.
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`: the image or the request has an error.
    IoError = 1,
    /// `VIRTIO_BLK_S_UNSUPP`: the request's type or flags weren't offered.
    Unsupported = 2,
}

/// Limits for validating a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Capacity, sectors of 512 bytes.
    pub capacity: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether discard was offered.
    pub discard: bool,
    /// Whether write-zeroes was offered.
    pub write_zeroes: bool,
}

/// Bytes `start..start + len` of the disk, inside its capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Length in bytes, not 0.
    pub len: u64,
    /// Write-zeroes only: the space may be deallocated.
    pub unmap: bool,
}

/// A validated operation; offsets in bytes, within the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Read into guest buffers.
    Read {
        /// First byte of the disk.
        offset: u64,
        /// Guest buffers.
        data: Vec<Segment>,
    },
    /// Write from guest buffers.
    Write {
        /// First byte of the disk.
        offset: u64,
        /// Guest buffers.
        data: Vec<Segment>,
    },
    /// Make all completed writes durable.
    Flush,
    /// Deallocate space.
    Discard(Vec<Range>),
    /// Write zeroes.
    WriteZeroes(Vec<Range>),
    /// Copy the serial number.
    GetId {
        /// Guest buffers.
        data: Vec<Segment>,
    },
    /// Nothing but a status: the request was refused.
    Refuse {
        /// The status.
        status: Status,
        /// The reason, for the log.
        reason: Refusal,
    },
}

/// Why a well-formed chain is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A request type that wasn't offered.
    #[error("request type {0} is not supported")]
    Type(u32),
    /// A length that isn't whole sectors.
    #[error("{0} bytes are not whole sectors")]
    Length(u64),
    /// Beyond the end of the disk.
    #[error("sectors {sector} to {sector} + {sectors} lie beyond the end of the disk")]
    Beyond {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
    },
    /// A write to a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// A discard or write-zeroes request with too many or incomplete ranges.
    #[error("a list of {0} bytes of ranges is too short, too long or not whole")]
    Ranges(u64),
    /// Unknown flags in a range.
    #[error("unknown flags {0:#x} in a range")]
    Flags(u32),
    /// A range larger than the limit.
    #[error("a range of {0} sectors is larger than offered")]
    RangeSize(u32),
}

/// A parsed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Head of its chain.
    pub head: u16,
    /// Guest address of the status byte.
    pub status: GuestAddress,
    /// The operation.
    pub operation: Operation,
    /// Length of the writable buffers before the status byte, bytes.
    pub writable: u32,
}

impl Request {
    /// Parses a chain. Reads the header and the ranges once. An error means that the chain has no room for header or status: the driver is
    /// broken, and the device stops.
    pub fn parse(chain: &Chain, memory: &GuestMemory, limits: &Limits) -> Result<Self, RingError> {
        let readable = total_len(chain.readable());
        let writable = total_len(chain.writable());
        let Some(before_status) = writable.checked_sub(1) else {
            return Err(RingError::Short { have: 0, want: 1 });
        };
        let status = part(chain.writable(), before_status, 1)
            .and_then(|list| list.first().map(|segment| segment.address))
            .ok_or(RingError::Short { have: writable, want: 1 })?;

        let mut header = [0u8; HEADER];
        queue::read(memory, chain.readable(), 0, &mut header)?;
        let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = header;
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);

        let out_len = readable - HEADER as u64;
        let outgoing = || part(chain.readable(), HEADER as u64, out_len).unwrap_or_default();
        let incoming = || part(chain.writable(), 0, before_status).unwrap_or_default();
        let operation = match kind {
            T_IN => extent(sector, before_status, limits)
                .map(|offset| Operation::Read { offset, data: incoming() })
                .unwrap_or_else(io_error),
            T_OUT if limits.read_only => io_error(Refusal::ReadOnly),
            T_OUT => extent(sector, out_len, limits)
                .map(|offset| Operation::Write { offset, data: outgoing() })
                .unwrap_or_else(io_error),
            T_FLUSH => Operation::Flush,
            T_GET_ID if before_status == 0 => io_error(Refusal::Length(0)),
            T_GET_ID => Operation::GetId { data: incoming() },
            T_DISCARD | T_WRITE_ZEROES if limits.read_only => io_error(Refusal::ReadOnly),
            T_DISCARD if limits.discard => {
                ranges(&outgoing(), memory, limits, true)?.map_or_else(refuse, Operation::Discard)
            }
            T_WRITE_ZEROES if limits.write_zeroes => {
                ranges(&outgoing(), memory, limits, false)?.map_or_else(refuse, Operation::WriteZeroes)
            }
            other => refuse((Status::Unsupported, Refusal::Type(other))),
        };
        let writable = u32::try_from(before_status).unwrap_or(u32::MAX);
        Ok(Self { head: chain.head(), status, operation, writable })
    }
}

fn refuse((status, reason): (Status, Refusal)) -> Operation {
    Operation::Refuse { status, reason }
}

fn io_error(reason: Refusal) -> Operation {
    refuse((Status::IoError, reason))
}

/// Byte offset of `len` bytes at `sector`, if they are whole sectors within the disk.
fn extent(sector: u64, len: u64, limits: &Limits) -> Result<u64, Refusal> {
    if !len.is_multiple_of(SECTOR) {
        return Err(Refusal::Length(len));
    }
    let sectors = len / SECTOR;
    match sector.checked_add(sectors) {
        Some(end) if end <= limits.capacity => Ok(sector * SECTOR),
        _ => Err(Refusal::Beyond { sector, sectors }),
    }
}

type Refused = (Status, Refusal);

/// The ranges of a discard or write-zeroes request.
fn ranges(
    data: &[Segment],
    memory: &GuestMemory,
    limits: &Limits,
    discard: bool,
) -> Result<Result<Vec<Range>, Refused>, RingError> {
    let len = total_len(data);
    let count = len / RANGE as u64;
    if count == 0 || count > u64::from(MAX_RANGES) || !len.is_multiple_of(RANGE as u64) {
        return Ok(Err((Status::IoError, Refusal::Ranges(len))));
    }
    let mut raw = vec![0u8; RANGE * usize::try_from(count).unwrap_or(0)];
    queue::read(memory, data, 0, &mut raw)?;
    let (entries, _) = raw.as_chunks::<RANGE>();
    Ok(entries.iter().filter_map(|entry| range(entry, limits, discard).transpose()).collect())
}

/// One range; `None` when it is empty.
fn range(entry: &[u8; RANGE], limits: &Limits, discard: bool) -> Result<Option<Range>, Refused> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = *entry;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let allowed = if discard { 0 } else { RANGE_UNMAP };
    if flags & !allowed != 0 {
        return Err((Status::Unsupported, Refusal::Flags(flags)));
    }
    if sectors > if discard { MAX_DISCARD_SECTORS } else { MAX_ZERO_SECTORS } {
        return Err((Status::IoError, Refusal::RangeSize(sectors)));
    }
    let len = u64::from(sectors) * SECTOR;
    let start = extent(sector, len, limits).map_err(|reason| (Status::IoError, reason))?;
    Ok((sectors > 0).then_some(Range { start, len, unmap: flags & RANGE_UNMAP != 0 }))
}
