//! The device context: stopping, saving and restoring, as sequences of steps.

use super::{Cond, Expr, Reg, State};

/// One step of a sequence. Registers are reached in whatever bank they lie.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// Resets the device.
    Reset,
    /// Writes a register of the device.
    Write(Reg, Expr),
    /// Reads a register of the device and remembers it.
    Read(Reg),
    /// The model enters a state.
    Enter(State),
    /// Moves the device's ring pointers, which can't be written, by frames that it sends to itself.
    FastForward,
    /// Reads a register until these bits (mask) have this value, at most so many times, and goes on: gives the device the time that it
    /// may need, whether it tells when it is done or not (QEMU's NE2000 doesn't).
    Await(Reg, u32, u32, u32),
    /// Takes the causes that the device reports into the virtual status.
    Harvest,
    /// All of these.
    All(&'static [Step]),
    /// Only if the condition holds.
    If(Cond, &'static [Step]),
    /// Writes what the guest has written into a table of registers since its device was reset.
    Table(Reg),
    /// Copies live memory of the card to the context.
    SaveMemory,
    /// Copies memory of the context to the card, and zeroes what else the previous guest may have left there.
    RestoreMemory,
    /// Re-checks every window of the incoming guest that the device will use, against that guest's memory.
    Recheck,
    /// Reads a register of the device: the model takes the value as if the guest had written it, checks included.
    Learn(Reg),
    /// The same for the words of a table that aren't zero.
    LearnTable(Reg),
}

/// A run of pages of card memory that is saved.
#[derive(Debug, Clone, Copy)]
pub enum Pages {
    /// From the first page up to but not including the second, through the end of the ring `[start, stop)` if it is reached.
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
    /// Low and high byte of the address of a transfer.
    pub address: [Reg; 2],
    /// Low and high byte of the number of bytes of a transfer.
    pub count: [Reg; 2],
    /// The register that starts a transfer, with the values for reading, writing, and ending: all with the device stopped.
    pub command: (Reg, u32, u32, u32),
    /// The data port.
    pub data: Reg,
    /// The device's own pointer into the ring: what it moved over was written.
    pub current: Reg,
    /// Pages that belong to the context.
    pub live: &'static [Pages],
}

/// Ring pointers of a device that can be read but not written, and what a frame to itself needs.
#[derive(Debug, Clone, Copy)]
pub struct Pointers {
    /// The position in the receive ring at which the device writes next.
    pub position: Reg,
    /// The number of the descriptor that the device sends next.
    pub next: Reg,
    /// Addresses and command registers of the descriptors.
    pub descriptors: &'static [(Reg, Reg)],
    /// Bits of a command register that say that the frame was sent.
    pub sent: u32,
    /// Bytes of the receive ring.
    pub ring: Expr,
    /// The register that tells the device where the receive ring is.
    pub base: Reg,
    /// The register by which the driver says how far it has read, and what it is behind the position.
    pub read: (Reg, u32),
    /// Receive and transmit configuration.
    pub config: (Reg, Reg),
    /// Value of the transmit configuration for sending to itself.
    pub loopback: u32,
    /// Bits of the receive configuration: accept broadcasts; accept the station address.
    pub accept: (u32, u32),
    /// The station address that the device has meanwhile.
    pub station: [u8; 6],
    /// The register that starts receiver and transmitter, and its value for both.
    pub enable: (Reg, u32),
    /// The part of it that starts the receiver.
    pub receives: u32,
    /// Bytes that the ring needs beyond a frame, and to what the sum is rounded.
    pub overhead: (u32, u32),
    /// Status bit that makes the driver start its ring anew, when the pointers can't be moved.
    pub restart: u32,
}

/// How the device is given from one guest to another.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Brings the model up to date before it is asked whether the device is reusable.
    pub settle: &'static [Step],
    /// Stops the device at a packet boundary; it is reusable already, or the monitor forces it.
    pub freeze: &'static [Step],
    /// Saves what the model doesn't know from the requests it saw.
    pub save: &'static [Step],
    /// Brings the device to the context's state, DMA enables last.
    pub restore: &'static [Step],
    /// After `restore`, for a guest that drives the device without its model: the guest's own interrupt mask, closed before it is opened: a line that is
    /// up falls and rises.
    pub open: &'static [Step],
    /// Brings a new model to what such a guest has made of the device. Nothing, where no access comes past the monitor, which keeps the model up to
    /// date meanwhile.
    pub learn: &'static [Step],
    /// Memory on the card.
    pub memory: Option<Memory>,
    /// Ring pointers.
    pub pointers: Option<Pointers>,
}
