//! A running payload VM.

use super::PayloadError;
use super::build::PayloadBuilder;
use super::layout::Layout;
use super::ports::{Console, Message};
use super::report::ExceptionReport;
use super::whole::Local;
use machine::bus::AddressSpace;
use machine::exits::ExitSnapshot;
use machine::memory::shared::SharedRam;
use machine::memory::{GuestAddressSpace, GuestMemorySpace, GuestRam, RamRegion};
use machine::state::SavedVcpu;
use machine::stats::KernelStats;
use machine::vcpu::{VcpuEvent, VcpuManager, VcpuStart};
use machine::vm::Vm;
use payload_abi::Region;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

pub(super) struct Parts {
    pub(super) vm: Arc<Vm>,
    pub(super) ports: Arc<AddressSpace>,
    pub(super) mmio: Arc<AddressSpace>,
    pub(super) ram: GuestRam,
    pub(super) shared: Option<Arc<SharedRam>>,
    pub(super) manager: Arc<VcpuManager>,
    pub(super) local: Local,
    pub(super) layout: Layout,
    pub(super) free: Region,
    pub(super) doorbells: Vec<Arc<OwnedFd>>,
    pub(super) console: Arc<Console>,
    pub(super) messages: Receiver<Message>,
    pub(super) sender: Sender<Message>,
}

/// Ends a payload VM from another thread.
#[derive(Debug, Clone)]
pub struct Stopper(Sender<Message>);

impl Stopper {
    /// Makes [`PayloadVm::wait`] stop the VM and return an error.
    pub fn stop(&self) {
        // Fails if no thread waits any more.
        let _ = self.0.send(Message::Asked);
    }
}

/// A payload VM. Dropping it stops its vCPUs. A [`super::HostPorts`] that blocks must be unblocked before.
pub struct PayloadVm {
    parts: Parts,
    /// Number of this process's vCPUs that have parked.
    parked: usize,
}

impl PayloadVm {
    /// Settings for a program in memory; `name` becomes its first argument.
    pub fn builder(name: &str, program: Vec<u8>) -> PayloadBuilder {
        PayloadBuilder::new(name, program)
    }

    /// Settings for a program in a file.
    pub fn from_file(path: &Path) -> Result<PayloadBuilder, PayloadError> {
        PayloadBuilder::from_file(path)
    }

    pub(super) fn new(parts: Parts) -> Self {
        Self { parts, parked: 0 }
    }

    /// Starts the vCPUs.
    pub fn start(&self) -> Result<(), PayloadError> {
        Ok(self.parts.manager.resume()?)
    }

    /// Blocks until the program exits, and returns its code, or fails. Then the vCPUs are stopped. Memory and exit counts stay readable.
    pub fn wait(&mut self) -> Result<u32, PayloadError> {
        loop {
            if let Some(code) = self.wait_for(Duration::from_secs(3600))? {
                return Ok(code);
            }
        }
    }

    /// The same for at most `timeout`. Returns `None` if the program still runs then.
    pub fn wait_for(&mut self, timeout: Duration) -> Result<Option<u32>, PayloadError> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = match self.parts.messages.recv_timeout(left) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                // Can't happen while this object holds a sender.
                Err(RecvTimeoutError::Disconnected) => Message::Asked,
            };
            if let Some(outcome) = self.judge(message) {
                self.parts.local.before_stop();
                let stopped = self.parts.manager.stop();
                let flushed = self.parts.console.flush();
                let code = outcome?;
                stopped?;
                flushed?;
                return Ok(Some(code));
            }
        }
    }

    /// Starts the program and waits for its exit code.
    pub fn run(&mut self) -> Result<u32, PayloadError> {
        self.start()?;
        self.wait()
    }

    /// Decides what a message means for the VM. `None`: it continues.
    fn judge(&mut self, message: Message) -> Option<Result<u32, PayloadError>> {
        Some(match message {
            Message::Exit(code) => Ok(code),
            Message::Park => {
                self.parked += 1;
                let vcpus = self.parts.local.vcpus.len();
                if self.parked < vcpus {
                    return None;
                }
                Err(PayloadError::AllParked { vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX) })
            }
            Message::Exception(vcpu) | Message::Event(VcpuEvent::Shutdown { vcpu, .. }) => {
                Err(self.report(vcpu).unwrap_or_else(|error| error))
            }
            Message::Console(error) => Err(PayloadError::Console(error)),
            Message::Asked => Err(PayloadError::Vcpu(machine::vcpu::VcpuError::Gone)),
            Message::Event(event) => {
                let (vcpu, what) = match event {
                    VcpuEvent::Failed { vcpu, what } => (vcpu, what),
                    VcpuEvent::Panicked { vcpu, what } => (vcpu, format!("the monitor panicked: {what}")),
                    VcpuEvent::SystemEvent { vcpu, kind } => {
                        (vcpu, format!("KVM reports system event {kind}"))
                    }
                    VcpuEvent::Halted { vcpu } => (vcpu, "it halted, which ring 3 can't".to_owned()),
                    VcpuEvent::Stopped { .. } | VcpuEvent::Shutdown { .. } => return None,
                };
                Err(PayloadError::Failed { vcpu, what })
            }
        })
    }

    fn report(&self, id: u32) -> Result<PayloadError, PayloadError> {
        self.parts.local.before_stop();
        self.parts.manager.pause()?;
        let (regs, sregs) = self.parts.manager.registers(id)?;
        let index = self.parts.local.index(id);
        let memory = self.parts.ram.memory();
        let report = ExceptionReport::collect(index, &regs, &sregs, &memory.memory());
        Ok(PayloadError::Exception(Box::new(report)))
    }

    /// Stops the vCPUs in any state. Memory and exit counts stay readable.
    pub fn stop(&self) -> Result<(), PayloadError> {
        let _ = self.parts.sender.send(Message::Asked);
        self.parts.local.before_stop();
        Ok(self.parts.manager.stop()?)
    }

    /// A handle to end the VM from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.parts.sender.clone())
    }

    /// RAM regions, each with its memfd, for device servers.
    pub fn ram_regions(&self) -> &[RamRegion] {
        self.parts.ram.regions()
    }

    /// Restores the vCPUs, before [`PayloadVm::start`]: one state per vCPU of this process, in order, `None` for each that had parked. The
    /// time-stamp counter keeps its value.
    ///
    /// # Errors
    /// If KVM refuses a state.
    pub fn restore(&self, saved: Vec<Option<SavedVcpu>>) -> Result<(), PayloadError> {
        for ((id, _), saved) in self.parts.local.vcpus.iter().zip(saved) {
            if let Some(mut saved) = saved {
                saved.forget_time();
                self.parts.manager.set_state(*id, VcpuStart::Restored(Box::new(saved)))?;
            } else {
                self.parts.manager.set_ended(*id)?;
                // `wait` counts it. Can't fail while this object holds the receiver.
                let _ = self.parts.sender.send(Message::Park);
            }
        }
        Ok(())
    }

    /// The RAM that all nodes of a VM that spans hosts share.
    pub fn shared_ram(&self) -> Option<&Arc<SharedRam>> {
        self.parts.shared.as_ref()
    }

    /// The vCPUs of this process: ids, and indexes in the whole VM.
    pub fn vcpus(&self) -> (&Arc<VcpuManager>, &[(u32, u32)]) {
        (&self.parts.manager, &self.parts.local.vcpus)
    }

    /// Guest memory, to be read and written while the program runs.
    pub fn memory(&self) -> GuestMemorySpace {
        self.parts.ram.memory()
    }

    /// Host address of `length` bytes of RAM at a guest-physical address, if they are in one region. Valid while this VM lives. The program
    /// may write there at any time.
    pub fn host_address(&self, address: u64, length: u64) -> Option<usize> {
        let end = address.checked_add(length)?;
        self.parts.ram.regions().iter().find_map(|region| {
            let offset = address.checked_sub(region.range.start)?;
            let inside = end <= region.range.start.checked_add(region.range.size)?;
            inside
                .then(|| usize::try_from(offset).ok())?
                .and_then(|offset| region.host_address.checked_add(offset))
        })
    }

    /// The memfd of `length` bytes of RAM at a guest-physical address, and their offset in it, if they are in one region. For a device in
    /// this process that maps guest RAM like one in another process.
    pub fn ram_file(&self, address: u64, length: u64) -> Option<(&Arc<File>, u64)> {
        let end = address.checked_add(length)?;
        self.parts.ram.regions().iter().find_map(|region| {
            let offset = address.checked_sub(region.range.start)?;
            let inside = end <= region.range.start.checked_add(region.range.size)?;
            inside
                .then(|| region.file_offset.checked_add(offset))
                .flatten()
                .map(|offset| (&region.file, offset))
        })
    }

    /// RAM that only the program uses.
    pub fn free_memory(&self) -> Region {
        self.parts.free
    }

    /// The read-only window.
    pub fn window(&self) -> Region {
        self.parts.layout.window
    }

    /// Address space for memslots that are added while the program runs.
    pub fn room(&self) -> Region {
        self.parts.layout.room
    }

    /// The eventfd (non-blocking) that doorbell `index` signals.
    pub fn doorbell(&self, index: usize) -> Option<&Arc<OwnedFd>> {
        self.parts.doorbells.get(index)
    }

    /// Exits to the monitor so far, by cause and address range.
    pub fn exits(&self) -> ExitSnapshot {
        self.parts.manager.exits()
    }

    /// KVM's own counters per vCPU, which include exits that KVM handled.
    pub fn kernel_stats(&self) -> Vec<(u32, KernelStats)> {
        self.parts.manager.kernel_stats()
    }

    /// The VM, for a benchmark's own memslots and ioeventfds.
    pub fn vm(&self) -> &Arc<Vm> {
        &self.parts.vm
    }

    /// The buses for vCPU accesses, I/O ports and memory. For PCI functions that a [`crate::vm::MachinePlacer`] places in
    /// [`PayloadVm::room`].
    pub fn buses(&self) -> (&Arc<AddressSpace>, &Arc<AddressSpace>) {
        (&self.parts.ports, &self.parts.mmio)
    }
}

impl Drop for PayloadVm {
    fn drop(&mut self) {
        // Stopped already after `wait`. If this fails, the threads end with the process.
        self.parts.local.before_stop();
        let _ = self.parts.manager.stop();
    }
}

/// The process's exit status for a program's exit code: the code up to 255, and 255 for larger ones.
pub fn process_status(code: u32) -> u8 {
    u8::try_from(code).unwrap_or(u8::MAX)
}
