//! The registers as a state machine. Inputs are events of the registry and the guest's accesses. A guest's write may yield an [`Effect`].
//! The owner maps memory and sends interrupts.

use alloc::vec::Vec;

use crate::layout::Layout;
use crate::registers as reg;
use crate::registry::Reason;
use crate::window::{Geometry, PAGE, Window};

/// End of the registers in a block.
const PEER_END: u64 = reg::PEER_MAC + 8;

/// A guest's write that needs an action of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// A driver is loaded (true), or unloaded: unmap all that [`Device::unkept`] lists.
    Driver(bool),
    /// The guest doesn't use this peer's mappings any more: unmap them, and notify the registry.
    Release {
        /// Slot of the peer.
        slot: u32,
        /// Epoch of its connection.
        epoch: u32,
    },
}

/// A peer, as its block shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Peer {
    epoch: u32,
    window: Window,
    name: [u8; reg::PEER_NAME_SIZE],
    mac: [u8; 6],
    gone: Option<u32>,
    /// The guest has released the peer, and its mappings are about to be removed. The block is empty from then on, so that a newly loaded
    /// driver doesn't accept a connection whose rings the previous one used.
    released: bool,
    /// The driver is unloaded while pages of the window are in use. The mappings stay until the epoch is released.
    kept: bool,
}

/// The registers of one VM's function.
#[derive(Debug, Clone)]
pub struct Device {
    geometry: Geometry,
    layout: Layout,
    heartbeat_ms: u32,
    own: Option<u32>,
    driver: bool,
    peers: Vec<Option<Peer>>,
    /// For each slot, the members that both the peer and this VM may read.
    common: Vec<u64>,
    changed: u64,
    discarded: u64,
}

impl Device {
    /// A device without peers.
    #[must_use]
    pub fn new(geometry: Geometry, layout: Layout, heartbeat_ms: u32) -> Self {
        let peers = (0..geometry.slots()).map(|_| None).collect();
        let common = (0..geometry.slots()).map(|_| 0).collect();
        Self {
            geometry,
            layout,
            heartbeat_ms,
            own: None,
            driver: false,
            peers,
            common,
            changed: 0,
            discarded: 0,
        }
    }

    /// Geometry of the windows.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Distance of segments in BAR 2, bytes: a power of two.
    #[must_use]
    pub const fn segment_stride(&self) -> u64 {
        (self.layout.size() as u64).next_power_of_two()
    }

    /// Size of BAR 2, bytes: a power of two.
    #[must_use]
    pub const fn segments_size(&self) -> u64 {
        (self.segment_stride() * self.geometry.slots() as u64).next_power_of_two()
    }

    /// Offset and size in BAR 2, bytes, of the pair's segment, or of the status page at the own slot.
    #[must_use]
    pub const fn segment_place(&self, slot: u32) -> (u64, u64) {
        (self.segment_stride() * slot as u64, self.layout.size() as u64)
    }

    /// The own slot, once the registry has assigned it.
    #[must_use]
    pub const fn own(&self) -> Option<u32> {
        self.own
    }

    /// Whether a driver is loaded.
    #[must_use]
    pub const fn driver(&self) -> bool {
        self.driver
    }

    /// The registry has assigned this VM a slot.
    pub fn joined(&mut self, slot: u32) {
        self.own = Some(slot);
    }

    /// Window and segment of a peer are mapped. `mac` is the Ethernet address of this VM's device for it. Returns false, without a change,
    /// if the slot is in use or doesn't exist, or the name exceeds [`reg::PEER_NAME_SIZE`] bytes.
    #[must_use]
    pub fn offer(&mut self, window: Window, epoch: u32, vm: &str, mac: [u8; 6]) -> bool {
        let slot = window.slot();
        let Some(place @ None) = self.place(slot) else { return false };
        let mut name = [0; reg::PEER_NAME_SIZE];
        let Some(bytes) = name.get_mut(..vm.len()) else { return false };
        bytes.copy_from_slice(vm.as_bytes());
        *place = Some(Peer { epoch, window, name, mac, gone: None, released: false, kept: false });
        self.changed |= 1_u64.checked_shl(slot).unwrap_or(0);
        true
    }

    /// Sets the members that this VM and the one in `slot` both may read. Returns whether that is a change.
    pub fn common(&mut self, slot: u32, slots: u64) -> bool {
        let place = usize::try_from(slot).ok().and_then(|slot| self.common.get_mut(slot));
        let news = place.is_some_and(|place| core::mem::replace(place, slots) != slots);
        if news {
            self.changed |= 1_u64.checked_shl(slot).unwrap_or(0);
        }
        news
    }

    /// Ends the connection of `slot`, if it has this epoch. Returns whether it did.
    pub fn gone(&mut self, slot: u32, epoch: u32, reason: u32) -> bool {
        let Some(Some(peer)) = self.place(slot) else { return false };
        if peer.epoch != epoch || peer.gone.is_some() {
            return false;
        }
        peer.gone = Some(reason);
        self.changed |= 1_u64.checked_shl(slot).unwrap_or(0);
        true
    }

    /// Ends all connections.
    pub fn all_gone(&mut self, reason: u32) {
        let all: Vec<(u32, u32)> = self.views().collect();
        for (slot, epoch) in all {
            self.gone(slot, epoch, reason);
        }
    }

    /// Slots and epochs of mapped peers.
    pub fn views(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..)
            .zip(&self.peers)
            .filter_map(|(slot, peer): (u32, _)| peer.as_ref().map(|peer| (slot, peer.epoch)))
    }

    /// Slots and epochs of mapped peers that an unloaded driver didn't ask to keep.
    pub fn unkept(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.views().filter(|(slot, epoch)| !self.is_kept(*slot, *epoch))
    }

    /// Whether this connection's window is kept until its epoch is released, with or without a driver.
    #[must_use]
    pub fn is_kept(&self, slot: u32, epoch: u32) -> bool {
        let peer = usize::try_from(slot).ok().and_then(|slot| self.peers.get(slot)?.as_ref());
        peer.is_some_and(|peer| peer.epoch == epoch && peer.kept)
    }

    /// Removes a peer, which was released, or whose machine is reset.
    pub fn forget(&mut self, slot: u32, epoch: u32) {
        if let Some(place) = self.place(slot)
            && place.as_ref().is_some_and(|peer| peer.epoch == epoch)
        {
            *place = None;
            self.changed |= 1_u64.checked_shl(slot).unwrap_or(0);
        }
    }

    /// Counts a discarded store of the guest to a window. Returns the count.
    pub fn discarded(&mut self) -> u64 {
        self.discarded = self.discarded.wrapping_add(1);
        self.discarded
    }

    /// Number of discarded stores.
    #[must_use]
    pub const fn discarded_count(&self) -> u64 {
        self.discarded
    }

    /// Whether blocks have changed that the guest hasn't read.
    #[must_use]
    pub const fn has_changes(&self) -> bool {
        self.changed != 0
    }

    /// Resets to the power-on state, except for the registry's data. The driver is gone with its machine. Returns slots and epochs to
    /// unmap.
    pub fn reset(&mut self) -> Vec<(u32, u32)> {
        self.driver = false;
        let all: Vec<(u32, u32)> = self.views().collect();
        for &(slot, epoch) in &all {
            self.forget(slot, epoch);
        }
        self.changed = 0;
        all
    }

    fn place(&mut self, slot: u32) -> Option<&mut Option<Peer>> {
        self.peers.get_mut(usize::try_from(slot).ok()?)
    }

    /// The guest reads `data.len()` bytes of BAR 0. Other accesses than aligned ones of 4 or 8 bytes read all ones.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        let width = data.len();
        let aligned = offset.is_multiple_of(4) && (width == 4 || width == 8 && offset.is_multiple_of(8));
        let mut bytes = [0xff; 8];
        if aligned && offset < reg::BAR_REGISTERS_SIZE {
            let low = u64::from(self.word(offset));
            let high = if width == 8 { u64::from(self.word(offset + 4)) } else { 0 };
            bytes = (high << 32 | low).to_le_bytes();
        }
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = from;
        }
    }

    fn word(&mut self, offset: u64) -> u32 {
        let (low, high) =
            (|value: u64| crate::layout::halves(value).0, |value: u64| crate::layout::halves(value).1);
        match offset {
            reg::REGISTER_MAGIC => reg::MAGIC,
            reg::REGISTER_VERSION => reg::VERSION,
            reg::OWN_SLOT => self.own.unwrap_or(u32::MAX),
            reg::SLOTS => self.geometry.slots(),
            reg::BASE => low(self.geometry.base()),
            0x14 => high(self.geometry.base()),
            reg::STRIDE => low(self.geometry.stride()),
            0x1c => high(self.geometry.stride()),
            reg::ENTRIES => self.layout.entries(),
            reg::SEGMENT_STRIDE => low(self.segment_stride()),
            reg::HEARTBEAT_MS => self.heartbeat_ms,
            reg::DRIVER => u32::from(self.driver),
            reg::CHANGED => {
                let half = low(self.changed);
                self.changed &= !u64::from(half);
                half
            }
            0x34 => {
                let half = high(self.changed);
                self.changed &= !(u64::from(half) << 32);
                half
            }
            reg::DISCARDED => low(self.discarded),
            0x3c => high(self.discarded),
            reg::COMMON..reg::DOORBELLS => {
                let slot = usize::try_from((offset - reg::COMMON) / reg::COMMON_STRIDE).unwrap_or(usize::MAX);
                let slots = self.common.get(slot).copied().unwrap_or(0);
                if offset.is_multiple_of(8) { low(slots) } else { high(slots) }
            }
            _ => self.peer_word(offset),
        }
    }

    fn peer_word(&self, offset: u64) -> u32 {
        let Some(within) = offset.checked_sub(reg::PEERS) else { return 0 };
        let (slot, at) = (within / reg::PEER_STRIDE, within % reg::PEER_STRIDE);
        let peer = usize::try_from(slot).ok().and_then(|slot| self.peers.get(slot)?.as_ref());
        let Some(peer) = peer.filter(|peer| !peer.released) else { return 0 };
        let half = |value: u64| {
            let (low, high) = crate::layout::halves(value);
            if at.is_multiple_of(8) { low } else { high }
        };
        match at {
            reg::PEER_STATE => {
                if peer.gone.is_some() {
                    reg::PEER_GONE
                } else {
                    reg::PEER_OFFERED
                }
            }
            reg::PEER_EPOCH => peer.epoch,
            0x08..0x10 => half(peer.window.start()),
            reg::PEER_EXTENTS => u32::try_from(peer.window.extents().len()).unwrap_or(0),
            reg::PEER_REASON => peer.gone.unwrap_or(0),
            reg::PEER_EXTENT..reg::PEER_NAME => {
                let index = usize::try_from((at - reg::PEER_EXTENT) / 16).unwrap_or(usize::MAX);
                let (start, size) = peer.window.extents().get(index).copied().unwrap_or_default();
                half(if at % 16 < 8 { start } else { size })
            }
            reg::PEER_NAME..reg::PEER_MAC => {
                let from = usize::try_from(at - reg::PEER_NAME).unwrap_or(usize::MAX);
                let bytes = peer.name.get(from..from.saturating_add(4)).and_then(|four| four.try_into().ok());
                bytes.map_or(0, u32::from_le_bytes)
            }
            reg::PEER_MAC..PEER_END => {
                let [a, b, c, d, e, f] = peer.mac;
                half(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
            }
            _ => 0,
        }
    }

    /// The guest writes to BAR 0. Only aligned 32-bit writes to writable registers have an effect.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let value = u32::from_le_bytes(data.try_into().ok()?);
        if offset == reg::DRIVER {
            let driver = value & 1 == 1;
            let changes = core::mem::replace(&mut self.driver, driver) != driver;
            if changes && !driver {
                self.peers.iter_mut().flatten().for_each(|peer| peer.released = true);
            }
            return changes.then_some(Effect::Driver(driver));
        }
        let within = offset.checked_sub(reg::PEERS)?;
        let (slot, at) = (within / reg::PEER_STRIDE, within % reg::PEER_STRIDE);
        let slot = u32::try_from(slot).ok()?;
        let peer = self.place(slot)?.as_mut()?;
        if peer.epoch != value {
            return None;
        }
        match at {
            reg::PEER_RELEASE => {
                peer.released = true;
                Some(Effect::Release { slot, epoch: value })
            }
            reg::PEER_KEEP => {
                (peer.released, peer.kept) = (true, true);
                None
            }
            _ => None,
        }
    }
}

/// The register value of a registry's reason.
#[must_use]
pub const fn reason(reason: Reason) -> u32 {
    match reason {
        Reason::Left => reg::reason::LEFT,
        Reason::Silent => reg::reason::SILENT,
        Reason::Hung => reg::reason::HUNG,
        Reason::Own => reg::reason::OWN,
        Reason::GivenUp => reg::reason::GIVEN_UP,
    }
}

const _: () = assert!(PAGE >= 8);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAC: [u8; 6] = [2, 3, 4, 5, 6, 7];

    fn device() -> Device {
        Device::new(Geometry::new(1 << 32, 1 << 32, 5).unwrap(), Layout::new(64).unwrap(), 100)
    }

    fn read(device: &mut Device, offset: u64) -> u32 {
        let mut data = [0; 4];
        device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn read64(device: &mut Device, offset: u64) -> u64 {
        let mut data = [0; 8];
        device.read(offset, &mut data);
        u64::from_le_bytes(data)
    }

    #[test]
    fn a_driver_learns_where_its_peer_is_and_lets_go_of_it() {
        let mut device = device();
        assert_eq!(read(&mut device, reg::OWN_SLOT), u32::MAX);
        device.joined(1);
        assert_eq!(read64(&mut device, reg::BASE), 1 << 32);
        assert_eq!(device.write(reg::DRIVER, &1u32.to_le_bytes()), Some(Effect::Driver(true)));
        let window = device.geometry.window(3, &[(0, 4096), (1 << 31, 8192)]).unwrap();
        assert!(device.offer(window, 9, "files", MAC) && !device.offer(window, 10, "again", MAC));
        assert_eq!(read64(&mut device, reg::CHANGED), 8);
        assert_eq!(read64(&mut device, reg::CHANGED), 0);
        let block = reg::PEERS + 3 * reg::PEER_STRIDE;
        assert_eq!(read(&mut device, block + reg::PEER_STATE), reg::PEER_OFFERED);
        assert_eq!(read64(&mut device, block + reg::PEER_WINDOW), 4 << 32);
        assert_eq!(read64(&mut device, block + reg::PEER_EXTENT + 16), 1 << 31);
        assert_eq!(read64(&mut device, block + reg::PEER_EXTENT + 24), 8192);
        assert_eq!(&read64(&mut device, block + reg::PEER_NAME).to_le_bytes(), b"files\0\0\0");
        assert!(!device.gone(3, 8, 1) && device.gone(3, 9, 1) && !device.gone(3, 9, 1));
        assert_eq!(read(&mut device, block + reg::PEER_STATE), reg::PEER_GONE);
        assert_eq!(device.write(block + reg::PEER_RELEASE, &8u32.to_le_bytes()), None);
        let effect = device.write(block + reg::PEER_RELEASE, &9u32.to_le_bytes());
        assert_eq!(effect, Some(Effect::Release { slot: 3, epoch: 9 }));
        device.forget(3, 9);
        assert_eq!(read(&mut device, block + reg::PEER_STATE), reg::PEER_NONE);
    }

    /// A connection that a driver gave up isn't shown to the next driver, even before the monitor has unmapped it. A later connection is.
    #[test]
    fn a_driver_that_comes_back_at_once_does_not_see_what_the_last_one_used() {
        let mut device = device();
        let block = |slot| reg::PEERS + slot * reg::PEER_STRIDE;
        let on = |device: &mut Device, on: u32| device.write(reg::DRIVER, &on.to_le_bytes());
        assert!(on(&mut device, 1).is_some());
        for slot in [2, 3] {
            let window = device.geometry.window(slot, &[(0, 4096)]).unwrap();
            assert!(device.offer(window, 7, "x", MAC));
        }
        let released = device.write(block(2) + reg::PEER_RELEASE, &7u32.to_le_bytes());
        assert_eq!(released, Some(Effect::Release { slot: 2, epoch: 7 }));
        assert_eq!(read(&mut device, block(2) + reg::PEER_STATE), reg::PEER_NONE);
        assert_eq!(read(&mut device, block(3) + reg::PEER_STATE), reg::PEER_OFFERED);
        assert_eq!(
            (on(&mut device, 0), on(&mut device, 1)),
            (Some(Effect::Driver(false)), Some(Effect::Driver(true)))
        );
        assert_eq!(read(&mut device, block(3) + reg::PEER_STATE), reg::PEER_NONE);
        // The monitor's list has both until it has unmapped them.
        assert_eq!(device.views().count(), 2);
        device.forget(3, 7);
        let window = device.geometry.window(3, &[(0, 4096)]).unwrap();
        assert!(device.offer(window, 8, "x", MAC));
        assert_eq!(read(&mut device, block(3) + reg::PEER_EPOCH), 8);
    }

    /// Names that differ only in their last byte are distinct: mmblk's access lists use them.
    #[test]
    fn a_name_is_shown_whole_or_not_at_all() {
        let mut device = device();
        for (slot, last) in [(2, "a"), (3, "b")] {
            let name = "n".repeat(reg::PEER_NAME_SIZE - 1) + last;
            let window = device.geometry.window(slot, &[(0, 4096)]).unwrap();
            assert!(device.offer(window, 7, &name, MAC));
            let block = reg::PEERS + u64::from(slot) * reg::PEER_STRIDE;
            let shown: Vec<u8> = (0..reg::PEER_NAME_SIZE as u64 / 8)
                .flat_map(|word| read64(&mut device, block + reg::PEER_NAME + 8 * word).to_le_bytes())
                .collect();
            assert_eq!(String::from_utf8(shown).unwrap(), name);
            assert_eq!(read64(&mut device, block + reg::PEER_MAC).to_le_bytes(), [2, 3, 4, 5, 6, 7, 0, 0]);
        }
        let window = device.geometry.window(4, &[(0, 4096)]).unwrap();
        assert!(!device.offer(window, 7, &"n".repeat(reg::PEER_NAME_SIZE + 1), MAC));
    }

    /// A driver is unloaded while pages of one window are in use. That window isn't among those to unmap, no later driver sees it, and only
    /// a write of its epoch releases it.
    #[test]
    fn a_window_that_is_kept_is_released_by_its_epoch_only() {
        let mut device = device();
        let block = |slot| reg::PEERS + slot * reg::PEER_STRIDE;
        device.write(reg::DRIVER, &1u32.to_le_bytes());
        for slot in [2, 3] {
            let window = device.geometry.window(slot, &[(0, 4096)]).unwrap();
            assert!(device.offer(window, 7, "x", MAC));
        }
        assert_eq!(device.write(block(2) + reg::PEER_KEEP, &6u32.to_le_bytes()), None);
        assert!(!device.is_kept(2, 7));
        assert_eq!(device.write(block(2) + reg::PEER_KEEP, &7u32.to_le_bytes()), None);
        assert_eq!(device.write(reg::DRIVER, &0u32.to_le_bytes()), Some(Effect::Driver(false)));
        assert_eq!(device.unkept().collect::<Vec<_>>(), [(3, 7)]);
        device.forget(3, 7);
        device.write(reg::DRIVER, &1u32.to_le_bytes());
        assert_eq!(read(&mut device, block(2) + reg::PEER_STATE), reg::PEER_NONE);
        let effect = device.write(block(2) + reg::PEER_RELEASE, &7u32.to_le_bytes());
        assert_eq!(effect, Some(Effect::Release { slot: 2, epoch: 7 }));
    }

    #[test]
    fn a_driver_learns_whom_it_and_a_peer_have_in_common() {
        let mut device = device();
        let all = 1 << 63 | 0b10010;
        assert!(device.common(3, all) && !device.common(3, all) && !device.common(5, all));
        assert_eq!(read64(&mut device, reg::CHANGED), 8);
        assert_eq!(read64(&mut device, reg::COMMON + 3 * reg::COMMON_STRIDE), all);
        assert_eq!(read(&mut device, reg::COMMON + 3 * reg::COMMON_STRIDE + 4), 1 << 31);
        assert_eq!(read64(&mut device, reg::COMMON + 4 * reg::COMMON_STRIDE), 0);
        // The registry's data outlives a reset, like the own slot.
        device.reset();
        assert_eq!(read64(&mut device, reg::COMMON + 3 * reg::COMMON_STRIDE), all);
    }

    #[test]
    fn segments_lie_apart_in_a_bar_that_holds_all() {
        let device = device();
        let (at, size) = device.segment_place(4);
        assert!(size <= device.segment_stride() && at + size <= device.segments_size());
        assert!(device.segments_size().is_power_of_two());
    }

    proptest! {
        /// Every access of any width at any offset gets an answer, and only mapped peers can be released.
        #[test]
        fn any_access_is_answered(
            accesses in prop::collection::vec((any::<bool>(), 0u64..0x9000, 0usize..10, any::<u32>()), 0..100),
        ) {
            let mut device = device();
            let window = device.geometry.window(2, &[(0, 4096)]).unwrap();
            prop_assert!(device.offer(window, 77, "x", MAC));
            for (write, offset, width, value) in accesses {
                if write {
                    let bytes = u64::from(value).to_le_bytes();
                    if let Some(Effect::Release { slot, epoch }) = device.write(offset, &bytes[..width.min(8)]) {
                        prop_assert_eq!((slot, epoch), (2, 77));
                    }
                } else {
                    device.read(offset, &mut vec![0; width]);
                }
            }
        }
    }
}
