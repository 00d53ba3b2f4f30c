//! Guest memory as a bus master of this process sees it.

use device_models::physical::Bus;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemorySpace};

/// What a virtual card reaches: the guest's RAM. Elsewhere it reads ones and writes nothing, as where no device answers.
pub(super) struct RamBus {
    memory: GuestMemorySpace,
}

impl RamBus {
    pub(super) fn new(memory: GuestMemorySpace) -> Self {
        Self { memory }
    }
}

impl Bus for RamBus {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        if self.memory.memory().read_slice(into, GuestAddress(address)).is_err() {
            into.fill(0xFF);
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        // A part that lies in RAM may have been written; the rest goes nowhere.
        let _ = self.memory.memory().write_slice(data, GuestAddress(address));
    }
}
