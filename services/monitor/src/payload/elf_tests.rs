//! Tests of the ELF parser, with a small handwritten program and with damaged ones.

use super::{ElfError, Program};
use proptest::prelude::*;

const MEMORY_END: u64 = 64 << 20;

/// Header, two program headers, 16 bytes of code, 8 of data. The data segment has 100 bytes in memory, and isn't page-aligned.
fn small_program() -> Vec<u8> {
    let mut file = vec![0; 64 + 2 * 56 + 24];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    put(&mut file, 16, &2_u16.to_le_bytes());
    put(&mut file, 18, &62_u16.to_le_bytes());
    put(&mut file, 24, &0x20_0000_u64.to_le_bytes());
    put(&mut file, 32, &64_u64.to_le_bytes());
    put(&mut file, 52, &64_u16.to_le_bytes());
    put(&mut file, 54, &56_u16.to_le_bytes());
    put(&mut file, 56, &2_u16.to_le_bytes());
    for (at, flags, offset, start, file_size, size) in
        [(64, 5_u32, 176_u64, 0x20_0000_u64, 16_u64, 16_u64), (120, 6, 192, 0x20_0123, 8, 100)]
    {
        put(&mut file, at, &1_u32.to_le_bytes());
        put(&mut file, at + 4, &flags.to_le_bytes());
        for (field, value) in [(8, offset), (16, start), (24, start), (32, file_size), (40, size)] {
            put(&mut file, at + field, &value.to_le_bytes());
        }
    }
    file
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn a_sound_program_is_understood() {
    let program = Program::parse(&small_program(), MEMORY_END).unwrap();
    assert_eq!(program.entry, 0x20_0000);
    assert_eq!(program.end, 0x20_0123 + 100);
    assert_eq!(program.segments.len(), 2);
    assert_eq!(program.segments[1].file, 192..200);
}

#[test]
fn each_kind_of_damage_is_named() {
    let broken = |at: usize, bytes: &[u8]| {
        let mut file = small_program();
        put(&mut file, at, bytes);
        Program::parse(&file, MEMORY_END).unwrap_err()
    };
    assert!(matches!(Program::parse(b"", MEMORY_END), Err(ElfError::Truncated { .. })));
    assert!(matches!(Program::parse(b"#!/bin/sh\n", MEMORY_END), Err(ElfError::NoMagic(_))));
    assert!(matches!(broken(4, &[1]), ElfError::Header { field: "class", .. }));
    assert!(matches!(broken(16, &[3]), ElfError::NotStatic { .. }));
    assert!(matches!(broken(18, &[40]), ElfError::Header { field: "machine", .. }));
    assert!(matches!(broken(24, &[0, 0, 0]), ElfError::BadEntry { entry: 0 }));
    assert!(matches!(broken(32, &u64::MAX.to_le_bytes()), ElfError::Truncated { .. }));
    assert!(matches!(broken(56, &[0, 0]), ElfError::NoSegments));
    assert!(matches!(broken(56, &[255, 255]), ElfError::TooManySegments { found: 65535 }));
    assert!(matches!(broken(64, &[3]), ElfError::NotStatic { .. }));
    assert!(matches!(broken(64 + 8, &u64::MAX.to_le_bytes()), ElfError::Truncated { .. }));
    assert!(matches!(broken(64 + 16, &0x1000_u64.to_le_bytes()), ElfError::OutOfPlace { index: 0, .. }));
    assert!(matches!(broken(64 + 40, &8_u64.to_le_bytes()), ElfError::LargerInFile { index: 0, .. }));
    assert!(matches!(broken(120 + 16, &0x20_0008_u64.to_le_bytes()), ElfError::Overlap { .. }));
    assert!(matches!(broken(120 + 40, &u64::MAX.to_le_bytes()), ElfError::OutOfPlace { index: 1, .. }));
    assert!(matches!(Program::parse(&small_program(), 0x20_0100), Err(ElfError::OutOfPlace { .. })));
}

/// Checks that an accepted program can be loaded: inside memory, inside the file, without overlaps.
fn assert_loadable(program: &Program, file: &[u8]) {
    assert!(program.end <= MEMORY_END);
    for segment in &program.segments {
        assert!(segment.start >= payload_abi::LOWEST_LOAD_ADDRESS);
        assert!(segment.start + segment.size <= program.end);
        assert!(file.get(segment.file.clone()).is_some());
        assert!(segment.file.len() as u64 <= segment.size);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// No bytes make the parser panic, or accept a program that can't be loaded.
    #[test]
    fn mutated_programs_are_refused_or_loadable(
        changes in prop::collection::vec((0_usize..200, any::<u8>()), 0..12),
        words in prop::collection::vec((0_usize..25, prop::sample::select(vec![
            0, 1, u64::MAX, u64::MAX - 7, i64::MAX as u64, 0x20_0000, MEMORY_END, MEMORY_END - 1, 200, 199,
        ])), 0..4),
        length in 0_usize..=200,
    ) {
        let mut file = small_program();
        for (at, byte) in changes {
            file[at] = byte;
        }
        for (word, value) in words {
            put(&mut file, word * 8, &value.to_le_bytes());
        }
        for file in [&file[..], &file[..length]] {
            match Program::parse(file, MEMORY_END) {
                Ok(program) => assert_loadable(&program, file),
                Err(error) => {
                    let text = error.to_string();
                    prop_assert!(!text.contains('\n') && text.len() < 300, "{text}");
                }
            }
        }
    }

    /// The same for bytes that only begin like an ELF file.
    #[test]
    fn random_bytes_are_refused_or_loadable(tail in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.extend(tail);
        if let Ok(program) = Program::parse(&file, MEMORY_END) {
            assert_loadable(&program, &file);
        }
    }
}
