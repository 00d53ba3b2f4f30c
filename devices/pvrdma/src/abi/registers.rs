//! Registers in BAR1 (Linux `pvrdma_dev_api.h`). All registers are 32 bits wide.

/// The interface version that this device implements.
pub const INTERFACE_VERSION: u32 = 20;

/// R: interface version.
pub const VERSION: u64 = 0x00;
/// W: low half of the guest address of the device shared region.
pub const DSR_LOW: u64 = 0x04;
/// W: high half; written last. The capabilities are in the region when the write returns.
pub const DSR_HIGH: u64 = 0x08;
/// W: a [`control`] value.
pub const CONTROL: u64 = 0x0C;
/// W: 0; a command is in the command slot.
pub const REQUEST: u64 = 0x10;
/// R: 0 when the last control or request was accepted and succeeded.
pub const ERROR: u64 = 0x14;
/// R: interrupt cause; the driver reads it in INTx and MSI mode only.
pub const INTERRUPT_CAUSE: u64 = 0x18;
/// W: 0 enables all interrupts, all ones masks them.
pub const INTERRUPT_MASK: u64 = 0x1C;
/// Not used by Linux.
pub const MAC_LOW: u64 = 0x20;
/// Not used by Linux.
pub const MAC_HIGH: u64 = 0x24;

/// Values of [`CONTROL`].
pub mod control {
    /// The driver has initialised everything.
    pub const ACTIVATE: u32 = 0;
    /// The paired network device came up.
    pub const UNQUIESCE: u32 = 1;
    /// The driver is being removed.
    pub const RESET: u32 = 2;
}

/// Cause: a response was written.
pub const CAUSE_RESPONSE: u32 = 1;
