//! The common configuration structure (virtio 1.2, 4.1.4.3) as a register file: feature negotiation and queue set-up. Pure state; a write
//! with effects returns an [`Action`].

use machine::memory::GuestAddress;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};

use super::layout::COMMON_LEN;

pub(super) const ACKNOWLEDGE: u8 = 1;
pub(super) const DRIVER: u8 = 2;
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;
pub(super) const NEEDS_RESET: u8 = 0x40;
pub(super) const FAILED: u8 = 0x80;

/// No interrupt vector.
pub(super) const NO_VECTOR: u16 = 0xFFFF;

/// The effect of a register write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    None,
    /// The driver wrote 0 to the status.
    Reset,
    /// The driver set DRIVER_OK.
    Start,
    ConfigVector(u16),
    QueueVector(u16, u16),
    /// The driver violated a rule, and the device can't work.
    Broken(String),
}

/// Registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct QueueRegisters {
    pub max_size: u16,
    pub size: u16,
    pub vector: u16,
    pub enabled: bool,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// The device's position while its thread doesn't own the queue.
    pub next_available: u16,
    pub next_used: u16,
}

impl QueueRegisters {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            vector: NO_VECTOR,
            enabled: false,
            descriptors: 0,
            available: 0,
            used: 0,
            next_available: 0,
            next_used: 0,
        }
    }

    /// The error of the queue's set-up, if any (2.7 and 4.1.4.3.2).
    fn mistake(&self) -> Option<String> {
        if !self.size.is_power_of_two() || self.size > self.max_size {
            return Some(format!("size {} is no power of two up to {}", self.size, self.max_size));
        }
        for (part, address, alignment) in [
            ("descriptor table", self.descriptors, 16),
            ("available ring", self.available, 2),
            ("used ring", self.used, 4),
        ] {
            if address == 0 || !address.is_multiple_of(alignment) {
                return Some(format!("{part} at {address:#x} is not aligned to {alignment} bytes, or 0"));
            }
        }
        None
    }

    /// The queue for the device.
    pub(super) fn queue(&self, event_index: bool) -> Result<Queue, String> {
        if let Some(mistake) = self.mistake() {
            return Err(mistake);
        }
        let make = || {
            let mut queue = Queue::new(self.max_size)?;
            queue.try_set_size(self.size)?;
            queue.try_set_desc_table_address(GuestAddress(self.descriptors))?;
            queue.try_set_avail_ring_address(GuestAddress(self.available))?;
            queue.try_set_used_ring_address(GuestAddress(self.used))?;
            queue.set_next_avail(self.next_available);
            queue.set_next_used(self.next_used);
            queue.set_event_idx(event_index);
            queue.set_ready(true);
            Ok::<_, virtio_queue::Error>(queue)
        };
        make().map_err(|error| error.to_string())
    }
}

/// The register file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Registers {
    pub offered: u64,
    pub driver_features: u64,
    pub status: u8,
    pub config_vector: u16,
    pub queues: Vec<QueueRegisters>,
    device_feature_select: u32,
    driver_feature_select: u32,
    queue_select: u16,
    /// Number of vectors.
    vectors: u16,
}

impl Registers {
    pub(super) fn new(offered: u64, queue_sizes: &[u16], vectors: u16) -> Self {
        Self {
            offered,
            driver_features: 0,
            status: 0,
            config_vector: NO_VECTOR,
            queues: queue_sizes.iter().map(|size| QueueRegisters::new(*size)).collect(),
            device_feature_select: 0,
            driver_feature_select: 0,
            queue_select: 0,
            vectors,
        }
    }

    /// Returns to the state after a reset.
    pub(super) fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|queue| queue.max_size).collect();
        *self = Self::new(self.offered, &sizes, self.vectors);
    }

    pub(super) fn negotiated(&self, bit: u32) -> bool {
        self.driver_features & (1 << bit) != 0
    }

    pub(super) fn event_index(&self) -> bool {
        self.negotiated(VIRTIO_RING_F_EVENT_IDX)
    }

    fn selected(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// Reads bytes of the structure; beyond its end they are 0.
    pub(super) fn read(&self, offset: u64, data: &mut [u8], generation: u8, needs_reset: bool) {
        let image = self.image(generation, needs_reset);
        for (at, byte) in (offset..).zip(data.iter_mut()) {
            *byte = usize::try_from(at).ok().and_then(|at| image.get(at).copied()).unwrap_or(0);
        }
    }

    #[allow(clippy::cast_possible_truncation)] // Each half of the 64-bit features, by selector.
    fn image(&self, generation: u8, needs_reset: bool) -> [u8; COMMON_LEN as usize] {
        let mut image = [0u8; COMMON_LEN as usize];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &self.device_feature_select.to_le_bytes());
        put(0x04, &half(self.offered, self.device_feature_select).to_le_bytes());
        put(0x08, &self.driver_feature_select.to_le_bytes());
        put(0x0C, &half(self.driver_features, self.driver_feature_select).to_le_bytes());
        put(0x10, &self.config_vector.to_le_bytes());
        put(0x12, &u16::try_from(self.queues.len()).unwrap_or(u16::MAX).to_le_bytes());
        put(0x14, &[self.status | if needs_reset { NEEDS_RESET } else { 0 }, generation]);
        put(0x16, &self.queue_select.to_le_bytes());
        // A queue that doesn't exist reads as zero (size 0: unavailable), but has no vector.
        put(0x1A, &self.selected().map_or(NO_VECTOR, |queue| queue.vector).to_le_bytes());
        if let Some(queue) = self.selected() {
            put(0x18, &queue.size.to_le_bytes());
            put(0x1C, &u16::from(queue.enabled).to_le_bytes());
            put(0x1E, &self.queue_select.to_le_bytes());
            put(0x20, &queue.descriptors.to_le_bytes());
            put(0x28, &queue.available.to_le_bytes());
            put(0x30, &queue.used.to_le_bytes());
        }
        image
    }

    /// Handles a write by the driver. Accepts only fields in their natural width, and halves of 64-bit ones (4.1.3.1).
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Action {
        let mut raw = [0u8; 8];
        if data.len() > raw.len() {
            return Action::None;
        }
        raw[..data.len()].copy_from_slice(data);
        let value = u64::from_le_bytes(raw);
        let [low, ..] = raw;
        let word = u16::from_le_bytes([raw[0], raw[1]]);
        let dword = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
        match (offset, data.len()) {
            (0x00, 4) => self.device_feature_select = dword,
            (0x08, 4) => self.driver_feature_select = dword,
            (0x0C, 4) => self.set_driver_features(dword),
            (0x10, 2) => {
                self.config_vector = self.vector(word);
                return Action::ConfigVector(self.config_vector);
            }
            (0x14, 1) => return self.set_status(low),
            (0x16, 2) => self.queue_select = word,
            (0x18, 2) => self.set_queue(|queue| queue.size = word),
            (0x1A, 2) => {
                let vector = self.vector(word);
                let index = self.queue_select;
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.vector = vector;
                    return Action::QueueVector(index, vector);
                }
            }
            (0x1C, 2) if word == 1 => return self.enable_queue(),
            (0x20, 4 | 8) => self.set_queue(|queue| replace(&mut queue.descriptors, 0, value, data.len())),
            (0x24, 4) => self.set_queue(|queue| replace(&mut queue.descriptors, 4, value, 4)),
            (0x28, 4 | 8) => self.set_queue(|queue| replace(&mut queue.available, 0, value, data.len())),
            (0x2C, 4) => self.set_queue(|queue| replace(&mut queue.available, 4, value, 4)),
            (0x30, 4 | 8) => self.set_queue(|queue| replace(&mut queue.used, 0, value, data.len())),
            (0x34, 4) => self.set_queue(|queue| replace(&mut queue.used, 4, value, 4)),
            _ => {}
        }
        Action::None
    }

    fn vector(&self, wanted: u16) -> u16 {
        if wanted < self.vectors { wanted } else { NO_VECTOR }
    }

    fn set_driver_features(&mut self, half: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        match self.driver_feature_select {
            0 => replace(&mut self.driver_features, 0, u64::from(half), 4),
            1 => replace(&mut self.driver_features, 4, u64::from(half), 4),
            _ => {}
        }
    }

    /// Changes the selected queue, unless it is enabled already: the driver must not change it then.
    fn set_queue(&mut self, change: impl FnOnce(&mut QueueRegisters)) {
        if let Some(queue) = self.queues.get_mut(usize::from(self.queue_select))
            && !queue.enabled
        {
            change(queue);
        }
    }

    fn enable_queue(&mut self) -> Action {
        let index = self.queue_select;
        let (negotiated, running) = (self.status & FEATURES_OK != 0, self.status & DRIVER_OK != 0);
        let Some(queue) = self.queues.get_mut(usize::from(index)) else { return Action::None };
        if queue.enabled {
            return Action::None;
        }
        if !negotiated || running {
            return Action::Broken(format!("the driver enabled queue {index} outside of the set-up phase"));
        }
        if let Some(mistake) = queue.mistake() {
            return Action::Broken(format!("the driver enabled queue {index}, whose {mistake}"));
        }
        queue.enabled = true;
        Action::None
    }

    fn set_status(&mut self, value: u8) -> Action {
        if value == 0 {
            return Action::Reset;
        }
        // The driver only adds bits until a reset (2.1.1); DEVICE_NEEDS_RESET is the device's.
        let mut added = value & !self.status & (ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED);
        if added & FEATURES_OK != 0 {
            let acceptable = self.driver_features & !self.offered == 0 && self.negotiated(VIRTIO_F_VERSION_1);
            if !acceptable {
                // The driver reads the status back and finds the bit clear.
                added &= !FEATURES_OK;
            }
        }
        if added & DRIVER_OK != 0 && (self.status | added) & FEATURES_OK == 0 {
            self.status |= added & !DRIVER_OK;
            return Action::Broken("the driver set DRIVER_OK before features were agreed on".to_owned());
        }
        self.status |= added;
        if added & DRIVER_OK != 0 { Action::Start } else { Action::None }
    }
}

/// The 32 bits of a feature selector.
#[allow(clippy::cast_possible_truncation)] // Truncates on purpose.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Replaces `len` (4 or 8) bytes at byte `at` (0 or 4) of `field`.
fn replace(field: &mut u64, at: u32, value: u64, len: usize) {
    let mask = if len == 8 { u64::MAX } else { u64::from(u32::MAX) << (8 * at) };
    *field = *field & !mask | value << (8 * at) & mask;
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << 5;

    fn registers() -> Registers {
        Registers::new(OFFERED, &[256, 128], 3)
    }

    fn accept(registers: &mut Registers, features: u64) {
        for select in [0u32, 1] {
            registers.write(0x08, &select.to_le_bytes());
            registers.write(0x0C, &half(features, select).to_le_bytes());
        }
        registers.write(0x14, &[ACKNOWLEDGE | DRIVER]);
        registers.write(0x14, &[ACKNOWLEDGE | DRIVER | FEATURES_OK]);
    }

    fn get<const N: usize>(registers: &Registers, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        registers.read(offset, &mut data, 7, false);
        data
    }

    #[test]
    fn features_are_offered_in_halves_and_nothing_beyond() {
        let mut registers = registers();
        let mut seen = 0u64;
        for select in 0u32..4 {
            registers.write(0x00, &select.to_le_bytes());
            let half = u64::from(u32::from_le_bytes(get(&registers, 0x04)));
            seen |= if select < 2 { half << (32 * select) } else { half };
            assert!(select < 2 || half == 0);
        }
        assert_eq!(seen, OFFERED);
    }

    #[test]
    fn features_ok_needs_version_1_and_a_subset() {
        for (features, ok) in [
            (OFFERED, true),
            (1 << VIRTIO_F_VERSION_1, true),
            (OFFERED & !(1 << VIRTIO_F_VERSION_1), false),
            (OFFERED | 1 << 9, false),
            (0, false),
        ] {
            let mut registers = registers();
            accept(&mut registers, features);
            assert_eq!(registers.status & FEATURES_OK != 0, ok, "features {features:#x}");
        }
    }

    #[test]
    fn features_are_fixed_once_agreed() {
        let mut registers = registers();
        accept(&mut registers, OFFERED);
        registers.write(0x08, &0u32.to_le_bytes());
        registers.write(0x0C, &0u32.to_le_bytes());
        assert_eq!(registers.driver_features, OFFERED);
    }

    #[test]
    fn driver_ok_without_features_ok_is_a_broken_driver() {
        let mut registers = registers();
        assert!(matches!(registers.write(0x14, &[DRIVER_OK]), Action::Broken(_)));
        assert_eq!(registers.status & DRIVER_OK, 0);
    }

    #[test]
    fn queues_are_checked_when_enabled_and_fixed_afterwards() {
        let mut registers = registers();
        accept(&mut registers, OFFERED);
        registers.write(0x16, &1u16.to_le_bytes());
        registers.write(0x20, &0x1_0000_1000u64.to_le_bytes());
        registers.write(0x28, &0x2000u32.to_le_bytes());
        registers.write(0x2C, &0x1u32.to_le_bytes());
        registers.write(0x30, &0x3000u32.to_le_bytes());
        for bad in [0u16, 3, 256, u16::MAX] {
            registers.write(0x18, &bad.to_le_bytes());
            assert!(matches!(registers.write(0x1C, &[1, 0]), Action::Broken(_)), "size {bad}");
        }
        registers.write(0x18, &64u16.to_le_bytes());
        assert_eq!(registers.write(0x1C, &[1, 0]), Action::None);
        registers.write(0x18, &32u16.to_le_bytes());
        assert_eq!(get(&registers, 0x18), 64u16.to_le_bytes(), "the size of an enabled queue is fixed");
        assert_eq!(get(&registers, 0x20), 0x1_0000_1000u64.to_le_bytes());
        assert_eq!(get(&registers, 0x28), 0x1_0000_2000u64.to_le_bytes());
        assert_eq!(get(&registers, 0x1E), 1u16.to_le_bytes(), "notify offset is the index");
    }

    #[test]
    fn a_vector_that_does_not_exist_reads_back_as_none() {
        let mut registers = registers();
        assert_eq!(registers.write(0x10, &2u16.to_le_bytes()), Action::ConfigVector(2));
        assert_eq!(registers.write(0x10, &3u16.to_le_bytes()), Action::ConfigVector(NO_VECTOR));
        assert_eq!(get(&registers, 0x10), NO_VECTOR.to_le_bytes());
        registers.write(0x16, &9u16.to_le_bytes());
        assert_eq!(registers.write(0x1A, &0u16.to_le_bytes()), Action::None, "no such queue");
        assert_eq!(get(&registers, 0x18), [0, 0], "no such queue: size 0");
    }

    #[test]
    fn a_reset_leaves_nothing_but_what_is_offered() {
        let mut registers = registers();
        accept(&mut registers, OFFERED);
        registers.write(0x10, &1u16.to_le_bytes());
        assert_eq!(registers.write(0x14, &[0]), Action::Reset);
        registers.reset();
        assert_eq!(registers, Registers::new(OFFERED, &[256, 128], 3));
    }
}
