//! An Ethernet segment within this process: a learning switch between devices and other ports.
//!
//! A frame's payload is copied as rarely as its offloads permit:
//!
//! | from device to | copies of the payload |
//! |---|---|
//! | one device, no offload, or one that accepts partial checksums | 1: the sender's buffers to the receiver's |
//! | one device, checksum offload | 2: the checksum is computed in between, while the bytes are in the cache |
//! | one device, segmentation | 3: as above, and each piece is assembled with its headers |
//! | a tap, or several ports | 1 into the daemon's memory, then 1 per receiver |
//!
//! The first 256 bytes are always copied into the daemon's memory: headers are read once, and only that copy is parsed and forwarded.
//!
//! A segment does nothing by itself. Its owner calls [`Segment::serve`] after a doorbell. Each call does a bounded amount of work, for all
//! ports in turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use dma::Dma;

use crate::counters::PortCounters;
use crate::device::Vmxnet3;
use crate::frame::{Offload, Piece};
use crate::mac::MacAddress;
use crate::switch::Switch;

mod companion;
mod delivery;
mod sending;

pub use companion::Companion;

/// Bytes of each packet that are always copied; they hold all headers.
const HEAD: usize = 256;
/// Limit of ports of a segment.
pub const PORTS_MAX: usize = 1024;
/// Limit of packets that a port sends per turn.
const TURN_PACKETS: usize = 64;
/// Limit of the cost of a port's turn, in bytes; one packet may exceed it.
const TURN_COST: usize = 256 << 10;
/// Additional cost of each frame of a segmented packet, in bytes.
const FRAME_COST: usize = 256;

/// Configuration of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentConfig {
    /// Name, for logs and the thread.
    pub name: String,
    /// Aging time: how long the address of a silent station is kept (bridges: 300 s).
    pub aging: Duration,
    /// Limit of frames that wait for a port whose guest has posted no buffers.
    pub waiting_frames: usize,
    /// Limit of bytes of those frames.
    pub waiting_bytes: usize,
}

impl SegmentConfig {
    /// Defaults: 300 s, 512 frames, 1 MiB.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            aging: Duration::from_secs(300),
            waiting_frames: 512,
            waiting_bytes: 1 << 20,
        }
    }
}

/// Rules of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortRules {
    /// The port may send from any source address, and receives frames for those addresses: for taps, and for guests that are bridges.
    /// Otherwise such frames are counted and dropped.
    pub any_source: bool,
    /// The port may receive frames with a partial checksum, reported as good. Saves a pass over the data, but a guest that forwards such
    /// frames sends them broken. Only for guests that are end stations.
    pub partial_checksums: bool,
}

/// A port that isn't a device.
pub trait FramePort: Send {
    /// Receives one frame into `frame` (empty before; at most [`LARGE_FRAME_MAX`] bytes). `None` when none waits.
    ///
    /// # Errors
    /// When receiving failed; the next call may succeed.
    fn receive(&mut self, frame: &mut Vec<u8>) -> io::Result<Option<Offload>>;

    /// Sends one frame. `offload` is one that the port [`FramePort::finishes`].
    ///
    /// # Errors
    /// `WouldBlock` when there is no room: the frame is dropped.
    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<()>;

    /// Whether the port computes checksums and segments by itself.
    fn finishes(&self) -> bool;

    /// A descriptor that is readable while a frame waits.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}

/// Why a port can't be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Its address is in use, or isn't a unicast address.
    #[error(
        "{mac} can't be the address of {name}: it is another port's, or is no station's; give it an own one"
    )]
    Address {
        /// Name of the port.
        name: String,
        /// Address of the port.
        mac: MacAddress,
    },
    /// The segment is full.
    #[error("Segment {segment} has {PORTS_MAX} ports, more are not possible")]
    Full {
        /// Name of the segment.
        segment: String,
    },
}

/// Identifier of a port in its segment, valid until it is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub(crate) usize);

/// A port in `inspect`.
#[derive(Debug, Clone)]
pub struct PortReport {
    /// Name of the port, as given when it was attached.
    pub name: String,
    /// Its own address, for devices.
    pub mac: Option<MacAddress>,
    /// Addresses learnt at the port.
    pub learnt: Vec<MacAddress>,
    /// Rules of the port.
    pub rules: PortRules,
    /// Traffic counters.
    pub counters: Arc<PortCounters>,
}

enum Link<M> {
    Device(Box<Vmxnet3<M>>),
    Frames(Box<dyn FramePort>),
}

struct Waiting {
    frame: Vec<u8>,
    good: bool,
}

struct Port<M> {
    name: String,
    rules: PortRules,
    counters: Arc<PortCounters>,
    link: Link<M>,
    /// Companion of a device.
    companion: Option<Box<dyn Companion>>,
    /// Frames that wait for the device's buffers.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Whether it may have more to send.
    ready: bool,
}

impl<M: Dma> Port<M> {
    fn device(&mut self) -> Option<&mut Vmxnet3<M>> {
        match &mut self.link {
            Link::Device(device) => Some(device),
            Link::Frames(_) => None,
        }
    }

    /// Whether it accepts a frame with a partial checksum.
    fn takes_partial(&self) -> bool {
        match &self.link {
            Link::Device(device) => self.rules.partial_checksums && device.checks_offloaded(),
            Link::Frames(port) => port.finishes(),
        }
    }

    /// Whether it accepts a frame that still needs segmentation.
    fn takes_large(&self) -> bool {
        match &self.link {
            Link::Device(_) => false,
            Link::Frames(port) => port.finishes(),
        }
    }
}

/// Buffers that are reused for each frame.
#[derive(Default)]
struct Scratch {
    pieces: Vec<Piece>,
    frame: Vec<u8>,
    segment: Vec<u8>,
    targets: Vec<usize>,
}

/// An Ethernet segment; see the module.
pub struct Segment<M> {
    config: SegmentConfig,
    switch: Switch,
    ports: Vec<Option<Port<M>>>,
    scratch: Scratch,
}

impl<M: Dma> Segment<M> {
    /// A segment without ports.
    #[must_use]
    pub fn new(config: SegmentConfig) -> Self {
        Self { switch: Switch::new(config.aging), config, ports: Vec::new(), scratch: Scratch::default() }
    }

    /// Name of the segment, as configured.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Adds a device, whose built-in address becomes the port's own.
    ///
    /// # Errors
    /// When the address is in use or the segment is full.
    pub fn attach_device(&mut self, device: Vmxnet3<M>, rules: PortRules) -> Result<PortId, AttachError> {
        let index = self.free_port()?;
        let (name, mac) = (device.config().name.clone(), device.config().mac);
        if !mac.is_unicast() || !self.switch.add_own(index, mac) {
            return Err(AttachError::Address { name, mac });
        }
        let counters = device.counters();
        Ok(self.place(index, name, rules, counters, Link::Device(Box::new(device))))
    }

    /// Adds another port, for instance a tap.
    ///
    /// # Errors
    /// When the segment is full.
    pub fn attach_port(
        &mut self,
        name: impl Into<String>,
        port: Box<dyn FramePort>,
        rules: PortRules,
    ) -> Result<PortId, AttachError> {
        let index = self.free_port()?;
        Ok(self.place(index, name.into(), rules, Arc::default(), Link::Frames(port)))
    }

    fn free_port(&mut self) -> Result<usize, AttachError> {
        if let Some(index) = self.ports.iter().position(Option::is_none) {
            return Ok(index);
        }
        if self.ports.len() >= PORTS_MAX {
            return Err(AttachError::Full { segment: self.config.name.clone() });
        }
        self.ports.push(None);
        Ok(self.ports.len() - 1)
    }

    fn place(
        &mut self,
        index: usize,
        name: String,
        rules: PortRules,
        counters: Arc<PortCounters>,
        link: Link<M>,
    ) -> PortId {
        self.ports[index] = Some(Port {
            name,
            rules,
            counters,
            link,
            companion: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            ready: true,
        });
        PortId(index)
    }

    /// Removes a port, and returns its device if it is one.
    pub fn detach(&mut self, id: PortId) -> Option<Vmxnet3<M>> {
        let port = self.ports.get_mut(id.0)?.take()?;
        self.switch.remove_port(id.0);
        match port.link {
            Link::Device(device) => Some(*device),
            Link::Frames(_) => None,
        }
    }

    /// The device at a port.
    pub fn device(&mut self, id: PortId) -> Option<&mut Vmxnet3<M>> {
        self.ports.get_mut(id.0)?.as_mut()?.device()
    }

    /// Sets the rules of a port.
    pub fn set_rules(&mut self, id: PortId, rules: PortRules) {
        if let Some(Some(port)) = self.ports.get_mut(id.0) {
            port.rules = rules;
        }
    }

    /// Records that frames wait at a port that isn't a device, or at a device's companion.
    pub fn readable(&mut self, id: PortId) {
        if let Some(Some(port)) = self.ports.get_mut(id.0) {
            port.ready = true;
        }
    }

    /// Reports all ports.
    #[must_use]
    pub fn report(&self) -> Vec<PortReport> {
        let mut reports: Vec<(usize, PortReport)> = self
            .ports
            .iter()
            .enumerate()
            .filter_map(|(index, port)| {
                let port = port.as_ref()?;
                let report = PortReport {
                    name: port.name.clone(),
                    mac: None,
                    learnt: Vec::new(),
                    rules: port.rules,
                    counters: Arc::clone(&port.counters),
                };
                Some((index, report))
            })
            .collect();
        for (address, port, own) in self.switch.stations() {
            if let Some((_, report)) = reports.iter_mut().find(|(index, _)| *index == port) {
                if own {
                    report.mac = Some(address);
                } else {
                    report.learnt.push(address);
                }
            }
        }
        reports.into_iter().map(|(_, report)| report).collect()
    }

    /// Whether frames wait for a guest's buffers. Then call [`Segment::serve`] every few milliseconds, since the guest's doorbell may have
    /// been lost in a race with the segment.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        self.ports.iter().flatten().any(|port| !port.waiting.is_empty())
    }

    /// Gives each port a turn: sends a bounded number of its packets, and delivers frames that wait for it. `now` is the time since any
    /// fixed moment. Returns whether more work is left.
    pub fn serve(&mut self, now: Duration) -> bool {
        self.switch.sweep(now);
        for index in 0..self.ports.len() {
            let Some(Some(port)) = self.ports.get_mut(index) else { continue };
            if let Some(device) = port.device()
                && device.take_kick()
            {
                port.ready = true;
            }
            self.flush(index);
            if self.ports[index].as_ref().is_some_and(|port| port.ready) {
                self.turn(index, now);
            }
        }
        let mut more = false;
        for port in self.ports.iter_mut().flatten() {
            more |= port.ready;
            if let Some(device) = port.device() {
                device.fire();
            }
        }
        more
    }
}
