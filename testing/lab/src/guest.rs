//! Guests of a host: the same guest under Causeway's monitor or under QEMU, its script, and waits for its output.

use crate::channel::Session;
use crate::cpio;
use crate::host::Host;
use crate::transcript::Waited;
use crate::unfinished::Unfinished;
use anyhow::{Context, Result, bail};
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The monitor of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// Causeway's monitor.
    Causeway,
    /// QEMU with KVM and the microvm machine.
    QemuMicrovm,
    /// QEMU with KVM and the q35 machine.
    QemuQ35,
}

impl Vmm {
    /// Parses a `--monitor` option.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(match text {
            "causeway" => Vmm::Causeway,
            "microvm" => Vmm::QemuMicrovm,
            "q35" => Vmm::QemuQ35,
            _ => bail!("There is no monitor {text:?}; there are causeway, microvm and q35"),
        })
    }

    /// Returns the name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Vmm::Causeway => "causeway",
            Vmm::QemuMicrovm => "microvm",
            Vmm::QemuQ35 => "q35",
        }
    }
}

/// A guest's disk: a path inside the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The image.
    pub path: String,
    /// Whether the guest may only read it.
    pub readonly: bool,
}

/// A guest's configuration.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// Its name.
    pub name: String,
    /// The kernel: a directory in `/lab`.
    pub kernel: String,
    /// Boot the bzImage instead of the vmlinux.
    pub bzimage: bool,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// The disks. With a script, the first one is usually `/lab/root.img`.
    pub disks: Vec<Disk>,
    /// Its tap interfaces.
    pub taps: Vec<String>,
    /// Additional kernel command line words.
    pub cmdline: Vec<String>,
    /// The script, which runs in the root disk if there is one.
    pub script: Option<String>,
    /// Files beside the script: name in `/lab`, content.
    pub files: Vec<(String, Vec<u8>)>,
    /// Additional arguments, in the monitor's syntax.
    pub extra: Vec<String>,
}

impl GuestSpec {
    /// Creates a small guest without disks.
    pub fn new(name: &str, kernel: &str, cpus: u32) -> Self {
        GuestSpec {
            name: name.to_owned(),
            kernel: kernel.to_owned(),
            bzimage: false,
            cpus,
            memory_mib: 512,
            disks: Vec::new(),
            taps: Vec::new(),
            cmdline: Vec::new(),
            script: None,
            files: Vec::new(),
            extra: Vec::new(),
        }
    }

    /// Adds the root disk, read-only.
    pub fn root(self) -> Self {
        self.disk("/lab/root.img", true)
    }

    /// Adds a disk.
    pub fn disk(mut self, path: &str, readonly: bool) -> Self {
        self.disks.push(Disk { path: path.to_owned(), readonly });
        self
    }

    /// Adds a tap interface.
    pub fn tap(mut self, name: &str) -> Self {
        self.taps.push(name.to_owned());
        self
    }

    /// Adds words to the command line.
    pub fn cmdline<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.cmdline.extend(words.into_iter().map(Into::into));
        self
    }

    /// Sets what it runs.
    pub fn script(mut self, text: &str) -> Self {
        self.script = Some(format!("#!/bin/sh\n{text}\n"));
        self
    }

    /// Adds a file beside the script.
    pub fn file(mut self, name: &str, bytes: Vec<u8>) -> Self {
        self.files.push((name.to_owned(), bytes));
        self
    }

    /// Sets the memory.
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Returns the shell command, inside the host, that runs the guest in the foreground.
    pub fn command(&self, vmm: Vmm, initrd: &str) -> String {
        let image = if self.bzimage { "vmlinuz" } else { "vmlinux" };
        let kernel = format!("/lab/{}/{image}", self.kernel);
        let mut words = COMMAND_LINE.to_owned();
        for w in &self.cmdline {
            words.push(' ');
            words.push_str(w);
        }
        if let Ok(more) = std::env::var("LAB_GUEST_CMDLINE") {
            words.push(' ');
            words.push_str(&more);
        }
        let mut c = String::new();
        let mut add = |text: String| {
            c.push_str(&text);
            c.push(' ');
        };
        match vmm {
            Vmm::Causeway => {
                add(format!(
                    "exec causeway run --name {} --kernel {kernel} --initrd {initrd} --cmdline '{words}'",
                    self.name
                ));
                add(format!("--cpus {} --memory {}M --console stdio", self.cpus, self.memory_mib));
                for d in &self.disks {
                    add(format!("--disk path={}{}", d.path, if d.readonly { ",readonly" } else { "" }));
                }
                for t in &self.taps {
                    add(format!("--net tap:{t}"));
                }
                for e in &self.extra {
                    add(e.clone());
                }
                if let Ok(more) = std::env::var("LAB_CAUSEWAY_ARGS") {
                    add(more);
                }
            }
            Vmm::QemuMicrovm | Vmm::QemuQ35 => {
                let (machine, bus) = match vmm {
                    Vmm::QemuMicrovm => ("microvm,accel=kvm,pit=off,pic=off,rtc=on", "device"),
                    _ => ("q35,accel=kvm", "pci"),
                };
                add(format!(
                    "exec qemu-system-x86_64 -name {} -M {machine} -cpu host -nodefaults -no-user-config",
                    self.name
                ));
                add(format!("-display none -serial stdio -smp {} -m {}", self.cpus, self.memory_mib));
                add(format!("-qmp unix:/tmp/{}.qmp,server=on,wait=off", self.name));
                add(format!("-kernel {kernel} -initrd {initrd} -append '{words}'"));
                for (n, d) in self.disks.iter().enumerate() {
                    let ro = if d.readonly { ",readonly=on" } else { "" };
                    add(format!(
                        "-drive if=none,id=d{n},format=raw,file={}{ro} -device virtio-blk-{bus},drive=d{n}",
                        d.path
                    ));
                }
                for (n, t) in self.taps.iter().enumerate() {
                    add(format!(
                        "-netdev tap,id=n{n},ifname={t},script=no,downscript=no,vnet_hdr=on -device virtio-net-{bus},netdev=n{n}"
                    ));
                }
                for e in &self.extra {
                    add(e.clone());
                }
            }
        }
        c.trim_end().to_owned()
    }
}

/// Common kernel command line: without these options an emulated machine is too slow.
pub const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet mitigations=off tsc=reliable no_timer_check random.trust_cpu=on nopti cryptomgr.notests apparmor=0 init_on_alloc=0";

/// A started guest.
pub struct Guest {
    /// The guest's configuration.
    pub spec: GuestSpec,
    /// The guest's monitor.
    pub vmm: Vmm,
    /// The monitor's process. Its output is the guest's console.
    pub session: Session,
}

static STARTED: AtomicU32 = AtomicU32::new(0);

/// Console output that shows a serious failure inside the guest.
const BAD: &[&str] = &[
    "Kernel panic",
    "BUG:",
    "Oops",
    "soft lockup",
    "rcu_sched detected",
    "rcu_preempt detected",
    "self-detected stall",
    "did not load",
    "Call Trace",
];

/// Returns whether a console line shows progress of the guest. A hung guest prints complaints from time to time.
pub(crate) fn shows_work(line: &str) -> bool {
    let complaints = ["blocked for more than", "hung_task", "stall", "lockup", "timeout", "timed out"];
    line.contains("LAB-L2")
        || !BAD.iter().chain(&complaints).any(|bad| line.contains(bad)) && !line.starts_with('[')
}

impl Guest {
    /// Starts a guest on a host.
    pub fn start(host: &Host, spec: &GuestSpec, vmm: Vmm) -> Result<Self> {
        let base = format!("/lab/{}/initrd", spec.kernel);
        let mut initrd = base.clone();
        let mut prepare = String::new();
        if let Some(script) = &spec.script {
            let files: Vec<(&str, &[u8])> =
                spec.files.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect();
            let n = STARTED.fetch_add(1, Ordering::Relaxed);
            let own = format!(".lab/{}-{n}.cpio", spec.name);
            fs::write(host.share().join(&own), cpio::script(script, &files))
                .context("Can't write the guest's script to the share")?;
            initrd = format!("/tmp/{}-{n}.initrd", spec.name);
            prepare = format!("cat {base} /share/{own} > {initrd} && rm /share/{own} && ");
        }
        if vmm == Vmm::QemuMicrovm || vmm == Vmm::QemuQ35 {
            prepare.push_str("true && ");
        }
        // Preparation isn't part of the time from exec to init.
        if !prepare.is_empty() {
            host.sh(prepare.trim_end_matches(" && "))?;
        }
        Self::start_with(host, spec, vmm, &initrd)
    }

    /// As [`Guest::start`], with an initramfs that is already in the host. Ignores the script and files of the
    /// configuration.
    pub fn start_with(host: &Host, spec: &GuestSpec, vmm: Vmm, initrd: &str) -> Result<Self> {
        let name = format!("guest {} ({}, {} vCPU) under {}", spec.name, spec.kernel, spec.cpus, vmm.name());
        let session = host.spawn(&name, &spec.command(vmm, initrd))?;
        Ok(Guest { spec: spec.clone(), vmm, session })
    }

    /// Waits for a console line. Returns it with its time since the start.
    pub fn expect(&self, what: &str, timeout: Duration) -> Result<(String, Duration)> {
        self.expect_from(what, 0, timeout)
    }

    /// As [`Guest::expect`], from a position of the transcript on.
    pub fn expect_from(&self, what: &str, from: usize, timeout: Duration) -> Result<(String, Duration)> {
        match self.session.wait_for(what, from, timeout) {
            Waited::Line(line, when) => Ok((line, when)),
            Waited::Ended => {
                // An error if the host is gone: the monitor then has no exit status.
                let code = self.session.wait(Duration::ZERO)?;
                bail!(
                    "Guest {} ended with status {code:?} before it said {what:?}; its monitor said: {}",
                    self.spec.name,
                    self.complaint()
                )
            }
            Waited::Timeout => {
                self.session.suspect();
                let text = format!(
                    "Guest {} didn't say {what:?} within {:.0} s; {}",
                    self.spec.name,
                    timeout.as_secs_f64(),
                    self.session.out.last_words()
                );
                Err(Unfinished::expired(timeout, text).into())
            }
        }
    }

    fn complaint(&self) -> String {
        let text = self.session.err.text();
        let tail: Vec<&str> = text.lines().rev().take(5).collect();
        tail.into_iter().rev().collect::<Vec<_>>().join(" / ")
    }

    /// Waits for the monitor's end, which must be successful.
    pub fn ended(&self, timeout: Duration) -> Result<()> {
        match self.session.wait(timeout)? {
            Some(0) => Ok(()),
            Some(code) => bail!(
                "The monitor of guest {} ended with status {code}: {}",
                self.spec.name,
                self.complaint()
            ),
            None => {
                self.session.suspect();
                let text = format!(
                    "The monitor of guest {} didn't end within {:.0} s",
                    self.spec.name,
                    timeout.as_secs_f64()
                );
                Err(Unfinished::expired(timeout, text).into())
            }
        }
    }

    /// Returns a hundred lines before the guest kernel's panic, if there was one. The monitor restarts the guest.
    pub fn panicked(&self) -> Option<String> {
        let text = self.session.out.text();
        let lines: Vec<&str> = text.lines().collect();
        let at = lines.iter().position(|line| line.contains("Kernel panic"))?;
        Some(lines.get(at.saturating_sub(100)..=at)?.join("\n"))
    }

    /// Returns the evidence of an unrequested restart: the console before it, and the monitor's output.
    ///
    /// Not for guests that are expected to reboot.
    pub fn began_anew(&self) -> Option<String> {
        let text = self.session.out.text();
        let lines: Vec<&str> = text.lines().collect();
        let again = lines.iter().enumerate().filter(|(_, line)| line.contains("LAB-L2 init")).nth(1)?.0;
        Some(format!(
            "its console before that:\n{}\nits monitor said: {}",
            lines.get(again.saturating_sub(100)..again)?.join("\n"),
            self.complaint()
        ))
    }

    /// Returns lines that show a failure inside the guest.
    pub fn trouble(&self) -> Vec<String> {
        BAD.iter().flat_map(|b| self.session.out.find(b)).map(|l| l.1).collect()
    }

    /// Returns the status of the guest's script from its last marker. A script that ran twice has none: the guest's
    /// kernel crashed, or its processor did.
    pub fn script_status(&self, timeout: Duration) -> Result<i32> {
        let (line, _) = self.expect("LAB-L2 exit ", timeout)?;
        if let Some(what) = self.began_anew() {
            bail!("Guest {} began anew while its script ran; {what}", self.spec.name);
        }
        let status = line
            .split("LAB-L2 exit ")
            .nth(1)
            .and_then(|r| r.split_whitespace().next())
            .and_then(|n| n.parse().ok());
        status.with_context(|| format!("Guest {} said {line:?}, which has no status", self.spec.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_of_a_guest_that_stands_still_are_no_work() {
        for line in [
            "[  242.1] INFO: task fio:301 blocked for more than 120 seconds.",
            "watchdog: BUG: soft lockup - CPU#1 stuck for 26s!",
            "[  100.0] nvme nvme0: I/O 5 QID 1 timeout",
            "[  121.0]  __schedule+0x34d/0x9e0",
        ] {
            assert!(!shows_work(line), "{line}");
        }
        assert!(shows_work("LAB-L2 init 2.49") && shows_work("SUM up 1 abc"));
    }

    #[test]
    fn both_monitors_get_the_same_guest() {
        let g = GuestSpec::new("g", "6.1-cloud", 2)
            .root()
            .disk("/tmp/d", false)
            .tap("tap0")
            .cmdline(["lab.end=halt"]);
        let ours = g.command(Vmm::Causeway, "/i");
        assert!(ours.starts_with(
            "exec causeway run --name g --kernel /lab/6.1-cloud/vmlinux --initrd /i --cmdline 'console"
        ));
        assert!(ours.contains("lab.end=halt' --cpus 2 --memory 512M"));
        assert!(ours.contains("--disk path=/lab/root.img,readonly --disk path=/tmp/d --net tap:tap0"));
        let theirs = g.command(Vmm::QemuMicrovm, "/i");
        assert!(theirs.contains("-M microvm,accel=kvm") && theirs.contains("virtio-blk-device,drive=d1"));
        assert!(Vmm::parse("xen").is_err());
    }
}
