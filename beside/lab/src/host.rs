//! One running host: its emulator, its console, its command channel and its share.

use crate::channel::{Channel, Output, Session, Sink};
use crate::guest::shows_work;
use crate::image::Images;
use crate::progress;
use crate::qemu::{Emulator, nic_table};
use crate::second_delivery;
use crate::topology::HostSpec;
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// An emulated host. Dropping it ends the emulator.
pub struct Host {
    name: String,
    dir: PathBuf,
    child: Mutex<Child>,
    channel: Channel,
    consoles: Mutex<Vec<Transcript>>,
    booted: Duration,
    started: Instant,
}

/// A host whose emulator has been started and which isn't up yet.
pub struct Booting {
    name: String,
    dir: PathBuf,
    child: Child,
    start: Instant,
}

/// How long a host may take to boot: a few seconds when the machine is idle, a minute when it's crowded.
const BOOT: Duration = Duration::from_secs(180);

/// What an emulated host's kernel says when one of its CPUs lost its timer or didn't get to run for tens of seconds.
///
/// No program can take a CPU from the kernel that long, so it is the emulator's doing. QEMU before 10.2 loses interrupts of a host at the
/// moment in which its KVM enters or leaves a guest (STABILITY.md).
fn says_its_cpu_stood_still(line: &str) -> bool {
    line.contains("watchdog: BUG: soft lockup")
        || line.contains("Possible timer handling issue")
        || line.contains("detected stalls on CPUs")
        || line.contains("self-detected stall on CPU")
}

/// A Rust program's panic, or the line of a sandbox that ended its process.
fn is_own_failure(line: &str) -> bool {
    line.contains("' panicked at ")
        || line.contains(") panicked at ")
        || line.contains("the sandbox refused the system call")
}

fn console_tail(dir: &Path, lines: usize) -> String {
    let mut text = Vec::new();
    if let Ok(mut f) = File::open(dir.join("console")) {
        // A console that can't be read is shown as far as it could.
        let _ = f.read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

impl Booting {
    /// Starts the emulator. The process is tied to the calling thread's life: call this from one that lasts.
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
        // An empty disk for what needs a real file system inside; it costs nothing until written.
        File::create(dir.join("scratch"))?.set_len(4 << 30)?;
        // The emulator itself dies with the lab, even when the lab is killed: setpriv asks the kernel for that.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]);
        if emulator.native {
            crate::native::arguments(&mut command, images, spec, dir)?;
        } else {
            emulator.run_by(images, &mut command);
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

    /// Waits until the host takes commands.
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
                return Err(NeverUp(text.to_string()).into());
            }
            hello = channel.wait_hello(Duration::from_millis(500));
        }
        // The child moves into the host, which ends it from now on.
        let booted = self.start.elapsed();
        let (child, spare) = (Command::new("true").spawn()?, self.dir.clone());
        let child = std::mem::replace(&mut self.child, child);
        Ok(Host {
            name: self.name.clone(),
            dir: spare,
            child: Mutex::new(child),
            channel,
            consoles: Mutex::default(),
            booted,
            started: self.start,
        })
    }
}

/// An emulated host ran and didn't come up: a fault of the emulator, unless it happens each time.
#[derive(Debug)]
pub struct NeverUp(String);

impl std::fmt::Display for NeverUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
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

/// A guest whose console says nothing for so long, while somebody waits for it to, stands still.
const SILENT: Duration = Duration::from_secs(100);

/// Shows where vCPU threads are, and sends each the monitor's kick signal (SIGRTMIN + 4), whose handler does nothing.
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

    /// From the emulator's start to the first command it could take.
    pub fn boot_time(&self) -> Duration {
        self.booted
    }

    /// The folder that the host sees as `/share`.
    pub fn share(&self) -> PathBuf {
        self.dir.join("share")
    }

    /// Runs a shell script to its end.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<Output> {
        self.channel.start(&self.name, script, None, None)?.output(timeout).map_err(|e| self.hung(e))
    }

    /// Runs a shell script that must succeed, and returns what it printed.
    pub fn sh(&self, script: &str) -> Result<String> {
        let first = script.trim().lines().next().unwrap_or_default();
        self.run(script, Duration::from_secs(120))?
            .success()
            .with_context(|| format!("{first:?} failed on {}", self.name))
    }

    /// Starts a shell script that goes on running; its output is a console that is shown when something hangs.
    pub fn spawn(&self, name: &str, script: &str) -> Result<Session> {
        let session = self.channel.start(name, script, None, None)?;
        if let Ok(mut consoles) = self.consoles.lock() {
            consoles.push(session.out.clone());
            consoles.push(session.err.clone());
        }
        Ok(session)
    }

    /// Starts a script in a terminal, or with its output handed on as it comes.
    pub fn start(&self, script: &str, terminal: Option<(u16, u16)>, sink: Option<Sink>) -> Result<Session> {
        self.channel.start(&self.name, script, terminal, sink)
    }

    /// Ends what hung and was left running to be looked at.
    pub fn looked_at(&self) {
        self.channel.looked_at();
    }

    /// Whether a guest was started on it.
    pub fn has_guests(&self) -> bool {
        self.consoles.lock().is_ok_and(|consoles| consoles.iter().any(|c| c.name().starts_with("guest ")))
    }

    /// Forgets the consoles of what has ended.
    pub fn forget_consoles(&self) {
        if let Ok(mut consoles) = self.consoles.lock() {
            consoles.clear();
        }
    }

    /// How the emulator ended, when it has: a host that resets ends it too.
    fn emulator_ended(&self) -> Option<String> {
        let mut child = self.child.lock().ok()?;
        child.try_wait().ok()?.map(|s| s.to_string())
    }

    /// Whether the host still answers. When it doesn't, what hangs is the emulator or the host's kernel, not what runs on it.
    pub fn answers(&self) -> bool {
        self.emulator_ended().is_none() && self.channel.ping(Duration::from_secs(20))
    }

    /// Processor time that the emulator has used so far: the work of everything in this host, whatever else runs outside.
    pub fn processor_time(&self) -> Result<Duration> {
        let pid = self.child.lock().map_err(|_| anyhow::anyhow!("A thread of the lab panicked"))?.id();
        let path = format!("/proc/{pid}/stat");
        let stat = fs::read_to_string(&path).with_context(|| format!("Can't read {path}"))?;
        crate::measure::ticks(&stat).map(|t| t.all).with_context(|| format!("{path} has no times"))
    }

    /// Whether a guest of Causeway that has been silent for long goes on once its vCPU threads get a signal that does nothing but end
    /// their KVM_RUN, which they begin again. No interrupt is raised, no state is touched. A guest that goes on then had all it needed, and
    /// its thread had not been woken: that is between KVM in the emulated host and the emulator, whatever the monitor did.
    ///
    /// Only guests with a vCPU that waits inside of KVM are asked, and what a guest says of standing still is not going on.
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

    /// What the host's own kernel said of a CPU of its that stood still, if it did: the emulation failed then, whatever hung.
    pub fn stood_still(&self) -> Option<String> {
        let text = fs::read(self.dir.join("console")).ok()?;
        let text = String::from_utf8_lossy(&text);
        text.lines().find(|line| says_its_cpu_stood_still(line)).map(|line| line.trim().to_owned())
    }

    /// What the kernel of a guest said that died of an interrupt which the emulator delivered twice, if one did.
    pub fn second_delivery(&self) -> Option<String> {
        let consoles = self.consoles.lock().ok()?;
        consoles.iter().find_map(|console| second_delivery::found(console.lines_from(0).into_iter()))
    }

    /// What one of our programs said at its own failure, which no emulator is to blame for: a panic, or a system call that its sandbox refused.
    pub fn own_failure(&self) -> Option<String> {
        let consoles = self.consoles.lock().ok()?;
        let mut lines = consoles.iter().flat_map(|console| console.lines_from(0));
        lines.find(|line| is_own_failure(line))
    }

    /// Adds who is to blame to the error of something that took too long.
    fn hung(&self, error: anyhow::Error) -> anyhow::Error {
        if self.answers() {
            error
        } else {
            error.context(format!("Host {} doesn't answer any more: the EMULATOR (or the emulated host's kernel) hangs, which says nothing about the monitor", self.name))
        }
    }

    /// The tails of its console and of those of everything that was started on it, and what its kernel complained of.
    pub fn tails(&self) -> String {
        // A guest that is slow because nobody runs its host looks like one that hangs.
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

    /// Copies a program or file into the host's `/share/bin`.
    pub fn install(&self, file: &Path) -> Result<()> {
        let name = file.file_name().with_context(|| format!("{} has no file name", file.display()))?;
        let to = self.share().join("bin").join(name);
        if to.exists() {
            fs::remove_file(&to)?;
        }
        fs::copy(file, &to).with_context(|| format!("Can't copy {} to the host's share", file.display()))?;
        Ok(())
    }

    /// As [`Host::install`], without debugging information, which is three quarters of a program of ours.
    pub fn install_stripped(&self, file: &Path) -> Result<()> {
        self.install(file)?;
        let to = self.share().join("bin").join(file.file_name().unwrap_or_default());
        let status = Command::new("strip").arg("--strip-debug").arg(&to).status();
        match status.context("Can't run strip, which comes with the linker; is binutils installed?")? {
            status if status.success() => Ok(()),
            status => bail!("strip of {} ended with {status}", to.display()),
        }
    }

    /// Asks the host to power off and waits a little; the emulator is ended in any case.
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

#[cfg(test)]
mod tests {
    use super::{is_own_failure, says_its_cpu_stood_still};

    #[test]
    fn failures_of_our_programs_are_told() {
        assert!(is_own_failure("thread 'engine' panicked at assembly/host/src/lib.rs:1:2:"));
        assert!(is_own_failure("thread 'engine' (618) panicked at assembly/host/src/lib.rs:1:2:"));
        assert!(is_own_failure(
            "causeway: the sandbox refused the system call ioctl (16) in thread \"control\"; the"
        ));
        assert!(!is_own_failure(
            "[  330.127375] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [ibv_ud_pingpong:275]"
        ));
    }

    #[test]
    fn a_host_whose_kernel_missed_its_timer_is_told_from_one_that_is_quiet() {
        let lines = [
            "[ 1033.162274] watchdog: BUG: soft lockup - CPU#0 stuck for 134s! [vcpu0:618]",
            "[   21.1] rcu: \tPossible timer handling issue on cpu=1 timer-softirq=10",
            "[   21.1] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "[   21.1] rcu: INFO: rcu_preempt self-detected stall on CPU",
        ];
        assert!(lines.iter().all(|line| says_its_cpu_stood_still(line)));
        assert!(!says_its_cpu_stood_still(
            "[  870.073961] kvm [609]: vcpu0, guest rIP: 0xffffffffa669d458 Unhandled WRMSR(0xc0010007) = 0xffff"
        ));
    }
}
