//! Where a serial console's bytes go and come from.
//!
//! ```text
//! vCPU --push--> ring (64 KiB) --> console thread --> terminal, pty, file or socket
//! 16550 FIFO <---- input <-------- console thread <-- terminal, pty or socket
//! ```
//!
//! A vCPU costs a lock and a push per byte; the thread is woken for the first byte of a burst and then
//! collects for a millisecond at a time. A reader that doesn't read never stops a guest: with a pty or
//! a socket the oldest output is dropped at once, with a terminal or file after a quarter of a second;
//! what is dropped is counted.

mod endpoint;
mod log_file;
mod ring;
pub mod terminal;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::EventSink;
use endpoint::Endpoint;
pub(crate) use ring::Output;
use ring::{Full, Shared};
pub(crate) use worker::{Accepted, InputSink};

/// System calls of the console thread, for its seccomp filter. What every thread of the process needs
/// (memory, signals, exit) is not repeated here.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_ioctl,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_sendto,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_write,
];

/// System calls of a vCPU thread that writes to the console.
pub const VCPU_SYSCALLS: &[i64] = &[libc::SYS_futex, libc::SYS_write];

/// How long dropping a console waits for output that is still buffered.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// A back end, as the VM description names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleBackend {
    /// Standard input and output. A terminal is set to raw mode, where Ctrl-A x ends the VM.
    Stdio,
    /// A pseudo-terminal; optionally with a symbolic link to it.
    Pty {
        /// Symbolic link to create; a symbolic link that is there is replaced.
        link: Option<PathBuf>,
    },
    /// Output is appended to a file; no input.
    File {
        /// Path.
        path: PathBuf,
        /// Most bytes of a regular file. When output would exceed them, the content is moved to the path with `.1`, in place of what was moved there
        /// before, and the file begins anew.
        limit_bytes: u64,
    },
    /// A Unix stream socket on which this process listens; one client at a time, others wait.
    Socket {
        /// Path; a socket there that nobody listens on is replaced.
        path: PathBuf,
    },
    /// Output is counted and forgotten; no input.
    Null,
}

/// A console could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The host refused something.
    #[error("The console could not {what}")]
    Host {
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The path is taken.
    #[error("The console can't use {}: {why}", path.display())]
    Taken {
        /// The path.
        path: PathBuf,
        /// Why.
        why: &'static str,
    },
}

impl ConsoleError {
    pub(crate) fn host(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Host { what: what.into(), source: source.into() }
    }
}

/// An open console. Its thread starts when a [`crate::serial::Serial`] takes it, and ends when it is
/// dropped, after what is buffered has been written.
pub struct Console {
    kind: &'static str,
    path: Option<PathBuf>,
    shared: Arc<Shared>,
    /// Until the thread starts.
    endpoint: Option<Endpoint>,
    events: EventSink,
    on_thread_start: Option<Box<dyn FnOnce() + Send + Sync>>,
    thread: Option<JoinHandle<()>>,
}

impl Console {
    /// Opens the back end: files and sockets are opened here, before a sandbox closes in.
    pub fn open(backend: &ConsoleBackend, events: EventSink) -> Result<Self, ConsoleError> {
        let (kind, full, endpoint) = match backend {
            ConsoleBackend::Stdio => ("stdio", Full::WaitThenDrop, Some(Endpoint::stdio()?)),
            ConsoleBackend::Pty { link } => ("pty", Full::Drop, Some(Endpoint::pty(link.as_deref())?)),
            ConsoleBackend::File { path, limit_bytes } => {
                ("file", Full::WaitThenDrop, Some(Endpoint::file(path, *limit_bytes)?))
            }
            ConsoleBackend::Socket { path } => ("socket", Full::Drop, Some(Endpoint::socket(path)?)),
            ConsoleBackend::Null => ("null", Full::Discard, None),
        };
        let shared = Shared::new(full).map_err(|source| ConsoleError::host("create an eventfd", source))?;
        Ok(Self {
            kind,
            path: endpoint.as_ref().and_then(|endpoint| endpoint.path().map(Path::to_owned)),
            shared: Arc::new(shared),
            endpoint,
            events,
            on_thread_start: None,
            thread: None,
        })
    }

    /// Has `hook` run first on the console's thread: the place for its seccomp filter. Call it before a
    /// [`crate::serial::Serial`] takes the console; a console without a thread never runs it.
    pub fn on_thread_start(&mut self, hook: impl FnOnce() + Send + Sync + 'static) {
        self.on_thread_start = Some(Box::new(hook));
    }

    /// Path of the pseudo-terminal, file or socket, where there is one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Path of the pseudo-terminal's device, where there is one.
    pub fn pty_path(&self) -> Option<PathBuf> {
        (self.kind == "pty").then(|| self.path.clone()).flatten()
    }

    /// Where the guest's bytes go.
    pub(crate) fn output(&self) -> Output {
        Output::new(Arc::clone(&self.shared))
    }

    /// Starts the thread, which hands input to `sink`.
    pub(crate) fn start(&mut self, name: &str, sink: Box<dyn InputSink>) -> Result<(), ConsoleError> {
        let Some(endpoint) = self.endpoint.take() else { return Ok(()) };
        let worker = worker::Worker::new(endpoint, Arc::clone(&self.shared), sink, Arc::clone(&self.events));
        let hook = self.on_thread_start.take();
        let thread = std::thread::Builder::new()
            .name(format!("{name}-console"))
            .stack_size(256 * 1024)
            .spawn(move || {
                if let Some(hook) = hook {
                    hook();
                }
                worker.run();
            })
            .map_err(|source| ConsoleError::host("start its thread", source))?;
        self.thread = Some(thread);
        Ok(())
    }

    /// Tells the thread that the guest has taken all input.
    pub(crate) fn input_wanted(&self) {
        self.shared.input_wanted();
    }

    /// A handle that does what [`Console::input_wanted`] does.
    pub(crate) fn input_waker(&self) -> InputWaker {
        InputWaker(Arc::clone(&self.shared))
    }

    /// Waits until all output so far has been handed to the operating system, at most `limit`; says
    /// whether it has.
    pub fn flush(&self, limit: Duration) -> bool {
        self.thread.is_none() || self.shared.wait_drained(Instant::now() + limit)
    }

    /// State and counters.
    pub fn inspect(&self) -> serde_json::Value {
        let counters = &self.shared.counters;
        serde_json::json!({
            "backend": self.kind,
            "path": self.path.as_ref().map(|path| path.display().to_string()),
            "output_bytes": counters.output.get(),
            "dropped_bytes": counters.dropped.get(),
            "input_bytes": counters.input.get(),
            "waits_for_room": counters.waits.get(),
            "wakes": counters.wakes.get(),
            "clients": counters.clients.get(),
            "errors": counters.errors.get(),
            "buffered_bytes": self.shared.buffered(),
        })
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.stop();
        // A reader that doesn't read must not keep the process from ending: the thread is left behind
        // then, and ends with the process.
        let deadline = Instant::now() + LAST_OUTPUT;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            terminal::restore();
        }
    }
}

/// Wakes the console thread when there is room for input.
pub(crate) struct InputWaker(Arc<Shared>);

impl InputWaker {
    /// There is room.
    pub(crate) fn wake(&self) {
        self.0.input_wanted();
    }
}

/// An eventfd for waking.
fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}
