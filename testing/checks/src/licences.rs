//! Every dependency's license must permit distribution with an Apache-2.0 program.

use spdx::{Expression, LicenseReq};

use crate::metadata::Metadata;

const ALLOWED: [&str; 12] = [
    "Apache-2.0",
    "MIT",
    "MIT-0",
    // LLVM's libFuzzer, in fuzz targets only.
    "NCSA",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "CC0-1.0",
    "Unicode-3.0",
    "Unlicense",
];

/// Returns one sentence per package whose license isn't in the list.
pub fn violations(metadata: &Metadata) -> Vec<String> {
    metadata
        .packages
        .iter()
        .filter_map(|package| {
            let problem = match package.license.as_deref() {
                None => "states no licence".to_owned(),
                Some(text) if is_allowed(text) => return None,
                Some(text) => format!("is under '{text}'"),
            };
            Some(format!(
                "{} {} {problem}: allowed are {}",
                package.name,
                package.version,
                ALLOWED.join(", ")
            ))
        })
        .collect()
}

fn is_allowed(text: &str) -> bool {
    Expression::parse_mode(text, spdx::ParseMode::LAX).is_ok_and(|expression| {
        expression.evaluate(|requirement: &LicenseReq| {
            requirement.license.id().is_some_and(|id| ALLOWED.contains(&id.name))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn alternatives_pass_when_one_is_allowed_and_conjunctions_when_all_are() {
        assert!(is_allowed("Apache-2.0 OR BSD-3-Clause"));
        assert!(is_allowed("MIT/Apache-2.0"));
        assert!(is_allowed("Apache-2.0 WITH LLVM-exception OR MIT"));
        assert!(is_allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!is_allowed("GPL-3.0-only"));
        assert!(!is_allowed("MIT AND GPL-2.0-only"));
    }
}
