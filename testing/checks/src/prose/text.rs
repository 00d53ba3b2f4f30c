//! Paragraphs of Markdown files and Rust comments.

/// What a paragraph is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A Markdown page.
    Page,
    /// A doc comment.
    Doc,
    /// Another comment.
    Comment,
}

/// A paragraph, list item or table row.
#[derive(Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// What it is part of.
    pub kind: Kind,
    /// Its first line, from 1.
    pub line: usize,
    /// Its words, without markers of comments and line breaks.
    pub text: String,
    /// It is a table row or heading: no sentences.
    pub is_fragment: bool,
    /// It is a whole doc comment.
    pub is_whole_comment: bool,
}

/// Returns the paragraphs of a Markdown page, without blocks of code.
pub fn markdown(content: &str) -> Vec<Paragraph> {
    let mut collector = Collector::default();
    for (index, line) in content.lines().enumerate() {
        // Indented lines that don't continue a paragraph are code.
        let is_code = line.starts_with("    ") && collector.current.is_none();
        collector.line(Kind::Page, index + 1, if is_code { "" } else { line.trim() });
    }
    collector.finish()
}

/// Returns the paragraphs of a Rust file's comments, without blocks of code. A comment behind code counts as one of its own.
pub fn comments(content: &str) -> Vec<Paragraph> {
    let mut paragraphs = Vec::new();
    let mut collector = Collector::default();
    let mut last = None;
    for (index, line) in content.lines().enumerate() {
        let found = comment(line);
        let kind = found.map(|(kind, _)| kind);
        if kind != last {
            paragraphs.extend(std::mem::take(&mut collector).finish_comment());
        }
        last = kind;
        if let Some((kind, text)) = found {
            collector.line(kind, index + 1, text.trim());
        }
    }
    paragraphs.extend(collector.finish_comment());
    paragraphs
}

/// Returns the kind and text of a line that is a comment.
fn comment(line: &str) -> Option<(Kind, &str)> {
    let rest = line.trim_start().strip_prefix("//")?;
    let doc = rest.strip_prefix('/').or_else(|| rest.strip_prefix('!'));
    match doc {
        // Four slashes are an ordinary comment.
        Some(text) if !text.starts_with('/') => Some((Kind::Doc, text)),
        _ => Some((Kind::Comment, rest)),
    }
}

#[derive(Default)]
struct Collector {
    paragraphs: Vec<Paragraph>,
    current: Option<Paragraph>,
    in_code: bool,
}

impl Collector {
    fn line(&mut self, kind: Kind, line: usize, text: &str) {
        let fence = text.starts_with("```");
        self.in_code ^= fence;
        if fence || self.in_code || text.is_empty() {
            self.end();
            return;
        }
        let is_fragment = text.starts_with('|') || text.starts_with('#');
        if is_fragment || begins_item(text) {
            self.end();
        }
        match &mut self.current {
            Some(paragraph) => {
                paragraph.text.push(' ');
                paragraph.text.push_str(text);
            }
            None => {
                let text = text.to_owned();
                self.current = Some(Paragraph { kind, line, text, is_fragment, is_whole_comment: false });
            }
        }
        if is_fragment {
            self.end();
        }
    }

    fn end(&mut self) {
        self.paragraphs.extend(self.current.take());
    }

    fn finish(mut self) -> Vec<Paragraph> {
        self.end();
        self.paragraphs
    }

    fn finish_comment(self) -> Vec<Paragraph> {
        let mut paragraphs = self.finish();
        if let [only] = &mut paragraphs[..] {
            only.is_whole_comment = true;
        }
        paragraphs
    }
}

/// Returns whether a line begins a list item.
fn begins_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ") || line.starts_with("* ") || number.len() < line.len() && number.starts_with(". ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(paragraphs: &[Paragraph]) -> Vec<(usize, &str)> {
        paragraphs.iter().map(|paragraph| (paragraph.line, paragraph.text.as_str())).collect()
    }

    #[test]
    fn a_page_is_split_into_paragraphs_without_its_code() {
        let page =
            "# Title\n\nOne\ntwo.\n\n    code\n- item\n    goes on\n- next\n```sh\ncode\n```\n| a | b |\n";
        let found = markdown(page);
        let expected =
            [(1, "# Title"), (3, "One two."), (7, "- item goes on"), (9, "- next"), (13, "| a | b |")];
        assert_eq!(texts(&found), expected);
        assert!(found[0].is_fragment && !found[1].is_fragment);
    }

    #[test]
    fn comments_are_told_from_code_and_from_each_other() {
        let code = "/// Doc.\n/// More.\nlet a = \"// no comment\";\n// Plain.\n//// Plain, too.\n/// Word\n";
        let found = comments(code);
        assert_eq!(texts(&found), [(1, "Doc. More."), (4, "Plain. // Plain, too."), (6, "Word")]);
        let kinds: Vec<_> = found.iter().map(|paragraph| paragraph.kind).collect();
        assert_eq!(kinds, [Kind::Doc, Kind::Comment, Kind::Doc]);
        assert!(found[2].is_whole_comment);
    }
}
