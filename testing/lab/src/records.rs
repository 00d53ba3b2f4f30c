//! The block device crash test. A writer inside the guest fills a disk with numbered records with checksums, and prints
//! which are durable. A checker outside looks for all of them after the monitor was killed.
//!
//! A record is one 4 KiB block at `number * 4096`: magic, run, number, checksum, then bytes derived from run and
//! number. The writer prints `ACK run number` after the completion of the flush that covers all records up to `number`.

use anyhow::{Context, Result, bail};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Size of a record in bytes.
pub const RECORD: usize = 4096;
const MAGIC: u64 = 0x4c41_4252_4543_4f52;

fn mix(state: &mut u64) -> u64 {
    // xorshift64*: fast, and no repeating pattern that a wrong block could share.
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(8).fold(0xcbf2_9ce4_8422_2325, |h, c| {
        let word = <[u8; 8]>::try_from(c).map_or(0, u64::from_le_bytes);
        (h ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
    })
}

/// Returns a record.
pub fn record(run: u64, number: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(RECORD);
    for head in [MAGIC, run, number, 0] {
        bytes.extend(head.to_le_bytes());
    }
    let mut state = (run << 32) ^ number ^ 0x9e37_79b9_7f4a_7c15;
    while bytes.len() < RECORD {
        bytes.extend(mix(&mut state).to_le_bytes());
    }
    let check = sum(&bytes);
    bytes[24..32].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// Returns whether a block is that complete record.
pub fn is_record(block: &[u8], run: u64, number: u64) -> bool {
    block == record(run, number)
}

/// Writes records to a device until it is full or the guest dies; then prints `FULL`.
pub fn write(device: &Path, run: u64) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .open(device)
        .with_context(|| format!("Can't open {}", device.display()))?;
    let size = file.seek(std::io::SeekFrom::End(0))?;
    let slots = size / RECORD as u64;
    let mut state = run ^ 0x1234_5678_9abc_def1;
    let mut next = 0;
    let mut out = std::io::stdout();
    writeln!(out, "WRITER run {run} slots {slots}")?;
    while next < slots {
        let batch = (1 + mix(&mut state) % 24).min(slots - next);
        // In reverse, so that the order on disk differs from the order of writes.
        for number in (next..next + batch).rev() {
            file.write_all_at(&record(run, number), number * RECORD as u64)?;
        }
        file.sync_data().context("The disk refused to flush")?;
        next += batch;
        writeln!(out, "ACK {run} {}", next - 1)?;
        out.flush()?;
    }
    writeln!(out, "FULL {run}")?;
    Ok(())
}

/// Returns how many records of a run, up to and including `last`, an image lacks.
pub fn lost(image: &mut (impl Read + Seek), run: u64, last: u64) -> Result<u64> {
    let mut block = vec![0; RECORD];
    let mut lost = 0;
    image.rewind()?;
    for number in 0..=last {
        let whole = image.read_exact(&mut block).is_ok();
        if !whole || !is_record(&block, run, number) {
            lost += 1;
        }
    }
    Ok(lost)
}

/// Checks an image and prints how many acknowledged records are missing.
pub fn check(image: &Path, run: u64, last: u64) -> Result<()> {
    let mut file = std::io::BufReader::with_capacity(
        1 << 20,
        File::open(image).with_context(|| format!("Can't open {}", image.display()))?,
    );
    let lost = lost(&mut file, run, last)?;
    println!("LOST {lost} OF {}", last + 1);
    if lost > 0 {
        bail!("{lost} acknowledged records of run {run} are missing from {}", image.display());
    }
    Ok(())
}

/// Returns the number in the last complete `ACK run number` line of a console.
pub fn last_ack(console: &str, run: u64) -> Option<u64> {
    let prefix = format!("ACK {run} ");
    // Only complete lines: the kill may have truncated the last one, and so its number.
    let closed = &console[..=console.rfind('\n')?];
    closed.lines().rev().find_map(|l| l[l.find(&prefix)? + prefix.len()..].trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    #[test]
    fn a_whole_disk_has_lost_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(40 * RECORD as u64).unwrap();
        write(&path, 3).unwrap();
        check(&path, 3, 39).unwrap();
        assert!(check(&path, 4, 39).is_err());
        assert!(check(&path, 3, 40).is_err());
    }

    #[test]
    fn a_cut_line_is_no_acknowledgement() {
        assert_eq!(last_ack("ACK 7 12\r\nACK 7 40\r\nACK 7 55", 7), Some(40));
        assert_eq!(last_ack("ACK 7 12\nACK 8 3\n", 7), Some(12));
        assert_eq!(last_ack("ACK 7 1", 7), None);
        assert_eq!(last_ack("", 7), None);
    }

    proptest! {
        #[test]
        fn one_changed_byte_is_seen(run in 1u64..99, at in 0usize..8 * RECORD, bit in 0u8..8) {
            let mut disk: Vec<u8> = (0..8).flat_map(|n| record(run, n)).collect();
            prop_assert_eq!(lost(&mut Cursor::new(&disk), run, 7).unwrap(), 0);
            disk[at] ^= 1 << bit;
            prop_assert_eq!(lost(&mut Cursor::new(&disk), run, 7).unwrap(), 1);
        }
    }
}
