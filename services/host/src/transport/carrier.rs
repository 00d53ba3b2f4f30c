//! The memory and queues of a RoCE connection, implemented by the engine's queue pair.

use hca::engine::Engine;
use hca::provider::Provider;
use hca::remote::{AtomicOperation, QpId, Refusal as EngineRefusal, Unmoved as EngineUnmoved};
use hca::work::{Remote as EngineRemote, Status as EngineStatus};
use roce::{Atomic, Event, Memory, NoReceive, Received, ReceivedOperation, Refusal, Remote, Status, Unmoved};

/// A queue pair of the engine, during a call into its connection.
pub(super) struct Carrier<'a, P: Provider> {
    pub engine: &'a mut Engine<P>,
    pub qp: QpId,
}

fn offset(offset: u64) -> u32 {
    // Messages are at most 2^31 bytes.
    u32::try_from(offset).unwrap_or(u32::MAX)
}

fn remote(remote: Remote) -> EngineRemote {
    EngineRemote { address: remote.address, rkey: remote.rkey }
}

/// Converts a refusal. The engine has already failed the queue pair, so the connection's events for it are not passed on.
fn refusal(refusal: EngineRefusal) -> Refusal {
    match refusal {
        EngineRefusal::Access => Refusal::Access,
        EngineRefusal::Invalid => Refusal::InvalidRequest,
        EngineRefusal::Operational | EngineRefusal::NotReady { .. } => Refusal::Operation,
        // Its program has ended while packets of the peer were in flight: any HCA drops them.
        EngineRefusal::Gone => Refusal::Gone,
        EngineRefusal::NotHere => Refusal::NotHere,
    }
}

fn unmoved(unmoved: EngineUnmoved) -> Unmoved {
    match unmoved {
        EngineUnmoved::Failed(failed) => Unmoved::Failed(status(failed)),
        EngineUnmoved::NotHere => Unmoved::NotHere,
    }
}

fn status(status: EngineStatus) -> Status {
    match status {
        EngineStatus::Success => Status::Success,
        EngineStatus::LocalLength => Status::LocalLength,
        EngineStatus::LocalQpOperation => Status::LocalQpOperation,
        EngineStatus::LocalProtection => Status::LocalProtection,
        EngineStatus::Flushed => Status::Flushed,
        EngineStatus::MemoryBind => Status::MemoryBind,
        EngineStatus::BadResponse => Status::BadResponse,
        EngineStatus::LocalAccess => Status::LocalAccess,
        EngineStatus::RemoteInvalidRequest => Status::RemoteInvalidRequest,
        EngineStatus::RemoteAccess => Status::RemoteAccess,
        EngineStatus::RemoteOperation => Status::RemoteOperation,
        EngineStatus::RetryExceeded => Status::RetryExceeded,
        EngineStatus::RnrRetryExceeded => Status::RnrRetryExceeded,
        EngineStatus::General => Status::General,
    }
}

pub(super) fn engine_status(status: Status) -> EngineStatus {
    match status {
        Status::Success => EngineStatus::Success,
        Status::LocalLength => EngineStatus::LocalLength,
        Status::LocalQpOperation => EngineStatus::LocalQpOperation,
        Status::LocalProtection => EngineStatus::LocalProtection,
        Status::Flushed => EngineStatus::Flushed,
        Status::MemoryBind => EngineStatus::MemoryBind,
        Status::BadResponse => EngineStatus::BadResponse,
        Status::LocalAccess => EngineStatus::LocalAccess,
        Status::RemoteInvalidRequest => EngineStatus::RemoteInvalidRequest,
        Status::RemoteAccess => EngineStatus::RemoteAccess,
        Status::RemoteOperation => EngineStatus::RemoteOperation,
        Status::RetryExceeded => EngineStatus::RetryExceeded,
        Status::RnrRetryExceeded => EngineStatus::RnrRetryExceeded,
        Status::General => EngineStatus::General,
    }
}

impl<P: Provider> Memory for Carrier<'_, P> {
    fn gather(&mut self, token: u64, at: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        self.engine.remote_gather(self.qp, token, offset(at), into).map_err(unmoved)
    }

    fn place(&mut self, token: u64, at: u64, data: &[u8]) -> Result<(), Unmoved> {
        self.engine.remote_place(self.qp, token, offset(at), data).map_err(unmoved)
    }

    fn execute_local(&mut self, _token: u64) -> Status {
        // The engine executes local requests itself, and posts none.
        Status::General
    }

    fn complete(&mut self, token: u64, status: Status, length: u32) {
        let outcome = if status == Status::Success { Ok(length) } else { Err(engine_status(status)) };
        self.engine.remote_complete(self.qp, token, outcome);
    }

    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        self.engine.remote_receive_begin(self.qp).map_err(|refusal| match refusal {
            EngineRefusal::NotReady { .. } => NoReceive::NotPosted,
            EngineRefusal::Gone => NoReceive::Gone,
            _ => NoReceive::Unusable,
        })
    }

    fn place_receive(&mut self, at: u64, data: &[u8]) -> Result<(), Unmoved> {
        self.engine.remote_receive_data(self.qp, offset(at), data).map_err(|refusal| match refusal {
            EngineRefusal::Invalid => Status::LocalLength.into(),
            EngineRefusal::Gone => Status::Flushed.into(),
            EngineRefusal::NotHere => Unmoved::NotHere,
            _ => Status::LocalProtection.into(),
        })
    }

    fn complete_receive(&mut self, received: &Received) {
        let Received { length, immediate, invalidated, solicited, .. } = *received;
        // Fails only without a receive, which the connection has consumed before.
        let _ = match (received.operation, immediate) {
            (ReceivedOperation::WriteImmediate, Some(immediate)) => {
                self.engine.remote_write_end(self.qp, length, immediate, solicited)
            }
            _ => self.engine.remote_receive_end(self.qp, length, immediate, invalidated, solicited),
        };
    }

    fn fail_receive(&mut self, status: Status) {
        self.engine.remote_receive_fail(self.qp, engine_status(status));
    }

    fn keep_receive(&mut self) {
        // The engine keeps a receive until it is complete.
    }

    fn write(&mut self, to: Remote, length: u64, at: u64, data: &[u8]) -> Result<(), Refusal> {
        self.engine.remote_write(self.qp, remote(to), offset(length), offset(at), data).map_err(refusal)
    }

    fn read(&mut self, from: Remote, length: u64, at: u64, into: &mut [u8]) -> Result<(), Refusal> {
        self.engine.remote_read(self.qp, remote(from), offset(length), offset(at), into).map_err(refusal)
    }

    fn atomic(&mut self, at: Remote, operation: Atomic) -> Result<u64, Refusal> {
        let operation = match operation {
            Atomic::CompareSwap { compare, swap } => AtomicOperation::CompareSwap { compare, swap },
            Atomic::FetchAdd { add } => AtomicOperation::FetchAdd { add },
        };
        self.engine.remote_atomic(self.qp, remote(at), operation).map_err(refusal)
    }

    fn invalidate(&mut self, rkey: u32) -> Result<(), Refusal> {
        self.engine.remote_invalidate(self.qp, rkey).map_err(refusal)
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Established => self.engine.remote_established(self.qp),
            // No effect if the engine itself refused, and has failed the queue pair.
            Event::RequestError => self.engine.remote_violation(self.qp),
            Event::AccessError | Event::Fatal | Event::SendFailed => {}
            Event::Failed => self.engine.remote_fail(self.qp),
        }
    }
}
