//! The PCI Express root complex: segment 0, bus 0, a host bridge at 00:00.0, up to 32 slots of 8 functions.
//!
//! ```text
//! guest ── ECAM ───────┐                                    ┌─▶ function.config_read / config_write
//! guest ── 0xCF8/CFC ──┴─▶ PciRoot ──── by slot, function ──┘            │ ConfigEffect
//!                             └── settle: unplace, then place ◀──────────┘
//!                                          │
//! monitor's buses, ioeventfds, memslots ◀──┴ BarPlacer
//! ```
//!
//! Locks: the table of functions is never locked while a function is called; the placement lock is held
//! during calls of [`BarPlacer`], which therefore must not call the root.

mod access;
mod address;
mod host_bridge;
mod intx;
mod placement;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLock};

pub use access::{CONFIG_PORTS_LEN, CONFIG_PORTS_START, ECAM_SIZE};
pub use address::{FUNCTIONS, FunctionAddress, SLOTS};
pub use intx::{FIRST_INTX_GSI, IntxRoute, IntxSink, intx_gsi};
pub use windows::{AddressRange, Windows};

use crate::config::{ConfigError, InterruptPin, SavedConfig};
use crate::function::{BarKind, BarLayout, BarPlacer, ConfigEffect, FunctionError, PciFunction};
use crate::registers::*;
use crate::sync::{lock, read, write};
use host_bridge::HostBridge;
use intx::IntxWires;
use placement::{BarStatus, Placement};
use windows::Allocator;

const SAVED_VERSION: u32 = 1;

/// What a root is made of.
#[derive(Clone)]
pub struct RootConfig {
    /// Where BARs may lie.
    pub windows: Windows,
    /// Connects BARs to the guest.
    pub placer: Arc<dyn BarPlacer>,
    /// Drives GSIs 16 to 19.
    pub intx: Arc<dyn IntxSink>,
}

/// The root complex. Thread-safe; the monitor wires [`PciRoot::ecam_read`] and the others into its buses.
pub struct PciRoot {
    windows: Windows,
    functions: RwLock<BTreeMap<FunctionAddress, Arc<dyn PciFunction>>>,
    placement: Mutex<Placement>,
    wires: Arc<IntxWires>,
    host_bridge: Arc<HostBridge>,
    /// What was last written to 0xCF8.
    latch: AtomicU32,
}

impl std::fmt::Debug for PciRoot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let functions: Vec<_> = self.functions().iter().map(|(at, f)| format!("{at} {}", f.name())).collect();
        formatter.debug_struct("PciRoot").field("functions", &functions).finish_non_exhaustive()
    }
}

impl PciRoot {
    /// A root with nothing but its host bridge.
    #[must_use]
    pub fn new(config: RootConfig) -> Self {
        Self::with(config, HostBridge::new(), 0)
    }

    /// A root in saved state. Plug the restored functions at their addresses, then call
    /// [`PciRoot::place_all`].
    ///
    /// # Errors
    /// When the state is of another version or damaged.
    pub fn restore(config: RootConfig, saved: &SavedRoot) -> Result<Self, RootError> {
        if saved.version != SAVED_VERSION {
            return Err(RootError::Version { found: saved.version, known: SAVED_VERSION });
        }
        let bridge = HostBridge::restore(&saved.host_bridge).map_err(RootError::HostBridge)?;
        Ok(Self::with(config, bridge, access::latch_value(saved.config_address)))
    }

    fn with(config: RootConfig, bridge: HostBridge, latch: u32) -> Self {
        let host_bridge = Arc::new(bridge);
        let as_function: Arc<dyn PciFunction> = host_bridge.clone();
        Self {
            windows: config.windows,
            functions: RwLock::new(BTreeMap::from([(FunctionAddress::HOST_BRIDGE, as_function)])),
            placement: Mutex::new(Placement::new(config.windows, config.placer)),
            wires: IntxWires::new(config.intx),
            host_bridge,
            latch: AtomicU32::new(latch),
        }
    }

    /// The state of the root itself; functions are saved by their owner.
    #[must_use]
    pub fn save(&self) -> SavedRoot {
        SavedRoot {
            version: SAVED_VERSION,
            config_address: self.latch.load(Ordering::SeqCst),
            host_bridge: self.host_bridge.save_config(),
        }
    }

    /// Plugs a function in and hands it its INTx line, if its interrupt pin register names one. Function 0
    /// of a slot comes first: without it a guest finds none of the others.
    ///
    /// # Errors
    /// When the place is taken, function 0 is missing, or another function has the same name.
    pub fn plug(&self, at: FunctionAddress, function: Arc<dyn PciFunction>) -> Result<(), RootError> {
        let pin = interrupt_pin(function.as_ref());
        {
            let mut functions = write(&self.functions);
            if let Some(other) = functions.get(&at) {
                return Err(RootError::Taken { at, by: other.name().to_owned() });
            }
            if let Some((other, _)) = functions.iter().find(|(_, other)| other.name() == function.name()) {
                return Err(RootError::SameName { name: function.name().to_owned(), at: *other });
            }
            let zero = FunctionAddress::from_devfn(at.slot() << 3);
            if at.function() != 0 && !functions.contains_key(&zero) {
                return Err(RootError::NoFunctionZero { at });
            }
            functions.insert(at, Arc::clone(&function));
        }
        if let Some(pin) = pin {
            function.attach_intx(self.wires.line(at, pin));
        }
        Ok(())
    }

    /// Plugs a function in as function 0 of the first free slot.
    ///
    /// # Errors
    /// When all slots are taken, or as for [`PciRoot::plug`].
    pub fn plug_next(&self, function: Arc<dyn PciFunction>) -> Result<FunctionAddress, RootError> {
        let at = {
            let functions = read(&self.functions);
            (0..SLOTS)
                .map(|slot| FunctionAddress::from_devfn(slot << 3))
                .find(|at| !functions.contains_key(at))
                .ok_or_else(|| RootError::NoFreeSlot { name: function.name().to_owned() })?
        };
        self.plug(at, function)?;
        Ok(at)
    }

    /// The functions by address, the host bridge among them.
    #[must_use]
    pub fn functions(&self) -> Vec<(FunctionAddress, Arc<dyn PciFunction>)> {
        read(&self.functions).iter().map(|(at, function)| (*at, Arc::clone(function))).collect()
    }

    /// The function at an address.
    #[must_use]
    pub fn function(&self, at: FunctionAddress) -> Option<Arc<dyn PciFunction>> {
        read(&self.functions).get(&at).cloned()
    }

    /// What firmware does at power-on: gives every BAR an address (decoding stays off until the guest
    /// enables it) and writes interrupt lines. Call it once, when everything is plugged, before the guest
    /// runs; [`PciRoot::reset`] does it again.
    ///
    /// # Errors
    /// When the windows are too small.
    pub fn assign_bars(&self) -> Result<(), RootError> {
        let functions = self.functions();
        let mut bars: Vec<_> = functions
            .iter()
            .flat_map(|(at, function)| function.bars().into_iter().map(move |bar| (*at, function, bar)))
            .collect();
        // Large ones first: at natural alignment this leaves no gaps between them.
        bars.sort_by_key(|(at, _, bar)| (std::cmp::Reverse(bar.size), *at, bar.index));
        let mut allocator = Allocator::new(&self.windows);
        for (at, function, bar) in bars {
            let address = allocator
                .allocate(&bar)
                .ok_or_else(|| RootError::NoRoom { name: function.name().to_owned(), layout: bar })?;
            let bytes = address.to_le_bytes();
            let register = BAR0 + 4 * u16::from(bar.index);
            let mut effect = function.config_write(register, &bytes[..4]);
            if bar.kind == BarKind::Memory64 {
                effect = merge(effect, function.config_write(register + 4, &bytes[4..]));
            }
            self.act_on(effect, at, function);
        }
        for (at, function) in &functions {
            if let Some(pin) = interrupt_pin(function.as_ref()) {
                let [line, ..] = intx_gsi(at.slot(), pin).to_le_bytes();
                function.config_write(INTERRUPT_LINE, &[line]);
            }
        }
        Ok(())
    }

    /// Makes every BAR answer where its configuration space says; for functions restored from saved state.
    pub fn place_all(&self) {
        for (at, function) in self.functions() {
            lock(&self.placement).settle(at, &function, false);
        }
    }

    /// Attaches doorbells and mappings of a function's placed BARs anew, after they changed for a reason
    /// other than a configuration write.
    pub fn refresh(&self, at: FunctionAddress) {
        if let Some(function) = self.function(at) {
            lock(&self.placement).settle(at, &function, true);
        }
    }

    /// Machine reset: every function returns to power-on state, BARs are assigned as at power-on. No vCPU runs
    /// meanwhile.
    ///
    /// # Errors
    /// The first function that can't be reset; the others are reset all the same.
    pub fn reset(&self) -> Result<(), RootError> {
        self.latch.store(0, Ordering::SeqCst);
        let mut result = Ok(());
        for (at, function) in self.functions() {
            let one = function.reset().map_err(RootError::Reset);
            lock(&self.placement).settle(at, &function, false);
            result = result.and(one);
        }
        result.and(self.assign_bars())
    }

    /// Reads `data.len()` bytes at `offset` of the ECAM window ([`ECAM_SIZE`] bytes): any offset and
    /// length; where no function is, ones.
    pub fn ecam_read(&self, offset: u64, data: &mut [u8]) {
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            let piece = &mut data[at..at + len];
            match offset.checked_add(widen(at)).and_then(access::ecam_target) {
                Some((address, register)) => self.config_read(address, register, piece),
                None => piece.fill(0xFF),
            }
        }
    }

    /// Writes likewise; where no function is, nothing happens.
    pub fn ecam_write(&self, offset: u64, data: &[u8]) {
        let mut pending: Option<(FunctionAddress, ConfigEffect)> = None;
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            if let Some((address, register)) = offset.checked_add(widen(at)).and_then(access::ecam_target) {
                let effect = self.config_write(address, register, &data[at..at + len]);
                // Both halves of a 64-bit BAR take effect at once.
                match &mut pending {
                    Some((same, sum)) if *same == address => *sum = merge(*sum, effect),
                    _ => {
                        self.act(pending.replace((address, effect)));
                    }
                }
            }
        }
        self.act(pending);
    }

    /// Reads `data.len()` bytes at port 0xCF8 + `offset`, any offset and length. The latch at 0xCF8 answers
    /// to dwords only; what else lies below 0xCFC (the reset control register at 0xCF9 of some machines)
    /// isn't part of PCI and reads as ones.
    pub fn ports_read(&self, offset: u64, data: &mut [u8]) {
        let latch = self.latch.load(Ordering::SeqCst);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&latch.to_le_bytes());
            return;
        }
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            let piece = &mut data[at..at + len];
            match offset.checked_add(widen(at)).and_then(|port| port_target(latch, port)) {
                Some((address, register)) => self.config_read(address, register, piece),
                None => piece.fill(0xFF),
            }
        }
    }

    /// Writes likewise; a write to 0xCF8 to 0xCFB that isn't a dword at 0xCF8 does nothing.
    pub fn ports_write(&self, offset: u64, data: &[u8]) {
        if offset == 0
            && let Ok(bytes) = <[u8; 4]>::try_from(data)
        {
            self.latch.store(access::latch_value(u32::from_le_bytes(bytes)), Ordering::SeqCst);
            return;
        }
        let latch = self.latch.load(Ordering::SeqCst);
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            if let Some((address, register)) =
                offset.checked_add(widen(at)).and_then(|port| port_target(latch, port))
            {
                let effect = self.config_write(address, register, &data[at..at + len]);
                self.act(Some((address, effect)));
            }
        }
    }

    /// A piece within one dword.
    fn config_read(&self, at: FunctionAddress, register: u16, data: &mut [u8]) {
        let (function, siblings) = {
            let functions = read(&self.functions);
            (functions.get(&at).cloned(), has_siblings(&functions, at))
        };
        let Some(function) = function else {
            data.fill(0xFF);
            return;
        };
        function.config_read(register, data);
        if siblings
            && let Some(byte) = HEADER_TYPE.checked_sub(register).and_then(|i| data.get_mut(usize::from(i)))
        {
            *byte |= HEADER_MULTIFUNCTION;
        }
    }

    /// A piece within one dword.
    fn config_write(&self, at: FunctionAddress, register: u16, data: &[u8]) -> ConfigEffect {
        self.function(at).map_or_else(ConfigEffect::default, |function| function.config_write(register, data))
    }

    fn act(&self, write: Option<(FunctionAddress, ConfigEffect)>) {
        if let Some((at, effect)) = write
            && let Some(function) = self.function(at)
        {
            self.act_on(effect, at, &function);
        }
    }

    fn act_on(&self, effect: ConfigEffect, at: FunctionAddress, function: &Arc<dyn PciFunction>) {
        if effect.decoding_changed || effect.resources_changed {
            lock(&self.placement).settle(at, function, effect.resources_changed);
        }
    }

    /// For ACPI's `_PRT`: the pins that plugged functions use.
    #[must_use]
    pub fn routing_table(&self) -> Vec<IntxRoute> {
        let mut routes: Vec<_> = self
            .functions()
            .iter()
            .filter_map(|(at, function)| {
                let pin = interrupt_pin(function.as_ref())?;
                Some(IntxRoute { slot: at.slot(), pin, gsi: intx_gsi(at.slot(), pin) })
            })
            .collect();
        routes.sort();
        routes.dedup();
        routes
    }

    /// The windows it was made with, for ACPI's `_CRS`.
    #[must_use]
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// The device tree: windows, INTx wires, and each function with its BARs, MSI-X and own state.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let functions: serde_json::Map<_, _> = self
            .functions()
            .iter()
            .map(|(at, function)| (at.to_string(), self.inspect_function(*at, function)))
            .collect();
        let wires: Vec<_> = self
            .wires
            .levels()
            .iter()
            .map(|(gsi, asserting)| serde_json::json!({ "gsi": gsi, "functions_asserting": asserting }))
            .collect();
        serde_json::json!({ "windows": self.windows, "intx": wires, "functions": functions })
    }

    fn inspect_function(&self, at: FunctionAddress, function: &Arc<dyn PciFunction>) -> serde_json::Value {
        // The placement lock isn't held while the function is called.
        let bars = function.bars();
        let status: Vec<_> = {
            let placement = lock(&self.placement);
            bars.iter().map(|bar| placement.status(at, bar.index)).collect()
        };
        let bars: Vec<_> = bars.iter().zip(status).map(|(bar, status)| inspect_bar(bar, status)).collect();
        let pin = interrupt_pin(function.as_ref());
        serde_json::json!({
            "name": function.name(),
            "vendor_id": format!("{:#06x}", config_u16(function.as_ref(), VENDOR_ID)),
            "device_id": format!("{:#06x}", config_u16(function.as_ref(), DEVICE_ID)),
            "command": format!("{:#06x}", config_u16(function.as_ref(), COMMAND)),
            "bars": bars,
            "intx": pin.map(|pin| serde_json::json!({
                "pin": format!("INT{pin:?}"),
                "gsi": intx_gsi(at.slot(), pin),
            })),
            "msix": inspect_msix(function.as_ref()),
            "state": function.inspect(),
        })
    }
}

fn inspect_bar(bar: &BarLayout, status: BarStatus) -> serde_json::Value {
    let (state, address, reason) = match status {
        BarStatus::Off => ("off", None, None),
        BarStatus::Placed(address) => ("placed", Some(address), None),
        BarStatus::Refused(address, reason) => ("refused", Some(address), Some(reason)),
    };
    serde_json::json!({
        "index": bar.index,
        "kind": bar.kind,
        "size": bar.size,
        "prefetchable": bar.prefetchable,
        "state": state,
        "address": address.map(|address| format!("{address:#x}")),
        "reason": reason,
    })
}

fn inspect_msix(function: &dyn PciFunction) -> Option<serde_json::Value> {
    let at = find_capability(function, CAP_MSIX)?;
    let control = config_u16(function, at.checked_add(2)?);
    Some(serde_json::json!({
        "vectors": (control & 0x7FF) + 1,
        "enabled": control & MSIX_ENABLE != 0,
        "masked": control & MSIX_FUNCTION_MASK != 0,
    }))
}

/// Walks a function's capability list, which may be another process's: no more steps than there is room for.
pub(crate) fn find_capability(function: &dyn PciFunction, id: u8) -> Option<u16> {
    if config_u16(function, STATUS) & STATUS_CAPABILITY_LIST == 0 {
        return None;
    }
    let [mut at, _] = config_u16(function, CAPABILITY_POINTER).to_le_bytes();
    for _ in 0..LEGACY_CONFIG_SPACE_SIZE / 4 {
        at &= !3;
        if u16::from(at) < FIRST_CAPABILITY {
            return None;
        }
        let [found, next] = config_u16(function, u16::from(at)).to_le_bytes();
        if found == id {
            return Some(u16::from(at));
        }
        at = next;
    }
    None
}

fn config_u16(function: &dyn PciFunction, register: u16) -> u16 {
    let mut data = [0; 2];
    function.config_read(register, &mut data);
    u16::from_le_bytes(data)
}

fn interrupt_pin(function: &dyn PciFunction) -> Option<InterruptPin> {
    let mut pin = [0];
    function.config_read(INTERRUPT_PIN, &mut pin);
    InterruptPin::from_register(pin[0])
}

fn has_siblings(functions: &BTreeMap<FunctionAddress, Arc<dyn PciFunction>>, at: FunctionAddress) -> bool {
    let first = FunctionAddress::from_devfn(at.slot() << 3);
    let last = FunctionAddress::from_devfn(at.slot() << 3 | 7);
    functions.range(first..=last).nth(1).is_some()
}

fn port_target(latch: u32, port: u64) -> Option<(FunctionAddress, u16)> {
    let data_port = u8::try_from(port).ok()?.checked_sub(4).filter(|port| *port < 4)?;
    access::latch_target(latch, data_port)
}

fn merge(a: ConfigEffect, b: ConfigEffect) -> ConfigEffect {
    ConfigEffect {
        decoding_changed: a.decoding_changed || b.decoding_changed,
        resources_changed: a.resources_changed || b.resources_changed,
    }
}

fn widen(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Saved state of [`PciRoot`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedRoot {
    /// Version of this type, 1.
    pub version: u32,
    /// The latch at 0xCF8.
    pub config_address: u32,
    /// The host bridge.
    pub host_bridge: SavedConfig,
}

/// The root bus can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// There is no such place.
    #[error(
        "There is no function {function} of slot {slot} on the PCI bus; use slots 0 to 31 and functions 0 to 7"
    )]
    NoSuchAddress {
        /// Slot.
        slot: u8,
        /// Function.
        function: u8,
    },
    /// Another function is there.
    #[error("PCI address {at} is taken by {by}; choose another")]
    Taken {
        /// The address.
        at: FunctionAddress,
        /// Name of the function there.
        by: String,
    },
    /// Names are unique.
    #[error("There is a PCI device named {name} already, at {at}; choose another name")]
    SameName {
        /// The name.
        name: String,
        /// Where the other one is.
        at: FunctionAddress,
    },
    /// A guest looks at function 0 first.
    #[error("PCI address {at} can't be used while the slot has no function 0; plug that first")]
    NoFunctionZero {
        /// The address.
        at: FunctionAddress,
    },
    /// All slots are taken.
    #[error("No PCI slot is free for {name}; give the VM fewer devices, or several functions per slot")]
    NoFreeSlot {
        /// Name of the function.
        name: String,
    },
    /// A window is too small.
    #[error(
        "No address is left for BAR {} of {name} ({:?}, {:#x} bytes); give the VM fewer devices or smaller BARs",
        layout.index, layout.kind, layout.size
    )]
    NoRoom {
        /// Name of the function.
        name: String,
        /// The BAR.
        layout: BarLayout,
    },
    /// A function could not be reset.
    #[error("The PCI bus could not be reset completely")]
    Reset(#[source] FunctionError),
    /// Saved by a later program.
    #[error("Saved PCI root state has version {found}, this program knows up to {known}; use a newer one")]
    Version {
        /// Version of the saved state.
        found: u32,
        /// The newest that is known.
        known: u32,
    },
    /// The host bridge could not be restored.
    #[error("The PCI host bridge could not be restored")]
    HostBridge(#[source] ConfigError),
}
