//! The monitor's scratch memory for a device that this process emulates.

use std::sync::{Arc, Mutex, PoisonError};

use device_models::physical::Bus;

use crate::fast_forward::{FRAME, RING, Scratch};

/// Base address for the device. No physical card reaches it: the emulation sends frames to itself.
const PAD: u64 = 0xE010_0000;

/// Scratch memory. Clones share the bytes, so a monitor gets a clone.
#[derive(Debug, Clone)]
pub struct Pad(Arc<Mutex<Vec<u8>>>);

impl Pad {
    /// Allocates zeroed scratch memory.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(vec![0; usize::try_from(RING + FRAME).unwrap_or(0)])))
    }

    fn with(&self, offset: u64, length: usize, act: impl FnOnce(&mut [u8])) {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(part) = at.checked_add(length).and_then(|end| bytes.get_mut(at..end)) {
            act(part);
        }
    }
}

impl Default for Pad {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch for Pad {
    fn device_base(&self) -> u64 {
        PAD
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.with(offset, data.len(), |part| part.copy_from_slice(data));
    }
}

/// The memory that an emulation reaches: a guest's memory, if any, and the scratch memory.
#[derive(Debug)]
pub struct Inlet<B> {
    memory: Option<B>,
    pad: Pad,
}

impl<B> Inlet<B> {
    /// Combines a guest's memory and the scratch memory.
    pub fn new(memory: Option<B>, pad: Pad) -> Self {
        Self { memory, pad }
    }

    /// Replaces the guest's memory.
    pub fn set_memory(&mut self, memory: Option<B>) {
        self.memory = memory;
    }
}

/// Converts a device address to an offset in the scratch memory.
pub(crate) fn in_pad(address: u64) -> Option<u64> {
    address.checked_sub(PAD).filter(|&offset| offset < RING + FRAME)
}

impl<B: Bus> Bus for Inlet<B> {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        match (in_pad(address), &mut self.memory) {
            (Some(offset), _) => self.pad.with(offset, into.len(), |part| into.copy_from_slice(part)),
            (None, Some(memory)) => memory.read(address, into),
            (None, None) => into.fill(0xFF),
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        match (in_pad(address), &mut self.memory) {
            (Some(offset), _) => self.pad.with(offset, data.len(), |part| part.copy_from_slice(data)),
            (None, Some(memory)) => memory.write(address, data),
            (None, None) => {}
        }
    }
}
