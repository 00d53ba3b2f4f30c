//! A running host: its emulator, its console, its command channel and its shared directory.

use crate::channel::{Channel, Output, Session, Sink};
use crate::console_follower::ConsoleFollower;
use crate::emulator_faults::HostState;
use crate::guest::shows_work;
use crate::image::Images;
use crate::qemu::{Emulator, nic_table};
use crate::topology::HostSpec;
use crate::transcript::Transcript;
use crate::{own_faults, progress};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// An emulated host. Dropping it ends the emulator.
pub struct Host {
    name: String,
    dir: PathBuf,
    child: Mutex<Child>,
    channel: Channel,
    console: ConsoleFollower,
    consoles: Mutex<Vec<Transcript>>,
    own_fault: Mutex<Option<String>>,
    booted: Duration,
    started: Instant,
}

/// A host whose emulator was started but that isn't up yet.
pub struct Booting {
    name: String,
    dir: PathBuf,
    child: Child,
    start: Instant,
}

/// Time-out of a boot. It takes a few seconds on an idle machine, and a minute on a crowded one.
const BOOT: Duration = Duration::from_secs(180);

fn console_tail(dir: &Path, lines: usize) -> String {
    let mut text = Vec::new();
    if let Ok(mut f) = File::open(dir.join("console")) {
        // Shows as much of the console as can be read.
        let _ = f.read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

impl Booting {
    /// Starts the emulator. The process ends with the calling thread, so this must be a long-lived thread.
    pub fn start(
        images: &Images,
        emulator: &Emulator,
        spec: &HostSpec,
        index: usize,
        dir: &Path,
        links: &Path,
    ) -> Result<Self> {
        fs::create_dir_all(dir.join("share/.lab"))?;
        fs::create_dir_all(dir.join("share/bin"))?;
        fs::create_dir_all(dir.join("share/out"))?;
        fs::write(dir.join("share/.lab/nics"), nic_table(spec, index))?;
        // An empty disk for tests that need a real file system. It is sparse.
        File::create(dir.join("scratch"))?.set_len(4 << 30)?;
        // The emulator must end with the lab, even if the lab is killed: setpriv requests that from the kernel.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]);
        if emulator.native {
            crate::native::arguments(&mut command, images, spec, dir)?;
        } else {
            emulator.run_by(images, &mut command);
            emulator.set_walks(images, spec, &mut command)?;
            command.args(emulator.arguments(images, spec, index, dir, links));
        }
        let log = File::create(dir.join("qemu.log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("Can't start the emulator through setpriv; is util-linux installed?")?;
        Ok(Booting { name: spec.name.clone(), dir: dir.to_path_buf(), child, start: Instant::now() })
    }

    /// Waits until the host accepts commands.
    pub fn wait(mut self) -> Result<Host> {
        let name = self.name.clone();
        let explain = |booting: &Booting, what: &str| {
            let log = fs::read_to_string(booting.dir.join("qemu.log")).unwrap_or_default();
            anyhow::anyhow!(
                "Host {name} {what}\n--- console of {name} ---\n{}\n--- emulator ---\n{}",
                console_tail(&booting.dir, 25),
                log.trim()
            )
        };
        let channel = loop {
            if let Some(status) = self.child.try_wait()? {
                return Err(explain(&self, &format!("didn't boot: the emulator ended with {status}")));
            }
            if let Ok(channel) = Channel::connect(&self.dir.join("agent")) {
                break channel;
            }
            if self.start.elapsed() > BOOT {
                return Err(explain(&self, "didn't boot: the emulator opened no socket"));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut hello = false;
        while !hello {
            if let Some(status) = self.child.try_wait()? {
                return Err(explain(&self, &format!("didn't boot: the emulator ended with {status}")));
            }
            if self.start.elapsed() > BOOT {
                let text = explain(&self, &format!("didn't take commands within {} s", BOOT.as_secs()));
                let console = console_tail(&self.dir, usize::MAX);
                return Err(NeverUp::new(&text.to_string(), &console).into());
            }
            hello = channel.wait_hello(Duration::from_millis(500));
        }
        // The host owns the child from now on.
        let booted = self.start.elapsed();
        let (child, spare) = (Command::new("true").spawn()?, self.dir.clone());
        let child = std::mem::replace(&mut self.child, child);
        Ok(Host {
            name: self.name.clone(),
            console: ConsoleFollower::start(&spare.join("console")),
            dir: spare,
            child: Mutex::new(child),
            channel,
            consoles: Mutex::default(),
            own_fault: Mutex::default(),
            booted,
            started: self.start,
        })
    }
}

/// An emulated host ran but didn't come up.
#[derive(Debug)]
pub struct NeverUp {
    text: String,
    console: String,
}

impl NeverUp {
    /// Creates the error with the host's whole console.
    pub fn new(text: &str, console: &str) -> Self {
        NeverUp { text: text.to_owned(), console: console.to_owned() }
    }

    /// Returns the host's console.
    pub fn console(&self) -> &str {
        &self.console
    }
}

impl std::fmt::Display for NeverUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for NeverUp {}

impl Drop for Booting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Ok(child) = self.child.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A guest without console output for this long, while a test waits for its output, counts as hung.
const SILENT: Duration = Duration::from_secs(100);

/// Prints the state of vCPU threads, and sends each the monitor's kick signal (SIGRTMIN + 4), whose handler does
/// nothing.
const SIGNAL_VCPUS: &str = "for t in /proc/[0-9]*/task/*; do case $(cat $t/comm 2>/dev/null) in vcpu*) \
    echo \"-- ${t#/proc/} $(cat $t/comm) $(cut -d' ' -f3,14,15 $t/stat) in $(cat $t/wchan)\"; cat $t/stack;; esac; done\n\
    python3 -c 'import ctypes, glob; kill = ctypes.CDLL(None).syscall; \
    [print(\"signal\", p[2], p[4], kill(234, int(p[2]), int(p[4]), 38)) for p in \
    (f.split(\"/\") for f in glob.glob(\"/proc/[0-9]*/task/*/comm\") if open(f).read().startswith(\"vcpu\"))]'";

impl Host {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the time from the emulator's start to the first accepted command.
    pub fn boot_time(&self) -> Duration {
        self.booted
    }

    /// Returns the directory that the host sees as `/share`.
    pub fn share(&self) -> PathBuf {
        self.dir.join("share")
    }

    /// Runs a shell script to its end.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        let session = self.channel.start(&self.name, script, None, None)?;
        let output = session.output(timeout).map_err(|e| self.hung(e));
        self.note_own_fault(own_faults::found(&session.err.text()));
        output
    }

    /// Runs a shell script and returns its output. Fails if the script does.
    pub fn sh(&self, script: &str) -> Result<String> {
        let first = script.trim().lines().next().unwrap_or_default();
        self.run(script, Duration::from_secs(120))?
            .success()
            .with_context(|| format!("{first:?} failed on {}", self.name))
    }

    /// Starts a shell script in the background. Its output is a console that is printed when something hangs.
    pub fn spawn(&self, name: &str, script: &str) -> Result<Session> {
        let session = self.channel.start(name, script, None, None)?;
        if let Ok(mut consoles) = self.consoles.lock() {
            consoles.push(session.out.clone());
            consoles.push(session.err.clone());
        }
        Ok(session)
    }

    /// Starts a script in a terminal, or with its output forwarded as it arrives.
    pub fn start(&self, script: &str, terminal: Option<(u16, u16)>, sink: Option<Sink>) -> Result<Session> {
        self.channel.start(&self.name, script, terminal, sink)
    }

    /// Ends the hung processes that were left running for an examination.
    pub fn looked_at(&self) {
        self.channel.looked_at();
    }

    /// Returns whether a guest was started on this host.
    pub fn has_guests(&self) -> bool {
        self.consoles.lock().is_ok_and(|consoles| consoles.iter().any(|c| c.name().starts_with("guest ")))
    }

    /// Drops the consoles of ended processes, but keeps own faults that they show.
    pub fn forget_consoles(&self) {
        self.note_own_fault(self.own_fault());
        if let Ok(mut consoles) = self.consoles.lock() {
            consoles.clear();
        }
    }

    /// Returns how the emulator ended, if it has. A reset of the host ends it, too.
    fn emulator_ended(&self) -> Option<String> {
        self.emulator_status().map(|status| status.to_string())
    }

    fn emulator_status(&self) -> Option<ExitStatus> {
        self.child.lock().ok()?.try_wait().ok()?
    }

    /// Returns whether the host responds. If it doesn't, the emulator or the host's kernel hangs, and not a program on
    /// it.
    pub fn answers(&self) -> bool {
        self.emulator_ended().is_none() && self.channel.ping(Duration::from_secs(20))
    }

    /// Returns the processor time of the emulator so far: that of everything in this host, independent of other load on
    /// the machine.
    pub fn processor_time(&self) -> Result<Duration> {
        let pid = self.child.lock().map_err(|_| anyhow::anyhow!("A thread of the lab panicked"))?.id();
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("Can't read {path}"))?;
        crate::measure::ticks(&stat).map(|t| t.all).with_context(|| format!("{path} has no times"))
    }

    /// Checks whether a silent Causeway guest continues after its vCPU threads get a signal that only interrupts their
    /// KVM_RUN. No interrupt is raised and no state changes. A guest that continues then missed a wake-up: by the
    /// emulator, by KVM in the emulated host, or by the monitor. This is a diagnosis and excuses nothing.
    ///
    /// Only guests with a vCPU that waits inside of KVM are checked. A guest's complaint about a hang doesn't count as
    /// progress.
    pub fn wakes_by_signal(&self) -> bool {
        let Ok(consoles) = self.consoles.lock().map(|consoles| consoles.clone()) else { return false };
        let silent: Vec<_> = consoles
            .into_iter()
            .filter(|c| c.name().starts_with("guest ") && c.name().ends_with("under causeway"))
            .filter(|c| c.silent_for().is_some_and(|time| time >= SILENT))
            .map(|c| (c.position(), c))
            .collect();
        if silent.is_empty() {
            return false;
        }
        let got = self.channel.start("signal", SIGNAL_VCPUS, None, None);
        match got.and_then(|s| s.output(Duration::from_secs(60))) {
            Ok(o) => {
                eprintln!(
                    "--- vCPU threads of host {} before a signal ---\n{}{}",
                    self.name, o.stdout, o.stderr
                );
                if !o.stdout.contains("kvm_vcpu_block") && !o.stdout.contains("kvm_vcpu_halt") {
                    return false;
                }
            }
            Err(e) => {
                eprintln!("--- vCPU threads of host {} can't be signalled: {e:#} ---", self.name);
                return false;
            }
        }
        for _ in 0..30 {
            std::thread::sleep(Duration::from_secs(1));
            let works =
                |before: usize, c: &Transcript| c.lines_from(before).iter().any(|line| shows_work(line));
            if let Some((_, console)) = silent.iter().find(|(before, c)| works(*before, c)) {
                progress!("{} goes on after a signal to its vCPUs that does nothing", console.name());
                return true;
            }
        }
        false
    }

    /// Returns the evidence for the cause of a failed step that began at the given time.
    pub fn state(&self, step_began: Instant) -> HostState {
        let lines = self.console.lines();
        HostState {
            name: self.name.clone(),
            answers: self.answers(),
            emulator_killed: self.emulator_status().is_some_and(|status| status.signal() == Some(9)),
            own_fault: self.own_fault(),
            console: lines.map(|lines| lines.lines_from(0)).unwrap_or_default(),
            console_in_step: lines.map(|lines| lines.lines_since(step_began)).unwrap_or_default(),
        }
    }

    /// Returns the first line that shows a failure of this repository's programs, or exhausted memory of the host.
    pub fn own_fault(&self) -> Option<String> {
        if let Ok(Some(line)) = self.own_fault.lock().as_deref() {
            return Some(line.clone());
        }
        let host = self.console.lines().map(|lines| lines.lines_from(0)).unwrap_or_default();
        let consoles = self.consoles.lock().ok()?;
        let mut lines = host.into_iter().chain(consoles.iter().flat_map(|console| console.lines_from(0)));
        lines.find(|line| own_faults::is_own(line))
    }

    /// Stores an own fault that a text shows.
    fn note_own_fault(&self, line: Option<String>) {
        if let (Some(line), Ok(mut kept)) = (line, self.own_fault.lock()) {
            kept.get_or_insert(line);
        }
    }

    /// Adds the probable culprit to a time-out's error.
    fn hung(&self, error: anyhow::Error) -> anyhow::Error {
        if self.answers() {
            error
        } else {
            error.context(format!(
                "Host {} doesn't answer any more: its emulator or its kernel hangs, or something wrote into the kernel's memory",
                self.name
            ))
        }
    }

    /// Returns the ends of its console and of those of all programs started on it, and its kernel's complaints.
    pub fn tails(&self) -> String {
        // A guest that is slow because its host gets no CPU time looks like a hung one.
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let busy = self.processor_time().map_or(f64::NAN, |t| t.as_secs_f64());
        let mut text = format!(
            "--- host {}: its emulator had {busy:.0} s of processor time in {:.0} s; load average of this machine {} ---\n--- console of host {} ---\n{}\n",
            self.name,
            self.started.elapsed().as_secs_f64(),
            load.trim(),
            self.name,
            console_tail(&self.dir, 25)
        );
        if self.answers() {
            let look = "dmesg | grep -v 'Unhandled WRMSR' | tail -n 12; echo '-- busiest threads'; top -H -b -n 1 | head -n 14 | tail -n 9; \
                        for k in /sys/kernel/debug/kvm/*-*; do [ -d $k ] && echo \"-- ${k##*/} exits $(cat $k/exits 2>/dev/null)\"; done; sleep 2; \
                        for k in /sys/kernel/debug/kvm/*-*; do [ -d $k ] && echo \"-- ${k##*/} exits 2 s later $(cat $k/exits 2>/dev/null)\"; done; \
                        for p in $(ls /sys/kernel/debug/kvm | sed -n 's/^\\([0-9]*\\)-.*/\\1/p' | sort -u); do for t in /proc/$p/task/*; do \
                        echo \"-- thread $(cat $t/comm) $(cut -d' ' -f3,14,15 $t/stat | tr '\\n' ' ')in $(cat $t/wchan), system call $(cat $t/syscall)\"; cat $t/stack; done; done; \
                        for n in $(causeway list --json 2>/dev/null | grep -o '\"name\": *\"[^\"]*\"' | cut -d'\"' -f4); do echo \"-- $n\"; \
                        timeout 10 causeway inspect $n exits; timeout 15 causeway pause $n && timeout 10 causeway inspect $n vcpus; timeout 10 causeway resume $n; done; true";
            match self.channel.start("look", look, None, None).and_then(|s| s.output(Duration::from_secs(60)))
            {
                Ok(o) => text.push_str(&format!("--- host {} answers ---\n{}", self.name, o.stdout)),
                Err(e) => text.push_str(&format!("--- host {} can't be looked at: {e:#} ---\n", self.name)),
            }
        } else {
            let how = self.emulator_ended().map_or_else(
                || "the emulator or the emulated kernel hangs".to_owned(),
                |s| format!("the emulator ended with {s}"),
            );
            text.push_str(&format!("--- host {} DOES NOT ANSWER: {how} ---\n", self.name));
        }
        if let Ok(consoles) = self.consoles.lock() {
            for c in consoles.iter() {
                text.push_str(&c.tail(25));
            }
        }
        text
    }

    /// Copies a program or file to the host's `/share/bin`.
    pub fn install(&self, file: &Path) -> Result<()> {
        let name = file.file_name().with_context(|| format!("{} has no file name", file.display()))?;
        let to = self.share().join("bin").join(name);
        if to.exists() {
            fs::remove_file(&to)?;
        }
        fs::copy(file, &to).with_context(|| format!("Can't copy {} to the host's share", file.display()))?;
        Ok(())
    }

    /// As [`Host::install`], without debugging information, which is three quarters of a program's size.
    pub fn install_stripped(&self, file: &Path) -> Result<()> {
        self.install(file)?;
        let to = self.share().join("bin").join(file.file_name().unwrap_or_default());
        let status = Command::new("strip").arg("--strip-debug").arg(&to).status();
        match status.context("Can't run strip, which comes with the linker; is binutils installed?")? {
            status if status.success() => Ok(()),
            status => bail!("strip of {} ended with {status}", to.display()),
        }
    }

    /// Requests a power-off from the host and waits briefly; kills the emulator in any case.
    pub fn shut_down(&self) -> Result<()> {
        let _ = self.channel.start("off", "sync; busybox poweroff -f", None, None)?;
        for _ in 0..100 {
            let Ok(mut child) = self.child.lock() else { break };
            if child.try_wait()?.is_some() {
                return Ok(());
            }
            drop(child);
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("Host {} didn't power off within 10 s", self.name)
    }
}
