//! Console back ends: destinations and sources of a serial console's bytes.
//!
//! ```text
//! vCPU --push--> ring (64 KiB) --> console thread --> terminal, pty, file or socket
//! 16550 FIFO <---- input <-------- console thread <-- terminal, pty or socket
//! ```
//!
//! A vCPU's cost per byte is a lock and a push. The first byte of a burst wakes the thread, which then collects for a
//! millisecond at a time. A reader that doesn't read never stops a guest. With a pty or a socket the console drops the
//! oldest output at once, with a terminal or file after a quarter of a second. It counts dropped bytes.

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

/// System calls of the console thread, for its seccomp filter, beyond those that every thread of the process needs
/// (memory, signals, exit).
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

/// Time-out for buffered output when a console is dropped.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// A back end, as the VM description names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleBackend {
    /// Standard input and output. A terminal is set to raw mode, where Ctrl-A x ends the VM.
    Stdio,
    /// A pseudo-terminal, optionally with a symbolic link to it.
    Pty {
        /// Symbolic link to create. It replaces an existing symbolic link.
        link: Option<PathBuf>,
    },
    /// Output is appended to a file; no input.
    File {
        /// File to append to; it is created if it doesn't exist.
        path: PathBuf,
        /// Limit of a regular file in bytes. If output would exceed it, the content moves to the path with `.1`, which
        /// replaces earlier content there. Then the file restarts empty.
        limit_bytes: u64,
    },
    /// A Unix stream socket on which this process listens. It serves one client at a time; others wait.
    Socket {
        /// Path. A socket there without a listener is replaced.
        path: PathBuf,
    },
    /// Output is counted and dropped; no input.
    Null,
}

/// A console can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The host refused an operation.
    #[error("The console could not {what}")]
    Host {
        /// The operation, with its values.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The path is in use.
    #[error("The console can't use {}: {why}", path.display())]
    Taken {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
}

impl ConsoleError {
    pub(crate) fn host(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Host { what: what.into(), source: source.into() }
    }
}

/// An open console. Its thread starts when it is passed to a [`crate::serial::Serial`]. Dropping the console writes the
/// buffered output and ends the thread.
pub struct Console {
    kind: &'static str,
    path: Option<PathBuf>,
    shared: Arc<Shared>,
    /// Present until the thread starts.
    endpoint: Option<Endpoint>,
    events: EventSink,
    on_thread_start: Option<Box<dyn FnOnce() + Send + Sync>>,
    thread: Option<JoinHandle<()>>,
}

impl Console {
    /// Opens the back end. Files and sockets are opened here, before the sandbox is applied.
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

    /// Sets a function that the console's thread runs first, such as to install its seccomp filter. Call it before the
    /// console is passed to a [`crate::serial::Serial`]. A console without a thread never runs it.
    pub fn on_thread_start(&mut self, hook: impl FnOnce() + Send + Sync + 'static) {
        self.on_thread_start = Some(Box::new(hook));
    }

    /// Returns the path of the pseudo-terminal, file or socket, if any.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the path of the pseudo-terminal's device, if any.
    pub fn pty_path(&self) -> Option<PathBuf> {
        (self.kind == "pty").then(|| self.path.clone()).flatten()
    }

    /// Returns the writer for the guest's bytes.
    pub(crate) fn output(&self) -> Output {
        Output::new(Arc::clone(&self.shared))
    }

    /// Starts the thread, which passes input to `sink`.
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

    /// Notifies the thread that the guest has read all input.
    pub(crate) fn input_wanted(&self) {
        self.shared.input_wanted();
    }

    /// Returns a handle with the effect of [`Console::input_wanted`].
    pub(crate) fn input_waker(&self) -> InputWaker {
        InputWaker(Arc::clone(&self.shared))
    }

    /// Waits, at most `limit`, until the operating system has all output so far. Returns whether it has.
    pub fn flush(&self, limit: Duration) -> bool {
        self.thread.is_none() || self.shared.wait_drained(Instant::now() + limit)
    }

    /// Returns state and counters.
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
        // A reader that doesn't read must not delay the end of the process. The thread then continues until the process
        // ends.
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
    /// Notifies the thread that there is room.
    pub(crate) fn wake(&self) {
        self.0.input_wanted();
    }
}

/// Creates an eventfd for wake-ups.
fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}
