//! Tests of the whole device with a mock driver as the guest.

mod data_path;
mod device;
mod hostile;
mod real_passt;
mod real_tap;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use machine::memory::GuestMemorySpace;
use virtio_bindings::virtio_net as b;
use virtio_devices_testbed::{self as testbed, MockDriver, MockInterrupt};

use super::header::{HEADER_LEN, VnetHeader};
use super::pair::PairBackend;
use super::{MacAddress, Net};
use crate::device::VirtioDevice;
use crate::fixtures;

pub(super) const OFFLOADS: u64 = 1 << b::VIRTIO_NET_F_CSUM
    | 1 << b::VIRTIO_NET_F_GUEST_CSUM
    | 1 << b::VIRTIO_NET_F_HOST_TSO4
    | 1 << b::VIRTIO_NET_F_HOST_TSO6
    | 1 << b::VIRTIO_NET_F_GUEST_TSO4
    | 1 << b::VIRTIO_NET_F_GUEST_TSO6;
pub(super) const MERGEABLE: u64 = 1 << b::VIRTIO_NET_F_MRG_RXBUF;

/// Guest memory behind the rings.
pub(super) const BUFFERS: u64 = 0x10_0000;

/// A guest with one network device.
pub(super) struct Guest {
    pub net: Net,
    pub space: GuestMemorySpace,
    pub receive: Vec<MockDriver>,
    pub transmit: Vec<MockDriver>,
    pub control: MockDriver,
    pub interrupt: Arc<MockInterrupt>,
    pub features: u64,
}

impl Guest {
    /// `net` must be inactive.
    pub fn new(net: Net, pairs: u16, features: u64) -> Self {
        let space = testbed::memory(&[(0, 16 << 20)]);
        let mut base = 0x1000;
        let mut driver = |index| {
            let driver = MockDriver::new(&space, index, 256, base, features);
            base += MockDriver::ring_bytes(256);
            driver
        };
        let receive = (0..pairs).map(|pair| driver(2 * pair)).collect();
        let transmit = (0..pairs).map(|pair| driver(2 * pair + 1)).collect();
        let control = driver(2 * pairs);
        Self {
            net,
            space: space.clone(),
            receive,
            transmit,
            control,
            interrupt: MockInterrupt::new(),
            features,
        }
    }

    /// A device over an in-process pair, and the other ends.
    pub fn paired(pairs: u16, features: u64) -> (Self, Vec<OwnedFd>) {
        let (net, others) = pair_device(pairs);
        (Self::new(net, pairs, testbed::RINGS | features), others)
    }

    pub fn activate(&mut self) {
        let mut drivers: Vec<&MockDriver> = self.receive.iter().chain(&self.transmit).collect();
        if self.features & 1 << b::VIRTIO_NET_F_CTRL_VQ != 0 {
            drivers.push(&self.control);
        }
        drivers.sort_by_key(|driver| driver.index);
        let activation = fixtures::activation(&self.space, self.features, &drivers, &self.interrupt);
        self.net.activate(activation).unwrap();
    }

    /// Stops and starts the device, as a pause does.
    pub fn pause_and_resume(&mut self) {
        let queues = self.net.stop().unwrap();
        let interrupt = Arc::clone(&self.interrupt);
        let activation = crate::device::Activation {
            memory: self.space.clone(),
            features: self.features,
            queues,
            interrupt,
        };
        self.net.activate(activation).unwrap();
    }

    /// Sends a frame from `address`; returns when the device has completed it.
    pub fn send(&mut self, header: VnetHeader, frame: &[u8]) {
        self.queue_frame(0, BUFFERS, header, frame);
        self.transmit[0].kick();
        self.transmit[0].wait_used();
    }

    /// Makes a frame available without waiting, the header in its own descriptor.
    pub fn queue_frame(&mut self, pair: usize, address: u64, header: VnetHeader, frame: &[u8]) {
        let driver = &mut self.transmit[pair];
        driver.put(address, &header.to_bytes());
        driver.put(address + HEADER_LEN as u64, frame);
        let length = u32::try_from(frame.len()).unwrap();
        let chain = [(address, 12, false), (address + HEADER_LEN as u64, length, false)];
        driver.push(&chain).unwrap();
    }

    /// Posts `count` receive buffers of `length` bytes from `address` on.
    pub fn post(&mut self, pair: usize, address: u64, count: u32, length: u32) {
        for at in 0..count {
            let at = address + u64::from(at) * u64::from(length);
            self.receive[pair].push(&[(at, length, true)]).unwrap();
        }
        self.receive[pair].kick();
    }

    pub fn counter(&self, name: &str) -> u64 {
        let values = self.net.inspect()["counters"].clone();
        values[name].as_u64().unwrap()
    }

    /// Waits until a counter has reached `value`.
    pub fn wait_counter(&self, name: &str, value: u64) {
        let start = Instant::now();
        while self.counter(name) < value {
            assert!(start.elapsed() < Duration::from_secs(10), "{name} stays at {}", self.counter(name));
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// A device over an in-process pair, and the other ends.
pub(super) fn pair_device(pairs: u16) -> (Net, Vec<OwnedFd>) {
    let (backend, others) = PairBackend::new(pairs, OFFLOADS).unwrap();
    let channels = backend.channels().unwrap();
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    (Net::with_backend("net0".to_owned(), Box::new(backend), channels, mac, Some(1500)), others)
}

/// A frame whose bytes depend on its number.
pub(super) fn frame(number: u32, length: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

/// Receives a message at the other end of a pair.
pub(super) fn other_receive(other: &OwnedFd) -> Option<(VnetHeader, Vec<u8>)> {
    let mut bytes = vec![0; 70_000];
    let start = Instant::now();
    loop {
        match rustix::io::read(other, &mut bytes) {
            Ok(length) => {
                let (header, frame) = bytes[..length].split_first_chunk::<HEADER_LEN>()?;
                return Some((VnetHeader::parse(header), frame.to_vec()));
            }
            Err(_) if start.elapsed() > Duration::from_secs(5) => return None,
            Err(_) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// Sends a message at the other end of a pair.
pub(super) fn other_send(other: &OwnedFd, header: VnetHeader, frame: &[u8]) {
    let mut message = header.to_bytes().to_vec();
    message.extend_from_slice(frame);
    assert_eq!(rustix::io::write(other, &message), Ok(message.len()));
}
