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

    /// The wire was lowered by its other end, which does so at each end of interrupt (KVM's resampling): it is raised anew at the next
    /// [`Self::set_pending`] that still wants it.
    pub fn lowered(&self) {
        lock(&self.state).asserted = false;
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

#[cfg(test)]
mod tests {
    use super::IntxPin;
    use crate::config::{CapabilityBuilder, ConfigSpace, Identity, InterruptPin};
    use crate::interrupt::IntxLine as _;
    use crate::msix::MsixLayout;
    use crate::registers::{CAP_MSIX, COMMAND, COMMAND_INTX_DISABLE, STATUS, STATUS_INTERRUPT};
    use crate::testing::FakeLine;

    fn config() -> ConfigSpace {
        let mut builder = ConfigSpace::builder(Identity::default());
        builder.interrupt_pin(InterruptPin::A);
        builder.capability(CapabilityBuilder::msix(&MsixLayout::exclusive(0, 1).unwrap())).unwrap();
        builder.build()
    }

    #[test]
    fn disable_bit_and_msix_keep_the_wire_quiet_but_not_the_status() {
        let (mut config, pin, line) = (config(), IntxPin::new(), FakeLine::new());
        pin.attach(line.clone()).unwrap();
        pin.set_pending(true).unwrap();
        assert!(line.asserted());
        let msix_control = config.capability_offset(CAP_MSIX).unwrap() + 2;
        for (offset, off, on) in [(COMMAND, COMMAND_INTX_DISABLE, 0), (msix_control, 0x8000, 0)] {
            config.write(offset, &off.to_le_bytes());
            pin.follow(&config).unwrap();
            assert!(!line.asserted());
            pin.publish(&mut config);
            assert_eq!(config.u16(STATUS) & STATUS_INTERRUPT, STATUS_INTERRUPT);
            config.write(offset, &u16::to_le_bytes(on));
            pin.follow(&config).unwrap();
            assert!(line.asserted());
        }
    }

    #[test]
    fn a_wire_that_was_lowered_is_raised_while_an_interrupt_is_wanted() {
        let (pin, line) = (IntxPin::new(), FakeLine::new());
        pin.attach(line.clone()).unwrap();
        pin.set_pending(true).unwrap();
        line.set_level(false).unwrap();
        pin.set_pending(true).unwrap();
        assert!(!line.asserted(), "nobody said so");
        pin.lowered();
        pin.set_pending(true).unwrap();
        assert!(line.asserted());
        pin.lowered();
        pin.set_pending(false).unwrap();
        assert!(!pin.pending());
    }

    #[test]
    fn a_wire_attached_late_shows_what_is_pending() {
        let (pin, line) = (IntxPin::new(), FakeLine::new());
        pin.set_pending(true).unwrap();
        pin.attach(line.clone()).unwrap();
        assert!(line.asserted());
        pin.set_pending(false).unwrap();
        assert!(!line.asserted() && !pin.pending());
    }
}
