//! Standard output of commands: JSON, tables, trees.

use std::io::{self, Write as _};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

/// Prints text. A closed pipe, as of `head`, isn't an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("Standard output can't be written")
        }
        _ => Ok(()),
    }
}

/// Prints one JSON value and a newline.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value).context("The answer can't be written as JSON")?;
    text.push('\n');
    print(&text)
}

/// Formats columns as wide as their widest cell. The last one isn't padded.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Formats a JSON value as an indented tree.
pub fn tree(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(_) | Value::Array(_) => branch(value, 0, &mut text),
        leaf => {
            text.push_str(&plain(leaf));
            text.push('\n');
        }
    }
    text
}

fn branch(value: &Value, depth: usize, text: &mut String) {
    let entries: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect()
        }
        _ => return,
    };
    for (key, value) in entries {
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(map) if !map.is_empty() => {
                text.push_str(&format!("{indent}{key}\n"));
                branch(value, depth + 1, text);
            }
            Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
                text.push_str(&format!("{indent}{key}\n"));
                branch(value, depth + 1, text);
            }
            leaf => text.push_str(&format!("{indent}{key}: {}\n", plain(leaf))),
        }
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        // Text from a guest may contain escape sequences.
        Value::String(text) => text.escape_debug().to_string(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        Value::Object(map) if map.is_empty() => "none".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{table, tree};

    #[test]
    fn columns_line_up_and_lines_have_no_trailing_blanks() {
        let rows = [vec!["NAME".into(), "STATE".into()], vec!["a-long-name".into(), "running".into()]];
        assert_eq!(table(&rows), "NAME         STATE\na-long-name  running\n");
    }

    #[test]
    fn a_tree_indents_what_lies_deeper_and_escapes_text() {
        let value =
            json!({"disks": {"disk0": {"reads": 7, "tags": ["a", "b"]}}, "name": "x\u{1b}[2J", "none": []});
        assert_eq!(
            tree(&value),
            "disks\n  disk0\n    reads: 7\n    tags: a, b\nname: x\\u{1b}[2J\nnone: none\n"
        );
        assert_eq!(tree(&json!(7)), "7\n");
    }
}
