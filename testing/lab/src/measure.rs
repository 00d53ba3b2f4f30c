//! Measures a monitor from its host: memory beyond the guest's RAM, and KVM's counters.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// One mapping of a process, from `smaps`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Mapping {
    path: String,
    size_kib: u64,
    rss_kib: u64,
    pss_kib: u64,
    anonymous_kib: u64,
}

fn mappings(smaps: &str) -> Vec<Mapping> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if first.contains('-') && !first.ends_with(':') {
            let path = words.skip(4).collect::<Vec<_>>().join(" ");
            all.push(Mapping { path, ..Mapping::default() });
        } else if let Some(m) = all.last_mut() {
            let value = words.next().and_then(|v| v.parse().ok()).unwrap_or(0);
            match first {
                "Size:" => m.size_kib = value,
                "Rss:" => m.rss_kib = value,
                "Pss:" => m.pss_kib = value,
                "Anonymous:" => m.anonymous_kib = value,
                _ => {}
            }
        }
    }
    all
}

/// Returns whether a mapping is the guest's RAM: a memfd or anonymous memory of at least half the guest's size.
fn is_ram(m: &Mapping, ram_kib: u64) -> bool {
    let nameless = m.path.is_empty() || m.path.starts_with("/memfd:") || m.path.starts_with("/dev/shm");
    nameless && m.size_kib * 2 >= ram_kib
}

/// Returns a process' memory beyond its guest's RAM in KiB: resident, proportional, and of the latter the unchanged
/// file pages (of program and libraries).
fn beyond(smaps: &str, ram_kib: u64) -> Result<(u64, u64, u64)> {
    let all = mappings(smaps);
    if !all.iter().any(|m| is_ram(m, ram_kib)) {
        bail!("No mapping of the process looks like {} MiB of guest RAM", ram_kib >> 10);
    }
    let rest: Vec<&Mapping> = all.iter().filter(|m| !is_ram(m, ram_kib)).collect();
    let file = |m: &&&Mapping| m.path.starts_with('/') && !m.path.starts_with("/memfd:");
    let unchanged = rest.iter().filter(file).map(|m| m.pss_kib.saturating_sub(m.anonymous_kib)).sum();
    Ok((rest.iter().map(|m| m.rss_kib).sum(), rest.iter().map(|m| m.pss_kib).sum(), unchanged))
}

/// Processor time of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ticks {
    /// User and system time, the guest's included.
    pub all: Duration,
    /// The guest's part.
    pub guest: Duration,
}

/// Parses `/proc/PID/stat` (fields 14, 15 and 43 of proc(5)).
pub fn ticks(stat: &str) -> Option<Ticks> {
    // The name in parentheses may contain anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let hertz = rustix::param::clock_ticks_per_second();
    let time = |n: usize| {
        let ticks: u64 = fields.get(n.checked_sub(3)?)?.parse().ok()?;
        Some(Duration::from_millis(ticks * 1000 / hertz))
    };
    Some(Ticks { all: time(14)? + time(15)?, guest: time(43)? })
}

/// Prints `CPU all guest` in milliseconds, `RSS kib PSS kib FILES kib`, and `EXIT name count` for each KVM counter of a
/// process' VM.
pub fn print(pid: u32, ram_mib: u64) -> Result<()> {
    let path = format!("/proc/{pid}/smaps");
    let smaps = fs::read_to_string(&path).with_context(|| format!("Can't read {path}"))?;
    let (rss, pss, files) = beyond(&smaps, ram_mib << 10)?;
    println!("RSS {rss}\nPSS {pss}\nFILES {files}");
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("Can't read {path}"))?;
    let used = ticks(&stat).with_context(|| format!("{path} has no times"))?;
    println!("CPU {} {}", used.all.as_millis(), used.guest.as_millis());
    let base = "/sys/kernel/debug/kvm";
    let dirs = fs::read_dir(base).with_context(|| format!("Can't list {base}"))?;
    for dir in dirs.flatten().filter(|d| d.file_name().to_string_lossy().starts_with(&format!("{pid}-"))) {
        for file in fs::read_dir(dir.path())?.flatten() {
            let value = fs::read_to_string(file.path()).ok().and_then(|v| v.trim().parse::<u64>().ok());
            if let Some(v) = value {
                println!("EXIT {} {v}", file.file_name().to_string_lossy());
            }
        }
    }
    Ok(())
}

/// The parsed output of [`print`].
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Resident memory beyond the guest's RAM, KiB.
    pub rss_kib: u64,
    /// Proportional memory beyond the guest's RAM, KiB.
    pub pss_kib: u64,
    /// Of the latter, unchanged pages of the program's file and its libraries, KiB.
    pub files_kib: u64,
    /// Milliseconds of the monitor's process without its guest.
    pub own_ms: u64,
    /// The VM's nonzero KVM counters.
    pub counters: BTreeMap<String, u64>,
}

impl Measured {
    /// Parses the printed form.
    pub fn parse(text: &str) -> Self {
        let mut m = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["RSS", n] => m.rss_kib = n.parse().unwrap_or(0),
                ["PSS", n] => m.pss_kib = n.parse().unwrap_or(0),
                ["FILES", n] => m.files_kib = n.parse().unwrap_or(0),
                ["CPU", all, guest] => {
                    let ms = |text: &str| text.parse::<u64>().unwrap_or(0);
                    m.own_ms = ms(all).saturating_sub(ms(guest));
                }
                ["EXIT", name, n] => {
                    let n = n.parse().unwrap_or(0);
                    if n > 0 {
                        m.counters.insert((*name).to_owned(), n);
                    }
                }
                _ => {}
            }
        }
        m
    }

    /// Returns a counter, or 0.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "55d0-55e0 r-xp 00000000 fe:00 12 /usr/bin/x y\nSize:   100 kB\nRss:  90 kB\nPss:  45 kB\nAnonymous: 15 kB\n\
        7f00-7f80 rw-s 00000000 00:01 5 /memfd:ram (deleted)\nSize: 524288 kB\nRss: 300000 kB\nPss: 300000 kB\n\
        7fa0-7fb0 rw-p 00000000 00:00 0\nSize: 2000 kB\nRss: 10 kB\nPss: 10 kB\nVmFlags: rd wr\n";

    #[test]
    fn guest_ram_is_left_out() {
        assert_eq!(beyond(SMAPS, 512 << 10).unwrap(), (100, 55, 30));
        assert!(beyond("", 512 << 10).is_err());
        assert_eq!(mappings(SMAPS)[0].path, "/usr/bin/x y");
    }

    #[test]
    fn the_printed_form_is_read() {
        let m = Measured::parse("RSS 10\nPSS 5\nFILES 2\nCPU 90 70\nEXIT exits 77\nEXIT nmi 0\nnoise\n");
        assert_eq!(
            (m.rss_kib, m.pss_kib, m.files_kib, m.counter("exits"), m.counters.len()),
            (10, 5, 2, 77, 1)
        );
        assert_eq!(m.own_ms, 20);
    }

    #[test]
    fn times_of_a_process_whose_name_has_a_parenthesis() {
        let mut stat = "7 (a) b) S".to_owned();
        for field in 4..=44 {
            stat += &format!(" {}", field * 100);
        }
        let second = rustix::param::clock_ticks_per_second();
        let ms = |ticks: u64| Duration::from_millis(ticks * 1000 / second);
        assert_eq!(ticks(&stat), Some(Ticks { all: ms(1400) + ms(1500), guest: ms(4300) }));
        assert_eq!(ticks("7 (a"), None);
    }
}
