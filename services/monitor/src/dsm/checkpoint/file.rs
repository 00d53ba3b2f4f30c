//! Files of a checkpoint.
//!
//! Each node writes `node-N-NUMBER.ckpt`:
//! ```text
//!  0  "CWNODECK"   8 version (4)   12 bytes of the head (4)   16 head, CBOR
//!     for each page: number (8)   1: contents follow, 0: all zero (1)   contents (4096)
//!     CRC-32 of all before (4)
//! ```
//! Node 0's host also has `checkpoint.json`, which lists these files with their lengths and checksums. A file is written under a temporary
//! name, synced and renamed. The list is written last, so it only ever names complete files. Numbers are little-endian.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use dsm::SavedNode;
use dsm::wire::PAGE_SIZE;
use machine::state::SavedVcpu;
use serde::{Deserialize, Serialize};

use super::CheckpointError;

const MAGIC: &[u8; 8] = b"CWNODECK";
/// Version of a node's file. Before 3 the identity depended on the compiler and can't be compared. Version 3 had a head that could say that
/// all vCPUs and all memory are in node 0's file.
const FILE_VERSION: u32 = 4;
/// Version of the list. It is raised with that of the files, so that old checkpoints are refused before nodes connect.
const LIST_VERSION: u32 = 3;
/// Limit of a head, bytes. With 64 GiB of guest memory of which every page has moved, a head has some 100 MiB.
const MAX_HEAD: u32 = 1 << 28;
/// Limit of the list, bytes.
const MAX_LIST: u64 = 1 << 20;
const LIST: &str = "checkpoint.json";

/// Head of a node's file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::dsm) struct Head {
    /// Hash of the VM's program and settings.
    pub(in crate::dsm) identity: u64,
    pub(in crate::dsm) node: u8,
    pub(in crate::dsm) number: u64,
    pub(in crate::dsm) protocol: SavedNode,
    /// vCPUs of this node, in order; none for a vCPU that has parked.
    pub(in crate::dsm) vcpus: Vec<Option<SavedVcpu>>,
    /// Number of pages that follow.
    pub(in crate::dsm) pages: u64,
}

/// A node's file in the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::dsm) struct Listed {
    pub(in crate::dsm) node: u8,
    pub(in crate::dsm) number: u64,
    pub(in crate::dsm) bytes: u64,
    pub(in crate::dsm) crc32: u32,
}

/// The list: a complete checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::dsm) struct List {
    version: u32,
    pub(in crate::dsm) identity: u64,
    /// Number of the checkpoint, ascending.
    pub(in crate::dsm) number: u64,
    /// Bytes that the guest had written to its console.
    pub(in crate::dsm) console_bytes: u64,
    pub(in crate::dsm) nodes: Vec<Listed>,
    /// CRC-32 of this list as JSON, with 0 in this field.
    crc32: u32,
}

fn file_name(node: u8, number: u64) -> String {
    format!("node-{node}-{number}.ckpt")
}

pub(in crate::dsm) fn path_of(folder: &Path, listed: &Listed) -> PathBuf {
    folder.join(file_name(listed.node, listed.number))
}

/// A reader or writer that counts bytes and computes their CRC-32.
struct Summed<T> {
    inner: T,
    bytes: u64,
    sum: crc32fast::Hasher,
}

impl<T> Summed<T> {
    fn new(inner: T) -> Self {
        Self { inner, bytes: 0, sum: crc32fast::Hasher::new() }
    }

    fn count(&mut self, bytes: &[u8]) {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
    }
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.count(&bytes[..written]);
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.count(&into[..read]);
        Ok(read)
    }
}

/// Writes a file atomically: it is complete or absent, also after a power failure.
fn replace<R>(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<R>,
) -> Result<R, CheckpointError> {
    let new = path.with_extension("new");
    let written = (|| {
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(&new)?);
        let result = fill(&mut writer)?;
        writer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&new, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(result)
    })();
    written.map_err(|source| {
        // The partial file is useless. Removal fails if it wasn't created.
        let _ = fs::remove_file(&new);
        CheckpointError::File { path: path.to_owned(), what: "written", source }
    })
}

/// Creates a checkpoint's folder and its parents, unless they exist.
pub(in crate::dsm) fn make_folder(folder: &Path) -> Result<(), CheckpointError> {
    let failed = |source| CheckpointError::File { path: folder.to_owned(), what: "made as a folder", source };
    fs::create_dir_all(folder).map_err(failed)
}

/// Writes a node's file. `read` appends the content of a page to a buffer.
pub(in crate::dsm) fn write(
    folder: &Path,
    head: &Head,
    pages: impl Iterator<Item = u64>,
    mut read: impl FnMut(u64, &mut Vec<u8>) -> io::Result<()>,
) -> Result<Listed, CheckpointError> {
    let path = folder.join(file_name(head.node, head.number));
    replace(&path, |writer| {
        let mut out = Summed::new(writer);
        let mut body = Vec::new();
        ciborium::into_writer(head, &mut body).map_err(io::Error::other)?;
        let len = u32::try_from(body.len()).ok().filter(|len| *len <= MAX_HEAD);
        let len = len.ok_or_else(|| io::Error::other("the VM has too many pages for a checkpoint"))?;
        out.write_all(MAGIC)?;
        out.write_all(&FILE_VERSION.to_le_bytes())?;
        out.write_all(&len.to_le_bytes())?;
        out.write_all(&body)?;
        let mut content = Vec::with_capacity(PAGE_SIZE);
        for page in pages {
            content.clear();
            read(page, &mut content)?;
            let zero = content.iter().all(|byte| *byte == 0);
            out.write_all(&page.to_le_bytes())?;
            out.write_all(&[u8::from(!zero)])?;
            if !zero {
                out.write_all(&content)?;
            }
        }
        let crc32 = out.sum.clone().finalize();
        out.write_all(&crc32.to_le_bytes())?;
        Ok(Listed { node: head.node, number: head.number, bytes: out.bytes, crc32 })
    })
}

/// Reads a node's file: verifies its checksum first, then passes each page to `write`. A file that differs from the list's entry changes
/// nothing.
pub(in crate::dsm) fn read(
    folder: &Path,
    listed: &Listed,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), String>,
) -> Result<Head, CheckpointError> {
    let path = path_of(folder, listed);
    let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::UnexpectedEof => damaged("it ends too early".to_owned()),
        _ => CheckpointError::File { path: path.clone(), what: "read", source },
    };
    check_sum(&path, listed, &failed)?;
    let mut file = BufReader::with_capacity(1 << 20, File::open(&path).map_err(failed)?);
    let mut fixed = [0; 16];
    file.read_exact(&mut fixed).map_err(failed)?;
    let (magic, rest) = fixed.split_at(8);
    let word = |at: usize| {
        rest.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
    };
    if magic != MAGIC {
        return Err(damaged("it is no checkpoint of a node".to_owned()));
    }
    if word(0) != FILE_VERSION {
        return Err(CheckpointError::Version { path: path.clone(), found: word(0), known: FILE_VERSION });
    }
    let len = word(4);
    if len > MAX_HEAD || u64::from(len) > listed.bytes {
        return Err(damaged(format!("its head says that it has {len} bytes")));
    }
    let mut body = vec![0; usize::try_from(len).unwrap_or(0)];
    file.read_exact(&mut body).map_err(failed)?;
    let head: Head = ciborium::from_reader(body.as_slice())
        .map_err(|error| damaged(format!("its head can't be understood: {error}")))?;
    if (head.node, head.number) != (listed.node, listed.number) {
        return Err(damaged(format!("it is node {}'s of checkpoint {}", head.node, head.number)));
    }
    let mut content = [0; PAGE_SIZE];
    for _ in 0..head.pages {
        let mut place = [0; 9];
        file.read_exact(&mut place).map_err(failed)?;
        let [number @ .., kind] = place;
        match kind {
            0 => content.fill(0),
            1 => file.read_exact(&mut content).map_err(failed)?,
            _ => return Err(damaged(format!("a page of it is of kind {kind}"))),
        }
        write(u64::from_le_bytes(number), &content).map_err(damaged)?;
    }
    let mut sum = [0; 4];
    file.read_exact(&mut sum).map_err(failed)?;
    let rest = file.read(&mut [0]).map_err(failed)?;
    if u32::from_le_bytes(sum) != listed.crc32 || rest != 0 {
        return Err(damaged("something follows its pages".to_owned()));
    }
    Ok(head)
}

fn check_sum(
    path: &Path,
    listed: &Listed,
    failed: &dyn Fn(io::Error) -> CheckpointError,
) -> Result<(), CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: path.to_owned(), reason };
    let file = File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    if len != listed.bytes || len < 4 {
        return Err(damaged(format!("it has {len} bytes, of {}", listed.bytes)));
    }
    let mut summed = Summed::new(BufReader::with_capacity(1 << 20, file).take(len - 4));
    io::copy(&mut summed, &mut io::sink()).map_err(failed)?;
    let found = summed.sum.finalize();
    if found == listed.crc32 {
        Ok(())
    } else {
        Err(damaged(format!("its sum is {found:#010x} instead of {:#010x}", listed.crc32)))
    }
}

/// Removes a node's files except those of checkpoint `keep`.
pub(in crate::dsm) fn remove_others(folder: &Path, node: u8, keep: u64) {
    let (keep, begin) = (file_name(node, keep), format!("node-{node}-"));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let ours = name.starts_with(&begin) && (name.ends_with(".ckpt") || name.ends_with(".new"));
        if ours
            && name != keep
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!(%error, file = %entry.path().display(), "A file of an older checkpoint can't be removed");
        }
    }
}

impl List {
    pub(in crate::dsm) fn new(identity: u64, number: u64, console_bytes: u64, nodes: Vec<Listed>) -> Self {
        let mut list = Self { version: LIST_VERSION, identity, number, console_bytes, nodes, crc32: 0 };
        list.crc32 = list.sum();
        list
    }

    fn sum(&self) -> u32 {
        let zero = Self { crc32: 0, ..self.clone() };
        // Serialization of a structure of numbers can't fail.
        crc32fast::hash(&serde_json::to_vec(&zero).unwrap_or_default())
    }

    /// Makes this the last checkpoint in a folder.
    pub(in crate::dsm) fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        replace(&folder.join(LIST), |writer| {
            serde_json::to_writer_pretty(&mut *writer, self)?;
            writer.write_all(b"\n")
        })
    }

    /// Reads the last checkpoint in a folder.
    pub(in crate::dsm) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(LIST);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => CheckpointError::None(folder.to_owned()),
            _ => CheckpointError::File { path: path.clone(), what: "read", source },
        };
        let mut text = Vec::new();
        let file = File::open(&path).map_err(failed)?;
        file.take(MAX_LIST).read_to_end(&mut text).map_err(failed)?;
        let damaged = |reason: String| CheckpointError::Damaged { path: path.clone(), reason };
        // Another version may have other fields.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if version != LIST_VERSION {
            return Err(CheckpointError::Version { path, found: version, known: LIST_VERSION });
        }
        let list: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        let in_order = list
            .nodes
            .iter()
            .enumerate()
            .all(|(index, listed)| usize::from(listed.node) == index && listed.number == list.number);
        if list.sum() != list.crc32 || !in_order {
            return Err(damaged("its sum isn't that of its text".to_owned()));
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(number: u64, pages: u64) -> Head {
        let protocol = SavedNode { version: 1, owned: vec![7, 9], elsewhere: vec![(3, 1)] };
        Head { identity: 5, node: 1, number, protocol, vcpus: vec![None, None], pages }
    }

    fn content(page: u64) -> Vec<u8> {
        // Page 9 is zero.
        vec![if page == 9 { 0 } else { page.to_le_bytes()[0] }; PAGE_SIZE]
    }

    fn written(folder: &Path, number: u64) -> Listed {
        write(folder, &head(number, 3), [1, 7, 9].into_iter(), |page, into| {
            into.extend(content(page));
            Ok(())
        })
        .unwrap()
    }

    fn read_back(folder: &Path, listed: &Listed) -> Result<(Head, Vec<u64>), CheckpointError> {
        let mut pages = Vec::new();
        let head = read(folder, listed, |page, bytes| {
            assert_eq!(bytes, content(page));
            pages.push(page);
            Ok(())
        })?;
        Ok((head, pages))
    }

    #[test]
    fn a_file_comes_back_and_zero_pages_take_no_room() {
        let folder = tempfile::tempdir().unwrap();
        let listed = written(folder.path(), 4);
        assert!(listed.bytes < 3 * PAGE_SIZE as u64);
        let (head, pages) = read_back(folder.path(), &listed).unwrap();
        assert_eq!((head.identity, pages), (5, vec![1, 7, 9]));
        assert_eq!(head.protocol, super::super::file::tests::head(4, 3).protocol);
    }

    /// Every changed byte and every truncation is detected before a page is passed on.
    #[test]
    fn damage_anywhere_is_one_clear_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let listed = written(folder.path(), 4);
        let path = path_of(folder.path(), &listed);
        let whole = fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(97).chain(0..40).chain(whole.len() - 8..whole.len()) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            let error = read_back(folder.path(), &listed).map(drop).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "byte {at}: {error}");
            fs::write(&path, &whole[..at]).unwrap();
            let error = read_back(folder.path(), &listed).map(drop).unwrap_err();
            assert!(error.to_string().contains("is damaged: it has"), "cut at {at}: {error}");
        }
        fs::remove_file(&path).unwrap();
        let error = read_back(folder.path(), &listed).map(drop).unwrap_err();
        assert!(error.to_string().contains("could not be read"), "{error}");
    }

    #[test]
    fn a_file_of_an_older_or_newer_program_is_refused_by_its_version() {
        let folder = tempfile::tempdir().unwrap();
        let mut listed = written(folder.path(), 4);
        let path = path_of(folder.path(), &listed);
        let mut bytes = fs::read(&path).unwrap();
        for version in [2, 3, 5] {
            bytes[8] = version;
            let end = bytes.len() - 4;
            listed.crc32 = crc32fast::hash(&bytes[..end]);
            bytes[end..].copy_from_slice(&listed.crc32.to_le_bytes());
            fs::write(&path, &bytes).unwrap();
            let error = read_back(folder.path(), &listed).map(drop).unwrap_err();
            let CheckpointError::Version { found, known, .. } = error else { panic!("{error}") };
            assert_eq!((found, known), (version.into(), FILE_VERSION));
        }
    }

    #[test]
    fn what_can_not_be_written_leaves_nothing_behind_and_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let full = |_: u64, _: &mut Vec<u8>| Err(io::Error::from(io::ErrorKind::StorageFull));
        let error = write(folder.path(), &head(4, 1), [1].into_iter(), full).map(drop).unwrap_err();
        assert!(error.to_string().contains("node-1-4.ckpt could not be written"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_list_is_replaced_and_a_damaged_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(List::read(folder.path()), Err(CheckpointError::None(_))));
        let listed = |number| Listed { node: 0, number, bytes: 10, crc32: 3 };
        List::new(5, 1, 0, vec![listed(1)]).write(folder.path()).unwrap();
        let second = List::new(5, 2, 77, vec![listed(2)]);
        second.write(folder.path()).unwrap();
        assert_eq!(List::read(folder.path()).unwrap(), second);
        let path = folder.path().join(LIST);
        let text = fs::read_to_string(&path).unwrap();
        for (old, new) in [("77", "78"), ("\"number\": 2", "\"number\": 1"), ("}", "")] {
            fs::write(&path, text.replacen(old, new, 1)).unwrap();
            let error = List::read(folder.path()).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        }
        for version in [1, 2, 9] {
            fs::write(&path, text.replace("\"version\": 3", &format!("\"version\": {version}"))).unwrap();
            let error = List::read(folder.path()).unwrap_err();
            assert!(matches!(error, CheckpointError::Version { found, .. } if found == version), "{error}");
        }
    }

    #[test]
    fn older_files_go_and_other_nodes_stay() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["node-1-3.ckpt", "node-1-4.ckpt", "node-1-5.new", "node-10-3.ckpt", "other"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_others(folder.path(), 1, 4);
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["node-1-4.ckpt", "node-10-3.ckpt", "other"]);
    }
}
