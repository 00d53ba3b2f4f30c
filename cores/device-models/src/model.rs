//! The monitor's model of one device for one guest: the register values from the guest's view, those that the device
//! holds, the states, and the validated windows.
//!
//! ```text
//! guest's access ─▶ piece ─▶ write(reg, value) ─▶ Refusal, or Writes: what goes to the device
//!                          └▶ read(reg) ─▶ an answer, or "ask the device" ─▶ returned(reg, raw) ─▶ what the guest sees
//! device's causes ─▶ cause(bits) ─▶ virtual interrupt status
//! ```

use thiserror::Error;

use crate::describe::{
    Check, Class, Device, Effect, Event, Expr, Pointers, Reg, Returns, Space, State, Store, Values, Window,
    WindowId,
};
pub use crate::grants::{Denied, Granted, Grants};
use crate::graph::{Access, Given, Graph, Piece, View, no_base, truncated};

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq, Error, serde::Serialize, serde::Deserialize)]
#[error("A write of {value:X}h to {register} is refused: {why}")]
pub struct Refusal {
    /// The register.
    pub register: String,
    /// The value.
    pub value: u32,
    /// The check that failed.
    pub why: String,
}

/// A value from the device that the model rejects.
#[derive(Debug, Clone, PartialEq, Eq, Error, serde::Serialize, serde::Deserialize)]
#[error(
    "The device returned {value:X}h for {register}, which must be at least {least:X}h and less than {limit:X}h; the guest sees {shown:X}h"
)]
pub struct Disbelief {
    /// The register.
    pub register: String,
    /// The value that the device returned.
    pub value: u32,
    /// Smallest valid value.
    pub least: u64,
    /// Limit: values must be below it.
    pub limit: u64,
    /// The value that the guest reads.
    pub shown: u32,
}

/// The results of a guest's write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writes {
    /// Device register writes that precede the request itself.
    pub before: Vec<(Reg, u32)>,
    /// The value of the request itself, if it is forwarded.
    pub forward: Option<u32>,
    /// A checking function ran.
    pub decided: bool,
    /// The write was dropped: class `Deny`.
    pub denied: bool,
    /// The guest reset its device. The device must be reset, and restored to the model's state. Its windows stay
    /// granted until [`Model::recheck`] or [`Model::forget_all`], which the monitor calls after the device's reset.
    pub reset: bool,
    /// Registers that the monitor must read afterwards and pass to [`Model::returned`].
    pub looks: Vec<Reg>,
    /// Windows that the device no longer uses once it has the writes. Only then [`Model::give_back`] may release them.
    pub released: Vec<(WindowId, Granted)>,
}

/// Windows of a write's checks.
#[derive(Debug, Default)]
struct Checked {
    granted: Vec<(WindowId, Granted)>,
    standing: Vec<(WindowId, Option<Granted>)>,
}

/// The result of a guest's read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// The model's answer. The flag: the read reset the guest's device, as in [`Writes::reset`].
    Answer(u32, bool),
    /// The device has the value: read it, and pass it to [`Model::returned`].
    Ask,
}

/// The result of a value that the device returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The value that the guest reads.
    pub value: u32,
    /// The rejected value, if any.
    pub disbelief: Option<Disbelief>,
}

/// The model of a device for one guest.
#[derive(Debug, Clone)]
pub struct Model {
    device: &'static Device,
    graph: Graph,
    /// The device's values, as far as the monitor wrote them.
    physical: Vec<u32>,
    windows: Vec<Option<Granted>>,
}

impl PartialEq for Model {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.device, other.device)
            && self.graph == other.graph
            && self.physical == other.physical
            && self.windows == other.windows
    }
}

impl Eq for Model {}

impl std::hash::Hash for Model {
    fn hash<H: std::hash::Hasher>(&self, hasher: &mut H) {
        self.graph.hash(hasher);
        self.physical.hash(hasher);
        self.windows.hash(hasher);
    }
}

impl Model {
    /// Creates the model of a device after reset, for a guest with this Ethernet address.
    pub fn new(device: &'static Device, address: [u8; 6]) -> Self {
        let mut graph = Graph::new(device);
        for (&reg, byte) in device.identity.iter().zip(address) {
            graph.set(reg, u32::from(byte));
        }
        let physical = graph.values.clone();
        Self { device, graph, physical, windows: vec![None; device.windows.len()] }
    }

    /// Returns the description.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns values and states from the guest's view.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    pub(crate) fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// Evaluates an expression, with the device addresses of validated windows.
    pub fn number(&self, expr: &Expr) -> u64 {
        let bases = |id: WindowId| self.windows[id.index()].map_or(0, |window| window.device_base);
        expr.value(&View { graph: &self.graph, overlay: None, access: Given::default(), bases: &bases })
    }

    /// Returns the validated windows.
    pub fn windows(&self) -> &[Option<Granted>] {
        &self.windows
    }

    /// Returns whether the device is at a quiescent point, so that it can be handed to another guest.
    pub fn is_reusable(&self) -> bool {
        Device::holds(self.device.reusable, self.graph.states())
    }

    /// Returns the level of the virtual interrupt line.
    pub fn line(&self) -> bool {
        self.graph.line(self.device)
    }

    /// Returns the hooks: registers whose writes may run a check in the current states.
    pub fn hooks(&self) -> Vec<Reg> {
        hooks(self.device, self.graph.states())
    }

    /// Returns whether the model answers a whole access without the device and without a change of state.
    pub fn is_virtual(&self, access: &Access) -> bool {
        let piece = self.graph.piece(self.device, access.offset, access.size, access.write.is_some());
        let Some(reg) = piece.reg else { return piece.bytes == access.size };
        let register = self.device.register(reg);
        let (class, event) = match access.write {
            Some(_) => (register.write, Event::Write(reg)),
            None => (register.read, Event::Read(reg)),
        };
        piece.bytes == access.size
            && (matches!(class, Some(Class::Virtual | Class::Deny))
                || access.write.is_none() && matches!(register.returns, Returns::Shadow))
            && self.device.transitions.iter().all(|transition| transition.event != event)
    }

    /// Returns the bank that the device has selected.
    pub fn physical_bank(&self) -> u8 {
        self.device.bank.as_ref().map_or(0, |bank| {
            u8::try_from(self.physical[bank.register.index()] >> bank.shift & bank.mask).unwrap_or(0)
        })
    }

    /// Returns the device's value of a register, as far as the monitor wrote it.
    pub fn physical_value(&self, reg: Reg) -> u32 {
        self.physical[reg.index()]
    }

    /// Notes that the monitor wrote a device register.
    pub fn wrote_device(&mut self, reg: Reg, value: u32) {
        let held = &mut self.physical[reg.index()];
        *held = self.device.register(reg).held(*held, value);
    }

    /// Notes that the device was reset.
    pub fn device_was_reset(&mut self) {
        for (reg, register) in self.device.numbered() {
            self.physical[reg.index()] = register.reset;
        }
    }

    /// Handles a guest's write of a register, or of a part of one.
    ///
    /// # Errors
    /// A check failed. Nothing has changed then.
    pub fn write(&mut self, piece: Piece, value: u32, grants: &mut dyn Grants) -> Result<Writes, Refusal> {
        let Some(reg) = piece.reg else { return Ok(Writes { denied: true, ..Writes::default() }) };
        let register = self.device.register(reg);
        let class = register.write.unwrap_or(Class::Deny);
        if class == Class::Deny {
            return Ok(Writes { denied: true, ..Writes::default() });
        }
        let old = self.graph.value(reg);
        let whole = if piece.is_whole(register) {
            truncated(value, piece.bytes)
        } else {
            if matches!(class, Class::Check | Class::Dma | Class::Virtual) {
                return Err(refusal(register.name, value, "it is written as a whole only"));
            }
            let mask = truncated(u32::MAX, piece.bytes) << (8 * piece.skip);
            old & !mask | value << (8 * piece.skip) & mask
        };
        let stored = register.stored(old, whole);
        let access = Given { size: u32::from(piece.bytes), offset: piece.offset, written: whole };
        // Conditions use the bits as written: for write-one-to-clear registers these are the ones.
        let seen = if matches!(register.store, Store::ClearOnes(_)) { whole } else { stored };
        let firing = self.graph.firing(self.device, Event::Write(reg), Some((reg, seen)), access);
        let mut writes = Writes {
            forward: Graph::reaches(class).then_some(truncated(value, piece.bytes)),
            decided: firing.iter().any(|transition| !transition.checks.is_empty()),
            ..Writes::default()
        };
        let view = View { graph: &self.graph, overlay: Some((reg, seen)), access, bases: &no_base };
        let checks = firing.iter().flat_map(|transition| transition.checks);
        let Checked { granted, standing } =
            self.check(checks, &view, grants).map_err(|why| refusal(register.name, whole, &why))?;
        for (id, window) in granted {
            let before = self.windows[id.index()].replace(window);
            writes.released.extend(before.map(|before| (id, before)));
        }
        self.graph.set(reg, stored);
        for (id, window) in standing {
            let before = self.stand(id, window);
            writes.released.extend(before.map(|before| (id, before)));
        }
        let windows = &self.windows;
        let base = |id: WindowId| windows[id.index()].map_or(0, |window| window.device_base);
        let mut forgotten = Vec::new();
        self.graph.perform(self.device, &firing, access, &base, &mut |effect, view| match effect {
            Effect::Device(reg, expr) => {
                let value = expr.value(view) & u64::from(self.device.register(*reg).mask());
                writes.before.push((*reg, u32::try_from(value).unwrap_or(u32::MAX)));
            }
            Effect::Forget(window) => forgotten.push(*window),
            Effect::Reset => writes.reset = true,
            Effect::Look(reg) => writes.looks.push(*reg),
            _ => {}
        });
        for id in forgotten {
            let before = self.windows[id.index()].take();
            writes.released.extend(before.map(|before| (id, before)));
        }
        if writes.reset {
            writes.forward = None;
        }
        Ok(writes)
    }

    /// Carries out the checks of a write. If one fails, it returns the reason, and the windows of the others are released.
    fn check<'c>(
        &self,
        checks: impl Iterator<Item = &'c Check>,
        view: &View<'_>,
        grants: &mut dyn Grants,
    ) -> Result<Checked, String> {
        let mut checked = Checked::default();
        for check in checks {
            if let Check::Standing(id) = check {
                let window = check_standing(&self.device.windows[id.index()], view, grants);
                checked.standing.push((*id, window));
                continue;
            }
            match run(self.device, check, view, grants) {
                Ok(None) => {}
                Ok(Some(window)) => checked.granted.push(window),
                Err(why) => {
                    let standing =
                        checked.standing.into_iter().filter_map(|(id, window)| Some((id, window?)));
                    for (id, window) in checked.granted.into_iter().chain(standing) {
                        self.release(id, window, grants);
                    }
                    return Err(why);
                }
            }
        }
        Ok(checked)
    }

    /// Releases windows that a write has left unused. Call it after the device has got that write.
    pub fn give_back(&self, released: &[(WindowId, Granted)], grants: &mut dyn Grants) {
        for &(id, window) in released {
            self.release(id, window, grants);
        }
    }

    /// Handles a guest's read of a register, or of a part of one.
    pub fn read(&mut self, piece: Piece) -> Reads {
        let Some(reg) = piece.reg else { return Reads::Answer(0, false) };
        let register = self.device.register(reg);
        let firing = self.graph.firing(self.device, Event::Read(reg), None, Given::size(piece.bytes));
        let (mut answer, mut reset) = (None, false);
        self.graph.perform(self.device, &firing, Given::size(piece.bytes), &no_base, &mut |effect, view| {
            match effect {
                Effect::Answer(expr) => {
                    answer = Some(u32::try_from(expr.value(view) & 0xFFFF_FFFF).unwrap_or(0))
                }
                Effect::Reset => reset = true,
                _ => {}
            }
        });
        let known = match (register.read, register.returns) {
            _ if answer.is_some() => answer,
            (Some(Class::Deny) | None, _) => Some(register.reset),
            (Some(Class::Virtual), _) | (_, Returns::Shadow) => {
                Some(self.graph.value(register.mirrors.unwrap_or(reg)) >> (8 * piece.skip))
            }
            _ => None,
        };
        known.map_or(Reads::Ask, |value| Reads::Answer(truncated(value, piece.bytes), reset))
    }

    /// Handles the value `raw` that the device returned to a read of `piece`.
    pub fn returned(&mut self, piece: Piece, raw: u32) -> Shown {
        let raw = truncated(raw, piece.bytes);
        let Some(reg) = piece.reg else { return Shown { value: 0, disbelief: None } };
        let register = self.device.register(reg);
        if !piece.is_whole(register) {
            return Shown { value: raw, disbelief: None };
        }
        let remembered = self.graph.value(reg);
        let mut disbelief = None;
        let shown = match register.returns {
            Returns::Any => raw,
            Returns::Shadow => remembered,
            Returns::Bits(mask) => {
                self.physical[reg.index()] = self.physical[reg.index()] & !mask | raw & mask;
                raw & mask | remembered & !mask
            }
            Returns::Within(least, limit) => {
                let (least, limit) = (self.graph.number(&least), self.graph.number(&limit));
                if least < limit && !(least..limit).contains(&u64::from(raw)) {
                    disbelief = Some(Disbelief {
                        register: register.name.to_owned(),
                        value: raw,
                        least,
                        limit,
                        shown: remembered,
                    });
                    remembered
                } else {
                    raw
                }
            }
        };
        if register.span <= u32::from(register.width) {
            let firing = self.graph.firing(
                self.device,
                Event::Returned(reg),
                Some((reg, shown)),
                Given::size(piece.bytes),
            );
            if !matches!(register.returns, Returns::Any) {
                self.graph.set(reg, shown);
            }
            self.graph.perform(self.device, &firing, Given::size(piece.bytes), &no_base, &mut |_, _| {});
        }
        Shown { value: shown, disbelief }
    }

    /// Adds causes from the device to the virtual status. The monitor must then read the returned registers and pass
    /// them to [`Self::returned`].
    #[must_use]
    pub fn cause(&mut self, causes: u32) -> Vec<Reg> {
        let interrupts = &self.device.interrupts;
        let causes = causes & !interrupts.derived;
        let status = self.graph.value(interrupts.status) | causes;
        self.graph.set(interrupts.status, status);
        let firing = self.graph.firing(self.device, Event::Cause(causes), None, Given::default());
        let mut looks = Vec::new();
        self.graph.perform(self.device, &firing, Given::default(), &no_base, &mut |effect, _| {
            if let Effect::Look(reg) = effect {
                looks.push(*reg);
            }
        });
        looks
    }

    /// Stores a register with details of a cause, as the device returned it when the cause was harvested.
    pub fn latch(&mut self, reg: Reg, value: u32) {
        self.graph.set(reg, value & self.device.register(reg).mask());
    }

    /// Sets bits of the virtual status that report an error to the driver.
    pub fn raise(&mut self, bits: u32) {
        let status = self.device.interrupts.status;
        self.graph.set(status, self.graph.value(status) | bits);
    }

    /// Clears bits of the virtual status that the guest has read from its shadow page.
    pub fn was_read(&mut self, bits: u32) {
        let status = self.device.interrupts.status;
        self.graph.set(status, self.graph.value(status) & !bits);
    }

    /// Merges states that no check and no window can distinguish, for explorations. Registers without representatives
    /// have their reset value, counters are rounded down to a representative, and the interrupt status is clear.
    #[must_use]
    pub fn abstracted(mut self) -> Self {
        for (reg, register) in self.device.numbered() {
            let at = reg.index();
            self.graph.values[at] = register.abstracted(self.graph.values[at]);
            self.physical[at] = register.abstracted(self.physical[at]);
        }
        self.graph.values[self.device.interrupts.status.index()] = 0;
        self
    }

    /// Records the result of a check in advance. Returns the window that it replaces.
    fn stand(&mut self, id: WindowId, window: Option<Granted>) -> Option<Granted> {
        let standing = self.device.windows[id.index()].standing.as_ref()?;
        let state = if window.is_some() { standing.granted } else { standing.each };
        self.graph.enter(state);
        std::mem::replace(&mut self.windows[id.index()], window)
    }

    /// Enters a state, by a step of the device's context.
    pub fn enter(&mut self, state: State) {
        self.graph.enter(state);
    }

    /// Sets the ring pointers to their reset values, and raises the causes that make the driver restart its ring.
    pub fn restart_pointers(&mut self, pointers: &Pointers) {
        for reg in [pointers.position, pointers.next, pointers.read.0] {
            self.graph.set(reg, self.device.register(reg).reset);
        }
        self.raise(pointers.restart);
    }

    /// Validates every window that the device will use with the guest's registers. The device was reset, so it uses
    /// none now.
    ///
    /// # Errors
    /// A window can't be granted any more.
    pub fn recheck(&mut self, grants: &mut dyn Grants) -> Result<(), Refusal> {
        self.forget_all(grants);
        for (id, window) in (0u8..).map(WindowId).zip(self.device.windows) {
            if let Some(standing) = &window.standing
                && (self.graph.is(standing.granted) || self.graph.is(standing.each))
            {
                let granted = check_standing(window, &self.graph, grants);
                // All windows were dropped above.
                self.stand(id, granted);
            }
            if !window.active.holds(&self.graph) {
                continue;
            }
            match check_window(window, &self.graph, grants) {
                Ok(granted) => self.windows[id.index()] = Some(granted),
                Err(why) => return Err(refusal(window.name, 0, &why)),
            }
        }
        Ok(())
    }

    /// Releases all grants of a guest that loses the device. The device is stopped and uses no window.
    pub fn forget_all(&mut self, grants: &mut dyn Grants) {
        for id in (0u8..).map(WindowId).take(self.windows.len()) {
            self.forget(id, grants);
        }
    }

    fn forget(&mut self, id: WindowId, grants: &mut dyn Grants) {
        if let Some(window) = self.windows[id.index()].take() {
            self.release(id, window, grants);
        }
    }

    fn release(&self, id: WindowId, window: Granted, grants: &mut dyn Grants) {
        let of = &self.device.windows[id.index()];
        match of.space {
            Space::Host { .. } => grants.release(window, of.direction),
            Space::Guest => grants.release_all(),
            Space::Card { .. } => {}
        }
    }
}

/// Returns the registers whose writes may run a check in these states.
pub fn hooks(device: &'static Device, states: &[u8]) -> Vec<Reg> {
    let mut found: Vec<Reg> = device
        .transitions
        .iter()
        .filter(|transition| !transition.checks.is_empty() && Device::holds(transition.states, states))
        .filter_map(|transition| if let Event::Write(reg) = transition.event { Some(reg) } else { None })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn refusal(register: &str, value: u32, why: &str) -> Refusal {
    Refusal { register: register.to_owned(), value, why: why.to_owned() }
}

fn run(
    device: &'static Device,
    check: &Check,
    view: &View<'_>,
    grants: &mut dyn Grants,
) -> Result<Option<(WindowId, Granted)>, String> {
    match check {
        Check::Rule(_, condition) if condition.holds(view) => Ok(None),
        Check::Rule(text, _) => Err(format!("it must hold that {text}")),
        Check::Refuse(text) => Err((*text).to_owned()),
        Check::Allowed(permission) if grants.allows(*permission) => Ok(None),
        Check::Allowed(permission) => Err(format!("the guest doesn't have the permission {permission:?}")),
        Check::Standing(_) => Ok(None),
        Check::Window(id) => {
            let window = &device.windows[id.index()];
            check_window(window, view, grants).map(|granted| Some((*id, granted)))
        }
    }
}

fn check_window(window: &Window, values: &dyn Values, grants: &mut dyn Grants) -> Result<Granted, String> {
    check_range(window, window.base.value(values), window.length.value(values), grants)
}

fn check_standing(window: &Window, values: &dyn Values, grants: &mut dyn Grants) -> Option<Granted> {
    let length = window.standing.as_ref()?.length.value(values);
    check_range(window, window.base.value(values), length, grants).ok()
}

fn check_range(window: &Window, base: u64, length: u64, grants: &mut dyn Grants) -> Result<Granted, String> {
    if window.space == Space::Guest {
        grants.grant_all(window.direction).map_err(|why| format!("the {} {}", window.name, why.0))?;
        return Ok(Granted { base: 0, length: 0, device_base: 0 });
    }
    let place = |why: &str| format!("the {} of {length:X}h bytes from {base:X}h {why}", window.name);
    if length == 0 {
        return Err(place("is empty"));
    }
    let Some(end) = base.checked_add(length) else {
        return Err(place("runs through the end of all addresses"));
    };
    match window.space {
        // Granted above.
        Space::Guest => Err(place("is no range")),
        Space::Card { from, to } if base >= from && end <= to => {
            Ok(Granted { base, length, device_base: base })
        }
        Space::Card { from, to } => {
            Err(place(&format!("doesn't lie between {from:X}h and {to:X}h on the card")))
        }
        Space::Host { bits } => {
            if bits < 64 && end > 1 << bits {
                return Err(place("runs through the end of the device's addresses"));
            }
            let device_base = grants.grant(base, length, window.direction).map_err(|why| place(&why.0))?;
            let granted = Granted { base, length, device_base };
            if bits < 64 && device_base.checked_add(length).is_none_or(|end| end > 1 << bits) {
                grants.release(granted, window.direction);
                return Err(place("lies where the device can't address it"));
            }
            Ok(granted)
        }
    }
}

/// Returns the text of a state vector: `run=stopped tx=idle ...`.
pub fn states_text(device: &Device, states: &[u8]) -> String {
    let names: Vec<String> = (0u8..)
        .zip(states)
        .map(|(component, &number)| device.state_name(State { component, number }))
        .collect();
    names.join(" ")
}
