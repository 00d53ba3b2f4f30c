//! Processor time and end of other processes; a server and its client.

#![allow(unsafe_code)] // wait4 returns one child's resource usage.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Time-out of a peer.
const PEER_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a server, then its client until it succeeds. Returns the client's output, and processor time of both. `ends_itself`: the
/// server ends after one client.
///
/// # Errors
/// Either can't run, or the client never succeeds.
pub fn serve(
    name: &'static str,
    server: &mut Command,
    client: impl Fn() -> Command,
    ends_itself: bool,
) -> anyhow::Result<(String, Duration)> {
    let mut server = Process::start(name, server)?;
    // The server listens a moment after its start; until then the client fails.
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(50));
        let mut client = Process::start(name, &mut client())?;
        let text = client.output()?;
        let (fine, used) = client.finish(PEER_TIMEOUT)?;
        // iperf3 exits with 0 even after an error.
        if fine && !text.contains("\"error\"") {
            let patience = if ends_itself { PEER_TIMEOUT } else { Duration::ZERO };
            let (_, by_server) = server.finish(patience)?;
            return Ok((text, used + by_server));
        }
        if server.has_ended() {
            break;
        }
    }
    bail!("{name}, a server and a client on two CPUs, gave no result")
}

/// Returns a running process' processor time, over all its current threads: `/proc/PID/task/*/schedstat`, in nanoseconds.
pub fn so_far(pid: u32) -> anyhow::Result<Duration> {
    let folder = format!("/proc/{pid}/task");
    let mut sum = 0;
    for task in std::fs::read_dir(&folder).with_context(|| format!("{folder} can't be read"))? {
        let path = task.with_context(|| format!("{folder} can't be read"))?.path().join("schedstat");
        // A thread may end in between.
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let time = text.split(' ').next().and_then(|time| time.parse::<u64>().ok());
        sum += time.with_context(|| format!("{} doesn't begin with a time: {text}", path.display()))?;
    }
    Ok(Duration::from_nanos(sum))
}

/// Returns the processor time of the calling thread.
pub fn by_this_thread() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A child process. Dropping it ends it.
pub struct Process {
    child: Child,
    name: &'static str,
    over: bool,
}

impl Process {
    /// Starts the process. [`Process::output`] returns its output; standard error is discarded.
    pub fn start(name: &'static str, command: &mut Command) -> anyhow::Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{name} could not be started"))?;
        Ok(Self { child, name, over: false })
    }

    /// Returns its process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGINT; its last output can be read afterwards.
    pub fn interrupt(&self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("A process has an impossible number")?;
        match rustix::process::kill_process(pid, rustix::process::Signal::INT) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("{} could not be interrupted", self.name)),
        }
    }

    /// Reads all output until it ends.
    pub fn output(&mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            std::io::Read::read_to_string(&mut pipe, &mut text)
                .with_context(|| format!("What {} says could not be read", self.name))?;
        }
        Ok(text)
    }

    /// Returns whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.over || self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Waits for its end, and kills it after `patience`. Returns whether it succeeded, and its processor time.
    pub fn finish(mut self, patience: Duration) -> anyhow::Result<(bool, Duration)> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some((fine, used)) = self.reap(libc::WNOHANG)? {
                return Ok((fine, used));
            }
            if Instant::now() > deadline {
                let _ = self.child.kill();
                match self.reap(0)? {
                    Some((_, used)) => return Ok((false, used)),
                    None => bail!("{} did not end", self.name),
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn reap(&mut self, options: i32) -> anyhow::Result<Option<(bool, Duration)>> {
        let pid = i32::try_from(self.child.id()).context("A process has an impossible number")?;
        let mut status = 0;
        // SAFETY: all zeros are a valid `rusage`.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both are local variables, written by the kernel before it returns.
        let found = unsafe { libc::wait4(pid, &raw mut status, options, &raw mut usage) };
        match found {
            0 => Ok(None),
            -1 => Err(std::io::Error::last_os_error()).with_context(|| format!("{} is lost", self.name)),
            _ => {
                self.over = true;
                let time = |time: libc::timeval| {
                    Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
                        + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
                };
                let fine = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                Ok(Some((fine, time(usage.ru_utime) + time(usage.ru_stime))))
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
