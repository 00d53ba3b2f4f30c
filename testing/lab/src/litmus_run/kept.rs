//! Results of litmus tests in a file, line by line, so that an interrupted run of hours can continue.

use super::Line;
use anyhow::{Context, Result, bail};
use litmus::Variant;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The conditions of a test. Results under other conditions aren't used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Conditions {
    /// Hash of the monitor and the program, by [`of`].
    pub(super) files: u64,
    pub(super) nodes: u32,
    pub(super) vcpus: u32,
    pub(super) iterations: u64,
    pub(super) meeting: String,
    pub(super) round: u64,
    pub(super) interval: Option<u64>,
    pub(super) run_arguments: Vec<String>,
}

/// Returns a hash that differs for different files: 8 bytes of a SHA-256. It is stored, so it must be the same in every
/// build.
pub(super) fn of(files: &[&[u8]]) -> u64 {
    let mut hash = Sha256::new();
    for file in files {
        hash.update(Sha256::digest(file));
    }
    let digest: [u8; 32] = hash.finalize().into();
    digest.first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Start of each line, which distinguishes a truncated line from a foreign file.
const BEGIN: &[u8] = b"{\"conditions\":{\"files\":";

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    conditions: Conditions,
    line: Line,
}

/// The file of results.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    file: File,
    known: Vec<Entry>,
}

impl Kept {
    /// Opens or creates the file, with an exclusive lock. Removes a line that was truncated, as by a full disk.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = file.with_context(|| format!("The results of litmus tests can't be kept in {shown}"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                bail!(
                    "Another process keeps results of litmus tests in {shown}; name another file, or wait for it"
                )
            }
            Err(error) => return Err(error).with_context(|| format!("{shown} can't be locked")),
        }
        let mut kept = Self { path: path.to_owned(), file, known: Vec::new() };
        let mut text = Vec::new();
        kept.file.read_to_end(&mut text).with_context(|| format!("{shown} can't be read"))?;
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines = text.get(..whole).unwrap_or_default().split_inclusive(|byte| *byte == b'\n');
        for (number, line) in (1..).zip(lines) {
            kept.known.push(serde_json::from_slice(line).with_context(|| {
                format!(
                    "Line {number} of {shown} isn't a result of `lab dsm-litmus`; name a file of its own for them"
                )
            })?);
        }
        let rest = text.get(whole..).unwrap_or_default();
        if !(rest.starts_with(BEGIN) || BEGIN.starts_with(rest)) {
            bail!("The end of {shown} isn't a result of `lab dsm-litmus`; name a file of its own for them");
        }
        if !rest.is_empty() {
            // A result that is appended to a truncated line would be lost, too.
            kept.file.set_len(whole as u64).with_context(|| format!("{shown} can't be written"))?;
        }
        kept.file.seek(SeekFrom::End(0)).with_context(|| format!("{shown} can't be written"))?;
        Ok(kept)
    }

    /// Returns a test's result under these conditions.
    pub(super) fn line(&self, conditions: &Conditions, variant: &Variant<'_>) -> Option<&Line> {
        let is = |entry: &&Entry| entry.line.is_of(variant) && entry.conditions == *conditions;
        self.known.iter().find(is).map(|entry| &entry.line)
    }

    /// Returns the number of results of another monitor or program.
    pub(super) fn of_others(&self, files: u64) -> usize {
        self.known.iter().filter(|entry| entry.conditions.files != files).count()
    }

    /// Appends a test's result.
    pub(super) fn add(&mut self, conditions: &Conditions, line: &Line) -> Result<()> {
        let entry = Entry { conditions: conditions.clone(), line: line.clone() };
        let mut text = serde_json::to_vec(&entry)?;
        text.push(b'\n');
        self.file
            .write_all(&text)
            .with_context(|| format!("A result can't be kept in {}", self.path.display()))?;
        self.known.push(entry);
        Ok(())
    }
}

impl Drop for Kept {
    /// Closing the file isn't enough: a process that another thread is starting has the descriptor, too, until its
    /// exec.
    fn drop(&mut self) {
        // A failure is harmless: the lock ends with the process.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use litmus::corpus;
    use payload_litmus::table::Placement;

    fn conditions() -> Conditions {
        Conditions {
            files: of(&[b"monitor", b"program"]),
            nodes: 2,
            vcpus: 3,
            iterations: 9,
            meeting: "clock".into(),
            round: 256,
            interval: None,
            run_arguments: vec!["--coherence=invalidate".into()],
        }
    }

    fn line(test: &str) -> Line {
        super::super::tests::line(test, vec![(vec![0, 1], 9, true)])
    }

    /// Stored files have this hash, and another build finds them again.
    #[test]
    fn files_have_the_same_number_from_every_build() {
        let number = of(&[b"monitor", b"program"]);
        assert_eq!(number, 0xdea2_bd85_37a4_dbc2, "{number:#018x}");
        assert_ne!(of(&[b"monitorp", b"rogram"]), number);
        assert_ne!(of(&[b"program", b"monitor"]), number);
    }

    /// A result is found only under the same conditions, also by a later process. One process at a time has the file.
    #[test]
    fn results_are_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results");
        let tests = corpus::all().unwrap();
        let test = |name: &str| tests.iter().find(|test| test.name == name).unwrap();
        let sb = Variant { test: test("SB"), placement: Placement::Pages };
        let mut kept = Kept::open(&path).unwrap();
        assert!(kept.line(&conditions(), &sb).is_none());
        kept.add(&conditions(), &line("SB")).unwrap();
        assert!(kept.line(&conditions(), &sb).is_some());
        let error = Kept::open(&path).unwrap_err().to_string();
        assert!(error.contains("Another process"), "{error}");
        drop(kept);

        let mut kept = Kept::open(&path).unwrap();
        assert_eq!(kept.line(&conditions(), &sb).unwrap().outcomes, line("SB").outcomes);
        assert_eq!((kept.of_others(conditions().files), kept.of_others(1)), (0, 1));
        for others in [
            Conditions { files: 1, ..conditions() },
            Conditions { iterations: 10, ..conditions() },
            Conditions { interval: Some(1), ..conditions() },
            Conditions { run_arguments: Vec::new(), ..conditions() },
        ] {
            assert!(kept.line(&others, &sb).is_none(), "{others:?}");
        }
        for variant in [
            Variant { test: test("SB"), placement: Placement::Page },
            Variant { test: test("MP"), placement: Placement::Pages },
        ] {
            assert!(kept.line(&conditions(), &variant).is_none());
        }
        kept.add(&conditions(), &line("MP")).unwrap();
    }

    /// A truncated line is run again, and the lines around it are kept. A foreign file stays unchanged.
    #[test]
    fn broken_files_lose_no_result() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results");
        Kept::open(&path).unwrap().add(&conditions(), &line("SB")).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole, &whole[..whole.len() / 2]].concat()).unwrap();
        let mut kept = Kept::open(&path).unwrap();
        assert_eq!(kept.known.len(), 1);
        kept.add(&conditions(), &line("MP")).unwrap();
        drop(kept);
        assert_eq!(Kept::open(&path).unwrap().known.len(), 2);

        for (length, lines) in
            [(1, 0), (BEGIN.len() - 1, 0), (BEGIN.len() + 1, 0), (whole.len() - 1, 0), (whole.len(), 1)]
        {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(Kept::open(&path).unwrap().known.len(), lines, "{length} bytes");
            assert_eq!(std::fs::read(&path).unwrap().len(), lines * whole.len());
        }
        for (others, begins) in [
            ("a letter\nto somebody", "Line 1 of "),
            ("{\"a\": 1}", "The end of "),
            ("to nobody", "The end of "),
        ] {
            std::fs::write(&path, others).unwrap();
            let error = Kept::open(&path).unwrap_err().to_string();
            assert!(error.starts_with(begins) && error.contains("isn't a result"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), others.as_bytes());
        }
        let error = Kept::open(&folder.path().join("none/results")).unwrap_err().to_string();
        assert!(error.contains("can't be kept in"), "{error}");
    }
}
