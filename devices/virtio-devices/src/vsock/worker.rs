//! The thread of a vsock device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use machine::memory::{GuestAddressSpace, GuestMemory, GuestMemorySpace};
use telemetry::guest_log::GuestLog;

use super::counters::Counters;
use super::muxer::{Muxer, Watch};
use super::packet::{HEADER_LEN, Header, PAYLOAD_MAX};
use crate::device::VirtioInterrupt;
use crate::queue::{self, Chain, Ring, RingError, total_len};
use crate::worker::{Interest, Poller, Wake};

/// System calls of this thread, besides those of [`crate::worker::SYSCALLS`].
pub const SYSCALLS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_ctl,
    libc::SYS_close,
];

/// Limit of packets moved in one direction before the other gets its turn.
const BUDGET: usize = 256;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`: the guest's connections are gone, and its context id may be another.
const TRANSPORT_RESET: u32 = 0;

const RECEIVE: u64 = 0;
const TRANSMIT: u64 = 1;
const EVENT: u64 = 2;

/// A guest's error, which stops the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// A corrupted ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A buffer that is too small.
    #[error("Queue {queue}: a buffer has {bytes} writable bytes; at least {needed} are needed")]
    Buffer {
        /// Queue index.
        queue: u16,
        /// Its length, bytes.
        bytes: u64,
        /// Required length, bytes.
        needed: u64,
    },
}

/// State that the thread owns.
pub struct VsockQueues {
    /// Packets to the guest.
    pub receive: Ring,
    /// Packets from the guest.
    pub transmit: Ring,
    /// Queue of events; the only one is `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
    pub event: Ring,
    /// The connections.
    pub muxer: Muxer,
    /// Guest memory.
    pub memory: GuestMemorySpace,
    /// Interrupts to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Counters, shared with the device.
    pub counters: Arc<Counters>,
    /// Rate-limited log for messages that the guest can cause.
    pub log: Arc<GuestLog>,
    /// Whether the guest is to get the transport reset event.
    pub announce_reset: bool,
    /// One packet's payload.
    pub buffer: Box<[u8]>,
}

/// A buffer for [`VsockQueues::buffer`].
pub fn payload_buffer() -> Box<[u8]> {
    vec![0; PAYLOAD_MAX].into_boxed_slice()
}

impl VsockQueues {
    /// Checks that the rings are in RAM.
    pub fn check(&self) -> Result<(), RingError> {
        let memory = self.memory.memory();
        [&self.receive, &self.transmit, &self.event].into_iter().try_for_each(|ring| ring.check(&memory))
    }

    /// Serves the queues until the thread is stopped.
    pub fn run(&mut self, poller: &Poller) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("its thread can't wait for events: {error}");
        poller.add(self.receive.kick(), RECEIVE, Interest::READ).map_err(failed)?;
        poller.add(self.transmit.kick(), TRANSMIT, Interest::READ).map_err(failed)?;
        poller.add(self.event.kick(), EVENT, Interest::READ).map_err(failed)?;
        self.muxer.watch_all(poller).map_err(failed)?;
        let mut ready = Vec::new();
        loop {
            let more = self.serve(poller).map_err(|error| error.to_string())?;
            let now = Instant::now();
            let timeout = if more {
                Some(Duration::ZERO)
            } else {
                self.muxer.deadline().map(|deadline| deadline.saturating_duration_since(now))
            };
            if poller.wait(&mut ready, timeout).map_err(failed)? == Wake::Stop {
                return Ok(());
            }
            let now = Instant::now();
            for event in &ready {
                match event.token {
                    RECEIVE => self.receive.drain_kick(),
                    TRANSMIT => self.transmit.drain_kick(),
                    EVENT => self.event.drain_kick(),
                    _ => self.muxer.ready(poller, *event, now).map_err(failed)?,
                }
            }
            self.muxer.expire(poller, now).map_err(failed)?;
        }
    }

    /// Moves packets both ways; returns whether more can be moved at once.
    pub fn serve(&mut self, watch: &dyn Watch) -> Result<bool, GuestError> {
        let memory = self.memory.memory().into_inner();
        let now = Instant::now();
        let mut more = self.take_packets(&memory, watch, now)?;
        more |= self.give_packets(&memory, watch, now)?;
        if self.announce_reset {
            self.send_event(&memory)?;
        }
        for ring in [&mut self.receive, &mut self.transmit, &mut self.event] {
            if ring.should_interrupt(&memory)? {
                self.interrupt.queue(ring.index());
            }
        }
        // Packets refused for congestion are processed when the guest has made room.
        Ok(more)
    }

    /// Processes packets from the guest.
    fn take_packets(
        &mut self,
        memory: &GuestMemory,
        watch: &dyn Watch,
        now: Instant,
    ) -> Result<bool, GuestError> {
        for _ in 0..BUDGET {
            if self.muxer.is_congested() {
                // `give_packets` follows; packets that it can't send wait for a kick of the receive queue.
                return Ok(false);
            }
            let Some(chain) = self.transmit.pop(memory)? else {
                if self.transmit.enable_kicks(memory)? {
                    continue;
                }
                return Ok(false);
            };
            let taken = self.take_packet(memory, &chain, watch, now);
            if let Err(error) = taken.and_then(|()| self.transmit.complete(memory, chain.head(), 0)) {
                self.transmit.undo_pop();
                return Err(error.into());
            }
        }
        Ok(true)
    }

    fn take_packet(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        watch: &dyn Watch,
        now: Instant,
    ) -> Result<(), RingError> {
        let have = total_len(chain.readable());
        if have < HEADER_LEN as u64 {
            self.counters.errors.increment();
            telemetry::guest_warn!(self.log, "A vsock packet of {have} bytes was dropped");
            return Ok(());
        }
        let mut header = [0; HEADER_LEN];
        queue::read(memory, chain.readable(), 0, &mut header)?;
        let header = Header::parse(&header);
        let length = usize::try_from(header.len).unwrap_or(usize::MAX);
        if length > self.buffer.len() || u64::from(header.len) > have - HEADER_LEN as u64 {
            telemetry::guest_warn!(
                self.log,
                "A vsock packet claims {length} bytes of payload in a buffer of {have}; its connection is reset"
            );
            self.muxer.refuse(watch, &header);
            return Ok(());
        }
        let payload = &mut self.buffer[..length];
        queue::read(memory, chain.readable(), HEADER_LEN as u64, payload)?;
        self.counters.transmit_packets.increment();
        self.counters.transmit_bytes.add(u64::from(header.len));
        self.muxer.packet(watch, &header, &self.buffer[..length], now);
        Ok(())
    }

    /// Sends packets to the guest.
    fn give_packets(
        &mut self,
        memory: &GuestMemory,
        watch: &dyn Watch,
        now: Instant,
    ) -> Result<bool, GuestError> {
        let was_congested = self.muxer.is_congested();
        for _ in 0..BUDGET {
            if !self.muxer.has_packets() {
                self.receive.disable_kicks(memory)?;
                return Ok(was_congested);
            }
            let Some(chain) = self.receive.pop(memory)? else {
                if self.receive.enable_kicks(memory)? {
                    continue;
                }
                return Ok(was_congested && !self.muxer.is_congested());
            };
            match self.give_packet(memory, &chain, watch, now) {
                Ok(true) => {}
                Ok(false) => self.receive.undo_pop(),
                Err(error) => {
                    self.receive.undo_pop();
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// Fills one receive buffer; false when there was no packet after all.
    fn give_packet(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        watch: &dyn Watch,
        now: Instant,
    ) -> Result<bool, GuestError> {
        let bytes = total_len(chain.writable());
        let needed = HEADER_LEN as u64 + 1;
        if bytes < needed {
            return Err(GuestError::Buffer { queue: self.receive.index(), bytes, needed });
        }
        let space = usize::try_from(bytes - HEADER_LEN as u64).unwrap_or(usize::MAX);
        let Some(header) = self.muxer.next(watch, space, &mut self.buffer, now) else { return Ok(false) };
        queue::write(memory, chain.writable(), 0, &header.to_bytes())?;
        let length = usize::try_from(header.len).unwrap_or(0);
        if length > 0 {
            queue::write(memory, chain.writable(), HEADER_LEN as u64, &self.buffer[..length])?;
        }
        let written = u32::try_from(HEADER_LEN + length).unwrap_or(u32::MAX);
        self.receive.complete(memory, chain.head(), written)?;
        self.counters.receive_packets.increment();
        self.counters.receive_bytes.add(u64::from(header.len));
        Ok(true)
    }

    /// Sends the transport reset event, as soon as the guest has posted a buffer for events.
    fn send_event(&mut self, memory: &GuestMemory) -> Result<(), GuestError> {
        loop {
            if let Some(chain) = self.event.pop(memory)? {
                let bytes = total_len(chain.writable());
                let sent = if bytes < 4 {
                    Err(GuestError::Buffer { queue: self.event.index(), bytes, needed: 4 })
                } else {
                    let event = TRANSPORT_RESET.to_le_bytes();
                    queue::write(memory, chain.writable(), 0, &event)
                        .and_then(|()| self.event.complete(memory, chain.head(), 4))
                        .map_err(GuestError::from)
                };
                if let Err(error) = sent {
                    self.event.undo_pop();
                    return Err(error);
                }
                self.announce_reset = false;
                return Ok(());
            }
            if !self.event.enable_kicks(memory)? {
                return Ok(());
            }
        }
    }
}
