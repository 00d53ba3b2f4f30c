//! The PCI function of a served device.

mod migration;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use pci::config::ConfigSpace;
use pci::function::{
    BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, PciFunction, SavedFunction,
};
use pci::interrupt::{IntxLine, Msi};
use pci::intx::IntxPin;
use pci::msix::Msix;
use pci::registers::COMMAND;
use serde_json::json;
use telemetry::Counter;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::doorbell_mode::DoorbellMode;

use super::connector::Connector;
use super::events::{self, VectorEvent, new_event};
use super::link::{DisconnectedServer, InterruptMode, Link, MappedRange};
use super::registers::{Registers, Server};
use super::shape::{Shape, ShapeError};
use super::watcher::Watcher;
use super::{VfioUserError, lock};
use crate::vm::ThreadHook;

pub use migration::IncomingFunction;

/// A range of guest RAM for servers.
#[derive(Debug, Clone)]
pub struct DmaRange {
    /// File of the memory.
    pub file: Arc<File>,
    /// Offset of the range in the file.
    pub offset: u64,
    /// Guest-physical address.
    pub address: u64,
    /// Size, bytes.
    pub size: u64,
}

/// A function whose server was connected before the sandbox closed, without a machine yet.
pub struct OpenedFunction {
    name: String,
    connector: Box<dyn Connector>,
    client: Arc<Client>,
    shape: Shape,
    /// The server has the guest's memory already.
    mapped: bool,
}

impl OpenedFunction {
    /// Connects to the server and reads its device's shape.
    ///
    /// # Errors
    ///
    /// If the server can't be reached, or its device isn't usable for a guest.
    pub fn open(name: &str, connector: Box<dyn Connector>) -> Result<Self, VfioUserError> {
        let client = connector.connect()?;
        let shape = read_shape(&client, connector.as_ref())?;
        Ok(Self { name: name.to_owned(), connector, client: Arc::new(client), shape, mapped: false })
    }

    /// Name of the function.
    pub fn name(&self) -> &str {
        &self.name
    }
}

pub(super) fn read_shape(client: &Client, connector: &dyn Connector) -> Result<Shape, VfioUserError> {
    let target = connector.target();
    Shape::read(client).map_err(|error| match error {
        ShapeError::Client(source) => VfioUserError::Server { target, source: source.into() },
        ShapeError::Device(reason) => VfioUserError::Device { target, reason },
    })
}

/// Present state of the BARs in the guest.
#[derive(Default)]
struct Resources {
    /// All ranges that may be mapped.
    ranges: Vec<MappedRange>,
    doorbells: Vec<Doorbell>,
    /// Doorbell mode: trapped or mapped. Mapped for a device without it.
    mode: DoorbellMode,
    /// Because of an INTx interrupt, ranges are trapped until the guest has accessed the device.
    trapped_for_intx: bool,
}

/// Counters for `causeway inspect`.
#[derive(Default)]
pub(super) struct Counters {
    pub reads: Counter,
    pub writes: Counter,
    pub intx: Counter,
    pub mode_changes: Counter,
    pub losses: Counter,
    pub reconnections: Counter,
    pub failed_attempts: Counter,
}

/// State shared by the function and its thread.
pub(super) struct Inner {
    pub name: String,
    pub connector: Box<dyn Connector>,
    pub shape: Shape,
    pub ram: Vec<DmaRange>,
    pub counters: Counters,
    pub log: GuestLog,
    /// MSI-X eventfds, by vector.
    pub vectors: Vec<VectorEvent>,
    /// Eventfd that the server signals for INTx.
    pub intx_event: OwnedFd,
    /// Eventfd that the server signals for doorbell mode.
    pub mode_event: OwnedFd,
    pub msix: Option<Msix>,
    intx: IntxPin,
    /// Held during requests for a configuration access. A thread that holds it must not take the bus's locks.
    registers: Mutex<Registers>,
    resources: Mutex<Resources>,
    link: Mutex<Option<Arc<Link>>>,
    /// Updates mappings and doorbells on the bus.
    refresh: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Inner {
    /// The present connection, if any.
    pub(super) fn link(&self) -> Option<Arc<Link>> {
        lock(&self.link).clone()
    }

    /// Updates the bus to [`PciFunction::mappings`] and [`PciFunction::doorbells`].
    fn refresh(&self) {
        if let Some(refresh) = self.refresh.get() {
            refresh();
        }
    }

    /// Uses a new connection from now on. The device is in the state after a reset. The server gets the monitor's command register.
    pub(super) fn use_link(&self, link: Link) -> Result<(), ClientError> {
        let link = Arc::new(link);
        {
            let registers = lock(&self.registers);
            link.write(COMMAND, &registers.command().to_le_bytes());
            self.set_interrupt_mode(&link)?;
            let mut resources = lock(&self.resources);
            let mode = if self.shape.doorbell_mode { DoorbellMode::Trapped } else { DoorbellMode::Mapped };
            *resources = Resources {
                ranges: link.ranges.clone(),
                doorbells: link.doorbells.clone(),
                mode,
                trapped_for_intx: false,
            };
            drop(resources);
            *lock(&self.link) = Some(Arc::clone(&link));
        }
        self.refresh();
        if self.shape.doorbell_mode {
            events::take(self.mode_event.as_fd());
            link.start_doorbell_mode(self.mode_event.as_fd())?;
            self.apply_doorbell_mode(&link)?;
        }
        Ok(())
    }

    /// The connection is lost. Mappings stay: the memory exists, although no server uses it.
    pub(super) fn disconnect(&self, link: &Arc<Link>) {
        link.client.close();
        let mut current = lock(&self.link);
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            *current = None;
        }
        drop(current);
        self.counters.losses.increment();
        self.set_intx(false);
    }

    /// Sends the server eventfds for the kind of interrupts that the guest uses.
    fn set_interrupt_mode(&self, link: &Link) -> Result<(), ClientError> {
        let msix = self.msix.as_ref().is_some_and(Msix::enabled);
        let wanted = match (msix, self.shape.pin) {
            (true, _) => InterruptMode::Msix,
            (false, Some(_)) => InterruptMode::Intx,
            (false, None) => InterruptMode::None,
        };
        link.set_interrupt_mode(wanted, &self.vectors, self.intx_event.as_fd())?;
        if !msix {
            // An interrupt that came too late for the driver, which has disabled MSI-X.
            self.vectors.iter().for_each(VectorEvent::forget);
        }
        Ok(())
    }

    fn set_intx(&self, pending: bool) {
        if let Err(error) = self.intx.set_pending(pending) {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "An INTx wire can't be driven");
        }
    }

    /// The server has raised INTx. The line is asserted until the guest accesses the device.
    pub(super) fn assert_intx(&self) {
        self.counters.intx.increment();
        // Accesses to mapped ranges don't exit, so they are trapped for now.
        let trap = {
            let mut resources = lock(&self.resources);
            let changes = !resources.trapped_for_intx
                && resources.mode == DoorbellMode::Mapped
                && !resources.ranges.is_empty();
            resources.trapped_for_intx |= changes;
            changes
        };
        if trap {
            self.refresh();
        }
        self.set_intx(true);
    }

    /// The guest has accessed the device while INTx was asserted. If the device still needs service, the server raises INTx again.
    fn deassert_intx(&self, link: &Link) {
        if !self.intx.pending() {
            return;
        }
        self.set_intx(false);
        if link.unmask_intx().is_err() && !link.client.is_failed() {
            telemetry::guest_warn!(self.log, device = %self.name, "A vfio-user server can't unmask INTx");
        }
        if std::mem::take(&mut lock(&self.resources).trapped_for_intx) {
            self.refresh();
        }
    }

    /// Changes to the doorbell mode that the server requests, and reports it to the server.
    pub(super) fn apply_doorbell_mode(&self, link: &Link) -> Result<(), ClientError> {
        let wanted = link.read_requested_mode()?;
        let (reached, changed) = {
            let mut resources = lock(&self.resources);
            let changed = wanted.is_some_and(|wanted| wanted != resources.mode);
            resources.mode = wanted.unwrap_or(resources.mode);
            (resources.mode, changed)
        };
        if changed {
            self.counters.mode_changes.increment();
            // When this returns, no vCPU uses the removed mappings.
            self.refresh();
        }
        link.report_mode(reached)
    }

    /// Calls `act` with the server's part of configuration space.
    fn with_server<T>(&self, act: impl FnOnce(&dyn Server) -> T) -> T {
        match self.link() {
            Some(link) => act(link.as_ref()),
            None => act(&DisconnectedServer),
        }
    }

    fn bar(&self, bar: u8, offset: u64, len: usize) -> Option<&BarLayout> {
        let layout = self.shape.bars.iter().find(|layout| layout.index == bar)?;
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        (end <= layout.size && len != 0).then_some(layout)
    }
}

/// A device that another process serves.
pub struct VfioUserFunction {
    inner: Arc<Inner>,
    watcher: OnceLock<Watcher>,
}

impl VfioUserFunction {
    /// Creates the function: sends the server `ram` (all of the guest's), and prepares its interrupts.
    ///
    /// # Errors
    ///
    /// If the server refuses, or no interrupt vectors are left.
    pub fn new(
        opened: OpenedFunction,
        ram: Vec<DmaRange>,
        msi: &dyn Msi,
    ) -> Result<Arc<Self>, VfioUserError> {
        let target = opened.connector.target();
        let device = |reason: String| VfioUserError::Device { target: target.clone(), reason };
        let config = opened.shape.config_space().map_err(|error| device(error.to_string()))?;
        let (msix, vectors) = match &opened.shape.msix {
            None => (None, Vec::new()),
            Some((_, layout)) => {
                let vectors = msi.allocate(layout.count()).map_err(VfioUserError::Interrupts)?;
                let events = vectors.iter().map(|vector| VectorEvent::new(Arc::clone(vector)));
                let events = events.collect::<std::io::Result<Vec<_>>>().map_err(event_error)?;
                let msix = Msix::new(*layout, vectors).map_err(|error| device(error.to_string()))?;
                (Some(msix), events)
            }
        };
        Self::assemble(opened, ram, config, msix, vectors)
    }

    fn assemble(
        opened: OpenedFunction,
        ram: Vec<DmaRange>,
        config: ConfigSpace,
        msix: Option<Msix>,
        vectors: Vec<VectorEvent>,
    ) -> Result<Arc<Self>, VfioUserError> {
        let OpenedFunction { name, connector, client, shape, mapped } = opened;
        let server =
            |source: ClientError| VfioUserError::Server { target: connector.target(), source: source.into() };
        let unmapped_ram = if mapped { &[][..] } else { &ram };
        let link = Link::new(client, &shape, unmapped_ram).map_err(server)?;
        let inner = Inner {
            name,
            shape,
            ram,
            counters: Counters::default(),
            log: GuestLog::new(),
            vectors,
            intx_event: new_event().map_err(event_error)?,
            mode_event: new_event().map_err(event_error)?,
            msix,
            intx: IntxPin::new(),
            registers: Mutex::new(Registers::new(config)),
            resources: Mutex::default(),
            link: Mutex::new(None),
            refresh: OnceLock::new(),
            connector,
        };
        inner.use_link(link).map_err(|source| VfioUserError::Server {
            target: inner.connector.target(),
            source: source.into(),
        })?;
        Ok(Arc::new(Self { inner: Arc::new(inner), watcher: OnceLock::new() }))
    }

    /// Starts the function's thread. `refresh` updates the function's mappings and doorbells on the bus ([`pci::root::PciRoot::refresh`]).
    /// The thread runs `on_start` first.
    ///
    /// # Errors
    ///
    /// If the thread can't be created.
    pub fn start(
        &self,
        refresh: Box<dyn Fn() + Send + Sync>,
        on_start: ThreadHook,
    ) -> Result<(), VfioUserError> {
        if self.inner.refresh.set(refresh).is_err() {
            return Ok(());
        }
        let watcher = Watcher::start(Arc::clone(&self.inner), on_start)
            .map_err(|source| VfioUserError::Monitor { what: "start a thread", source })?;
        // Set once, as `refresh` was.
        let _ = self.watcher.set(watcher);
        Ok(())
    }

    /// Whether a server is connected at present.
    pub fn is_connected(&self) -> bool {
        self.inner.link().is_some_and(|link| !link.client.is_failed())
    }

    fn failed(&self, what: &str, source: ClientError) -> FunctionError {
        FunctionError::Failed { name: self.inner.name.clone(), what: what.to_owned(), source: source.into() }
    }

    /// Sends the server its command register, after a pause began or ended.
    fn set_quiesced(&self, quiesced: bool) -> Result<(), FunctionError> {
        let mut registers = lock(&self.inner.registers);
        let before = registers.command();
        registers.quiesced = quiesced;
        let now = registers.command();
        let Some(link) = self.inner.link() else { return Ok(()) };
        if now == before {
            return Ok(());
        }
        let region = vfio_user_protocol::device::REGION_CONFIG;
        match link.client.region_write(region, COMMAND.into(), &now.to_le_bytes()) {
            // A lost server does nothing any more.
            Err(error) if !error.is_lost() => Err(self.failed("stop or start mastering the bus", error)),
            _ => Ok(()),
        }
    }
}

fn event_error(source: std::io::Error) -> VfioUserError {
    VfioUserError::Monitor { what: "make an eventfd", source }
}

impl PciFunction for VfioUserFunction {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn bars(&self) -> Vec<BarLayout> {
        self.inner.shape.bars.clone()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let inner = &self.inner;
        let mut registers = lock(&inner.registers);
        inner.intx.publish(registers.config_mut());
        inner.with_server(|server| registers.read(&inner.shape, server, offset, data));
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        let inner = &self.inner;
        let mut registers = lock(&inner.registers);
        let enabled = inner.msix.as_ref().is_some_and(Msix::enabled);
        let effect = inner.with_server(|server| registers.write(&inner.shape, server, offset, data));
        let Some(msix) = &inner.msix else {
            apply_intx(inner, &registers);
            return effect;
        };
        msix.follow(registers.config());
        apply_intx(inner, &registers);
        if msix.enabled() != enabled
            && let Some(link) = inner.link()
            && let Err(error) = inner.set_interrupt_mode(&link)
        {
            telemetry::guest_warn!(inner.log, device = %inner.name, %error, "A vfio-user server can't change its interrupts");
        }
        effect
    }

    fn places(&self) -> Vec<BarPlace> {
        lock(&self.inner.registers).config().places()
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        let inner = &self.inner;
        if inner.bar(bar, offset, data.len()).is_none() {
            return;
        }
        if let Some(msix) = &inner.msix
            && msix.bar_read(bar, offset, data)
        {
            self.add_pending(msix, bar, offset, data);
            return;
        }
        let Some(link) = inner.link() else { return };
        inner.counters.reads.increment();
        if let Err(error) = link.client.region_read(bar.into(), offset, data) {
            data.fill(0xFF);
            if !error.is_lost() {
                telemetry::guest_warn!(inner.log, device = %inner.name, bar, offset, %error, "A BAR read was refused");
            }
        }
        inner.deassert_intx(&link);
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        let inner = &self.inner;
        if inner.bar(bar, offset, data.len()).is_none() {
            return;
        }
        if let Some(msix) = &inner.msix
            && msix.bar_write(bar, offset, data)
        {
            return;
        }
        let Some(link) = inner.link() else { return };
        inner.counters.writes.increment();
        // A register may act on guest memory, and drivers (vmw_pvrdma with its shared region) check for the effect right after the store. A
        // trapped doorbell may arm a completion queue, after which only later completions count. As with every emulated device, the effect
        // is complete when the vCPU continues.
        let result = link.client.region_write(bar.into(), offset, data);
        if let Err(error) = result
            && !error.is_lost()
        {
            telemetry::guest_warn!(inner.log, device = %inner.name, bar, offset, %error, "A BAR write was refused");
        }
        inner.deassert_intx(&link);
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        lock(&self.inner.resources).doorbells.clone()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        let resources = lock(&self.inner.resources);
        if resources.trapped_for_intx || resources.mode == DoorbellMode::Trapped {
            return Vec::new();
        }
        let mapping = |range: &MappedRange| BarMapping {
            bar: range.bar,
            offset: range.area.offset,
            len: range.area.size,
            fd: Arc::clone(&range.area.fd),
            fd_offset: range.area.fd_offset,
            read_only: false,
        };
        resources.ranges.iter().map(mapping).collect()
    }

    fn attach_intx(&self, line: Arc<dyn IntxLine>) {
        if let Err(error) = self.inner.intx.attach(line) {
            telemetry::guest_warn!(self.inner.log, device = %self.inner.name, %error, "An INTx wire can't be driven");
        }
    }

    fn reset(&self) -> Result<(), FunctionError> {
        let inner = &self.inner;
        let mut registers = lock(&inner.registers);
        registers.config_mut().reset();
        if let Some(msix) = &inner.msix {
            msix.reset();
        }
        inner.set_intx(false);
        // The BARs are removed now, and return with the ranges that are valid then.
        lock(&inner.resources).trapped_for_intx = false;
        apply_intx(inner, &registers);
        let result = match inner.link() {
            None => Ok(()),
            Some(link) => link.client.reset().and_then(|()| inner.set_interrupt_mode(&link)),
        };
        events::take(inner.intx_event.as_fd());
        inner.vectors.iter().for_each(VectorEvent::forget);
        match result {
            Err(error) if !error.is_lost() => Err(self.failed("be reset", error)),
            _ => Ok(()),
        }
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        self.set_quiesced(true)
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        self.set_quiesced(false)
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        self.save_ours()
    }

    fn inspect(&self) -> serde_json::Value {
        let inner = &self.inner;
        let (mode, mapped, doorbells) = {
            let resources = lock(&inner.resources);
            let range = |range: &MappedRange| {
                json!({
                    "bar": range.bar,
                    "offset": format!("{:#x}", range.area.offset),
                    "size": range.area.size,
                })
            };
            let ranges: Vec<_> = resources.ranges.iter().map(range).collect();
            (resources.mode, ranges, resources.doorbells.len())
        };
        let counters = &inner.counters;
        json!({
            "kind": "vfio-user",
            "server": inner.connector.target(),
            "connected": self.is_connected(),
            "doorbell_mode": inner.shape.doorbell_mode.then_some(match mode {
                DoorbellMode::Trapped => "trapped",
                DoorbellMode::Mapped => "mapped",
            }),
            "mapped": mode == DoorbellMode::Mapped,
            "mappable": mapped,
            "doorbells": doorbells,
            "msix": inner.msix.as_ref().map(Msix::inspect),
            "reads": counters.reads.get(),
            "writes": counters.writes.get(),
            "intx": counters.intx.get(),
            "mode_changes": counters.mode_changes.get(),
            "losses": counters.losses.get(),
            "reconnections": counters.reconnections.get(),
            "failed_attempts": counters.failed_attempts.get(),
        })
    }
}

impl VfioUserFunction {
    /// Adds pending bits of masked vectors whose signals are in KVM's eventfds.
    fn add_pending(&self, msix: &Msix, bar: u8, offset: u64, data: &mut [u8]) {
        let layout = msix.layout();
        let start = u64::from(layout.pba_offset());
        if bar != layout.pba_bar() || !(start..start + layout.pba_size()).contains(&offset) {
            return;
        }
        for (at, byte) in (offset - start..).zip(data.iter_mut()) {
            let first = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(8);
            let vectors = self.inner.vectors.get(first..).unwrap_or_default();
            for (bit, vector) in vectors.iter().take(8).enumerate() {
                *byte |= u8::from(vector.watched().is_none() && vector.is_pending()) << bit;
            }
        }
    }
}

fn apply_intx(inner: &Inner, registers: &Registers) {
    if let Err(error) = inner.intx.follow(registers.config()) {
        telemetry::guest_warn!(inner.log, device = %inner.name, %error, "An INTx wire can't be driven");
    }
}
