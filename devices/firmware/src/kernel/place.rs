//! Chooses addresses in RAM, and checks that everything fits.

use machine::memory::{GuestAddress, GuestMemory, GuestMemoryBackend};

use super::{KernelError, Plan};
use crate::image::Image;
use crate::layout;
use crate::ranges::{AddressRange, RamRange};

/// Returns RAM as plain ranges with adjacent ones merged, after a check against guest memory.
pub(super) fn checked_ram(memory: &GuestMemory, ram: &[RamRange]) -> Result<Vec<AddressRange>, KernelError> {
    let error = |what| KernelError::Ram { what };
    let mut merged: Vec<AddressRange> = Vec::new();
    for &RamRange { range, .. } in ram.iter().filter(|r| r.range.len > 0) {
        let len = usize::try_from(range.len).ok();
        let end = range.start.checked_add(range.len);
        if end.is_none() || !len.is_some_and(|len| memory.check_range(GuestAddress(range.start), len)) {
            return Err(error(format!("{:#x} bytes at {:#x} are not guest memory", range.len, range.start)));
        }
        match merged.last_mut() {
            Some(last) if range.start < last.end() => {
                return Err(error(format!("RAM at {:#x} overlaps RAM before it", range.start)));
            }
            Some(last) if range.start == last.end() => last.len += range.len,
            _ => merged.push(range),
        }
    }
    match merged.first() {
        Some(first) if first.start == 0 && first.len >= layout::MINIMUM_RAM => Ok(merged),
        _ => Err(error(format!(
            "the first {} MiB must be RAM; give the VM more memory",
            layout::MINIMUM_RAM >> 20
        ))),
    }
}

/// Checks that every segment is in RAM above the boot structures, none overlaps another, and the entry is inside one.
pub(super) fn check_kernel(image: &dyn Image, plan: &Plan, ram: &[AddressRange]) -> Result<(), KernelError> {
    let mut sorted: Vec<_> = plan.segments.iter().map(|segment| segment.range).collect();
    sorted.sort_by_key(|range| range.start);
    for pair in sorted.windows(2) {
        if pair[0].end() > pair[1].start {
            return Err(KernelError::Malformed {
                name: image.name(),
                what: format!(
                    "segments overlap: {:#x}..{:#x} and {:#x}..{:#x}",
                    pair[0].start,
                    pair[0].end(),
                    pair[1].start,
                    pair[1].end()
                ),
            });
        }
    }
    for range in &sorted {
        if range.start < layout::KERNEL_MINIMUM {
            return Err(KernelError::Unplaceable {
                role: "kernel",
                name: image.name(),
                what: format!(
                    "it wants memory at {:#x}, where boot structures lie; it must start at {:#x} or above",
                    range.start,
                    layout::KERNEL_MINIMUM
                ),
            });
        }
        // Above the hole nothing is mapped at kernel start, and the kernel's memory range would include the hole.
        let low = range.end() <= layout::LOW_RAM_END;
        if !low || !ram.iter().any(|r| r.contains(range.start, range.len)) {
            return Err(no_room(image, *range, ram));
        }
    }
    if !sorted.iter().any(|range| range.contains(plan.entry, 1)) {
        return Err(KernelError::Malformed {
            name: image.name(),
            what: format!("its entry point {:#x} lies outside of what is loaded", plan.entry),
        });
    }
    Ok(())
}

fn no_room(image: &dyn Image, range: AddressRange, ram: &[AddressRange]) -> KernelError {
    let end = range.end();
    if range.start >= layout::LOW_RAM_END || end > layout::LOW_RAM_END {
        return KernelError::Unplaceable {
            role: "kernel",
            name: image.name(),
            what: format!(
                "it wants memory from {:#x} to {end:#x}; kernels must lie below {:#x}",
                range.start,
                layout::LOW_RAM_END
            ),
        };
    }
    let ram_end = ram.first().map_or(0, AddressRange::end);
    KernelError::TooBig { role: "kernel", name: image.name(), end, ram_end, needed: end }
}

/// Returns the command line with its NUL.
pub(super) fn command_line(text: &str, longest: u64) -> Result<Vec<u8>, KernelError> {
    if let Some(position) = text.bytes().position(|byte| byte == 0) {
        return Err(KernelError::CommandLine { what: format!("has a NUL at byte {position}; remove it") });
    }
    let longest = longest.min(layout::COMMAND_LINE_CAPACITY - 1);
    if text.len() as u64 > longest {
        return Err(KernelError::CommandLine {
            what: format!("is {} bytes long and this kernel takes {longest} at most; shorten it", text.len()),
        });
    }
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
    Ok(bytes)
}

/// Returns the number of zero bytes after an initrd of this length, which align the next one.
pub(super) fn initrd_padding(len: u64) -> usize {
    match len % 4 {
        0 => 0,
        1 => 3,
        2 => 2,
        _ => 1,
    }
}

/// Returns one range for all initrds, as high as the kernel permits below the PCI hole, or above 4 GiB.
pub(super) fn initrds(
    images: &[&dyn Image],
    plan: &Plan,
    ram: &[AddressRange],
) -> Result<Option<AddressRange>, KernelError> {
    let mut total = 0u64;
    for image in images {
        if image.is_empty() {
            return Err(KernelError::Empty { role: "initrd", name: image.name() });
        }
        total = total
            .checked_add(image.len())
            .and_then(|sum| sum.checked_add(initrd_padding(image.len()) as u64))
            .ok_or_else(|| unplaceable(*image, "all initrds together are over 2^64 bytes".to_owned()))?;
    }
    let Some(first) = images.first() else { return Ok(None) };

    let low_ram_end = ram.first().map_or(0, AddressRange::end);
    let limit = low_ram_end.min(plan.initrd_end_max);
    let floor = plan.kernel.end().max(layout::KERNEL_MINIMUM);
    let below = limit
        .checked_sub(total)
        .map(|start| start - start % layout::PAGE_SIZE)
        .filter(|&start| start >= floor);
    if let Some(start) = below {
        return Ok(Some(AddressRange { start, len: total }));
    }
    if plan.initrd_above_4g {
        let above = ram.iter().rev().find(|r| r.start >= layout::HIGH_RAM_START && r.len >= total);
        if let Some(range) = above {
            let start = range.end() - total;
            let start = start - start % layout::PAGE_SIZE;
            // Ranges start at page boundaries, so rounding down stays inside.
            if start >= range.start {
                return Ok(Some(AddressRange { start, len: total }));
            }
        }
    }
    let needed = floor.saturating_add(total).saturating_add(layout::PAGE_SIZE);
    if needed > layout::LOW_RAM_END.min(plan.initrd_end_max) && !plan.initrd_above_4g {
        return Err(unplaceable(
            *first,
            format!(
                "{total} bytes don't fit between the kernel's end at {floor:#x} and {:#x}, the highest \
                 address that this kernel takes",
                plan.initrd_end_max.min(layout::LOW_RAM_END)
            ),
        ));
    }
    Err(KernelError::TooBig {
        role: "initrd",
        name: first.name(),
        end: needed,
        ram_end: limit,
        needed: if needed > layout::LOW_RAM_END {
            layout::LOW_RAM_END.saturating_add(total).saturating_add(layout::PAGE_SIZE)
        } else {
            needed
        },
    })
}

fn unplaceable(image: &dyn Image, what: String) -> KernelError {
    KernelError::Unplaceable { role: "initrd", name: image.name(), what }
}
