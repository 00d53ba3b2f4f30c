//! Rules for text: Markdown pages and Rust comments of the work tree. docs/glossary.md has the words.

mod rules;
mod text;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use rules::Rules;

/// Returns one sentence per violation in the work tree's Markdown and Rust files. `tracked` has their paths below `root`.
///
/// # Errors
/// A file can't be read.
pub fn violations(root: &Path, tracked: &BTreeSet<String>) -> Result<Vec<String>> {
    let rules = Rules::new(tracked)?;
    let mut found = Vec::new();
    for file in tracked.iter().filter(|file| file.ends_with(".md") || file.ends_with(".rs")) {
        let path = root.join(file);
        let content = fs::read_to_string(&path)
            .with_context(|| format!("Can't read the text of {}", path.display()))?;
        let paragraphs =
            if file.ends_with(".md") { text::markdown(&content) } else { text::comments(&content) };
        for paragraph in &paragraphs {
            for problem in rules.problems(file, paragraph) {
                found.push(format!("{file}:{}: {problem}", paragraph.line));
            }
        }
    }
    Ok(found)
}
