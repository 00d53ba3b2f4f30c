//! The function with servers in this process: the contract of PCI functions, and behavior that is specific to servers.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pci::function::{BarKind, FunctionError, PciFunction};
use pci::interrupt::{InterruptError, Msi, MsiMessage, MsiVector};
use pci::registers::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY};
use pci_testbed::{FakeLine, FakeMsi};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_user_device::{TEST_DEVICE_ID, TestDevice, TestEvent, TestServer};
use vfio_user_protocol::client::Client;
use vfio_user_protocol::doorbell_mode::DoorbellMode;

use super::*;
use crate::vfio_user::connector::Connector;

mod nic;
mod recovery;

/// Returns prepared connections. Without one, the server counts as down.
#[derive(Default)]
struct Prepared {
    streams: Mutex<Vec<UnixStream>>,
    asked: AtomicUsize,
}

impl Connector for Arc<Prepared> {
    fn connect(&self) -> Result<Client, VfioUserError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let stream = lock(&self.streams).pop();
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| VfioUserError::Server {
            target: self.target(),
            source,
        };
        let stream = stream.ok_or_else(|| failed("nobody listens".into()))?;
        Client::from_stream(stream, Duration::from_secs(5)).map_err(|error| failed(error.into()))
    }

    fn target(&self) -> String {
        "a test".to_owned()
    }

    fn migration_committed(&self) {}
}

/// 1 MiB at 0 and 1 MiB at 4 GiB, in one file.
fn ram() -> Vec<DmaRange> {
    let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 << 20).unwrap();
    let file = Arc::new(File::from(file));
    [(0, 0), (1 << 20, 1 << 32)]
        .map(|(offset, address)| DmaRange { file: Arc::clone(&file), offset, address, size: 1 << 20 })
        .to_vec()
}

/// A function, its device, and their test doubles.
struct Served {
    function: Arc<VfioUserFunction>,
    device: Arc<TestDevice>,
    msi: Arc<FakeMsi>,
    prepared: Arc<Prepared>,
    refreshed: Arc<AtomicUsize>,
    server: Option<TestServer>,
}

fn serve(device: Arc<TestDevice>) -> Served {
    let (stream, server) = device.serve_pair();
    let prepared = Arc::new(Prepared::default());
    lock(&prepared.streams).push(stream);
    let opened = OpenedFunction::open("dev0", Box::new(Arc::clone(&prepared))).unwrap();
    let msi = FakeMsi::new();
    let function = VfioUserFunction::new(opened, ram(), msi.as_ref()).unwrap();
    let refreshed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&refreshed);
    let refresh = Box::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    function.start(refresh, Arc::new(|| {})).unwrap();
    Served { function, device, msi, prepared, refreshed, server: Some(server) }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Served {
    fn config_u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.function.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write_command(&self, command: u16) {
        self.function.config_write(COMMAND, &command.to_le_bytes());
    }

    /// Gives a vector a message and sets its mask.
    fn set_vector(&self, vector: u64, masked: bool) {
        let at = 16 * vector;
        self.function.bar_write(4, at, &0xFEE0_0000_u64.to_le_bytes());
        self.function.bar_write(4, at + 8, &(0x40 + u32::try_from(vector).unwrap()).to_le_bytes());
        self.function.bar_write(4, at + 12, &u32::from(masked).to_le_bytes());
    }

    fn enable_msix(&self, on: bool) {
        let control: u16 = if on { 0x8000 } else { 0 };
        self.function.config_write(0x42, &control.to_le_bytes());
    }

    fn sent(&self, vector: usize) -> usize {
        self.msi.vectors()[vector].count()
    }
}

fn contract() -> Arc<dyn PciFunction> {
    // The server's thread ends with the connection, and so with the function.
    let mut served = serve(TestDevice::new());
    std::mem::forget(served.server.take());
    served.function
}

pci_testbed::pci_function_contract!(keeps_the_contract_of_pci_functions, super::contract);

#[test]
fn the_guest_sees_the_servers_device() {
    let served = serve(TestDevice::new());
    assert_eq!(served.config_u32(0), TEST_DEVICE_ID);
    assert_eq!(served.config_u32(8), 0xFF00_0003);
    assert_eq!(served.config_u32(0x34) & 0xFF, 0x40);
    assert_eq!(served.config_u32(0x40), 0x0002_0011, "MSI-X with three vectors, the list's end");
    assert_eq!((served.config_u32(0x44), served.config_u32(0x48)), (4, 0x804));
    let bars = served.function.bars();
    let sizes: Vec<_> = bars.iter().map(|bar| (bar.index, bar.kind, bar.size)).collect();
    assert_eq!(
        sizes,
        [(0, BarKind::Memory32, 4096), (2, BarKind::Memory32, 16384), (4, BarKind::Memory32, 4096)]
    );
    let dma: Vec<_> =
        served.device.dma().into_iter().map(|(at, size, fd)| (at, size, fd.is_some())).collect();
    assert_eq!(dma, [(0, 1 << 20, true), (1 << 32, 1 << 20, true)]);
    assert!(served.device.events().contains(&TestEvent::DmaMap(1 << 32, 1 << 20, 1 << 20)));
    let doorbells = served.function.doorbells();
    assert_eq!(doorbells.len(), 1);
    assert_eq!((doorbells[0].bar, doorbells[0].offset, doorbells[0].datamatch), (0, 8, Some(7)));
    // The monitor's part. The device's part can't be read from a lost server.
    assert_eq!(served.function.save().unwrap().kind, "vfio-user");
    drop(served.server);
    let error = served.function.save().unwrap_err();
    assert!(
        matches!(error, FunctionError::NotSaveable { name, .. } | FunctionError::Failed { name, .. } if name == "dev0")
    );
}

#[test]
fn accesses_and_the_command_register_reach_the_server() {
    let served = serve(TestDevice::new());
    served.function.bar_write(0, 16, &[1, 2, 3, 4]);
    let mut data = [0; 4];
    served.function.bar_read(0, 16, &mut data);
    assert_eq!(data, [1, 2, 3, 4]);
    // A register's effect is complete when the store is, so there is no wait.
    served.device.clear_events();
    served.function.bar_write(0, 20, &[9]);
    assert_eq!(served.device.events(), [TestEvent::Write { region: 0, offset: 20, data: vec![9] }]);
    for (bar, offset) in [(0, 4096), (0, 4094), (1, 0), (6, 0), (0, u64::MAX)] {
        served.function.bar_read(bar, offset, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }
    let effect_command = COMMAND_MEMORY | COMMAND_BUS_MASTER;
    served.write_command(effect_command);
    assert_eq!(served.device.config(4, 2), effect_command.to_le_bytes());
    served.function.quiesce().unwrap();
    assert_eq!(served.device.config(4, 2), COMMAND_MEMORY.to_le_bytes(), "a paused device masters nothing");
    assert_eq!(served.config_u32(4) & 0xFFFF, u32::from(effect_command), "the guest doesn't see that");
    served.function.unquiesce().unwrap();
    assert_eq!(served.device.config(4, 2), effect_command.to_le_bytes());
    served.function.reset().unwrap();
    assert!(served.device.events().contains(&TestEvent::Reset));
    assert_eq!(served.device.config(4, 2), [0, 0]);
    served.function.bar_read(0, 16, &mut data);
    assert_eq!(data, [0; 4]);
}

#[test]
fn vectors_are_delivered_and_what_comes_while_masked_waits() {
    let served = serve(TestDevice::new());
    assert!(!served.device.raise(0), "without MSI-X the server has no eventfd");
    served.set_vector(0, false);
    served.set_vector(1, true);
    served.enable_msix(true);
    assert!(served.device.raise(0) && served.device.raise(1));
    wait_until("vector 0", || served.sent(0) == 1);
    let mut pending = [0; 4];
    wait_until("the pending bit of vector 1", || {
        served.function.bar_read(4, 0x800, &mut [0; 4]);
        let mut bits = [0; 4];
        served.function.bar_read(4, 0x800, &mut bits);
        bits == [2, 0, 0, 0]
    });
    assert_eq!(served.sent(1), 0);
    served.set_vector(1, false);
    assert_eq!(served.sent(1), 1);
    served.function.bar_read(4, 0x800, &mut pending);
    assert_eq!(pending, [0; 4]);
    served.enable_msix(false);
    assert!(!served.device.raise(0));
}

/// A vector as in KVM: an eventfd that isn't read while it is masked.
struct EventVector {
    event: std::os::fd::OwnedFd,
    unmasked: Mutex<bool>,
}

impl MsiVector for EventVector {
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError> {
        *lock(&self.unmasked) = message.is_some();
        Ok(())
    }

    fn trigger(&self) -> Result<(), InterruptError> {
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
        Ok(())
    }

    fn eventfd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

struct EventMsi;

impl Msi for EventMsi {
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError> {
        let vector = |_| {
            let event = super::events::new_event().unwrap();
            Arc::new(EventVector { event, unmasked: Mutex::new(false) }) as Arc<dyn MsiVector>
        };
        Ok((0..count).map(vector).collect())
    }
}

#[test]
fn the_server_signals_kvms_eventfds_and_a_masked_ones_signal_shows_as_pending() {
    let device = TestDevice::new();
    let (stream, _server) = device.serve_pair();
    let prepared = Arc::new(Prepared::default());
    lock(&prepared.streams).push(stream);
    let opened = OpenedFunction::open("dev0", Box::new(Arc::clone(&prepared))).unwrap();
    let function = VfioUserFunction::new(opened, ram(), &EventMsi).unwrap();
    function.config_write(0x42, &0x8000_u16.to_le_bytes());
    assert!(device.raise(2));
    let mut pending = [0; 8];
    function.bar_read(4, 0x800, &mut pending);
    assert_eq!(pending, [4, 0, 0, 0, 0, 0, 0, 0]);
    // A driver that disables MSI-X doesn't get an old interrupt later.
    function.config_write(0x42, &0_u16.to_le_bytes());
    function.bar_read(4, 0x800, &mut pending);
    assert_eq!(pending, [0; 8]);
    function.config_write(0x42, &0x8000_u16.to_le_bytes());
    assert!(device.raise(0));
    function.reset().unwrap();
    function.bar_read(4, 0x800, &mut pending);
    assert_eq!(pending, [0; 8]);
}

#[test]
fn intx_is_asserted_until_an_access_and_again_while_the_device_needs_service() {
    let served = serve(TestDevice::new());
    let line = FakeLine::new();
    served.function.attach_intx(line.clone());
    served.device.set_intx(true);
    wait_until("INTx", || line.asserted());
    assert_eq!(served.config_u32(4) >> 16 & 8, 8, "interrupt status");
    // The device still needs service, so the line is asserted again.
    served.function.bar_read(0, 0, &mut [0; 4]);
    wait_until("INTx again", || line.asserted());
    served.device.set_intx(false);
    served.function.bar_write(0, 0, &[0; 4]);
    assert!(!line.asserted());
    served.device.set_intx(true);
    wait_until("INTx for another reason", || line.asserted());
    served.enable_msix(true);
    assert!(!line.asserted(), "MSI-X replaces INTx");
}

#[test]
fn doorbell_mode_changes_what_is_mapped() {
    let served = serve(TestDevice::new());
    assert_eq!(served.device.reached(), DoorbellMode::Trapped);
    assert!(served.function.mappings().is_empty());
    served.function.bar_write(2, 0, &[5; 4]);
    served.device.wait_for("the trapped store", |events| {
        events.contains(&TestEvent::Write { region: 2, offset: 0, data: vec![5; 4] })
    });
    for round in 0..50 {
        served.device.clear_events();
        served.device.want(DoorbellMode::Mapped);
        served.device.wait_for("mapped", |events| events.contains(&TestEvent::Reached(DoorbellMode::Mapped)));
        let places: Vec<_> =
            served.function.mappings().iter().map(|m| (m.bar, m.offset, m.len, m.fd_offset)).collect();
        assert_eq!(places, [(2, 0, 4096, 0), (2, 8192, 4096, 8192)]);
        assert_eq!(served.refreshed.load(Ordering::SeqCst), 2 * round + 1);
        served.device.want(DoorbellMode::Trapped);
        served
            .device
            .wait_for("trapped", |events| events.contains(&TestEvent::Reached(DoorbellMode::Trapped)));
        assert!(served.function.mappings().is_empty());
        assert_eq!(served.refreshed.load(Ordering::SeqCst), 2 * round + 2);
    }
    // The function answers a signal without a change as well.
    served.device.clear_events();
    served.device.want(DoorbellMode::Trapped);
    served.device.wait_for("the answer", |events| events == [TestEvent::Reached(DoorbellMode::Trapped)]);
    assert_eq!(served.function.inspect()["doorbell_mode"], "trapped");
}

#[test]
fn a_device_of_others_is_mapped_at_once_and_trapped_while_intx_is_asserted() {
    let served = serve(TestDevice::without_doorbell_mode());
    let line = FakeLine::new();
    served.function.attach_intx(line.clone());
    assert_eq!(served.function.mappings().len(), 2);
    served.device.set_intx(true);
    wait_until("INTx", || line.asserted());
    assert!(served.function.mappings().is_empty());
    served.device.set_intx(false);
    served.function.bar_read(2, 0, &mut [0; 4]);
    assert!(!line.asserted());
    assert_eq!(served.function.mappings().len(), 2);
    assert_eq!(served.refreshed.load(Ordering::SeqCst), 2);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(200))]

    /// Nonsense in a server's configuration space is refused, or usable without a panic.
    #[test]
    fn any_configuration_space_is_refused_or_shown(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 256),
        list in 0x40_u8..,
        id in proptest::sample::select(vec![0x05_u8, 0x11, 0x01, 0x10]),
        place in proptest::prelude::any::<u32>(),
    ) {
        let device = TestDevice::new();
        let mut bytes = bytes;
        bytes[6] |= 0x10;
        bytes[0x0E] &= 0x80;
        bytes[0x34] = list;
        let at = usize::from(list & !3);
        bytes[at] = id;
        bytes[at + 2..at + 4].copy_from_slice(&2_u16.to_le_bytes());
        if at + 8 <= 256 {
            bytes[at + 4..at + 8].copy_from_slice(&(place & 0x1FFF).to_le_bytes());
        }
        device.set_config(&bytes);
        let (stream, _server) = device.serve_pair();
        let prepared = Arc::new(Prepared::default());
        lock(&prepared.streams).push(stream);
        let Ok(opened) = OpenedFunction::open("dev0", Box::new(Arc::clone(&prepared))) else { return Ok(()) };
        let Ok(function) = VfioUserFunction::new(opened, ram(), FakeMsi::new().as_ref()) else { return Ok(()) };
        let mut data = [0; 4];
        for offset in (0..4096).step_by(4) {
            function.config_write(offset, &[0xFF; 4]);
            function.config_read(offset, &mut data);
        }
        for bar in function.bars() {
            for offset in [0, 8, 0x800, bar.size - 4] {
                function.bar_write(bar.index, offset, &[0xFF; 4]);
                function.bar_read(bar.index, offset, &mut data);
            }
        }
        for mapping in function.mappings() {
            proptest::prop_assert!(mapping.len % 4096 == 0 && mapping.offset % 4096 == 0);
        }
        function.reset().unwrap();
        drop(function.inspect());
    }
}
