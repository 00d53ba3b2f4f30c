//! Interface of a host's RDMA device, for transport `verbs`. Its numbers of queue pairs and keys differ from the guest's. libibverbs
//! implements it; [`Transports::use_rnic`](crate::transport::Transports::use_rnic) accepts any other implementation.

use std::os::fd::BorrowedFd;

use dma::Alias;
use hca::attributes::Access;
use hca::work::{SgeList, Status};

/// Why a host's RDMA device can't be used, or refuses.
#[derive(Debug, thiserror::Error)]
pub enum RnicError {
    /// The device refused an operation.
    #[error("The host's RDMA device refuses to {what}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// The error.
        #[source]
        source: std::io::Error,
    },
    /// The object doesn't exist (any more).
    #[error("The host's RDMA device has no {0} of that name; this is a bug")]
    Gone(&'static str),
}

/// A device, and its address.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RnicInfo {
    /// The device's name, as `ibv_devices` prints it.
    pub device: String,
    /// Port number, from 1 on.
    pub port: u8,
    /// Address by which peers reach it.
    pub address: std::net::Ipv6Addr,
    /// Path MTU as its verbs code, 1 to 5 for 256 to 4096 bytes.
    pub mtu: u8,
    /// Limit of send requests of a queue pair.
    pub sends: u32,
    /// Limit of receives of a queue pair.
    pub receives: u32,
    /// Limit of READs and atomics outstanding as initiator.
    pub reads: u8,
    /// Limit of READs and atomics outstanding as responder.
    pub served_reads: u8,
}

/// A protection domain of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostPd(pub u32);
/// A registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostMr(pub u32);
/// A queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostQp(pub u32);

/// A registration and its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// The registration.
    pub mr: HostMr,
    /// Key for local scatter-gather elements.
    pub lkey: u32,
    /// Key for the other end's requests.
    pub rkey: u32,
}

/// The other end of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// GID of its device.
    pub gid: [u8; 16],
    /// Number of its queue pair.
    pub number: u32,
    /// First PSN that it sends.
    pub psn: u32,
    /// Path MTU as a verbs code.
    pub mtu: u8,
}

/// Attributes of a queue pair that receives (RTR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiving {
    /// The other end.
    pub end: End,
    /// Path MTU as a verbs code: the smaller of both ends'.
    pub mtu: u8,
    /// Access rights of the other end.
    pub access: Access,
    /// Limit of READs and atomics outstanding as responder.
    pub served_reads: u8,
    /// Time after which the other end repeats a request without a receive, as its verbs code.
    pub min_rnr_timer: u8,
    /// Traffic class of sent packets.
    pub traffic_class: u8,
    /// Hop limit of sent packets.
    pub hop_limit: u8,
}

/// Attributes of a queue pair that sends (RTS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sending {
    /// First PSN of this end.
    pub psn: u32,
    /// Time to wait for an acknowledgment, as its verbs code.
    pub timeout: u8,
    /// Limit of retries without an acknowledgment.
    pub retry_count: u8,
    /// Limit of retries at a peer without a receive; 7: no limit.
    pub rnr_retry: u8,
    /// Limit of READs and atomics outstanding as initiator.
    pub reads: u8,
}

/// Operation of a send request, in the device's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The fields have the names of the verbs' work requests.
pub enum Operation {
    /// Consumes a receive of the other end.
    Send { immediate: Option<[u8; 4]> },
    /// Writes the other end's memory; with immediate data it also consumes a receive.
    Write { address: u64, rkey: u32, immediate: Option<[u8; 4]> },
    /// Reads the other end's memory.
    Read { address: u64, rkey: u32 },
    /// Replaces an aligned word of 8 bytes by `swap` if it is `compare`; returns the previous value.
    CompareSwap { address: u64, rkey: u32, compare: u64, swap: u64 },
    /// Adds to an aligned word of 8 bytes; returns the previous value.
    FetchAdd { address: u64, rkey: u32, add: u64 },
}

/// A send request in the device's numbers. Every one produces a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRequest {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What the request does.
    pub operation: Operation,
    /// Whether it waits for the completion of earlier READs and atomics.
    pub fence: bool,
    /// Whether the other end's completion is a solicited event.
    pub solicited: bool,
    /// Scatter-gather elements with the device's keys.
    pub sges: SgeList,
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCompletion {
    /// The work request's.
    pub wr_id: u64,
    /// Success, or why the request failed.
    pub status: Status,
    /// Length of the message, for a receive; bytes.
    pub length: u32,
    /// Whether a WRITE with immediate data consumed the receive.
    pub write: bool,
    /// Immediate data, for a receive.
    pub immediate: Option<[u8; 4]>,
}

/// Why a queue pair failed, if no completion has the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostEvent {
    /// The other end sent an invalid request.
    Request,
    /// The other end sent a request without permission.
    Access,
    /// An error of the device itself.
    Fatal,
}

/// A host's RDMA device. One thread uses it. Dropping it releases all of its objects.
///
/// A method fails with [`RnicError::Refused`] if the device refuses, and with [`RnicError::Gone`] if it has no object of that name.
pub trait Rnic: Send {
    /// Name, address and limits of the device.
    fn info(&self) -> RnicInfo;
    /// Creates a protection domain.
    fn allocate_pd(&mut self) -> Result<HostPd, RnicError>;
    /// Destroys a protection domain, which has no registrations and queue pairs any more.
    fn free_pd(&mut self, pd: HostPd);
    /// Registers memory, whose first byte has the address `start` in requests. The device pins the pages.
    fn register(
        &mut self,
        pd: HostPd,
        memory: Alias,
        start: u64,
        access: Access,
    ) -> Result<Registered, RnicError>;
    /// Deregisters memory. The device can't access it any more when this returns.
    fn deregister(&mut self, mr: HostMr);
    /// Creates a reliable connection in INIT; returns its handle and number. The caller posts no more requests than [`RnicInfo`] permits.
    fn create_qp(&mut self, pd: HostPd, access: Access) -> Result<(HostQp, u32), RnicError>;
    /// Changes a queue pair from INIT to RTR: it receives.
    fn receive_from(&mut self, qp: HostQp, with: &Receiving) -> Result<(), RnicError>;
    /// Changes a queue pair from RTR to RTS: it sends, too.
    fn send_to(&mut self, qp: HostQp, with: &Sending) -> Result<(), RnicError>;
    /// Destroys a queue pair. It accesses no memory any more when this returns, but completions of it may still come.
    fn destroy_qp(&mut self, qp: HostQp);
    /// Posts a send request.
    fn post_send(&mut self, qp: HostQp, request: &HostRequest) -> Result<(), RnicError>;
    /// Posts a receive, for the memory in `sges`.
    fn post_receive(&mut self, qp: HostQp, wr_id: u64, sges: &SgeList) -> Result<(), RnicError>;
    /// Appends completions, a bounded number.
    fn poll(&mut self, into: &mut Vec<HostCompletion>);
    /// Appends events of queue pairs, a bounded number.
    fn events(&mut self, into: &mut Vec<(HostQp, HostEvent)>);
    /// Arms the next completion to make a descriptor readable. Earlier completions may be missed: poll again afterwards.
    fn arm(&mut self);
    /// Descriptors that are readable on completions, and on events.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}
