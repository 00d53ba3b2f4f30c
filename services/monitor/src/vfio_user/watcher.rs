//! The thread of a served function: interrupts without an irqfd, doorbell mode, loss of the server and reconnection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vfio_user_protocol::client::ClientError;

use super::VfioUserError;
use super::events::{new_event, take};
use super::function::{Inner, read_shape};
use super::link::Link;
use crate::vm::ThreadHook;

/// First back-off before reconnecting. It doubles with each attempt.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// The function's thread. Dropping this ends it.
pub(super) struct Watcher {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(super) fn start(inner: Arc<Inner>, on_start: ThreadHook) -> io::Result<Self> {
        let stop = Arc::new(new_event()?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(thread_name(&inner.name)).spawn(move || {
            on_start();
            run(&inner, stopped.as_fd());
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

/// Thread name: Linux shows 15 bytes.
fn thread_name(device: &str) -> String {
    device.chars().take(15).collect()
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // A full counter would mean that the thread is signaled already.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            // The thread itself may briefly hold the last reference to the bus.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("The thread of a vfio-user device panicked; this is a bug");
        }
    }
}

/// Why the thread woke.
struct WakeCause {
    stop: bool,
    hung_up: bool,
    mode: bool,
    intx: bool,
    /// Vectors whose own eventfd was signaled.
    vectors: Vec<u16>,
}

fn run(inner: &Inner, stop: BorrowedFd<'_>) {
    let mut backoff = FIRST_BACKOFF;
    loop {
        let link = inner.link();
        let timeout = if link.is_none() { Some(backoff) } else { None };
        let woken = match wait(inner, link.as_deref(), stop, timeout) {
            Ok(woken) => woken,
            Err(error) => {
                tracing::error!(device = %inner.name, %error, "The thread of a vfio-user device can't wait; it ends");
                return;
            }
        };
        if woken.stop {
            return;
        }
        for vector in woken.vectors {
            if let Some(msix) = &inner.msix
                && let Err(error) = msix.trigger(vector)
            {
                telemetry::guest_warn!(inner.log, device = %inner.name, vector, %error, "An interrupt can't be sent");
            }
        }
        if woken.intx {
            inner.assert_intx();
        }
        match link {
            Some(link) => {
                let result = if woken.mode { inner.apply_doorbell_mode(&link) } else { Ok(()) };
                if let Err(error) = &result
                    && !error.is_lost()
                {
                    telemetry::guest_warn!(inner.log, device = %inner.name, %error, "Doorbell mode can't be followed");
                }
                if woken.hung_up || link.client.is_failed() {
                    tracing::warn!(
                        device = %inner.name,
                        server = %inner.connector.target(),
                        "The server of a device has gone; the device fails until it is back"
                    );
                    inner.disconnect(&link);
                    backoff = FIRST_BACKOFF;
                }
            }
            None => match reconnect(inner) {
                Ok(()) => {
                    tracing::info!(
                        device = %inner.name,
                        server = %inner.connector.target(),
                        "The server of a device is back; the device is as after a reset"
                    );
                    inner.counters.reconnections.increment();
                    backoff = FIRST_BACKOFF;
                }
                Err(error) => {
                    inner.counters.failed_attempts.increment();
                    if backoff == FIRST_BACKOFF || matches!(error, VfioUserError::OtherDevice { .. }) {
                        telemetry::guest_warn!(
                            inner.log,
                            device = %inner.name,
                            error = &error as &dyn std::error::Error,
                            "The server of a device isn't back yet"
                        );
                    }
                    backoff = (backoff * 2).min(MAX_BACKOFF);
                }
            },
        }
    }
}

fn wait(
    inner: &Inner,
    link: Option<&Link>,
    stop: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> io::Result<WakeCause> {
    let mut fds = vec![
        PollFd::from_borrowed_fd(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(inner.mode_event.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(inner.intx_event.as_fd(), PollFlags::IN),
    ];
    let mut numbers = Vec::new();
    for (number, vector) in (0_u16..).zip(&inner.vectors) {
        if let Some(fd) = vector.watched() {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            numbers.push((number, fd));
        }
    }
    let own = fds.len();
    if let Some(link) = link {
        // Only for its end: readable bytes belong to the thread that sent the request.
        fds.push(PollFd::from_borrowed_fd(link.client.as_fd(), PollFlags::RDHUP));
    }
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(1),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
    let hung_up = ready(own);
    Ok(WakeCause {
        stop: ready(0),
        hung_up,
        mode: ready(1) && take(inner.mode_event.as_fd()),
        intx: ready(2) && take(inner.intx_event.as_fd()),
        vectors: numbers
            .iter()
            .enumerate()
            .filter(|(at, (_, fd))| ready(3 + at) && take(*fd))
            .map(|(_, (number, _))| *number)
            .collect(),
    })
}

/// Tries once to reconnect to the server.
fn reconnect(inner: &Inner) -> Result<(), VfioUserError> {
    let client = inner.connector.connect()?;
    let shape = read_shape(&client, inner.connector.as_ref())?;
    let target = || inner.connector.target();
    if let Some(what) = inner.shape.difference(&shape) {
        return Err(VfioUserError::OtherDevice { target: target(), what });
    }
    let server = |source: ClientError| VfioUserError::Server { target: target(), source: source.into() };
    let link = Link::new(Arc::new(client), &inner.shape, &inner.ram).map_err(server)?;
    inner.use_link(link).map_err(server)
}
