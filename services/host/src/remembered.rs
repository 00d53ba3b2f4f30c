//! State that outlives the daemon: the guest address of each NIC driver's shared region. After a restart the daemon uses it to notify the
//! driver that its device failed. A small JSON file in the daemon's folder, replaced atomically.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Name of the file.
const FILE: &str = "nics.json";
/// Version of its contents.
const VERSION: u32 = 1;
/// Limit of the file's length, bytes.
const LONGEST_FILE: u64 = 16 << 20;
/// Limit of remembered NICs. Attached ones never come near it, but names of VMs that no longer exist accumulate.
const MAX_REMEMBERED_NICS: usize = 10_000;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    version: u32,
    nics: BTreeMap<String, Nic>,
}

/// The record of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// User that owned it.
    pub uid: u32,
    /// Guest address of the driver's shared region.
    pub shared_region: u64,
}

/// The record of NICs. Thread-safe; nothing is written before [`Remembered::flush`].
#[derive(Debug)]
pub struct Remembered {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    nics: BTreeMap<String, Nic>,
    dirty: bool,
}

impl Remembered {
    /// Loads the record of an earlier daemon in `folder`. An unreadable file counts as empty: the guests' drivers then detect the failure
    /// themselves.
    #[must_use]
    pub fn load(folder: &Path) -> Self {
        let path = folder.join(FILE);
        let nics = match read(&path) {
            Ok(contents) if contents.version == VERSION => contents.nics,
            Ok(contents) => {
                tracing::warn!(
                    version = contents.version,
                    "{} is of another version and ignored",
                    path.display()
                );
                BTreeMap::new()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => {
                tracing::warn!(%error, "{} can't be read and is ignored", path.display());
                BTreeMap::new()
            }
        };
        Self { path, state: Mutex::new(State { nics, dirty: false }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Guest address of a NIC driver's shared region, if the NIC belonged to `uid`.
    #[must_use]
    pub fn shared_region(&self, vm: &str, nic: &str, uid: u32) -> Option<u64> {
        self.state().nics.get(&key(vm, nic)).filter(|known| known.uid == uid).map(|known| known.shared_region)
    }

    /// Records a NIC, or with `None` removes it. `true` when this is the first change since the last flush, so that the keeper gets one
    /// event, however often a guest changes it.
    pub fn set(&self, vm: &str, nic: &str, uid: u32, shared_region: Option<u64>) -> bool {
        let mut state = self.state();
        match shared_region {
            Some(shared_region) => {
                if state.nics.len() >= MAX_REMEMBERED_NICS
                    && let Some(first) = state.nics.keys().next().cloned()
                {
                    state.nics.remove(&first);
                }
                let nic_state = Nic { uid, shared_region };
                if state.nics.insert(key(vm, nic), nic_state) == Some(nic_state) {
                    return false;
                }
            }
            None => {
                if state.nics.remove(&key(vm, nic)).is_none() {
                    return false;
                }
            }
        }
        !std::mem::replace(&mut state.dirty, true)
    }

    /// Writes the file if anything changed since the last time.
    ///
    /// # Errors
    /// When the file system refuses; the next flush retries.
    pub fn flush(&self) -> io::Result<()> {
        let text = {
            let mut state = self.state();
            if !state.dirty {
                return Ok(());
            }
            state.dirty = false;
            serde_json::to_vec(&Contents { version: VERSION, nics: state.nics.clone() })?
        };
        let written = replace(&self.path, &text);
        if written.is_err() {
            self.state().dirty = true;
        }
        written
    }
}

/// Names have no colon.
fn key(vm: &str, nic: &str) -> String {
    format!("{vm}:{nic}")
}

fn read(path: &Path) -> io::Result<Contents> {
    let file = std::fs::File::open(path)?;
    let reader = io::BufReader::new(io::Read::take(file, LONGEST_FILE));
    Ok(serde_json::from_reader(reader)?)
}

/// Replaces a file. A reader finds the old or the new one, even if this process or the host dies.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = std::fs::File::create(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    drop(file);
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::Remembered;

    #[test]
    fn what_was_flushed_is_there_after_a_restart_and_only_for_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Remembered::load(folder.path());
        assert!(memory.set("vm1", "rdma0", 7, Some(0x1000)));
        assert!(!memory.set("vm2", "rdma0", 7, Some(0x2000)), "told already");
        memory.flush().unwrap();
        assert!(!memory.set("vm1", "rdma0", 7, Some(0x1000)), "no change");
        assert!(memory.set("vm2", "rdma0", 7, None));
        memory.flush().unwrap();
        memory.set("vm1", "rdma0", 7, Some(0x9000));
        let memory = Remembered::load(folder.path());
        assert_eq!(memory.shared_region("vm1", "rdma0", 7), Some(0x1000));
        assert_eq!(memory.shared_region("vm1", "rdma0", 8), None);
        assert_eq!(memory.shared_region("vm2", "rdma0", 7), None);
    }

    #[test]
    fn a_damaged_file_is_as_none() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[]", "{\"version\":9,\"nics\":{}}", "{\"version\":1,\"nics\":{\"a:b\":3}}"] {
            std::fs::write(folder.path().join("nics.json"), text).unwrap();
            assert_eq!(Remembered::load(folder.path()).shared_region("a", "b", 0), None);
        }
    }
}
