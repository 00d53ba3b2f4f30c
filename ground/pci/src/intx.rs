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
