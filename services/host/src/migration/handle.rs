//! Input of the migration thread: what other threads report to it.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};
use nomad::{Epoch, HostId, Incarnation, Message, MigrationId, VmId};
use tokio::sync::OwnedSemaphorePermit;

use super::phases::Phases;

/// Input of the thread.
#[derive(Debug)]
pub(super) enum Input {
    /// The service has registered this host with that incarnation, and receives its messages.
    Joined { host: HostId, incarnation: Incarnation, switch_ms: u32 },
    /// A message for this host, and the room that it takes here.
    Message(Message, Option<OwnedSemaphorePermit>),
    /// A VM runs here, as the service has registered it.
    Started { vm: VmId, epoch: Epoch, after: MigrationId },
    /// A VM of this host has ended.
    Ended { vm: VmId },
    /// A monitor's report on its VM.
    Reported { vm: String, what: MonitorReport },
    /// The daemon ends.
    Stop,
}

/// A monitor's report on its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MonitorReport {
    /// At the source: what is left of memory and state fits into the pause.
    Converged,
    /// At the source: vCPUs and devices are stopped.
    Stopped,
    /// At the destination: all is there, and checked.
    Arrived,
    /// At either: the monitor failed or gave up.
    Broken,
}

/// Sends input to the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MigrationHandle {
    inputs: Sender<Input>,
    phases: Arc<Phases>,
}

impl MigrationHandle {
    /// Returns the input of a thread to be started, and the thread's end of it.
    pub(super) fn new() -> (Self, Receiver<Input>) {
        let (inputs, receiver) = unbounded();
        (Self { inputs, phases: Arc::new(Phases::default()) }, receiver)
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.send(Input::Stop);
    }

    fn send(&self, input: Input) {
        // At the daemon's end the thread is gone.
        let _ = self.inputs.send(input);
    }

    /// The service takes this host for that start of it, and messages reach it.
    pub fn joined(&self, host: u32, incarnation: u64, switch_ms: u32) {
        self.send(Input::Joined { host: HostId(host), incarnation: Incarnation(incarnation), switch_ms });
    }

    /// A message for this host, and the room that it takes in this thread's queue until it is taken.
    pub fn message(&self, message: Message, room: Option<OwnedSemaphorePermit>) {
        self.send(Input::Message(message, room));
    }

    /// A VM runs here, as the service has registered it; migrations up to the number `after` don't concern it any more.
    pub fn started(&self, vm: u32, epoch: u64, after: u64) {
        self.send(Input::Started { vm: VmId(vm), epoch: Epoch(epoch), after: MigrationId(after) });
    }

    /// A VM of this host has ended.
    pub fn ended(&self, vm: u32) {
        self.send(Input::Ended { vm: VmId(vm) });
    }

    /// A monitor's report on its VM.
    pub fn report(&self, vm: &str, what: MonitorReport) {
        self.send(Input::Reported { vm: vm.to_owned(), what });
    }

    /// How far migrations of this host's VMs are.
    #[must_use]
    pub fn phases(&self) -> &Arc<Phases> {
        &self.phases
    }
}
