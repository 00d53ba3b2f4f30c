//! A model of the Linux driver, and frames, for tests of the device and its surroundings.
//!
//! [`Driver`] handles registers, rings and generation bits as Linux's `vmxnet3` does. Where that has a `BUG_ON`, the model panics.

mod driver;
mod frames;
mod layout;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dma::Dma;
use vmxnet3::{Interrupts, NicHandle, Vmxnet3};

pub use driver::{Driver, DriverOptions, ReceivedFrame, TransmitRequest};
pub use frames::{FrameSpec, checksums_are_good, ethernet};

/// Access to registers: directly, through a [`NicHandle`], or through a tested bus.
pub trait Registers {
    /// Loads a register.
    fn load(&mut self, bar: u8, offset: u64) -> u32;
    /// Stores a register.
    fn store(&mut self, bar: u8, offset: u64, value: u32);
}

impl<M: Dma> Registers for Vmxnet3<M> {
    fn load(&mut self, bar: u8, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.bar_read(bar, offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn store(&mut self, bar: u8, offset: u64, value: u32) {
        self.bar_write(bar, offset, &value.to_le_bytes());
    }
}

impl<M: Dma + Send + 'static> Registers for NicHandle<M> {
    fn load(&mut self, bar: u8, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.bar_read(bar, offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn store(&mut self, bar: u8, offset: u64, value: u32) {
        self.bar_write(bar, offset, &value.to_le_bytes());
    }
}

/// Counts interrupts by vector; clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct CountedInterrupts {
    counts: Arc<[AtomicU64; 32]>,
    /// Vectors in order of arrival.
    order: Arc<Mutex<Vec<u16>>>,
}

impl CountedInterrupts {
    /// Counts an interrupt.
    pub fn count_one(&self, vector: u16) {
        if let Some(count) = self.counts.get(usize::from(vector)) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        self.order.lock().unwrap_or_else(PoisonError::into_inner).push(vector);
    }

    /// Number of times that a vector was raised.
    #[must_use]
    pub fn count(&self, vector: u16) -> u64 {
        self.counts.get(usize::from(vector)).map_or(0, |count| count.load(Ordering::SeqCst))
    }

    /// Returns and clears the vectors raised since the last call, in order.
    #[must_use]
    pub fn take(&self) -> Vec<u16> {
        std::mem::take(&mut *self.order.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Interrupts for CountedInterrupts {
    fn raise(&self, vector: u16) {
        self.count_one(vector);
    }
}
