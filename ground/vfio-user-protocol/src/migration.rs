//! A device's state, and what it writes into guest memory, for a client that moves the guest: VFIO's migration protocol (version 2) and DMA
//! logging, as vfio-user carries them (`VFIO_USER_DEVICE_FEATURE`, `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE`; facts: libvfio-user's
//! `vfio-user.h`, Linux' `vfio.h`).
//!
//! ```text
//! source         Running ─▶ PreCopy: data is read, again and again ─▶ StopCopy: the rest ─▶ (the client goes, or Running again)
//! destination    Resuming: data is written ─▶ Stop: it is whole, and checked ─▶ Running
//! holding back   by so many per cent, in PreCopy (a feature of Causeway's own)
//! late memory    in Resuming: of these ranges only pages that a bitmap names are there, until all are (a feature of Causeway's own)
//! DMA logging    start ─▶ report, again and again: pages written since the last report ─▶ stop
//! ```
//! Reading data: an answer that is shorter than what was asked for ends what there is at present. In PreCopy more comes when the device has
//! changed; in StopCopy it is the end.

use std::io;
use std::os::fd::OwnedFd;

/// What a device does (`vfio_device_mig_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum DeviceState {
    /// It has failed: only a reset or the connection's end helps.
    Error = 0,
    /// It stands still.
    Stop = 1,
    /// It works.
    #[default]
    Running = 2,
    /// It stands still, and its state can be read.
    StopCopy = 3,
    /// It stands still, and its state is written.
    Resuming = 4,
    /// It works, and its state can be read.
    PreCopy = 6,
}

impl DeviceState {
    /// From the protocol's number; `None` for states that this protocol's users don't have.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Self> {
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming, Self::PreCopy]
            .into_iter()
            .find(|state| *state as u32 == value)
    }
}

/// Guest memory that is still to come, told when a device's state is being written.
#[derive(Debug)]
pub struct LateMemory {
    /// Mapped ranges, each by its address and bytes, and where its bitmap begins in the file. All whole ones.
    pub ranges: Vec<(u64, u64, u64)>,
    /// Which pages are there; what its bits are is the client's and the device's to know.
    pub bitmap: OwnedFd,
    /// A Unix socket (stream) by which pages are asked for.
    pub wishes: OwnedFd,
    /// An eventfd that counts up when pages have come that were asked for.
    pub arrivals: OwnedFd,
}

/// A device whose state can be handed out and taken. Calls come as those of [`crate::device::Device`] do.
pub trait Migration {
    /// Enters a state; what that means has been done when this returns.
    ///
    /// # Errors
    /// When the state can't follow the present one (EINVAL), or the device can't be so now.
    fn set_state(&self, state: DeviceState) -> io::Result<()>;
    /// The present state.
    fn state(&self) -> DeviceState;
    /// The next bytes of its state, at most `most`. Fewer: there is no more at present.
    ///
    /// # Errors
    /// When it isn't in PreCopy or StopCopy, or part of it can't be saved.
    fn read_data(&self, most: usize) -> io::Result<Vec<u8>>;
    /// Bytes of a state, in the order in which they were read; cut anywhere. They may come from anywhere.
    ///
    /// # Errors
    /// When it isn't in Resuming, or they aren't such a device's state.
    fn write_data(&self, data: &[u8]) -> io::Result<()>;
    /// Notes from now on which pages of guest memory the device writes.
    ///
    /// # Errors
    /// When it can't.
    fn start_logging(&self) -> io::Result<()>;
    /// No more.
    ///
    /// # Errors
    /// When it can't be told.
    fn stop_logging(&self) -> io::Result<()>;
    /// What others write into guest memory by the device is to become less, by so many per cent (0 to 99) of what they wrote before they were held
    /// back: the guest's memory changes faster than it can be copied. Ends with the state PreCopy.
    ///
    /// # Errors
    /// ENOTTY where the device has no way to do so.
    fn hold_back(&self, percent: u8) -> io::Result<()> {
        let _ = percent;
        Err(rustix::io::Errno::NOTTY.into())
    }
    /// Part of the guest's memory is still to come, as `late` says: the device touches only what is there.
    ///
    /// # Errors
    /// ENOTTY where the device can't do without, or the reason.
    fn late_memory(&self, late: LateMemory) -> io::Result<()> {
        drop(late);
        Err(rustix::io::Errno::NOTTY.into())
    }
    /// Takes the pages of 4096 bytes that were written since the last call: a bit each, the lowest of the first word for the page at `address`.
    ///
    /// # Errors
    /// When the range isn't one that can be asked for: whole pages of one mapping, beginning with a 64th page of it.
    fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>>;
}
