//! Guest memory as seen by an emulated bus master.

use device_models::physical::Bus;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemorySpace};

/// The bus of an emulated card: the guest's RAM. Outside of RAM it reads ones and discards writes, as where no device responds.
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
        // The part inside RAM may have been written; the rest is discarded.
        let _ = self.memory.memory().write_slice(data, GuestAddress(address));
    }
}
