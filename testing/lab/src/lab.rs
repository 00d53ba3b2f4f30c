//! A running topology: hosts that boot together, and one directory that is removed with them.

use crate::host::{Booting, Host};
use crate::image::Images;
use crate::qemu::{Emulator, Threads};
use crate::topology::Topology;
use crate::{paths, progress};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Hosts that run until this is dropped.
pub struct Lab {
    hosts: Vec<Host>,
    emulator: String,
    // Dropped after the hosts, which use its files.
    dir: TempDir,
}

const PREFIX: &str = "causeway-lab-";

/// Runs scripts from the share while a failed scenario's host is held.
const HOLD: &str = "cd /share/hold; while [ ! -e end ]; do for f in *.sh; do [ -e \"$f\" ] || continue\n\
     mv \"$f\" \"${f%.sh}.ran\"; timeout 120 bash \"${f%.sh}.ran\" >\"${f%.sh}.tmp\" 2>&1; mv \"${f%.sh}.tmp\" \"${f%.sh}.out\"; done; sleep 0.3; done";

/// A host with one CPU switches between its threads every 1 ms instead of every 4 ms. Guests and the engine poll, and
/// the thread that they wait for needs the CPU.
const TAKE_TURNS_QUICKLY: &str = "cd /sys/kernel/debug/sched && echo HRTICK >features && if [ -e base_slice_ns ]; then echo 1000000 >base_slice_ns; else \
     echo 1000000 >min_granularity_ns && echo 3000000 >latency_ns && echo 1000000 >wakeup_granularity_ns; fi";

/// Removes the directories of killed labs.
fn sweep() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid =
            name.strip_prefix(PREFIX).and_then(|r| r.split('-').next()).and_then(|p| p.parse::<u32>().ok());
        if let Some(pid) = pid
            && !Path::new(&format!("/proc/{pid}")).exists()
        {
            // Another user's directories can't be removed; they do no harm.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Runs programs from the host's memory from now on.
const IN_MEMORY: &str = "mkdir -p /run/programs/bin && cp /share/bin/* /run/programs/bin/ && cp /share/.lab/lab /run/programs/ && \
     mount --bind /run/programs/bin /share/bin && mount --bind /run/programs/lab /share/.lab/lab";

impl Lab {
    /// Builds images if necessary, and boots all hosts of a topology in parallel.
    pub fn boot(topology: &Topology) -> Result<Self> {
        Self::boot_with(topology, &Emulator::chosen()?)
    }

    /// As [`Lab::boot`], with a chosen emulator.
    pub fn boot_with(topology: &Topology, emulator: &Emulator) -> Result<Self> {
        topology.check()?;
        let images = Images::ready(&topology.artifacts())?;
        sweep();
        let dir = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir()?;
        let describe = emulator.describe(&images);
        progress!("lab: {describe}");
        let agent = paths::agent()?;
        let links = dir.path().join("links");
        fs::create_dir_all(&links)?;
        let mut booting = Vec::new();
        for (index, spec) in topology.hosts.iter().enumerate() {
            let home = dir.path().join(&spec.name);
            fs::create_dir_all(home.join("share/.lab"))?;
            let program = home.join("share/.lab/lab");
            fs::copy(&agent, &program)
                .with_context(|| format!("Can't copy {} to the host's share", agent.display()))?;
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
            booting.push(Booting::start(&images, emulator, spec, index, &home, &links)?);
        }
        let mut hosts = Vec::new();
        for b in booting {
            let host = b.wait()?;
            if !emulator.native && emulator.threads == Threads::Single {
                host.sh(TAKE_TURNS_QUICKLY)?;
            }
            progress!("lab: host {} is up after {:.1} s", host.name(), host.boot_time().as_secs_f64());
            hosts.push(host);
        }
        let lab = Lab { hosts, emulator: describe, dir };
        let extra = fs::read_dir(paths::binaries()).into_iter().flatten().flatten();
        for file in extra.map(|e| e.path()).filter(|p| p.is_file()) {
            for host in &lab.hosts {
                host.install(&file)?;
            }
        }
        Ok(lab)
    }

    /// Returns the hosts in the topology's order.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns a host by its number.
    pub fn host(&self, number: usize) -> Result<&Host> {
        self.hosts
            .get(number)
            .with_context(|| format!("There is no host number {number}; there are {}", self.hosts.len()))
    }

    /// Returns the emulator's description, with its settings.
    pub fn emulator(&self) -> &str {
        &self.emulator
    }

    /// Returns the directory of this run.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Copies the monitor to every host.
    pub fn install_causeway(&self) -> Result<()> {
        let program = paths::causeway()?;
        progress!("lab: the monitor is {}", program.display());
        self.hosts.iter().try_for_each(|h| h.install(&program))
    }

    /// As [`Lab::install_causeway`], but monitor and lab program run from the hosts' memory, some 60 MiB. From the
    /// share, each start would read all of their pages over 9p, which takes an emulated host half a second.
    pub fn install_causeway_in_memory(&self) -> Result<()> {
        let program = paths::causeway()?;
        progress!("lab: the monitor is {}, in the hosts' memory", program.display());
        for host in &self.hosts {
            host.install_stripped(&program)?;
            host.sh(IN_MEMORY)?;
        }
        Ok(())
    }

    /// With `LAB_HOLD=SECONDS`, keeps the hosts of a failed scenario for this time, to examine hangs. A host runs the
    /// scripts `hold/NAME.sh` in its share, and writes their output to `hold/NAME.out`. A file `hold/end` ends the
    /// wait.
    pub(crate) fn hold(&self) -> Result<()> {
        let Ok(text) = std::env::var("LAB_HOLD") else { return Ok(()) };
        let patience: u64 =
            text.parse().with_context(|| format!("LAB_HOLD={text:?} is no number of seconds"))?;
        let mut sessions = Vec::new();
        for host in self.hosts.iter().filter(|h| h.answers()) {
            fs::create_dir_all(host.share().join("hold"))?;
            progress!(
                "LAB_HOLD: host {} stays for {patience} s; {}",
                host.name(),
                host.share().join("hold").display()
            );
            sessions.push(host.start(HOLD, None, None)?);
        }
        let until = Instant::now() + Duration::from_secs(patience);
        for session in sessions {
            session.wait(until.saturating_duration_since(Instant::now()))?;
        }
        Ok(())
    }

    /// Returns the ends of all consoles. Hosts with guests are last, since the end of a long output is kept.
    pub fn tails(&self) -> String {
        let mut hosts: Vec<&Host> = self.hosts.iter().collect();
        hosts.sort_by_key(|host| host.has_guests());
        hosts.into_iter().map(Host::tails).collect()
    }
}
