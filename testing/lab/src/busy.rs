//! Samples a host's CPU time per thread, to find out why a scenario is slow (`LAB_BUSY=1`).

use crate::host::Host;
use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// Ticks per thread, by process, thread and name. Kernel threads and interrupts are under `-`.
type Ticks = BTreeMap<String, u64>;

/// Clock ticks per second in /proc.
const PER_SECOND: f64 = 100.0;
/// Limit of threads in a report.
const MAX_SHOWN_THREADS: usize = 14;

const LOOK: &str = "cat /proc/stat | head -n 1; cat /proc/[0-9]*/task/[0-9]*/stat 2>/dev/null; true";

/// Returns whether the samples are enabled.
pub fn wanted() -> bool {
    std::env::var("LAB_BUSY").is_ok_and(|value| value == "1")
}

fn parse(text: &str) -> Ticks {
    let mut ticks = Ticks::new();
    for line in text.lines() {
        if let Some(all) = line.strip_prefix("cpu ") {
            let columns: Vec<u64> = all.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            for (name, column) in [("idle", 3), ("hard interrupts", 5), ("soft interrupts", 6), ("guests", 8)]
            {
                ticks.insert(format!("- {name}"), columns.get(column).copied().unwrap_or(0));
            }
            continue;
        }
        // pid (name) state ppid …: names may contain blanks and parentheses.
        let (Some(open), Some(close)) = (line.find('('), line.rfind(')')) else { continue };
        let words: Vec<&str> = line[close + 1..].split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        // Fields 14 and 15 of proc(5). The first one here is field 3.
        let spent = number(11) + number(12);
        ticks.insert(format!("{}{}", &line[..open], &line[open + 1..close]), spent);
    }
    ticks
}

/// A sample of a host.
#[derive(Debug)]
pub struct Look(Ticks);

impl Look {
    /// Takes a sample.
    pub fn take(host: &Host) -> Result<Self> {
        let text = host.sh(LOOK).with_context(|| format!("Can't see what {} is busy with", host.name()))?;
        Ok(Self(parse(&text)))
    }

    /// Returns the threads with the most CPU time since `before`, in seconds. A new thread counts fully, an ended one
    /// not at all.
    pub fn since(&self, before: &Self) -> String {
        let spent = |(name, now): (&String, &u64)| {
            (now.saturating_sub(before.0.get(name).copied().unwrap_or(0)), name.clone())
        };
        let mut all: Vec<(u64, String)> = self.0.iter().map(spent).filter(|(ticks, _)| *ticks > 0).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let said = all
            .iter()
            .take(MAX_SHOWN_THREADS)
            .map(|(ticks, name)| format!("{name} {:.2}", *ticks as f64 / PER_SECOND));
        said.collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads are sorted by the time since the earlier sample, for any names. The CPU's own columns are included.
    #[test]
    fn what_took_most_comes_first() {
        let stat = |idle, a, b| {
            Look(parse(&format!(
                "cpu  1 2 3 {idle} 5 6 7 8 9 10\n7 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 {a} 1 0\n8 (new) R 1 2 3 4 5 6 7 8 9 10 0 {b} 0\n"
            )))
        };
        assert_eq!(stat(250, 40, 2).since(&stat(50, 10, 2)), "- idle 2.00; 7 a (b) c 0.30");
    }
}
