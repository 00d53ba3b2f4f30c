//! Helpers of the tests: access to a guest under the monitor and to a bare device, guests, a number generator.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod e1000;
pub mod e1000_attacks;
pub mod memory;
pub mod ne2000;
pub mod nic;
pub mod rtl8139;
pub mod shared;

use device_models::Access;
use device_models::describe::Permission;
use device_models::grammar::Choices;
use device_models::physical::PhysicalDevice;
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, Slots, Switched};

/// A driver's access to its device.
pub trait Ports {
    fn read(&mut self, offset: u32, size: u8) -> u32;
    fn write(&mut self, offset: u32, size: u8, value: u32);
    fn inb(&mut self, offset: u32) -> u8 {
        u8::try_from(self.read(offset, 1)).unwrap()
    }
    fn outb(&mut self, value: u8, offset: u32) {
        self.write(offset, 1, u32::from(value));
    }
}

/// A device without a monitor: passthrough.
pub struct Bare<P>(pub P);

impl<P: PhysicalDevice> Ports for Bare<P> {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        self.0.read(0, offset, size).unwrap()
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.0.write(0, offset, size, value).unwrap();
    }
}

/// A device that takes time to send frames.
pub trait Timed {
    fn tick(&mut self);
}

impl Timed for device_models::reference::ne2000::Ne2000 {
    fn tick(&mut self) {
        device_models::reference::ne2000::Ne2000::tick(self);
    }
}

/// A callback before an access.
pub type Between<'a, P> = &'a mut dyn FnMut(&mut Monitor<P>);

/// A guest of a monitor. It records the values that it reads. If another guest is resident, an access first hands the
/// device over.
pub struct Guest<'a, P> {
    pub monitor: &'a mut Monitor<P>,
    pub id: GuestId,
    pub bar: u8,
    pub trace: Option<&'a mut Vec<(u32, u32)>>,
    /// Called before each access. It may hand the device to another guest.
    pub between: Option<Between<'a, P>>,
}

impl<'a, P: PhysicalDevice + Timed> Guest<'a, P> {
    pub fn new(monitor: &'a mut Monitor<P>, id: GuestId) -> Self {
        Self { monitor, id, bar: 0, trace: None, between: None }
    }

    pub fn access(&mut self, access: Access) -> Answer {
        if let Some(between) = &mut self.between {
            between(self.monitor);
        }
        loop {
            match self.monitor.access(self.id, access).unwrap() {
                Answer::Wait => switch(self.monitor, self.id),
                answer => return answer,
            }
        }
    }
}

/// Hands the device to `id`. Time passes while the other guest isn't at a quiescent point; in the end the hand-off is
/// forced.
pub fn switch<P: PhysicalDevice + Timed>(monitor: &mut Monitor<P>, id: GuestId) {
    for patience in (0..8).rev() {
        match monitor.switch(id, patience == 0).unwrap() {
            Switched::Done => return,
            Switched::Busy => {
                monitor.physical().tick();
                monitor.interrupt().unwrap();
            }
            Switched::Refused => panic!("the device isn't given to {id:?}"),
        }
    }
    panic!("the device doesn't become reusable");
}

impl<P: PhysicalDevice + Timed> Ports for Guest<'_, P> {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        let answer = self.access(Access { bar: self.bar, offset, size, write: None });
        let value =
            if let Answer::Done(value) = answer { value } else { u32::MAX >> (32 - 8 * u32::from(size)) };
        if let Some(trace) = &mut self.trace {
            trace.push((offset, value));
        }
        value
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.access(Access { bar: self.bar, offset, size, write: Some(value) });
    }
}

pub fn config(number: u8, policy: FailurePolicy, permissions: &[Permission], memory: Slots) -> GuestConfig {
    GuestConfig {
        name: format!("guest{number}"),
        address: address(number),
        permissions: permissions.to_vec(),
        policy,
        memory: Box::new(memory),
    }
}

pub const fn address(number: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, number]
}

/// A frame to `to` whose bytes encode the sender's `mark`.
pub fn frame(to: [u8; 6], mark: u8, length: usize) -> Vec<u8> {
    let mut frame = vec![mark; length];
    frame[..6].copy_from_slice(&to);
    frame
}

/// A generator of numbers from a seed.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

impl Choices for Numbers {
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }
    fn any(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).unwrap()
    }
}
