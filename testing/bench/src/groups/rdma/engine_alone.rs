//! The engine without its daemon: a thread of this process runs it for two devices whose doorbells are always memory. There are no
//! sockets, no sandbox, and no change between polling and sleeping. The difference to the daemon is the daemon's cost.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use dma::MappedMemory;
use hca::EngineConfig;
use hca::names::{DeviceId, SegmentId};
use pvrdma::Config;
use pvrdma::abi::pci::VECTOR_RESPONSE;
use pvrdma_testbed::Host;

use super::driver::Registers;
use crate::peers;

/// Interval at which the idle engine thread polls for orders.
const ORDER_INTERVAL: Duration = Duration::from_millis(10);

/// Orders for the engine's thread.
#[derive(Default)]
struct Orders {
    run: AtomicBool,
    stop: AtomicBool,
}

/// The engine's thread. It is idle until it is started.
pub struct EngineAlone {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// An engine and its two devices, before they move to its thread.
pub struct Devices {
    host: RefCell<Host<MappedMemory>>,
    ids: [DeviceId; 2],
}

/// The registers of one device.
pub struct DeviceRegisters<'a> {
    devices: &'a Devices,
    id: DeviceId,
    responses: Cell<u64>,
}

impl Devices {
    /// Creates two devices on the memory of two guests.
    pub fn new(memories: [MappedMemory; 2]) -> Self {
        let mut host = Host::new(EngineConfig::default());
        let mut last = 0;
        let ids = memories.map(|memory| {
            last += 1;
            host.add(Config::new(format!("vm{last}"), SegmentId(1), [2, 0, 0, 0, 0, last]), memory)
        });
        Self { host: RefCell::new(host), ids }
    }

    /// Returns the registers of both devices.
    pub fn registers(&self) -> [DeviceRegisters<'_>; 2] {
        self.ids.map(|id| DeviceRegisters { devices: self, id, responses: Cell::new(0) })
    }

    /// Moves both to a thread on `cpu`.
    pub fn serve(self, doorbells: [MappedMemory; 2], cpu: usize) -> anyhow::Result<EngineAlone> {
        let orders = Arc::new(Orders::default());
        let thread = {
            let orders = Arc::clone(&orders);
            std::thread::Builder::new()
                .name("engine alone".to_owned())
                .spawn(move || turn(self.host.into_inner(), self.ids, &doorbells, &orders, cpu))
                .context("The engine's thread could not be started")?
        };
        Ok(EngineAlone { orders, thread: Some(thread) })
    }
}

impl Registers for DeviceRegisters<'_> {
    fn read(&self, offset: u64) -> u32 {
        self.devices.host.borrow_mut().read(self.id, offset)
    }

    fn write(&self, offset: u64, value: u32) {
        self.devices.host.borrow_mut().write(self.id, offset, value);
    }

    fn await_response(&self) -> anyhow::Result<()> {
        // The write has been processed on return.
        let host = self.devices.host.borrow();
        let raised = host.lines.get(&self.id).map_or(0, |lines| lines.raised(VECTOR_RESPONSE));
        if raised <= self.responses.replace(raised) {
            bail!("No interrupt came with the response to a command");
        }
        Ok(())
    }
}

impl EngineAlone {
    /// Lets the thread run the engine, or idle.
    pub fn set_running(&self, run: bool) {
        self.orders.run.store(run, Ordering::SeqCst);
        if let (true, Some(thread)) = (run, &self.thread) {
            thread.thread().unpark();
        }
    }
}

impl Drop for EngineAlone {
    fn drop(&mut self) {
        self.orders.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                eprintln!("bench: rdma: the engine's thread panicked");
            }
        }
    }
}

/// The thread's loop: that of the daemon while doorbells are memory.
fn turn(
    mut host: Host<MappedMemory>,
    ids: [DeviceId; 2],
    doorbells: &[MappedMemory; 2],
    orders: &Orders,
    cpu: usize,
) {
    if let Err(error) = peers::pin(cpu) {
        eprintln!("bench: rdma: {error:#}");
    }
    let clock = quanta::Clock::new();
    let began = clock.raw();
    while !orders.stop.load(Ordering::Relaxed) {
        if !orders.run.load(Ordering::Relaxed) {
            std::thread::park_timeout(ORDER_INTERVAL);
            continue;
        }
        // `turn` advances its clock by a microsecond; this one follows the real clock.
        host.now = 1_000_000_000 + clock.delta_as_nanos(began, clock.raw());
        host.turn(ids.iter().copied().zip(doorbells));
    }
}
