//! Rules for names of VMs, hosts, NICs and segments.

/// Limit of a name of a VM, host, NIC, group or segment in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// A name is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{}\" is not a {what}'s name: it has 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9, '.', '_', '-', and begins with a \
     letter or digit",
    name.escape_debug()
)]
pub struct BadName {
    /// `VM`, `host`, `NIC`, `group` or `segment`.
    pub what: &'static str,
    /// The name as given, truncated if it is longer than any valid name.
    pub name: String,
}

/// Checks a name. Names become parts of file names and metric labels.
///
/// # Errors
/// The name is empty, too long, or has other characters.
pub fn check_name(what: &'static str, name: &str) -> Result<(), BadName> {
    let plain = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if plain { Ok(()) } else { Err(BadName { what, name: name.chars().take(2 * MAX_NAME_BYTES).collect() }) }
}
