//! A device's state, and its writes to guest memory, for a client that migrates the guest. This is VFIO's migration
//! protocol (version 2) and DMA logging, as vfio-user carries them (`VFIO_USER_DEVICE_FEATURE`,
//! `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE`). Sources: libvfio-user's `vfio-user.h`, Linux' `vfio.h`.
//!
//! ```text
//! source         Running ─▶ PreCopy: read data repeatedly ─▶ StopCopy: read the rest ─▶ (the client closes, or Running again)
//! destination    Resuming: write data ─▶ Stop: the state is complete and checked ─▶ Running
//! throttling     by some per cent, in PreCopy (a feature of Causeway's own)
//! post-copy      in Resuming: only pages in a bitmap are present, until all are (a feature of Causeway's own)
//! DMA logging    start ─▶ report repeatedly: pages written since the last report ─▶ stop
//! ```
//! Reading data: a reply that is shorter than the request ends the data that is available now. In PreCopy more follows
//! after the device has changed. In StopCopy it is the end.

use std::io;
use std::os::fd::OwnedFd;

/// Migration state of a device (`vfio_device_mig_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum DeviceState {
    /// It has failed. Only a reset or the end of the connection recovers.
    Error = 0,
    /// It is stopped.
    Stop = 1,
    /// It runs.
    #[default]
    Running = 2,
    /// It is stopped, and its state can be read.
    StopCopy = 3,
    /// It is stopped, and its state is written.
    Resuming = 4,
    /// It runs, and its state can be read.
    PreCopy = 6,
}

impl DeviceState {
    /// Converts the protocol's number; `None` for states that aren't supported.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Self> {
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming, Self::PreCopy]
            .into_iter()
            .find(|state| *state as u32 == value)
    }
}

/// Guest memory with not-present pages, set while a device's state is written.
#[derive(Debug)]
pub struct LateMemory {
    /// Mapped ranges: address, length in bytes, offset of its bitmap in the file. Each is a complete mapping.
    pub ranges: Vec<(u64, u64, u64)>,
    /// The bitmap of present pages. Client and device agree on its format.
    pub bitmap: OwnedFd,
    /// A Unix stream socket on which the device requests pages.
    pub wishes: OwnedFd,
    /// An eventfd that signals the arrival of requested pages.
    pub arrivals: OwnedFd,
}

/// A device that can migrate. Calls follow the rules of [`crate::device::Device`].
pub trait Migration {
    /// Enters a state, and returns after the transition is complete.
    ///
    /// # Errors
    /// The transition is invalid (EINVAL), or the device can't enter the state now.
    fn set_state(&self, state: DeviceState) -> io::Result<()>;
    /// Returns the current state.
    fn state(&self) -> DeviceState;
    /// Returns the next bytes of the state, at most `most`. Fewer bytes mean that no more are available now.
    ///
    /// # Errors
    /// The device isn't in PreCopy or StopCopy, or a part can't be saved.
    fn read_data(&self, most: usize) -> io::Result<Vec<u8>>;
    /// Accepts bytes of a state in the order in which they were read, in pieces of any size. They are hostile input.
    ///
    /// # Errors
    /// The device isn't in Resuming, or the bytes aren't such a device's state.
    fn write_data(&self, data: &[u8]) -> io::Result<()>;
    /// Starts logging the pages of guest memory that the device writes.
    ///
    /// # Errors
    /// The device can't log.
    fn start_logging(&self) -> io::Result<()>;
    /// Stops logging.
    ///
    /// # Errors
    /// The device can't stop logging.
    fn stop_logging(&self) -> io::Result<()>;
    /// Throttles other hosts' writes to guest memory through the device, by this per cent (0 to 99) of their
    /// unthrottled rate. Used if the guest's memory changes faster than it can be copied. Ends with the state PreCopy.
    ///
    /// # Errors
    /// ENOTTY if the device doesn't support it.
    fn hold_back(&self, percent: u8) -> io::Result<()> {
        let _ = percent;
        Err(rustix::io::Errno::NOTTY.into())
    }
    /// Starts post-copy: the device accesses only present pages, as `late` says.
    ///
    /// # Errors
    /// ENOTTY if the device doesn't support it, or the cause.
    fn late_memory(&self, late: LateMemory) -> io::Result<()> {
        drop(late);
        Err(rustix::io::Errno::NOTTY.into())
    }
    /// Returns and clears the dirty pages of 4096 bytes: a bit each, with the lowest bit of the first word for the page
    /// at `address`.
    ///
    /// # Errors
    /// The range is invalid. It must consist of whole pages of one mapping, and start at a page of the mapping whose
    /// number is a multiple of 64.
    fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>>;
}
