//! The INTx side of a function: pending status, the disable bit, and the wire.

use std::sync::{Arc, Mutex};

use crate::config::ConfigSpace;
use crate::interrupt::{InterruptError, IntxLine};
use crate::sync::lock;

/// A function's INTx output. The device says whether it wants an interrupt; whether the wire is asserted
/// follows from that, the interrupt disable bit of the command register and MSI-X.
///
/// Locks by itself, and never while holding another lock of the function, so that device threads may call
/// [`IntxPin::set_pending`] without the configuration lock. The function calls
///
/// - [`IntxPin::attach`] from `attach_intx`,
/// - [`IntxPin::follow`] after each configuration write, reset and restore,
/// - [`IntxPin::publish`] before each configuration read.
#[derive(Default)]
pub struct IntxPin {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    line: Option<Arc<dyn IntxLine>>,
    pending: bool,
    disabled: bool,
    asserted: bool,
}

impl std::fmt::Debug for IntxPin {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.state);
        formatter
            .debug_struct("IntxPin")
            .field("attached", &state.line.is_some())
            .field("pending", &state.pending)
            .field("disabled", &state.disabled)
            .field("asserted", &state.asserted)
            .finish()
    }
}

impl IntxPin {
    /// A pin without a wire.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Connects the wire; an interrupt that is pending already asserts it.
    ///
    /// # Errors
    /// When the interrupt controller refuses the level.
    pub fn attach(&self, line: Arc<dyn IntxLine>) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        state.line = Some(line);
        state.asserted = false;
        state.drive()
    }

    /// The device wants an interrupt, or no longer does.
    ///
    /// # Errors
    /// When the interrupt controller refuses the level; the next call tries again.
    pub fn set_pending(&self, pending: bool) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        state.pending = pending;
        state.drive()
    }

    /// Whether the device wants an interrupt (the status bit), disabled or not.
    #[must_use]
    pub fn pending(&self) -> bool {
        lock(&self.state).pending
    }

    /// Takes over the interrupt disable bit, and whether MSI-X replaces INTx.
    ///
    /// # Errors
    /// When the interrupt controller refuses the level.
    pub fn follow(&self, config: &ConfigSpace) -> Result<(), InterruptError> {
        let msix = config.msix_control().is_some_and(|control| control & crate::registers::MSIX_ENABLE != 0);
        let mut state = lock(&self.state);
        state.disabled = config.intx_disabled() || msix;
        state.drive()
    }

    /// Shows the pending status in the status register.
    pub fn publish(&self, config: &mut ConfigSpace) {
        config.set_interrupt_status(self.pending());
    }
}

impl State {
    fn drive(&mut self) -> Result<(), InterruptError> {
        let wanted = self.pending && !self.disabled;
        if wanted != self.asserted
            && let Some(line) = &self.line
        {
            line.set_level(wanted)?;
            self.asserted = wanted;
        }
        Ok(())
    }
}
