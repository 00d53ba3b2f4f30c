//! The host's files under /proc, /sys and /dev. Tests use another root directory.

#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;

/// Files below a root directory.
pub struct Files {
    root: PathBuf,
}

impl Files {
    /// Uses the host's own root.
    pub fn of_host() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// Uses another root directory.
    #[cfg(test)]
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Creates a directory with files of these paths and texts. It serves as the host's root while it exists.
    #[cfg(test)]
    pub fn synthetic(entries: &[(&str, &str)]) -> (tempfile::TempDir, Self) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in entries {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let files = Self::below(root.path());
        (root, files)
    }

    /// Returns the path of an absolute path below the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns a file's trimmed text, or `None` if it can't be read.
    pub fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Returns a file's number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Returns whether a path exists.
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Returns the sorted names in a directory; none if it can't be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten();
        let mut names: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    }

    /// Returns the choice in brackets of a file like `always [madvise] never`.
    pub fn choice(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let start = text.find('[')? + 1;
        let end = start + text[start..].find(']')?;
        Some(text[start..end].to_owned())
    }
}
