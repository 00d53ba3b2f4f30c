//! A function's INTx output: pending status, the disable bit, and the wire.

use std::sync::{Arc, Mutex};

use crate::config::ConfigSpace;
use crate::interrupt::{InterruptError, IntxLine};
use crate::sync::lock;

/// A function's INTx output. The device sets whether it requests an interrupt. The wire's level follows from that, from
/// the interrupt disable bit of the command register, and from MSI-X.
///
/// It has its own lock, and takes it never together with another lock of the function. So device threads may call
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
    /// Creates a pin without a wire.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Connects the wire. An interrupt that is already pending asserts it.
    ///
    /// # Errors
    /// The interrupt controller refuses the level.
    pub fn attach(&self, line: Arc<dyn IntxLine>) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        state.line = Some(line);
        state.asserted = false;
        state.drive()
    }

    /// Sets whether the device requests an interrupt.
    ///
    /// # Errors
    /// The interrupt controller refuses the level; the next call retries.
    pub fn set_pending(&self, pending: bool) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        state.pending = pending;
        state.drive()
    }

    /// Notes that the wire's other end lowered it, as KVM's resampling does at each end of interrupt. The next
    /// [`Self::set_pending`] with a request raises it again.
    pub fn lowered(&self) {
        lock(&self.state).asserted = false;
    }

    /// Returns whether the device requests an interrupt (the status bit), even if disabled.
    #[must_use]
    pub fn pending(&self) -> bool {
        lock(&self.state).pending
    }

    /// Applies the interrupt disable bit, and whether MSI-X replaces INTx.
    ///
    /// # Errors
    /// The interrupt controller refuses the level.
    pub fn follow(&self, config: &ConfigSpace) -> Result<(), InterruptError> {
        let msix = config.msix_control().is_some_and(|control| control & crate::registers::MSIX_ENABLE != 0);
        let mut state = lock(&self.state);
        state.disabled = config.intx_disabled() || msix;
        state.drive()
    }

    /// Copies the pending status to the status register.
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
