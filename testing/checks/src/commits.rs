//! Messages of the last commits: a scope, a short subject, and a body that says why.

use std::path::Path;

use anyhow::Result;

use crate::git;

/// How many commits are checked, from the last one back.
const CHECKED: &str = "100";
/// Most characters of a subject.
const MAX_SUBJECT: usize = 72;

/// Returns one sentence per commit whose message breaks a rule.
///
/// # Errors
/// Git can't list the commits.
pub fn violations(root: &Path) -> Result<Vec<String>> {
    let log = git::output(root, &["log", "--no-merges", "-n", CHECKED, "--format=%h%x1f%B%x1e"])?;
    let commits = log.split('\x1e').filter_map(|entry| entry.trim().split_once('\x1f'));
    Ok(commits.filter_map(|(id, message)| Some(format!("commit {id}: {}", problem(message)?))).collect())
}

/// Returns what is wrong with a message.
fn problem(message: &str) -> Option<String> {
    let (subject, body) = message.split_once('\n').unwrap_or((message, ""));
    let length = subject.chars().count();
    let has_scope = subject.split_once(": ").is_some_and(|(scope, rest)| {
        let allowed = |c: char| c.is_alphanumeric() || " ,-_/.{}".contains(c);
        !scope.is_empty() && scope.chars().all(allowed) && !rest.is_empty()
    });
    if length > MAX_SUBJECT {
        Some(format!("its subject has {length} characters, more than {MAX_SUBJECT}"))
    } else if !has_scope {
        Some(format!("its subject '{subject}' doesn't begin with a scope and a colon"))
    } else if body.trim().is_empty() {
        Some(format!("'{subject}' has no body that says why"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_a_scope_a_short_subject_and_a_body() {
        assert_eq!(problem("monitor, host: add it\n\nBecause.\n"), None);
        let long = format!("hca: {}\n\nBecause.", "x".repeat(80));
        for (message, word) in
            [("add it\n\nBecause.", "scope"), ("hca: add it\n\n", "no body"), (long.as_str(), "characters")]
        {
            assert!(problem(message).is_some_and(|problem| problem.contains(word)), "{message}");
        }
    }
}
