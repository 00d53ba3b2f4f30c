//! The peer of the VM that moves: a program that sends each message back, on a NIC of the third host's daemon.
//!
//! It is a thread of this process, with a monitor without KVM (`host_testbed`). So it waits for a completion's event instead of occupying a
//! CPU, and its clock is this host's, whatever the TSC of a guest does.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use host_testbed::driver::{Endpoint, Guest};
use host_testbed::monitor::{Machine, Monitor};
use pvrdma::abi::completion::Entry;

/// Name of the VM.
pub const NAME: &str = "peer";
/// Last byte of its address, 10.80.0.2.
pub const ADDRESS: u8 = 2;
const RAM_BYTES: u64 = 8 << 20;
const PAGE: u32 = 4096;
/// Bytes of a message.
const MESSAGE: u32 = 8;
/// Receives that are posted all the time.
const RECEIVES: u64 = 16;
/// Timeout code, 67 ms, and retries, as the guest has them.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
/// Interrupt vector of completions.
const COMPLETION_VECTOR: usize = 2;

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[10], gid[11], gid[12], gid[13], gid[15]) = (0xFF, 0xFF, 10, 80, last);
    gid
}

/// A created queue pair, not yet connected.
pub struct Created {
    monitor: Monitor,
    guest: Guest,
    endpoint: Endpoint,
    // RAM is dropped last.
    _machine: Machine,
}

/// The largest time between two completions since the last call of [`Peer::begin`], and the number of messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measured {
    /// Largest time between two completions of messages.
    pub completion: Duration,
    /// Received messages.
    pub messages: u64,
    ended: bool,
}

/// The peer, while it exchanges messages. Dropping it ends its thread.
pub struct Peer {
    measured: Arc<Mutex<Measured>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Created {
    /// Attaches a NIC at a daemon and creates a queue pair.
    pub fn at(daemon: &Path) -> Self {
        let machine = Machine::with_ram(NAME, "s0", RAM_BYTES);
        let monitor = machine.connect(daemon, true);
        let mut guest = Guest::new(&machine);
        (guest.timeout, guest.retries) = (TIMEOUT, RETRIES);
        guest.probe(&monitor, gid(ADDRESS));
        let endpoint = guest.endpoint(&monitor, 1, 2);
        Self { monitor, guest, endpoint, _machine: machine }
    }

    /// Returns its queue pair's number.
    pub const fn qpn(&self) -> u32 {
        self.endpoint.qp.1
    }

    /// Connects it to a guest that is connected already, and sends the first message.
    ///
    /// # Errors
    /// A message can't be posted.
    pub fn connect(self, qpn: u32, address: u8) -> anyhow::Result<Peer> {
        self.guest.connect(&self.monitor, &self.endpoint, qpn, gid(address));
        for _ in 0..RECEIVES {
            self.receive()?;
        }
        self.send(0)?;
        let measured = Arc::new(Mutex::new(Measured::default()));
        let over = Arc::new(AtomicBool::new(false));
        let (its_measured, its_over) = (Arc::clone(&measured), Arc::clone(&over));
        let thread = std::thread::spawn(move || self.exchange(&its_measured, &its_over));
        Ok(Peer { measured, over, thread: Some(thread) })
    }

    fn receive(&self) -> anyhow::Result<()> {
        let posted = self.guest.post_receive(&self.monitor, &self.endpoint, 1, MESSAGE);
        ensure!(posted, "The peer's receive queue is full");
        Ok(())
    }

    fn send(&self, value: u32) -> anyhow::Result<()> {
        let buffer = &self.endpoint.buffer;
        self.guest.put(buffer, PAGE.into(), &u64::from(value).to_le_bytes());
        let posted = self.guest.post_send(&self.monitor, &self.endpoint, 0, PAGE..PAGE + MESSAGE);
        ensure!(posted, "The peer's send queue is full");
        Ok(())
    }

    /// Takes a completion, or waits for its event: ten seconds at most.
    fn next(&self) -> Option<Entry> {
        self.guest.take(&self.endpoint).or_else(|| {
            self.guest.arm(&self.monitor, &self.endpoint);
            let taken = self.guest.take(&self.endpoint);
            if taken.is_none() {
                self.monitor.await_interrupt(COMPLETION_VECTOR);
                // A full ring of notifications would suppress events.
                self.guest.notifications();
            }
            taken
        })
    }

    /// Sends back what comes, until the end.
    fn exchange(&self, measured: &Mutex<Measured>, over: &AtomicBool) -> anyhow::Result<()> {
        let mut last = Instant::now();
        while !over.load(Ordering::Relaxed) {
            let Some(entry) = self.next() else { continue };
            ensure!(
                entry.status.get() == 0,
                "The peer's request completed with status {}",
                entry.status.get()
            );
            if entry.wr_id.get() == 0 {
                continue;
            }
            let now = Instant::now();
            {
                let mut measured = measured.lock().unwrap_or_else(PoisonError::into_inner);
                if !measured.ended {
                    measured.completion = measured.completion.max(now - last);
                    measured.messages += 1;
                }
            }
            last = now;
            let value = self.guest.word(&self.endpoint.buffer, 0);
            self.receive()?;
            self.send(value.wrapping_add(1))?;
        }
        Ok(())
    }
}

impl Peer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a measurement.
    pub fn begin(&self) {
        *self.lock() = Measured::default();
    }

    /// Ends the measurement; returns its result.
    ///
    /// # Errors
    /// The peer has failed.
    pub fn end(&mut self) -> anyhow::Result<Measured> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let thread = self.thread.take().context("The peer has ended")?;
            thread.join().map_err(|_| anyhow!("The peer panicked"))??;
        }
        let mut measured = self.lock();
        measured.ended = true;
        Ok(*measured)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Ok(Err(error)) = thread.join()
        {
            eprintln!("bench: {error:#}");
        }
    }
}
