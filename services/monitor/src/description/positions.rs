//! Positions of the keys in a description file, so that an error has a line number.

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::{DescriptionError, Invalid, Key};

/// The keys of a file and their lines.
#[derive(Debug)]
pub struct Positions {
    path: PathBuf,
    /// Byte offset of each line's start, ascending; the first is 0.
    line_starts: Vec<usize>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: Key,
    /// Bytes from the key's first to the value's last.
    span: Range<usize>,
}

impl Positions {
    /// Parses the text of a file, and records its keys.
    pub(super) fn of(text: &str, path: &Path) -> Result<Self, DescriptionError> {
        let line_starts =
            std::iter::once(0).chain(text.match_indices('\n').map(|(offset, _)| offset + 1)).collect();
        let mut positions = Self { path: path.to_owned(), line_starts, entries: Vec::new() };
        let table = DeTable::parse(text).map_err(|error| positions.syntax_error(&error))?;
        collect_table(table.get_ref(), None, &mut positions.entries);
        Ok(positions)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn line_of(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset)
    }

    /// The line (from 1) of a key, or of the closest key that contains it.
    pub fn line(&self, key: &Key) -> Option<usize> {
        let mut wanted = Some(key.clone());
        while let Some(key) = wanted {
            if let Some(entry) = self.entries.iter().find(|entry| entry.key == key) {
                return Some(self.line_of(entry.span.start));
            }
            wanted = key.parent();
        }
        None
    }

    /// An error of the TOML parser or of deserialization, with file, line and key.
    pub(super) fn syntax_error(&self, error: &toml::de::Error) -> DescriptionError {
        let offset = error.span().map_or(0, |span| span.start);
        // The innermost key that contains the error's position.
        let around = self.entries.iter().filter(|entry| entry.span.contains(&offset));
        let key = around.min_by_key(|entry| entry.span.len()).map(|entry| entry.key.clone());
        DescriptionError::Malformed {
            path: self.path.clone(),
            line: self.line_of(offset),
            key,
            problem: one_sentence(error.message()),
        }
    }

    /// A validation error, with file and line.
    pub fn invalid(&self, invalid: Invalid) -> DescriptionError {
        DescriptionError::Invalid { path: self.path.clone(), line: self.line(&invalid.key), invalid }
    }
}

fn collect_table(table: &DeTable<'_>, parent: Option<&Key>, entries: &mut Vec<Entry>) {
    for (name, value) in table {
        let key = parent.map_or_else(|| Key::root(name.get_ref()), |parent| parent.below(name.get_ref()));
        // A header's table begins at its bracket, before the name; the table of a dotted key begins after the name.
        let start = value.span().start.min(name.span().start);
        let end = value.span().end.max(name.span().end);
        collect_value(value.get_ref(), &key, entries);
        entries.push(Entry { key, span: start..end });
    }
}

fn collect_value(value: &DeValue<'_>, key: &Key, entries: &mut Vec<Entry>) {
    match value {
        DeValue::Table(table) => collect_table(table, Some(key), entries),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let key = key.item(index);
                collect_value(item.get_ref(), &key, entries);
                entries.push(Entry { key, span: item.span() });
            }
        }
        _ => {}
    }
}

/// Converts messages of serde and the parser to one line, with the manual's terms.
fn one_sentence(message: &str) -> String {
    const PLAINER: [(&str, &str, &str); 3] = [
        ("unknown field ", "Unknown key ", "known: "),
        ("unknown variant ", "Unknown value ", "allowed: "),
        ("missing field ", "Missing key ", ""),
    ];
    let message =
        message.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    for (prefix, plain, choice) in PLAINER {
        let Some(rest) = message.strip_prefix(prefix) else { continue };
        return match rest.split_once(", expected ") {
            Some((name, known)) => {
                let known = known.strip_prefix("one of ").unwrap_or(known);
                format!("{plain}{name}; {choice}{known}")
            }
            None => format!("{plain}{rest}"),
        };
    }
    let mut letters = message.chars();
    match letters.next() {
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => "Not valid TOML".to_owned(),
    }
}
