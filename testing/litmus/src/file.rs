//! Writes tests into the file of the program `litmus`.

use crate::code::machine_code;
use crate::model::Memory;
use crate::test::{Test, Width};
use payload_litmus::table::{
    CAPACITY, HEADER_SIZE, MAGIC, Placement, RECORD_SIZE, Record, Thread, name_bytes,
};
use payload_litmus::{MOST_LOCATIONS, MOST_THREADS};

/// A test at a placement of its locations.
#[derive(Debug, Clone, Copy)]
pub struct Variant<'a> {
    /// The test.
    pub test: &'a Test,
    /// Placement of its locations.
    pub placement: Placement,
}

impl Variant<'_> {
    /// Returns the memory layout for the model.
    #[must_use]
    pub fn memory(&self) -> Memory {
        if self.placement == Placement::Cross { Memory::Split } else { Memory::Whole }
    }

    /// Returns the test's name with the placement's.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{} ({})", self.test.name, self.placement.name())
    }
}

/// The file can't be made.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file isn't the program, or has another version.
    #[error(
        "The file has {count} tables of tests and has to have one; build the program 'litmus' anew (make payloads)"
    )]
    Table {
        /// Number of tables found.
        count: usize,
    },
    /// Too many tests.
    #[error("{tests} tests take {needed} bytes and the table has {CAPACITY}; choose fewer at a time")]
    Full {
        /// Number of tests.
        tests: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// The table can't describe a test.
    #[error("The test {name} can't be run: {reason}")]
    Test {
        /// Its name.
        name: String,
        /// The reason.
        reason: String,
    },
}

/// Returns the program's file with these tests.
///
/// # Errors
/// The file has no table, the table is too small, or a test can't be described.
pub fn fill(program: &[u8], variants: &[Variant<'_>]) -> Result<Vec<u8>, FileError> {
    let found: Vec<usize> = program
        .windows(MAGIC.len())
        .enumerate()
        .filter(|(_, bytes)| **bytes == MAGIC)
        .map(|(at, _)| at)
        .collect();
    let table = match found.as_slice() {
        [at] if program.len() >= at + HEADER_SIZE + CAPACITY => *at,
        _ => return Err(FileError::Table { count: found.len() }),
    };
    let mut code = Vec::new();
    let mut records = Vec::new();
    let codes_at = variants.len() * RECORD_SIZE;
    for variant in variants {
        let record = describe(*variant, codes_at, &mut code)
            .map_err(|reason| FileError::Test { name: variant.name(), reason })?;
        records.extend(record.to_bytes());
    }
    let content = [records, code].concat();
    if content.len() > CAPACITY {
        return Err(FileError::Full { tests: variants.len(), needed: content.len() });
    }
    let mut file = program.to_vec();
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    file[table + 20..table + 24].copy_from_slice(&word(content.len()));
    file[table + 24..table + 28].copy_from_slice(&word(variants.len()));
    let start = table + HEADER_SIZE;
    file[start..start + content.len()].copy_from_slice(&content);
    Ok(file)
}

/// Returns a test's record. Appends its code to `code`, which starts at `codes_at` of the table.
fn describe(variant: Variant<'_>, codes_at: usize, code: &mut Vec<u8>) -> Result<Record, String> {
    let Variant { test, placement } = variant;
    if placement == Placement::Cross && test.width().is_none() {
        return Err("its accesses have different widths, so no place lies across a boundary for all of them"
            .to_owned());
    }
    let short = |value: usize| u32::try_from(value).map_err(|_| "it is too large".to_owned());
    let mut record = Record {
        name: name_bytes(&test.name).ok_or("its name is too long")?,
        placement,
        width: short(test.width().unwrap_or(Width::Quad).bytes())?,
        threads: short(test.threads.len())?,
        locations: short(test.locations.len())?,
        initial: [0; MOST_LOCATIONS],
        thread: [Thread::default(); MOST_THREADS],
    };
    for (slot, value) in record.initial.iter_mut().zip(&test.initial) {
        *slot = *value;
    }
    for (index, thread) in test.threads.iter().enumerate() {
        // Each code has separate cache lines; the table starts at a page.
        let at = codes_at + code.len();
        let padded = (HEADER_SIZE + at).next_multiple_of(64) - HEADER_SIZE;
        code.resize(padded - codes_at, 0xcc);
        record.thread[index] = Thread { code: short(padded)?, observed: short(Test::loaded(thread).len())? };
        code.extend(machine_code(test, index).map_err(|error| error.to_string())?);
    }
    Ok(record)
}
