//! A handle to a device of a running segment for other threads: calls that the segment's thread executes, and the device's eventfds.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dma::Dma;

use super::{Mailbox, POSTED_MAX, SegmentGone, UNMASK_EVENTS, Worker, new_event, ring};
use crate::counters::PortCounters;
use crate::device::Vmxnet3;
use crate::saved::SavedVmxnet3;
use crate::segment::{Companion, PortId, PortRules};

/// A device in a running segment, for the threads of its PCI shell, which may call it concurrently. Dropping it removes the device, whose
/// memory isn't accessed afterwards.
///
/// When the segment's thread is gone, registers read as all ones and writes are ignored, as with an absent device.
pub struct NicHandle<M: Dma + Send + 'static> {
    pub(super) mailbox: Mailbox<M>,
    pub(super) id: PortId,
    pub(super) events: NicEvents,
    pub(super) counters: Arc<PortCounters>,
    /// Number of posted writes in flight.
    pub(super) posted: Arc<AtomicUsize>,
}

/// A register write that only signals an eventfd: a PCI shell makes it an ioeventfd. All are writes of 4 bytes to
/// [`crate::pci::BAR_DOORBELL`].
#[derive(Debug, Clone)]
pub struct IoEvent {
    /// Offset within the BAR, bytes.
    pub offset: u64,
    /// The only value that signals; others are register writes. `None`: all values do.
    pub value: Option<u32>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// A device's eventfds. They may be passed on before the device exists ([`SegmentThread::attach_arrived`]).
#[derive(Debug, Clone)]
pub struct NicEvents {
    /// Signalled by doorbells.
    pub(super) kick: Arc<OwnedFd>,
    /// Signalled by unmasking, for the first vectors.
    pub(super) unmask: [Arc<OwnedFd>; UNMASK_EVENTS],
}

impl NicEvents {
    /// Creates the eventfds.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = || new_event().map(Arc::new);
        Ok(Self { kick: event()?, unmask: [event()?, event()?, event()?] })
    }

    /// As [`NicHandle::doorbell`].
    #[must_use]
    pub fn doorbell(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.kick)
    }
}

impl<M: Dma + Send + 'static> NicHandle<M> {
    fn with<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Vmxnet3<M>) -> R + Send + 'static,
    ) -> Result<R, SegmentGone> {
        let id = self.id;
        let job = move |worker: &mut Worker<M>| {
            worker.take_unmasks(id);
            worker.segment.device(id).map(job)
        };
        self.mailbox.call(job)?.ok_or(SegmentGone)
    }

    /// As [`Vmxnet3::bar_read`].
    pub fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        let len = data.len();
        let read = self.with(move |device| {
            let mut bytes = vec![0; len];
            device.bar_read(bar, offset, &mut bytes);
            bytes
        });
        match read {
            Ok(bytes) => data.copy_from_slice(&bytes),
            Err(SegmentGone) => data.fill(0xFF),
        }
    }

    /// As [`Vmxnet3::bar_write`]. Doorbells, and mostly writes that unmask an interrupt, are posted: the call doesn't wait, but their order
    /// with all other accesses is kept. A shell that uses [`NicHandle::io_events`] for masks must wait for other writes to the masks before
    /// the guest continues.
    pub fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        let fast = bar == crate::pci::BAR_DOORBELL;
        if fast && crate::pci::doorbell_offsets().any(|doorbell| doorbell == offset) {
            ring(&self.events.kick);
            return;
        }
        let unmask = fast && data == [0; 4];
        let data = data.to_vec();
        let write = move |device: &mut Vmxnet3<M>| device.bar_write(bar, offset, &data);
        // A mask must be set before an eventfd can signal its unmasking.
        if !unmask || self.posted.load(Ordering::Relaxed) >= POSTED_MAX {
            let _ = self.with(write);
            return;
        }
        self.posted.fetch_add(1, Ordering::Relaxed);
        let (id, posted) = (self.id, Arc::clone(&self.posted));
        self.mailbox.post(move |worker| {
            posted.fetch_sub(1, Ordering::Relaxed);
            worker.take_unmasks(id);
            worker.segment.device(id).map(write);
        });
    }

    /// The eventfd that doorbells ([`crate::pci::doorbell_offsets`]) signal: one for the whole device.
    #[must_use]
    pub fn doorbell(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.events.kick)
    }

    /// All writes that can be ioeventfds. First, doorbells of the first queue: drivers of revision 7 have no other, and other drivers'
    /// arrive at [`NicHandle::bar_write`]. Second, writes of 0 to the mask registers of the first vectors, which the driver does after each
    /// interrupt. None is lost, and their order with other accesses is kept.
    #[must_use]
    pub fn io_events(&self) -> Vec<IoEvent> {
        use crate::registers::{IMR, RXPROD, RXPROD2, TXPROD};
        let kick = |offset| IoEvent { offset, value: None, fd: Arc::clone(&self.events.kick) };
        let unmask = |(vector, fd): (u64, &Arc<OwnedFd>)| IoEvent {
            offset: IMR + 8 * vector,
            value: Some(0),
            fd: Arc::clone(fd),
        };
        let unmasks = (0..).zip(&self.events.unmask).map(unmask);
        [TXPROD, RXPROD, RXPROD2].map(kick).into_iter().chain(unmasks).collect()
    }

    /// As [`Vmxnet3::set_memory`]; the previous memory isn't accessed after this returns.
    pub fn set_memory(&self, memory: Option<M>) {
        let _ = self.with(move |device| device.set_memory(memory));
    }

    /// As [`Vmxnet3::set_bus_master`].
    pub fn set_bus_master(&self, on: bool) {
        let _ = self.with(move |device| device.set_bus_master(on));
    }

    /// Returns after the segment's thread has executed all earlier requests.
    pub fn catch_up(&self) {
        let _ = self.with(|_| ());
    }

    /// As [`Vmxnet3::reset`].
    pub fn reset(&self) {
        let _ = self.with(Vmxnet3::reset);
    }

    /// As [`Vmxnet3::set_link`].
    pub fn set_link(&self, up: bool) {
        let _ = self.with(move |device| device.set_link(up));
    }

    /// Sets the rules of the port.
    pub fn set_rules(&self, rules: PortRules) {
        let id = self.id;
        let _ = self.mailbox.call(move |worker| worker.segment.set_rules(id, rules));
    }

    /// As [`Segment::set_companion`]; [`NicHandle::waker`] announces frames to send.
    pub fn set_companion(&self, companion: Option<Box<dyn Companion>>) {
        let id = self.id;
        let _ = self.mailbox.call(move |worker| worker.segment.set_companion(id, companion));
    }

    /// A function for a companion's owner: call it, from any thread, when there is a frame to send.
    #[must_use]
    pub fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let (mailbox, id, pending) = (self.mailbox.clone(), self.id, Arc::new(AtomicBool::new(false)));
        Box::new(move || {
            // One message suffices for all calls before it is executed.
            if !pending.swap(true, Ordering::SeqCst) {
                let pending = Arc::clone(&pending);
                mailbox.post(move |worker| {
                    pending.store(false, Ordering::SeqCst);
                    worker.segment.readable(id);
                });
            }
        })
    }

    /// Traffic counters, without a call to the thread.
    #[must_use]
    pub fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }

    /// Saves the state for [`SegmentThread::attach_restored`]. Pause the guest before, so that the device is idle. Frames that wait for the
    /// guest's buffers aren't part of the state and are lost, as on a wire.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn save(&self) -> Result<SavedVmxnet3, SegmentGone> {
        self.with(|device| device.save())
    }
}

impl<M: Dma + Send + 'static> Drop for NicHandle<M> {
    fn drop(&mut self) {
        let id = self.id;
        let _ = self.mailbox.call(move |worker| worker.detach(id));
    }
}
