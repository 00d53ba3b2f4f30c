//! The virtio block device (virtio 1.2, 5.2).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::counters::BlockCounters;
use super::disk::Disk;
use super::error::BlockError;
use super::image::{Backend, Image};
use super::mirror::DiskContent;
use super::request::{ID_BYTES, MAX_DISCARD_SECTORS, MAX_RANGES, MAX_ZERO_SECTORS, SECTOR};
use super::sync::Synchronous;
use super::uring::Uring;
use super::worker::{self, BlockQueue, Engine};
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice};
use crate::queue::Ring;
use crate::saved;
use crate::worker::{Worker, signal};

/// Entries of each queue.
pub const QUEUE_SIZE: u16 = 256;
/// Limit of queues.
pub const MAX_QUEUES: u16 = 64;
/// Sizes of a logical block, bytes.
const LOGICAL_BLOCK_SIZES: [u32; 2] = [512, 4096];
/// Limit of data buffers in a request: a chain of the queue's size, less header and status.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Limit of a data buffer, bytes.
const SIZE_MAX: u32 = 4 << 20;
const SAVED_VERSION: u32 = 1;

/// Format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ImageFormat {
    /// Not specified: raw, but an image with another format's signature is refused, unless its VM still runs on another host. A signature
    /// never makes an image qcow2: a guest can write such a header to its raw disk.
    #[default]
    Auto,
    /// Raw, whatever its contents.
    Raw,
    /// qcow2, read-only.
    Qcow2,
}

/// The I/O engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// io_uring if it works (raw images only), else synchronous. The choice is logged and reported.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Synchronous: one request at a time per queue.
    Synchronous,
}

/// Configuration of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockConfig {
    /// Device name, unique in the VM (`disk0`).
    pub name: String,
    /// Path of a regular file or block device.
    pub path: PathBuf,
    /// Refuses writes. Required for qcow2.
    pub read_only: bool,
    /// Serial number: 1 to 20 printable ASCII characters. Default: the name, truncated if needed.
    pub serial: Option<String>,
    /// Number of queues, each with a thread: 1 to [`MAX_QUEUES`]. One per vCPU is a good choice.
    pub queues: u16,
    /// Bypasses the host's page cache (`O_DIRECT`). The guest sees no difference.
    pub direct: bool,
    /// Logical block size of the guest's disk, bytes: 512 or 4096. Default: 512, or a block device's own.
    pub logical_block_size: Option<u32>,
    /// Format of the image.
    pub format: ImageFormat,
    /// I/O engine.
    pub engine: EngineChoice,
    /// Claims (locks) the image when it is opened. Otherwise it is opened for a VM that still runs on another host, and can't be used
    /// before [`VirtioDevice::take_over`].
    pub claim: bool,
}

impl BlockConfig {
    /// A writable disk with one queue and defaults.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            path: path.into(),
            read_only: false,
            serial: None,
            queues: 1,
            direct: false,
            logical_block_size: None,
            format: ImageFormat::Auto,
            engine: EngineChoice::Auto,
            claim: true,
        }
    }
}

/// A virtio disk.
pub struct Block {
    disk: Arc<Disk>,
    queues: u16,
    /// Engine of each queue while no thread owns it. Created before the VM starts, so that the sandbox need not permit it.
    engines: Vec<Option<Engine>>,
    engine_choice: EngineChoice,
    engine_name: &'static str,
    workers: Vec<Worker<BlockQueue>>,
    /// The driver's choice of cache mode (`VIRTIO_BLK_F_CONFIG_WCE`); on at reset.
    writeback: bool,
    /// Features of the current activation.
    features: u64,
    /// Kick eventfd of the first queue, which wakes its thread.
    kick: Option<Arc<OwnedFd>>,
}

/// Device-specific saved state.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SavedBlock {
    capacity: u64,
    serial: [u8; ID_BYTES],
    queues: u16,
    writeback: bool,
    /// Logical block size, bytes; absent in states of earlier releases.
    #[serde(default)]
    block_size: Option<u32>,
}

impl Block {
    /// Opens and locks the image. Reads nothing from it but its format.
    pub fn open(config: BlockConfig) -> Result<Self, BlockError> {
        let serial = check(&config)?;
        let image = Image::open(&config)?;
        Self::with_image(config, serial, image)
    }

    /// As [`Block::open`], with a file that is open already (`config.path` is only displayed).
    pub fn from_file(file: File, config: BlockConfig) -> Result<Self, BlockError> {
        let serial = check(&config)?;
        let image = Image::from_file(file, &config)?;
        Self::with_image(config, serial, image)
    }

    /// Restores a disk over the image of `config` (on this host, or at the destination of a migration).
    pub fn restore(config: BlockConfig, saved: &SavedDevice) -> Result<Self, BlockError> {
        let name = config.name.clone();
        Self::open(config)?.with_saved(saved).map_err(|reason| BlockError::Restore { name, reason })
    }

    /// Applies a saved state.
    fn with_saved(mut self, saved: &SavedDevice) -> Result<Self, String> {
        if saved.version != SAVED_VERSION {
            return Err(format!("version {} is not {SAVED_VERSION}", saved.version));
        }
        let state: SavedBlock =
            saved::decode(&saved.state).map_err(|error| format!("it is damaged: {error}"))?;
        if state.capacity != self.disk.limits.capacity {
            return Err(format!(
                "the disk had {} sectors, the image has {}",
                state.capacity, self.disk.limits.capacity
            ));
        }
        if state.queues != self.queues {
            return Err(format!("the disk had {} queues, now it has {}", state.queues, self.queues));
        }
        if state.serial != self.disk.serial {
            return Err("the serial number differs".to_owned());
        }
        let block_size = self.disk.image.block_size;
        if let Some(had) = state.block_size.filter(|had| *had != block_size) {
            return Err(format!(
                "the disk had logical blocks of {had} bytes, now it has {block_size}; set logical_block_size"
            ));
        }
        self.writeback = state.writeback;
        Ok(self)
    }

    fn with_image(config: BlockConfig, serial: [u8; ID_BYTES], image: Image) -> Result<Self, BlockError> {
        let raw = matches!(image.backend, Backend::Raw { .. });
        let choice = if raw { config.engine } else { EngineChoice::Synchronous };
        let mut engines = Vec::new();
        let mut engine_name = "synchronous";
        for _ in 0..config.queues {
            let (engine, name) = new_engine(choice, &config.name)?;
            engine_name = name;
            engines.push(Some(engine));
        }
        tracing::info!(
            "Disk {}: {} ({} bytes{}{}), {} engine",
            config.name,
            config.path.display(),
            image.size,
            if raw { "" } else { ", qcow2" },
            if image.read_only { ", read-only" } else { "" },
            engine_name
        );
        Ok(Self {
            disk: Arc::new(Disk::new(&config.name, serial, image)),
            queues: config.queues,
            engines,
            engine_choice: choice,
            engine_name,
            workers: Vec::new(),
            writeback: true,
            features: 0,
            kick: None,
        })
    }

    /// Counters of the disk.
    pub fn counters(&self) -> &BlockCounters {
        &self.disk.counters
    }

    /// The disk's content, for a migration to copy it.
    pub fn content(&self) -> DiskContent {
        DiskContent::new(Arc::clone(&self.disk))
    }

    /// As [`Block::open`], for a disk that needs at least this alignment for `O_DIRECT`.
    #[cfg(test)]
    pub(super) fn open_with_alignment(config: BlockConfig, alignment: usize) -> Result<Self, BlockError> {
        let serial = check(&config)?;
        let mut image = Image::open(&config)?;
        if let Backend::Raw { direct: Some(direct), .. } = &mut image.backend {
            direct.memory_alignment = direct.memory_alignment.max(alignment);
            direct.offset_alignment = direct.offset_alignment.max(alignment as u64);
        }
        Self::with_image(config, serial, image)
    }

    /// A queue of this disk without a thread, for tests and fuzzing: the caller calls [`BlockQueue::serve`]. Uses the synchronous engine.
    pub fn queue(&self, ring: Ring, memory: machine::memory::GuestMemorySpace) -> BlockQueue {
        let engine = Engine::Synchronous(Synchronous::default());
        BlockQueue::new(ring, Arc::clone(&self.disk), memory, engine)
    }

    fn has(&self, bit: u32) -> bool {
        self.features & (1 << bit) != 0
    }

    /// Virtio 1.2, 5.2.5.2: with `CONFIG_WCE` the driver chooses the cache mode. Otherwise a driver that can flush gets a write-back cache.
    fn apply_cache_mode(&self) {
        let writeback =
            if self.has(VIRTIO_BLK_F_CONFIG_WCE) { self.writeback } else { self.has(VIRTIO_BLK_F_FLUSH) };
        self.disk.set_write_through(!writeback);
    }

    /// Returns the device configuration, `struct virtio_blk_config`.
    fn config_space(&self) -> [u8; 60] {
        let disk = &self.disk;
        let mut space = [0u8; 60];
        let mut put =
            |offset: usize, bytes: &[u8]| space[offset..offset + bytes.len()].copy_from_slice(bytes);
        let block = disk.image.block_size;
        let blocks = |bytes: u32| bytes / block;
        put(0, &disk.limits.capacity.to_le_bytes());
        put(8, &SIZE_MAX.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &block.to_le_bytes());
        // Topology, in blocks: exponent of the physical block, alignment, minimal and optimal I/O size.
        let physical = blocks(disk.image.physical_block).max(1);
        put(24, &[u8::try_from(physical.ilog2()).unwrap_or(0), 0]);
        put(26, &u16::try_from(physical).unwrap_or(1).to_le_bytes());
        put(32, &[u8::from(self.writeback)]);
        put(34, &self.queues.to_le_bytes());
        if disk.limits.discard {
            put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &MAX_RANGES.to_le_bytes());
            let unit = disk.image.device_discard.and_then(|bytes| u32::try_from(bytes).ok()).unwrap_or(512);
            put(44, &(disk.image.physical_block.max(unit) / 512).to_le_bytes());
        }
        if disk.limits.write_zeroes {
            put(48, &MAX_ZERO_SECTORS.to_le_bytes());
            put(52, &MAX_RANGES.to_le_bytes());
            put(56, &[u8::from(disk.image.can_punch)]);
        }
        space
    }
}

/// Offset of `writeback` in the configuration, bytes.
const WRITEBACK: u64 = 32;

fn check(config: &BlockConfig) -> Result<[u8; ID_BYTES], BlockError> {
    if config.queues == 0 || config.queues > MAX_QUEUES {
        return Err(BlockError::Queues { name: config.name.clone(), queues: config.queues, max: MAX_QUEUES });
    }
    if let Some(bytes) = config.logical_block_size
        && !LOGICAL_BLOCK_SIZES.contains(&bytes)
    {
        return Err(BlockError::BlockSize { name: config.name.clone(), bytes });
    }
    let mut serial = [0u8; ID_BYTES];
    match &config.serial {
        Some(text) => {
            let fits = !text.is_empty() && text.len() <= ID_BYTES;
            if !fits || !text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
                return Err(BlockError::Serial { name: config.name.clone(), serial: text.clone() });
            }
            serial[..text.len()].copy_from_slice(text.as_bytes());
        }
        None => {
            for (to, from) in serial.iter_mut().zip(config.name.bytes().filter(u8::is_ascii_graphic)) {
                *to = from;
            }
        }
    }
    Ok(serial)
}

fn new_engine(choice: EngineChoice, name: &str) -> Result<(Engine, &'static str), BlockError> {
    let synchronous = || (Engine::Synchronous(Synchronous::default()), "synchronous");
    if choice == EngineChoice::Synchronous {
        return Ok(synchronous());
    }
    match Uring::new(QUEUE_SIZE) {
        Ok(ring) => Ok((Engine::Uring(Box::new(ring)), "io_uring")),
        Err(source) if choice == EngineChoice::Uring => {
            Err(BlockError::NoUring { name: name.to_owned(), source })
        }
        Err(error) => {
            tracing::warn!(
                "Disk {name}: this host refuses io_uring ({error}); I/O is synchronous, which is slower"
            );
            Ok(synchronous())
        }
    }
}

impl VirtioDevice for Block {
    fn name(&self) -> &str {
        &self.disk.name
    }

    fn device_id(&self) -> u16 {
        u16::try_from(VIRTIO_ID_BLOCK).unwrap_or(2)
    }

    fn features(&self) -> u64 {
        let limits = &self.disk.limits;
        let mut bits = vec![
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_TOPOLOGY,
        ];
        if limits.read_only {
            bits.push(VIRTIO_BLK_F_RO);
        } else {
            bits.push(VIRTIO_BLK_F_CONFIG_WCE);
        }
        if self.queues > 1 {
            bits.push(VIRTIO_BLK_F_MQ);
        }
        if limits.discard {
            bits.push(VIRTIO_BLK_F_DISCARD);
        }
        if limits.write_zeroes {
            bits.push(VIRTIO_BLK_F_WRITE_ZEROES);
        }
        bits.into_iter().fold(0, |all, bit| all | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; usize::from(self.queues)]
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        for (at, byte) in (0u64..).zip(data.iter_mut()) {
            let place = offset.checked_add(at).and_then(|place| usize::try_from(place).ok());
            *byte = place.and_then(|place| space.get(place).copied()).unwrap_or(0);
        }
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        let Some(at) = WRITEBACK.checked_sub(offset).and_then(|at| usize::try_from(at).ok()) else { return };
        let Some(value) = data.get(at) else { return };
        if self.disk.limits.read_only || !self.has(VIRTIO_BLK_F_CONFIG_WCE) {
            return;
        }
        let writeback = *value & 1 != 0;
        if self.writeback && !writeback {
            // From now on a completed write is durable, which must include writes that are complete already. A queue's thread flushes: this
            // thread is a vCPU's.
            self.disk.want_flush();
            if let Some(kick) = &self.kick {
                signal(&**kick);
            }
        }
        self.writeback = writeback;
        self.apply_cache_mode();
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if !self.disk.image.claimed() {
            let other = std::io::Error::other("its image was handed over to another host");
            return Err(self.host("begin to serve requests", other));
        }
        self.features = activation.features;
        self.apply_cache_mode();
        self.kick = activation.queues.first().map(|active| Arc::clone(&active.kick));
        for active in activation.queues {
            let index = usize::from(active.index);
            let engine = match self.engines.get_mut(index).and_then(Option::take) {
                Some(engine) => engine,
                // Lost with a thread that panicked; created again.
                None => match new_engine(self.engine_choice, &self.disk.name) {
                    Ok((engine, _)) => engine,
                    Err(error) => {
                        return Err(self.host("set up its I/O engine", std::io::Error::other(error)));
                    }
                },
            };
            let ring = Ring::new(active, activation.features);
            let queue = BlockQueue::new(ring, Arc::clone(&self.disk), activation.memory.clone(), engine);
            let interrupt = Arc::clone(&activation.interrupt);
            let name = format!("{}-q{index}", self.disk.name);
            let worker =
                Worker::spawn(&name, Arc::clone(&activation.interrupt), queue, move |queue, poller| {
                    worker::run(queue, &*interrupt, poller)
                });
            match worker {
                Ok(worker) => self.workers.push(worker),
                Err(source) => return Err(self.host(&format!("start the thread {name}"), source)),
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError> {
        self.kick = None;
        let mut queues = Vec::new();
        let mut lost = None;
        for worker in std::mem::take(&mut self.workers) {
            let name = worker.name().to_owned();
            let Some(queue) = worker.stop() else {
                lost = Some(name);
                continue;
            };
            let (ring, engine) = queue.into_parts();
            let index = usize::from(ring.index());
            if let Some(slot) = self.engines.get_mut(index) {
                *slot = Some(engine);
            }
            queues.push(ring.into_active());
        }
        match lost {
            None => Ok(queues),
            Some(name) => {
                Err(self.host(&format!("stop the thread {name}"), std::io::Error::other("it had died")))
            }
        }
    }

    fn reset(&mut self) {
        self.writeback = true;
        self.features = 0;
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        let state = SavedBlock {
            capacity: self.disk.limits.capacity,
            serial: self.disk.serial,
            queues: self.queues,
            writeback: self.writeback,
            block_size: Some(self.disk.image.block_size),
        };
        let state = saved::encode(&state).map_err(|error| self.host("serialise its state", error))?;
        Ok(SavedDevice { version: SAVED_VERSION, state })
    }

    fn restored(self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError> {
        let name = self.disk.name.clone();
        let device = self.with_saved(saved).map_err(|reason| DeviceError::Saved { name, reason })?;
        Ok(Box::new(device))
    }

    fn settle(&self) -> Result<(), DeviceError> {
        let result = self.disk.image.settle();
        result.map_err(|error| self.host("make its image durable", std::io::Error::other(error)))
    }

    fn hand_over(&mut self) -> Result<(), DeviceError> {
        let result = self.disk.image.release();
        result.map_err(|error| self.host("give its image to another host", std::io::Error::other(error)))
    }

    fn take_over(&mut self) -> Result<(), DeviceError> {
        let result = self.disk.image.claim();
        result.map_err(|error| self.host("take its image", std::io::Error::other(error)))
    }

    fn announce(&self) -> Result<(), DeviceError> {
        // No peer outside of the host needs an announcement.
        Ok(())
    }

    fn inspect(&self) -> serde_json::Value {
        let image = &self.disk.image;
        json!({
            "path": image.path.display().to_string(),
            "format": if matches!(image.backend, Backend::Raw { .. }) { "raw" } else { "qcow2" },
            "engine": self.engine_name,
            "direct": matches!(&image.backend, Backend::Raw { direct: Some(_), .. }),
            "bytes": self.disk.limits.capacity * SECTOR,
            "block_size": image.block_size,
            "read_only": image.read_only,
            "locked": image.locked(),
            "write_cache": !self.disk.write_through(),
            "serial": String::from_utf8_lossy(&self.disk.serial).trim_end_matches('\0'),
            "queues": self.queues,
            "running": !self.workers.is_empty(),
            "counters": self.disk.counters.inspect(),
        })
    }
}

impl Block {
    fn host(&self, what: &str, source: std::io::Error) -> DeviceError {
        DeviceError::Host { name: self.disk.name.clone(), what: what.to_owned(), source }
    }
}
