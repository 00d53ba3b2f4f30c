//! Saved state, in versioned types of its own, and the constructor that restores it.

use dma::Dma;

use crate::descriptors::Cursor;
use crate::device::{Active, Vmxnet3, Vmxnet3Config};
use crate::filter::RxFilter;
use crate::interrupts::{Interrupts, Vectors};
use crate::mac::MacAddress;
use crate::receive::{RxQueue, RxStats};
use crate::registers::{COMPLETION_RING_MAX, INTERRUPTS_MAX, QUEUES_MAX, RING_MAX};
use crate::shared_area::{QUEUE_ENTRY, RxLayout, TxLayout};
use crate::transmit::{TxQueue, TxStats};

/// Version that this code writes and reads.
pub const VERSION: u32 = 1;

/// Complete state of a device between two packets, without its rings and shared area in guest memory. Field names are the format: rename
/// none, and give new ones a default.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedVmxnet3 {
    version: u32,
    mac: MacAddress,
    station: MacAddress,
    link_up: bool,
    shared_area: u64,
    result: u32,
    revision: u32,
    masked: u32,
    pending: u32,
    auto_mask: bool,
    active: Option<SavedActive>,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SavedActive {
    shared: u64,
    features: u64,
    mtu: u32,
    rx_mode: u32,
    groups: Vec<MacAddress>,
    vlans: Vec<u32>,
    event_vector: u8,
    events: u32,
    tx: Vec<SavedTx>,
    rx: Vec<SavedRx>,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SavedTx {
    layout: TxLayout,
    next: Cursor,
    completion: Cursor,
    stopped: Option<u32>,
    stats: TxStats,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SavedRx {
    layout: RxLayout,
    next: [Cursor; 2],
    completion: Cursor,
    stopped: Option<u32>,
    stats: RxStats,
}

/// Why a saved state can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The state has another version.
    #[error("The saved state of {name} has version {found}, this program reads version {VERSION}")]
    Version {
        /// The device.
        name: String,
        /// The state's version.
        found: u32,
    },
    /// The state is invalid for any device.
    #[error("The saved state of {name} is damaged: {what} is out of range")]
    Damaged {
        /// The device.
        name: String,
        /// Name of the invalid field.
        what: &'static str,
    },
    /// The state is another device's.
    #[error("The saved state is that of a device with address {saved}, but {name} has {own}")]
    OtherDevice {
        /// The device.
        name: String,
        /// The device's address.
        own: MacAddress,
        /// The state's address.
        saved: MacAddress,
    },
}

/// Bytes of the driver-shared area without its tables, and of each descriptor.
const SHARED_AREA: u64 = 720;
const DESCRIPTOR: u64 = 16;

impl SavedVmxnet3 {
    /// Passes `each` the guest memory that must be present for a device in this state: addresses and lengths of its shared area and rings.
    pub fn memory(&self, each: &mut dyn FnMut(u64, u64)) {
        let Some(active) = &self.active else { return };
        each(active.shared, SHARED_AREA);
        let ring = |each: &mut dyn FnMut(u64, u64), address, size| {
            if size > 0 {
                each(address, u64::from(size) * DESCRIPTOR);
            }
        };
        for SavedTx { layout, .. } in &active.tx {
            each(layout.entry, QUEUE_ENTRY);
            ring(each, layout.ring, layout.ring_size);
            ring(each, layout.completion, layout.completion_size);
        }
        for SavedRx { layout, .. } in &active.rx {
            each(layout.entry, QUEUE_ENTRY);
            ring(each, layout.rings[0], layout.ring_sizes[0]);
            ring(each, layout.rings[1], layout.ring_sizes[1]);
            ring(each, layout.completion, layout.completion_size);
        }
    }
}

impl<M: Dma> Vmxnet3<M> {
    /// Saves the complete state. Pause the guest before: concurrent actions of its driver may or may not be included.
    #[must_use]
    pub fn save(&self) -> SavedVmxnet3 {
        SavedVmxnet3 {
            version: VERSION,
            mac: self.config.mac,
            station: self.station,
            link_up: self.link_up,
            shared_area: self.shared_area,
            result: self.result,
            revision: self.revision,
            masked: self.vectors.masked,
            pending: self.vectors.pending,
            auto_mask: self.vectors.auto_mask,
            active: self.active.as_ref().map(save_active),
        }
    }

    /// Restores a device. It is suspended until it gets memory. Then it raises pending interrupts and executes work in the rings.
    ///
    /// # Errors
    /// When the state has another version, is another device's, or is invalid.
    pub fn restore(
        config: Vmxnet3Config,
        interrupts: Box<dyn Interrupts>,
        state: SavedVmxnet3,
    ) -> Result<Self, RestoreError> {
        let name = || config.name.clone();
        if state.version != VERSION {
            return Err(RestoreError::Version { name: name(), found: state.version });
        }
        if state.mac != config.mac {
            return Err(RestoreError::OtherDevice { name: name(), own: config.mac, saved: state.mac });
        }
        let active = state
            .active
            .map(restore_active)
            .transpose()
            .map_err(|what| RestoreError::Damaged { name: name(), what })?;
        let all = (1 << INTERRUPTS_MAX) - 1;
        let mut device = Self::new(config, interrupts);
        device.station = state.station;
        device.link_up = state.link_up;
        device.shared_area = state.shared_area;
        device.result = state.result;
        device.revision = state.revision;
        device.vectors =
            Vectors { masked: state.masked & all, pending: state.pending & all, auto_mask: state.auto_mask };
        device.active = active;
        device.kicked = true;
        Ok(device)
    }
}

fn save_active(active: &Active) -> SavedActive {
    let mut groups: Vec<_> = active.filter.groups.iter().copied().collect();
    groups.sort_unstable();
    SavedActive {
        shared: active.shared,
        features: active.features,
        mtu: active.mtu,
        rx_mode: active.filter.mode,
        groups,
        vlans: active.filter.vlans.to_vec(),
        event_vector: active.event_vector,
        events: active.events,
        tx: active
            .tx
            .iter()
            .map(|queue| {
                let TxQueue { layout, next, completion, stopped, stats } = *queue;
                SavedTx { layout, next, completion, stopped, stats }
            })
            .collect(),
        rx: active
            .rx
            .iter()
            .map(|queue| {
                let RxQueue { layout, next, completion, stopped, stats } = *queue;
                SavedRx { layout, next, completion, stopped, stats }
            })
            .collect(),
    }
}

fn restore_active(saved: SavedActive) -> Result<Active, &'static str> {
    let within = |cursor: Cursor, size: u32| cursor.next < size || (size == 0 && cursor.next == 0);
    let sized = |size: u32, max: u32| (1..=max).contains(&size);
    let queues = 1..=usize::from(QUEUES_MAX);
    if !queues.contains(&saved.tx.len()) || !queues.contains(&saved.rx.len()) {
        return Err("the number of queues");
    }
    for queue in &saved.tx {
        let layout = &queue.layout;
        if !sized(layout.ring_size, RING_MAX) || !sized(layout.completion_size, COMPLETION_RING_MAX) {
            return Err("the size of a TX ring");
        }
        if !within(queue.next, layout.ring_size) || !within(queue.completion, layout.completion_size) {
            return Err("the position in a TX ring");
        }
    }
    for queue in &saved.rx {
        let layout = &queue.layout;
        let [first, second] = layout.ring_sizes;
        if !sized(first, RING_MAX) || second > RING_MAX || !sized(layout.completion_size, COMPLETION_RING_MAX)
        {
            return Err("the size of an RX ring");
        }
        if !within(queue.next[0], first)
            || !within(queue.next[1], second)
            || !within(queue.completion, layout.completion_size)
        {
            return Err("the position in an RX ring");
        }
    }
    let vlans = saved.vlans.try_into().map_err(|_| "the VLAN table")?;
    Ok(Active {
        shared: saved.shared,
        features: saved.features,
        mtu: saved.mtu,
        filter: RxFilter { mode: saved.rx_mode, groups: saved.groups.into_iter().collect(), vlans },
        tx: saved
            .tx
            .into_iter()
            .map(|SavedTx { layout, next, completion, stopped, stats }| TxQueue {
                layout,
                next,
                completion,
                stopped,
                stats,
            })
            .collect(),
        rx: saved
            .rx
            .into_iter()
            .map(|SavedRx { layout, next, completion, stopped, stats }| RxQueue {
                layout,
                next,
                completion,
                stopped,
                stats,
            })
            .collect(),
        event_vector: saved.event_vector,
        events: saved.events,
        turn: 0,
    })
}
