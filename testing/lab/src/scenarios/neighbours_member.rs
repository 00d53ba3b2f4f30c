//! A neighbour guest in the scenarios: commands, its exits, and its modules' counters.

use crate::channel::{Output, Session};
use crate::guest::Guest;
use crate::host::Host;
use crate::rdma::{self, Runs};
use crate::scenarios::rdma_exits::Counters;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time-out of a command of [`Member::sh`], which takes minutes on a busy machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1200);

/// mmblk's directory in configfs.
pub(super) const CONFIG: &str = "/sys/kernel/config/mmblk";

/// Counters by name.
pub(super) type Counts = BTreeMap<String, u64>;

/// A guest with neighbours.
pub(super) struct Member<'a> {
    pub(super) name: &'static str,
    pub(super) guest: Guest,
    pub(super) host: &'a Host,
}

impl Runs for Member<'_> {
    fn start(&self, script: &str) -> Result<Session> {
        self.host.start(&self.command(script), None, None)
    }

    fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.host
            .run(&self.command(script), timeout)
            .with_context(|| format!("Guest {}: {:?}", self.name, script.lines().next().unwrap_or_default()))
    }
}

impl Member<'_> {
    fn command(&self, script: &str) -> String {
        let script = rdma::quoted(&format!("export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root; {script}"));
        format!("exec /share/.lab/lab in --wait 60 {} {script}", self.name)
    }

    /// Runs a script and returns its output. Fails if the script does.
    pub(super) fn sh(&self, script: &str) -> Result<String> {
        self.run(script, COMMAND_TIMEOUT)?.success().with_context(|| {
            format!("{:?} failed in guest {}", script.trim().lines().next().unwrap_or_default(), self.name)
        })
    }

    /// Returns the exits of all kinds, as KVM counts them.
    pub(super) fn exits(&self) -> Result<u64> {
        Ok(Counters::parse(&self.host.sh(&format!("causeway inspect {} exits --json", self.name))?)?.all)
    }

    /// Returns the number of discarded stores into windows so far.
    pub(super) fn discarded_stores(&self) -> Result<u64> {
        let text = self.host.sh(&format!("causeway inspect {} --json", self.name))?;
        let tree: Value = serde_json::from_str(&text).with_context(|| format!("no JSON: {text:?}"))?;
        find(&tree, "discarded_stores")
            .with_context(|| format!("{} counts no discarded stores: {text}", self.name))
    }

    /// Returns mmnet's statistics.
    pub(super) fn statistics(&self, interface: &str) -> Result<Counts> {
        Ok(parse(&self.sh(&format!("ethtool -S {interface}"))?, ": "))
    }

    /// Returns the counters of an mmblk export or device: a directory in configfs.
    pub(super) fn counters(&self, of: &str) -> Result<Counts> {
        Ok(parse(&self.sh(&format!("cat {CONFIG}/{of}/counters"))?, " "))
    }

    /// Exports a block device to a client.
    pub(super) fn serve(&self, export: &str, path: &str, client: &str) -> Result<()> {
        self.sh(&format!(
            "set -e; e={CONFIG}/exports/{export}; mkdir $e; echo {path} > $e/path; echo {client} > $e/clients; echo 1 > $e/enable"
        ))
        .map(drop)
    }

    /// Attaches an export; returns the disk.
    pub(super) fn attach(&self, server: &str, export: &str) -> Result<String> {
        let text = self.sh(&format!(
            "set -e; d={CONFIG}/devices/{export}; mkdir $d; echo {server} > $d/peer; echo {export} > $d/export; echo 1 > $d/enable; i=0\n\
             until [ -n \"$(cat $d/disk)\" ]; do i=$((i+1)); [ $i -gt 300 ] && {{ cat $d/state; dmesg | tail -n 8 >&2; exit 1; }}; sleep 0.1; done; cat $d/disk"
        ))?;
        Ok(format!("/dev/{}", text.trim()))
    }

    /// Removes an export or a device.
    pub(super) fn take_away(&self, what: &str) -> Result<()> {
        self.sh(&format!("set -e; cd {CONFIG}; echo 0 > {what}/enable; rmdir {what}")).map(drop)
    }

    /// Waits until a device reaches a state; returns the time in seconds.
    pub(super) fn until(&self, device: &str, state: &str, at_most: Duration) -> Result<f64> {
        let begun = Instant::now();
        self.sh(&format!(
            "i=0; until [ \"$(cat {CONFIG}/devices/{device}/state)\" = {state} ]; do i=$((i+1)); [ $i -gt {} ] && {{ cat {CONFIG}/devices/{device}/state >&2; exit 1; }}; sleep 0.1; done",
            at_most.as_millis() / 100
        ))?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// Parses lines with a name and a number.
fn parse(text: &str, between: &str) -> Counts {
    text.lines()
        .filter_map(|line| {
            let (name, number) = line.trim().split_once(between)?;
            Some((name.to_owned(), number.trim().parse().ok()?))
        })
        .collect()
}

/// Returns the first number with that name in a tree.
pub(super) fn find(tree: &Value, name: &str) -> Option<u64> {
    match tree {
        Value::Object(map) => {
            map.get(name).and_then(Value::as_u64).or_else(|| map.values().find_map(|value| find(value, name)))
        }
        Value::Array(list) => list.iter().find_map(|value| find(value, name)),
        _ => None,
    }
}

/// Returns a counter, which must exist.
pub(super) fn counter(of: &Counts, name: &str) -> Result<u64> {
    of.get(name).copied().with_context(|| format!("There is no counter {name}: {of:?}"))
}

/// Returns the counters' growth.
pub(super) fn grown(before: &Counts, after: &Counts) -> Counts {
    after
        .iter()
        .map(|(name, value)| (name.clone(), value.saturating_sub(before.get(name).copied().unwrap_or(0))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let got = parse("reads 12\nwritten_bytes 4096\n", " ");
        assert_eq!((counter(&got, "reads").unwrap(), counter(&got, "written_bytes").unwrap()), (12, 4096));
        assert!(counter(&got, "others").is_err());
        let later = parse("reads 13\nwritten_bytes 4096\nnew 2\n", " ");
        let by = grown(&got, &later);
        assert_eq!((by["reads"], by["written_bytes"], by["new"]), (1, 0, 2));
    }

    #[test]
    fn statistics_are_read() {
        let got = parse("NIC statistics:\n     rx_frames: 12\n     tx_frames: 3\n", ": ");
        assert_eq!((counter(&got, "rx_frames").unwrap(), counter(&got, "tx_frames").unwrap()), (12, 3));
        assert_eq!(got.len(), 2);
    }
}
