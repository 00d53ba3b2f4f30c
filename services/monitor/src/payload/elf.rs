//! The parser of static ELF64 programs. It checks the whole file before guest memory is touched.
//!
//! Source: System V ABI, chapters 4 and 5, and its AMD64 supplement.

use payload_abi::LOWEST_LOAD_ADDRESS;
use std::ops::Range;

const HEADER_SIZE: usize = 64;
const PROGRAM_HEADER_SIZE: usize = 56;
/// Limit of program headers: more than any linker generates for a static program, and few enough to check all pairs.
const MAX_SEGMENTS: usize = 64;

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TYPE_EXEC: u16 = 2;
const TYPE_DYN: u16 = 3;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_DYNAMIC: u32 = 2;
const SEGMENT_INTERP: u32 = 3;

/// Why a file is no payload program.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ElfError {
    /// The file is shorter than its headers say.
    #[error(
        "The file ends within its {what}: {needed} bytes are needed and it has {length}; was it cut short?"
    )]
    Truncated {
        /// The incomplete part.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes present.
        length: u64,
    },
    /// The file isn't an ELF file.
    #[error(
        "The file doesn't begin as an ELF file does, but with bytes {0:02x?}; give a program linked for x86-64"
    )]
    NoMagic([u8; 4]),
    /// A header field has an unsupported value.
    #[error("The ELF header's {field} is {found}, and a payload program has {wanted}")]
    Header {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The expected value.
        wanted: &'static str,
    },
    /// The program is position-independent or dynamically linked.
    #[error("The program is {what}; link it with -static -no-pie")]
    NotStatic {
        /// Which of both.
        what: &'static str,
    },
    /// The file has too many program headers.
    #[error("The file has {found} program headers, and at most {MAX_SEGMENTS} are read")]
    TooManySegments {
        /// Number of program headers.
        found: u16,
    },
    /// The file has no segment to load.
    #[error("The file has no segment to load; link a whole program")]
    NoSegments,
    /// A segment has more bytes in the file than in memory.
    #[error(
        "Segment {index} has {file_size:#x} bytes in the file and {memory_size:#x} in memory; the file is damaged"
    )]
    LargerInFile {
        /// Number of the program header.
        index: usize,
        /// Its p_filesz.
        file_size: u64,
        /// Its p_memsz.
        memory_size: u64,
    },
    /// A segment overlaps the monitor's tables, or ends beyond the program's memory.
    #[error(
        "Segment {index} lies at {start:#x} with {size:#x} bytes, and a program may use {lowest:#x} to {end:#x}; change the link address or give the VM more memory"
    )]
    OutOfPlace {
        /// Number of the program header.
        index: usize,
        /// First address of the segment.
        start: u64,
        /// Size of the segment, bytes.
        size: u64,
        /// Lowest allowed address.
        lowest: u64,
        /// First address beyond the allowed range.
        end: u64,
    },
    /// Two segments overlap.
    #[error("Segments {first} and {second} overlap in memory; the file is damaged or its link script wrong")]
    Overlap {
        /// Number of the first program header.
        first: usize,
        /// Number of the second.
        second: usize,
    },
    /// The entry point is in no executable segment.
    #[error("The entry point {entry:#x} lies in no executable segment")]
    BadEntry {
        /// The entry point.
        entry: u64,
    },
}

/// A segment to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical start.
    pub start: u64,
    /// Bytes in memory. Those beyond the file's are zero.
    pub size: u64,
    /// Range of its bytes in the file.
    pub file: Range<usize>,
    executable: bool,
    index: usize,
}

/// A checked program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Address of the first instruction.
    pub entry: u64,
    /// Segments, none of which overlap.
    pub segments: Vec<Segment>,
    /// First address above all segments.
    pub end: u64,
}

impl Program {
    /// Checks a file whose segments must lie between [`LOWEST_LOAD_ADDRESS`] and `memory_end`.
    pub fn parse(file: &[u8], memory_end: u64) -> Result<Self, ElfError> {
        let reader = Reader { file };
        let magic: [u8; 4] = reader.array(0, "header")?;
        if magic != *b"\x7fELF" {
            return Err(ElfError::NoMagic(magic));
        }
        reader.slice(0, HEADER_SIZE, "header")?;
        check_header(&reader)?;
        let entry = reader.u64(24, "header")?;
        let table = reader.u64(32, "header")?;
        let count = reader.u16(56, "header")?;
        if usize::from(count) > MAX_SEGMENTS {
            return Err(ElfError::TooManySegments { found: count });
        }
        let mut segments = Vec::new();
        for index in 0..usize::from(count) {
            if let Some(segment) = parse_segment(&reader, table, index, memory_end)? {
                segments.push(segment);
            }
        }
        let end =
            segments.iter().map(|segment| segment.start + segment.size).max().ok_or(ElfError::NoSegments)?;
        for (position, first) in segments.iter().enumerate() {
            for second in segments.iter().skip(position + 1) {
                if first.start < second.start + second.size && second.start < first.start + first.size {
                    return Err(ElfError::Overlap { first: first.index, second: second.index });
                }
            }
        }
        let executable = |segment: &Segment| {
            segment.executable && (segment.start..segment.start + segment.size).contains(&entry)
        };
        if !segments.iter().any(executable) {
            return Err(ElfError::BadEntry { entry });
        }
        Ok(Self { entry, segments, end })
    }
}

fn check_header(reader: &Reader<'_>) -> Result<(), ElfError> {
    let [class, data, version] = reader.array(4, "header")?;
    let fields: [(&'static str, u64, u64, &'static str); 6] = [
        ("class", class.into(), CLASS_64.into(), "2 (64 bits)"),
        ("byte order", data.into(), LITTLE_ENDIAN.into(), "1 (little-endian)"),
        ("version", version.into(), 1, "1"),
        ("machine", reader.u16(18, "header")?.into(), MACHINE_X86_64.into(), "62 (x86-64)"),
        ("size", reader.u16(52, "header")?.into(), HEADER_SIZE as u64, "64"),
        ("program header size", reader.u16(54, "header")?.into(), PROGRAM_HEADER_SIZE as u64, "56"),
    ];
    for (field, found, expected, wanted) in fields {
        if found != expected {
            return Err(ElfError::Header { field, found, wanted });
        }
    }
    match reader.u16(16, "header")? {
        TYPE_EXEC => Ok(()),
        TYPE_DYN => Err(ElfError::NotStatic { what: "position-independent" }),
        other => Err(ElfError::Header { field: "type", found: other.into(), wanted: "2 (executable)" }),
    }
}

fn parse_segment(
    reader: &Reader<'_>,
    table: u64,
    index: usize,
    memory_end: u64,
) -> Result<Option<Segment>, ElfError> {
    const WHAT: &str = "program headers";
    // At most 64 * 56 bytes beyond the table's start.
    let at = (index * PROGRAM_HEADER_SIZE) as u64;
    let Some(at) = table.checked_add(at).and_then(|at| usize::try_from(at).ok()) else {
        return Err(reader.truncated(WHAT, u64::MAX));
    };
    reader.slice(at, PROGRAM_HEADER_SIZE, WHAT)?;
    match reader.u32(at, WHAT)? {
        SEGMENT_LOAD => {}
        SEGMENT_INTERP => return Err(ElfError::NotStatic { what: "linked to an interpreter" }),
        SEGMENT_DYNAMIC => return Err(ElfError::NotStatic { what: "dynamically linked" }),
        _ => return Ok(None),
    }
    let flags = reader.u32(at + 4, WHAT)?;
    let offset = reader.u64(at + 8, WHAT)?;
    let start = reader.u64(at + 16, WHAT)?;
    let file_size = reader.u64(at + 32, WHAT)?;
    let size = reader.u64(at + 40, WHAT)?;
    if file_size > size {
        return Err(ElfError::LargerInFile { index, file_size, memory_size: size });
    }
    if size == 0 {
        return Ok(None);
    }
    let fits = start >= LOWEST_LOAD_ADDRESS && start.checked_add(size).is_some_and(|end| end <= memory_end);
    if !fits {
        return Err(ElfError::OutOfPlace {
            index,
            start,
            size,
            lowest: LOWEST_LOAD_ADDRESS,
            end: memory_end,
        });
    }
    let end = offset.saturating_add(file_size);
    let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok()).map(|(start, end)| start..end);
    let Some(range) = range.filter(|range| file_size == 0 || range.end <= reader.file.len()) else {
        return Err(reader.truncated("segments", end));
    };
    let file = if file_size == 0 { 0..0 } else { range };
    Ok(Some(Segment { start, size, file, executable: flags & 1 != 0, index }))
}

struct Reader<'a> {
    file: &'a [u8],
}

impl Reader<'_> {
    fn truncated(&self, what: &'static str, needed: u64) -> ElfError {
        ElfError::Truncated { what, needed, length: self.file.len() as u64 }
    }

    fn slice(&self, at: usize, length: usize, what: &'static str) -> Result<&[u8], ElfError> {
        let end = at.checked_add(length);
        end.and_then(|end| self.file.get(at..end))
            .ok_or_else(|| self.truncated(what, end.map_or(u64::MAX, |end| end as u64)))
    }

    fn array<const N: usize>(&self, at: usize, what: &'static str) -> Result<[u8; N], ElfError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.slice(at, N, what)?);
        Ok(bytes)
    }

    fn u16(&self, at: usize, what: &'static str) -> Result<u16, ElfError> {
        self.array(at, what).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize, what: &'static str) -> Result<u32, ElfError> {
        self.array(at, what).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize, what: &'static str) -> Result<u64, ElfError> {
        self.array(at, what).map(u64::from_le_bytes)
    }
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
