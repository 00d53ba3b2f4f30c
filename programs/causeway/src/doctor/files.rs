//! The host's files under /proc, /sys and /dev; below another directory in tests.

#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;

/// Files below a root.
pub struct Files {
    root: PathBuf,
}

impl Files {
    /// The host's own.
    pub fn of_host() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// Below another directory.
    #[cfg(test)]
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Where an absolute path lies.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text without surrounding blanks; `None` when it can't be read.
    pub fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// A file's number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Whether there is something at a path.
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Names in a directory, sorted; none when it can't be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten();
        let mut names: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    }

    /// The choice in brackets of a file like `always [madvise] never`.
    pub fn choice(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let start = text.find('[')? + 1;
        let end = start + text[start..].find(']')?;
        Some(text[start..end].to_owned())
    }
}

#[cfg(test)]
pub mod testing {
    //! Files that a test makes up.

    use super::Files;

    /// A folder with files of these paths and texts, which stands for the host's root as long as it is kept.
    pub fn files(entries: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in entries {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let files = Files::below(root.path());
        (root, files)
    }
}
