//! The device context: sequences of steps that stop, save and restore a device.

use super::{Cond, Expr, Reg, State};

/// A step of a sequence. A step on a banked register selects its bank.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// Resets the device.
    Reset,
    /// Writes a device register.
    Write(Reg, Expr),
    /// Reads a device register and stores its value in the model.
    Read(Reg),
    /// The model enters a state.
    Enter(State),
    /// Moves the device's ring pointers, which can't be written, by frames that the device sends to itself.
    FastForward,
    /// Reads a register until its bits (second value: mask) have the third value, at most as often as the fourth says.
    /// Then continues in any case: not every device reports completion (QEMU's NE2000 doesn't).
    Await(Reg, u32, u32, u32),
    /// Moves the causes that the device reports into the virtual status.
    Harvest,
    /// Executes all of these.
    All(&'static [Step]),
    /// Executes the steps only if the condition holds.
    If(Cond, &'static [Step]),
    /// Writes a table of registers as the guest has written it since its device was reset.
    Table(Reg),
    /// Copies the live memory of the card to the context.
    SaveMemory,
    /// Copies the context's memory to the card, and zeroes other data that the previous guest may have left there.
    RestoreMemory,
    /// Checks every window that the device will use against the incoming guest's memory.
    Recheck,
    /// Reads a device register and feeds it to the model as if the guest had written it, checks included.
    Learn(Reg),
    /// Does the same for the nonzero words of a table.
    LearnTable(Reg),
}

/// A range of pages of card memory that is saved.
#[derive(Debug, Clone, Copy)]
pub enum Pages {
    /// From the first page up to but not including the second, with wraparound in the ring `[start, stop)`.
    Ring {
        /// First page.
        from: Expr,
        /// Page after the last one.
        to: Expr,
        /// First page of the ring.
        start: Expr,
        /// Page after the ring.
        stop: Expr,
    },
    /// All pages that the guest wrote outside the ring.
    Written,
}

/// Memory on the card, reached through a data port.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// First byte.
    pub from: u32,
    /// Byte after the last one.
    pub to: u32,
    /// Bytes per page.
    pub page: u32,
    /// Registers of the low and high byte of a transfer's address.
    pub address: [Reg; 2],
    /// Registers of the low and high byte of a transfer's length.
    pub count: [Reg; 2],
    /// The register that starts a transfer, and its values for read, write and end, all with the device stopped.
    pub command: (Reg, u32, u32, u32),
    /// The data port.
    pub data: Reg,
    /// The device's own pointer into the ring: pages that it has passed were written.
    pub current: Reg,
    /// Pages that belong to the context.
    pub live: &'static [Pages],
}

/// Ring pointers of a device that can be read but not written, and the parameters of a frame that the device sends to
/// itself.
#[derive(Debug, Clone, Copy)]
pub struct Pointers {
    /// The position in the receive ring at which the device writes next.
    pub position: Reg,
    /// The number of the descriptor that the device sends next.
    pub next: Reg,
    /// Address and command register of each descriptor.
    pub descriptors: &'static [(Reg, Reg)],
    /// Bits of a command register that are set once the frame was sent.
    pub sent: u32,
    /// Length of the receive ring in bytes.
    pub ring: Expr,
    /// The register with the receive ring's address.
    pub base: Reg,
    /// The register with the driver's read position, and its constant offset from that position.
    pub read: (Reg, u32),
    /// Registers of receive and transmit configuration.
    pub config: (Reg, Reg),
    /// Value of the transmit configuration for loopback.
    pub loopback: u32,
    /// Bits of the receive configuration: accept broadcast; accept the station address.
    pub accept: (u32, u32),
    /// The device's station address during loopback.
    pub station: [u8; 6],
    /// The register that enables receiver and transmitter, and its value for both.
    pub enable: (Reg, u32),
    /// The part of that value that enables the receiver.
    pub receives: u32,
    /// Bytes that the ring needs beyond a frame, and the alignment of the sum.
    pub overhead: (u32, u32),
    /// Status bits that make the driver restart its ring if the pointers can't be moved.
    pub restart: u32,
}

/// The hand-off of a device between guests.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Updates the model before it is asked for a quiescent point.
    pub settle: &'static [Step],
    /// Stops the device at a packet boundary. The device is quiescent, or the monitor forces the stop.
    pub freeze: &'static [Step],
    /// Saves the state that the model doesn't know from the guest's requests.
    pub save: &'static [Step],
    /// Restores the context on the device; enables DMA last.
    pub restore: &'static [Step],
    /// Follows `restore` for a guest in passthrough: sets the guest's own interrupt mask. It masks before it unmasks,
    /// so that an asserted line falls and rises.
    pub open: &'static [Step],
    /// Updates a new model from the registers of a guest that was in passthrough. Empty if the monitor sees every
    /// access and keeps the model up to date.
    pub learn: &'static [Step],
    /// Memory on the card.
    pub memory: Option<Memory>,
    /// Ring pointers.
    pub pointers: Option<Pointers>,
}
