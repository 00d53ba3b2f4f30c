//! Where devices' threads are started.
//!
//! A driver starts its device with a register write, so the call comes from a vCPU thread. A thread created there would inherit that
//! thread's seccomp filter, which permits less than devices need. Otherwise the filter would have to permit vCPUs what only devices need.
//! So activation runs on a thread that the monitor chooses.

use std::sync::{Arc, Mutex, mpsc};

use crate::device::{Activation, DeviceError, VirtioDevice};

/// Runs a job on another thread, whose sandbox suits threads of devices.
pub trait DeviceThreads: Send + Sync {
    /// Returns after `job` has run. A job that can't be run is dropped.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// A device that the transport shares with the activating thread; never contended.
pub(super) type SharedDevice = Arc<Mutex<Box<dyn VirtioDevice>>>;

/// Activates `device` through `threads`, or on the calling thread without them.
pub(super) fn activate(
    threads: Option<&dyn DeviceThreads>,
    device: &SharedDevice,
    activation: Activation,
) -> Result<(), DeviceError> {
    let Some(threads) = threads else { return super::lock(device).activate(activation) };
    let (sender, receiver) = mpsc::sync_channel(1);
    let target = Arc::clone(device);
    threads.run(Box::new(move || {
        // The receiver waits below.
        let _ = sender.send(super::lock(&target).activate(activation));
    }));
    receiver.recv().unwrap_or_else(|_| {
        Err(DeviceError::Host {
            name: super::lock(device).name().to_owned(),
            what: "be activated on the monitor's device thread".to_owned(),
            source: std::io::Error::other("the thread has ended"),
        })
    })
}
