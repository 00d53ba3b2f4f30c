//! What a paragraph must not have.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use regex::Regex;

use super::text::{Kind, Paragraph};

/// Most words of a sentence.
const MAX_WORDS: usize = 35;

/// Words of earlier versions that nobody looks up, and what the field says. Patterns have word boundaries at both ends.
const BANNED: [(&str, &str); 12] = [
    ("whoever", "the name of the component"),
    (
        "who (?:says|holds|waits|works|has|comes|gives|runs|wants|asks|spins|sends|reads)",
        "the name of the component, or 'that'",
    ),
    ("(?:is|are|was|were) (?:told|said|had)", "receives, is notified, exists"),
    ("brought together", "consolidated"),
    ("by a hair", "narrowly, or a figure"),
    ("polite(?:ly)?", "that yields"),
    ("pok(?:e|es|ed|ing)", "kick, write"),
    ("tellings?", "message, report"),
    ("patience", "timeout"),
    ("foresight", "prefetch"),
    ("(?:stands?|stood|standing) still", "is paused, is stopped"),
    ("goes on|go on", "continues"),
];

/// Names what may have dates and hexadecimal words: history, results of runs, and constants of public specifications.
const WITH_DATES: [&str; 4] = ["CHANGELOG.md", RESULTS, "docs/decisions/", "docs/design/specs/"];
/// Written by benchmarks and scenarios.
const RESULTS: &str = "docs/results/";
/// Has the banned words as such.
const WITH_BANNED_WORDS: &str = "docs/glossary.md";
/// Top folders and endings of a path that is checked to exist.
const CITED: &str = r"(?:base|cores|devices|docs|fuzz|guest|programs|services|testing|tools)/[\w./-]*\.(?:c|h|json|md|proto|rs|sh|toml)";

/// The rules, and the files that text may cite.
pub struct Rules<'a> {
    tracked: &'a BTreeSet<String>,
    banned: Vec<(Regex, &'static str)>,
    code: Regex,
    sentence_end: Regex,
    date: Regex,
    commit: Regex,
    cited: Regex,
    link: Regex,
}

impl<'a> Rules<'a> {
    /// Compiles the rules' patterns.
    ///
    /// # Errors
    /// A pattern is wrong.
    pub fn new(tracked: &'a BTreeSet<String>) -> Result<Self> {
        let compile = |pattern: &str| {
            Regex::new(pattern).with_context(|| format!("The pattern {pattern} can't be compiled"))
        };
        let banned = BANNED
            .iter()
            .map(|(pattern, instead)| anyhow::Ok((compile(&format!(r"(?i)\b(?:{pattern})\b"))?, *instead)));
        Ok(Self {
            tracked,
            banned: banned.collect::<Result<_>>()?,
            code: compile("`[^`]*`")?,
            sentence_end: compile(r#"[.!?]\s+[A-Z`\[*"(]"#)?,
            date: compile(
                r"\b20\d\d-\d\d-\d\d\b|\b\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|November|December)\b",
            )?,
            commit: compile(r"(?:^|[\s(])([0-9a-f]{7,12}|[0-9a-f]{40})(?:$|[\s).,;:])")?,
            cited: compile(&format!(r"(?:^|[\s(`\[]){CITED}(?:$|[\s)`\],.:;#?])"))?,
            link: compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")?,
        })
    }

    /// Returns what is wrong with a paragraph of a file.
    pub fn problems(&self, file: &str, paragraph: &Paragraph) -> Vec<String> {
        let mut found = Vec::new();
        // Names of code are not words.
        let words = self.code.replace_all(&paragraph.text, "`code`");
        if file != WITH_BANNED_WORDS {
            for (pattern, instead) in &self.banned {
                if let Some(word) = pattern.find(&words) {
                    found.push(format!("'{}' is banned: say {instead}", word.as_str()));
                }
            }
        }
        if !paragraph.is_fragment && !WITH_DATES.iter().any(|path| file.starts_with(path)) {
            let ids = self.commit.captures_iter(&words).filter_map(|captures| captures.get(1));
            let id = ids.map(|id| id.as_str()).find(|id| is_commit(id));
            if let Some(date) = self.date.find(&words).map(|date| date.as_str()).or(id) {
                found.push(format!("'{date}' is history: only CHANGELOG.md and docs/results have that"));
            }
        }
        if paragraph.kind != Kind::Comment && !paragraph.is_fragment && !file.starts_with(RESULTS) {
            found.extend(self.long_sentence(&words));
        }
        // A span of code names what the item stands for, such as a struct of the kernel.
        let is_code = paragraph.text.starts_with('`');
        let is_word = words.split_whitespace().count() == 1 && !is_code;
        if paragraph.kind == Kind::Doc && paragraph.is_whole_comment && is_word {
            found.push(format!("the doc comment '{}' has one word", paragraph.text));
        }
        found.extend(self.missing_file(file, paragraph));
        found
    }

    fn long_sentence(&self, text: &str) -> Option<String> {
        let mut begin = 0;
        let ends = self.sentence_end.find_iter(text).map(|end| end.start() + 1);
        for end in ends.chain([text.len()]) {
            let sentence = text.get(begin..end).unwrap_or_default();
            begin = end;
            let words = sentence.split_whitespace().count();
            if words > MAX_WORDS {
                let start: Vec<&str> = sentence.split_whitespace().take(6).collect();
                return Some(format!(
                    "the sentence '{} …' has {words} words, more than {MAX_WORDS}",
                    start.join(" ")
                ));
            }
        }
        None
    }

    /// Returns a sentence about a file that the paragraph cites and that doesn't exist.
    fn missing_file(&self, file: &str, paragraph: &Paragraph) -> Option<String> {
        let cited = self.cited.find_iter(&paragraph.text).map(|found| {
            let ends = |c: char| c.is_whitespace() || "()`[],:;#?".contains(c);
            found.as_str().trim_matches(ends).trim_end_matches('.').to_owned()
        });
        let links = self.link.captures_iter(&paragraph.text).filter_map(|captures| captures.get(1));
        let linked = links
            .map(|link| link.as_str())
            .filter(|link| paragraph.kind == Kind::Page && !link.contains("://"))
            .map(|link| beside(file, link));
        let exists = |path: &String| {
            let folder = format!("{}/", path.trim_end_matches('/'));
            self.tracked.contains(path) || self.tracked.iter().any(|file| file.starts_with(&folder))
        };
        let missing = cited.chain(linked).find(|path| !exists(path))?;
        Some(format!("{missing} doesn't exist"))
    }
}

/// Returns whether a hexadecimal word may be a commit's id. Addresses and constants seldom have several digits and several letters.
fn is_commit(word: &str) -> bool {
    let digits = word.chars().filter(char::is_ascii_digit).count();
    digits > 1 && word.chars().count() - digits > 1
}

/// Resolves a link in a page to a path below the work tree's root.
fn beside(page: &str, link: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(file: &str, kind: Kind, text: &str) -> Vec<String> {
        let tracked: BTreeSet<String> = ["docs/design/dsm.md".to_owned(), "docs/index.md".to_owned()].into();
        let rules = Rules::new(&tracked).unwrap();
        let text = text.to_owned();
        rules.problems(file, &Paragraph { kind, line: 1, text, is_fragment: false, is_whole_comment: true })
    }

    #[test]
    fn each_rule_finds_its_kind_of_text() {
        let long = format!("It is {}long.", "very ".repeat(40));
        let cases = [
            ("Whoever has it.", "banned"),
            ("The peer is told so.", "banned"),
            ("It was so on 2026-01-31.", "history"),
            ("Broken since 8f32ad3.", "history"),
            ("See docs/design/none.md.", "doesn't exist"),
            ("See [this](../none.md#part).", "doesn't exist"),
            (long.as_str(), "more than"),
        ];
        for (text, word) in cases {
            let found = problems("docs/design/page.md", Kind::Page, text);
            assert!(matches!(&found[..], [one] if one.contains(word)), "{text}: {found:?}");
        }
        let found = problems("cores/hca/src/lib.rs", Kind::Doc, "Cancelled.");
        assert!(matches!(&found[..], [one] if one.contains("one word")), "{found:?}");
    }

    #[test]
    fn code_history_and_right_text_have_no_problem() {
        for (file, text) in [
            (
                "docs/design/page.md",
                "The peer gets `whoever`, at e0000000 and 0xdeadbeef1; [more](dsm.md#x), `docs/design/dsm.md`.",
            ),
            ("docs/design/page.md", "Pages are in [a folder](../design/) of docs/index.md."),
            ("CHANGELOG.md", "Released on 2026-01-31."),
            ("docs/glossary.md", "Not: whoever, patience."),
        ] {
            assert_eq!(problems(file, Kind::Page, text), Vec::<String>::new(), "{text}");
        }
        assert!(problems("cores/hca/src/lib.rs", Kind::Comment, "Cancelled.").is_empty());
    }
}
