//! Processor time of other processes, and their end; a server and its client.

#![allow(unsafe_code)] // wait4 is what tells what one child has used.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Longest that a peer may take.
const PEER_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a server, then its client until it ends well. The client's output, and processor time of both. `ends_itself`: the server does,
/// after one client.
///
/// # Errors
/// When either can't be run, or the client never ends well.
pub fn serve(
    name: &'static str,
    server: &mut Command,
    client: impl Fn() -> Command,
    ends_itself: bool,
) -> anyhow::Result<(String, Duration)> {
    let mut server = Process::start(name, server)?;
    // The server listens a moment after it has started; the client ends with an error until then.
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(50));
        let mut client = Process::start(name, &mut client())?;
        let text = client.output()?;
        let (fine, used) = client.finish(PEER_TIMEOUT)?;
        // iperf3 ends well even when it only has an error to report.
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

/// Processor time that a running process has used so far, all threads that it has now: `/proc/PID/task/*/schedstat`, nanoseconds exact.
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

/// Processor time of the calling thread.
pub fn by_this_thread() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A child that is ended when it is dropped.
pub struct Process {
    child: Child,
    name: &'static str,
    over: bool,
}

impl Process {
    /// Starts it. Its output can be had by [`Process::output`]; what it says on standard error is thrown away.
    pub fn start(name: &'static str, command: &mut Command) -> anyhow::Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{name} could not be started"))?;
        Ok(Self { child, name, over: false })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end (SIGINT); what it says last can be read afterwards.
    pub fn interrupt(&self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.context("A process has an impossible number")?;
        match rustix::process::kill_process(pid, rustix::process::Signal::INT) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("{} could not be interrupted", self.name)),
        }
    }

    /// Reads all that it says until it ends.
    pub fn output(&mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            std::io::Read::read_to_string(&mut pipe, &mut text)
                .with_context(|| format!("What {} says could not be read", self.name))?;
        }
        Ok(text)
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.over || self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Waits for its end, kills it after `patience`, and returns whether it ended well, and what processor time it has used.
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
        // SAFETY: all zeroes are a valid `rusage`.
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
