//! Joins this build of the crate with the driver model of `vmxnet3-testbed`, which is linked with the crate built without
//! tests.

use dma::Dma;
use vmxnet3_testbed::{CountedInterrupts, Registers};

use crate::device::Vmxnet3;
use crate::interrupts::Interrupts;

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

impl Interrupts for CountedInterrupts {
    fn raise(&self, vector: u16) {
        self.count_one(vector);
    }
}
