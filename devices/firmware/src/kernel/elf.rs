//! vmlinux: an ELF executable whose segments go to their physical addresses (ELF-64 object file format 1.5).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::{BootProtocol, KernelError, KernelFormat, Plan, Segment, read_header};
use crate::image::Image;
use crate::layout;
use crate::ranges::AddressRange;

/// First bytes of every ELF file.
pub(super) const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TYPE_EXECUTABLE: u16 = 2;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
/// A vmlinux has five or six segments.
const MOST_SEGMENTS: u16 = 64;
/// A vmlinux has a few hundred bytes of notes.
const LONGEST_NOTES: u64 = 64 * 1024;
/// Xen's note with the 32-bit physical entry point for PVH.
const XEN_PHYS32_ENTRY: u32 = 18;
const XEN_NOTE_NAME: &[u8] = b"Xen\0";
/// `COMMAND_LINE_SIZE` of x86 without its NUL. A vmlinux has no header with this limit.
const COMMAND_LINE_MAX: u64 = 2047;

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileHeader {
    magic: [u8; 4],
    class: u8,
    data: u8,
    ident: [u8; 10],
    kind: U16,
    machine: U16,
    version: U32,
    entry: U64,
    program_headers: U64,
    section_headers: U64,
    flags: U32,
    header_size: U16,
    program_header_size: U16,
    program_header_count: U16,
    section_header_size: U16,
    section_header_count: U16,
    section_names: U16,
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProgramHeader {
    kind: U32,
    flags: U32,
    offset: U64,
    virtual_address: U64,
    physical_address: U64,
    file_size: U64,
    memory_size: U64,
    alignment: U64,
}

const _: () = {
    assert!(size_of::<FileHeader>() == 64);
    assert!(size_of::<ProgramHeader>() == 56);
};

/// Parses the headers; `head` is the start of the file.
pub(super) fn plan(image: &dyn Image, head: &[u8], protocol: BootProtocol) -> Result<Plan, KernelError> {
    let malformed = |what: String| KernelError::Malformed { name: image.name(), what };
    let Ok((header, _)) = FileHeader::ref_from_prefix(head) else {
        return Err(truncated(image, "its ELF header", size_of::<FileHeader>() as u64));
    };
    check_machine(image, header)?;
    if header.kind.get() != TYPE_EXECUTABLE {
        return Err(malformed(format!(
            "its ELF type is {} and a vmlinux is an executable ({TYPE_EXECUTABLE})",
            header.kind
        )));
    }
    let count = header.program_header_count.get();
    let size = header.program_header_size.get();
    if usize::from(size) != size_of::<ProgramHeader>() || !(1..=MOST_SEGMENTS).contains(&count) {
        return Err(malformed(format!("it has {count} program headers of {size} bytes")));
    }
    let mut table = vec![0u8; usize::from(count) * size_of::<ProgramHeader>()];
    let offset = header.program_headers.get();
    check_file_range(image, "its program header table", offset, table.len() as u64)?;
    read_header(image, offset, &mut table)?;

    let mut segments = Vec::new();
    let mut pvh_entry = None;
    for bytes in table.chunks_exact(size_of::<ProgramHeader>()) {
        let Ok(program) = ProgramHeader::read_from_bytes(bytes) else { continue };
        match program.kind.get() {
            SEGMENT_LOAD => segments.extend(load_segment(image, &program)?),
            SEGMENT_NOTE if pvh_entry.is_none() => pvh_entry = find_pvh_entry(image, &program)?,
            _ => {}
        }
    }
    let (Some(start), Some(end)) = (
        segments.iter().map(|s: &Segment| s.range.start).min(),
        segments.iter().map(|s| s.range.end()).max(),
    ) else {
        return Err(malformed("it has nothing to load".to_owned()));
    };

    let (protocol, entry) = match (protocol, pvh_entry) {
        (BootProtocol::Auto | BootProtocol::Pvh, Some(entry)) => (BootProtocol::Pvh, u64::from(entry)),
        (BootProtocol::Pvh, None) => {
            return Err(KernelError::Protocol {
                name: image.name(),
                protocol: "PVH",
                why: "it has no PVH entry note; build it with CONFIG_PVH=y or ask for the Linux protocol",
            });
        }
        (BootProtocol::Auto | BootProtocol::Linux64, _) => (BootProtocol::Linux64, header.entry.get()),
    };
    Ok(Plan {
        format: KernelFormat::Elf,
        protocol,
        segments,
        kernel: AddressRange { start, len: end - start },
        entry,
        header: None,
        command_line_max: COMMAND_LINE_MAX,
        // Linux stores the address of a PVH module in 32 bits.
        initrd_end_max: layout::LOW_RAM_END,
        initrd_above_4g: false,
    })
}

fn check_machine(image: &dyn Image, header: &FileHeader) -> Result<(), KernelError> {
    let machine = match (header.machine.get(), header.class, header.data) {
        (MACHINE_X86_64, CLASS_64, LITTLE_ENDIAN) => return Ok(()),
        (MACHINE_X86_64, class, LITTLE_ENDIAN) => format!("x86-64 in ELF class {class} instead of 2"),
        (3, ..) => "32-bit x86".to_owned(),
        (8, ..) => "MIPS".to_owned(),
        (20 | 21, ..) => "PowerPC".to_owned(),
        (22, ..) => "S/390".to_owned(),
        (40, ..) => "32-bit ARM".to_owned(),
        (183, ..) => "ARM64".to_owned(),
        (243, ..) => "RISC-V".to_owned(),
        (machine, class, data) => format!("ELF machine {machine} (class {class}, byte order {data})"),
    };
    Err(KernelError::WrongMachine { name: image.name(), machine })
}

fn load_segment(image: &dyn Image, program: &ProgramHeader) -> Result<Option<Segment>, KernelError> {
    let (address, file_len, len) =
        (program.physical_address.get(), program.file_size.get(), program.memory_size.get());
    if file_len > len {
        return Err(KernelError::Malformed {
            name: image.name(),
            what: format!("a segment has {file_len:#x} bytes in the file and {len:#x} in memory"),
        });
    }
    if len == 0 {
        return Ok(None);
    }
    check_file_range(image, "a segment", program.offset.get(), file_len)?;
    if address.checked_add(len).is_none() {
        return Err(KernelError::Malformed {
            name: image.name(),
            what: format!("a segment of {len:#x} bytes at {address:#x} is beyond the address space"),
        });
    }
    Ok(Some(Segment {
        file_offset: program.offset.get(),
        file_len,
        range: AddressRange { start: address, len },
        zero_rest: true,
    }))
}

/// Searches the notes of one segment for the PVH entry.
fn find_pvh_entry(image: &dyn Image, program: &ProgramHeader) -> Result<Option<u32>, KernelError> {
    let malformed = |what: String| KernelError::Malformed { name: image.name(), what };
    let (offset, len) = (program.offset.get(), program.file_size.get());
    if len > LONGEST_NOTES {
        return Err(malformed(format!("its notes are {len} bytes long; {LONGEST_NOTES} are accepted")));
    }
    check_file_range(image, "its notes", offset, len)?;
    let mut notes = vec![0u8; usize::try_from(len).unwrap_or(0)];
    read_header(image, offset, &mut notes)?;
    let alignment = if program.alignment.get() == 8 { 8 } else { 4 };
    let mut rest = notes.as_slice();
    while let Some((note, next)) = next_note(rest, alignment) {
        if note.kind == XEN_PHYS32_ENTRY && note.name == XEN_NOTE_NAME {
            let entry = match note.description.len() {
                4 => U32::read_from_bytes(note.description).ok().map(|value| u64::from(value.get())),
                8 => U64::read_from_bytes(note.description).ok().map(|value| value.get()),
                _ => None,
            };
            return match entry.map(u32::try_from) {
                Some(Ok(entry)) => Ok(Some(entry)),
                _ => Err(malformed(format!("its PVH entry note holds {:02x?}", note.description))),
            };
        }
        rest = next;
    }
    Ok(None)
}

struct Note<'a> {
    kind: u32,
    name: &'a [u8],
    description: &'a [u8],
}

/// Returns the first note of `bytes` and the bytes after it, or `None` if no complete note is left.
fn next_note(bytes: &[u8], alignment: usize) -> Option<(Note<'_>, &[u8])> {
    let (sizes, rest) = <[U32; 3]>::read_from_prefix(bytes).ok()?;
    let [name_len, description_len, kind] = sizes.map(U32::get);
    let (name_len, description_len) =
        (usize::try_from(name_len).ok()?, usize::try_from(description_len).ok()?);
    let name = rest.get(..name_len)?;
    let header = size_of::<[U32; 3]>();
    let description_start = header.checked_add(name_len)?.checked_next_multiple_of(alignment)?;
    let description_end = description_start.checked_add(description_len)?;
    let description = bytes.get(description_start..description_end)?;
    let end = description_end.checked_next_multiple_of(alignment)?;
    Some((Note { kind, name, description }, bytes.get(end..).unwrap_or_default()))
}

fn check_file_range(image: &dyn Image, what: &'static str, offset: u64, len: u64) -> Result<(), KernelError> {
    let end = offset.checked_add(len).ok_or_else(|| KernelError::Malformed {
        name: image.name(),
        what: format!("{what} of {len:#x} bytes lies at file offset {offset:#x}"),
    })?;
    if end > image.len() { Err(truncated(image, what, end)) } else { Ok(()) }
}

fn truncated(image: &dyn Image, what: &'static str, needed: u64) -> KernelError {
    KernelError::Truncated { name: image.name(), what, needed, have: image.len() }
}
