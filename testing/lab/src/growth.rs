//! Resources of Causeway's processes on a host (private memory, mappings, descriptors), and their growth.

use crate::host::Host;
use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// Resources of the processes of one role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Resident memory without a file or memfd, in KiB. Excludes guests' RAM.
    pub anonymous_kib: u64,
    /// Total resident memory, in KiB.
    pub resident_kib: u64,
    /// Number of mappings.
    pub mappings: u64,
    /// Number of open descriptors.
    pub descriptors: u64,
}

/// By role: `service`, `daemon of h1`, `monitor of a`.
pub type Holding = BTreeMap<String, Held>;

/// Permitted growth between two points of a run with the same load.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Private memory, in KiB.
    pub anonymous_kib: u64,
    /// Number of mappings.
    pub mappings: u64,
    /// Number of descriptors.
    pub descriptors: u64,
}

const LOOK: &str = "for p in /proc/[0-9]*; do [ \"$(cat $p/comm 2>/dev/null)\" = causeway ] || continue\n\
    a=$(sed -n 's/^RssAnon:[^0-9]*\\([0-9]*\\).*/\\1/p' $p/status); r=$(sed -n 's/^VmRSS:[^0-9]*\\([0-9]*\\).*/\\1/p' $p/status)\n\
    echo HELD $a $r $(wc -l < $p/maps) $(ls $p/fd | wc -l) $(tr '\\0\\n' '  ' < $p/cmdline); done; true";

/// Returns the role of a process, from its command line.
fn role(words: &[&str], host: &str) -> Option<String> {
    let verb = words.iter().find(|word| ["run", "host", "cluster"].contains(word))?;
    Some(match *verb {
        "run" => {
            let name = words.iter().position(|word| *word == "--name").and_then(|at| words.get(at + 1))?;
            format!("monitor of {name}")
        }
        "host" => format!("daemon of {host}"),
        _ => "service".to_owned(),
    })
}

fn parse(text: &str, host: &str, into: &mut Holding) {
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["HELD", a, r, m, d, command @ ..] = words.as_slice() else { continue };
        let (Ok(a), Ok(r), Ok(m), Ok(d)) =
            (a.parse::<u64>(), r.parse::<u64>(), m.parse::<u64>(), d.parse::<u64>())
        else {
            continue;
        };
        let Some(role) = role(command, host) else { continue };
        let held = into.entry(role).or_default();
        held.anonymous_kib += a;
        held.resident_kib += r;
        held.mappings += m;
        held.descriptors += d;
    }
}

/// Returns the resources of all Causeway processes on these hosts.
pub fn held(hosts: &[Host]) -> Result<Holding> {
    let mut all = Holding::new();
    for host in hosts {
        let text =
            host.sh(LOOK).with_context(|| format!("Can't see what processes on {} hold", host.name()))?;
        parse(&text, host.name(), &mut all);
    }
    Ok(all)
}

/// Returns a sentence for each growth beyond the limit, and for each role that exists at one point only.
pub fn grown(before: &Holding, after: &Holding, limit: Limit) -> Vec<String> {
    let mut said = Vec::new();
    for (role, old) in before {
        let Some(new) = after.get(role) else {
            said.push(format!("the {role} has gone"));
            continue;
        };
        let mut compare = |what: &str, old: u64, new: u64, limit: u64| {
            if new > old.saturating_add(limit) {
                said.push(format!(
                    "the {role} had {old} {what}, and has {new}: at most {limit} more are no growth"
                ));
            }
        };
        compare("KiB of memory of its own", old.anonymous_kib, new.anonymous_kib, limit.anonymous_kib);
        compare("mappings", old.mappings, new.mappings, limit.mappings);
        compare("descriptors", old.descriptors, new.descriptors, limit.descriptors);
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit { anonymous_kib: 100, mappings: 10, descriptors: 2 };

    fn of(text: &str) -> Holding {
        let mut all = Holding::new();
        parse(text, "h1", &mut all);
        all
    }

    #[test]
    fn processes_are_told_apart_by_their_command_lines() {
        let all = of(
            "HELD 10 20 3 4 causeway run --name a --kernel k\nHELD 1 2 3 4 causeway --log-level info host --socket s\n\
             HELD 5 6 7 8 causeway cluster serve --listen x\nHELD 5 6 7 8 causeway migrate a\nnonsense\n",
        );
        assert_eq!(all.keys().collect::<Vec<_>>(), ["daemon of h1", "monitor of a", "service"]);
        assert_eq!(
            all["monitor of a"],
            Held { anonymous_kib: 10, resident_kib: 20, mappings: 3, descriptors: 4 }
        );
    }

    /// Injected leaks of memory, mappings and descriptors are named; growth up to the limit isn't.
    #[test]
    fn growth_is_found() {
        let before = of("HELD 1000 2000 50 20 causeway host");
        assert!(grown(&before, &of("HELD 1100 9000 60 22 causeway host"), LIMIT).is_empty());
        for (after, what) in [
            ("HELD 1101 2000 50 20 causeway host", "1101"),
            ("HELD 1000 2000 61 20 causeway host", "61"),
            ("HELD 1000 2000 50 23 causeway host", "23"),
            ("", "gone"),
        ] {
            let said = grown(&before, &of(after), LIMIT);
            assert!(said.len() == 1 && said[0].contains(what), "{said:?}");
        }
    }
}
