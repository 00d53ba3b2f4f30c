//! The control queue (virtio 1.2, 5.1.6.5) and the state that the driver sets by it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use machine::memory::{GuestAddressSpace, GuestMemory, GuestMemorySpace};
use telemetry::guest_log::GuestLog;
use virtio_bindings::virtio_net as b;

use super::backend::NetBackend;
use super::counters::Counters;
use super::header::has;
use super::mac::MacAddress;
use super::queue_pair::GuestError;
use crate::device::VirtioInterrupt;
use crate::queue::{self, Chain, Ring, total_len};
use crate::worker;

/// Features for frames that the guest accepts; `VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET` changes them.
pub const GUEST_OFFLOADS: u64 = 1 << b::VIRTIO_NET_F_GUEST_CSUM
    | 1 << b::VIRTIO_NET_F_GUEST_TSO4
    | 1 << b::VIRTIO_NET_F_GUEST_TSO6
    | 1 << b::VIRTIO_NET_F_GUEST_ECN
    | 1 << b::VIRTIO_NET_F_GUEST_UFO
    | 1 << b::VIRTIO_NET_F_GUEST_USO4
    | 1 << b::VIRTIO_NET_F_GUEST_USO6;

/// Number of commands served before the data queues are served again.
const BUDGET: usize = 16;
/// Limit of a command, header included, bytes: a table of some 2,700 addresses.
const COMMAND_MAX: usize = 16 * 1024;

/// State that the driver has set, apart from the rings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverState {
    /// The device's address in the configuration.
    pub mac: MacAddress,
    /// Bit n: `VIRTIO_NET_CTRL_RX` command n is on. Reported and saved; frames aren't filtered, which the specification leaves to the
    /// device.
    pub receive_modes: u8,
    /// Frames that the guest accepts; `None` until the first activation.
    pub offloads: Option<u64>,
    /// Link state in the configuration.
    pub link_up: bool,
    /// The driver should announce the guest, after a migration.
    pub announce: bool,
}

/// State shared by the device's threads and the transport's threads.
pub struct Shared {
    /// The back end.
    pub backend: Box<dyn NetBackend>,
    /// Traffic counters.
    pub counters: Arc<Counters>,
    /// Rate-limited log for messages that the guest can cause.
    pub log: Arc<GuestLog>,
    state: Mutex<DriverState>,
    active_pairs: AtomicU16,
}

impl Shared {
    /// State of a device with address `mac`, link up, one active pair.
    pub fn new(backend: Box<dyn NetBackend>, mac: MacAddress) -> Self {
        let state = DriverState { mac, receive_modes: 0, offloads: None, link_up: true, announce: false };
        Self {
            backend,
            counters: Arc::default(),
            log: Arc::default(),
            state: Mutex::new(state),
            active_pairs: AtomicU16::new(1),
        }
    }

    /// The driver's state.
    pub fn state(&self) -> MutexGuard<'_, DriverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of active queue pairs.
    pub fn active_pairs(&self) -> u16 {
        self.active_pairs.load(Ordering::SeqCst)
    }

    /// Sets the number of active queue pairs. A pair's thread finds its channel hung up only after it can see that the pair is inactive.
    pub fn set_active_pairs(&self, pairs: u16) -> std::io::Result<()> {
        let before = self.active_pairs.fetch_min(pairs, Ordering::SeqCst);
        if let Err(error) = self.backend.set_active_pairs(pairs) {
            self.active_pairs.store(before, Ordering::SeqCst);
            return Err(error);
        }
        self.active_pairs.store(pairs, Ordering::SeqCst);
        Ok(())
    }
}

/// The control queue, which the thread of pair 0 serves.
pub struct ControlQueue {
    ring: Ring,
    features: u64,
    pairs: u16,
    memory: GuestMemorySpace,
    shared: Arc<Shared>,
    /// Events that make the threads of all pairs check the number of active pairs.
    wakes: Vec<Arc<OwnedFd>>,
}

impl ControlQueue {
    /// `pairs` is the number of pairs that the device offers.
    pub fn new(
        ring: Ring,
        features: u64,
        pairs: u16,
        memory: GuestMemorySpace,
        shared: Arc<Shared>,
        wakes: Vec<Arc<OwnedFd>>,
    ) -> Self {
        Self { ring, features, pairs, memory, shared, wakes }
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Returns the ring.
    pub fn into_ring(self) -> Ring {
        self.ring
    }

    /// Serves up to 16 commands; returns whether more may wait. Empty the kick before.
    pub fn serve(&mut self, interrupt: &dyn VirtioInterrupt) -> Result<bool, GuestError> {
        let memory = self.memory.memory().into_inner();
        let mut more = true;
        for _ in 0..BUDGET {
            let Some(chain) = self.ring.pop(&memory)? else {
                if self.ring.enable_kicks(&memory)? {
                    continue;
                }
                more = false;
                break;
            };
            let served = self.answer(&memory, &chain).and_then(|written| {
                self.ring.complete(&memory, chain.head(), written)?;
                Ok(())
            });
            if let Err(error) = served {
                self.ring.undo_pop();
                return Err(error);
            }
        }
        if self.ring.should_interrupt(&memory)? {
            interrupt.queue(self.ring.index());
        }
        Ok(more)
    }

    /// Executes one command and writes its acknowledgement.
    fn answer(&self, memory: &GuestMemory, chain: &Chain) -> Result<u32, GuestError> {
        let counters = &self.shared.counters;
        let length = usize::try_from(total_len(chain.readable())).unwrap_or(usize::MAX);
        let acceptable = (2..=COMMAND_MAX).contains(&length) && !chain.writable().is_empty();
        let done = if acceptable {
            let mut command = vec![0; length];
            queue::read(memory, chain.readable(), 0, &mut command)?;
            self.run(command[0], command[1], &command[2..])
        } else {
            false
        };
        if done {
            counters.control_commands.increment();
        } else {
            counters.control_errs.increment();
            telemetry::guest_warn!(
                self.shared.log,
                "A control command of {length} bytes was refused; the queue offers {} active pairs at most",
                self.pairs
            );
        }
        if chain.writable().is_empty() {
            return Ok(0);
        }
        let ack = if done { b::VIRTIO_NET_OK } else { b::VIRTIO_NET_ERR };
        queue::write(memory, chain.writable(), 0, &[u8::try_from(ack).unwrap_or(u8::MAX)])?;
        Ok(1)
    }

    /// Executes a command; returns whether it succeeded. `data` is a copy.
    fn run(&self, class: u8, command: u8, data: &[u8]) -> bool {
        let (class, command) = (u32::from(class), u32::from(command));
        match class {
            b::VIRTIO_NET_CTRL_RX if has(self.features, b::VIRTIO_NET_F_CTRL_RX) => {
                let extra = command > b::VIRTIO_NET_CTRL_RX_ALLMULTI;
                if command > b::VIRTIO_NET_CTRL_RX_NOBCAST
                    || (extra && !has(self.features, b::VIRTIO_NET_F_CTRL_RX_EXTRA))
                {
                    return false;
                }
                let [on] = data else { return false };
                let bit = 1u8 << command;
                let modes = &mut self.shared.state().receive_modes;
                *modes = if *on == 0 { *modes & !bit } else { *modes | bit };
                true
            }
            b::VIRTIO_NET_CTRL_MAC => match command {
                b::VIRTIO_NET_CTRL_MAC_TABLE_SET => {
                    has(self.features, b::VIRTIO_NET_F_CTRL_RX) && mac_table_is_whole(data)
                }
                b::VIRTIO_NET_CTRL_MAC_ADDR_SET => {
                    let Ok(bytes) = <[u8; 6]>::try_from(data) else { return false };
                    let mac = MacAddress(bytes);
                    if !has(self.features, b::VIRTIO_NET_F_CTRL_MAC_ADDR) || !mac.is_unicast() {
                        return false;
                    }
                    self.shared.state().mac = mac;
                    true
                }
                _ => false,
            },
            b::VIRTIO_NET_CTRL_ANNOUNCE => {
                let asked = has(self.features, b::VIRTIO_NET_F_GUEST_ANNOUNCE)
                    && command == b::VIRTIO_NET_CTRL_ANNOUNCE_ACK;
                if asked {
                    self.shared.state().announce = false;
                }
                asked
            }
            b::VIRTIO_NET_CTRL_MQ => {
                let Ok(bytes) = <[u8; 2]>::try_from(data) else { return false };
                let pairs = u16::from_le_bytes(bytes);
                if !has(self.features, b::VIRTIO_NET_F_MQ)
                    || command != b::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET
                    || !(1..=self.pairs).contains(&pairs)
                {
                    return false;
                }
                self.set_pairs(pairs)
            }
            b::VIRTIO_NET_CTRL_GUEST_OFFLOADS => {
                let Ok(bytes) = <[u8; 8]>::try_from(data) else { return false };
                let offloads = u64::from_le_bytes(bytes);
                if !has(self.features, b::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)
                    || command != b::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET
                    || offloads & !(self.features & GUEST_OFFLOADS) != 0
                {
                    return false;
                }
                let mut state = self.shared.state();
                if let Err(error) = self.shared.backend.set_guest_offloads(offloads) {
                    telemetry::guest_warn!(self.shared.log, "Offloads {offloads:#x} can't be set: {error}");
                    return false;
                }
                state.offloads = Some(offloads);
                true
            }
            _ => false,
        }
    }

    fn set_pairs(&self, pairs: u16) -> bool {
        let result = self.shared.set_active_pairs(pairs);
        for wake in &self.wakes {
            worker::signal(&**wake);
        }
        if let Err(error) = &result {
            telemetry::guest_warn!(self.shared.log, "{pairs} queue pairs can't be activated: {error}");
        }
        result.is_ok()
    }
}

/// Whether `data` is a list of unicast addresses and a list of multicast addresses, each after its count.
fn mac_table_is_whole(data: &[u8]) -> bool {
    let mut rest = data;
    for _ in 0..2 {
        let Some((count, list)) = rest.split_first_chunk::<4>() else { return false };
        let bytes = usize::try_from(u32::from_le_bytes(*count)).ok().and_then(|count| count.checked_mul(6));
        let Some((_, after)) = bytes.and_then(|bytes| list.split_at_checked(bytes)) else { return false };
        rest = after;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::active_queue;
    use crate::net::pair::PairBackend;
    use proptest::prelude::*;
    use virtio_devices_testbed::{self as testbed, MockDriver};

    const ALL: u64 = testbed::RINGS
        | GUEST_OFFLOADS
        | 1 << b::VIRTIO_NET_F_CTRL_VQ
        | 1 << b::VIRTIO_NET_F_CTRL_RX
        | 1 << b::VIRTIO_NET_F_CTRL_MAC_ADDR
        | 1 << b::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
        | 1 << b::VIRTIO_NET_F_GUEST_ANNOUNCE
        | 1 << b::VIRTIO_NET_F_MQ;

    fn control(features: u64) -> (ControlQueue, MockDriver) {
        let space = testbed::memory(&[(0, 0x40000)]);
        let driver = MockDriver::new(&space, 8, 16, 0x1000, features);
        let (backend, _) = PairBackend::new(4, 0).unwrap();
        let shared = Arc::new(Shared::new(Box::new(backend), MacAddress([2, 0, 0, 0, 0, 1])));
        let ring = Ring::new(active_queue(&driver), features);
        (ControlQueue::new(ring, features, 4, space, shared, Vec::new()), driver)
    }

    fn command(control: &mut ControlQueue, driver: &mut MockDriver, bytes: &[u8]) -> u8 {
        driver.put(0x20000, bytes);
        driver.put(0x30000, &[0xff]);
        let length = u32::try_from(bytes.len()).unwrap();
        driver.push(&[(0x20000, length, false), (0x30000, 1, true)]).unwrap();
        control.serve(&*testbed::MockInterrupt::new()).unwrap();
        assert_eq!(driver.pop_used().unwrap().1, 1);
        driver.get(0x30000, 1)[0]
    }

    #[test]
    fn commands_change_the_state_that_the_configuration_shows() {
        let (mut control, mut driver) = control(ALL);
        assert_eq!(command(&mut control, &mut driver, &[4, 0, 3, 0]), 0);
        assert_eq!(control.shared.active_pairs(), 3);
        assert_eq!(command(&mut control, &mut driver, &[1, 1, 2, 1, 2, 3, 4, 5]), 0);
        assert_eq!(control.shared.state().mac, MacAddress([2, 1, 2, 3, 4, 5]));
        assert_eq!(command(&mut control, &mut driver, &[0, 0, 1]), 0);
        assert_eq!(control.shared.state().receive_modes, 1);
        control.shared.state().announce = true;
        assert_eq!(command(&mut control, &mut driver, &[3, 0]), 0);
        assert!(!control.shared.state().announce);
        assert_eq!(command(&mut control, &mut driver, &[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]), 0);
        assert_eq!(control.shared.state().offloads, Some(2));
    }

    #[test]
    fn what_is_out_of_range_or_not_negotiated_is_refused() {
        let (mut control, mut driver) = control(ALL);
        for bad in [
            &[4, 0, 0, 0][..],               // no pair
            &[4, 0, 5, 0],                   // more pairs than there are
            &[4, 0, 1],                      // too short
            &[1, 1, 3, 1, 2, 3, 4, 5],       // a multicast address
            &[0, 4, 1],                      // CTRL_RX_EXTRA wasn't negotiated
            &[5, 0, 0, 0, 0, 0, 0, 0, 0, 1], // unknown offloads
            &[1, 0, 255, 255, 255, 255],     // table of 4 billion addresses
            &[9, 9],
        ] {
            assert_eq!(command(&mut control, &mut driver, bad), 1, "{bad:?}");
        }
        assert_eq!(control.shared.active_pairs(), 1);
        assert_eq!(control.shared.counters.control_errs.get(), 8);
    }

    proptest! {
        #[test]
        fn any_command_is_acknowledged_or_refused(bytes in prop::collection::vec(any::<u8>(), 1..300)) {
            let (mut control, mut driver) = control(ALL);
            let ack = command(&mut control, &mut driver, &bytes);
            prop_assert!(ack <= 1);
            prop_assert!((1..=4).contains(&control.shared.active_pairs()));
        }
    }
}
