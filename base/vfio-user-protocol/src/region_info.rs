//! Regions as messages: mappable areas and ioeventfds. The server encodes them and the client parses them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use crate::device::{Region, RegionIoFd, RegionMapping};
use crate::doorbell_mode;
use crate::wire::{
    CAPABILITY_SPARSE, CAPABILITY_TYPE, CapabilityHeader, IO_FD_DATAMATCH, IO_FD_IOEVENTFD, IoFd, IoFdsInfo,
    REGION_CAPABILITIES, REGION_MAPPABLE, REGION_READABLE, REGION_WRITABLE, RegionInfo, RegionType,
    SparseArea, SparseHeader, wire_len,
};

/// Limit of mappable areas per region that a client accepts.
pub(crate) const MAX_AREAS: usize = 1024;
/// Limit of sub-regions with descriptors that a client accepts.
pub(crate) const MAX_IO_FDS: usize = 1024;
/// Limit of capabilities per region that a client walks.
const MAX_CAPABILITIES: usize = 16;
/// Alignment of mappings.
const PAGE: u64 = 4096;

/// A device offers a region that the protocol can't express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Region {index} of a vfio-user device can't be offered: {reason}")]
pub struct RegionError {
    /// Its index.
    pub index: u32,
    /// The reason.
    pub reason: String,
}

/// Checks a device's region. Errors are the device's, not the client's.
pub(crate) fn check(region: &Region) -> Result<(), RegionError> {
    let fail = |reason: String| Err(RegionError { index: region.index, reason });
    let Some(first) = region.mappings.first() else { return check_io_fds(region) };
    if region.mappings.len() > MAX_AREAS {
        return fail(format!("it has {} mappings, at most {MAX_AREAS} are possible", region.mappings.len()));
    }
    for mapping in &region.mappings {
        let end = mapping.offset.checked_add(mapping.size);
        if mapping.size == 0 || end.is_none_or(|end| end > region.size) {
            return fail(format!("mapping {:#x}+{:#x} lies beyond it", mapping.offset, mapping.size));
        }
        if !(mapping.offset | mapping.size | mapping.fd_offset).is_multiple_of(PAGE) {
            return fail(format!(
                "mapping {:#x}+{:#x} isn't whole pages of its file",
                mapping.offset, mapping.size
            ));
        }
        if !Arc::ptr_eq(&mapping.fd, &first.fd) {
            return fail("its mappings have different files".to_owned());
        }
        if mapping.fd_offset.wrapping_sub(mapping.offset) != first.fd_offset.wrapping_sub(first.offset)
            || mapping.fd_offset < mapping.offset
        {
            return fail(
                "the distance from region to file offset differs between its mappings, or is negative"
                    .to_owned(),
            );
        }
    }
    check_io_fds(region)
}

fn check_io_fds(region: &Region) -> Result<(), RegionError> {
    for io_fd in &region.io_fds {
        let end = io_fd.offset.checked_add(io_fd.size.max(1));
        if !matches!(io_fd.size, 0 | 1 | 2 | 4 | 8) || end.is_none_or(|end| end > region.size) {
            return Err(RegionError {
                index: region.index,
                reason: format!(
                    "ioeventfd {:#x}+{:#x} lies beyond it or has no width of 0, 1, 2, 4 or 8",
                    io_fd.offset, io_fd.size
                ),
            });
        }
    }
    if region.io_fds.len() > MAX_IO_FDS {
        return Err(RegionError {
            index: region.index,
            reason: format!("it has {} ioeventfds, at most {MAX_IO_FDS} are possible", region.io_fds.len()),
        });
    }
    Ok(())
}

/// A reply: bytes and descriptors.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub body: Vec<u8>,
    pub fds: Vec<Arc<OwnedFd>>,
}

/// Encodes DEVICE_GET_REGION_INFO's reply for a client with room for `argsz` bytes. `None` is a missing region.
pub(crate) fn encode(index: u32, region: Option<&Region>, argsz: u32) -> Encoded {
    let Some(region) = region else {
        let info = RegionInfo { argsz: wire_len(size_of::<RegionInfo>()), index, ..RegionInfo::default() };
        return Encoded { body: info.as_bytes().to_vec(), fds: Vec::new() };
    };
    let mut capabilities: Vec<(u16, Vec<u8>)> = Vec::new();
    if index == doorbell_mode::REGION && region.size == doorbell_mode::REGION_SIZE {
        let kind = RegionType { kind: doorbell_mode::REGION_TYPE, subkind: doorbell_mode::REGION_SUBTYPE };
        capabilities.push((CAPABILITY_TYPE, kind.as_bytes().to_vec()));
    }
    let whole = matches!(region.mappings.as_slice(), [one] if one.offset == 0 && one.size == region.size);
    if !region.mappings.is_empty() && !whole {
        let mut body =
            SparseHeader { areas: wire_len(region.mappings.len()), reserved: 0 }.as_bytes().to_vec();
        for mapping in &region.mappings {
            body.extend_from_slice(SparseArea { offset: mapping.offset, size: mapping.size }.as_bytes());
        }
        capabilities.push((CAPABILITY_SPARSE, body));
    }

    let mut flags = 0;
    for (set, flag) in [
        (region.readable, REGION_READABLE),
        (region.writable, REGION_WRITABLE),
        (!region.mappings.is_empty(), REGION_MAPPABLE),
        (!capabilities.is_empty(), REGION_CAPABILITIES),
    ] {
        flags |= if set { flag } else { 0 };
    }
    let fixed = size_of::<RegionInfo>();
    let headers = size_of::<CapabilityHeader>();
    let total = fixed + capabilities.iter().map(|(_, body)| headers + body.len()).sum::<usize>();
    let info = RegionInfo {
        argsz: wire_len(total),
        flags,
        index,
        cap_offset: if capabilities.is_empty() { 0 } else { wire_len(fixed) },
        size: region.size,
        // Not negative: checked when the connection began.
        offset: region.mappings.first().map_or(0, |first| first.fd_offset.wrapping_sub(first.offset)),
    };
    let mut body = info.as_bytes().to_vec();
    if wire_len(total) > argsz {
        // The client repeats the request with more room, and then gets the descriptor.
        return Encoded { body, fds: Vec::new() };
    }
    let mut left = capabilities.len();
    for (id, data) in capabilities {
        left -= 1;
        let end = body.len() + headers + data.len();
        let next = if left == 0 { 0 } else { wire_len(end) };
        body.extend_from_slice(CapabilityHeader { id, version: 1, next }.as_bytes());
        body.extend_from_slice(&data);
    }
    Encoded { body, fds: region.mappings.first().map(|first| Arc::clone(&first.fd)).into_iter().collect() }
}

/// Encodes DEVICE_GET_REGION_IO_FDS's reply for a client with room for `argsz` bytes that accepts `max_fds`
/// descriptors.
pub(crate) fn encode_io_fds(region: &Region, argsz: u32, max_fds: usize) -> io::Result<Encoded> {
    let mut fds: Vec<Arc<OwnedFd>> = Vec::new();
    let mut subregions = Vec::new();
    for io_fd in &region.io_fds {
        let at = fds.iter().position(|fd| Arc::ptr_eq(fd, &io_fd.fd)).unwrap_or_else(|| {
            fds.push(Arc::clone(&io_fd.fd));
            fds.len() - 1
        });
        let entry = IoFd {
            offset: io_fd.offset,
            size: io_fd.size,
            fd_index: wire_len(at),
            kind: IO_FD_IOEVENTFD,
            flags: if io_fd.datamatch.is_some() { IO_FD_DATAMATCH } else { 0 },
            padding: 0,
            datamatch: io_fd.datamatch.unwrap_or(0),
        };
        subregions.extend_from_slice(entry.as_bytes());
    }
    let total = wire_len(size_of::<IoFdsInfo>() + subregions.len());
    let fits = total <= argsz;
    if fits && fds.len() > max_fds {
        return Err(rustix::io::Errno::TOOBIG.into());
    }
    let info =
        IoFdsInfo { argsz: total, flags: 0, index: region.index, count: wire_len(region.io_fds.len()) };
    let mut body = info.as_bytes().to_vec();
    if fits {
        body.extend_from_slice(&subregions);
    } else {
        fds.clear();
    }
    Ok(Encoded { body, fds })
}

/// A region from a server's reply.
#[derive(Debug, Clone)]
pub struct RegionDescription {
    /// Region index: 0 to 8 are VFIO's PCI regions.
    pub index: u32,
    /// Size in bytes, 0 if the region doesn't exist.
    pub size: u64,
    /// Whether it may be read.
    pub readable: bool,
    /// Whether it may be written.
    pub writable: bool,
    /// Parts that may be mapped: whole pages within the region that don't overlap (checked).
    pub mappings: Vec<RegionMapping>,
    /// Type and subtype of a device-specific region.
    pub kind: Option<(u32, u32)>,
}

/// The problem of a reply.
pub(crate) type Malformed = &'static str;

/// Parses DEVICE_GET_REGION_INFO's reply.
pub(crate) fn parse(index: u32, body: &[u8], fds: Vec<OwnedFd>) -> Result<RegionDescription, Malformed> {
    let (info, _) = RegionInfo::read_from_prefix(body).map_err(|_| "the region info is cut")?;
    if info.index != index {
        return Err("the region info is another region's");
    }
    let mut areas = None;
    let mut kind = None;
    if info.flags & REGION_CAPABILITIES != 0 {
        let mut at = info.cap_offset;
        let mut before = wire_len(size_of::<RegionInfo>()).saturating_sub(1);
        for _ in 0..MAX_CAPABILITIES {
            if at == 0 {
                break;
            }
            if at <= before {
                return Err("the region capabilities run in a circle");
            }
            before = at;
            let data = usize::try_from(at).ok().and_then(|at| body.get(at..));
            let (header, rest) = data
                .and_then(|data| CapabilityHeader::read_from_prefix(data).ok())
                .ok_or("a region capability lies beyond the message")?;
            match header.id {
                CAPABILITY_SPARSE => areas = Some(parse_areas(rest)?),
                CAPABILITY_TYPE => {
                    let (found, _) =
                        RegionType::read_from_prefix(rest).map_err(|_| "a region type is cut")?;
                    kind = Some((found.kind, found.subkind));
                }
                _ => {}
            }
            at = header.next;
        }
    }
    let mut mappings = Vec::new();
    if info.flags & REGION_MAPPABLE != 0 {
        let areas = areas.unwrap_or_else(|| vec![SparseArea { offset: 0, size: info.size }]);
        let fd = fds.into_iter().next();
        if !areas.is_empty() {
            let fd = Arc::new(fd.ok_or("a mappable region came without a descriptor")?);
            for area in areas {
                mappings.push(mapping(&info, area, &fd)?);
            }
            mappings.sort_by_key(|mapping| mapping.offset);
            if mappings.windows(2).any(|pair| pair[0].offset + pair[0].size > pair[1].offset) {
                return Err("mappable areas overlap");
            }
        }
    }
    Ok(RegionDescription {
        index,
        size: info.size,
        readable: info.flags & REGION_READABLE != 0,
        writable: info.flags & REGION_WRITABLE != 0,
        mappings,
        kind,
    })
}

fn parse_areas(data: &[u8]) -> Result<Vec<SparseArea>, Malformed> {
    let (header, rest) = SparseHeader::read_from_prefix(data).map_err(|_| "sparse areas are cut")?;
    let count = usize::try_from(header.areas).ok().filter(|count| *count <= MAX_AREAS);
    let count = count.ok_or("there are too many sparse areas")?;
    let mut areas = Vec::with_capacity(count);
    let mut rest = rest;
    for _ in 0..count {
        let (area, after) = SparseArea::read_from_prefix(rest).map_err(|_| "sparse areas are cut")?;
        rest = after;
        // The kernel's VFIO permits empty areas.
        if area.size != 0 {
            areas.push(area);
        }
    }
    Ok(areas)
}

fn mapping(info: &RegionInfo, area: SparseArea, fd: &Arc<OwnedFd>) -> Result<RegionMapping, Malformed> {
    let within = area.offset.checked_add(area.size).is_some_and(|end| end <= info.size);
    let fd_offset = info.offset.checked_add(area.offset);
    let fd_end = fd_offset.and_then(|start| start.checked_add(area.size));
    match fd_offset.filter(|_| fd_end.is_some()) {
        Some(fd_offset) if within && (area.offset | area.size | fd_offset).is_multiple_of(PAGE) => {
            Ok(RegionMapping { offset: area.offset, size: area.size, fd: Arc::clone(fd), fd_offset })
        }
        _ => Err("a mappable area isn't whole pages within its region"),
    }
}

/// Parses DEVICE_GET_REGION_IO_FDS's reply. Sub-regions of unknown kinds are omitted: their writes arrive as messages.
pub(crate) fn parse_io_fds(index: u32, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<RegionIoFd>, Malformed> {
    let (info, rest) = IoFdsInfo::read_from_prefix(body).map_err(|_| "the io fds are cut")?;
    if info.index != index {
        return Err("the io fds are another region's");
    }
    let count = usize::try_from(info.count).ok().filter(|count| *count <= MAX_IO_FDS);
    let count = count.ok_or("there are too many io fds")?;
    let fds: Vec<Arc<OwnedFd>> = fds.into_iter().map(Arc::new).collect();
    let mut found = Vec::with_capacity(count);
    if count == 0 {
        return Ok(found);
    }
    // Later versions may have longer entries.
    let stride = rest.len() / count;
    if stride < size_of::<IoFd>() {
        return Err("the io fds are cut");
    }
    for entry in rest.chunks_exact(stride).take(count) {
        let (entry, _) = IoFd::read_from_prefix(entry).map_err(|_| "the io fds are cut")?;
        if entry.kind != IO_FD_IOEVENTFD {
            continue;
        }
        if !matches!(entry.size, 0 | 1 | 2 | 4 | 8) {
            return Err("an ioeventfd has a width other than 0, 1, 2, 4 and 8");
        }
        let fd = usize::try_from(entry.fd_index).ok().and_then(|at| fds.get(at));
        found.push(RegionIoFd {
            offset: entry.offset,
            size: entry.size,
            datamatch: (entry.flags & IO_FD_DATAMATCH != 0).then_some(entry.datamatch),
            fd: Arc::clone(fd.ok_or("an ioeventfd names a descriptor that didn't come")?),
        });
    }
    Ok(found)
}
