//! Verbs objects. Plain data: they refer to each other by handle, and by a stamp that is never reused.

mod cq;
mod device;
mod elsewhere;
mod marks;
mod qp;
mod quiet;
mod wait_list;

pub(crate) use cq::{Cq, NOT_NOTIFIED};
pub(crate) use device::{Context, Device, GidEntry, Pd, Srq};
pub(crate) use elsewhere::{Elsewhere, Outstanding};
pub(crate) use marks::Marks;
pub(crate) use qp::{Current, Path, Progress, Qp, Wait};
pub(crate) use quiet::QuietTable;
pub(crate) use wait_list::WaitList;

/// An object of a device. Handles are reused, stamps are not, so a reference to a destroyed object finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ObjectRef {
    pub handle: u32,
    pub stamp: u64,
}

/// A queue pair of any device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QpRef {
    pub device: u32,
    pub handle: u32,
    pub stamp: u64,
}

/// A completion queue of any device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CqRef {
    pub device: u32,
    pub handle: u32,
    pub stamp: u64,
}
