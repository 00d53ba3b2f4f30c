//! The thread of a queue pair.
//!
//! ```text
//!            kick ──▶ transmit ──▶ channel full ──▶ wait until it is writable
//! channel readable ──▶ receive  ──▶ no buffers  ──▶ don't poll the channel until a kick
//! ```
//!
//! Each direction is in one [`Progress`] state; the thread sleeps when neither is `More`. A channel that neither direction waits for isn't
//! in the poll set, so a busy backend can't spin the thread of an idle guest.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::control::{ControlQueue, Shared};
use super::queue_pair::{GuestError, Progress, QueuePair};
use crate::device::VirtioInterrupt;
use crate::worker::{self, Interest, Poller, Ready, Wake};

/// System calls of these threads, besides those of [`crate::worker::SYSCALLS`] and of the backend.
pub const SYSCALLS: &[i64] = &[libc::SYS_epoll_ctl];

const RECEIVE: u64 = 0;
const TRANSMIT: u64 = 1;
const CONTROL: u64 = 2;
const CHANNEL: u64 = 3;
const WAKE: u64 = 4;

/// State that the thread of pair `index` owns.
pub struct PairWorker {
    /// Number of the pair.
    pub index: u16,
    /// The pair.
    pub pair: QueuePair,
    /// The control queue; pair 0 only.
    pub control: Option<ControlQueue>,
    /// State shared by all threads of the device.
    pub shared: Arc<Shared>,
    /// Interrupts to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Signalled when the number of active pairs changes.
    pub wake: Arc<OwnedFd>,
}

/// Next steps.
struct Pending {
    receive: Progress,
    transmit: Progress,
    control: bool,
    /// The channel hung up; remaining frames are still read.
    hung_up: bool,
}

impl PairWorker {
    /// Serves the pair until the thread is stopped.
    pub fn run(&mut self, poller: &Poller) -> Result<(), String> {
        self.serve(poller).map_err(|error| match error {
            Failure::Guest(error) => error.to_string(),
            Failure::Host(error) => format!("its thread can't wait for events: {error}"),
        })
    }

    fn serve(&mut self, poller: &Poller) -> Result<(), Failure> {
        poller.add(self.pair.receive_ring().kick(), RECEIVE, Interest::READ)?;
        poller.add(self.pair.transmit_ring().kick(), TRANSMIT, Interest::READ)?;
        poller.add(&*self.wake, WAKE, Interest::READ)?;
        if let Some(control) = &self.control {
            poller.add(control.ring().kick(), CONTROL, Interest::READ)?;
        }
        let mut pending = Pending {
            receive: Progress::More,
            transmit: Progress::More,
            control: self.control.is_some(),
            hung_up: false,
        };
        let mut waits_for = Interest::NONE;
        let mut ready = Vec::new();
        loop {
            self.work(&mut pending)?;
            let wanted = self.interest(&pending);
            if wanted != waits_for {
                let fd = self.pair.channel().fd();
                match (waits_for, wanted) {
                    (Interest::NONE, _) => poller.add(fd, CHANNEL, wanted)?,
                    (_, Interest::NONE) => poller.remove(fd)?,
                    _ => poller.modify(fd, CHANNEL, wanted)?,
                }
                waits_for = wanted;
            }
            let more = pending.transmit == Progress::More || pending.control || {
                pending.receive == Progress::More && self.in_use()
            };
            let timeout = more.then_some(Duration::ZERO);
            if poller.wait(&mut ready, timeout)? == Wake::Stop {
                self.pair.recall()?;
                // Completed buffers always get their interrupt.
                self.pair.interrupt(&*self.interrupt)?;
                return Ok(());
            }
            for event in &ready {
                self.note(*event, &mut pending);
            }
        }
    }

    fn in_use(&self) -> bool {
        self.index < self.shared.active_pairs()
    }

    fn interest(&self, pending: &Pending) -> Interest {
        if self.pair.is_lost() {
            return Interest::NONE;
        }
        if self.pair.channel().is_event() {
            return Interest::READ;
        }
        Interest {
            readable: pending.receive == Progress::NeedsBackend && self.in_use(),
            writable: pending.transmit == Progress::NeedsBackend,
        }
    }

    fn note(&mut self, event: Ready, pending: &mut Pending) {
        match event.token {
            RECEIVE => {
                self.pair.receive_ring().drain_kick();
                if pending.receive == Progress::NeedsKick {
                    pending.receive = Progress::More;
                }
            }
            TRANSMIT => {
                self.pair.transmit_ring().drain_kick();
                if pending.transmit == Progress::NeedsKick {
                    pending.transmit = Progress::More;
                }
            }
            CONTROL => {
                if let Some(control) = &self.control {
                    control.ring().drain_kick();
                    pending.control = true;
                }
            }
            WAKE => {
                worker::take(&*self.wake);
                pending.receive = Progress::More;
            }
            _ if self.pair.channel().is_event() => {
                self.pair.drain_channel();
                if pending.receive == Progress::NeedsBackend {
                    pending.receive = Progress::More;
                }
                if pending.transmit == Progress::NeedsBackend || self.pair.has_lent() {
                    pending.transmit = Progress::More;
                }
            }
            _ => {
                if event.readable || event.closed {
                    pending.receive = Progress::More;
                }
                if event.writable || event.closed {
                    pending.transmit = Progress::More;
                }
                pending.hung_up |= event.closed;
            }
        }
    }

    fn work(&mut self, pending: &mut Pending) -> Result<(), GuestError> {
        let was_lost = self.pair.is_lost();
        if pending.control
            && let Some(control) = &mut self.control
        {
            pending.control = control.serve(&*self.interrupt)?;
        }
        if pending.transmit == Progress::More {
            pending.transmit = self.pair.transmit()?;
        }
        if pending.receive == Progress::More && self.in_use() {
            pending.receive = self.pair.receive()?;
        }
        if std::mem::take(&mut pending.hung_up) && self.in_use() {
            match pending.receive {
                Progress::NeedsBackend => self.pair.hung_up(),
                Progress::Lost => {}
                // Frames are left; the poll set reports the hang-up again when they are read.
                Progress::More | Progress::NeedsKick => {}
            }
        }
        self.pair.interrupt(&*self.interrupt)?;
        if self.pair.is_lost() && !was_lost {
            self.report_loss();
        }
        Ok(())
    }

    /// Takes the guest's link down; the guest continues to run.
    fn report_loss(&self) {
        let reason = self.shared.backend.end_reason();
        tracing::error!(
            "Network back end {} is gone ({}); the guest's link is down",
            self.shared.backend.description(),
            reason.as_deref().unwrap_or("reason unknown")
        );
        self.shared.state().link_up = false;
        self.interrupt.config();
    }
}

enum Failure {
    Guest(GuestError),
    Host(std::io::Error),
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Self {
        Self::Guest(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Host(error)
    }
}
