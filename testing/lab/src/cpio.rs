//! Writes cpio archives in the `newc` format, which the kernel unpacks as an initramfs. Archives may be concatenated: a
//! scenario's script is in a second archive after the image's own.

use std::collections::BTreeSet;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
    folders: BTreeSet<String>,
}

const REGULAR: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const CHARACTER: u32 = 0o020_000;
const LINK: u32 = 0o120_000;

impl Archive {
    /// Creates an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.inode += 1;
        let size = u32::try_from(data.len()).expect("a file in an initramfs is smaller than 4 GiB");
        let name = u32::try_from(path.len() + 1).expect("a path is short");
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name, 0];
        self.bytes.extend(b"070701");
        for f in fields {
            self.bytes.extend(format!("{f:08X}").as_bytes());
        }
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            self.folder(&path[..at]);
        }
    }

    /// Adds a directory and its parents, once each.
    pub fn folder(&mut self, path: &str) -> &mut Self {
        let path = path.trim_matches('/');
        if !path.is_empty() && !self.folders.contains(path) {
            self.parents(path);
            self.folders.insert(path.to_owned());
            self.entry(path, FOLDER | 0o755, (0, 0), &[]);
        }
        self
    }

    /// Adds a file with the permission bits of `mode`, and its parent directories.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> &mut Self {
        let path = path.trim_matches('/');
        self.parents(path);
        self.entry(path, REGULAR | (mode & 0o7777), (0, 0), data);
        self
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) -> &mut Self {
        let path = path.trim_matches('/');
        self.parents(path);
        self.entry(path, LINK | 0o777, (0, 0), to.as_bytes());
        self
    }

    /// Adds a character device.
    pub fn character(&mut self, path: &str, major: u32, minor: u32) -> &mut Self {
        let path = path.trim_matches('/');
        self.parents(path);
        self.entry(path, CHARACTER | 0o600, (major, minor), &[]);
        self
    }

    /// Closes the archive. Its length is a multiple of 512, so that another archive may follow.
    pub fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}

/// Returns an archive with a guest's script as `/lab/script`, and additional files.
pub fn script(text: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Archive::new();
    archive.file("lab/script", 0o755, text.as_bytes());
    for (name, data) in files {
        archive.file(&format!("lab/{name}"), 0o755, data);
    }
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parses (path, mode, data) entries up to the trailer.
    fn parse(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut at = 0;
        let mut found = Vec::new();
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let s = &bytes[at + 6 + n * 8..at + 14 + n * 8];
                u32::from_str_radix(std::str::from_utf8(s).unwrap(), 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6) as usize, field(11) as usize);
            let path = String::from_utf8(bytes[at + 110..at + 109 + name].to_vec()).unwrap();
            let data = (at + 110 + name).next_multiple_of(4);
            if path == "TRAILER!!!" {
                return found;
            }
            found.push((path, mode, bytes[data..data + size].to_vec()));
            at = (data + size).next_multiple_of(4);
        }
    }

    #[test]
    fn parents_come_first_and_once() {
        let mut a = Archive::new();
        a.file("/a/b/c", 0o644, b"x").file("a/b/d", 0o755, b"").link("bin/sh", "busybox").character(
            "dev/console",
            5,
            1,
        );
        let got = parse(&a.finish());
        let paths: Vec<&str> = got.iter().map(|e| e.0.as_str()).collect();
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/b/d", "bin", "bin/sh", "dev", "dev/console"]);
        assert_eq!(got[3].1, 0o100_755);
        assert_eq!(got[7].1, 0o020_600);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(files in prop::collection::btree_map("[a-z]{1,12}", prop::collection::vec(any::<u8>(), 0..300), 0..10)) {
            let mut a = Archive::new();
            for (n, d) in &files { a.file(n, 0o644, d); }
            let bytes = a.finish();
            prop_assert_eq!(bytes.len() % 512, 0);
            let got: std::collections::BTreeMap<String, Vec<u8>> = parse(&bytes).into_iter().map(|(p, _, d)| (p, d)).collect();
            prop_assert_eq!(got, files);
        }
    }
}
