//! Conditions of a measurement: the machine and its other load.

use machine::kvm::{BackEnd, Host};
use serde::Serialize;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Stored beside the figures, which mean little without them.
#[derive(Debug, Clone, Serialize)]
pub struct Conditions {
    /// Seconds since 1970 at the start.
    pub unix_time: u64,
    /// The program's name and its arguments.
    pub command: String,
    /// The measured commit, with `+` if the work tree differs from it.
    pub commit: String,
    /// CPU model.
    pub cpu: String,
    /// CPUs online.
    pub cpus: usize,
    /// Whether the host is a VM itself.
    pub virtualised: bool,
    /// Kernel release.
    pub kernel: String,
    /// Frequency governor of CPU 0, or that none is visible.
    pub governor: String,
    /// KVM's backend; absent without KVM.
    pub kvm_back_end: Option<BackEnd>,
    /// Page size of the measured memory.
    pub pages: String,
    /// Scheduling of the measuring threads.
    pub scheduling: &'static str,
    /// Load average over one minute at the start: other load.
    pub load_before: f64,
    /// Load average at the end, including the measurement itself.
    pub load_after: f64,
    /// Share of all CPUs' time between start and end that the machine's host stole.
    pub stolen: f64,
    #[serde(skip)]
    times: Option<(u64, u64)>,
}

impl Conditions {
    /// Records the conditions at the start of a group.
    pub fn now(host: Option<&Host>, pages: &str) -> Self {
        let cpu_information = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpu_information
                .lines()
                .find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':').map(str::trim))
                .unwrap_or("unknown")
                .to_owned()
        };
        Self {
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            command: command(),
            commit: commit(),
            cpu: field("model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            virtualised: field("flags").split(' ').any(|flag| flag == "hypervisor"),
            kernel: line_of("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            governor: line_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
                .unwrap_or_else(|| "none visible".to_owned()),
            kvm_back_end: host.map(|host| host.capabilities().back_end),
            pages: pages.to_owned(),
            scheduling: "ordinary",
            load_before: load(),
            load_after: 0.0,
            stolen: 0.0,
            times: times(),
        }
    }

    /// Records the conditions at its end.
    pub fn finish(&mut self) {
        self.load_after = load();
        if let (Some((stolen, all)), Some((stolen_now, all_now))) = (self.times, times())
            && all_now > all
        {
            #[expect(clippy::cast_precision_loss, reason = "a share")]
            let share = stolen_now.saturating_sub(stolen) as f64 / (all_now - all) as f64;
            self.stolen = share;
        }
    }

    /// Formats one line.
    pub fn line(&self) -> String {
        format!(
            "{} ({} CPUs{}), Linux {}, governor: {}, KVM back end: {}, pages: {}, scheduling: {}, load {} before and {} after, {:.1} % stolen",
            self.cpu,
            self.cpus,
            if self.virtualised { ", itself a VM" } else { "" },
            self.kernel,
            self.governor,
            self.kvm_back_end
                .map_or_else(|| "none".to_owned(), |back_end| format!("{back_end:?}").to_uppercase()),
            self.pages,
            self.scheduling,
            self.load_before,
            self.load_after,
            self.stolen * 100.0
        )
    }
}

fn line_of(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn load() -> f64 {
    let text = line_of("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

/// Returns stolen time and all time of all CPUs since boot, in ticks (proc(5), /proc/stat).
fn times() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> =
        text.lines().next()?.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
    // Guest time (fields 8 and 9) is part of user time.
    Some((*fields.get(7)?, fields.iter().take(8).sum()))
}

fn command() -> String {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let name = std::path::Path::new(&program)
        .file_name()
        .map_or(program.clone(), |name| name.to_string_lossy().into_owned());
    std::iter::once(name).chain(words).collect::<Vec<_>>().join(" ")
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git")
            .args(arguments)
            .current_dir(crate::programs::repository())
            .output()
            .ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".to_owned() };
    let clean = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| text.is_empty());
    if clean { commit } else { commit + "+" }
}
