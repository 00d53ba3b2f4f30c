//! The lab's side of the command channel to a host: several sessions on one socket.

use crate::protocol::{Kind, MAX_PAYLOAD_BYTES, Start, receive, send};
use crate::transcript::{Transcript, Waited};
use crate::unfinished::Unfinished;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Receives a session's output, in addition to its transcripts.
pub type Sink = Box<dyn FnMut(Kind, &[u8]) + Send>;

struct Ends {
    out: Transcript,
    err: Transcript,
    bytes: Vec<u8>,
    sink: Option<Sink>,
    code: Option<Result<i32, String>>,
}

#[derive(Default)]
struct State {
    sessions: HashMap<u32, Ends>,
    pongs: u64,
    hello: bool,
    closed: bool,
    /// Something hung and is being examined. Sessions that are dropped meanwhile continue, and end later.
    suspicious: bool,
    left: Vec<u32>,
}

struct Inside {
    writer: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
    next: AtomicU32,
}

/// The command channel to one host.
#[derive(Clone)]
pub struct Channel {
    inside: Arc<Inside>,
}

/// The outcome of a command.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status; 128 plus the signal's number if a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Returns the output of a command, or an error if it failed.
    pub fn success(self) -> Result<String> {
        if self.code != 0 {
            let tail: Vec<&str> = self.stderr.lines().rev().take(8).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            bail!("The command ended with status {}: {}", self.code, tail.join(" / "));
        }
        Ok(self.stdout)
    }
}

/// A session's standard input, for a separate thread.
pub struct Input {
    id: u32,
    channel: Channel,
}

impl Input {
    /// Writes bytes.
    pub fn send(&self, bytes: &[u8]) -> Result<()> {
        bytes.chunks(16 << 10).try_for_each(|c| self.channel.send(self.id, Kind::Stdin, c))
    }

    /// Closes the input.
    pub fn end(&self) -> Result<()> {
        self.channel.send(self.id, Kind::StdinEnd, &[])
    }
}

/// A process in a host.
pub struct Session {
    id: u32,
    channel: Channel,
    /// Its standard output.
    pub out: Transcript,
    /// Its standard error.
    pub err: Transcript,
    script: String,
}

impl Channel {
    /// Connects to a host's port.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream =
            UnixStream::connect(path).with_context(|| format!("Can't connect to {}", path.display()))?;
        Self::over(stream)
    }

    /// Uses an open connection.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let mut reader = stream.try_clone()?;
        let channel = Channel {
            inside: Arc::new(Inside {
                writer: Mutex::new(stream),
                state: Mutex::default(),
                changed: Condvar::new(),
                next: AtomicU32::new(1),
            }),
        };
        let mine = channel.clone();
        std::thread::spawn(move || {
            while let Ok(frame) = receive(&mut reader) {
                mine.take(frame.session, frame.kind, &frame.data);
            }
            let mut state = mine.lock();
            state.closed = true;
            for ends in state.sessions.values() {
                ends.out.end();
                ends.err.end();
            }
            mine.inside.changed.notify_all();
        });
        Ok(channel)
    }

    /// Ends the sessions that were left running for an examination.
    pub fn looked_at(&self) {
        let mut state = self.lock();
        state.suspicious = false;
        let left = std::mem::take(&mut state.left);
        for id in &left {
            state.sessions.remove(id);
        }
        drop(state);
        for id in left {
            // Fails only if the host is gone.
            let _ = self.send(id, Kind::Signal, &9i32.to_le_bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inside.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, session: u32, kind: Kind, data: &[u8]) {
        let mut state = self.lock();
        match kind {
            Kind::Hello => state.hello = true,
            Kind::Pong => state.pongs += 1,
            _ => {
                let Some(ends) = state.sessions.get_mut(&session) else { return };
                if let (Kind::Stdout | Kind::Stderr, Some(sink)) = (kind, &mut ends.sink) {
                    sink(kind, data);
                }
                match kind {
                    Kind::Stdout => {
                        ends.bytes.extend(data);
                        ends.out.push(data);
                    }
                    Kind::Stderr => ends.err.push(data),
                    Kind::Exit | Kind::Failed => {
                        ends.code = Some(match <[u8; 4]>::try_from(data) {
                            Ok(four) if kind == Kind::Exit => Ok(i32::from_le_bytes(four)),
                            _ => Err(String::from_utf8_lossy(data).into_owned()),
                        });
                        ends.out.end();
                        ends.err.end();
                    }
                    _ => {}
                }
            }
        }
        self.inside.changed.notify_all();
    }

    fn send(&self, session: u32, kind: Kind, data: &[u8]) -> Result<()> {
        let mut writer = self.inside.writer.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut *writer, session, kind, data)
            .map_err(|e| Unfinished::host_gone(format!("The channel to the host is closed: {e:#}")).into())
    }

    fn wait<T>(&self, timeout: Duration, mut ready: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(t) = ready(&mut state) {
                return Some(t);
            }
            let left = until.checked_duration_since(Instant::now())?;
            state = self.inside.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the agent. Returns false on time-out.
    pub fn wait_hello(&self, timeout: Duration) -> bool {
        self.wait(timeout, |s| (s.hello || s.closed).then_some(s.hello)).unwrap_or(false)
    }

    /// Returns whether the host responds.
    pub fn ping(&self, timeout: Duration) -> bool {
        let before = self.lock().pongs;
        self.send(0, Kind::Ping, &[]).is_ok()
            && self.wait(timeout, |s| (s.pongs > before).then_some(())).is_some()
    }

    /// Starts a shell script.
    pub fn start(
        &self,
        name: &str,
        script: &str,
        terminal: Option<(u16, u16)>,
        sink: Option<Sink>,
    ) -> Result<Session> {
        let id = self.inside.next.fetch_add(1, Ordering::Relaxed);
        let out = Transcript::new(name);
        let err = Transcript::new(&format!("{name}: standard error"));
        let ends = Ends { out: out.clone(), err: err.clone(), bytes: Vec::new(), sink, code: None };
        self.lock().sessions.insert(id, ends);
        let start = serde_json::to_vec(&Start { script: script.to_owned(), terminal })?;
        if start.len() > MAX_PAYLOAD_BYTES {
            bail!("A script of {} bytes is too long for the channel; put it on the share", start.len());
        }
        self.send(id, Kind::Start, &start)?;
        Ok(Session { id, channel: self.clone(), out, err, script: script.to_owned() })
    }
}

impl Session {
    /// Returns the standard input.
    pub fn input_handle(&self) -> Input {
        Input { id: self.id, channel: self.channel.clone() }
    }

    /// Writes to its standard input.
    pub fn input(&self, bytes: &[u8]) -> Result<()> {
        self.input_handle().send(bytes)
    }

    /// Closes its standard input.
    pub fn end_input(&self) -> Result<()> {
        self.input_handle().end()
    }

    /// Sets the terminal's size.
    pub fn resize(&self, rows: u16, cols: u16) -> Result<()> {
        let [a, b] = rows.to_le_bytes();
        let [c, d] = cols.to_le_bytes();
        self.channel.send(self.id, Kind::Resize, &[a, b, c, d])
    }

    /// Sends a signal to its process group.
    pub fn signal(&self, number: i32) -> Result<()> {
        self.channel.send(self.id, Kind::Signal, &number.to_le_bytes())
    }

    /// Kills the process group.
    pub fn kill(&self) -> Result<()> {
        self.signal(9)
    }

    /// Returns the exit status if the process has ended.
    pub fn try_wait(&self) -> Option<i32> {
        match self.channel.lock().sessions.get(&self.id).and_then(|e| e.code.clone()) {
            Some(Ok(code)) => Some(code),
            Some(Err(_)) => Some(255),
            None => None,
        }
    }

    /// Waits for the end of the process. Returns `None` on time-out.
    pub fn wait(&self, timeout: Duration) -> Result<Option<i32>> {
        let id = self.id;
        let got = self.channel.wait(timeout, |s| {
            let code = s.sessions.get(&id).and_then(|e| e.code.clone());
            code.map(Some).or_else(|| s.closed.then_some(None))
        });
        let script = first_line(&self.script);
        match got {
            None => Ok(None),
            Some(Some(Ok(code))) => Ok(Some(code)),
            Some(Some(Err(e))) => bail!("{script:?} can't be run: {e}"),
            Some(None) => Err(Unfinished::host_gone(format!("The host ended while {script:?} ran")).into()),
        }
    }

    /// Waits for the end and returns all output. On time-out, kills the process and returns an error.
    pub fn output(&self, timeout: Duration) -> Result<Output> {
        let Some(code) = self.wait(timeout)? else {
            let _ = self.kill();
            let text = format!(
                "{:?} didn't end within {:.0} s; it wrote:\n{}{}",
                first_line(&self.script),
                timeout.as_secs_f64(),
                self.out.tail(20),
                self.err.tail(10)
            );
            return Err(Unfinished::expired(timeout, text).into());
        };
        let bytes = self
            .channel
            .lock()
            .sessions
            .get_mut(&self.id)
            .map(|e| std::mem::take(&mut e.bytes))
            .unwrap_or_default();
        Ok(Output { code, stdout: String::from_utf8_lossy(&bytes).into_owned(), stderr: self.err.text() })
    }

    /// Marks the host as hung. From now on, dropping a session of this host doesn't end its process, so that it can be
    /// examined, until [`Channel::looked_at`].
    pub fn suspect(&self) {
        self.channel.lock().suspicious = true;
    }

    /// Waits for an output line that contains `what`.
    pub fn wait_for(&self, what: &str, from: usize, timeout: Duration) -> Waited {
        self.out.wait_for(what, from, timeout)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let running = self.try_wait().is_none();
        let mut state = self.channel.lock();
        if running && state.suspicious {
            // Its output until then is still recorded.
            state.left.push(self.id);
            return;
        }
        state.sessions.remove(&self.id);
        drop(state);
        if running {
            let _ = self.kill();
        }
    }
}

fn first_line(script: &str) -> &str {
    script.trim().lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_ended_only_after_a_look() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let channel = Channel::over(ours).unwrap();
        let mut next = || receive(&mut theirs).unwrap();
        let session = |channel: &Channel| channel.start("guest", "sleep 1000", None, None).unwrap();

        let fine = session(&channel);
        assert_eq!(next().kind, Kind::Start);
        drop(fine);
        assert_eq!(next().kind, Kind::Signal);
        let (hangs, beside) = (session(&channel), session(&channel));
        assert_eq!((next().kind, next().kind), (Kind::Start, Kind::Start));
        hangs.suspect();
        drop((hangs, beside));
        // No session was ended so far, so this is the next frame.
        channel.send(0, Kind::Ping, &[]).unwrap();
        assert_eq!(next().kind, Kind::Ping);
        channel.looked_at();
        let ended: Vec<u32> =
            [next(), next()].iter().filter(|f| f.kind == Kind::Signal).map(|f| f.session).collect();
        assert_eq!(ended.len(), 2);
        assert_ne!(ended.first(), ended.last());
        // Dropping ends sessions again.
        drop(session(&channel));
        assert_eq!((next().kind, next().kind), (Kind::Start, Kind::Signal));
    }
}
