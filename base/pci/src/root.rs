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
//! Locks: no function is called while the table of functions is locked. The placement lock is held during calls of
//! [`BarPlacer`], which therefore must not call the root.

mod access;
mod address;
mod host_bridge;
mod intx;
mod placement;
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

/// Parameters of a root.
#[derive(Clone)]
pub struct RootConfig {
    /// Address windows of BARs.
    pub windows: Windows,
    /// Connects BARs to the guest.
    pub placer: Arc<dyn BarPlacer>,
    /// Drives GSIs 16 to 19.
    pub intx: Arc<dyn IntxSink>,
}

/// The root complex. Thread-safe. The monitor connects [`PciRoot::ecam_read`] and the others to its buses.
pub struct PciRoot {
    windows: Windows,
    functions: RwLock<BTreeMap<FunctionAddress, Arc<dyn PciFunction>>>,
    placement: Mutex<Placement>,
    wires: Arc<IntxWires>,
    host_bridge: Arc<HostBridge>,
    /// The value that was last written to 0xCF8.
    latch: AtomicU32,
}

impl std::fmt::Debug for PciRoot {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let functions: Vec<_> = self.functions().iter().map(|(at, f)| format!("{at} {}", f.name())).collect();
        formatter.debug_struct("PciRoot").field("functions", &functions).finish_non_exhaustive()
    }
}

impl PciRoot {
    /// Creates a root with only its host bridge.
    #[must_use]
    pub fn new(config: RootConfig) -> Self {
        Self::with(config, HostBridge::new(), 0)
    }

    /// Restores a root. Plug the restored functions at their addresses, then call [`PciRoot::place_all`].
    ///
    /// # Errors
    /// The version isn't supported, or the state is damaged.
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

    /// Saves the root's own state. The functions' owner saves the functions.
    #[must_use]
    pub fn save(&self) -> SavedRoot {
        SavedRoot {
            version: SAVED_VERSION,
            config_address: self.latch.load(Ordering::SeqCst),
            host_bridge: self.host_bridge.save_config(),
        }
    }

    /// Plugs in a function, and connects its INTx line if its interrupt pin register names one. Function 0 of a slot
    /// must be first: without it a guest finds none of the others.
    ///
    /// # Errors
    /// The address is in use, function 0 is missing, or another function has the same name.
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

    /// Plugs in a function as function 0 of the first free slot.
    ///
    /// # Errors
    /// No slot is free, or as for [`PciRoot::plug`].
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

    /// Returns the functions by address, including the host bridge.
    #[must_use]
    pub fn functions(&self) -> Vec<(FunctionAddress, Arc<dyn PciFunction>)> {
        read(&self.functions).iter().map(|(at, function)| (*at, Arc::clone(function))).collect()
    }

    /// Returns the function at an address.
    #[must_use]
    pub fn function(&self, at: FunctionAddress) -> Option<Arc<dyn PciFunction>> {
        read(&self.functions).get(&at).cloned()
    }

    /// Does the firmware's work at power-on: assigns an address to every BAR and writes interrupt lines. Decoding stays
    /// off until the guest enables it. Call it once after all functions are plugged in, before the guest runs;
    /// [`PciRoot::reset`] repeats it.
    ///
    /// # Errors
    /// The windows are too small.
    pub fn assign_bars(&self) -> Result<(), RootError> {
        let functions = self.functions();
        let mut bars: Vec<_> = functions
            .iter()
            .flat_map(|(at, function)| function.bars().into_iter().map(move |bar| (*at, function, bar)))
            .collect();
        // Largest first: with natural alignment this leaves no gaps.
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

    /// Places every BAR at the address in its configuration space, for restored functions.
    pub fn place_all(&self) {
        for (at, function) in self.functions() {
            lock(&self.placement).settle(at, &function, false);
        }
    }

    /// Attaches doorbells and mappings of a function's placed BARs again, after a change by something other than a
    /// configuration write.
    pub fn refresh(&self, at: FunctionAddress) {
        if let Some(function) = self.function(at) {
            lock(&self.placement).settle(at, &function, true);
        }
    }

    /// Resets the machine: every function returns to power-on state, and BARs are assigned as at power-on. No vCPU may
    /// run meanwhile.
    ///
    /// # Errors
    /// The first function that can't be reset; the others are still reset.
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

    /// Reads `data.len()` bytes at `offset` of the ECAM window ([`ECAM_SIZE`] bytes), with any offset and length.
    /// Missing functions read as ones.
    pub fn ecam_read(&self, offset: u64, data: &mut [u8]) {
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            let piece = &mut data[at..at + len];
            match offset.checked_add(widen(at)).and_then(access::ecam_target) {
                Some((address, register)) => self.config_read(address, register, piece),
                None => piece.fill(0xFF),
            }
        }
    }

    /// Writes `data` at `offset` of the ECAM window. Writes to missing functions are dropped.
    pub fn ecam_write(&self, offset: u64, data: &[u8]) {
        let mut pending: Option<(FunctionAddress, ConfigEffect)> = None;
        for (at, len) in access::aligned_pieces(offset, data.len()) {
            if let Some((address, register)) = offset.checked_add(widen(at)).and_then(access::ecam_target) {
                let effect = self.config_write(address, register, &data[at..at + len]);
                // Both halves of a 64-bit BAR must take effect at once.
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

    /// Reads `data.len()` bytes at port 0xCF8 + `offset`, with any offset and length. The latch at 0xCF8 responds to
    /// dwords only. Other accesses below 0xCFC (some machines have a reset control register at 0xCF9) aren't part of
    /// PCI and read as ones.
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

    /// Writes `data` at port 0xCF8 + `offset`. A write to 0xCF8 to 0xCFB that isn't a dword at 0xCF8 is dropped.
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

    /// Reads a piece within one dword.
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

    /// Writes a piece within one dword.
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

    /// Returns the pins that plugged functions use, for ACPI's `_PRT`.
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

    /// Returns the address windows, for ACPI's `_CRS`.
    #[must_use]
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// Returns the device tree: windows, INTx wires, and each function with its BARs, MSI-X and own state.
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
        // The placement lock isn't held during calls of the function.
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

/// Returns the offset of a function's first capability with this ID, found by walking the list as a guest does. The list
/// may be another process', so the number of steps is limited.
pub fn find_capability(function: &dyn PciFunction, id: u8) -> Option<u16> {
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

/// The root bus can't be set up or changed.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The address doesn't exist.
    #[error(
        "There is no function {function} of slot {slot} on the PCI bus; use slots 0 to 31 and functions 0 to 7"
    )]
    NoSuchAddress {
        /// Slot asked for, above 31 if it is the invalid part.
        slot: u8,
        /// Function asked for, above 7 if it is the invalid part.
        function: u8,
    },
    /// Another function has this address.
    #[error("PCI address {at} is taken by {by}; choose another")]
    Taken {
        /// The address.
        at: FunctionAddress,
        /// Name of the function there.
        by: String,
    },
    /// Another function has this name.
    #[error("There is a PCI device named {name} already, at {at}; choose another name")]
    SameName {
        /// The name.
        name: String,
        /// The other function's address.
        at: FunctionAddress,
    },
    /// Function 0 is missing, which a guest probes first.
    #[error("PCI address {at} can't be used while the slot has no function 0; plug that first")]
    NoFunctionZero {
        /// The address.
        at: FunctionAddress,
    },
    /// All slots are in use.
    #[error("No PCI slot is free for {name}; give the VM fewer devices, or several functions per slot")]
    NoFreeSlot {
        /// Name of the function.
        name: String,
    },
    /// The windows have no room for a BAR.
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
    /// A function can't be reset.
    #[error("The PCI bus could not be reset completely")]
    Reset(#[source] FunctionError),
    /// A later version saved the state.
    #[error("Saved PCI root state has version {found}, this program knows up to {known}; use a newer one")]
    Version {
        /// Version of the saved state.
        found: u32,
        /// The newest supported version.
        known: u32,
    },
    /// The host bridge can't be restored.
    #[error("The PCI host bridge could not be restored")]
    HostBridge(#[source] ConfigError),
}
