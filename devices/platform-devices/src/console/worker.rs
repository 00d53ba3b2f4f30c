//! The console thread: moves output from the buffer to the back end and input from there to the guest.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use telemetry::guest_log::GuestLog;

use super::LAST_OUTPUT;
use super::endpoint::{Endpoint, Kind};
use super::ring::{Next, Shared};
use crate::{EventSink, MachineEvent};

/// Collection time between writes while output arrives.
const COLLECT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Limit in bytes of a move out of the buffer.
const CHUNK: usize = 16 * 1024;
/// Limit in bytes of a read from the back end. The operating system keeps the rest until the guest has read this.
const INPUT_CHUNK: usize = 1024;
/// Ctrl-A, which begins a command on a terminal.
const ESCAPE: u8 = 1;
const HELP: &[u8] = b"\r\nCtrl-A x  end the VM\r\nCtrl-A h  this help\r\nCtrl-A Ctrl-A  send Ctrl-A\r\n";

/// Accepts input for the guest.
pub(crate) trait InputSink: Send {
    /// Accepts as many bytes as there is room for. Never blocks.
    fn accept(&self, bytes: &[u8]) -> Accepted;
}

/// The result of [`InputSink::accept`].
pub(crate) enum Accepted {
    /// This many bytes were accepted. If bytes are left, the guest reports when it has room.
    Bytes(usize),
    /// The device is busy: retry soon.
    Busy,
}

pub(super) struct Worker {
    endpoint: Endpoint,
    shared: Arc<Shared>,
    sink: Box<dyn InputSink>,
    events: EventSink,
    log: GuestLog,
    /// Output from the buffer. The first `done` bytes are written.
    output: Vec<u8>,
    done: usize,
    /// The back end accepted less than was offered.
    blocked: bool,
    /// Input for which the guest had no room.
    input: Vec<u8>,
    /// Whether to retry that input soon.
    retry_input: bool,
    escaped: bool,
}

impl Worker {
    pub(super) fn new(
        endpoint: Endpoint,
        shared: Arc<Shared>,
        sink: Box<dyn InputSink>,
        events: EventSink,
    ) -> Self {
        Self {
            endpoint,
            shared,
            sink,
            events,
            log: GuestLog::new(),
            output: Vec::new(),
            done: 0,
            blocked: false,
            input: Vec::new(),
            retry_input: false,
            escaped: false,
        }
    }

    pub(super) fn run(mut self) {
        // Whether the last iteration moved output: then more is likely to follow.
        let mut moved = false;
        loop {
            let idle = !moved && self.output.is_empty();
            let wait = match self.shared.next(idle) {
                Next::Stop => break,
                _ if self.retry_input => Wait::Collect,
                Next::Parked => Wait::ForEvent,
                Next::Busy if self.blocked || self.endpoint.kind.output().is_none() => Wait::ForEvent,
                Next::Busy if moved => Wait::Collect,
                Next::Busy => Wait::Not,
            };
            let ready = self.poll(&wait);
            if ready.wake {
                self.shared.acknowledge_wake();
            }
            if ready.listener {
                self.accept_client();
            }
            if ready.output {
                self.blocked = false;
            }
            if ready.hang_up {
                self.input.clear();
                self.input_ended();
            }
            if ready.input {
                self.read_input();
            }
            self.offer_input();
            moved = !self.blocked && self.write_output();
        }
        self.write_the_rest();
    }

    fn poll(&self, wait: &Wait) -> Ready {
        let kind = &self.endpoint.kind;
        let mut fds = Vec::with_capacity(4);
        let mut roles = Vec::with_capacity(4);
        fds.push(PollFd::from_borrowed_fd(self.shared.wake_fd(), PollFlags::IN));
        roles.push(Role::Wake);
        if let Some(listener) = kind.listener() {
            fds.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
            roles.push(Role::Listener);
        }
        match kind.input() {
            Some(input) if self.input.is_empty() => {
                fds.push(PollFd::from_borrowed_fd(input, PollFlags::IN));
                roles.push(Role::Input);
            }
            // A client whose input waits for the guest may disconnect. The next one must not wait for that guest.
            Some(client) if matches!(kind, Kind::Socket { .. }) => {
                fds.push(PollFd::from_borrowed_fd(client, PollFlags::empty()));
                roles.push(Role::HangUp);
            }
            _ => {}
        }
        if let Some(output) = kind.output().filter(|_| self.blocked) {
            fds.push(PollFd::from_borrowed_fd(output, PollFlags::OUT));
            roles.push(Role::Output);
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = match wait {
            Wait::ForEvent => None,
            Wait::Collect => Some(&COLLECT),
            Wait::Not => Some(&zero),
        };
        let mut ready = Ready::default();
        if poll(&mut fds, timeout).is_err() {
            // A signal interrupted the call: poll again.
            return ready;
        }
        for (fd, role) in fds.iter().zip(roles) {
            let set = !fd.revents().is_empty();
            match role {
                Role::Wake => ready.wake = set,
                Role::Listener => ready.listener = set,
                Role::Input => ready.input = set,
                Role::HangUp => ready.hang_up = set,
                Role::Output => ready.output = set,
            }
        }
        ready
    }

    fn accept_client(&mut self) {
        let Kind::Socket { listener, client } = &mut self.endpoint.kind else { return };
        match rustix::net::accept_with(&*listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) => {
                *client = Some(fd);
                self.blocked = false;
                self.shared.counters.clients.increment();
            }
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
            Err(errno) => self.failed("accept a client", errno.into()),
        }
    }

    fn read_input(&mut self) {
        let Some(fd) = self.endpoint.kind.input() else { return };
        let mut bytes = [0u8; INPUT_CHUNK];
        match rustix::io::read(fd, &mut bytes) {
            Ok(0) => self.input_ended(),
            Ok(count) => {
                self.shared.counters.input.add(count as u64);
                self.take_input(&bytes[..count]);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A pty whose other end was closed. The open slave makes this temporary.
            Err(Errno::IO) if matches!(self.endpoint.kind, Kind::Pty { .. }) => {}
            Err(errno) => {
                self.failed("read its input", errno.into());
                self.input_ended();
            }
        }
    }

    fn input_ended(&mut self) {
        match &mut self.endpoint.kind {
            Kind::Stdio { input, .. } => *input = false,
            Kind::Socket { client, .. } => {
                *client = None;
                self.blocked = false;
            }
            Kind::Pty { .. } | Kind::File(_) => {}
        }
    }

    fn take_input(&mut self, bytes: &[u8]) {
        if !matches!(self.endpoint.kind, Kind::Stdio { keys: true, .. }) {
            self.input.extend_from_slice(bytes);
            return;
        }
        for &byte in bytes {
            match (std::mem::take(&mut self.escaped), byte) {
                (false, ESCAPE) => self.escaped = true,
                (false, _) | (true, ESCAPE) => self.input.push(byte),
                (true, b'x' | b'X') => (self.events)(MachineEvent::ConsoleQuit),
                // Any other key prints the help.
                (true, _) => self.print_help(),
            }
        }
    }

    fn print_help(&self) {
        // Bypasses the guest's output. If the terminal blocks here, the user has just typed at it.
        let _ = self.endpoint.kind.write(HELP);
    }

    fn offer_input(&mut self) {
        self.retry_input = false;
        if self.input.is_empty() {
            return;
        }
        // Before the attempt: room that appears in between must not go unnoticed.
        self.shared.wait_for_input_room();
        match self.sink.accept(&self.input) {
            Accepted::Bytes(count) => {
                self.input.drain(..count.min(self.input.len()));
            }
            Accepted::Busy => self.retry_input = true,
        }
        if self.input.is_empty() {
            self.shared.input_fits();
        }
    }

    /// Writes what can be written now. Returns whether anything was.
    fn write_output(&mut self) -> bool {
        if self.endpoint.kind.output().is_none() {
            return false;
        }
        if self.output.is_empty() {
            self.shared.take(&mut self.output, CHUNK);
        }
        let mut moved = false;
        while self.done < self.output.len() {
            if !self.writable() {
                self.blocked = true;
                return moved;
            }
            match self.endpoint.kind.write(&self.output[self.done..]) {
                Ok(count) => {
                    moved = true;
                    self.done += count;
                    self.shared.written(count);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        self.blocked = true;
                        return moved;
                    }
                    io::ErrorKind::Interrupted => {}
                    _ => {
                        self.output_failed(error);
                        return moved;
                    }
                },
            }
        }
        self.output.clear();
        self.done = 0;
        moved
    }

    /// Standard output is shared with other processes, so it stays blocking: poll it first.
    fn writable(&self) -> bool {
        let Kind::Stdio { .. } = self.endpoint.kind else { return true };
        let mut fds = [PollFd::from_borrowed_fd(rustix::stdio::stdout(), PollFlags::OUT)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        !matches!(poll(&mut fds, Some(&zero)), Ok(0))
    }

    fn output_failed(&mut self, error: io::Error) {
        if let Kind::Socket { client, .. } = &mut self.endpoint.kind {
            // The client is gone. The next one gets the remaining output.
            *client = None;
            return;
        }
        let lost = self.output.len() - self.done;
        self.shared.counters.dropped.add(lost as u64);
        self.shared.written(lost);
        self.output.clear();
        self.done = 0;
        self.failed("write its output", error);
    }

    fn failed(&self, what: &str, error: io::Error) {
        self.shared.counters.errors.increment();
        telemetry::guest_warn!(self.log, "The console could not {what}: {error}");
    }

    /// Writes the remaining output before the thread ends.
    fn write_the_rest(&mut self) {
        let deadline = Instant::now() + LAST_OUTPUT;
        loop {
            self.blocked = false;
            let moved = self.write_output();
            if self.endpoint.kind.output().is_none() || Instant::now() >= deadline {
                return;
            }
            if self.blocked {
                self.poll(&Wait::Collect);
            } else if !moved {
                return;
            }
        }
    }
}

enum Wait {
    ForEvent,
    Collect,
    Not,
}

#[derive(Clone, Copy)]
enum Role {
    Wake,
    Listener,
    Input,
    HangUp,
    Output,
}

#[derive(Default)]
struct Ready {
    wake: bool,
    listener: bool,
    input: bool,
    hang_up: bool,
    output: bool,
}
