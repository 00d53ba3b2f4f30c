//! A pair: the module's end in slot 1, the crate's in slot 2.

use mmnet_rings::{Place, Segment};
use neighbour::channel::{Receiver, Sender};
use neighbour::layout::{Layout, Side};
use neighbour::window::{Geometry, Window};

pub const EPOCH: u32 = 3;
pub const BASE: u64 = 1 << 31;
pub const STRIDE: u64 = 1 << 30;
pub const SLOTS: u32 = 8;
/// The module's slot, and the crate's.
pub const MODULE: u32 = 1;
pub const CRATE: u32 = 2;
/// Slots of third VMs: ones that both of the pair may read, one that only the module's VM may, and an empty one.
pub const COMMON: [u32; 3] = [3, 4, 5];
pub const STRANGER: u32 = 0;
pub const NOBODY: u32 = 6;
/// RAM of every VM: two regions with a hole between them.
pub const RAM: [(u64, u64); 2] = [(0, 0x8000), (0x10_0000, 0x4000)];
/// A kind of the protocol that the module's end has a user for.
pub const KIND: u16 = 0x0100;
/// Status of a message whose kind has no user.
pub const STATUS_NOBODY: u32 = 0xffff_0002;
/// Status of posted messages when the connection ends.
pub const STATUS_DEAD: u32 = 0xffff_0001;

pub fn place() -> Place {
    Place { base: BASE, stride: STRIDE, slots: SLOTS, own: MODULE, peer: CRATE }
}

pub fn window(slot: u32) -> Window {
    Geometry::new(BASE, STRIDE, SLOTS).unwrap().window(slot, &RAM).unwrap()
}

pub fn segment(entries: u32) -> (Segment, Layout) {
    let layout = Layout::new(entries).unwrap();
    (Segment::new(layout.size()), layout)
}

/// Creates the sender to the module.
pub fn sender(segment: &Segment, layout: &Layout) -> Sender<Vec<u32>> {
    let ids = vec![0; layout.entries() as usize];
    Sender::new(segment.words(), layout, EPOCH, Side::Second, window(CRATE), ids).unwrap()
}

/// Creates the receiver from the module.
pub fn receiver(segment: &Segment, layout: &Layout) -> Receiver {
    Receiver::new(segment.words(), layout, EPOCH, Side::First, window(MODULE)).unwrap()
}
