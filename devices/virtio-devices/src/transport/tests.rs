//! The transport with a driver that follows the rules, one that doesn't, and the contract of PCI functions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use machine::memory::{GuestAddressSpace, GuestMemorySpace};
use pci::function::PciFunction;
use pci::interrupt::Msi;
use pci_testbed::{FakeLine, FakeMsi};
use virtio_devices_testbed::{COMMON, DEVICE, ISR, MockDriver, PciDriver, RINGS, memory};

use super::VirtioPciFunction;
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice, VirtioInterrupt};
use crate::queue::Ring;
use crate::worker::{Interest, Poller, Wake, Worker};

/// Completes every chain with no bytes written; its configuration is 8 writable bytes.
struct Echo {
    queues: Vec<u16>,
    config: [u8; 8],
    features: u64,
    workers: Vec<Worker<(Ring, GuestMemorySpace)>>,
    /// Whether activation fails.
    broken: bool,
    served: Arc<AtomicU64>,
    interrupt: Arc<Mutex<Option<Arc<dyn VirtioInterrupt>>>>,
}

impl Echo {
    fn new(queues: &[u16]) -> Self {
        Self {
            queues: queues.to_vec(),
            config: *b"virtio!!",
            features: RINGS,
            workers: Vec::new(),
            broken: false,
            served: Arc::default(),
            interrupt: Arc::default(),
        }
    }
}

fn serve(
    (ring, space): &mut (Ring, GuestMemorySpace),
    interrupt: &dyn VirtioInterrupt,
    served: &AtomicU64,
    poller: &Poller,
) -> Result<(), String> {
    poller.add(ring.kick(), 0, Interest::READ).map_err(|error| error.to_string())?;
    let mut ready = Vec::new();
    while poller.wait(&mut ready, None).map_err(|error| error.to_string())? != Wake::Stop {
        ring.drain_kick();
        let memory = space.memory();
        loop {
            while let Some(chain) = ring.pop(&memory).map_err(|error| error.to_string())? {
                ring.complete(&memory, chain.head(), 0).map_err(|error| error.to_string())?;
                served.fetch_add(1, Ordering::SeqCst);
            }
            if ring.should_interrupt(&memory).map_err(|error| error.to_string())? {
                interrupt.queue(ring.index());
            }
            if !ring.enable_kicks(&memory).map_err(|error| error.to_string())? {
                break;
            }
        }
    }
    Ok(())
}

impl VirtioDevice for Echo {
    fn name(&self) -> &str {
        "echo0"
    }
    fn device_id(&self) -> u16 {
        4
    }
    fn features(&self) -> u64 {
        self.features
    }
    fn queue_sizes(&self) -> Vec<u16> {
        self.queues.clone()
    }
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = usize::try_from(at).ok().and_then(|at| self.config.get(at).copied()).unwrap_or(0);
        }
    }
    fn config_write(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(place) = usize::try_from(at).ok().and_then(|at| self.config.get_mut(at)) {
                *place = *byte;
            }
        }
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if self.broken {
            let source = std::io::Error::other("it is broken");
            return Err(DeviceError::Host { name: "echo0".to_owned(), what: "start".to_owned(), source });
        }
        *self.interrupt.lock().unwrap() = Some(Arc::clone(&activation.interrupt));
        for active in activation.queues {
            let (interrupt, served) = (Arc::clone(&activation.interrupt), Arc::clone(&self.served));
            let state = (Ring::new(active, activation.features), activation.memory.clone());
            let worker = Worker::spawn("echo", Arc::clone(&interrupt), state, move |state, poller| {
                serve(state, &*interrupt, &served, poller)
            });
            self.workers.push(worker.unwrap());
        }
        Ok(())
    }
    fn stop(&mut self) -> Result<Vec<ActiveQueue>, DeviceError> {
        Ok(self.workers.drain(..).map(|worker| worker.stop().unwrap().0.into_active()).collect())
    }
    fn reset(&mut self) {
        self.config = *b"virtio!!";
    }
    fn save(&self) -> Result<SavedDevice, DeviceError> {
        Ok(SavedDevice { version: 1, state: self.config.to_vec() })
    }
    fn restored(mut self: Box<Self>, saved: &SavedDevice) -> Result<Box<dyn VirtioDevice>, DeviceError> {
        let Ok(config) = saved.state.as_slice().try_into() else {
            let reason = "8 bytes are the configuration".to_owned();
            return Err(DeviceError::Saved { name: "echo0".to_owned(), reason });
        };
        self.config = config;
        Ok(self)
    }
    fn settle(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn hand_over(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn take_over(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn announce(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn inspect(&self) -> serde_json::Value {
        serde_json::json!({ "served": self.served.load(Ordering::SeqCst) })
    }
}

struct Machine {
    space: GuestMemorySpace,
    driver: PciDriver<VirtioPciFunction>,
    served: Arc<AtomicU64>,
    interrupt: Arc<Mutex<Option<Arc<dyn VirtioInterrupt>>>>,
}

fn machine(queues: &[u16]) -> Machine {
    let space = memory(&[(0, 1 << 20)]);
    let echo = Echo::new(queues);
    let (served, interrupt) = (Arc::clone(&echo.served), Arc::clone(&echo.interrupt));
    let msi = FakeMsi::new();
    let function = VirtioPciFunction::new(Box::new(echo), space.clone(), &*msi).unwrap();
    Machine { space, driver: PciDriver::new(function, msi), served, interrupt }
}

fn new_function() -> Arc<dyn PciFunction> {
    machine(&[16, 16]).driver.function
}

pci_testbed::pci_function_contract!(contract, new_function);

fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed().as_secs() < 10, "{what} did not happen");
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
}

/// A driver can reset and start a device that fails to start any number of times without filling the log.
#[test]
fn what_a_driver_makes_a_device_log_has_a_limit() {
    const STARTS: usize = 2000;
    let space = memory(&[(0, 1 << 20)]);
    let echo = Echo { broken: true, ..Echo::new(&[16]) };
    let msi = FakeMsi::new();
    let function = VirtioPciFunction::new(Box::new(echo), space.clone(), &*msi).unwrap();
    let driver = PciDriver::new(function, msi);
    let queue = MockDriver::new(&space, 0, 16, 0x1_0000, RINGS);
    let lines = log_capture::lines_of(|| {
        for _ in 0..STARTS {
            assert!(!driver.start(RINGS, &[&queue]));
        }
    });
    let told = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    for text in ["did not start", "has failed and needs a reset"] {
        // A burst, and then one a second.
        assert!((10..STARTS / 2).contains(&told(text)), "{text}: {} lines", told(text));
    }
}

/// The structures that Linux requires: vendor, device, revision, class, and five structures inside BAR 0.
#[test]
fn the_capabilities_lead_to_the_structures() {
    let machine = machine(&[16]);
    let function = &machine.driver.function;
    let mut header = [0; 4];
    function.config_read(0, &mut header);
    assert_eq!(header, [0xF4, 0x1A, 0x44, 0x10]);
    let mut found = Vec::new();
    let mut at = {
        let mut byte = [0];
        function.config_read(0x34, &mut byte);
        byte[0]
    };
    while at != 0 {
        let mut capability = [0; 16];
        for (index, byte) in (0u16..).zip(capability.iter_mut()) {
            function.config_read(u16::from(at) + index, std::slice::from_mut(byte));
        }
        if capability[0] == 9 {
            let offset = u32::from_le_bytes(capability[8..12].try_into().unwrap());
            found.push((capability[3], capability[4], offset));
        }
        at = capability[1];
    }
    assert_eq!(found, [(1, 0, 0), (3, 0, 0x1000), (4, 0, 0x2000), (2, 0, 0x3000), (5, 0, 0)]);
}

/// A driver that follows the rules gets its buffers completed, with one MSI-X interrupt on the queue's vector.
#[test]
fn a_chain_makes_the_round_trip_with_msix() {
    let machine = machine(&[16, 16]);
    let mut queue = MockDriver::new(&machine.space, 1, 16, 0x1_0000, RINGS);
    machine.driver.enable_msix();
    assert!(machine.driver.start(RINGS, &[&queue]));
    queue.push(&[(0x8000, 16, false)]).unwrap();
    machine.driver.notify(1);
    // The interrupt first: consuming the element advances `used_event`, and the device then sends none.
    let vectors = machine.driver.msi.vectors();
    wait("the interrupt", || vectors[1].count() == 1);
    queue.wait_used();
    assert_eq!(vectors[0].count(), 0);
    assert_eq!(vectors[1].sent()[0].data, 1);
}

/// Without MSI-X the ISR status has the cause, and reading it deasserts the wire.
#[test]
fn intx_is_level_triggered_and_cleared_by_reading_the_isr() {
    let machine = machine(&[16]);
    let line = FakeLine::new();
    machine.driver.function.attach_intx(line.clone());
    let mut queue = MockDriver::new(&machine.space, 0, 16, 0x1_0000, RINGS);
    assert!(machine.driver.start(RINGS, &[&queue]));
    queue.push(&[(0x8000, 16, true)]).unwrap();
    machine.driver.notify(0);
    // The interrupt first: consuming the element advances `used_event`, and the device then sends none.
    wait("the interrupt", || line.asserted());
    queue.wait_used();
    assert_eq!(machine.driver.read::<1>(ISR), [1]);
    assert!(!line.asserted());
    assert_eq!(machine.driver.read::<1>(ISR), [0]);
    let interrupt = machine.interrupt.lock().unwrap().clone().unwrap();
    let before = machine.driver.read::<1>(COMMON + 0x15);
    interrupt.config();
    assert!(line.asserted());
    assert_eq!(machine.driver.read::<1>(ISR), [2]);
    assert_ne!(machine.driver.read::<1>(COMMON + 0x15), before, "the generation moves on");
}

/// No kick and no completion is lost over many pauses, at whatever moment.
#[test]
fn pauses_lose_nothing() {
    const CHAINS: u64 = 2000;
    let machine = machine(&[16]);
    let mut queue = MockDriver::new(&machine.space, 0, 16, 0x1_0000, RINGS);
    machine.driver.enable_msix();
    assert!(machine.driver.start(RINGS, &[&queue]));
    let function = Arc::clone(&machine.driver.function);
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = Arc::clone(&done);
    let pauser = std::thread::spawn(move || {
        while !stop.load(Ordering::SeqCst) {
            function.quiesce().unwrap();
            function.unquiesce().unwrap();
            std::thread::yield_now();
        }
    });
    let mut outstanding = 0;
    let mut sent = 0;
    let mut received = 0;
    let start = std::time::Instant::now();
    while received < CHAINS {
        while sent < CHAINS && outstanding < 16 && queue.push(&[(0x8000, 16, false)]).is_some() {
            machine.driver.notify(0);
            sent += 1;
            outstanding += 1;
        }
        while queue.pop_used().is_some() {
            received += 1;
            outstanding -= 1;
        }
        assert!(start.elapsed().as_secs() < 60, "{received} of {sent} chains came back");
    }
    done.store(true, Ordering::SeqCst);
    pauser.join().unwrap();
    assert_eq!(machine.served.load(Ordering::SeqCst), CHAINS);
}

/// A restored function continues in another function, and serves the chains that were available.
#[test]
fn a_saved_function_goes_on_elsewhere() {
    let machine = machine(&[16]);
    let mut queue = MockDriver::new(&machine.space, 0, 16, 0x1_0000, RINGS);
    machine.driver.enable_msix();
    assert!(machine.driver.start(RINGS, &[&queue]));
    queue.push(&[(0x8000, 16, false)]).unwrap();
    machine.driver.notify(0);
    queue.wait_used();
    machine.driver.write(DEVICE, &[7]);
    let function = &machine.driver.function;
    assert!(function.save().is_err(), "a running function isn't saved");
    function.quiesce().unwrap();
    // Made available during the pause: the restored function serves it.
    queue.push(&[(0x8000, 16, false)]).unwrap();
    machine.driver.notify(0);
    let saved = function.save().unwrap();
    assert_eq!(saved.kind, "virtio-rng");

    let device = VirtioPciFunction::saved_device(&saved).unwrap();
    let mut echo = Echo::new(&[16]);
    echo.config.copy_from_slice(&device.state);
    let msi = FakeMsi::new();
    let other = VirtioPciFunction::restore(Box::new(echo), machine.space.clone(), &*msi, &saved).unwrap();
    assert_eq!(other.save().unwrap(), saved, "what is restored saves to the same");
    let other = PciDriver::new(other, msi);
    other.function.unquiesce().unwrap();
    wait("the interrupt", || other.msi.vectors()[0].count() == 1);
    queue.wait_used();
    assert_eq!(other.read::<1>(DEVICE), [7]);
    assert_eq!(other.status(), 0xF);
}

/// A saved state of another device, a damaged one, or one with missing features is refused with a reason.
#[test]
fn unfitting_saved_state_is_refused() {
    let machine = machine(&[16]);
    machine.driver.negotiate(RINGS);
    machine.driver.function.quiesce().unwrap();
    let saved = machine.driver.function.save().unwrap();
    let restore = |echo: Echo, saved: &pci::function::SavedFunction| {
        let msi = FakeMsi::new();
        VirtioPciFunction::restore(Box::new(echo), machine.space.clone(), &*msi as &dyn Msi, saved)
            .err()
            .map(|error| error.to_string())
    };
    assert_eq!(restore(Echo::new(&[16]), &saved), None);
    assert!(restore(Echo::new(&[32]), &saved).unwrap().contains("other queues"));
    let mut fewer = Echo::new(&[16]);
    fewer.features = 1 << 32;
    assert!(restore(fewer, &saved).unwrap().contains("features"));
    let mut later = saved.clone();
    later.version = 99;
    assert!(restore(Echo::new(&[16]), &later).unwrap().contains("version 99"));
    for cut in 0..saved.state.len() {
        let mut damaged = saved.clone();
        damaged.state.truncate(cut);
        assert!(restore(Echo::new(&[16]), &damaged).is_some(), "cut at {cut}");
    }
}

/// A ring outside of RAM stops the device with DEVICE_NEEDS_RESET and a reason; after a reset it works again.
#[test]
fn a_broken_ring_fails_the_device_until_it_is_reset() {
    let machine = machine(&[16]);
    machine.driver.enable_msix();
    let mut queue = MockDriver::new(&machine.space, 0, 16, 0x1_0000, RINGS);
    machine.driver.negotiate(RINGS);
    machine.driver.set_config_vector(1);
    machine.driver.set_queue(&queue);
    machine.driver.set_status(4);
    queue.set_available_index(17);
    machine.driver.notify(0);
    wait("the failure", || machine.driver.status() & 0x40 != 0);
    wait("the interrupt", || machine.driver.msi.vectors()[1].count() == 1);
    let failure = machine.driver.function.inspect()["failure"].as_str().unwrap().to_owned();
    assert!(failure.contains("available index"), "{failure}");

    machine.driver.set_status(0);
    assert_eq!(machine.driver.status(), 0);
    queue = MockDriver::new(&machine.space, 0, 16, 0x2_0000, RINGS);
    assert!(machine.driver.start(RINGS, &[&queue]));
    queue.push(&[(0x8000, 16, false)]).unwrap();
    machine.driver.notify(0);
    queue.wait_used();
}

/// The PCI configuration access capability reaches the same registers as the BAR (4.1.4.9).
#[test]
fn the_configuration_window_reaches_the_bar() {
    let machine = machine(&[16]);
    let function = &machine.driver.function;
    // The last of the vendor-specific capabilities; five of them precede PCI Express.
    let window = (0x40u16..0x100)
        .step_by(4)
        .find(|at| {
            let mut head = [0; 4];
            function.config_read(*at, &mut head);
            head[0] == 9 && head[3] == 5
        })
        .unwrap();
    let set = |offset: u32, len: u32| {
        function.config_write(window + 4, &[0]);
        function.config_write(window + 8, &offset.to_le_bytes());
        function.config_write(window + 12, &len.to_le_bytes());
    };
    set(0x2000, 4);
    let mut data = [0; 4];
    function.config_read(window + 16, &mut data);
    assert_eq!(&data, b"virt");
    function.config_write(window + 16, b"VIRT");
    assert_eq!(machine.driver.read::<8>(DEVICE), *b"VIRTio!!");
    // Invalid lengths and offsets have no effect.
    for (offset, len) in [(0x2000, 3), (0x2001, 2), (0x7FFF, 2), (u32::MAX, 4), (0x2000, 0)] {
        set(offset, len);
        function.config_write(window + 16, &[0xEE; 4]);
    }
    assert_eq!(machine.driver.read::<8>(DEVICE), *b"VIRTio!!");
}

/// The machine's reset clears everything, even with work in progress.
#[test]
fn a_machine_reset_in_the_middle_of_work() {
    let machine = machine(&[16]);
    for round in 0..50 {
        let mut queue = MockDriver::new(&machine.space, 0, 16, 0x1_0000 + (round % 2) * 0x1_0000, RINGS);
        queue.set_available_index(0);
        machine.space.memory();
        queue.put(queue.used_ring(), &[0; 4]);
        machine.driver.enable_msix();
        assert!(machine.driver.start(RINGS, &[&queue]));
        for _ in 0..8 {
            queue.push(&[(0x8000, 16, false)]).unwrap();
        }
        machine.driver.notify(0);
        machine.driver.function.reset().unwrap();
        assert_eq!(machine.driver.status(), 0);
        assert_eq!(machine.driver.function.places()[0].address, None);
    }
}
