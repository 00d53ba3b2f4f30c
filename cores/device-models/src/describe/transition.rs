//! Transitions: event × states → checks, then effects.

use super::{Cond, Expr, Reg, State, WindowId};

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The guest writes the register. Conditions see the register with its new value.
    Write(Reg),
    /// The guest reads the register.
    Read(Reg),
    /// The device returned a value of the register to a read. Conditions see that value.
    Returned(Reg),
    /// The device reports one of these interrupt causes.
    Cause(u32),
}

/// What a guest may be allowed to do beyond its own traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Permission {
    /// Receive frames that are not addressed to it.
    Promiscuous,
    /// Send frames back to itself inside the device.
    Loopback,
    /// Receive frames for another address than its own.
    AnyAddress,
}

/// A checking function: when it fails, the request doesn't happen. Running one is a *decision*.
#[derive(Debug, Clone, Copy)]
pub enum Check {
    /// The window must lie wholly in what was granted; it is translated and remembered.
    Window(WindowId),
    /// Never refuses: the window is granted with the length of its [`Standing`](super::Standing) if it can be, and the component enters
    /// the state that says so; otherwise it enters the other one, and each use has to be checked by itself.
    Standing(WindowId),
    /// The condition must hold; the text says what it stands for.
    Rule(&'static str, Cond),
    /// Never: the request is refused in these states, with these values. The text says why.
    Refuse(&'static str),
    /// The guest must have the permission.
    Allowed(Permission),
}

/// What a transition does, in order.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// The component enters the state.
    Enter(State),
    /// Sets bits of the virtual interrupt status.
    Raise(u32),
    /// Clears bits of it.
    Lower(u32),
    /// Remembers a value.
    Store(Reg, Expr),
    /// The monitor writes a register of the device, before the request itself is forwarded. Nothing in the reference emulation.
    Device(Reg, Expr),
    /// The monitor reads a register, and tells the model what it returned; at a cause or a guest's write. For a cause that says that something
    /// is done, but not what: the guest may have started the next thing since.
    Look(Reg),
    /// The guest's read is answered with this; it doesn't reach the device.
    Answer(Expr),
    /// A validated window is forgotten.
    Forget(WindowId),
    /// Registers and states return to their values after reset, windows are forgotten.
    Reset,
}

/// A transition, made with [`on`].
#[derive(Debug, Clone, Copy)]
pub struct Transition {
    /// What happens.
    pub event: Event,
    /// In which states: for each component that is named, one of its states.
    pub states: &'static [State],
    /// With which values.
    pub given: Cond,
    /// What must hold.
    pub checks: &'static [Check],
    /// What follows.
    pub effects: &'static [Effect],
    /// Why, where it isn't obvious.
    pub about: &'static str,
}

/// A transition at `event`, in every state, without checks and effects.
pub const fn on(event: Event) -> Transition {
    Transition { event, states: &[], given: Cond::Always, checks: &[], effects: &[], about: "" }
}

impl Transition {
    /// In these states only.
    pub const fn states(mut self, states: &'static [State]) -> Self {
        self.states = states;
        self
    }
    /// With these values only.
    pub const fn given(mut self, condition: Cond) -> Self {
        self.given = condition;
        self
    }
    /// What must hold.
    pub const fn checks(mut self, checks: &'static [Check]) -> Self {
        self.checks = checks;
        self
    }
    /// What follows.
    pub const fn then(mut self, effects: &'static [Effect]) -> Self {
        self.effects = effects;
        self
    }
    /// Why.
    pub const fn about(mut self, text: &'static str) -> Self {
        self.about = text;
        self
    }
}
