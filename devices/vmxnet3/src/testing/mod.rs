//! A model of the Linux driver, and frames, for tests of the device and of whatever stands around it.
//!
//! [`Driver`] does what Linux' `vmxnet3` does with registers, rings and generation bits, including what would be a
//! `BUG_ON` there: that is a panic here.

mod driver;
mod frames;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dma::Dma;

pub use driver::{Driver, DriverOptions, ReceivedFrame, TransmitRequest};
pub use frames::{FrameSpec, checksums_are_good, ethernet};

use crate::device::Vmxnet3;
use crate::interrupts::Interrupts;
use crate::runner::NicHandle;

/// How a driver reaches registers: directly, through a [`NicHandle`], or through whatever bus is to be tested.
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
    /// Vectors in the order in which they came.
    order: Arc<Mutex<Vec<u16>>>,
}

impl CountedInterrupts {
    /// How often a vector was raised.
    #[must_use]
    pub fn count(&self, vector: u16) -> u64 {
        self.counts.get(usize::from(vector)).map_or(0, |count| count.load(Ordering::SeqCst))
    }

    /// Takes the vectors raised since the last call, in order.
    #[must_use]
    pub fn take(&self) -> Vec<u16> {
        std::mem::take(&mut *self.order.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Interrupts for CountedInterrupts {
    fn raise(&self, vector: u16) {
        if let Some(count) = self.counts.get(usize::from(vector)) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        self.order.lock().unwrap_or_else(PoisonError::into_inner).push(vector);
    }
}
