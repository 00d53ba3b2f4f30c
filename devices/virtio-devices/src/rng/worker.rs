//! The thread of the entropy device.

use std::sync::Arc;
use std::time::Duration;

use machine::memory::{GuestAddressSpace, GuestMemory, GuestMemorySpace};
use rustix::rand::{GetRandomFlags, getrandom};
use telemetry::Counter;
use telemetry::guest_log::GuestLog;

use crate::device::VirtioInterrupt;
use crate::queue::{self, Chain, Ring, total_len};
use crate::worker::{Interest, Poller, Wake};

/// System calls of this thread, besides those of [`crate::worker::SYSCALLS`].
pub const SYSCALLS: &[i64] = &[libc::SYS_getrandom];

/// Limit of bytes of a request.
pub const REQUEST_MAX: usize = 64 * 1024;
/// Number of requests served between two checks of the stop event.
const BUDGET: usize = 64;
/// Limit of bytes per system call: longer calls can be interrupted half-way.
const CALL_MAX: usize = 256;

/// Counters of the device.
#[derive(Debug, Default)]
pub struct RngCounters {
    /// Requests served.
    pub requests: Counter,
    /// Random bytes delivered.
    pub bytes: Counter,
    /// Requests without a writable buffer.
    pub errors: Counter,
}

/// State that the thread owns.
pub struct RngQueue {
    /// The queue.
    pub ring: Ring,
    /// Guest memory.
    pub memory: GuestMemorySpace,
    /// Interrupts to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Counters, shared with the device.
    pub counters: Arc<RngCounters>,
    /// Rate-limited log for messages that the guest can cause.
    pub log: Arc<GuestLog>,
}

impl RngQueue {
    /// Serves the queue until the thread is stopped.
    pub fn run(&mut self, poller: &Poller) -> Result<(), String> {
        let wait_failed = |error: std::io::Error| format!("its thread can't wait for events: {error}");
        poller.add(self.ring.kick(), 0, Interest::READ).map_err(wait_failed)?;
        let mut ready = Vec::new();
        loop {
            let more = self.serve()?;
            let timeout = more.then_some(Duration::ZERO);
            if poller.wait(&mut ready, timeout).map_err(wait_failed)? == Wake::Stop {
                return Ok(());
            }
            self.ring.drain_kick();
        }
    }

    /// Serves some requests; returns whether more may wait.
    pub fn serve(&mut self) -> Result<bool, String> {
        let memory = self.memory.memory().into_inner();
        let mut more = true;
        for _ in 0..BUDGET {
            let Some(chain) = self.ring.pop(&memory).map_err(|error| error.to_string())? else {
                if self.ring.enable_kicks(&memory).map_err(|error| error.to_string())? {
                    continue;
                }
                more = false;
                break;
            };
            let served = self.fill(&memory, &chain).and_then(|written| {
                self.ring.complete(&memory, chain.head(), written).map_err(|error| error.to_string())
            });
            if let Err(reason) = served {
                self.ring.undo_pop();
                return Err(reason);
            }
        }
        if self.ring.should_interrupt(&memory).map_err(|error| error.to_string())? {
            self.interrupt.queue(self.ring.index());
        }
        Ok(more)
    }

    fn fill(&self, memory: &GuestMemory, chain: &Chain) -> Result<u32, String> {
        let wanted = usize::try_from(total_len(chain.writable())).unwrap_or(usize::MAX).min(REQUEST_MAX);
        if wanted == 0 {
            self.counters.errors.increment();
            telemetry::guest_warn!(self.log, "A request for random bytes has no writable buffer");
            return Ok(0);
        }
        let mut bytes = vec![0; wanted];
        for chunk in bytes.chunks_mut(CALL_MAX) {
            // Up to 256 bytes are returned at once and without interruption, once the kernel's pool is ready.
            match getrandom(&mut *chunk, GetRandomFlags::empty()) {
                Ok(count) if count == chunk.len() => {}
                Ok(count) => return Err(format!("getrandom gave {count} of {} bytes", chunk.len())),
                Err(error) => return Err(format!("getrandom failed: {error}")),
            }
        }
        queue::write(memory, chain.writable(), 0, &bytes).map_err(|error| error.to_string())?;
        self.counters.requests.increment();
        self.counters.bytes.add(wanted as u64);
        Ok(u32::try_from(wanted).unwrap_or(u32::MAX))
    }
}
