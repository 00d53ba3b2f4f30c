//! Offsets and bits of PCI configuration space (PCI Local Bus 3.0 chapter 6, PCI Express Base 5.0 chapter 7).

/// Size of a function's configuration space with ECAM, in bytes.
pub const CONFIG_SPACE_SIZE: usize = 4096;
/// The part that 0xCF8/0xCFC reaches, with the standard capabilities.
pub const LEGACY_CONFIG_SPACE_SIZE: usize = 256;

/// Vendor ID, 16 bits.
pub const VENDOR_ID: u16 = 0x00;
/// Device ID, 16 bits.
pub const DEVICE_ID: u16 = 0x02;
/// Command, 16 bits.
pub const COMMAND: u16 = 0x04;
/// Status, 16 bits.
pub const STATUS: u16 = 0x06;
/// Revision ID, 8 bits. The class code is in the three bytes above.
pub const REVISION_ID: u16 = 0x08;
/// Programming interface, 8 bits.
pub const CLASS_INTERFACE: u16 = 0x09;
/// Sub-class, 8 bits.
pub const CLASS_SUB: u16 = 0x0A;
/// Base class, 8 bits.
pub const CLASS_BASE: u16 = 0x0B;
/// Cache line size, 8 bits: writable, without effect.
pub const CACHE_LINE_SIZE: u16 = 0x0C;
/// Header type, 8 bits.
pub const HEADER_TYPE: u16 = 0x0E;
/// First base address register.
pub const BAR0: u16 = 0x10;
/// Subsystem vendor ID, 16 bits.
pub const SUBSYSTEM_VENDOR_ID: u16 = 0x2C;
/// Subsystem ID, 16 bits.
pub const SUBSYSTEM_ID: u16 = 0x2E;
/// Pointer to the first standard capability, 8 bits.
pub const CAPABILITY_POINTER: u16 = 0x34;
/// Interrupt line, 8 bits: a scratch register for firmware.
pub const INTERRUPT_LINE: u16 = 0x3C;
/// Interrupt pin, 8 bits: 0 none, 1 to 4 for INTA to INTD.
pub const INTERRUPT_PIN: u16 = 0x3D;
/// First possible offset of standard capabilities.
pub const FIRST_CAPABILITY: u16 = 0x40;
/// Offset of the first extended capability.
pub const FIRST_EXTENDED_CAPABILITY: u16 = 0x100;

/// Command: decode I/O BARs.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command: decode memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may make memory accesses and send MSIs.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command: parity error response.
pub const COMMAND_PARITY: u16 = 1 << 6;
/// Command: SERR# enable.
pub const COMMAND_SERR: u16 = 1 << 8;
/// Command: INTx assertion is disabled.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;

/// Status: an INTx interrupt is pending in the function, whether or not it is disabled.
pub const STATUS_INTERRUPT: u16 = 1 << 3;
/// Status: there is a capability list.
pub const STATUS_CAPABILITY_LIST: u16 = 1 << 4;
/// Status: the error bits, write 1 to clear.
pub const STATUS_ERRORS: u16 = 0xF900;

/// Header type: the slot has more functions than 0.
pub const HEADER_MULTIFUNCTION: u8 = 1 << 7;

/// BAR: decodes I/O ports.
pub const BAR_IO: u32 = 1 << 0;
/// BAR: memory, 64 bits wide.
pub const BAR_MEMORY_64: u32 = 0b10 << 1;
/// BAR: prefetchable memory.
pub const BAR_PREFETCHABLE: u32 = 1 << 3;
/// Flag bits of an I/O BAR.
pub const BAR_IO_FLAGS: u32 = 0x3;
/// Flag bits of a memory BAR.
pub const BAR_MEMORY_FLAGS: u32 = 0xF;

/// Capability ID: power management.
pub const CAP_POWER_MANAGEMENT: u8 = 0x01;
/// Capability ID: vendor-specific.
pub const CAP_VENDOR_SPECIFIC: u8 = 0x09;
/// Capability ID: PCI Express.
pub const CAP_PCI_EXPRESS: u8 = 0x10;
/// Capability ID: MSI-X.
pub const CAP_MSIX: u8 = 0x11;

/// MSI-X message control: all vectors of the function are masked.
pub const MSIX_FUNCTION_MASK: u16 = 1 << 14;
/// MSI-X message control: MSI-X is enabled.
pub const MSIX_ENABLE: u16 = 1 << 15;

/// Power management control/status (capability + 4): power state, 0 for D0 and 3 for D3hot.
pub const PM_STATE: u16 = 0x3;
