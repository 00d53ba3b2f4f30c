//! An Ethernet segment within this process: a learning switch between devices and other ports.
//!
//! A frame's bytes are copied as rarely as what is to be done with it allows:
//!
//! | from device to | copies of the payload |
//! |---|---|
//! | one device, nothing to be done, or the checksum may stay undone | 1: the sender's buffers to the receiver's |
//! | one device, checksum to be made | 2: the checksum is made in between, while the bytes are in the cache |
//! | one device, to be segmented | 3: as above, and each piece is put together with its headers |
//! | a tap, or several ports | 1 into our memory, then 1 per receiver |
//!
//! The first 256 bytes always go through our memory: headers are read once, and only that copy is looked at and
//! sent on.
//!
//! A segment does nothing by itself: [`Segment::serve`] is called when a doorbell rang, and always does a bounded
//! amount of work, for all ports in turn.

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

/// Bytes of each packet that are always copied: all headers lie in them.
const HEAD: usize = 256;
/// Most ports of a segment.
pub const PORTS_MAX: usize = 1024;
/// Packets that a port may send before the next one has its turn.
const TURN_PACKETS: usize = 64;
/// Cost that a port may cause before the next one has its turn; one packet may exceed it. A byte costs 1.
const TURN_COST: usize = 256 << 10;
/// What each frame that a packet is cut into costs besides.
const FRAME_COST: usize = 256;

/// What a segment is made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentConfig {
    /// Name, for logs and the thread.
    pub name: String,
    /// How long a silent station is remembered (bridges: 300 s).
    pub aging: Duration,
    /// Most frames that wait for a port whose guest has posted no buffers.
    pub waiting_frames: usize,
    /// Most bytes of those frames.
    pub waiting_bytes: usize,
}

impl SegmentConfig {
    /// The usual: 300 s, 512 frames, 1 MiB.
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

/// What a port may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortRules {
    /// It may send from addresses that aren't its own, and is sent what goes to them: for taps, and for guests that
    /// are bridges. Otherwise such frames are counted and dropped.
    pub any_source: bool,
    /// It may be given frames whose checksum was left undone by their sender, told that it is good. Saves a pass
    /// over the data, but a guest that forwards such frames to somebody else sends them on broken. Only for guests
    /// that are end stations.
    pub partial_checksums: bool,
}

/// A port that isn't a device of ours.
pub trait FramePort: Send {
    /// Receives one frame into `frame` (cleared before; at most [`LARGE_FRAME_MAX`] bytes). `None` when none waits.
    ///
    /// # Errors
    /// When receiving failed; the next call may succeed.
    fn receive(&mut self, frame: &mut Vec<u8>) -> io::Result<Option<Offload>>;

    /// Sends one frame. `offload` is one that it [`FramePort::finishes`].
    ///
    /// # Errors
    /// `WouldBlock` when there is no room: the frame is dropped.
    fn send(&mut self, frame: &[u8], offload: Offload) -> io::Result<()>;

    /// Whether it makes checksums and segments itself.
    fn finishes(&self) -> bool;

    /// What becomes readable when a frame waits.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}

/// A port can't be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Its address is taken, or is none.
    #[error(
        "{mac} can't be the address of {name}: it is another port's, or is no station's; give it an own one"
    )]
    Address {
        /// The port.
        name: String,
        /// The address.
        mac: MacAddress,
    },
    /// The segment is full.
    #[error("Segment {segment} has {PORTS_MAX} ports, more are not possible")]
    Full {
        /// The segment.
        segment: String,
    },
}

/// A port's place in its segment, valid until it is detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub(crate) usize);

/// A port as `inspect` shows it.
#[derive(Debug, Clone)]
pub struct PortReport {
    /// Name.
    pub name: String,
    /// Its own address, for devices.
    pub mac: Option<MacAddress>,
    /// Addresses learnt behind it.
    pub learnt: Vec<MacAddress>,
    /// What it may do.
    pub rules: PortRules,
    /// Traffic.
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
    /// Beside a device.
    companion: Option<Box<dyn Companion>>,
    /// For devices without buffers.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// It may have more to send.
    ready: bool,
}

impl<M: Dma> Port<M> {
    fn device(&mut self) -> Option<&mut Vmxnet3<M>> {
        match &mut self.link {
            Link::Device(device) => Some(device),
            Link::Frames(_) => None,
        }
    }

    /// Whether it takes a frame whose checksum is still to be made.
    fn takes_partial(&self) -> bool {
        match &self.link {
            Link::Device(device) => self.rules.partial_checksums && device.checks_offloaded(),
            Link::Frames(port) => port.finishes(),
        }
    }

    /// Whether it takes a frame that is still to be segmented.
    fn takes_large(&self) -> bool {
        match &self.link {
            Link::Device(_) => false,
            Link::Frames(port) => port.finishes(),
        }
    }
}

/// Buffers that are used again for each frame.
#[derive(Default)]
struct Scratch {
    pieces: Vec<Piece>,
    frame: Vec<u8>,
    segment: Vec<u8>,
    targets: Vec<usize>,
}

/// See the module.
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

    /// Name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Plugs a device in. Its built-in address becomes the port's own.
    ///
    /// # Errors
    /// When the address or the segment is taken.
    pub fn attach_device(&mut self, device: Vmxnet3<M>, rules: PortRules) -> Result<PortId, AttachError> {
        let index = self.free_port()?;
        let (name, mac) = (device.config().name.clone(), device.config().mac);
        if !mac.is_unicast() || !self.switch.add_own(index, mac) {
            return Err(AttachError::Address { name, mac });
        }
        let counters = device.counters();
        Ok(self.place(index, name, rules, counters, Link::Device(Box::new(device))))
    }

    /// Plugs something else in, for instance a tap.
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

    /// Unplugs a port and gives its device back, if it is one.
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

    /// Changes what a port may do.
    pub fn set_rules(&mut self, id: PortId, rules: PortRules) {
        if let Some(Some(port)) = self.ports.get_mut(id.0) {
            port.rules = rules;
        }
    }

    /// Frames wait at a port that isn't a device, or at a device's companion.
    pub fn readable(&mut self, id: PortId) {
        if let Some(Some(port)) = self.ports.get_mut(id.0) {
            port.ready = true;
        }
    }

    /// All ports.
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

    /// Whether frames wait for a guest's buffers: then [`Segment::serve`] should be called from time to time (some
    /// milliseconds), in case that the guest's doorbell was lost to a race between it and us.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        self.ports.iter().flatten().any(|port| !port.waiting.is_empty())
    }

    /// Gives each port a turn: sends up to a bounded number of its packets, delivers what waited for it. `now` is
    /// the time since any fixed moment. Returns whether more is left to do now.
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

#[cfg(test)]
mod tests;
