//! The file in which a NIC keeps the traces of what its guest was refused, for [`vpio::violation::read`]. It is there when the VM has ended, by its policy or
//! otherwise.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use vpio::Violation;

/// The file. A guest fills it with the traces that its monitor keeps, a fixed number, and no more.
pub(super) struct Traces {
    file: File,
    written: usize,
}

impl Traces {
    /// Opens the file, which may have those of other VMs, or of this one's last life: more are added.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, written: 0 })
    }

    /// Writes those of `violations` that aren't in the file yet, a line at a time.
    pub fn keep(&mut self, violations: &[Violation]) {
        for violation in violations.get(self.written..).unwrap_or_default() {
            // One that can't be written is not tried again: the guest's vCPU waits meanwhile.
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

    /// Each violation is one line, once, behind what was there, and can be replayed.
    #[test]
    fn violations_are_added_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces");
        let violations = crate::nic::tests::violations();
        for _ in 0..2 {
            let mut traces = Traces::open(&path).unwrap();
            traces.keep(&violations[..1]);
            traces.keep(&violations);
            traces.keep(&violations);
        }
        let back = read(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(back, [violations.clone(), violations].concat());
        back.iter().for_each(|violation| decides_as_before(violation).unwrap());
        assert_ne!(back[0].refusal, back[1].refusal);
    }
}
