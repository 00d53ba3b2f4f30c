//! Transitions: event × states → checks, then effects.

use super::{Cond, Expr, Reg, State, WindowId};

/// An event that may fire transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The guest writes the register. Conditions use the register's new value.
    Write(Reg),
    /// The guest reads the register.
    Read(Reg),
    /// The device returned a value of the register to a read. Conditions use that value.
    Returned(Reg),
    /// The device reports one of these interrupt causes.
    Cause(u32),
}

/// A permission beyond a guest's own traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Permission {
    /// Receive frames for other stations.
    Promiscuous,
    /// Loop frames back inside the device.
    Loopback,
    /// Receive frames for another address than the guest's own.
    AnyAddress,
}

/// A checking function: if it fails, the request is refused. Running one is a *decision*.
#[derive(Debug, Clone, Copy)]
pub enum Check {
    /// The window must lie entirely in granted memory. It is translated and stored.
    Window(WindowId),
    /// Never refuses. Tries to grant the window with the length of its [`Standing`](super::Standing). The component
    /// enters the state for success, or the state in which each use is checked.
    Standing(WindowId),
    /// The condition must hold. The text describes the rule.
    Rule(&'static str, Cond),
    /// Always fails, in these states and with these values. The text gives the reason.
    Refuse(&'static str),
    /// The guest must have the permission.
    Allowed(Permission),
}

/// An effect of a transition. Effects happen in order.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// The component enters the state.
    Enter(State),
    /// Sets bits of the virtual interrupt status.
    Raise(u32),
    /// Clears bits of the virtual interrupt status.
    Lower(u32),
    /// Stores a value in the model.
    Store(Reg, Expr),
    /// The monitor writes a device register before it forwards the request. The reference emulation ignores this
    /// effect.
    Device(Reg, Expr),
    /// After a cause or a guest's write, the monitor reads a register for the model. Needed for a cause that reports a
    /// completion without naming it: the guest may have started the next operation since.
    Look(Reg),
    /// Answers the guest's read, which doesn't reach the device.
    Answer(Expr),
    /// Drops a validated window.
    Forget(WindowId),
    /// Resets registers and states, and drops all windows.
    Reset,
}

/// A transition. Built by [`on`].
#[derive(Debug, Clone, Copy)]
pub struct Transition {
    /// The firing event.
    pub event: Event,
    /// The states in which it fires: every component that is named is in one of its states.
    pub states: &'static [State],
    /// The condition under which it fires.
    pub given: Cond,
    /// Checks, all of which must succeed.
    pub checks: &'static [Check],
    /// Effects, in order.
    pub effects: &'static [Effect],
    /// The reason, if it isn't obvious.
    pub about: &'static str,
}

/// Builds a transition at `event`, in every state, without checks and effects.
pub const fn on(event: Event) -> Transition {
    Transition { event, states: &[], given: Cond::Always, checks: &[], effects: &[], about: "" }
}

impl Transition {
    /// Restricts it to these states.
    pub const fn states(mut self, states: &'static [State]) -> Self {
        self.states = states;
        self
    }
    /// Restricts it to these values.
    pub const fn given(mut self, condition: Cond) -> Self {
        self.given = condition;
        self
    }
    /// Sets the checks.
    pub const fn checks(mut self, checks: &'static [Check]) -> Self {
        self.checks = checks;
        self
    }
    /// Sets the effects.
    pub const fn then(mut self, effects: &'static [Effect]) -> Self {
        self.effects = effects;
        self
    }
    /// Sets the reason.
    pub const fn about(mut self, text: &'static str) -> Self {
        self.about = text;
        self
    }
}
