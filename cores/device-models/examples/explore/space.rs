//! The state space of a description: every state that requests of a guest and answers of the device can reach, with the values that the
//! description says stand for all.
//!
//! The device is judged by its windows and by the registers that it really holds ([`Model::exposed`]), not by the model's transitions:
//! if the device could use a window now that wasn't granted, the path is a finding. Guest memory lies elsewhere in the device's addresses
//! than in the guest's, so that an address that was forgotten to be translated is a finding too.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use device_models::describe::{Class, Device, Direction, Event, Permission, Reg, Space as Place};
use device_models::graph::Piece;
use device_models::model::{Denied, Granted, Grants, Model, Reads};
use stateright::{Checker, HasDiscoveries, Model as _, Property};

/// Guest memory that DMA may use.
const GUEST: std::ops::Range<u64> = 0x10_0000..0x20_0000;
/// Where it lies for the device.
const OFFSET: u64 = 0x4000_0000;

/// What a guest without permissions was granted.
struct Guest;

impl Grants for Guest {
    fn grant(&mut self, base: u64, length: u64, _: Direction) -> Result<u64, Denied> {
        let end = base.checked_add(length).ok_or_else(|| Denied("wraps".to_owned()))?;
        if base >= GUEST.start && end <= GUEST.end {
            Ok(base + OFFSET)
        } else {
            Err(Denied("isn't the guest's memory".to_owned()))
        }
    }
    fn release(&mut self, _: Granted, _: Direction) {}
    fn allows(&self, _: Permission) -> bool {
        false
    }
}

/// One request, or an answer of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// The guest writes so many bytes of a register.
    Write(Reg, u32, u8),
    /// The guest reads a register that has an effect.
    Read(Reg, u8),
    /// The device reports a cause.
    Cause(u32),
    /// The guest reads a register, and the device has cleared these bits of it.
    Cleared(Reg, u32),
}

/// The space of one device.
pub struct Space {
    device: &'static Device,
    requests: Vec<Request>,
    answers: Vec<Request>,
    /// Windows that some state uses.
    used: AtomicU64,
}

/// What an exploration found.
#[derive(Debug)]
pub struct Report {
    /// Different states.
    pub states: usize,
    /// Requests and answers that were tried.
    pub steps: usize,
    /// The longest shortest path.
    pub depth: usize,
    /// Requests and answers per state at most.
    pub requests: usize,
    /// Windows that no state uses: the exploration says nothing about them.
    pub unused: Vec<&'static str>,
    /// Findings: the property, and the path to it.
    pub findings: Vec<String>,
}

impl Space {
    /// The space of `device`.
    pub fn new(device: &'static Device) -> Self {
        let (mut requests, mut answers) = (Vec::new(), Vec::new());
        for (reg, register) in device.numbered() {
            if let (Some(_), Some(class)) = (register.offset, register.write) {
                let sizes: &[u8] = if is_port(device, reg) { &[1, 4] } else { std::slice::from_ref(&register.width) };
                for &value in register.values {
                    requests.extend(sizes.iter().map(|&size| Request::Write(reg, value, size)));
                }
                if register.width > 1 && matches!(class, Class::Check | Class::Dma) {
                    requests.push(Request::Write(reg, 0xFF, 1));
                }
            }
            if device.transitions.iter().any(|transition| transition.event == Event::Read(reg)) {
                requests.push(Request::Read(reg, 1));
            }
        }
        for transition in device.transitions {
            match transition.event {
                Event::Cause(bits) => {
                    answers.extend((0..32).map(|bit| bits & 1 << bit).filter(|&bit| bit != 0).map(Request::Cause));
                }
                Event::Returned(reg) => {
                    if let device_models::describe::Returns::Bits(mask) = device.register(reg).returns {
                        answers.push(Request::Cleared(reg, mask));
                    }
                }
                Event::Write(_) | Event::Read(_) => {}
            }
        }
        answers.sort_by_key(|answer| format!("{answer:?}"));
        answers.dedup();
        Self { device, requests, answers, used: AtomicU64::new(0) }
    }

    /// Explores all of it.
    pub fn explore(self) -> Report {
        let requests = self.requests.len() + self.answers.len();
        let checker = self.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        let space = checker.model();
        let used = space.used.load(Ordering::Relaxed);
        let unused = (0..)
            .zip(space.device.windows)
            .filter(|(number, _)| used >> number & 1 == 0)
            .map(|(_, window)| window.name)
            .collect();
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
            unused,
            findings,
        }
    }

    fn step(&self, before: &Model, request: Request) -> Model {
        let mut model = before.clone();
        let device = self.device;
        match request {
            Request::Write(reg, value, bytes) => {
                let piece = Piece { reg: Some(reg), offset: device.register(reg).offset.unwrap_or(0), skip: 0, bytes };
                if let Ok(writes) = model.write(piece, value, &mut Guest) {
                    for (reg, value) in writes.before {
                        model.wrote_device(reg, value);
                    }
                    if let Some(value) = writes.forward {
                        model.wrote_device(reg, value);
                    }
                    if writes.reset {
                        model.device_was_reset();
                    }
                }
            }
            Request::Read(reg, bytes) => {
                let piece = Piece { reg: Some(reg), offset: device.register(reg).offset.unwrap_or(0), skip: 0, bytes };
                if let Reads::Answer(_, true) = model.read(piece, &mut Guest) {
                    model.device_was_reset();
                }
            }
            Request::Cause(bits) => model.cause(bits),
            Request::Cleared(reg, mask) => {
                let register = device.register(reg);
                let piece = Piece { reg: Some(reg), offset: 0, skip: 0, bytes: register.width };
                model.returned(piece, model.graph().value(reg) & !mask);
            }
        }
        model.abstracted()
    }

    fn has_bank(&self, model: &Model, reg: Reg) -> bool {
        self.device.register(reg).banks >> model.graph().bank(self.device) & 1 == 1
    }

    /// Every window that the device may use is one that was granted.
    fn is_guarded(&self, model: &Model) -> bool {
        model.exposed().into_iter().all(|(id, base, length)| {
            self.used.fetch_or(1 << id.index(), Ordering::Relaxed);
            let bounds = match self.device.windows[id.index()].space {
                Place::Card { from, to } => from..to,
                Place::Host { .. } => GUEST.start + OFFSET..GUEST.end + OFFSET,
            };
            base >= bounds.start && base.checked_add(length).is_some_and(|end| end <= bounds.end)
        })
    }

    /// The device's own answers lead to a reusable state: the guest isn't needed.
    fn ends(&self, model: &Model) -> bool {
        let (mut seen, mut open) = (HashSet::new(), vec![model.clone()]);
        while let Some(model) = open.pop() {
            if model.is_reusable() {
                return true;
            }
            for &answer in &self.answers {
                let next = self.step(&model, answer);
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        false
    }
}

fn is_port(device: &Device, reg: Reg) -> bool {
    let register = device.register(reg);
    register.span > u32::from(register.width)
}

fn text(device: &Device, request: Request) -> String {
    match request {
        Request::Write(reg, value, bytes) => format!("{} := {value:X}h ({bytes})", device.register(reg).name),
        Request::Read(reg, _) => format!("read {}", device.register(reg).name),
        Request::Cause(bits) => format!("cause {bits:X}h"),
        Request::Cleared(reg, mask) => format!("{} returns without {mask:X}h", device.register(reg).name),
    }
}

impl stateright::Model for Space {
    type State = Model;
    type Action = Request;

    fn init_states(&self) -> Vec<Model> {
        vec![Model::new(self.device, [0; 6]).abstracted()]
    }

    fn actions(&self, state: &Model, actions: &mut Vec<Request>) {
        actions.extend(self.requests.iter().filter(|request| match request {
            Request::Write(reg, ..) | Request::Read(reg, _) => self.has_bank(state, *reg),
            Request::Cause(_) | Request::Cleared(..) => true,
        }));
        actions.extend(&self.answers);
    }

    fn next_state(&self, state: &Model, request: Request) -> Option<Model> {
        Some(self.step(state, request))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the device uses granted windows only", |space: &Self, model: &Model| space.is_guarded(model)),
            Property::always("the device becomes reusable without the guest", |space: &Self, model: &Model| space.ends(model)),
        ]
    }
}
