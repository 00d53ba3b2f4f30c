//! The state space of a description: every state that the guest's requests and the device's responses can reach.
//! Registers take the values that the description names as representatives.
//!
//! The exploration judges the device by its windows and the registers that it really holds, not by the model's states
//! and transitions. A path is a finding if the device could use a window that wasn't granted. Guest memory has
//! different addresses for the device and for the guest. So an address that isn't translated is a finding, too.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use device_models::describe::{
    Class, Device, Direction, Event, Permission, Reg, Space as Place, Step, Transition, Values, Window,
};
use device_models::graph::Piece;
use device_models::model::{Denied, Granted, Grants, Model, Reads};
use stateright::{Checker, HasDiscoveries, Model as _, Property};

/// Guest memory that DMA may use.
const GUEST: std::ops::Range<u64> = 0x10_0000..0x20_0000;
/// Distance from guest-physical addresses to the device's addresses.
const OFFSET: u64 = 0x4000_0000;

/// The grants of a guest without permissions, as an IOMMU has them, and the device's state at a release.
struct Guest {
    device: &'static Device,
    registers: Vec<u32>,
    states: Vec<u8>,
    /// Granted windows in the host's memory, and the number of grants of all guest memory.
    windows: Vec<Granted>,
    whole: u32,
    /// A window was released while the device could use it.
    torn: bool,
}

impl Guest {
    fn of(device: &'static Device, world: &World) -> Self {
        let (mut windows, mut whole) = (Vec::new(), 0);
        for (window, granted) in device.windows.iter().zip(world.model.windows()) {
            match (window.space, granted) {
                (Place::Host { .. }, Some(granted)) => windows.push(*granted),
                (Place::Guest, Some(_)) => whole += 1,
                _ => {}
            }
        }
        let registers = world.registers.clone();
        Self { device, registers, states: world.states().to_vec(), windows, whole, torn: world.torn }
    }

    /// Notes that the device has got all writes.
    fn sees(&mut self, world: &World) {
        self.registers.clone_from(&world.registers);
        self.states = world.states().to_vec();
    }

    /// Checks whether the device can use a window that is no longer granted.
    fn look(&mut self) {
        let values = At { registers: &self.registers, states: &self.states };
        let in_use = self.device.windows.iter().filter(|window| window.active.holds(&values));
        self.torn |= in_use.into_iter().any(|window| {
            let (base, length) = (window.base.value(&values), window.length.value(&values));
            let covers = |granted: &Granted| {
                base >= granted.device_base && base + length <= granted.device_base + granted.length
            };
            match window.space {
                Place::Card { .. } => false,
                Place::Guest => self.whole == 0,
                Place::Host { .. } => length > 0 && !self.windows.iter().any(covers),
            }
        });
    }
}

/// Registers and states at one moment.
struct At<'a> {
    registers: &'a [u32],
    states: &'a [u8],
}

impl Values for At<'_> {
    fn register(&self, reg: Reg) -> u32 {
        self.registers[reg.index()]
    }
    fn states(&self) -> &[u8] {
        self.states
    }
}

impl Grants for Guest {
    fn grant(&mut self, base: u64, length: u64, _: Direction) -> Result<u64, Denied> {
        let end = base.checked_add(length).ok_or_else(|| Denied("wraps".to_owned()))?;
        if base >= GUEST.start && end <= GUEST.end {
            self.windows.push(Granted { base, length, device_base: base + OFFSET });
            Ok(base + OFFSET)
        } else {
            Err(Denied("isn't the guest's memory".to_owned()))
        }
    }
    fn grant_all(&mut self, _: Direction) -> Result<(), Denied> {
        self.whole += 1;
        Ok(())
    }
    fn release_all(&mut self) {
        self.whole = self.whole.saturating_sub(1);
        self.look();
    }
    fn release(&mut self, window: Granted, _: Direction) {
        if let Some(at) = self.windows.iter().position(|known| *known == window) {
            self.windows.swap_remove(at);
        }
        self.look();
    }
    fn allows(&self, _: Permission) -> bool {
        false
    }
}

/// The property that [`Order`] is about.
pub const GRANTED: &str = "a window in use is still granted";

/// A request of the guest, or an event of the device or the monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// The guest writes this many bytes of a register.
    Write(Reg, u32, u8),
    /// The guest reads a register.
    Read(Reg, u8),
    /// The device completes the operation of a register: the register changes and a cause is latched.
    Complete(Reg),
    /// The monitor harvests the latched causes.
    Harvest,
    /// The monitor reads a register by itself.
    Look(Reg),
}

/// The model and the device. The device has its real registers, which may differ from the model's, and causes that
/// aren't harvested.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    model: Model,
    registers: Vec<u32>,
    latched: u32,
    /// A window was released while the device could use it.
    torn: bool,
}

impl Values for World {
    fn register(&self, reg: Reg) -> u32 {
        self.registers[reg.index()]
    }
    fn states(&self) -> &[u8] {
        self.model.graph().states()
    }
}

/// The state space of one slice of a device.
struct Space {
    device: &'static Device,
    requests: Vec<Request>,
    /// Events of device and monitor that need no guest.
    own: Vec<Request>,
    /// Bit set of the windows that some state uses.
    used: AtomicU64,
    order: Order,
}

/// The time at which unused windows are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// After the device has got the writes of the request, as the monitor does it.
    DeviceFirst,
    /// Before. For negative controls.
    WindowsFirst,
}

/// The result of an exploration.
#[derive(Debug)]
pub struct Report {
    /// Number of distinct states.
    pub states: usize,
    /// Number of explored steps.
    pub steps: usize,
    /// Length of the longest shortest path.
    pub depth: usize,
    /// Largest number of requests and events per state.
    pub requests: usize,
    /// Windows that no state uses: the exploration proves nothing about them.
    pub unused: Vec<&'static str>,
    /// Findings: the violated property, and the path to it.
    pub findings: Vec<String>,
}

/// Explores a device, slice by slice.
pub fn explore(device: &'static Device, order: Order) -> Report {
    let mut used = 0;
    let mut all =
        Report { states: 0, steps: 0, depth: 0, requests: 0, unused: Vec::new(), findings: Vec::new() };
    for left in device.slices {
        let one = Space::new(device, left, order).explore(&mut used);
        all.states += one.states;
        all.steps += one.steps;
        all.depth = all.depth.max(one.depth);
        all.requests = all.requests.max(one.requests);
        all.findings.extend(one.findings);
    }
    let names = (0..)
        .zip(device.windows)
        .filter(|(number, window)| used >> number & 1 == 0 && !window.never)
        .map(|(_, window)| window.name);
    all.unused = names.collect();
    all
}

impl Space {
    /// Creates the space of `device` in which the registers `left` keep their reset values.
    fn new(device: &'static Device, left: &[Reg], order: Order) -> Self {
        let (mut requests, mut own) = (Vec::new(), vec![Request::Harvest]);
        for (reg, register) in device.numbered().filter(|(reg, _)| !left.contains(reg)) {
            if let (Some(_), Some(class)) = (register.offset, register.write) {
                let port = register.span > u32::from(register.width);
                let sizes: &[u8] = if port { &[1, 4] } else { std::slice::from_ref(&register.width) };
                for &value in register.values {
                    requests.extend(sizes.iter().map(|&size| Request::Write(reg, value, size)));
                }
                if register.width > 1 && matches!(class, Class::Check | Class::Dma) {
                    requests.push(Request::Write(reg, 0xFF, 1));
                }
            }
            let matters = |transition: &Transition| {
                transition.event == Event::Read(reg) || transition.event == Event::Returned(reg)
            };
            if register.read.is_some() && device.transitions.iter().any(matters) {
                requests.push(Request::Read(reg, register.width.min(2)));
                requests.push(Request::Read(reg, register.width));
            }
            if register.becomes.is_some() || register.follows.is_some() {
                own.push(Request::Complete(reg));
            }
        }
        own.extend(reads(device.context.settle).into_iter().map(Request::Look));
        requests.dedup();
        Self { device, requests, own, used: AtomicU64::new(0), order }
    }

    /// Explores the whole space. Adds the windows that were used to `used`.
    fn explore(self, used: &mut u64) -> Report {
        let requests = self.requests.len() + self.own.len();
        let checker = self.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        let space = checker.model();
        *used |= space.used.load(Ordering::Relaxed);
        let findings = checker
            .discoveries()
            .into_iter()
            .map(|(name, path)| {
                let requests: Vec<String> =
                    path.into_actions().iter().map(|request| text(space.device, *request)).collect();
                format!("not always true: {name}; after {}", requests.join(", "))
            })
            .collect();
        Report {
            states: checker.unique_state_count(),
            steps: checker.state_count(),
            depth: checker.max_depth(),
            requests,
            unused: Vec::new(),
            findings,
        }
    }

    /// Returns the world after a request, or `None` if the request is impossible now.
    fn step(&self, before: &World, request: Request) -> Option<World> {
        let mut world = before.clone();
        let device = self.device;
        let mut guest = Guest::of(device, before);
        let device_first = self.order == Order::DeviceFirst;
        let piece = |reg: Reg, bytes| Piece {
            reg: Some(reg),
            offset: device.register(reg).offset.unwrap_or(0),
            skip: 0,
            bytes,
        };
        match request {
            Request::Write(reg, value, bytes) => {
                let Ok(writes) = world.model.write(piece(reg, bytes), value, &mut guest) else {
                    return Some(world);
                };
                if !device_first {
                    world.model.give_back(&writes.released, &mut guest);
                }
                for (reg, value) in writes.before.into_iter().chain(writes.forward.map(|value| (reg, value)))
                {
                    world.model.wrote_device(reg, value);
                    let held = &mut world.registers[reg.index()];
                    *held = device.register(reg).held(*held, value);
                }
                guest.sees(&world);
                if device_first {
                    world.model.give_back(&writes.released, &mut guest);
                }
                for reg in writes.looks {
                    self.show(&mut world, reg, device.register(reg).width);
                }
                if writes.reset {
                    self.reset(&mut world, &mut guest);
                }
            }
            Request::Read(reg, bytes) => match world.model.read(piece(reg, bytes)) {
                Reads::Answer(_, true) => self.reset(&mut world, &mut guest),
                Reads::Answer(_, false) => {}
                Reads::Ask => self.show(&mut world, reg, bytes),
            },
            Request::Look(reg) => self.show(&mut world, reg, device.register(reg).width),
            Request::Complete(reg) if device.register(reg).follows.is_some() => {
                let (target, causes) = device.register(reg).follows?;
                let wanted = world.registers[target.index()];
                let used = |window: &&Window| {
                    let mut used = false;
                    window.active.registers(&mut |register| used |= register == target);
                    window.length.registers(&mut |register| used |= register == target);
                    used
                };
                let mut works = device.windows.iter().filter(used);
                if world.registers[reg.index()] == wanted || !works.any(|window| window.active.holds(before))
                {
                    return None;
                }
                world.registers[reg.index()] = wanted;
                world.latched |= causes;
            }
            Request::Complete(reg) => {
                let (clear, set, causes) = device.register(reg).becomes?;
                let held = world.registers[reg.index()];
                // The target of the device's operation is a window of its own.
                let mut works = false;
                for window in device.windows.iter().filter(|window| window.active.holds(before)) {
                    window.active.registers(&mut |used| works |= used == reg);
                }
                if !works || held & (clear | set) == set {
                    return None;
                }
                world.registers[reg.index()] = held & !clear | set;
                world.latched |= causes;
            }
            Request::Harvest if world.latched == 0 => return None,
            Request::Harvest => {
                let causes = std::mem::take(&mut world.latched);
                for reg in world.model.cause(causes) {
                    self.show(&mut world, reg, device.register(reg).width);
                }
            }
        }
        world.torn = guest.torn;
        world.model = world.model.abstracted();
        for (held, register) in world.registers.iter_mut().zip(device.registers) {
            *held = register.abstracted(*held);
        }
        Some(world)
    }

    fn show(&self, world: &mut World, reg: Reg, bytes: u8) {
        let piece =
            Piece { reg: Some(reg), offset: self.device.register(reg).offset.unwrap_or(0), skip: 0, bytes };
        world.model.returned(piece, world.registers[reg.index()]);
    }

    /// Resets the guest's device.
    fn reset(&self, world: &mut World, guest: &mut Guest) {
        if self.order == Order::WindowsFirst {
            guest.registers.clone_from(&world.registers);
            world.model.forget_all(guest);
        }
        world.model.device_was_reset();
        world.latched = 0;
        world.registers = self.device.registers.iter().map(|register| register.reset).collect();
        guest.sees(world);
        // No window is active after a reset.
        let checked = world.model.recheck(guest);
        debug_assert!(checked.is_ok(), "{checked:?}");
    }

    fn has_bank(&self, world: &World, reg: Reg) -> bool {
        self.device.register(reg).banks >> world.model.graph().bank(self.device) & 1 == 1
    }

    /// Returns whether every window that the device may use with its registers was granted.
    fn is_guarded(&self, world: &World) -> bool {
        (0u8..).zip(self.device.windows).filter(|(_, window)| window.active.holds(world)).all(
            |(number, window)| {
                let (base, length) = (window.base.value(world), window.length.value(world));
                self.used.fetch_or(u64::from(length > 0) << number, Ordering::Relaxed);
                let bounds = match window.space {
                    Place::Guest => {
                        self.used.fetch_or(1 << number, Ordering::Relaxed);
                        return world.model.windows()[usize::from(number)].is_some();
                    }
                    Place::Card { from, to } => from..to,
                    Place::Host { .. } => GUEST.start + OFFSET..GUEST.end + OFFSET,
                };
                length == 0
                    || base >= bounds.start && base.checked_add(length).is_some_and(|end| end <= bounds.end)
            },
        )
    }

    /// Returns whether the device and the monitor reach a quiescent state without the guest.
    fn ends(&self, world: &World) -> bool {
        let (mut seen, mut open) = (HashSet::new(), vec![world.clone()]);
        while let Some(world) = open.pop() {
            if world.model.is_reusable() {
                return true;
            }
            for next in self.own.iter().filter_map(|&request| self.step(&world, request)) {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        false
    }
}

fn text(device: &Device, request: Request) -> String {
    match request {
        Request::Write(reg, value, bytes) => format!("{} := {value:X}h ({bytes})", device.register(reg).name),
        Request::Read(reg, _) => format!("read {}", device.register(reg).name),
        Request::Complete(reg) => format!("{} completes", device.register(reg).name),
        Request::Harvest => "the monitor takes the causes".to_owned(),
        Request::Look(reg) => format!("the monitor reads {}", device.register(reg).name),
    }
}

/// Returns the registers that the steps read under any condition: the monitor may read more than it does.
fn reads(steps: &[Step]) -> Vec<Reg> {
    let of = |step: &Step| match step {
        Step::Read(reg) => vec![*reg],
        Step::All(steps) | Step::If(_, steps) => reads(steps),
        _ => Vec::new(),
    };
    steps.iter().flat_map(of).collect()
}

impl stateright::Model for Space {
    type State = World;
    type Action = Request;

    fn init_states(&self) -> Vec<World> {
        let registers = self.device.registers.iter().map(|register| register.reset).collect();
        vec![World {
            model: Model::new(self.device, [0; 6]).abstracted(),
            registers,
            latched: 0,
            torn: false,
        }]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Request>) {
        actions.extend(self.requests.iter().filter(|request| match *request {
            Request::Write(reg, ..) | Request::Read(reg, _) => self.has_bank(state, *reg),
            _ => true,
        }));
        actions.extend(&self.own);
    }

    fn next_state(&self, state: &World, request: Request) -> Option<World> {
        self.step(state, request)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the device uses granted windows only", |space: &Self, world: &World| {
                space.is_guarded(world)
            }),
            Property::always(GRANTED, |_, world: &World| !world.torn),
            Property::always(
                "the device becomes reusable without the guest",
                |space: &Self, world: &World| space.ends(world),
            ),
        ]
    }
}
