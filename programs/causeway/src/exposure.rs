//! Checks sockets that other hosts can reach for a key.

use std::net::IpAddr;

use anyhow::bail;

/// A socket for connections from other hosts.
#[derive(Debug, Clone, Copy)]
pub struct Exposed<'a> {
    /// The flag that opens it.
    pub flag: &'a str,
    /// Its address as given by the user.
    pub address: &'a str,
    /// The flag that sets a key for it.
    pub key_flag: &'a str,
    /// The consequence of a missing key, for an attacker that can connect.
    pub risk: &'a str,
}

/// Refuses a socket without a key that other hosts can reach, unless the user accepts the risk. Then it logs a warning.
///
/// # Errors
/// One sentence with the flags that help.
pub fn check(
    exposed: Exposed<'_>,
    ips: impl IntoIterator<Item = IpAddr>,
    has_key: bool,
    insecure: bool,
) -> anyhow::Result<()> {
    let Exposed { flag, address, key_flag, risk } = exposed;
    if has_key || ips.into_iter().all(|ip| ip.to_canonical().is_loopback()) {
        return Ok(());
    }
    if !insecure {
        bail!(
            "{flag}: {address} is reached from other hosts, and without a key {risk}; give {key_flag} FILE (`causeway key FILE` makes one), or accept that with --insecure"
        );
    }
    tracing::warn!("{flag} {address} has no key: {risk}; {key_flag} FILE ends that");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stays_on_this_host_needs_no_key() {
        let of = |ips: &[&str], has_key, insecure| {
            let exposed = Exposed {
                flag: "--incoming",
                address: "there",
                key_flag: "--incoming-key",
                risk: "it is open",
            };
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            check(exposed, ips, has_key, insecure)
        };
        for here in [&[][..], &["127.0.0.1"], &["127.9.9.9", "::1"], &["::ffff:127.0.0.1"]] {
            of(here, false, false).unwrap();
        }
        for beyond in [&["0.0.0.0"][..], &["::"], &["192.0.2.7"], &["127.0.0.1", "2001:db8::1"]] {
            let error = of(beyond, false, false).unwrap_err().to_string();
            assert!(
                ["it is open", "--incoming-key", "--insecure"].iter().all(|part| error.contains(part)),
                "{error}"
            );
            of(beyond, true, false).unwrap();
            of(beyond, false, true).unwrap();
        }
    }
}
