//! The trace file of a NIC, with what its guest was refused, for [`vpio::violation::read`]. It stays after the VM's end.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use vpio::Violation;

/// The trace file. Its size is bounded: a model keeps a fixed number of traces.
pub(super) struct Traces {
    file: File,
    written: usize,
}

impl Traces {
    /// Opens the file to append. It may have traces of other VMs, or of this VM's earlier runs.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, written: 0 })
    }

    /// Appends those of `violations` that aren't in the file yet, one per line.
    pub fn append(&mut self, violations: &[Violation]) {
        for violation in violations.get(self.written..).unwrap_or_default() {
            // A failed write isn't retried, since the guest's vCPU waits.
            self.written += 1;
            let line = violation.line().map_err(io::Error::from);
            if let Err(error) = line.and_then(|line| self.file.write_all(line.as_bytes())) {
                tracing::warn!(guest = %violation.guest, %error, "The trace of a refused request can't be written");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vpio::violation::{decides_as_before, read};

    use super::Traces;

    /// Each violation becomes one line, once, after the existing ones, and can be replayed.
    #[test]
    fn violations_are_added_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces");
        let violations = crate::nic::tests::violations();
        for _ in 0..2 {
            let mut traces = Traces::open(&path).unwrap();
            traces.append(&violations[..1]);
            traces.append(&violations);
            traces.append(&violations);
        }
        let back = read(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(back, [violations.clone(), violations].concat());
        back.iter().for_each(|violation| decides_as_before(violation).unwrap());
        assert_ne!(back[0].refusal, back[1].refusal);
    }
}
