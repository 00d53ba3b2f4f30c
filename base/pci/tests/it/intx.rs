//! A function's INTx output: the wire follows status, disable bit and MSI-X.

use pci::config::{CapabilityBuilder, ConfigSpace, Identity, InterruptPin};
use pci::interrupt::IntxLine as _;
use pci::intx::IntxPin;
use pci::msix::MsixLayout;
use pci::registers::{CAP_MSIX, COMMAND, COMMAND_INTX_DISABLE, STATUS, STATUS_INTERRUPT};
use pci_testbed::FakeLine;

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
