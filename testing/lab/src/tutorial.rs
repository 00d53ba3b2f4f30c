//! Parses the pages of `docs/tutorials`: the commands, the shells in which a reader types them, and the output that they print.
//!
//! ````text
//! ```sh prepare          typed once on each host, before any page
//! ```sh host             typed in the shell of that host; of each, with commas between them: `host,host2`
//! ```sh host as first    opens a terminal on that host, which from then on is the guest `first`
//! ```sh first            typed in that terminal
//! ```text                what the block before it prints
//! ````
//!
//! An expected line matches any line after the match of the line before it. `…` matches any text, and spaces match any number of spaces.
//! Blocks of other languages, and indented commands, aren't executed.

use anyhow::{Context, Result, bail};

/// Matches any text in an expected line.
const ANY_TEXT: char = '…';
/// Opens and closes a block.
const FENCE: &str = "```";
/// The hosts that a page may name, in the order of their numbers.
pub const HOSTS: [&str; 2] = ["host", "host2"];

/// The shells in which a block is typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// On each host, before any page.
    Prepare,
    /// In the shells of these hosts, or in the terminals of these guests.
    In(Vec<String>),
    /// In a new terminal of a host, which from then on is a guest.
    Terminal {
        /// The host.
        host: String,
        /// The guest.
        guest: String,
    },
}

/// Commands that a reader types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The line of the page that it begins in.
    pub line: usize,
    /// Where it is typed.
    pub place: Place,
    /// The commands.
    pub commands: String,
    /// Lines that it prints.
    pub prints: Vec<String>,
}

/// Reads a page's blocks.
///
/// # Errors
/// When a block isn't closed, is empty, names a machine that isn't there yet, or when output stands without its commands.
pub fn blocks(page: &str) -> Result<Vec<Block>> {
    let mut found: Vec<Block> = Vec::new();
    let mut lines = page.lines().zip(1..);
    while let Some((line, number)) = lines.next() {
        let Some(info) = line.strip_prefix(FENCE) else { continue };
        let mut content = Vec::new();
        loop {
            let (line, _) = lines.next().with_context(|| format!("line {number}: the block isn't closed"))?;
            if line == FENCE {
                break;
            }
            content.push(line);
        }
        let at = || format!("line {number}: {info:?}");
        match info.split_once(' ').unwrap_or((info, "")) {
            ("sh", machines) => {
                let place = place(machines, &found).with_context(at)?;
                if content.iter().all(|line| line.trim().is_empty()) {
                    bail!("line {number}: the block is empty");
                }
                found.push(Block { line: number, place, commands: content.join("\n"), prints: Vec::new() });
            }
            ("text", "") => {
                let block = found.last_mut().with_context(at).context("output without commands")?;
                if !block.prints.is_empty() {
                    bail!("line {number}: the block of line {} has its output already", block.line);
                }
                block.prints = content
                    .iter()
                    .filter(|line| !line.trim_matches([' ', ANY_TEXT]).is_empty())
                    .map(|line| (*line).to_owned())
                    .collect();
                if block.prints.is_empty() {
                    bail!("line {number}: no line of output is named");
                }
            }
            _ => {}
        }
    }
    Ok(found)
}

fn place(machines: &str, before: &[Block]) -> Result<Place> {
    let host = |name: &str| HOSTS.contains(&name);
    let guest = |name: &str| {
        before.iter().any(|b| matches!(&b.place, Place::Terminal { guest, .. } if guest == name))
    };
    let words: Vec<&str> = machines.split_whitespace().collect();
    match words.as_slice() {
        ["prepare"] => Ok(Place::Prepare),
        [on, "as", name] if host(on) && !host(name) => {
            Ok(Place::Terminal { host: (*on).to_owned(), guest: (*name).to_owned() })
        }
        [names] => {
            let names: Vec<&str> = names.split(',').collect();
            if let Some(name) = names.iter().find(|name| !host(name) && !guest(name)) {
                bail!("{name:?} is neither a host ({}) nor a guest whose terminal is open", HOSTS.join(", "));
            }
            Ok(Place::In(names.into_iter().map(str::to_owned).collect()))
        }
        _ => bail!("it should say where: prepare, MACHINE[,MACHINE], or HOST as GUEST"),
    }
}

/// The first expected line without a match in `printed`, if any.
pub fn missing<'a>(expected: &'a [String], printed: &[String]) -> Option<&'a str> {
    let mut printed = printed.iter();
    expected.iter().map(String::as_str).find(|pattern| !printed.any(|line| fits(pattern, line)))
}

/// Whether a printed line matches an expected one.
fn fits(pattern: &str, line: &str) -> bool {
    let single_spaces = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (pattern, line) = (single_spaces(pattern), single_spaces(line));
    let parts: Vec<&str> = pattern.split(ANY_TEXT).map(str::trim).collect();
    let [first, middle @ .., last] = parts.as_slice() else { return pattern == line };
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    for part in middle {
        let Some((_, behind)) = rest.split_once(part) else { return false };
        rest = behind;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# A page\n\n    not run\n\n```sh host\ntrue &&\n  false\n```\nIt prints:\n```text\n…\na  …  c\n```\n\
        ```toml\n[x]\n```\n```sh host as first\nsocat\n```\n```sh first\nuname\n```\n```sh host,host2\nls\n```\n```sh prepare\nx\n```\n";

    #[test]
    fn a_page_is_read() {
        let found = blocks(PAGE).unwrap();
        let places: Vec<&Place> = found.iter().map(|block| &block.place).collect();
        let inside = |names: &[&str]| Place::In(names.iter().map(ToString::to_string).collect());
        let terminal = Place::Terminal { host: "host".into(), guest: "first".into() };
        let expected =
            [inside(&["host"]), terminal, inside(&["first"]), inside(&["host", "host2"]), Place::Prepare];
        assert_eq!(places, expected.iter().collect::<Vec<_>>());
        assert_eq!(
            found[0],
            Block {
                line: 5,
                place: expected[0].clone(),
                commands: "true &&\n  false".into(),
                prints: vec!["a  …  c".into()]
            }
        );
        assert!(found[1..].iter().all(|block| block.prints.is_empty()));
    }

    #[test]
    fn mistakes_are_named() {
        let bad = |page: &str| format!("{:#}", blocks(page).unwrap_err());
        assert!(bad("```sh host\nls").contains("line 1: the block isn't closed"));
        assert!(bad("\n```sh host\n\n```\n").contains("line 2: the block is empty"));
        assert!(bad("```sh\nls\n```\n").contains("it should say where"));
        assert!(bad("```sh first\nls\n```\n").contains("\"first\" is neither"));
        assert!(bad("```sh host as host2\nls\n```\n").contains("it should say where"));
        assert!(bad("```text\nx\n```\n").contains("output without commands"));
        assert!(bad("```sh host\nls\n```\n```text\n…\n```\n").contains("no line of output"));
        assert!(bad("```sh host\nls\n```\n```text\nx\n```\n```text\ny\n```\n").contains("already"));
    }

    #[test]
    fn dots_stand_for_any_text() {
        for (pattern, line) in [
            ("a", " a "),
            ("a b", "a    b"),
            ("…a", "xa"),
            ("a…", "a"),
            ("a … c", "a 1 b c"),
            ("3 sent, … received, 0% …", "3 sent, 3 received, 0% loss"),
        ] {
            assert!(fits(pattern, line), "{pattern:?} {line:?}");
        }
        for (pattern, line) in [("a", "ab"), ("a…", "ba"), ("…a", "ab"), ("a…b…c", "acb"), ("a…a", "a")]
        {
            assert!(!fits(pattern, line), "{pattern:?} {line:?}");
        }
    }

    #[test]
    fn lines_are_found_in_their_order() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let printed = lines("x\na 1\ny\nb 2\n");
        assert_eq!(missing(&lines("a …\nb …"), &printed), None);
        assert_eq!(missing(&lines("b …\na …"), &printed), Some("a …"));
        assert_eq!(missing(&lines("a 1\na 1"), &printed), Some("a 1"));
    }
}
